"""Vecchia approximations of Gaussian processes, with global inducing points or without."""
