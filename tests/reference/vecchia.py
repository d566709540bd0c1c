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


def neighbors(kernel, X, n_neighbors, length_scale=None, Z=None):
    """For each point those before it that are nearest by scaled distance, or residual correlation.

    Of the latter, among three times as many by distance.
    """
    found, R = [], parts(kernel, X, Z)[1]
    for i in range(len(X)):
        distance = (((X[:i] - X[i]) / length_scale) ** 2).sum(1)
        if Z is None:
            found.append(np.argsort(distance, kind="stable")[:n_neighbors])
            continue
        near = np.argsort(distance, kind="stable")[: 3 * n_neighbors]
        correlation = R[i, near] ** 2 / R[near, near]
        found.append(near[np.argsort(-correlation)[:n_neighbors]])
    return found


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
