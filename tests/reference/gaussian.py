"""Gaussian laws by dense matrices: f given observations, each observation given others."""

import numpy as np


def condition(C, cross, prior, y):
    """Mean (m,) and covariance (m, m) of f given y ~ N(0, C).

    `cross` (m, n) is the covariance of f and y, `prior` (m, m) that of f.
    """
    gain = np.linalg.solve(C, cross.T).T
    return gain @ y, prior - gain @ cross.T


def process(kernel, X, y, noise, X_new):
    """The same of f at other inputs; `noise` is a variance, or one a row, and not in the kernel."""
    C = kernel(X) + noise * np.eye(len(X))
    return condition(C, kernel(X_new, X), kernel(X_new), y)


def log_density(C, y):
    """log N(y; 0, C), in nats."""
    return -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])


def left_out(K, noise, y, row, others=None):
    """Mean and variance of f at a row given observations y of others, by default of all others."""
    others = np.delete(np.arange(len(K)), row) if others is None else others
    C = K[np.ix_(others, others)] + np.diag(np.broadcast_to(noise, len(K))[others])
    mean, var = condition(C, K[None, row, others], K[row, row], y[others])
    return mean[0], var[0, 0]
