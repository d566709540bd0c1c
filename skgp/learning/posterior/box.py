r"""The posterior in coordinates that know no bounds.

Where the bounds of a hyper-parameter cut its posterior off, Student-t proposals and paths of
Hamiltonian dynamics waste what they draw beyond. There

.. math:: u_j = l_j + (h_j - l_j)\, \Phi(x_j), \qquad
          \log p(x) = \log p(u) + \sum_j \log \big( (h_j - l_j)\, \phi(x_j) \big),

with the normal distribution function and density: a posterior that is flat between narrow bounds
is standard normal in x, and one that rises towards a bound has a smooth tail. Between equal bounds
u is constant, and x standard normal whatever the data. Other coordinates are u itself.
"""

import math

import numpy as np
from scipy.special import ndtr, ndtri

from skgp.learning.posterior.laplace import LaplaceApproximation
from skgp.learning.posterior.log_posterior import LogPosterior

__all__ = ["FreePosterior", "felt_bounds"]

_NEAR = 3.0  # standard deviations of a mode from a bound, within which the bound is felt
_FARTHEST = 3.0  # of a start from the middle, in x


def felt_bounds(posterior: LogPosterior, modes: list[LaplaceApproximation]) -> np.ndarray:
    """Which coordinates (p,) have bounds within three standard deviations of a mode."""
    low, high = posterior.bounds.T
    felt = np.zeros(posterior.n_dims, dtype=bool)
    for each in modes:
        reach = _NEAR * np.sqrt(each.covariance.diagonal())
        felt |= (each.mode - low < reach) | (high - each.mode < reach)
    return felt & np.isfinite(high - low)


class FreePosterior:
    """A `LogPosterior` by x; picklable.

    Parameters
    ----------
    posterior : LogPosterior
    felt : ndarray of bool, shape (p,)
        The coordinates to transform.

    Attributes
    ----------
    n_dims, data, batched
        As of the posterior.
    bounds : ndarray of shape (p, 2)
        Of x: none but for those of coordinates that are u, which nothing comes near.
    medians, prior_sd : ndarray of shape (p,)
        Of the prior of x, roughly.
    """

    def __init__(self, posterior: LogPosterior, felt: np.ndarray) -> None:
        self.posterior, self._felt = posterior, felt
        self.n_dims, self.data, self.kernel = posterior.n_dims, posterior.data, posterior.kernel
        self._low = np.where(felt, posterior.bounds[:, 0], 0.0)
        self._width = np.where(felt, posterior.bounds[:, 1] - self._low, 0.0)
        free = np.array([-math.inf, math.inf])
        self.bounds = np.where(felt[:, None], free, posterior.bounds)
        self.medians = np.where(felt, 0.0, posterior.medians)
        self.prior_sd = np.where(felt, 1.0, posterior.prior_sd)

    @property
    def batched(self) -> bool:
        return self.posterior.batched

    def to_u(self, x: np.ndarray) -> np.ndarray:
        """Logarithms of the hyper-parameters (..., p) at x (..., p)."""
        within = self._low + np.minimum(self._width * ndtr(x), self._width)
        return np.where(self._felt, within, x)

    def to_x(self, u: np.ndarray) -> np.ndarray:
        """x (..., p) at u (..., p); at the bounds three standard deviations from the middle."""
        share = (u - self._low) / np.where(self._width > 0, self._width, 1.0)
        inside = ndtri(np.where(self._width > 0, np.clip(share, 0.0, 1.0), 0.5))
        return np.where(self._felt, np.clip(inside, -_FARTHEST, _FARTHEST), u)

    def log_jacobian(self, x: np.ndarray) -> np.ndarray:
        """Log-density of x less that of u, (...,)."""
        moving = np.where(self._width > 0, self._width, 1.0)
        each = np.log(moving) - 0.5 * x**2 - 0.5 * math.log(2 * math.pi)
        return np.where(self._felt, each, 0.0).sum(-1)

    def log_densities(self, x: np.ndarray) -> np.ndarray:
        """As `LogPosterior.log_densities`, for x (k, p)."""
        if not self._felt.any():
            return self.posterior.log_densities(x)
        return self.posterior.log_densities(self.to_u(x)) + self.log_jacobian(x)

    def log_densities_and_gradients(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `LogPosterior.log_densities_and_gradients`, for x (k, p)."""
        if not self._felt.any():
            return self.posterior.log_densities_and_gradients(x)
        values, gradients = self.posterior.log_densities_and_gradients(self.to_u(x))
        slope = self._width * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        by_x = np.where(self._felt, gradients * slope - x, gradients)
        return values + self.log_jacobian(x), by_x

    def log_density_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """As `LogPosterior.log_density_and_gradient`, for x (p,)."""
        values, gradients = self.log_densities_and_gradients(x[None])
        return float(values[0]), gradients[0]

    def log_density(self, x: np.ndarray) -> float:
        """As `LogPosterior.log_density`, for x (p,)."""
        return float(self.log_densities(x[None])[0])
