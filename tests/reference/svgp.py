"""Plain-torch oracles of ELBOs with explicit inverses: autograd gives their gradients.

The prior of u is N(0, K), K with jitter relative to the variance of each inducing point.
"""

import torch

JITTER = 1e-4


def prior_covariance(gram, Z, jitter=JITTER):
    """K of inducing points, for gram(A, B)."""
    K = gram(Z, Z)
    return K + jitter * torch.diag(K.diagonal())


def gaussian_kl(mean, S, K):
    """KL(N(mean, S) || N(0, K))."""
    P = torch.linalg.inv(K)
    log_dets = torch.logdet(K) - torch.logdet(S)
    return 0.5 * (torch.trace(P @ S) + mean @ P @ mean - len(mean) + log_dets)


def latent(gram, X, Z, mean, S):
    """Mean and variance of f at X under q(u) = N(mean, S)."""
    Kxz = gram(X, Z)
    A = Kxz @ torch.linalg.inv(prior_covariance(gram, Z))
    var = gram(X, X).diagonal() - (A * Kxz).sum(1) + (A @ S * A).sum(1)
    return A @ mean, var


def svgp_bound(gram, log_prob, X, y, Z, mean, S, *, offset=0.0, weight=None):
    """Hensman et al. (2013): sum of w E[log p(y | f)] less KL(q(u) || p(u)); one latent function.

    ``log_prob(y, mean, var)`` is the expected log density of each row.
    """
    mu, var = latent(gram, X, Z, mean, S)
    fit = log_prob(y, offset + mu, var)
    fit = fit.sum() if weight is None else (weight * fit).sum()
    return fit - gaussian_kl(mean, S, prior_covariance(gram, Z))


def local_bound(gram, log_prob, X, y, Z, active, mean, S, *, kl_weight, offset=0.0, weight=None):
    """Eq. 11 of the SWSGP paper, a row at a time; rows of weight w are w rows."""
    weight = torch.ones(len(X), dtype=X.dtype) if weight is None else weight
    value = 0.0
    for n, indices in enumerate(active):
        m, S_n, Z_n = mean[indices], S[indices][:, indices], Z[indices]
        mu, var = latent(gram, X[n : n + 1], Z_n, m, S_n)
        fit = log_prob(y[n : n + 1], offset + mu, var)[0]
        kl = gaussian_kl(m, S_n, prior_covariance(gram, Z_n))
        value = value + weight[n] * (fit - kl_weight / weight.sum() * kl)
    return value
