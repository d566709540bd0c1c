"""Predictions from the nearest points, the farther of which are noisier, and from a few others.

Loops over inputs, explicit noise. ``noise`` is that of the values at the points, ``scale`` the
kernel's length scales.
"""

import numpy as np

TAU = 1e-3
N_GLOBAL = 16


def global_points(kernel, Z, n_neighbors):
    """Indices of the points that all inputs use: pivots, if they explain half of the variance."""
    if len(Z) <= n_neighbors + N_GLOBAL:
        return []
    chosen = []
    for _ in range(N_GLOBAL):
        chosen.append(int(np.argmax(left(kernel, Z, Z[chosen], 0.0))))
    return chosen if (left(kernel, Z, Z[chosen], 1e-4) / kernel.diag(Z)).mean() < 0.5 else []


def left(kernel, X, Z, jitter):
    """Variance of f at X that is left by its values at Z."""
    if not len(Z):
        return kernel.diag(X)
    K, k = kernel(Z), kernel(Z, X)
    return kernel.diag(X) - (k * np.linalg.solve(K + jitter * np.diag(np.diag(K)), k)).sum(0)


def fading_noise(squared, n_neighbors):
    """Noise (M,) of each point, in units of the variance of its value; infinite for most."""
    order = np.argsort(squared, kind="stable")
    noise = np.full(len(squared), np.inf)
    if n_neighbors >= len(squared):
        return np.zeros(len(squared))
    middle, end = squared[order[(n_neighbors - 1) // 2]], squared[order[n_neighbors]]
    for j in order[:n_neighbors]:
        t = max(0.0, (squared[j] - middle) / (end - middle))
        noise[j] = TAU * (t / (1 - t)) ** 2 if t < 1 else np.inf
    return noise


def weights(kernel, Z, noise, x, n_neighbors, scale=1.0, out=None, everywhere=None):
    """Weights (M,) of the values at Z, and the mean squared error of the prediction at x."""
    squared = (((Z - x) / scale) ** 2).sum(1)
    if out is not None:
        squared[out] = np.inf
    extra = fading_noise(squared, n_neighbors)
    everywhere = global_points(kernel, Z, n_neighbors) if everywhere is None else everywhere
    extra[everywhere] = 0.0
    if out is not None:
        extra[out] = np.inf
    used = np.isfinite(extra)
    K, k = kernel(Z[used]) + np.diag(noise[used]), kernel(Z[used], x[None])[:, 0]
    a = np.zeros(len(Z))
    a[used] = np.linalg.solve(K + np.diag(extra[used] * np.diag(K)), k)
    return a, kernel.diag(x[None])[0] - 2 * a[used] @ k + a[used] @ K @ a[used]
