"""Learning of sparse Gaussian processes: q(u), inducing points and hyper-parameters."""
