"""Posterior of the hyper-parameters of c RBF(l) + noise by quadrature, in NumPy."""

from typing import NamedTuple

import numpy as np


class GridPosterior(NamedTuple):
    """Moments of u = log (c, l, noise), and what they come from.

    `axes` are three grids of u, `weights` (len(c), len(l), len(noise)) the probabilities.
    """

    mean: np.ndarray
    sd: np.ndarray
    axes: tuple
    weights: np.ndarray
    log_evidence: float


def grid_posterior(X, y, priors, *, size=81, reach=4.5):
    """Trapezoidal rule on a grid of `reach` prior standard deviations around the prior medians.

    With K = V diag(k) V' for one length scale, c K + s I has the eigenvalues c k + s: one
    decomposition for each length scale, and sums over n for all variances.

    Parameters
    ----------
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,)
    priors : three log-normal priors, with ``median`` and ``sd``
    """
    axes = tuple(np.log(p.median) + p.sd * np.linspace(-reach, reach, size) for p in priors)
    squared = ((X[:, None] - X) ** 2).sum(-1)
    log_density = np.empty((size, size, size))
    c, s = np.exp(axes[0])[:, None, None], np.exp(axes[2])[None, :, None]
    for j, log_l in enumerate(axes[1]):
        k, V = np.linalg.eigh(np.exp(-0.5 * squared / np.exp(2 * log_l)))
        values = c * k.clip(0) + s  # (size, size, n)
        log_density[:, j] = -0.5 * (np.log(2 * np.pi * values) + (V.T @ y) ** 2 / values).sum(-1)
    for j, (axis, prior) in enumerate(zip(axes, priors, strict=True)):
        shape = [-1 if i == j else 1 for i in range(3)]
        log_density += prior.log_density(axis).reshape(shape)
    top = log_density.max()
    weights = np.exp(log_density - top)
    total = weights.sum()
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    weights /= total
    margins = [weights.sum(axis=tuple(i for i in range(3) if i != j)) for j in range(3)]
    mean = np.array([m @ a for m, a in zip(margins, axes, strict=True)])
    var = [m @ (a - mu) ** 2 for m, a, mu in zip(margins, axes, mean, strict=True)]
    return GridPosterior(mean, np.sqrt(var), axes, weights, top + np.log(total * cell))
