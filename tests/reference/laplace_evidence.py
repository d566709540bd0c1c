"""Dense NumPy oracle of Laplace's approximation of f ~ N(o, K), one column at a time.

Rasmussen and Williams (2006), section 3.4, with matrix inverses written as they stand in the book;
a constant ``offset`` o and a weight for each row's log-likelihood. A likelihood is a function of f
(n,) that returns log p(y | f) of each row and its two derivatives.
"""

import numpy as np
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit, gammaln, log_expit


def logit(y):
    """Labels in {-1, 1}."""
    return lambda f: (log_expit(y * f), (y + 1) / 2 - expit(f), -expit(f) * expit(-f))


def probit(y):
    """Labels in {-1, 1}, by the normal distribution function: eq. (3.16)."""

    def of(f):
        hazard = np.exp(stats.norm.logpdf(f) - stats.norm.logcdf(y * f))
        return stats.norm.logcdf(y * f), y * hazard, -(hazard**2) - y * f * hazard

    return of


def poisson(y, log_exposure=0.0):
    """Counts of the rate exp(f), times an exposure."""

    def of(f):
        rate = np.exp(f + log_exposure)
        return y * (f + log_exposure) - rate - gammaln(y + 1), y - rate, -rate

    return of


def student_t(y, scale, df):
    """Student-t noise, which is not log-concave."""

    def of(f):
        r, c = y - f, df * scale**2
        first = (df + 1) * r / (c + r**2)
        second = (df + 1) * (r**2 - c) / (c + r**2) ** 2
        return stats.t.logpdf(r, df, scale=scale), first, second

    return of


def laplace(K, likelihood, offset=0.0, weight=1.0, start=None):
    """Mode without the offset, posterior covariance and log evidence, eq. (3.32).

    The mode is found by BFGS over the whitened f from `start` and Newton's steps on the density as
    it is; for covariance and evidence curvatures that are negative are put to 0.
    """
    n = len(K)
    L = np.linalg.cholesky(K)

    def loss(v):
        value, first, _ = likelihood(offset + L @ v)
        return v @ v / 2 - (weight * value).sum(), v - L.T @ (weight * first)

    v = np.zeros(n) if start is None else np.linalg.solve(L, start)
    v = minimize(loss, v, jac=True, method="BFGS", options={"gtol": 1e-6}).x
    for _ in range(4):
        second = likelihood(offset + L @ v)[2]
        H = np.eye(n) - L.T @ ((weight * second)[:, None] * L)
        v = v - np.linalg.solve(H, loss(v)[1])
    W = np.maximum(-weight * likelihood(offset + L @ v)[2], 0.0)
    B = np.eye(n) + W[:, None] * K
    return L @ v, K @ np.linalg.inv(B), -loss(v)[0] - 0.5 * np.linalg.slogdet(B)[1]


def predict(K, K_new, prior_var, likelihood, offset=0.0, weight=1.0):
    """Latent mean (p,) and variance (p,) at new rows, eqs. (3.21) and (3.24); K_new is (n, p)."""
    g = laplace(K, likelihood, offset, weight)[0]
    W = -weight * likelihood(offset + g)[2]
    mean = offset + K_new.T @ np.linalg.solve(K, g)
    reduction = np.linalg.solve(K + np.diag(1 / W), K_new)
    return mean, prior_var - np.sum(K_new * reduction, axis=0)
