"""Dense NumPy oracles of Newton's method and the Laplace approximation with logistic likelihood.

f = o + Phi w, w ~ N(0, a I), P(y = 1 | f) = 1 / (1 + exp(-f)), y in {-1, +1}; row i counts s_i
times. One column; whole matrices.
"""

import numpy as np


def sigmoid(f):
    """Logistic function."""
    return 0.5 * (1 + np.tanh(0.5 * f))


def loss(Phi, y, w, offset=0.0, prior_variance=1.0, weight=None):
    """Negative log joint without the constant of the prior."""
    weight = np.ones(len(y)) if weight is None else weight
    margin = y * (offset + Phi @ w)
    return weight @ np.logaddexp(0, -margin) + w @ w / (2 * prior_variance)


def gradient(Phi, y, w, offset=0.0, prior_variance=1.0, weight=None):
    """Gradient of the loss."""
    weight = np.ones(len(y)) if weight is None else weight
    margin = y * (offset + Phi @ w)
    return -Phi.T @ (weight * y * sigmoid(-margin)) + w / prior_variance


def curvature(Phi, w, offset=0.0, weight=None):
    """Second derivative of the negative log-likelihood of each row."""
    p = sigmoid(offset + Phi @ w)
    return (np.ones(len(Phi)) if weight is None else weight) * p * (1 - p)


def hessian(Phi, curvature, prior_variance=1.0):
    """Hessian of the loss."""
    return Phi.T @ np.diag(curvature) @ Phi + np.eye(Phi.shape[1]) / prior_variance


def mode(Phi, y, offset=0.0, prior_variance=1.0, weight=None, n_steps=100):
    """Minimiser of the loss, by Newton steps halved until the loss falls."""
    options = {"offset": offset, "prior_variance": prior_variance, "weight": weight}
    w = np.zeros(Phi.shape[1])
    for _ in range(n_steps):
        H = hessian(Phi, curvature(Phi, w, offset, weight), prior_variance)
        d = -np.linalg.solve(H, gradient(Phi, y, w, **options))
        step, before = 1.0, loss(Phi, y, w, **options)
        while step > 1e-9 and loss(Phi, y, w + step * d, **options) > before:
            step /= 2
        w = w + step * d
    return w


def log_evidence(Phi, y, offset=0.0, prior_variance=1.0, weight=None):
    """Laplace approximation of log p(y), with the determinant in function space."""
    w = mode(Phi, y, offset, prior_variance, weight)
    root = np.sqrt(curvature(Phi, w, offset, weight))
    B = np.eye(len(y)) + prior_variance * root[:, None] * (Phi @ Phi.T) * root
    return -loss(Phi, y, w, offset, prior_variance, weight) - 0.5 * np.linalg.slogdet(B)[1]
