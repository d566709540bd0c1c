"""The exact GP with an RBF kernel and its gradients in x, by loops over explicit inverses."""

import numpy as np


def rbf(x, z, variance, length_scale):
    """k(x, z) and its gradient in x."""
    difference = (x - z) / length_scale
    k = variance * np.exp(-0.5 * difference @ difference)
    return k, -k * difference / length_scale


def predict(X, y, x, *, variance, length_scale, noise):
    r"""Mean and variance of f(x) and their gradients.

    .. math:: \nabla \mu = \sum_i \alpha_i \nabla k(x, x_i), \qquad
              \nabla v = -2 \sum_{ij} k(x, x_i) (A^{-1})_{ij} \nabla k(x, x_j).
    """
    n = len(X)
    A = np.array([[rbf(a, b, variance, length_scale)[0] for b in X] for a in X])
    inverse = np.linalg.inv(A + noise * np.eye(n))
    k, slopes = zip(*(rbf(x, z, variance, length_scale) for z in X), strict=True)
    alpha = inverse @ y
    mean = sum(alpha[i] * k[i] for i in range(n))
    d_mean = sum(alpha[i] * slopes[i] for i in range(n))
    var = variance - sum(k[i] * inverse[i, j] * k[j] for i in range(n) for j in range(n))
    d_var = -2 * sum(k[i] * inverse[i, j] * slopes[j] for i in range(n) for j in range(n))
    return mean, var, d_mean, d_var
