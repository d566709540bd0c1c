"""Exact additive GPs on the rows, and natural steps of a Gaussian posterior: dense NumPy."""

import numpy as np

from tests.reference.kernels import naive_gram


def component_grams(kernels, X, Z=None):
    """Covariances of the components, one a column of the tensors X and Z."""
    Z = X if Z is None else Z
    return [
        naive_gram(kernel, X[:, [j]].numpy(), Z[:, [j]].numpy()) for j, kernel in enumerate(kernels)
    ]


class AdditiveGP:
    """An exact additive GP on the rows; its prior mean is the mean of y."""

    def __init__(self, kernels, X, y, noise):
        self.kernels, self.X, self.residual = kernels, X, y.numpy() - float(y.mean())
        self.C = sum(component_grams(kernels, X)) + noise * np.eye(len(X))
        self.alpha = np.linalg.solve(self.C, self.residual)

    @property
    def log_likelihood(self):
        log_det = np.linalg.slogdet(2 * np.pi * self.C)[1]
        return -0.5 * (self.residual @ self.alpha + log_det)

    def component(self, j, Z):
        """Mean and covariance of component j at Z."""
        return self._posterior(
            component_grams(self.kernels, Z, self.X)[j], component_grams(self.kernels, Z)[j]
        )

    def moments(self, Z):
        """Mean and covariance of the sum less the mean of y."""
        return self._posterior(
            sum(component_grams(self.kernels, Z, self.X)), sum(component_grams(self.kernels, Z))
        )

    def _posterior(self, cross, prior):
        return cross @ self.alpha, prior - cross @ np.linalg.solve(self.C, cross.T)


def natural_step(K, mean, first, second):
    """Posterior of a component at the rows, given expected slopes of the log-density there.

    Mean and covariance, and the divergence from the prior N(0, K). The best q_j(f_j), the others
    being held, is the one that it leaves as it is.
    """
    omega, beta = -second, first - second * mean
    shrink = np.eye(len(K)) + omega[:, None] * K
    V = K @ np.linalg.inv(shrink)
    mean = V @ beta
    log_det = np.linalg.slogdet(shrink)[1]
    return mean, V, 0.5 * (beta @ mean + log_det - omega @ (mean**2 + np.diagonal(V)))
