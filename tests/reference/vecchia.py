"""Dense NumPy oracles of Vecchia approximations: one point after the other, dense solves.

Kernel matrices are scikit-learn's.
"""

import math

import numpy as np


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
