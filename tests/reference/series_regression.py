"""Dense NumPy oracle of a Gaussian process with features: y = f + Phi beta + noise."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DenseRegression:
    """Evidence, coefficients, and what is said of the sum of f and features at new rows."""

    log_evidence: float
    mean_beta: np.ndarray
    cov_beta: np.ndarray
    mean: np.ndarray
    cov: np.ndarray
    mean_f: np.ndarray
    cov_f: np.ndarray


def dense_regression(K, Phi, y, noise, prior_sd, K_new, K_cross, Phi_new):
    """Condition the joint Gaussian of f, beta and y, nothing eliminated.

    `noise` (n,) are variances; f and beta are stacked at the new rows and in one vector.
    """
    S = np.diag(prior_sd**2)
    total = K + Phi @ S @ Phi.T + np.diag(noise)
    m = len(K_new)
    # Covariances of [f_new, beta] with y, and among themselves.
    cross = np.vstack([K_cross, S @ Phi.T])
    prior = np.block([[K_new, np.zeros((m, len(S)))], [np.zeros((len(S), m)), S]])
    solved = np.linalg.solve(total, cross.T)
    mean = solved.T @ y
    cov = prior - cross @ solved
    to_sum = np.hstack([np.eye(m), Phi_new])
    sign, log_det = np.linalg.slogdet(total)
    assert sign > 0
    quad = y @ np.linalg.solve(total, y)
    return DenseRegression(
        -0.5 * (quad + log_det + len(y) * np.log(2 * np.pi)),
        mean[m:],
        cov[m:, m:],
        to_sum @ mean,
        to_sum @ cov @ to_sum.T,
        mean[:m],
        cov[:m, :m],
    )
