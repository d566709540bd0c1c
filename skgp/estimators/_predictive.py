"""The distribution of a new observation given that of f, on NumPy arrays."""

import warnings

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.special import ndtri
from scipy.stats import norm

from skgp.estimators._backend import to_tensor
from skgp.likelihoods import Laplace
from skgp.linalg.exceptions import NumericalWarning


class GaussianPredictive:
    r"""Predictive distribution of :math:`z = f + \varepsilon`, both terms Gaussian.

    Everything is in the standardised scale; ``mean`` and ``var``, of shape (n,), are those of f.
    Another likelihood overrides these methods.

    Attributes
    ----------
    _noise_variance : float
        Variance of the noise.
    """

    _noise_variance: float

    def _predictive_moments(
        self, mean: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of z; the mean must be that of f."""
        return mean, var + self._noise_variance

    def _predictive_quantiles(
        self, mean: np.ndarray, var: np.ndarray, quantiles: np.ndarray
    ) -> np.ndarray:
        """Return the quantiles of z, shape (n, q)."""
        mean, var = self._predictive_moments(mean, var)
        return mean[:, None] + np.sqrt(var)[:, None] * ndtri(quantiles)

    def _predictive_log_density(
        self, z: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> np.ndarray:
        """Return log p(z), shape (n,)."""
        mean, var = self._predictive_moments(mean, var)
        # Without noise the variance may be 0, where the density has no finite value.
        std = np.sqrt(np.maximum(var, np.finfo(np.float64).tiny))
        return norm.logpdf(z, loc=mean, scale=std)

    def _sample_observations(self, f: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Return draws of z, of the shape of f, given draws of f."""
        return f + np.sqrt(self._noise_variance) * rng.standard_normal(f.shape)


class LaplacePredictive(GaussianPredictive):
    r"""The same with Laplace noise where there is a scale for it.

    Mean and variance of z are of the same form, the variance of the noise being :math:`2 b^2`.

    Attributes
    ----------
    _laplace_scale : float or None
        b, in the standardised scale; None for Gaussian noise.
    """

    _laplace_scale: float | None = None

    def _predictive_quantiles(self, mean, var, quantiles):
        if self._laplace_scale is None:
            return super()._predictive_quantiles(mean, var, quantiles)
        levels, mean, var = torch.broadcast_tensors(
            to_tensor(quantiles), to_tensor(mean)[:, None], to_tensor(var)[:, None]
        )
        return Laplace(self._laplace_scale).quantile(levels, mean, var).numpy()

    def _predictive_log_density(self, z, mean, var):
        if self._laplace_scale is None:
            return super()._predictive_log_density(z, mean, var)
        moments = map(to_tensor, (z, mean, var))
        return Laplace(self._laplace_scale).log_predictive(*moments).numpy()

    def _sample_observations(self, f, rng):
        if self._laplace_scale is None:
            return super()._sample_observations(f, rng)
        return f + rng.laplace(scale=self._laplace_scale, size=f.shape)


def is_constant(scale: float, y: np.ndarray) -> bool:
    """Tell whether a standard deviation of y is 0 up to the rounding of its mean."""
    return scale <= 10 * np.finfo(np.float64).eps * np.abs(y).max()


def clip_variance(var: np.ndarray) -> np.ndarray:
    """Return variances with the negative ones, born of rounding, set to 0.

    Warns
    -----
    NumericalWarning
        If there were any; says how many and the least.
    """
    negative = var < 0
    if not negative.any():
        return var
    warnings.warn(
        f"{negative.sum()} of {var.size} predicted variances were negative, the least "
        f"{var.min():.3g} for a target of unit variance, and were set to 0. If that is not a "
        'rounding error, fit with dtype="float64" or a greater noise variance.',
        NumericalWarning,
        stacklevel=2,
    )
    return np.maximum(var, 0.0)


def covariance_root(covariance: np.ndarray) -> np.ndarray:
    r"""Return R (n, n) with :math:`R R^T` equal to a positive semi-definite covariance.

    Latent covariances are singular up to rounding, so this takes the symmetric eigenvalue
    decomposition, clips negative eigenvalues at 0, and needs no jitter. O(n^3).
    """
    values, vectors = eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0.0))
