r"""Weights of draws that make averages of known expectation exact.

Under a density :math:`\pi` with gradient :math:`g = \nabla \log \pi` that vanishes at infinity,

.. math:: E[g] = 0, \qquad E[(x - c) g^T] = -I ,

whatever the constant c (Stein's identity). Draws with gradients are weighted so that both hold
exactly, by the weights nearest to equal ones in relative entropy, :math:`w_i \propto
e^{\lambda^T f(x_i)}`. This is the regression estimator with control variates f [1]_ in the form of
positive weights. Where the density is nearly Gaussian, g and (x - c) g^T are nearly linear and
quadratic in x: most of the Monte Carlo error of means and covariances is gone. Unbiased noise in
the gradients, independent of the draws, leaves this valid and costs some of the gain.

References
----------
.. [1] Mira, Solgi and Imparato (2013), Zero variance Markov chain Monte Carlo for Bayesian
   estimators. Statistics and Computing 23.
"""

import numpy as np

__all__ = ["stein_weights"]

_MOST_STEPS, _TOL = 50, 1e-9
_DRAWS_PER_FUNCTION = 4  # effective draws: a function costs a part in as many of the variance
_LEAST_SHARE = 0.5  # of the draws: where fewer would carry the weight, the identities do not fit


def stein_weights(points: np.ndarray, gradients: np.ndarray, ess: float) -> np.ndarray:
    """Positive weights of sum one under which draws satisfy Stein's identity.

    Parameters
    ----------
    points : ndarray of shape (s, p)
    gradients : ndarray of shape (s, p)
        Of the log-density, or unbiased estimates of these.
    ess : float
        Effective number of the draws. Both identities are used with at least four for each of
        their p (p + 3) / 2 equations, the first alone with four for each of its p, else none.

    Returns
    -------
    ndarray of shape (s,)
        Equal where no weights fulfil the identities without leaving out half of the draws.

    Notes
    -----
    ``O(s p^4)`` for a Newton step, of which there are about five.
    """
    size, p = points.shape
    equal = np.full(size, 1 / size)
    if not (ess >= _DRAWS_PER_FUNCTION * p and np.ptp(points, axis=0).all()):
        return equal
    scale = points.std(axis=0)
    x, g = (points - points.mean(axis=0)) / scale, gradients * scale
    functions = [g]
    if ess >= _DRAWS_PER_FUNCTION * p * (p + 3) / 2:
        i, j = np.triu_indices(p)
        functions.append((x[:, i] * g[:, j] + x[:, j] * g[:, i]) / 2 + (i == j))
    weights = _tilted(np.concatenate(functions, axis=1))
    if weights is None or 1 / (weights**2).sum() < _LEAST_SHARE * size:
        return equal
    return weights


def _tilted(functions: np.ndarray) -> np.ndarray | None:
    """Weights proportional to exp(functions @ tilt) that average `functions` (s, q) to zero.

    Newton's method on the convex log-sum-exp; None where it does not arrive.
    """
    scale = functions.std(axis=0)
    if not scale.all():
        return None
    functions = functions / scale
    tilt = np.zeros(functions.shape[1])
    for _ in range(_MOST_STEPS):
        exponent = functions @ tilt
        weights = np.exp(exponent - exponent.max())
        weights /= weights.sum()
        mean = weights @ functions
        if np.abs(mean).max() < _TOL:
            return weights
        covariance = (weights[:, None] * functions).T @ functions - np.outer(mean, mean)
        step = np.linalg.lstsq(covariance, -mean, rcond=1e-10)[0]
        # A full step where no weight changes more than eightfold; the rest is damped.
        tilt += step * min(1.0, 2 / max(np.abs(functions @ step).max(), 1e-300))
    return None
