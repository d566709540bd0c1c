"""Mixtures of exact Gaussian processes over samples of their hyper-parameters."""
