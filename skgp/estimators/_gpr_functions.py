"""The latent function of `GaussianProcessRegressor`, and gradients of its predictions in X."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Product, Sum, WhiteKernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._front_door import validated
from skgp.estimators._functions import std_gradient
from skgp.estimators._predictive import covariance_root, of_targets
from skgp.estimators._validation import check_n_samples
from skgp.estimators.defaults import TILE_MATRICES
from skgp.inference.dense import variance_and_weights
from skgp.kernels.training import cross_gram_with_gradient, variance_gradient
from skgp.linalg.runtime import tile_rows


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

    # ---- gradients in X --------------------------------------------------------------------

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
