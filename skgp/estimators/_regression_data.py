"""Observations of a regressor: validated, weighted, and standardised target by target."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import _num_samples

from skgp.blocks import Blocks, MappedBlocks
from skgp.data import Data, n_observations
from skgp.estimators._base import Backend, clip_variance, keep_weighted_rows, to_tensor
from skgp.estimators._blocks import check_all_counts, checked_moments, some_of
from skgp.estimators._predictive import FourArrays, gradient_in, rounding_of
from skgp.estimators._target_scale import TargetScale
from skgp.estimators._validation import check_counts, check_exposure, validate_training_data
from skgp.estimators.defaults import GRAPH_COPIES, UNLIKE_WEIGHTS
from skgp.kernels.expression import split_noise
from skgp.learning.hyperparameters import robust_location_scale
from skgp.linalg import warn_caller
from skgp.linalg.runtime import to_arrays

Values = TypeVar("Values", float, np.ndarray, torch.Tensor)


class RegressionData(TargetScale):
    """What stands between observations in the units of y and those that a fit learns from."""

    @property
    def _one_target(self) -> str | None:
        """Where a fit takes one target alone, as for `validate_training_data`; None if nowhere."""
        return ""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self._one_target is None
        return tags

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
            if scale <= rounding_of(moments.largest_target):
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
            self._learn_warp(X, y, chooses=not stream)
        X = self._warped(X)
        relative = self._relative_weight(X, y, sample_weight, reset=reset)
        if reset and not stream:
            self._choose_scale(X, y, relative)
        offset = self._training_offset(exposure, n_rows, given)
        z = self._target(y, sample_weight) if reset else self._to_z(y)
        columns = relative, None, None if offset is None else offset[:, None]
        return Data(
            to_tensor(X), to_tensor(z), *(None if c is None else to_tensor(c) for c in columns)
        )

    def _choose_scale(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        """Decide what of y is modelled, where that is for the data; weights are relative."""

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
        if reset and weight is not None:
            _warn_of_unlike(weight)
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
        """Return y as contiguous float64; a ValueError names what the likelihood cannot have."""
        if self._counts:
            check_counts(y)
        return np.ascontiguousarray(y, dtype=np.float64)

    @property
    def _latent_device(self) -> torch.device:
        """Where the posterior lies."""
        return self._posterior.device

    @abstractmethod
    def _latent_mean_and_covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean, (n,) or (n, t), and covariance (n, n) of f."""

    def _moment_tensors(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the posterior mean and variance of f, (n,), at rows (n, d) on its device.

        Of several targets the means are (n, t). Differentiable in rows that ask for gradients.
        """
        mean, var = self._posterior.mean_and_variance(rows)
        return self._by_target(mean), var.reshape(len(var), -1)[:, 0]

    def _joint_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `_latent_mean_and_covariance`, of a process whose variance may depend on x."""
        return self._latent_mean_and_covariance(X)

    def _observation_moments(self, X: np.ndarray, **offset: np.ndarray) -> tuple[Any, Any]:
        """Return mean and variance of z at the rows of X."""
        return self._predictive_moments(*self._latent_moments(X), **offset)

    def _observation_covariance(self, X: np.ndarray, **offset: np.ndarray) -> tuple[Any, Any]:
        """Return the same with the covariance (n, n) in place of the variance."""
        mean, covariance = self._predictive_covariance(*self._joint_moments(X), **offset)
        covariance[np.diag_indices(len(X))] += self._excess_noise(X)
        return mean, covariance

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
        d_var = gradient_in(var.sum(), rows)
        if mean.ndim == 1:
            return to_arrays(mean, var, gradient_in(mean.sum(), rows), d_var)
        slopes = [gradient_in(column.sum(), rows) for column in mean.T]
        return to_arrays(mean, var[:, None], torch.stack(slopes, 1), d_var[:, None])

    def _varied_gradients(self, X: np.ndarray, var: np.ndarray, d_var: np.ndarray) -> Any:
        """Return variances (n,) and their gradients (n, d), where variances depend on x by g.

        Given those of f at constant variance; noise has its excess over its constant.
        """
        return var, d_var

    def _predictive_gradients(self, X: np.ndarray, **offset: np.ndarray) -> FourArrays:
        """Return mean and std of y, (n,) or (n, t), and their gradients in X with an axis more."""
        mean, var, d_mean, d_var = self._by_chunks(
            self._latent_gradients, X, self._graph_bytes_per_row()
        )
        d_var[var < 0] = 0.0  # which are clipped
        var, d_var = self._varied_gradients(X, clip_variance(var), d_var)
        slopes = self._moment_slopes(mean, var, **offset)
        mean, var = self._predictive_moments(mean, var, **offset)
        if slopes is not None:
            by_mean, by_var = (
                a[:, None] * d_mean + b[:, None] * d_var for a, b in (slopes[:2], slopes[2:])
            )
            d_mean, d_var = by_mean, by_var
        return self._observed_gradients(X, mean, var, d_mean, d_var)

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


def _warn_of_unlike(weight: np.ndarray) -> None:
    """Warn where few observations are like one of mean weight, whose noise predictions have."""
    mean, median = weight.mean(), np.median(weight)
    if mean > UNLIKE_WEIGHTS * median:
        warn_caller(
            f"sample_weight has a mean of {mean:.3g} and a median of {median:.3g}: predictions "
            f"have the noise variance of an observation of mean weight, {mean / median:.3g} times "
            "less than that of one of median weight. Lower the greatest weights."
        )


def _standardise(data: Data, *, shift: float, scale: float, unit: float) -> Data:
    weight = None if data.weight is None else unit * data.weight
    return replace(data, y=(data.y - shift) / scale, weight=weight)
