"""Dense oracles of GPs on the states at knots: covariances of states, sparse posteriors."""

import numpy as np
import torch


def state_covariance(dynamics, a, b):
    """Covariance of the states at times a and b, (n, d, m, d), from the transitions alone."""
    P = dynamics.stationary.numpy()
    gaps = a[:, None] - b
    F, _ = dynamics.transition(gaps.abs().reshape(-1))
    ahead = np.moveaxis(F.numpy(), -1, 0).reshape(len(a), len(b), *P.shape) @ P
    back = np.swapaxes(ahead, 2, 3)
    later = (gaps >= 0).numpy()[:, :, None, None]
    return np.where(later, ahead, back).transpose(0, 2, 1, 3)


def inducing_matrices(dynamics, knots, x):
    """Covariance of the states at the knots; A with E[f | u] = A u; covariance of f given u."""
    H, size = dynamics.observation.numpy(), len(knots) * dynamics.n_states
    Kuu = state_covariance(dynamics, knots, knots).reshape(size, size)
    Kfu = np.einsum("i,nimj->nmj", H, state_covariance(dynamics, x, knots)).reshape(len(x), -1)
    Kff = np.einsum("i,nimj,j->nm", H, state_covariance(dynamics, x, x), H)
    # Constants and rotations have the same state at all knots.
    A = Kfu @ np.linalg.pinv(Kuu, rcond=1e-13, hermitian=True)
    return Kuu, A, Kff - A @ Kfu.T


def site_posterior(prior, linear, precision):
    """Log normaliser of a Gaussian site under N(0, prior), and mean and covariance under both."""
    M = np.eye(len(prior)) + prior @ precision
    cov = np.linalg.solve(M, prior)
    mean = cov @ linear
    return 0.5 * (linear @ mean - np.linalg.slogdet(M)[1]), mean, cov


def titsias_bound(Qff, trace, y, noise):
    """Log N(y; 0, Qff + noise) - trace / (2 noise)."""
    C = Qff + noise * np.eye(len(y))
    log_density = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])
    return log_density - trace / (2 * noise)


def reverse_subset_inverse(C, r):
    """Factor L of bandwidth r of the precision, from the band of the covariance C.

    Adam et al. (2020), Algorithm 1: column i of L is the first of the inverse of the r + 1 rows
    from i on (the listing takes r, and the band of Q instead of that of its inverse), divided by
    the root of its first entry. Differentiable, which is Algorithm 2.
    """
    L = torch.zeros_like(C)
    for i in range(len(C)):
        o = slice(i, i + r + 1)
        v = torch.linalg.inv(C[o, o])[:, 0]
        L = L.index_put((torch.arange(len(C))[o], torch.tensor(i)), v / v[0].sqrt())
    return L
