"""Predictions of the latent function f: moments, joint draws, and gradients in X."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state

from skgp.estimators._base import BaseGP, clip_variance, to_tensor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._predictive import LikelihoodPredictive, covariance_root, of_targets
from skgp.estimators._validation import check_joint_memory, check_n_samples
from skgp.estimators.defaults import GRAPH_COPIES
from skgp.linalg.runtime import to_arrays

FourArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class LatentFunction(LikelihoodPredictive, BaseGP):
    """What a regressor says of f, in the units of y; counts on the scale of the link.

    Gradients are those of autograd through the hook ``_moment_tensors``.
    """

    y_scale_: float  # or (t,) of several targets

    @over_rows
    @within_limits
    def latent_mean_and_variance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of the latent function, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean, var : ndarray of shape (n,) or (n, t)
            In the units of y, and in squared units of y. Of counts, f itself, on the scale of the
            link: the logarithm of the rate with ``link="exp"``. Of log-normal y, in those of log y.
        """
        mean, var = self._latent_moments(self._validate_prediction(X))
        return self._to_y(mean), self.y_scale_**2 * var

    @over_rows
    @within_limits
    def latent_mean_and_covariance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and joint covariance of the latent function, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean : ndarray of shape (n,) or (n, t)
            In the units of y; of counts as `latent_mean_and_variance`.
        covariance : ndarray of shape (n, n) or (n, n, t)
            In squared units of y. Its diagonal is the variance.

        Raises
        ------
        MemoryError
            If there is no room for the covariance.
        """
        X = self._validate_prediction(X)
        check_joint_memory(len(X), "Ask for fewer of them at once", np.size(self.y_scale_))
        mean, covariance = self._latent_mean_and_covariance(X)
        return self._to_y(mean), of_targets(covariance, self.y_scale_**2)

    @over_rows
    @within_limits
    def sample_f(self, X: ArrayLike, n_samples: int = 1, random_state=0) -> np.ndarray:
        """Draw the latent function, jointly over the rows of X, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)
        n_samples : int, default=1
        random_state : int, RandomState instance or None, default=0

        Returns
        -------
        ndarray of shape (n, n_samples) or (n, t, n_samples)
            One column a draw, in the units of y; of counts as `latent_mean_and_variance`.
        """
        check_n_samples(n_samples)
        X = self._validate_prediction(X)
        return self._to_y(self._latent_samples(X, n_samples, check_random_state(random_state)))

    @abstractmethod
    def _to_y(self, z: Any) -> Any:
        """Return standardised values, of any shape, in the units of y."""

    @abstractmethod
    def _observed_gradients(self, mean, var, d_mean, d_var) -> FourArrays:
        """Return mean and std of y, and their gradients in X, given moments of z and theirs."""

    @abstractmethod
    def _latent_mean_and_covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean, (n,) or (n, t), and covariance (n, n) of f."""

    @abstractmethod
    def _moment_tensors(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the posterior mean and variance of f, (n,), at rows (n, d) on its device.

        Of several targets the means are (n, t).

        Differentiable in the rows where they ask for gradients.
        """

    @property
    def _latent_device(self) -> torch.device:
        """Where the posterior lies."""
        return self._posterior.device

    def _latent_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState
    ) -> np.ndarray:
        """Return joint draws of f at the rows of X, (n, n_samples) or (n, t, n_samples); O(n^3)."""
        check_joint_memory(len(X), "Draw at fewer of them at once")
        mean, covariance = self._latent_mean_and_covariance(X)
        draws = rng.standard_normal((*mean.shape, n_samples))
        spread = covariance_root(covariance) @ draws.reshape(len(X), -1)
        return mean[..., None] + spread.reshape(draws.shape)

    def _graph_bytes_per_row(self) -> int:
        """Return the memory in bytes that gradients in X take for one row."""
        return GRAPH_COPIES * self._bytes_per_row()

    def _latent_gradients(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return mean and variance of f, (n,) each, and their gradients in X, (n, d) each.

        Of several targets (n, t), (n, 1), (n, t, d) and (n, 1, d).
        """
        rows = to_tensor(X, device=self._latent_device).clone().requires_grad_()
        with torch.enable_grad():
            mean, var = self._moment_tensors(rows)
        # What a row is predicted depends on no other row: the sum has the gradients of each.
        d_var = _gradient(var.sum(), rows)
        if mean.ndim == 1:
            return to_arrays(mean, var, _gradient(mean.sum(), rows), d_var)
        slopes = [_gradient(column.sum(), rows) for column in mean.T]
        return to_arrays(mean, var[:, None], torch.stack(slopes, 1), d_var[:, None])

    def _noise_gradients(self, X: np.ndarray) -> np.ndarray | float:
        """Return the gradients (n, d) of the variance of noise that is added to z."""
        return 0.0

    def _predictive_gradients(self, X: np.ndarray, **offset: np.ndarray) -> FourArrays:
        """Return mean and std of y, (n,) or (n, t), and their gradients in X with an axis more."""
        mean, var, d_mean, d_var = self._by_chunks(
            self._latent_gradients, X, self._graph_bytes_per_row()
        )
        d_var[var < 0] = 0.0  # which are clipped
        var = clip_variance(var)
        slopes = self._moment_slopes(mean, var, **offset)
        mean, var = self._predictive_moments(mean, var, **offset)
        if slopes is not None:
            by_mean, by_var = (
                a[:, None] * d_mean + b[:, None] * d_var for a, b in (slopes[:2], slopes[2:])
            )
            d_mean, d_var = by_mean, by_var
        d_var += self._noise_gradients(X)
        return self._observed_gradients(mean, var, d_mean, d_var)


def check_gradients_asked(return_std: bool, return_cov: bool, return_std_grad: bool) -> None:
    """Refuse gradients beside a covariance, and those of a standard deviation not asked for."""
    if return_cov:
        raise ValueError(
            "return_mean_grad and return_std_grad go with return_std, not with return_cov=True. "
            "Ask for the covariance in a call of its own."
        )
    if return_std_grad and not return_std:
        raise ValueError("return_std_grad=True needs return_std=True.")


def std_gradient(d_var: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gradients (..., d) of standard deviations given those of variances; 0 where they are 0."""
    inverse = np.divide(0.5, std, out=np.zeros_like(std), where=std > 0)
    return d_var * inverse[..., None]


def _gradient(total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gradient (n, d) of a scalar in the rows; 0 where it does not depend on them."""
    if not total.requires_grad:
        return torch.zeros_like(rows)
    return torch.autograd.grad(total, rows, retain_graph=True, materialize_grads=True)[0]
