"""Dense NumPy oracles of Vecchia approximations: one point after the other, dense solves.

Kernel matrices are scikit-learn's.
"""

import math

import numpy as np
from scipy import stats
from scipy.optimize import minimize
from scipy.special import gammaln


def parts(kernel, X, Z=None):
    """Global covariance Q (n, n) of inducing points Z, and the residual K - Q."""
    K = kernel(X)
    if Z is None:
        return np.zeros_like(K), K
    cross = kernel(X, Z)
    Q = cross @ np.linalg.solve(kernel(Z), cross.T)
    return Q, K - Q


def neighbors(kernel, X, n_neighbors, length_scale=None, Z=None, noise=0.0):
    """For each point those before it that, one by one, leave it the least conditional variance.

    Among three times as many, the nearest by scaled distance; each trial is a dense solution.
    """
    S = parts(kernel, X, Z)[1] + np.diag(np.broadcast_to(noise, len(X)))
    found = []
    for i in range(len(X)):
        distance = (((X[:i] - X[i]) / length_scale) ** 2).sum(1)
        near = list(np.argsort(distance, kind="stable")[: 3 * n_neighbors])
        taken = near if len(near) <= n_neighbors else []
        while len(taken) < min(n_neighbors, len(near)):
            rest = [j for j in near if j not in taken]
            left = [_explained(S, i, [*taken, j]) for j in rest]
            taken = [*taken, rest[int(np.argmax(left))]]
        found.append(taken)
    return found


def _explained(S, i, near):
    """By how much the variance of point i falls given others."""
    return S[i, near] @ np.linalg.solve(S[np.ix_(near, near)], S[near, i])


def covariance(Q, S, sets):
    """Q plus the joint covariance in which each point is drawn given its neighbours under S."""
    n = len(S)
    V = np.zeros((n, n))
    for i, near in enumerate(sets):
        B = np.linalg.solve(S[np.ix_(near, near)], S[near, i])
        V[i, :i] = V[:i, i] = B @ V[near, :i]
        V[i, i] = S[i, i] - B @ S[near, i] + B @ V[np.ix_(near, near)] @ B
    return Q + V


def log_density(C, Y):
    """Of the columns of Y (n, c) under N(0, C), in nats, summed."""
    sign, log_det = np.linalg.slogdet(C)
    n, c = Y.shape
    assert sign > 0
    return -0.5 * (c * log_det + c * n * math.log(2 * math.pi) + (Y * np.linalg.solve(C, Y)).sum())


def kl_divergence(K, C):
    """KL(N(0, K) || N(0, C)) in nats."""
    log_dets = [np.linalg.slogdet(A)[1] for A in (K, C)]
    return 0.5 * (np.trace(np.linalg.solve(C, K)) - len(K) + log_dets[1] - log_dets[0])


def predict(kernel, X, Y, noise, sets, x, near, Z=None):
    """Mean (c,) and variance of f(x), drawn last, given neighbours `near` among observations Y.

    The observations, of noise variances (n,) and neighbours `sets`, and f(x) have one joint law;
    f(x) is conditioned on all of Y.
    """
    n = len(X)
    Q, R = parts(kernel, np.vstack([X, x[None]]), Z)
    S = R + np.diag(np.append(noise, 0.0))
    C = covariance(Q, S, [*sets, near])
    weights = np.linalg.solve(C[:n, :n], C[:n, n])
    return weights @ Y, C[n, n] - weights @ C[:n, n]


def laplace(C, y, offset=0.0, weight=1.0):
    """Laplace's approximation of labels y (n,) in {-1, 1} under logit and f ~ N(0, C).

    The mode (n,) without the offset, the posterior covariance and the log evidence, in nats.
    """
    f, n = np.zeros(len(C)), len(C)
    for _ in range(100):
        p = 1 / (1 + np.exp(y * (f + offset)))
        W = weight * p * (1 - p)
        f = C @ np.linalg.solve(np.eye(n) + W[:, None] * C, W * f + weight * y * p)
    p = 1 / (1 + np.exp(y * (f + offset)))
    W = weight * p * (1 - p)
    B = np.eye(n) + W[:, None] * C
    density = (weight * np.log(1 - p)).sum() - 0.5 * f @ np.linalg.solve(C, f)
    return f, C @ np.linalg.inv(B), density - 0.5 * np.linalg.slogdet(B)[1]


def poisson(y, log_exposure=0.0):
    """log p(y | f) of counts and two derivatives, as a function of f (n,)."""

    def of(f):
        rate = np.exp(f + log_exposure)
        return y * (f + log_exposure) - rate - gammaln(y + 1), y - rate, -rate

    return of


def student_t(y, scale, df):
    """The same of Student-t noise, which is not log-concave."""

    def of(f):
        r, c = y - f, df * scale**2
        first = (df + 1) * r / (c + r**2)
        second = (df + 1) * (r**2 - c) / (c + r**2) ** 2
        return stats.t.logpdf(r, df, scale=scale), first, second

    return of


def laplace_of(C, likelihood, offset=0.0, weight=1.0, start=None):
    """Laplace's approximation under f ~ N(offset, C) of `likelihood`, one of the functions above.

    The mode without the offset, found by BFGS from `start` and Newton's steps on the density as it
    is, the covariance and the log evidence, both with curvatures that are negative put to 0.
    """
    n = len(C)
    L = np.linalg.cholesky(C)

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
    B = np.eye(n) + W[:, None] * C
    return L @ v, C @ np.linalg.inv(B), -loss(v)[0] - 0.5 * np.linalg.slogdet(B)[1]
