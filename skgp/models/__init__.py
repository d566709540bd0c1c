"""One module (or folder) a paper, in torch; kernels and likelihoods come as arguments."""
