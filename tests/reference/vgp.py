"""Variational GP by definition: every entry of q(f)'s mean and covariance is free, all is dense.

The prior is N(0, K) over the distinct inputs; q = N(L a, L C C' L') with K = L L' and C lower
triangular with exp on its diagonal. Newton's method on (a, C), derivatives by autograd.
"""

import numpy as np
import torch


def expected_log_prob(likelihood, y, mean, var, n_points=200):
    """E[log p(y | f)] of each row, by many Gauss-Hermite nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n_points)
    weights = torch.tensor(weights / weights.sum())
    f = mean + var.sqrt() * torch.tensor(nodes)[:, None]
    return weights @ likelihood.log_prob(y.expand_as(f), f)


def vgp_bound(likelihood, L, index, y, weight, offset, parameters):
    """Sum of w E[log p(y | f)] less KL(q || p), for rows at inputs ``index``."""
    mean, root = _unpack(L, parameters)
    rows = expected_log_prob(likelihood, y, offset + mean[index], root.square().sum(1)[index])
    a, C = _split(len(L), parameters)
    kl = 0.5 * (C.square().sum() + a @ a - len(L)) - C.diagonal().log().sum()
    return (weight * rows).sum() - kl


def maximise_vgp(likelihood, K, index, y, weight=None, offset=0.0, n_steps=60):
    """The best bound, and the mean and the variances of q at the distinct inputs."""
    weight = torch.ones_like(y) if weight is None else weight
    L, m = torch.linalg.cholesky(K), len(K)
    parameters = K.new_zeros(m + m * (m + 1) // 2)

    def loss(parameters):
        return -vgp_bound(likelihood, L, index, y, weight, offset, parameters)

    value = loss(parameters)
    for _ in range(n_steps):
        leaf = parameters.requires_grad_()
        gradient = torch.autograd.grad(loss(leaf), leaf)[0]
        if gradient.abs().max() < 1e-10:
            break
        eigenvalues, vectors = torch.linalg.eigh(
            torch.autograd.functional.hessian(loss, parameters.detach())
        )
        direction = vectors @ (vectors.T @ gradient / eigenvalues.abs().clamp_min(1e-6))
        with torch.no_grad():
            scale = 1.0
            while scale > 1e-9 and not loss(parameters - scale * direction) <= value + 1e-12:
                scale /= 2
            parameters = (parameters - scale * direction).detach()
            value = loss(parameters)
    mean, root = _unpack(L, parameters.detach())
    return -float(value), mean, root.square().sum(1)


def _split(m, parameters):
    lower = torch.zeros(m, m, dtype=parameters.dtype)
    rows, columns = torch.tril_indices(m, m)
    lower = lower.index_put((rows, columns), parameters[m:])
    C = lower.tril(-1) + lower.diagonal().exp().diag()
    return parameters[:m], C


def _unpack(L, parameters):
    a, C = _split(len(L), parameters)
    return L @ a, L @ C
