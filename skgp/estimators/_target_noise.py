r"""Regressors that model :math:`y = f + \varepsilon`, or :math:`\log y = f + \varepsilon`.

The latter is for positive targets whose noise grows with their level, as prices, sizes, durations
and concentrations. z is then the standardised logarithm, and what is observed is log-normal. Given
"auto" the data decide: of some observations each is predicted from all others on either scale
(:func:`skgp.learning.hyperparameters.logs_predict_better`).

With mean m and variance v of log y the median of y is :math:`e^m`, its mean :math:`e^{m + v / 2}`,
and its standard deviation :math:`e^{m + v} \sqrt{1 - e^{-v}}`. Far ahead the mean is what the least
likely growth makes it, and with a variance that is averaged over it is none. What is predicted is
:math:`E[y \mid f] = e^{f + \sigma^2 / 2}` at the mean of f: the mean where f is known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import norm
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import arrays, to_tensor
from skgp.estimators._kernels import default_kernels
from skgp.estimators._predictive import FourArrays, exponential_covariance
from skgp.estimators._regression_predictions import RegressionPredictions
from skgp.estimators.defaults import LOG_LEAST_ROWS, LOG_NATS, LOG_RATIOS, MAX_EXPONENT
from skgp.kernels.scales import capped_weights
from skgp.learning.hyperparameters import logs_predict_better
from skgp.learning.markov.defaults import STRUCTURE_ROWS
from skgp.learning.markov.series_search import Problem, evidence_near
from skgp.likelihoods import Likelihood
from skgp.models.state_space import kernel_of, series_of


class LogScale(RegressionPredictions):
    """A regressor that may be of log y.

    Attributes
    ----------
    likelihood_ : str or instance
        "gaussian" or "lognormal" of "auto", else `likelihood`.
    """

    likelihood: Any
    kernel: Any

    #: Whether the model is of log y: f is then in its units, and what is observed log-normal.
    _of_log = False
    #: Mean and standard deviation of positive y, of which `_log` makes others.
    _moments_of_y = 0.0, 1.0

    @property
    def likelihood_(self) -> Any:
        """The likelihood: "gaussian" or "lognormal" of "auto"."""
        if self.likelihood != "auto":
            return self.likelihood
        return "lognormal" if self._of_log else "gaussian"

    @property
    def _has_gaussian_name(self) -> bool:
        """Whether noise is Gaussian, of y or of log y, by name."""
        return self.likelihood in ("gaussian", "lognormal", "auto")

    @property
    def _remedy_of_logs(self) -> str:
        if self.likelihood == "auto":
            return (
                "likelihood='auto' chose so by the targets of fit. Call fit with all observations, "
                "or with likelihood='gaussian'."
            )
        return "Use likelihood='gaussian', or leave these rows out."

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.likelihood == "lognormal"
        return tags

    def _begin_fit(self, *, informed: bool = True) -> None:
        super()._begin_fit(informed=informed)
        self._of_log = self.likelihood == "lognormal"

    def _choose_scale(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        asked = self.likelihood == "auto" and self.kernel is None and self._learns
        if asked and _may_be_logs(y):
            self._of_log = self._logs_predict_better(X, y, weight)

    def _logs_predict_better(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> bool:
        given = None if weight is None else to_tensor(weight)
        # Copies of an observation would predict each other.
        data = Data(to_tensor(X), to_tensor(y), given).merged(any_likelihood=True)
        if len(data) < defaults.LOG_ROWS[0]:
            return False
        some = capped(data.some(defaults.LOG_ROWS[1], torch.Generator().manual_seed(0)))
        return logs_predict_better(default_kernels(*arrays(some))[0], some)

    def _target(self, y: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
        if self._of_log:
            mean = np.average(y, weights=sample_weight)
            std = np.average((y - mean) ** 2, weights=sample_weight) ** 0.5
            self._moments_of_y = float(mean), float(std)
        return super()._target(self._log(y), sample_weight)

    def _to_z(self, y: Any) -> Any:
        return super()._to_z(self._log(y))

    def _log(self, y: np.ndarray) -> np.ndarray:
        if not self._of_log:
            return y
        check_positive_targets(y, self._remedy_of_logs)
        return np.log(y)

    def _observed(self, z: np.ndarray) -> np.ndarray:
        return exponential(self._to_y(z)) if self._of_log else super()._observed(z)

    def _observed_mean(self, X: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """Its mean given f, at the mean of f."""
        if not self._of_log:
            return super()._observed_mean(X, mean)
        noise = self.noise_variance_ + self.y_scale_**2 * self._excess_noise(X)
        return exponential(self._to_y(mean) + 0.5 * noise)

    def _excess_noise(self, X: np.ndarray) -> Any:
        """Variance (n,) of the noise of z at the rows of X over the constant one."""
        return 0.0

    def _excess_gradients(self, X: np.ndarray) -> Any:
        """Its gradients (n, d) in X."""
        return 0.0

    def _observed_moments(
        self, X: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if not self._of_log:
            return super()._observed_moments(X, mean, var)
        std = log_normal_std(self._to_y(mean), self.y_scale_**2 * var)
        return self._observed_mean(X, mean), std

    def _observed_covariance(self, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        covariance = super()._observed_covariance(mean, covariance)
        return exponential_covariance(self._to_y(mean), covariance) if self._of_log else covariance

    def _observed_gradients(self, X, mean, var, d_mean, d_var) -> FourArrays:
        if not self._of_log:
            return super()._observed_gradients(X, mean, var, d_mean, d_var)
        scale, centre = self.y_scale_, self._observed_mean(X, mean)
        slopes = scale * d_mean, scale**2 * d_var
        std, d_std = log_normal_gradients(self._to_y(mean), scale**2 * var, *slopes)
        d_centre = slopes[0] + 0.5 * scale**2 * self._excess_gradients(X)
        return centre, std, centre[..., None] * d_centre, d_std

    def _observed_log_density(self, X: np.ndarray, y: np.ndarray, **offset: Any) -> np.ndarray:
        """Minus infinity of y without a logarithm, save of gross errors."""
        if not self._of_log:
            return super()._observed_log_density(X, y, **offset)
        some = np.maximum(y, np.finfo(np.float64).tiny)
        log_density = super()._observed_log_density(X, some, **offset) - np.log(some)
        rate, below = self._gross_errors_below()
        others = np.log(rate) + norm.logpdf(y, *self._moments_of_y) if rate else -np.inf
        return np.where(y > 0, np.log1p(-below) + log_density, others)

    def _observed_quantiles(self, X: np.ndarray, levels: np.ndarray, **offset: Any) -> np.ndarray:
        rate, below = self._gross_errors_below()
        if not below:
            return super()._observed_quantiles(X, levels, **offset)
        above = np.maximum(levels - below, 1e-300) / (1 - below)
        mean, std = self._moments_of_y
        others = mean + std * ndtri(np.minimum(levels / rate, 1))
        found = super()._observed_quantiles(X, above, **offset)
        return np.where(levels < below, others, found)

    def _gross_errors_below(self) -> tuple[float, float]:
        """Rate of gross errors of y as others are, and that of y that is not positive.

        Where the data were positive and log y is the estimator's own choice; 0 and 0 elsewhere.
        """
        if not (self._gross_error_rate and self._of_log and self.likelihood == "auto"):
            return 0.0, 0.0
        mean, std = self._moments_of_y
        return self._gross_error_rate, self._gross_error_rate * float(norm.cdf(-mean / std))


def capped(data: Data) -> Data:
    """Observations none of which decides alone by its weight."""
    weight = capped_weights(arrays(data)[1])
    return Data(data.X, data.y, None if weight is None else to_tensor(weight))


def _may_be_logs(y: np.ndarray) -> bool:
    """Whether targets are positive, of one column, and of more than one magnitude."""
    if y.ndim > 1 or y.min() <= 0:
        return False
    low, high = defaults.LOG_RATIOS
    return low * y.min() <= y.max() <= high * y.min()


def exponential(x: np.ndarray) -> np.ndarray:
    """Exponentials of 1e277 at most: of forecasts so far ahead that they are no numbers."""
    return np.exp(np.minimum(x, MAX_EXPONENT))


def log_normal_std(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Standard deviations of y given mean and variance of log y."""
    with np.errstate(divide="ignore"):  # log(0) where log y does not vary
        return exponential(mean + var + 0.5 * np.log(-np.expm1(-var)))


def log_normal_gradients(
    mean: np.ndarray, var: np.ndarray, d_mean: np.ndarray, d_var: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations of y and their gradients (n, d).

    Given mean and variance of log y, and their gradients.
    """
    std = log_normal_std(mean, var)
    # d log std / dv = 1 + 1 / (2 (e^v - 1))
    rate = np.divide(0.5, np.expm1(np.minimum(var, MAX_EXPONENT)), where=var > 0, out=0 * var)
    return std, std[..., None] * (d_mean + (1 + rate[..., None]) * d_var)


def check_positive_targets(y: np.ndarray, remedy: str) -> None:
    """Refuse targets that have no logarithm: a ValueError names the first, its row, the remedy."""
    bad = y <= 0
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"y must be positive where log y is modelled; got {y[row].item()!r} in row {row} "
            f"({bad.sum()} of {len(y)} rows are not positive). {remedy}"
        )


Found = tuple[Kernel, torch.Tensor]


class SeriesScale(LogScale):
    """A regressor in state space that may be of log y, by the evidence of y.

    That of log y is its own less the sum of log y (the Jacobian). The structure found for y tells
    by a short search whether log y is worth a search of its own.

    Parameters
    ----------
    likelihood : str or instance, default="auto"
        Observation noise: "gaussian"; "lognormal" of positive targets whose trend, seasons and
        noise grow with their level, log y = f + Gaussian noise; "student_t" of targets with
        outliers; "poisson" of counts. "auto" is "gaussian", or "lognormal" of a series of 20 to
        20000 positive targets whose kernel is left to the data, where that is likelier by three
        nats (`likelihood_`). An instance of a class of ``skgp.likelihoods``, or of your own, learns
        its free parameters; additive noise is relative to the standardised targets, as the kernel
        is.

    Attributes
    ----------
    noise_variance_ : float
        In squared units of y, or of log y; none for counts. Of few observations the mean over its
        posterior.
    y_mean_, y_scale_ : float
        Mean and standard deviation of the targets, for Student-t noise of those that are no gross
        outliers, or of their logarithms.
    """

    _is_default: Any
    _place: Any
    _terms: Any
    _states: Any
    _evidence: float

    @property
    def _chooses_scale(self) -> bool:
        """Whether the data may decide for log y."""
        return self.likelihood == "auto" and self._is_default and self._learns

    def _logs_predict_better(self, X: Any, y: Any, sample_weight: Any) -> bool:
        return False  # the evidence of a structure found for y tells, later

    def _on_better_scale(
        self,
        data: Data,
        likelihood: Likelihood,
        found: Found,
        fit: Callable[[SeriesScale, Data], Found],
    ) -> Found:
        """Kernel and parameters `found` of y; or those of log y, which the model then is of.

        `fit` gave the former from the model and the standardised data.
        """
        y = self._to_y(data.y.numpy())
        ratio = y.max() / y.min() if y.min() > 0 else 0.0
        several = self._place is None or data.total < LOG_LEAST_ROWS or len(y) > STRUCTURE_ROWS
        if several or not LOG_RATIOS[0] <= ratio <= LOG_RATIOS[1]:
            return found
        rival = copy.copy(self)
        rival._of_log = True
        weight = None if data.weight is None else data.weight.numpy()
        logs = replace(data, y=to_tensor(rival._target(y, weight)))
        jacobian = float(data.weighted_sum(to_tensor(np.log(y))))
        change = data.total * np.log(rival.y_scale_ / self.y_scale_) + jacobian
        least = self._evidence + change  # that log y is to have
        (series,) = series_of(replace(logs, y=logs.y[:, None]), self._terms)
        problem = Problem([series], likelihood, [0.0], self._terms)
        if evidence_near(problem, kernel_of(self._states[0]), found[1]) < least:
            return found
        other = fit(rival, logs)
        if rival._evidence < least + LOG_NATS:
            return found
        self.__dict__.update(rival.__dict__)
        return other
