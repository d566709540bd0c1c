"""Gaussian process regression with a posterior over the hyper-parameters."""
