"""A small regression whose kernel matrix can be inverted, and its exact answers by scikit-learn."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.data import Data
from skgp.inference.weights.bases import WhitenedInducingBasis

NOISE = 0.1
KERNELS = {
    "matern12": lambda: 1.4 * Matern([0.8, 1.5], nu=0.5),
    "matern32": lambda: 0.9 * Matern(1.1, nu=1.5),
    "sum": lambda: 0.6 * RBF([0.5, 0.9]) + 0.5 * Matern(1.3, nu=0.5),
}


@dataclass
class Problem:
    """Training rows, test rows, and the oracle. All in float64."""

    kernel: object
    X: torch.Tensor
    y: torch.Tensor
    X_test: torch.Tensor
    weight: torch.Tensor | None
    noise: float = NOISE

    @property
    def data(self):
        """The training rows."""
        return Data(self.X, self.y, self.weight)

    @property
    def row_weight(self):
        """Weights as an array, ones where there are none."""
        return np.ones(len(self.y)) if self.weight is None else self.weight.numpy()

    @cached_property
    def exact(self):
        """Scikit-learn's GP with the noise variance of each row on its diagonal."""
        alpha = self.noise / self.row_weight
        regressor = GaussianProcessRegressor(self.kernel, alpha=alpha, optimizer=None)
        return regressor.fit(self.X.numpy(), self.y.numpy())

    def exact_prediction(self):
        """Mean and covariance at the test rows."""
        return self.exact.predict(self.X_test.numpy(), return_cov=True)

    def weighted_basis(self):
        """Phi = S = K with rows scaled by the root weights, y likewise, and K."""
        K = self.kernel(self.X.numpy())
        root = np.sqrt(self.row_weight)
        return root[:, None] * K, root * self.y.numpy(), K

    def exact_prior(self):
        """Features whose Gram matrix is K, without error, at the training and test rows."""
        return WhitenedInducingBasis(self.kernel, torch.cat([self.X, self.X_test]))


def make_problem(name="matern32", *, weighted=False, n=30, seed=0):
    """Build a problem; the targets have a standard deviation of about 1."""
    rng = np.random.default_rng(seed)
    X = torch.tensor(rng.uniform(-2, 2, size=(n, 2)))
    y = torch.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * torch.tensor(rng.normal(size=n))
    X_test = torch.tensor(rng.uniform(-3, 3, size=(7, 2)))
    weight = torch.tensor(rng.uniform(0.3, 4.0, size=n)) if weighted else None
    return Problem(KERNELS[name](), X, y, X_test, weight)
