"""Predictions of the latent function f: moments, joint draws, and gradients in X."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Product, Sum, WhiteKernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._base import BaseGP, clip_variance, to_tensor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._front_door import validated
from skgp.estimators._predictive import LikelihoodPredictive, covariance_root, of_targets
from skgp.estimators._validation import check_joint_memory, check_n_samples
from skgp.estimators.defaults import GRAPH_COPIES, TILE_MATRICES
from skgp.inference.exact import variance_and_weights
from skgp.kernels.training import cross_gram_with_gradient, variance_gradient
from skgp.linalg.runtime import tile_rows, to_arrays

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
        mean, covariance = self._joint_moments(X)
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

    def _joint_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the same of a process whose variance may depend on x."""
        return self._latent_mean_and_covariance(X)

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
        mean, covariance = self._joint_moments(X)
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

    def _varied_gradients(self, X: np.ndarray, var: np.ndarray, d_var: np.ndarray) -> Any:
        """Return variances of f and their gradients, and those of noise that is added to z.

        Where they depend on x beside what the posterior of a stationary process has.
        """
        return var, d_var, 0.0

    def _predictive_gradients(self, X: np.ndarray, **offset: np.ndarray) -> FourArrays:
        """Return mean and std of y, (n,) or (n, t), and their gradients in X with an axis more."""
        mean, var, d_mean, d_var = self._by_chunks(
            self._latent_gradients, X, self._graph_bytes_per_row()
        )
        d_var[var < 0] = 0.0  # which are clipped
        var, d_var, of_noise = self._varied_gradients(X, clip_variance(var), d_var)
        slopes = self._moment_slopes(mean, var, **offset)
        mean, var = self._predictive_moments(mean, var, **offset)
        if slopes is not None:
            by_mean, by_var = (
                a[:, None] * d_mean + b[:, None] * d_var for a, b in (slopes[:2], slopes[2:])
            )
            d_mean, d_var = by_mean, by_var
        return self._observed_gradients(mean, var, d_mean, d_var + of_noise)


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


class RegressorFunctions:
    """f of the prior before `fit`, of the exact posterior, or of another method's estimator."""

    kernel: Any
    method_: str
    kernel_: Any
    estimator_: Any
    X_train_: Any
    L_: np.ndarray
    alpha_: np.ndarray
    _y_train_mean: np.ndarray
    _y_train_std: np.ndarray
    _alpha: float  # the noise that predictions leave out, of scaled targets

    predict: Any
    _in_units: Any

    def latent_mean_and_variance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of f, without the noise of the kernel.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object

        Returns
        -------
        mean, var : ndarray of shape (p,) or (p, t)
            In the units of y, and in squared units of y.
        """
        check_is_fitted(self, "kernel_")
        if self.method_ != "exact":
            return self.estimator_.latent_mean_and_variance(validated(self, X))
        white = self._white_variance()
        mean, std = self.predict(X, return_std=True)
        return mean, np.maximum(std**2 - white, 0.0)

    def latent_mean_and_covariance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and joint covariance of f, without the noise of the kernel.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object

        Returns
        -------
        mean : ndarray of shape (p,) or (p, t)
            In the units of y. Before `fit` that of the prior.
        covariance : ndarray of shape (p, p) or (p, p, t)
            In squared units of y.
        """
        if getattr(self, "method_", "exact") != "exact":
            return self.estimator_.latent_mean_and_covariance(validated(self, X))
        white = self._white_variance()
        mean, covariance = self.predict(X, return_cov=True)
        rows = np.arange(len(mean))
        covariance[rows, rows] -= white
        return mean, covariance

    def sample_f(self, X: ArrayLike, n_samples: int = 1, random_state=0) -> np.ndarray:
        """Draw f jointly over the rows of X, without noise; from the prior before `fit`.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object
        n_samples : int, default=1
        random_state : int, RandomState instance or None, default=0

        Returns
        -------
        ndarray of shape (p, n_samples) or (p, t, n_samples)
        """
        check_n_samples(n_samples)
        if getattr(self, "method_", "exact") != "exact":
            return self.estimator_.sample_f(validated(self, X), n_samples, random_state)
        rng = check_random_state(random_state)
        mean, covariance = self.latent_mean_and_covariance(X)
        shape = len(mean), n_samples
        if mean.ndim == 1:
            return mean[:, None] + covariance_root(covariance) @ rng.standard_normal(shape)
        roots = [covariance_root(each) for each in np.moveaxis(covariance, 2, 0)]
        return mean[:, :, None] + np.stack([R @ rng.standard_normal(shape) for R in roots], 1)

    def _white_variance(self) -> Any:
        """Variance of the noise of the kernel, in squared units of y; ValueError if unknown."""
        kernel = getattr(self, "kernel_", self.kernel)
        white = 0.0 if kernel is None else white_variance(kernel)
        if white is None:
            raise ValueError(
                f"kernel={kernel} does not tell its noise from f; write it as a sum of f and "
                "WhiteKernel(noise_level)."
            )
        return white * np.square(getattr(self, "_y_train_std", 1.0))

    def _predictive_gradients(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        """Mean and standard deviation, (p,) or (p, t), and their gradients, (p, d) or (p, t, d)."""
        check_is_fitted(self, "kernel_")
        if self.method_ != "exact":
            return self._gradients_of_estimator(X)
        size = tile_rows(16 * TILE_MATRICES * len(self.X_train_))
        tiles = [self._gradients_of(X[start : start + size]) for start in range(0, len(X), size)]
        mean, var, d_mean, d_var = map(np.concatenate, zip(*tiles, strict=True))
        mean, scale = self._in_units(mean)
        std, scales = np.sqrt(np.maximum(var, 0.0)), scale.reshape(-1, 1)
        slopes = scales * d_mean, scales * std_gradient(d_var, std)[:, None]  # (p, t, d) each
        d_mean, d_std = (slope if mean.ndim > 1 else slope[:, 0] for slope in slopes)
        return mean, of_targets(std, scale), d_mean, d_std

    def _gradients_of(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of scaled targets: mean (p,) or (p, t), variance (p,), and (p, t, d) and (p, d)."""
        K, pull = cross_gram_with_gradient(self.kernel_, X, self.X_train_)
        var, weights = variance_and_weights(self.L_, K, self.kernel_.diag(X))
        targets = self.alpha_.reshape(len(self.alpha_), -1).T
        d_mean = np.stack([pull(alpha) for alpha in targets], 1)  # (p, t, d)
        d_var = variance_gradient(self.kernel_, X) - 2 * pull(weights.T)
        return K @ self.alpha_, var, d_mean, d_var

    def _gradients_of_estimator(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same by another method, without the noise of `alpha`."""
        asked = {"return_std": True, "return_mean_grad": True, "return_std_grad": True}
        mean, std, d_mean, d_std = self.estimator_.predict(X, **asked)
        if self._alpha:
            d_var = 2 * std[..., None] * d_std
            std = np.sqrt(np.maximum(std**2 - self._alpha * np.square(self._y_train_std), 0.0))
            d_std = std_gradient(d_var, std)
        return mean, std, d_mean, d_std


def white_variance(kernel: Kernel) -> float | None:
    """Variance of the white noise of sums and of products with constants; None if unknown.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> white_variance(RBF() + 2.0 * (WhiteKernel(0.25) + WhiteKernel(0.125)))
    0.75
    >>> white_variance(RBF() * WhiteKernel(0.2)) is None
    True
    """
    if type(kernel) is WhiteKernel:
        return float(kernel.noise_level)
    parts = kernel.get_params().values()
    if not any(isinstance(part, WhiteKernel) for part in parts):
        return 0.0
    if type(kernel) not in (Sum, Product):
        return None
    if type(kernel) is Sum:
        first, second = white_variance(kernel.k1), white_variance(kernel.k2)
        return None if first is None or second is None else first + second
    constant, other = kernel.k1, kernel.k2
    if type(other) is ConstantKernel:
        constant, other = other, constant
    white = white_variance(other)
    if type(constant) is not ConstantKernel or white is None:
        return None
    return float(constant.constant_value) * white
