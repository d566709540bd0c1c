"""Naive dense NumPy versions of the model linear in its weights, in function space.

f = Phi w, w ~ N(0, a I), y_i ~ N(f_i, s2 / weight_i). Nothing here forms Phi'Phi.
"""

import numpy as np
from scipy import stats


def dense_features(basis, X):
    """All blocks of a streamed basis side by side, as a float64 array."""
    blocks = [basis.features(X, block).double().numpy() for block in range(basis.n_blocks)]
    return np.concatenate(blocks, axis=1)


def observation_covariance(Phi, noise_variance, weight=None, prior_variance=1.0):
    """Covariance of y: a Phi Phi' + diag(s2 / weight)."""
    weight = np.ones(len(Phi)) if weight is None else weight
    return prior_variance * Phi @ Phi.T + np.diag(noise_variance / weight)


def posterior(Phi, y, noise_variance, weight=None, prior_variance=1.0):
    """Mean (m,) and covariance (m, m) of w given y."""
    C = observation_covariance(Phi, noise_variance, weight, prior_variance)
    gain = prior_variance * Phi.T @ np.linalg.inv(C)
    return gain @ y, prior_variance * (np.eye(Phi.shape[1]) - gain @ Phi)


def log_marginal_likelihood(Phi, y, noise_variance, weight=None, prior_variance=1.0):
    """log N(y; 0, a Phi Phi' + diag(s2 / weight)) in nats."""
    C = observation_covariance(Phi, noise_variance, weight, prior_variance)
    return stats.multivariate_normal(np.zeros(len(y)), C).logpdf(y)


def ridge(Phi, targets, noise_variance):
    """argmin |T - Phi V|^2 + s2 |V|^2 (m, k), as least squares on the stacked rows."""
    m, k = Phi.shape[1], targets.shape[1]
    rows = np.concatenate([Phi, np.sqrt(noise_variance) * np.eye(m)])
    return np.linalg.lstsq(rows, np.concatenate([targets, np.zeros((m, k))]), rcond=None)[0]
