"""One module a paper, in torch; kernels and likelihoods come as arguments."""
