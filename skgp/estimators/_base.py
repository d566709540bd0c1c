r"""What every estimator shares, and the interface of the regressors.

Classifiers build on `BaseGP` in `skgp.estimators._base_classifier`. A concrete regressor derives
from `BaseGPRegressor`, has an ``__init__`` that stores its parameters, and extends
``_parameter_constraints``. Let :math:`z = (y - \bar y) / s_y` be the standardised target and
:math:`z = f(x) + \varepsilon`. The estimator provides

===================================== ==========================================================
``fit(X, y, sample_weight=None)``     see the sketch below
``_latent_mean(X)``                   :math:`E[f]`, shape (n,); the fast path of ``predict(X)``
``_latent_mean_and_variance(X)``      :math:`E[f], V[f]`, shapes (n,), (n,); no noise
``_latent_mean_and_covariance(X)``    the same with the covariance, shape (n, n)
``_noise_variance``                   float set by ``fit``: :math:`V[\varepsilon]`, in units of z^2
===================================== ==========================================================

Hooks take a float64 array X (n, d) that may be read-only, in the units of the user, and return
float64 arrays, the same for a row whatever rows come with it. It may also override

===================================== ==========================================================
``_bytes_per_row()``                  memory that the hooks above take for a row of X
``_latent_samples(X, n, rng)``        joint draws of f, shape (n_rows, n): no dense covariance
``_predictive_moments(mean, var)``    mean and variance of z given those of f
``_predictive_quantiles(mean, var,    quantiles of z, shape (n, q)
quantiles)``
``_predictive_log_density(z, mean,    :math:`\log p(z)`, shape (n,)
var)``
``_sample_observations(f, rng)``      draws of z given draws of f
===================================== ==========================================================

the last four of which are those of `GaussianPredictive` unless overridden. A ``fit`` reads::

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, sample_weight=None):
        with fit_session(self, X, y, sample_weight=sample_weight, n_stages=2) as session:
            X, y, sample_weight = self._validate_training(X, y, sample_weight)
            z = self._standardise_target(y, sample_weight)
            backend = self._resolve_backend()
            kernel = self._resolve_kernel(X, lambda: default_kernel(X, z))
            with session.stage("solve", max_iter=self.max_iter) as callback:
                ...
            self.kernel_ = kernel.clone_with_theta(theta)
            warn_at_bounds(self.kernel_)
        return self

Rows of weight 0 are dropped by ``_validate_training``: what follows sees positive weights only. It
does not copy X where it need not: a fit that keeps rows of X keeps a copy.
"""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.callback import CallbackSupportMixin
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.validation import check_is_fitted, validate_data

from skgp.estimators._backend import Backend, resolve_backend
from skgp.estimators._compat import StrOptions, check_sample_weight
from skgp.estimators._predictive import (
    GaussianPredictive,
    clip_variance,
    covariance_root,
    is_constant,
)
from skgp.kernels import split_noise

#: Bytes that the hooks may take at once while predicting.
PREDICTION_MEMORY = 256 * 2**20


class BaseGP(CallbackSupportMixin, BaseEstimator, metaclass=ABCMeta):
    """Validation, computing resources, kernel and latent process of every estimator.

    The hooks that a concrete estimator provides are listed at the top of this module and of
    `skgp.estimators._base_classifier`. The latent arrays of a classifier have a second axis, one
    column a latent process: (n, c) where a regressor has (n,).
    """

    _parameter_constraints: dict[str, list[Any]] = {
        "kernel": [Kernel, None],
        "optimizer": [StrOptions({"auto"}), None],
        "random_state": ["random_state"],
        "device": [str, torch.device],
        "dtype": [StrOptions({"float32", "float64"})],
        "n_jobs": [Integral, None],
        "verbose": ["verbose"],
    }

    @abstractmethod
    def _latent_mean(self, X: np.ndarray) -> np.ndarray:
        """Return the posterior mean of f, shape (n,)."""

    @abstractmethod
    def _latent_mean_and_variance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of f, shapes (n,) and (n,)."""

    def _bytes_per_row(self) -> int:
        """Return the memory in bytes that the latent hooks take for one row of X."""
        return 2**16

    def _resolve_backend(self) -> Backend:
        """Resolve ``device``, ``dtype`` and ``random_state``."""
        return resolve_backend(self.device, self.dtype, self.random_state)

    def _resolve_kernel(self, X: np.ndarray, default: Callable[[], Kernel]) -> Kernel:
        """Return a checked copy of ``kernel``, or the data-driven default when it is None.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        default : callable
            Makes the default kernel; called only when needed.

        Raises
        ------
        TypeError
            If a part of the kernel has no reading in torch.
        ValueError
            If a WhiteKernel is not a summand at the top level, or the kernel does not fit the
            number of columns of X.
        """
        if self.kernel is None:
            return default()
        kernel = clone(self.kernel)
        split_noise(kernel)  # raises for what skgp cannot read
        try:
            kernel(X[:1])
        except ValueError as error:
            raise ValueError(
                f"kernel={kernel} does not fit X of {X.shape[1]} columns: {error} "
                "Give one length scale, or one a column."
            ) from error
        return kernel

    def _validate_prediction(self, X: ArrayLike) -> np.ndarray:
        """Return X (n, d) as float64, checked against the columns seen by ``fit``."""
        check_is_fitted(self)
        return validate_data(self, X, reset=False, dtype=np.float64)

    def _by_chunks(self, hook: Callable, X: np.ndarray):
        """Apply a latent hook to blocks of rows that fit in ``PREDICTION_MEMORY``."""
        n_rows = max(1, PREDICTION_MEMORY // self._bytes_per_row())
        parts = [hook(X[rows]) for rows in gen_batches(len(X), n_rows)]
        if isinstance(parts[0], tuple):
            return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.concatenate(parts)

    def _latent_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and clipped variance of f for all rows of X, chunk by chunk."""
        mean, var = self._by_chunks(self._latent_mean_and_variance, X)
        return mean, clip_variance(var)

    def latent_mean_and_variance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of the latent process f.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean, var : ndarray of shape (n,)
            Without observation noise. Of a regressor, in the units of y and their square.
        """
        return self._latent_moments(self._validate_prediction(X))


def keep_weighted_rows(
    X: np.ndarray, y: np.ndarray, sample_weight: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the rows of positive weight and their weights (float64), or None as it came.

    Raises
    ------
    ValueError
        If the weights are negative, not finite, all 0, or not one a row.
    """
    if sample_weight is None:
        return X, y, None
    sample_weight = check_sample_weight(sample_weight, X)
    kept = sample_weight > 0
    if kept.all():
        return X, y, sample_weight
    return X[kept], y[kept], sample_weight[kept]


class BaseGPRegressor(GaussianPredictive, RegressorMixin, BaseGP):
    r"""The predictive interface of every regressor, in the units of y.

    A prediction describes a new observation :math:`y = \bar y + s_y (f(x) + \varepsilon)`, noise
    included. The hooks that a concrete regressor provides are listed at the top of this module.

    Attributes
    ----------
    y_mean_, y_scale_ : float
        Standardisation of the target: :math:`\bar y` and :math:`s_y`; 0 and 1 without
        ``normalize_y``.
    noise_variance_ : float
        Variance of the observation noise, in squared units of y.
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    """

    _parameter_constraints: dict[str, list[Any]] = {
        **BaseGP._parameter_constraints,
        "normalize_y": ["boolean"],
    }

    @abstractmethod
    def _latent_mean_and_covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and covariance of f, shapes (n,) and (n, n)."""

    # ---- training ------------------------------------------------------------------------

    def _validate_training(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, *, reset=True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return X (n, d), y (n,) and the weights (n,) or None, as float64.

        A row of weight 0 counts for nothing and is dropped. ``reset=False`` (``partial_fit``)
        checks the columns of X against those seen before.

        Raises
        ------
        ValueError
            If X or y hold NaN or infinity, if y is not a vector of numbers, or if the weights are
            negative, all 0, or not one a row.
        TypeError
            If X is sparse.
        """
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64, y_numeric=True)
        return keep_weighted_rows(X, y.astype(np.float64, copy=False), sample_weight)

    def _standardise_target(
        self, y: np.ndarray, sample_weight: np.ndarray | None = None
    ) -> np.ndarray:
        """Set ``y_mean_`` and ``y_scale_`` (weighted) and return ``z``, shape (n,).

        A constant y, up to rounding, is centred and not scaled.
        """
        self.y_mean_, self.y_scale_ = 0.0, 1.0
        if self.normalize_y:
            self.y_mean_ = float(np.average(y, weights=sample_weight))
            centred = y - self.y_mean_
            scale = float(np.sqrt(np.average(centred**2, weights=sample_weight)))
            if is_constant(scale, y):
                return np.zeros_like(y)  # and not the rounding of their mean
            self.y_scale_ = scale
        return self._to_z(y)

    def _to_z(self, y: np.ndarray) -> np.ndarray:
        """Standardise targets with ``y_mean_`` and ``y_scale_``."""
        return (y - self.y_mean_) / self.y_scale_

    def _to_y(self, z: np.ndarray) -> np.ndarray:
        """Return standardised values, of any shape, in the units of y."""
        return self.y_mean_ + self.y_scale_ * z

    @property
    def noise_variance_(self) -> float:
        """Variance of the observation noise, in squared units of y."""
        return self._noise_variance * self.y_scale_**2

    def _latent_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState
    ) -> np.ndarray:
        """Return joint draws of f at the rows of X, shape (n, n_samples); O(n^3)."""
        mean, covariance = self._latent_mean_and_covariance(X)
        root = covariance_root(covariance)
        return mean[:, None] + root @ rng.standard_normal((len(X), n_samples))

    # ---- the public interface -----------------------------------------------------------

    def predict(self, X: ArrayLike, return_std: bool = False, return_cov: bool = False):
        """Predict a new observation y at each row of X.

        The mean alone takes the fast path.

        Parameters
        ----------
        X : array-like of shape (n, d)
        return_std : bool, default=False
            Also return the standard deviation, observation noise included.
        return_cov : bool, default=False
            Also return the joint covariance, observation noise included on its diagonal.

        Returns
        -------
        mean : ndarray of shape (n,)
        std : ndarray of shape (n,)
            Only when ``return_std`` is True.
        covariance : ndarray of shape (n, n)
            Only when ``return_cov`` is True. In squared units of y.

        Raises
        ------
        RuntimeError
            If both ``return_std`` and ``return_cov`` are True.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        X = self._validate_prediction(X)
        if return_cov:
            return self._predict_with_covariance(X)
        if return_std:
            mean, var = self._predictive_moments(*self._latent_moments(X))
            return self._to_y(mean), self.y_scale_ * np.sqrt(var)
        return self._to_y(self._by_chunks(self._latent_mean, X))

    def _predict_with_covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the covariance of new observations, in the units of y."""
        mean, covariance = self._latent_mean_and_covariance(X)
        latent_var = clip_variance(covariance.diagonal())
        mean, var = self._predictive_moments(mean, latent_var)
        # Noise is independent from row to row: it adds to the diagonal only.
        covariance = covariance.copy()
        np.fill_diagonal(covariance, var)
        return self._to_y(mean), self.y_scale_**2 * covariance

    def latent_mean_and_variance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of the latent function, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean, var : ndarray of shape (n,)
            In the units of y, and in squared units of y.
        """
        mean, var = super().latent_mean_and_variance(X)
        return self._to_y(mean), self.y_scale_**2 * var

    def predict_quantiles(self, X: ArrayLike, quantiles: ArrayLike) -> np.ndarray:
        """Predict quantiles of a new observation y at each row of X.

        Parameters
        ----------
        X : array-like of shape (n, d)
        quantiles : float or array-like of shape (q,)
            Probabilities, strictly between 0 and 1.

        Returns
        -------
        ndarray of shape (n, q), or (n,) for one number
            One column a probability, in the units of y.

        Raises
        ------
        ValueError
            If ``quantiles`` is empty, of two dimensions, or leaves the open interval (0, 1).
        """
        X = self._validate_prediction(X)
        levels = np.asarray(quantiles, dtype=np.float64)
        if levels.ndim > 1 or levels.size == 0 or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(
                "quantiles must be one probability or a list of them, strictly between 0 and 1; "
                f"got {quantiles!r}."
            )
        mean, var = self._latent_moments(X)
        z = self._predictive_quantiles(mean, var, np.atleast_1d(levels))
        y = self._to_y(z)
        return y[:, 0] if levels.ndim == 0 else y

    def predict_interval(
        self, X: ArrayLike, coverage: float = 0.95
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the central interval that holds a new observation y with given probability.

        Parameters
        ----------
        X : array-like of shape (n, d)
        coverage : float, default=0.95
            Probability, strictly between 0 and 1. Half of the rest lies on either side.

        Returns
        -------
        lower, upper : ndarray of shape (n,)

        Raises
        ------
        ValueError
            If ``coverage`` leaves the open interval (0, 1).
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must lie strictly between 0 and 1; got {coverage!r}.")
        tail = (1 - coverage) / 2
        lower, upper = self.predict_quantiles(X, [tail, 1 - tail]).T
        return lower, upper

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state=0) -> np.ndarray:
        """Draw new observations y, jointly over the rows of X.

        Parameters
        ----------
        X : array-like of shape (n, d)
        n_samples : int, default=1
        random_state : int, RandomState instance or None, default=0

        Returns
        -------
        ndarray of shape (n, n_samples)
            One column a draw, observation noise included.
        """
        X = self._validate_prediction(X)
        rng = check_random_state(random_state)
        f = self._latent_samples(X, n_samples, rng)
        return self._to_y(self._sample_observations(f, rng))

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        r"""Return the log-density of each observation under its own prediction.

        .. math:: \log p(y_i \mid x_i) = \log p(z_i \mid x_i) - \log s_y.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)

        Returns
        -------
        ndarray of shape (n,)
            In nats, for y in its own units. Minus its mean is the "MNLP" of the literature.
        """
        check_is_fitted(self)
        X, y = validate_data(self, X, y, reset=False, dtype=np.float64, y_numeric=True)
        mean, var = self._latent_moments(X)
        return self._predictive_log_density(self._to_z(y), mean, var) - np.log(self.y_scale_)
