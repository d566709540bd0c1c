"""Dense NumPy oracle of the relevance vector machine: no update formula, every inverse anew.

Phi (n, m) holds every basis function; `active` numbers those in the model and `s` holds their
precisions. All others have infinite precision.
"""

import numpy as np

from tests.reference import qsgp


def log_evidence(Phi, y, noise, active, s):
    """Logarithm of N(y; 0, noise I + Phi S^-1 Phi')."""
    return qsgp.log_evidence(Phi[:, active], np.diag(s), y, noise)


def statistics(Phi, y, noise, active, s):
    """S and Q of every function: Phi_m' C^-1 Phi_m and Phi_m' C^-1 y."""
    C = noise * np.eye(len(y)) + (Phi[:, active] / s) @ Phi[:, active].T
    return np.sum(Phi * np.linalg.solve(C, Phi), axis=0), Phi.T @ np.linalg.solve(C, y)


def posterior(Phi, y, noise, active, s):
    """Mean and covariance of the active weights."""
    return qsgp.posterior(Phi[:, active], np.diag(s), y, noise)


def best_gain(evidence, active, s, index, grid):
    """Largest rise of ``evidence(active, s)`` by another precision of `index`, inf included."""
    active, s = list(active), list(s)
    before = evidence(active, np.array(s))
    others = [k for k, a in enumerate(active) if a != index]
    rest, rest_s = [active[k] for k in others], [s[k] for k in others]
    values = [evidence(rest + [index], np.array(rest_s + [a])) for a in grid]
    values.append(evidence(rest, np.array(rest_s)))
    return max(values) - before


def logit_log_joint(Phi, y, offset, active, s, w, weight):
    """Sum of weighted log sigmoid(y f) and the log prior density of w up to a constant."""
    f = offset + Phi[:, active] @ w
    return -weight @ np.logaddexp(0, -y * f) - 0.5 * np.sum(s * w**2)


def logit_laplace(Phi, y, offset, active, s, weight):
    """Mode, Hessian and Laplace log evidence of a logistic regression, by plain Newton steps."""
    A, w = Phi[:, active], np.zeros(len(active))
    for _ in range(200):
        p = 1 / (1 + np.exp(y * (offset + A @ w)))
        H = (A.T * (weight * p * (1 - p))) @ A + np.diag(s)
        step = np.linalg.solve(H, A.T @ (weight * y * p) - s * w)
        w = w + step / max(1.0, np.abs(step).max())
    value = logit_log_joint(Phi, y, offset, active, s, w, weight)
    evidence = value + 0.5 * np.sum(np.log(s)) - 0.5 * np.linalg.slogdet(H)[1]
    return w, H, evidence


def mean_field_elbo(Phi, y, noise, mu, c, log_s):
    """Bound (2) of the paper for C = diag(c) and S = diag(exp(log_s))."""
    s = np.exp(log_s)
    fit = np.sum((y - Phi @ mu) ** 2) + np.sum(Phi**2 @ c**2)
    prior = np.sum(s * (mu**2 + c**2) - 1 - np.log(s) - 2 * np.log(c))
    return -0.5 * (len(y) * np.log(2 * np.pi * noise) + fit / noise + prior)


def log_precision_gradient(Phi, y, noise, mu, c, log_s):
    """Gradient of minus `mean_field_elbo` with respect to log s, by differences."""
    return qsgp.numerical_gradient(
        lambda a: -mean_field_elbo(Phi, y, noise, mu, c, a), log_s, step=1e-5
    )
