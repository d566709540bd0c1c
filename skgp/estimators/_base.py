"""What every estimator shares: validation, computing resources, kernel and latent process.

Regressors build on `BaseGP` in `skgp.estimators._base_regressor`, classifiers in
`skgp.estimators._base_classifier`; the hooks that a concrete estimator provides are listed there.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.callback import CallbackSupportMixin
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import gen_batches
from sklearn.utils.validation import check_is_fitted, validate_data

from skgp.estimators._backend import Backend, resolve_backend
from skgp.estimators._compat import StrOptions, check_sample_weight
from skgp.estimators._fitting import asked_model, in_few_threads
from skgp.estimators._options import Option, warn_of_idle_options
from skgp.estimators._predictive import clip_variance
from skgp.estimators._validation import bounded_inputs, check_likelihood
from skgp.estimators.defaults import PREDICTION_MEMORY
from skgp.kernels import split_noise
from skgp.kernels.linear import at_origin


class BaseGP(CallbackSupportMixin, BaseEstimator, metaclass=ABCMeta):
    """Validation, computing resources, kernel and latent process of every estimator.

    The latent arrays of a classifier have a second axis, one column a latent process: (n, c) where
    a regressor has (n,).
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

    #: Where parameters have an effect that not always have one.
    _option_rules: tuple[Option, ...] = ()
    #: Fitted attributes that ``partial_fit`` or a warm start changes in place.
    _updated_in_place: frozenset[str] = frozenset()

    def __sklearn_is_fitted__(self) -> bool:
        """Whether a fit came to its end: `fit_context` sets all of its state at once."""
        return hasattr(self, "kernel_")

    @property
    def _n_threads(self) -> int | None:
        """Threads of fits and predictions, as ``n_jobs`` counts."""
        return self.n_jobs

    def _validate_params(self) -> None:
        check_likelihood(self, BaseGP)
        super()._validate_params()

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
        return at_origin(kernel, X)

    def _begin_fit(self, *, informed: bool = True) -> None:
        """Compare the model asked for with that of the last fit, once the data are validated.

        Sets ``_goes_on``: whether a warm start was asked for and there is a fit to go on from.
        Warns of parameters without effect. ``informed=False`` says that the targets are of one
        row, or of one class, in which every amplitude of f would be nought.
        """
        self._informed = informed
        warn_of_idle_options(self, fitted=False)
        model = asked_model(self)
        self._goes_on = getattr(self, "warm_start", False) and model == getattr(
            self, "_fitted_model", None
        )
        self._fitted_model = model

    @property
    def _learns(self) -> bool:
        """Whether hyper-parameters move in this fit: they may, and the targets tell of them."""
        return self.optimizer is not None and self._informed

    def _validate_prediction(self, X: ArrayLike) -> np.ndarray:
        """Return X (n, d) as float64, checked against the columns seen by ``fit``."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return bounded_inputs(X, self.kernel_.is_stationary())

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

    @in_few_threads
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
