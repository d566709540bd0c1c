"""Laplace's approximation of a classifier: Newton's method, covariances, what is left to choose."""
