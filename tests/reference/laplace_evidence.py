"""Dense NumPy oracle of the Laplace approximation of a GP classifier, one column at a time.

Rasmussen and Williams (2006), section 3.4, with matrix inverses written as they stand in the book;
a constant ``offset`` in the latent function and a weight for each row's log likelihood.
"""

import numpy as np
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit, log_expit


def log_likelihood(link, y, f):
    """log p(y | f) for each row."""
    return log_expit(y * f) if link == "logit" else stats.norm.logcdf(y * f)


def curvature(link, y, f):
    """Minus the second derivative of log p(y | f)."""
    if link == "logit":
        return expit(f) * expit(-f)
    hazard = np.exp(stats.norm.logpdf(f) - stats.norm.logcdf(y * f))
    return hazard**2 + y * f * hazard  # eq. (3.16)


def slope(link, y, f):
    """First derivative of log p(y | f)."""
    if link == "logit":
        return (y + 1) / 2 - expit(f)
    return y * np.exp(stats.norm.logpdf(f) - stats.norm.logcdf(y * f))


def mode(K, y, *, link="logit", offset=0.0, weight=1.0):
    """Mode of the latent g ~ N(0, K), by BFGS over the whitened g and then Newton's steps."""
    n = len(y)
    weight = np.broadcast_to(weight, (n,))
    L = np.linalg.cholesky(K)

    def loss(v):
        f = offset + L @ v
        return (
            v @ v / 2 - weight @ log_likelihood(link, y, f),
            v - L.T @ (weight * slope(link, y, f)),
        )

    g = L @ minimize(loss, np.zeros(n), jac=True, method="BFGS").x
    K_inverse = np.linalg.inv(K)
    for _ in range(3):  # eq. (3.18)
        W = np.diag(weight * curvature(link, y, offset + g))
        g = np.linalg.solve(K_inverse + W, W @ g + weight * slope(link, y, offset + g))
    return g


def log_evidence(K, y, *, link="logit", offset=0.0, weight=1.0):
    """Eq. (3.32)."""
    g = mode(K, y, link=link, offset=offset, weight=weight)
    weight = np.broadcast_to(weight, y.shape)
    W = np.diag(weight * curvature(link, y, offset + g))
    fit = weight @ log_likelihood(link, y, offset + g) - g @ np.linalg.solve(K, g) / 2
    return fit - np.linalg.slogdet(np.eye(len(y)) + K @ W)[1] / 2


def predict(K, K_new, prior_var, y, *, link="logit", offset=0.0, weight=1.0):
    """Latent mean (p,) and variance (p,) at new rows, eqs. (3.21) and (3.24); K_new is (n, p)."""
    g = mode(K, y, link=link, offset=offset, weight=weight)
    W = np.broadcast_to(weight, y.shape) * curvature(link, y, offset + g)
    mean = offset + K_new.T @ np.linalg.solve(K, g)
    reduction = np.linalg.solve(K + np.diag(1 / W), K_new)
    return mean, prior_var - np.sum(K_new * reduction, axis=0)
