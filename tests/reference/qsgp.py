"""Dense NumPy oracles of QSGP (Evans and Nair, 2020): eq. (2) and the estimators, term by term.

Every function takes the whole Phi (n, m) and S (m, m); samples are plain lists of indices, drawn
uniformly without replacement, with the paper's weights m / len(i).
"""

import numpy as np
from scipy import optimize

from tests.reference.sparse import divergence


def loss_mu(Phi, S, y, mu, noise):
    """L_mu of eq. (2)."""
    f = Phi @ mu
    return (-2 * y @ f + f @ f) / noise + mu @ S @ mu


def loss_sigma(Phi, S, C, noise):
    """L_Sigma of eq. (2)."""
    Sigma = C @ C.T
    return np.sum((Phi @ C) ** 2) / noise + np.trace(S @ Sigma) - np.linalg.slogdet(Sigma)[1]


def loss_const(S, y, noise):
    """L_const of eq. (2)."""
    n, m = len(y), len(S)
    log_det = m * np.log(2 * np.pi) - np.linalg.slogdet(S)[1]
    return log_det - m * np.log(2 * np.pi) - m + n * np.log(2 * np.pi * noise) + y @ y / noise


def elbo(Phi, S, y, mu, C, noise):
    """Eq. (2)."""
    parts = loss_mu(Phi, S, y, mu, noise), loss_sigma(Phi, S, C, noise), loss_const(S, y, noise)
    return -0.5 * sum(parts)


def elbo_by_definition(mean, C, Phi, y, noise_variance, S):
    """E_q[log p(y | w)] - KL(q || p), each from its own dense definition."""
    Sigma = C @ C.T
    n = len(y)
    expected = -0.5 * n * np.log(2 * np.pi * noise_variance)
    expected -= np.sum((y - Phi @ mean) ** 2) / (2 * noise_variance)
    expected -= np.trace(Phi @ Sigma @ Phi.T) / (2 * noise_variance)
    return expected - divergence(mean, Sigma, np.linalg.inv(S))


def minimise_covariance_objective(Phi, noise_variance, S, n_dense):
    """L_Sigma minimised by L-BFGS over the free entries of C; returns the value and C."""
    m = len(S)
    free = np.tril(np.ones((m, m), dtype=bool))
    free[:, n_dense:] = np.eye(m, dtype=bool)[:, n_dense:]
    G = Phi.T @ Phi / noise_variance + S

    def unpack(parameters):
        C = np.zeros((m, m))
        C[free] = parameters
        C[np.diag_indices(m)] = np.exp(np.diag(C))
        return C

    def value_and_gradient(parameters):
        C = unpack(parameters)
        gradient = 2 * G @ C
        on_diagonal = np.diag(gradient) * np.diag(C) - 2  # in log c_rr
        gradient[np.diag_indices(m)] = on_diagonal
        return loss_sigma(Phi, S, C, noise_variance), gradient[free]

    result = optimize.minimize(
        value_and_gradient,
        np.zeros(free.sum()),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 1e-16, "gtol": 1e-9, "maxcor": 50},
    )
    return result.fun, unpack(result.x)


def posterior(Phi, S, y, noise):
    """Exact posterior mean and covariance of the weights."""
    Sigma = np.linalg.inv(Phi.T @ Phi / noise + S)
    return Sigma @ Phi.T @ y / noise, Sigma


def log_evidence(Phi, S, y, noise):
    """Logarithm of the density of y, N(0, Phi S^-1 Phi' + noise I)."""
    K = Phi @ np.linalg.solve(S, Phi.T) + noise * np.eye(len(y))
    return -0.5 * (len(y) * np.log(2 * np.pi) + np.linalg.slogdet(K)[1] + y @ np.linalg.solve(K, y))


def theorem_1(Phi, S, y, mu, noise, rows, i, j):
    """Theorem 1, by loops."""
    n, m = Phi.shape
    a, b = n / len(rows), m / len(i)
    total = 0.0
    for r in i:
        for row in rows:
            total -= 2 * a * b / noise * y[row] * Phi[row, r] * mu[r]
        for s in j:
            weight = b * m / len(j)
            gram = sum(Phi[row, s] * Phi[row, r] for row in rows)
            total += weight * mu[s] * (a / noise * gram + S[s, r]) * mu[r]
    return total


def proposition_2(S, y, noise, n, i):
    """Proposition 2 for a sample y of the targets."""
    m = len(S)
    log_s = sum(np.log(S[r, r]) for r in i)
    return -m / len(i) * log_s - m + n * np.log(2 * np.pi * noise) + n / len(y) * y @ y / noise


def numerical_gradient(function, x, step=1e-6):
    """Central differences of a scalar function of an array."""
    gradient = np.zeros_like(x)
    for k in np.ndindex(x.shape):
        forward, backward = x.copy(), x.copy()
        forward[k] += step
        backward[k] -= step
        gradient[k] = (function(forward) - function(backward)) / (2 * step)
    return gradient
