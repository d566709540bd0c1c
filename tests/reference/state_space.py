"""Dense NumPy oracles of a series: n x n matrices, and a Kalman filter as a plain loop.

A site exp(beta f - weight f^2 / 2) stands at every time; a missing value has zeros.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Dense:
    """What the posterior of f ~ N(0, K) is, given sites.

    `gradient` is that of `log_normalizer` for each of the derivatives of K that were given.
    """

    log_normalizer: float
    mean: np.ndarray
    cov: np.ndarray
    gradient: np.ndarray


def dense_posterior(K, beta, weight, slopes=None):
    """Condition N(0, K) on sites; `slopes` are the derivatives of K, (n, n, p)."""
    n = len(K)
    M = np.eye(n) + K * weight  # I + K W
    cov = np.linalg.solve(M, K)
    mean = cov @ beta
    log_normalizer = 0.5 * (beta @ mean - np.linalg.slogdet(M)[1])
    slopes = np.zeros((n, n, 0)) if slopes is None else slopes
    alpha = beta - weight * mean
    S = weight[:, None] * np.linalg.inv(M)  # W (I + K W)^-1 = (K + W^-1)^-1
    gradient = 0.5 * np.einsum("ij,ijp->p", np.outer(alpha, alpha) - S, slopes)
    return Dense(log_normalizer, mean, cov, gradient)


def model_covariance(dynamics, x):
    """Covariance of f that the state-space form itself has, H F(t) P0 H'."""
    gap = np.abs(x[:, None] - x)
    F, _ = dynamics.transition(dynamics.observation.new_tensor(gap.reshape(-1)))
    H, P0 = dynamics.observation.numpy(), dynamics.stationary.numpy()
    return np.einsum("i,ijn,j->n", H, F.numpy(), P0 @ H).reshape(gap.shape)


def awkward_series(n=90, seed=0, jump=1e4):
    """Times with duplicates, gaps of 1e-6 and of `jump`, and sites, of which some are missing."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(0.2, n)
    gaps[[3, 4, n // 2]] = 0.0
    gaps[[7, n // 3]] = 1e-6
    gaps[2 * n // 3] = jump
    weight = rng.uniform(0.1, 8.0, n)
    weight[rng.permutation(n)[: n // 5]] = 0.0
    return np.cumsum(gaps), weight * rng.normal(size=n), weight


def kalman_loop(F, Q, P0, H, beta, weight):
    """Log normaliser, and the states filtered and predicted, one point after the other.

    F and Q are (n, d, d); those of the first point are not read. The states are pairs of means
    (n, d) and covariances (n, d, d).
    """
    n, d = len(beta), len(P0)
    filtered, predicted = ((np.empty((n, d)), np.empty((n, d, d))) for _ in range(2))
    m, P = np.zeros(d), P0
    log_normalizer = 0.0
    for i in range(n):
        if i > 0:
            m, P = F[i] @ m, F[i] @ P @ F[i].T + Q[i]
        predicted[0][i], predicted[1][i] = m, P
        k = P @ H
        f, p = H @ m, H @ k
        D = 1 + weight[i] * p
        u = beta[i] - weight[i] * f
        log_normalizer += 0.5 * (f * (beta[i] + u) + p * u * u / D - np.log(D))
        m, P = m + k * (u / D), P - np.outer(k, k) * (weight[i] / D)
        filtered[0][i], filtered[1][i] = m, P
    return log_normalizer, filtered, predicted


def smoother_loop(F, H, filtered, predicted):
    """Mean and variance of f given all sites, each (n,), by Rauch, Tung and Striebel."""
    (m, P), (mp, Pp) = filtered, predicted
    n = len(m)
    mean, var = np.empty(n), np.empty(n)
    s, S = m[-1], P[-1]
    mean[-1], var[-1] = H @ s, H @ S @ H
    for i in range(n - 2, -1, -1):
        G = np.linalg.solve(Pp[i + 1], F[i + 1] @ P[i]).T
        s, S = m[i] + G @ (s - mp[i + 1]), P[i] + G @ (S - Pp[i + 1]) @ G.T
        mean[i], var[i] = H @ s, H @ S @ H
    return mean, var


def assert_draws(draws, mean, covariance) -> None:
    """Assert by z-tests that Gaussian draws (m, S) have a mean (m,) and a covariance (m, m)."""
    draws, mean, covariance = map(np.asarray, (draws, mean, covariance))
    n, var = draws.shape[1], covariance.diagonal()
    centred = draws - mean[:, None]
    assert np.abs(centred.mean(1) / np.sqrt(var / n)).max() < 4
    # Of Gaussian draws the variance of an entry of the covariance is (C_ii C_jj + C_ij^2) / n.
    error = np.sqrt((np.outer(var, var) + covariance**2) / n)
    assert np.abs((centred @ centred.T / n - covariance) / error).max() < 4.5


def by_finite_differences(function, point, step=5e-5):
    """Derivatives of a function of a vector (p,), last dimension over its entries; O(h^4)."""
    slopes = []
    for direction in torch.eye(len(point), dtype=point.dtype):
        near, far = (
            function(point + s * step * direction) - function(point - s * step * direction)
            for s in (1, 2)
        )
        slopes.append(torch.as_tensor((8 * near - far) / (12 * step), dtype=point.dtype))
    return torch.stack(slopes, -1)
