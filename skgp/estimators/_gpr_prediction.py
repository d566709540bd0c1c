"""Predictions of `GaussianProcessRegressor`, and its evidence at theta."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._base import resolve_device
from skgp.estimators._fitting import within_limits
from skgp.estimators._front_door import evidence_or_infinity, validated
from skgp.estimators._functions import RegressorFunctions, check_gradients_asked, white_variance
from skgp.estimators._predictive import of_targets
from skgp.estimators._validation import (
    check_joint_memory,
    check_n_samples,
    checked_levels,
    ends_of,
    told_of_text,
)
from skgp.estimators.defaults import LIMITED_PAIRS, TILE_LEAST, TILE_MATRICES, TILE_PAIRS
from skgp.inference.exact import covariance, posterior_mean, variance
from skgp.kernels.training import cross_gram, training_gram
from skgp.learning.evidence import TargetsEvidence
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import one_thread, tile_rows


class RegressorPredictions(RegressorFunctions):
    """Prior, exact posterior, or what the estimator of another method predicts."""

    alpha: Any
    n_targets: int | None
    device: Any
    reason_: str
    y_train_: np.ndarray
    log_marginal_likelihood_value_: float

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
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        if return_mean_grad or return_std_grad:
            check_gradients_asked(return_std, return_cov, return_std_grad)
            found = self._predictive_gradients(validated(self, X))
            asked = True, return_std, return_mean_grad, return_std_grad
            return tuple(itertools.compress(found, asked))
        X = validated(self, X)
        if not hasattr(self, "kernel_"):
            return self._prior(X, return_std, return_cov)
        if self.method_ != "exact":
            return self._predict_by_estimator(X, return_std, return_cov)
        if return_cov or len(X) * len(self.X_train_) > LIMITED_PAIRS:
            return self._within_limits(X, return_std, return_cov)
        with one_thread(pools=False):
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
            means.append(posterior_mean(K, self.alpha_))
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
        found = self.estimator_.predict(X, return_std=return_std, return_cov=return_cov)
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
        if getattr(self, "method_", "exact") != "exact" and not self._alpha:
            return self.estimator_.sample_y(validated(self, X), n_samples, random_state)
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
        if self.method_ != "exact":
            return self.estimator_.noise_variance_
        white = white_variance(self.kernel_)
        if white is None:
            raise AttributeError(f"kernel={self.kernel_} does not tell its noise from f.")
        noise = (white + self._alpha) * np.square(self._y_train_std)
        return noise[0] if np.shape(noise) == (1,) else noise

    def _observed(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of new observations, noise included."""
        mean, std = self.predict(X, return_std=True)
        var = std**2 + self._alpha * np.square(self._y_train_std)
        return mean, np.sqrt(np.maximum(var, np.finfo(float).tiny))

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
        check_is_fitted(self, "kernel_")
        if self.method_ != "exact":
            return self.estimator_.predict_quantiles(validated(self, X), quantiles)
        levels = checked_levels(quantiles)
        mean, std = self._observed(X)
        return mean[(...,) + (None,) * levels.ndim] + np.multiply.outer(std, ndtri(levels))

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
        check_is_fitted(self, "kernel_")
        if self.method_ != "exact":
            return self.estimator_.log_predictive_density(validated(self, X), y)
        mean, std = self._observed(X)
        with told_of_text(None, y, numeric=True):
            check_consistent_length(mean, y)
            targets = np.asarray(y, dtype=float).reshape(mean.shape)
        return np.asarray(norm.logpdf(targets, mean, std))

    def log_marginal_likelihood(
        self, theta: ArrayLike | None = None, eval_gradient: bool = False, clone_kernel: bool = True
    ):
        """Return the log marginal likelihood of the (scaled) training targets, in nats.

        Parameters
        ----------
        theta : array-like of shape (n_theta,) or None, default=None
            Logarithms of the kernel's free hyper-parameters; None is those of ``kernel_``. Of
            "exact" alone.
        eval_gradient : bool, default=False
            Also return the gradient with respect to theta.
        clone_kernel : bool, default=True
            False leaves theta in ``kernel_``.

        Returns
        -------
        value : float
            Minus infinity where the covariance has no Cholesky factor.
        gradient : ndarray of shape (n_theta,)
            Only when ``eval_gradient`` is True.
        """
        check_is_fitted(self, "kernel_")
        if theta is None:
            if eval_gradient:
                raise ValueError("Gradient can only be evaluated for theta!=None")
            return self.log_marginal_likelihood_value_
        if self.method_ != "exact":
            raise ValueError(
                f"The log marginal likelihood at other theta needs method='exact'; {self.method_!r}"
                f" was taken: {self.reason_}."
            )
        theta = np.array(theta, dtype=float)
        if not clone_kernel:
            self.kernel_.theta = theta
        Y = np.asarray(self.y_train_, dtype=float).reshape(len(self.y_train_), -1)
        gram = training_gram(self.kernel_, self.X_train_, resolve_device(self.device, len(Y)))
        evidence = TargetsEvidence(gram, Y, self._checked_alpha(self.y_train_))
        value, gradient = evidence_or_infinity(evidence, theta)
        value = np.float64(value)  # scikit-learn's type, which keeps its digits beside a float32
        return (-value, -gradient) if eval_gradient else -value

    def _checked_alpha(self, y: np.ndarray) -> float | np.ndarray:
        """`alpha` as a number or an array (n,)."""
        if np.ndim(self.alpha) == 0:
            return float(self.alpha)
        if self.alpha.shape not in ((1,), (len(y),)):
            raise ValueError(
                "alpha must be a scalar or an array with same number of entries as y. "
                f"({self.alpha.shape[0]} != {y.shape[0]})"
            )
        return float(self.alpha[0]) if np.ptp(self.alpha) == 0 else self.alpha
