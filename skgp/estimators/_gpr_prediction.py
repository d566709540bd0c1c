"""Predictions of `GaussianProcessRegressor`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._fitting import within_limits
from skgp.estimators._front_door import validated
from skgp.estimators._kernels import white_variance
from skgp.estimators._predictive import (
    gaussian_draws,
    normal_log_density,
    normal_quantiles,
    of_targets,
    parts_asked,
    std_gradient,
)
from skgp.estimators._validation import (
    check_joint_memory,
    check_n_samples,
    checked_levels,
    ends_of,
    told_of_text,
)
from skgp.estimators.defaults import FEW_PAIRS, LIMITED_PAIRS, TILE_LEAST, TILE_MATRICES, TILE_PAIRS
from skgp.inference.exact import covariance, variance, variance_and_weights
from skgp.kernels.training import cross_gram, cross_gram_with_gradient, variance_gradient
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import one_thread, tile_rows


def _by_estimator(method: Callable) -> Callable:
    """Decorate a prediction at X that the estimator of another method than "exact" makes."""

    @functools.wraps(method)
    def predict(self, X, *args, **kwargs):
        if self._other is None:
            return method(self, X, *args, **kwargs)
        return getattr(self._other, method.__name__)(validated(self, X), *args, **kwargs)

    return predict


class RegressorPredictions:
    """Prior, exact posterior, or what the estimator of another method predicts; and of f."""

    kernel: Any
    n_targets: int | None
    kernel_: Any
    X_train_: Any
    L_: np.ndarray
    alpha_: np.ndarray
    _y_train_mean: np.ndarray
    _y_train_std: np.ndarray
    _alpha: float  # the noise that predictions leave out, of scaled targets

    @property
    def _other(self) -> Any:
        """The fitted estimator of another method; None of "exact", and before `fit`."""
        return getattr(self, "estimator_", None)

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        return_cov: bool = False,
        return_mean_grad: bool = False,
        return_std_grad: bool = False,
    ):
        """Predict at each row of X, by the prior before `fit`.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object
        return_std : bool, default=False
            Also return the standard deviation: with the noise of the kernel, without that of
            `alpha`.
        return_cov : bool, default=False
            Also return the joint covariance, likewise.
        return_mean_grad : bool, default=False
            Also return the gradients of the mean in X, after `fit`; kernels that are called have
            none.
        return_std_grad : bool, default=False
            Also return those of the standard deviation, with ``return_std``.

        Returns
        -------
        mean : ndarray of shape (p,) or (p, t)
        std : ndarray of shape (p,) or (p, t)
            Only when ``return_std`` is True.
        covariance : ndarray of shape (p, p) or (p, p, t)
            Only when ``return_cov`` is True.
        mean_grad : ndarray of shape (p, d) or (p, t, d)
            Only when ``return_mean_grad`` is True.
        std_grad : ndarray of shape (p, d) or (p, t, d)
            Only when ``return_std_grad`` is True. 0 where the standard deviation is.
        """
        asked = parts_asked(return_std, return_cov, return_mean_grad, return_std_grad)
        X = validated(self, X)
        if asked:
            return tuple(itertools.compress(self._predictive_gradients(X), asked))
        if not hasattr(self, "kernel_"):
            return self._prior(X, return_std, return_cov)
        if self._other is not None:
            return self._predict_by_estimator(X, return_std, return_cov)
        pairs = len(X) * len(self.X_train_)
        if return_cov or pairs > LIMITED_PAIRS:
            return self._within_limits(X, return_std, return_cov)
        with one_thread(pools=pairs > FEW_PAIRS):
            return self._posterior(X, return_std, return_cov)

    def _prior(self, X: Any, return_std: bool, return_cov: bool) -> Any:
        fixed = ConstantKernel(1.0, "fixed") * RBF(1.0, "fixed")
        kernel = fixed if self.kernel is None else self.kernel
        targets = () if self.n_targets in (None, 1) else (self.n_targets,)
        mean = np.zeros((len(X), *targets))
        if not return_std and not return_cov:
            return mean
        spread = kernel(X) if return_cov else np.sqrt(kernel.diag(X))
        return mean, of_targets(spread, np.ones(targets))

    def _posterior(self, X: Any, return_std: bool, return_cov: bool) -> Any:
        """Mean in the units of y, and the standard deviation or covariance where asked for."""
        if return_cov:
            remedy = "Ask for fewer of them at once, or for return_std=True"
            check_joint_memory(len(X), remedy, np.size(self._y_train_std))
            K = cross_gram(self.kernel_, X, self.X_train_)  # (p, n)
            mean, scale = self._in_units(K @ self.alpha_)
            return mean, of_targets(covariance(self.L_, K, self.kernel_(X)), scale**2)
        means, variances = [], []
        n = len(self.X_train_)
        size = min(tile_rows(8 * TILE_MATRICES * n), max(TILE_LEAST, TILE_PAIRS // n))
        for start in range(0, len(X), size):
            rows = X[start : start + size]
            K = cross_gram(self.kernel_, rows, self.X_train_)
            means.append(K @ self.alpha_)
            if return_std:
                variances.append(variance(self.L_, K, self.kernel_.diag(rows)))
        mean, scale = self._in_units(np.concatenate(means))
        if not return_std:
            return mean
        var = np.concatenate(variances)
        if (var < 0).any():
            warn_caller(
                f"{(var < 0).sum()} of {len(var)} predicted variances were negative by rounding, "
                f"the least {var.min():.3g}, and were set to 0. Raise alpha, or add a WhiteKernel.",
                NumericalWarning,
            )
        return mean, of_targets(np.sqrt(np.maximum(var, 0.0)), scale)

    def _in_units(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean of scaled targets in the units of y, and the scale, () or (t,)."""
        mean = self._y_train_mean + self._y_train_std * mean
        mean = mean[:, 0] if mean.shape[1:] == (1,) else mean
        return mean, self._y_train_std.reshape(() if mean.ndim == 1 else -1)

    _within_limits = within_limits(_posterior)

    def _predict_by_estimator(self, X: np.ndarray, return_std: bool, return_cov: bool) -> Any:
        found = self._other.predict(X, return_std=return_std, return_cov=return_cov)
        if not (return_std or return_cov) or not self._alpha:
            return found
        mean, spread = found
        noise = self._alpha * np.square(self._y_train_std)
        if return_cov:
            return mean, spread - of_targets(np.eye(len(spread)), noise)
        return mean, np.sqrt(np.maximum(spread**2 - noise, 0.0))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state=0) -> np.ndarray:
        """Draw jointly over the rows of X, from the prior before `fit`.

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
        if self._other is not None and not self._alpha:
            return self._other.sample_y(validated(self, X), n_samples, random_state)
        rng = check_random_state(random_state)
        mean, cov = self.predict(X, return_cov=True)
        if mean.ndim == 1:
            return rng.multivariate_normal(mean, cov, n_samples).T
        draws = [
            rng.multivariate_normal(mean[:, j], cov[..., j], n_samples).T
            for j in range(mean.shape[1])
        ]
        return np.stack(draws, axis=1)

    @property
    def noise_variance_(self) -> Any:
        """Variance of the observation noise, in squared units of y."""
        check_is_fitted(self, "kernel_")
        if self._other is not None:
            return self._other.noise_variance_
        white = white_variance(self.kernel_)
        if white is None:
            raise AttributeError(f"kernel={self.kernel_} does not tell its noise from f.")
        noise = (white + self._alpha) * np.square(self._y_train_std)
        return noise[0] if np.shape(noise) == (1,) else noise

    def _observed(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of new observations, noise included."""
        check_is_fitted(self, "kernel_")
        mean, std = self.predict(X, return_std=True)
        return mean, std**2 + self._alpha * np.square(self._y_train_std)

    def predict_interval(
        self, X: ArrayLike, coverage: float = 0.95
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the central interval that holds a new observation y with given probability.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object
        coverage : float, default=0.95
            Strictly between 0 and 1.

        Returns
        -------
        lower, upper : ndarray of shape (p,) or (p, t)
            The noise of an array `alpha`, which says nothing of new points, is left out.
        """
        found = self.predict_quantiles(X, ends_of(coverage))
        return found[..., 0], found[..., 1]

    @_by_estimator
    def predict_quantiles(self, X: ArrayLike, quantiles: ArrayLike) -> np.ndarray:
        """Predict quantiles of a new observation y at each row of X.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object
        quantiles : float or array-like of shape (q,)
            Probabilities, strictly between 0 and 1.

        Returns
        -------
        ndarray of shape (p, q) or (p, t, q), without the last axis for one number
        """
        levels = checked_levels(quantiles)
        return normal_quantiles(*self._observed(X), levels)

    @_by_estimator
    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return the log-density of each observation under its own prediction.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object
        y : array-like of shape (p,) or (p, t)

        Returns
        -------
        ndarray of shape (p,) or (p, t)
            In nats, for y in its own units. The noise of an array `alpha`, which says nothing of
            new points, is left out.
        """
        mean, var = self._observed(X)
        with told_of_text(None, y, numeric=True):
            check_consistent_length(mean, y)
            targets = np.asarray(y, dtype=float).reshape(mean.shape)
        return normal_log_density(targets, mean, var)

    # ---- the function f

    @_by_estimator
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
        white = self._white_variance()
        mean, std = self.predict(X, return_std=True)
        return mean, np.maximum(std**2 - white, 0.0)

    @_by_estimator
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
        white = self._white_variance()
        mean, covariance = self.predict(X, return_cov=True)
        rows = np.arange(len(mean))
        covariance[rows, rows] -= white
        return mean, covariance

    @_by_estimator
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
        rng = check_random_state(random_state)
        mean, covariance = self.latent_mean_and_covariance(X)
        if mean.ndim == 1:
            return gaussian_draws(mean, covariance, n_samples, rng)
        targets = zip(mean.T, np.moveaxis(covariance, 2, 0), strict=True)
        return np.stack([gaussian_draws(*each, n_samples, rng) for each in targets], 1)

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
        if self._other is not None:
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
        mean, std, d_mean, d_std = self._other.predict(X, **asked)
        if self._alpha:
            d_var = 2 * std[..., None] * d_std
            std = np.sqrt(np.maximum(std**2 - self._alpha * np.square(self._y_train_std), 0.0))
            d_std = std_gradient(d_var, std)
        return mean, std, d_mean, d_std
