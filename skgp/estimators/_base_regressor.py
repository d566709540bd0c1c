r"""The interface of the regressors.

A concrete regressor derives from `BaseGPRegressor`, or `StreamingGPRegressor` where it has a
``partial_fit``; has an ``__init__`` that stores its parameters; and extends
``_parameter_constraints``. Let :math:`z = (y - \bar y) / s_y` be the standardised target, of which
:math:`p(z \mid f)` is the likelihood; with Gaussian noise :math:`z = f(x) + \varepsilon`. The
estimator provides

===================================== ==========================================================
``_learn(data, session, backend)``    fits, as below
``_update(data, backend)``            changes the posterior by more data, for ``partial_fit``
``_latent_mean(X)``                   :math:`E[f]`, shape (n,); the fast path of ``predict(X)``
``_latent_mean_and_variance(X)``      :math:`E[f], V[f]`, shapes (n,), (n,); no noise
``_latent_mean_and_covariance(X)``    the same with the covariance, shape (n, n)
``_moment_tensors(rows)``             :math:`E[f], V[f]` of tensors, differentiable in the rows
``_likelihood``                       set by ``_learn``: a `skgp.likelihoods.NumericLikelihood` of
                                      z, or None for Gaussian noise
``_noise_variance``                   set by ``_learn`` where that is None:
                                      :math:`V[\varepsilon]`, a float in units of z^2
===================================== ==========================================================

``_one_target`` is None of an estimator that takes several targets, y (n, t), whose likelihood is
then Gaussian: they share a kernel and the noise, each in units of its own standard deviation. Means
of the latent hooks are (n, t), variances and covariances those of one. Fits are to the targets that
vary, and ``_by_target`` gives means those of the others.

The data of the first two are validated, of positive weight, standardised, and on the CPU; they may
share the memory of X, so that a fit that keeps observations keeps a copy. The latent hooks take a
float64 array X (n, d) that may be read-only, in the units of the user, and return float64 arrays,
the same for a row whatever rows come with it. It may also override ``_check_parameters()``;
``_bytes_per_row()``, the memory that the latent hooks take for a row of X; and
``_latent_samples(X, n, rng)``, joint draws of f of shape (n_rows, n), which then need no dense
covariance. Where f is not Gaussian, ``_quantiles(X, levels)``, ``_log_density(X, z)`` and
``_observation_samples(X, n, rng)`` say what the moments of f do not. A fit reads::

    def _learn(self, data, session, backend, *, stream=False):
        kernels = self._kernels(*arrays(data))
        with session.stage("solve", max_iter=self.max_iter) as callback:
            ...
        self.kernel_ = kernel.clone_with_theta(theta)
        warn_at_bounds(self.kernel_, self.kernel)
        self._likelihood = StudentT(scale, df)

``fit_context`` makes it a transaction: ``self`` is a draft, whose state replaces that of the
estimator at the end; where the fit raises, nothing has changed. It warns by ``warn_caller``.

A regressor of counts has ``_counts`` true and ``_is_additive`` false, and refuses a WhiteKernel by
`skgp.estimators._kernels.refuse_noise`.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.gaussian_process.kernels import Kernel
from sklearn.metrics import r2_score
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _num_samples

from skgp.blocks import Blocks, MappedBlocks, is_dask
from skgp.data import Data, n_observations
from skgp.estimators._base import Backend, BaseGP, keep_weighted_rows, to_tensor
from skgp.estimators._blocks import (
    check_all_counts,
    checked_moments,
    in_memory,
    over_rows,
    some_of,
    training_blocks,
)
from skgp.estimators._fitting import fit_context, fit_session, within_limits
from skgp.estimators._functions import LatentFunction, check_gradients_asked
from skgp.estimators._kernels import default_kernels, with_noise
from skgp.estimators._predictive import is_constant, of_targets, with_axes
from skgp.estimators._validation import (
    check_counts,
    check_exposure,
    check_joint_memory,
    check_n_samples,
    checked_levels,
    ends_of,
    validate_training_data,
)
from skgp.estimators.defaults import SIGNAL_BOUNDS
from skgp.kernels.expression import split_noise
from skgp.learning.hyperparameters import robust_location_scale

Values = TypeVar("Values", float, np.ndarray, torch.Tensor)


class BaseGPRegressor(RegressorMixin, LatentFunction):
    r"""The predictive interface of every regressor, in the units of y.

    A prediction describes a new observation :math:`y = \bar y + s_y z`, noise included:
    :math:`z = f(x) + \varepsilon`, or whatever the likelihood makes of f. Counts are y themselves.
    The hooks that a concrete regressor provides are listed at the top of this module.

    Attributes
    ----------
    y_mean_, y_scale_ : float or ndarray of shape (t,)
        Standardisation of the target: :math:`\bar y` and :math:`s_y`, mean and standard deviation;
        of those that are no gross outliers where the noise has heavy tails; 0 and 1 without
        ``normalize_y``, and of counts.
    noise_variance_ : float or ndarray of shape (t,)
        Variance of the observation noise, in squared units of y; infinite for Student-t noise of
        two degrees of freedom or fewer. Counts have none.
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    """

    _parameter_constraints: dict[str, list[Any]] = {
        **BaseGP._parameter_constraints,
        "normalize_y": ["boolean"],
    }

    normalize_y: bool
    y_mean_: Any
    y_scale_: Any
    #: Places of the targets, of several, that vary: a constant one would halve the variance of two.
    _varying: np.ndarray

    #: Whether the targets are counts, which have exposures.
    _counts = False
    #: Whether the likelihood adds noise to f: what it does not has no units to standardise.
    _is_additive = True
    #: Whether the likelihood has heavy tails: y is standardised in spite of outliers.
    _has_heavy_tails = False
    #: Of the variance of f, where the kernel is not given.
    _signal_bounds = SIGNAL_BOUNDS

    @property
    def _one_target(self) -> str | None:
        """Where a fit takes one target alone, as for `validate_training_data`; None if nowhere."""
        return ""

    @property
    def _has_several(self) -> bool:
        """Whether the fit was to several targets."""
        return np.ndim(getattr(self, "y_scale_", 1.0)) > 0

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self._one_target is None
        return tags

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
    ):
        """Learn the hyper-parameters, then the posterior of f.

        Parameters
        ----------
        X : array-like of shape (n, d)
            In any units.
        y : array-like of shape (n,) or (n, t)
            Counts, for ``likelihood="poisson"``. The estimator says whether it takes several
            targets.
        sample_weight : array-like of shape (n,), optional
            Likelihood weights: a weight of 2 equals the row given twice. Where the noise is
            learned only their ratios matter, and its variance is that at the mean weight.
        exposure : float or array-like of shape (n,), optional
            Of counts: the time, area or population that each is of, positive. It multiplies the
            rate: f describes the rate per unit. ``set_fit_request(exposure=True)`` routes it.

        Returns
        -------
        object
            The estimator.
        """
        self._fit(X, y, sample_weight, exposure)
        return self

    @property
    def noise_variance_(self) -> float:
        """Variance of the observation noise, in squared units of y."""
        return self._additive_variance() * self.y_scale_**2

    @over_rows
    @within_limits
    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
        return_cov: bool = False,
        exposure: ArrayLike | None = None,
        return_mean_grad: bool = False,
        return_std_grad: bool = False,
    ):
        """Predict a new observation y at each row of X.

        The mean alone takes the fast path, save of counts, whose mean depends on the variance of f.

        Parameters
        ----------
        X : array-like of shape (n, d)
        return_std : bool, default=False
            Also return the standard deviation, observation noise included.
        return_cov : bool, default=False
            Also return the joint covariance, observation noise included on its diagonal.
        exposure : float or array-like of shape (n,), optional
            Of counts: the time, area or population that each is of, which multiplies its rate.
            1 without it. ``set_predict_request(exposure=True)`` routes it through meta-estimators.
        return_mean_grad : bool, default=False
            Also return the gradients of the mean in X.
        return_std_grad : bool, default=False
            Also return those of the standard deviation, with ``return_std``.

        Returns
        -------
        mean : ndarray of shape (n,) or (n, t)
            With Student-t noise of one degree of freedom or fewer, which has none, the median.
        std : ndarray of shape (n,) or (n, t)
            Only when ``return_std`` is True. Infinite where noise has no variance.
        covariance : ndarray of shape (n, n) or (n, n, t)
            Only when ``return_cov`` is True. In squared units of y.
        mean_grad : ndarray of shape (n, d) or (n, t, d)
            Only when ``return_mean_grad`` is True. In units of y a unit of X.
        std_grad : ndarray of shape (n, d) or (n, t, d)
            Only when ``return_std_grad`` is True. 0 where the standard deviation is.

        Raises
        ------
        RuntimeError
            If both ``return_std`` and ``return_cov`` are True.
        ValueError
            If gradients are asked for with ``return_cov``, or those of a standard deviation without
            ``return_std``.
        MemoryError
            If there is no room for the covariance.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        if return_mean_grad or return_std_grad:
            check_gradients_asked(return_std, return_cov, return_std_grad)
        X = self._validate_prediction(X)
        offset = self._offset_at(exposure, X)
        if return_cov:
            remedy = "Ask for fewer of them at once, or for return_std=True"
            check_joint_memory(len(X), remedy, np.size(self.y_scale_))
            mean, covariance = self._predictive_covariance(
                *self._latent_mean_and_covariance(X), **offset
            )
            return self._to_y(mean), of_targets(covariance, self.y_scale_**2)
        if return_mean_grad or return_std_grad:
            found = self._predictive_gradients(X, **offset)
            asked = True, return_std, return_mean_grad, return_std_grad
            return tuple(itertools.compress(found, asked))
        if self._predicts_latent and not return_std:
            return self._to_y(self._by_chunks(self._latent_mean, X))
        mean, var = self._predictive_moments(*self._latent_moments(X), **offset)
        mean = self._to_y(mean)
        return (mean, self.y_scale_ * np.sqrt(var)) if return_std else mean

    @over_rows
    @within_limits
    def predict_quantiles(
        self, X: ArrayLike, quantiles: ArrayLike, exposure: ArrayLike | None = None
    ) -> np.ndarray:
        """Predict quantiles of a new observation y at each row of X.

        Parameters
        ----------
        X : array-like of shape (n, d)
        quantiles : float or array-like of shape (q,)
            Probabilities, strictly between 0 and 1.
        exposure : float or array-like of shape (n,), optional
            Of counts; see `predict`.

        Returns
        -------
        ndarray of shape (n, q) or (n, t, q), without the last axis for one number
            One column a probability, in the units of y. Of counts, the least whole number that y
            exceeds with no more than the probability left.

        Raises
        ------
        ValueError
            If ``quantiles`` is empty, of two dimensions, or leaves the open interval (0, 1).
        """
        X = self._validate_prediction(X)
        levels = checked_levels(quantiles)
        y = self._to_y(self._quantiles(X, np.atleast_1d(levels), **self._offset_at(exposure, X)))
        return y[..., 0] if levels.ndim == 0 else y

    def predict_interval(
        self, X: ArrayLike, coverage: float = 0.95, exposure: ArrayLike | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict the central interval that holds a new observation y with given probability.

        Parameters
        ----------
        X : array-like of shape (n, d)
        coverage : float, default=0.95
            Probability, strictly between 0 and 1. Half of the rest lies on either side. Of counts,
            whose probabilities jump, the interval holds y, ends included, with at least that
            probability.
        exposure : float or array-like of shape (n,), optional
            Of counts; see `predict`.

        Returns
        -------
        lower, upper : ndarray of shape (n,) or (n, t)

        Raises
        ------
        ValueError
            If ``coverage`` leaves the open interval (0, 1).
        """
        found = self.predict_quantiles(X, ends_of(coverage), exposure)
        found = found if is_dask(X) else np.asarray(found)  # of a frame, too
        return found[..., 0], found[..., 1]

    @over_rows
    @within_limits
    def sample_y(
        self,
        X: ArrayLike,
        n_samples: int = 1,
        random_state=0,
        exposure: ArrayLike | None = None,
    ) -> np.ndarray:
        """Draw new observations y, jointly over the rows of X.

        Parameters
        ----------
        X : array-like of shape (n, d)
        n_samples : int, default=1
        random_state : int, RandomState instance or None, default=0
        exposure : float or array-like of shape (n,), optional
            Of counts; see `predict`.

        Returns
        -------
        ndarray of shape (n, n_samples) or (n, t, n_samples)
            One column a draw, observation noise included. Counts are whole numbers, in float64 as
            all else.
        """
        check_n_samples(n_samples)
        X = self._validate_prediction(X)
        rng = check_random_state(random_state)
        return self._to_y(
            self._observation_samples(X, n_samples, rng, **self._offset_at(exposure, X))
        )

    @over_rows
    @within_limits
    def log_predictive_density(
        self, X: ArrayLike, y: ArrayLike, exposure: ArrayLike | None = None
    ) -> np.ndarray:
        r"""Return the log-density of each observation under its own prediction.

        .. math:: \log p(y_i \mid x_i) = \log p(z_i \mid x_i) - \log s_y.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,) or (n, t)
        exposure : float or array-like of shape (n,), optional
            Of counts; see `predict`.

        Returns
        -------
        ndarray of shape (n,) or (n, t)
            In nats, for y in its own units; of counts the log-probability. Minus its mean is the
            "MNLP" of the literature.

        Raises
        ------
        ValueError
            If y should hold counts and holds a negative or fractional number; names it. If y has
            other targets than those of the fit.
        """
        X, y = self._validate_scored(X, y, y_numeric=True, multi_output=self._has_several)
        if y.shape[1:] != np.shape(self.y_scale_):
            raise ValueError(
                f"y must have the {len(self.y_scale_)} targets of the fit; got the shape {y.shape}."
            )
        log_density = self._log_density(X, self._to_z(y), **self._offset_at(exposure, X))
        return log_density - np.log(self.y_scale_)

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
    ) -> float:
        """Return the coefficient of determination R^2 of the predicted means.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,) or (n, t)
        sample_weight : array-like of shape (n,), optional
        exposure : float or array-like of shape (n,), optional
            Of counts; see `predict`.

        Returns
        -------
        float
            The mean over targets.
        """
        mean = self.predict(X, exposure=exposure)
        return r2_score(*map(in_memory, (y, mean)), sample_weight=in_memory(sample_weight))

    # ---- what estimators build on --------------------------------------------------------

    def _fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None,
        exposure: ArrayLike | None,
        *,
        stream: bool = False,
    ) -> None:
        """Validate, standardise and learn; a `stream` keeps what later observations need."""
        self._check_parameters(stream=stream)
        backend = self._resolve_backend(None if stream else X)
        with fit_session(self, X, y, sample_weight=sample_weight) as session:
            given = X, y, sample_weight
            blocks = None
            if not stream:
                blocks = training_blocks(self, *given, exposure=exposure)
            if blocks is not None:
                self._learn_blocks(self._standardised(blocks, backend), session, backend)
                return
            rows, target, weight = map(in_memory, given)
            data = self._training_data(rows, target, weight, exposure, stream=stream)
            self._learn(data, session, backend, stream=stream)

    def _standardised(self, blocks: Blocks, backend: Backend) -> MappedBlocks:
        """The observations, y standardised by the moments of all."""
        moments = checked_moments(blocks, self.dtype)
        if self._counts:
            check_all_counts(moments)
        self._begin_fit(informed=moments.n_rows > 1)
        some = some_of(blocks, backend)
        self.y_mean_, self.y_scale_ = 0.0, 1.0
        if self.normalize_y and self._is_additive:
            self.y_mean_, scale = moments.mean, (moments.scatter / moments.weight) ** 0.5
            if is_constant(scale, np.array([moments.largest_target])):
                scale = 1.0
            elif self._has_heavy_tails:  # a pass over all would tell no more
                self.y_mean_, scale = robust_location_scale(some.y, some.weight)
            self.y_scale_ = scale
        unit = self._set_weight_scale(moments.n_rows, moments.weight)  # repeated rows are not seen
        standardised = partial(_standardise, shift=self.y_mean_, scale=self.y_scale_, unit=unit)
        return MappedBlocks(blocks, standardised, unit * moments.weight, standardised(some))

    def _training_data(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
        *,
        reset: bool = True,
        stream: bool = False,
    ) -> Data:
        """Observations of positive weight, in float64 on the CPU, y standardised.

        Of a `stream` y has one target. ``reset=False`` (``partial_fit``) checks the columns of X
        against those seen before, and standardises y as then.
        """
        n_rows, given = _num_samples(X), sample_weight
        one_target = " by partial_fit" if stream or not reset else self._one_target
        X, y = validate_training_data(
            self, X, y, one_target=one_target, reset=reset, y_numeric=True
        )
        X, y, sample_weight = keep_weighted_rows(X, self._checked_target(y), sample_weight)
        if reset:
            self._begin_fit(informed=len(y) > 1)
        offset = self._training_offset(exposure, n_rows, given)
        z = self._target(y, sample_weight) if reset else self._to_z(y)
        sample_weight = self._relative_weight(X, y, sample_weight, reset=reset)
        columns = sample_weight, None, None if offset is None else offset[:, None]
        return Data(
            to_tensor(X), to_tensor(z), *(None if c is None else to_tensor(c) for c in columns)
        )

    def _relative_weight(
        self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None, *, reset: bool
    ) -> np.ndarray | None:
        r"""Weights (n,) that sum to the number of observations, where the noise is learned.

        Then the likelihood :math:`\prod_i N(y_i; f, \sigma^2)^{w_i}` has as many powers of
        :math:`\sigma` as :math:`\prod_i N(y_i; f, \sigma^2 / w_i)`: weights without a common
        scale, or rows given twice, are no evidence of small noise. The first batch of a stream
        sets the scale of the others.
        """
        if reset:
            self._set_weight_scale(len(y), len(y) if weight is None else weight.sum())
        if not (self._is_additive and self._learns_noise):
            return weight
        scale = self._weight_scale * n_observations(X, y) / len(y)
        relative = scale * (np.ones(len(y)) if weight is None else weight)
        return None if (relative == 1.0).all() else relative

    def _set_weight_scale(self, n_rows: int, total: float) -> float:
        """Keep, and return, what makes the mean of weights of some `total` 1; 1 of fixed noise."""
        learns = self._is_additive and self._learns_noise
        self._weight_scale = n_rows / total if learns else 1.0
        return self._weight_scale

    @property
    def _learns_noise(self) -> bool:
        """Whether the variance of additive noise is searched for."""
        if getattr(self, "optimizer", None) is None:
            return False
        white = None if self._asked_kernel is None else split_noise(self._asked_kernel)[1]
        return white is None or not white.hyperparameter_noise_level.fixed

    def _checked_target(self, y: np.ndarray) -> np.ndarray:
        """Return y as contiguous float64; a ValueError names what should be a count and is not."""
        if self._counts:
            check_counts(y)
        return np.ascontiguousarray(y, dtype=np.float64)

    def _kernels(self, X: np.ndarray, sample_weight: np.ndarray | None) -> list[Kernel]:
        """Kernels to choose among, with noise: the one given, or the default ones."""
        if self.kernel is None:
            return default_kernels(X, sample_weight, bounds=self._signal_bounds)
        return [with_noise(self._given_kernel(X))]

    def _target(self, y: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
        """Set ``y_mean_`` and ``y_scale_`` (weighted) and return ``z``, of the shape of y.

        A constant y, up to rounding, is centred and not scaled.
        """
        mean: Any = np.zeros(y.shape[1:])
        scale: Any = np.ones(y.shape[1:])
        constant = False
        if self.normalize_y and self._is_additive:
            mean = np.average(y, axis=0, weights=sample_weight)
            scale = np.sqrt(np.average((y - mean) ** 2, axis=0, weights=sample_weight))
            constant = is_constant(scale, y)
            if self._has_heavy_tails and not constant:
                weight = None if sample_weight is None else to_tensor(sample_weight)
                mean, scale = robust_location_scale(to_tensor(y), weight)
            scale = np.where(constant, 1.0, scale)
        several = y.ndim > 1
        self.y_mean_, self.y_scale_ = (mean, scale) if several else (float(mean), float(scale))
        z = np.where(constant, 0.0, self._to_z(y))  # and not the rounding of their mean
        if several:
            found = np.flatnonzero(~np.broadcast_to(constant, y.shape[1]))
            self._varying = found if len(found) else np.arange(y.shape[1])
            z = np.ascontiguousarray(z[:, self._varying])
        return z

    def _to_z(self, y: Values) -> Values:
        """Standardise targets with ``y_mean_`` and ``y_scale_``."""
        return (y - self.y_mean_) / self.y_scale_

    def _to_y(self, z: Values) -> Values:
        """Return standardised values, of any shape, in the units of y; (n, t, ...) of targets."""
        if not self._has_several:
            return self.y_mean_ + self.y_scale_ * z
        mean, scale = (with_axes(v, np.ndim(z) - 2) for v in (self.y_mean_, self.y_scale_))
        return mean + scale * z

    def _by_target(self, mean: Any) -> Any:
        """Means (n, t) of all targets, given those of targets that vary; (n,) is that of one."""
        if not self._has_several or len(self._varying) == len(self.y_scale_):
            return mean
        shape = len(mean), len(self.y_scale_)
        all_means = mean.new_zeros(shape) if torch.is_tensor(mean) else np.zeros(shape)
        all_means[:, self._varying.tolist()] = mean
        return all_means

    def _latent_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, var = super()._latent_moments(X)
        return mean, var if var.ndim == mean.ndim else var[:, None]

    def _quantiles(self, X: np.ndarray, levels: np.ndarray, **offset: np.ndarray) -> np.ndarray:
        """Return the quantiles of z at the rows of X, shape (n, q)."""
        return self._predictive_quantiles(*self._latent_moments(X), levels, **offset)

    def _log_density(self, X: np.ndarray, z: np.ndarray, **offset: np.ndarray) -> np.ndarray:
        """Return log p(z) of each row of X and its z, shape (n,)."""
        return self._predictive_log_density(z, *self._latent_moments(X), **offset)

    def _observation_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState, **offset: np.ndarray
    ) -> np.ndarray:
        """Return joint draws of z at the rows of X, shape (n, n_samples)."""
        return self._sample_observations(self._latent_samples(X, n_samples, rng), rng, **offset)

    def _offset_at(self, exposure: ArrayLike | None, X: np.ndarray) -> dict[str, np.ndarray]:
        """Return the keyword ``offset`` of the hooks above; nothing without exposures."""
        offset = check_exposure(exposure, len(X), self)
        return {} if offset is None else {"offset": offset}

    def _training_offset(
        self, exposure: ArrayLike | None, n_rows: int, sample_weight: ArrayLike | None
    ) -> np.ndarray | None:
        """Return the log-exposures of those of n rows whose weight is positive, or None."""
        weights = None if sample_weight is None else np.asarray(sample_weight)
        if exposure is not None and weights is not None and weights.ndim == 1:
            given = np.asarray(exposure, dtype=np.float64)
            if given.size in (1, n_rows):  # of one a row, those that count; others are refused
                exposure = np.where(weights > 0, given.reshape(-1), 1.0)
        offset = check_exposure(exposure, n_rows, self)
        if offset is None or weights is None or weights.ndim != 1:
            return offset
        return offset[weights > 0]


def _standardise(data: Data, *, shift: float, scale: float, unit: float) -> Data:
    weight = None if data.weight is None else unit * data.weight
    return replace(data, y=(data.y - shift) / scale, weight=weight)


class StreamingGPRegressor(BaseGPRegressor):
    """A regressor that observations may be added to."""

    def _streams(self) -> bool:
        """Whether there is a ``partial_fit``; if not, an AttributeError says why."""
        return True

    @available_if(lambda self: self._streams())
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
    ):
        """Add observations to the posterior, as the notes above say; the first call is a `fit`.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        sample_weight : array-like of shape (n,), optional
        exposure : float or array-like of shape (n,), optional

        Returns
        -------
        object
            The estimator.
        """
        if not self._has_stream:
            self._warn_of_forgetting()
            self._fit(X, y, sample_weight, exposure, stream=True)
            return self
        self._check_parameters(stream=True)
        self._check_goes_on()
        if self._has_several:
            raise ValueError(
                f"partial_fit goes on from a fit to one target; the last was to "
                f"{len(self.y_scale_)}. Call fit with all rows."
            )
        data = self._training_data(X, y, sample_weight, exposure, reset=False)
        self._update(data, self._resolve_backend())
        return self

    @abstractmethod
    def _update(self, data: Data, backend: Backend) -> None:
        """Change the posterior by observations beyond those of the last call."""
