"""QSGP where nothing else is affordable: exact regression on each test point's neighbourhood."""

from dataclasses import dataclass

from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.kriging import KrigingModel
from skgp.linalg.tensor_state import TensorState

N_SCALES = 3


@dataclass
class LocalPosterior(TensorState):
    """Kriging (:mod:`skgp.inference.neighbors.kriging`) in the interface of every route."""

    model: KrigingModel

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean of f, shape (p,); ``O(p H^3)``."""
        return self.model.mean(X)[:, 0]

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of f, shapes (p,), (p,)."""
        mean, variance = self.model.mean_and_variance(X)
        return mean[:, 0], variance

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance of f, shape (p, p)."""
        return self.model.mean_and_covariance(X)[1][0]


def local_posterior(kernel, data: Data, noise: float, n_neighbors: int) -> LocalPosterior:
    """Posterior from the nearest `n_neighbors` rows, at three scales; holds the rows."""
    offset = data.y.new_zeros(1)
    targets = data.y[:, None]
    return LocalPosterior(
        KrigingModel(
            kernel, noise, data.X, targets, data.weight, offset, n_neighbors, n_scales=N_SCALES
        )
    )
