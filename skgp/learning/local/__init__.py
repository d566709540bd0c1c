"""Learning of sparse-within-sparse Gaussian processes, whose rows see the nearest points."""
