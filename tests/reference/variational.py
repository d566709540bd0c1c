"""Naive dense NumPy versions of the weight-space variational formulas."""

import numpy as np
from scipy import optimize, stats


def elbo_by_definition(mean, C, Phi, y, noise_variance, S):
    """E_q[log p(y | w)] - KL(q || p), each from its own dense definition."""
    Sigma = C @ C.T
    n = len(y)
    expected = -0.5 * n * np.log(2 * np.pi * noise_variance)
    expected -= np.sum((y - Phi @ mean) ** 2) / (2 * noise_variance)
    expected -= np.trace(Phi @ Sigma @ Phi.T) / (2 * noise_variance)
    return expected - kl_to_prior(mean, Sigma, S)


def kl_to_prior(mean, Sigma, S):
    """KL(N(mean, Sigma) || N(0, S^-1)) with explicit inverses and determinants."""
    prior = np.linalg.inv(S)
    log_ratio = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(Sigma)[1]
    prior_inverse = np.linalg.inv(prior)
    fit = np.trace(prior_inverse @ Sigma) + mean @ prior_inverse @ mean
    return 0.5 * (fit - len(mean) + log_ratio)


def log_marginal_likelihood(Phi, y, noise_variance, S):
    """log N(y | 0, Phi S^-1 Phi' + noise I)."""
    K = Phi @ np.linalg.inv(S) @ Phi.T + noise_variance * np.eye(len(y))
    return stats.multivariate_normal(np.zeros(len(y)), K).logpdf(y)


def posterior(Phi, y, noise_variance, S):
    """Exact posterior mean and covariance of the weights, in function space."""
    prior = np.linalg.inv(S)
    K = Phi @ prior @ Phi.T + noise_variance * np.eye(len(y))
    gain = prior @ Phi.T @ np.linalg.inv(K)
    return gain @ y, prior - gain @ Phi @ prior


def covariance_objective(C, Phi, noise_variance, S):
    """L_Sigma of eq. (2), term by term over the columns."""
    G = Phi.T @ Phi / noise_variance + S
    return sum(C[:, r] @ G @ C[:, r] - 2 * np.log(C[r, r]) for r in range(len(G)))


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
        return covariance_objective(C, Phi, noise_variance, S), gradient[free]

    result = optimize.minimize(
        value_and_gradient,
        np.zeros(free.sum()),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 1e-16, "gtol": 1e-9, "maxcor": 50},
    )
    return result.fun, unpack(result.x)
