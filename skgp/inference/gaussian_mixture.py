r"""Mixtures of Gaussians in one dimension, many at once: moments, quantiles, log-densities.

Arrays of components are (S, n): column j is the mixture :math:`\sum_s w_s N(m_{sj}, v_{sj})`, with
one set of weights :math:`w` (S,), of sum one, for all.
"""

import math

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtri

from skgp.inference import defaults

_TINY = np.finfo(np.float64).tiny  # mathematical


def mixture_moments(
    weights: np.ndarray, mean: np.ndarray, var: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (n,) of each mixture, by the law of total variance."""
    centre = weights @ mean
    return centre, weights @ (var + (mean - centre) ** 2)


def mixture_log_density(
    weights: np.ndarray, mean: np.ndarray, var: np.ndarray, z: np.ndarray
) -> np.ndarray:
    """Log-density (n,) of z (n,), each under its own mixture, in nats."""
    var = np.maximum(var, _TINY)  # without noise a variance may be 0, where no density is finite
    terms = -0.5 * ((z - mean) ** 2 / var + np.log(2 * math.pi * var))
    return logsumexp(terms + np.log(weights)[:, None], axis=0)


def mixture_quantiles(
    weights: np.ndarray, mean: np.ndarray, var: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    r"""Quantiles (n, q) of each mixture at levels (q,) strictly between 0 and 1.

    The root of :math:`\sum_s w_s \Phi((z - m_s) / \sigma_s) = p`, to about 1e-12 of a standard
    deviation, by Newton's method on the logarithm of the probability of the nearer tail, which is
    concave for one Gaussian; the root stays bracketed, and where a step leaves the bracket it is
    halved. ``O(n q S)`` for each of some five to ten steps.
    """
    std = np.sqrt(np.maximum(var, _TINY))
    if len(weights) == 1:
        return mean[0][:, None] + std[0][:, None] * ndtri(levels)
    out = np.empty((mean.shape[1], len(levels)))
    n_rows = max(1, defaults.ELEMENTS // len(weights))
    for j, level in enumerate(levels):
        # Of the upper half the mirror image, whose lower tail keeps its digits.
        sign = -1.0 if level > 0.5 else 1.0
        log_level = math.log1p(-level) if level > 0.5 else math.log(level)
        for start in range(0, mean.shape[1], n_rows):
            rows = slice(start, start + n_rows)
            root = _lower_quantile(weights, sign * mean[:, rows], std[:, rows], log_level)
            out[rows, j] = sign * root
    return out


def _lower_quantile(weights, mean, std, log_level: float) -> np.ndarray:
    """Where the log-probability below is `log_level`, at most log(1/2), for each column."""
    log_weights = np.log(weights)[:, None]
    ends = mean + std * ndtri(math.exp(log_level))
    low, high = ends.min(axis=0), ends.max(axis=0)
    z = weights @ ends
    scale = std.min(axis=0)
    active = np.arange(len(z))
    for _ in range(defaults.MAX_STEPS):
        t = (z[active] - mean[:, active]) / std[:, active]
        log_below = log_ndtr(t) + log_weights
        total = logsumexp(log_below, axis=0)
        log_density = -0.5 * (t**2 + math.log(2 * math.pi)) - np.log(std[:, active]) + log_weights
        slope = np.exp(logsumexp(log_density, axis=0) - total)
        gap = total - log_level
        low[active] = np.where(gap <= 0, z[active], low[active])
        high[active] = np.where(gap >= 0, z[active], high[active])
        with np.errstate(divide="ignore", invalid="ignore"):
            new = z[active] - gap / slope
        inside = (new >= low[active]) & (new <= high[active])
        new = np.where(inside, new, (low[active] + high[active]) / 2)
        step = np.abs(new - z[active])
        z[active] = new
        active = active[step > 1e-13 * (scale[active] + np.abs(new))]
        if len(active) == 0:
            break
    return z
