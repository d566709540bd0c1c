r"""Scale of targets of which :math:`y = f + \varepsilon`, or :math:`\log y = f + \varepsilon`.

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
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import norm
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import BaseGP, arrays, to_tensor
from skgp.estimators._kernels import default_kernels
from skgp.estimators._predictive import (
    FourArrays,
    LikelihoodPredictive,
    exponential_covariance,
    is_constant,
    of_targets,
    std_gradient,
    with_axes,
)
from skgp.estimators.defaults import LOG_LEAST_ROWS, LOG_NATS, LOG_RATIOS, MAX_EXPONENT
from skgp.kernels.scales import capped_weights
from skgp.learning.hyperparameters import logs_predict_better, robust_location_scale
from skgp.learning.markov.defaults import STRUCTURE_ROWS
from skgp.learning.markov.series_search import Problem, evidence_near
from skgp.likelihoods import Likelihood
from skgp.models.state_space import kernel_of, series_of

Values = TypeVar("Values", float, np.ndarray, torch.Tensor)


class TargetScale(LikelihoodPredictive, BaseGP):
    """Targets y in the units of the user, and z as the model sees them, standardised."""

    normalize_y: bool
    y_mean_: Any
    y_scale_: Any
    noise_variance_: Any
    #: Places of the targets, of several, that vary: a constant one would halve the variance of two.
    _varying: np.ndarray

    #: Whether the targets are counts, which have exposures.
    _counts = False
    #: Whether the likelihood adds noise to f: what it does not has no units to standardise.
    _is_additive = True
    #: Whether the likelihood has heavy tails: y is standardised in spite of outliers.
    _has_heavy_tails = False
    #: Whether the model is of log y: f is then in its units, and what is observed log-normal.
    _of_log = False
    #: Mean and standard deviation of positive y, of which `_log` makes others.
    _moments_of_y = 0.0, 1.0
    #: epsilon of `RegressionPredictions`; 0 where the model is given.
    _gross_error_rate = 0.0
    #: Of the logarithm of the variance over ``noise_variance_``; None where it is constant.
    _noise_function: Any = None

    likelihood: Any
    _quantiles: Any
    _log_density: Any
    _varied_gradients: Any

    @property
    def _has_several(self) -> bool:
        """Whether the fit was to several targets."""
        return np.ndim(getattr(self, "y_scale_", 1.0)) > 0

    def _begin_fit(self, *, informed: bool = True) -> None:
        super()._begin_fit(informed=informed)
        self._of_log = getattr(self, "likelihood", None) == "lognormal"
        self._gross_error_rate, self._noise_function = 0.0, None

    def _target(self, y: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
        """Set ``y_mean_`` and ``y_scale_`` (weighted) and return ``z``, of the shape of y.

        Weights are capped. A constant y, up to rounding, is centred and not scaled.
        """
        if self._of_log:
            centre = np.average(y, weights=sample_weight)
            std = np.average((y - centre) ** 2, weights=sample_weight) ** 0.5
            self._moments_of_y, y = (float(centre), float(std)), self._log(y)
        mean: Any = np.zeros(y.shape[1:])
        scale: Any = np.ones(y.shape[1:])
        constant, sample_weight = False, capped_weights(sample_weight)
        if self.normalize_y and self._is_additive:
            mean = np.average(y, axis=0, weights=sample_weight)
            # By a power of two, which rounds nothing: the squares of 1e-200 are 0.
            unit = np.ldexp(1.0, np.frexp(np.abs(y - mean).max(axis=0))[1])
            ratio = (y - mean) / unit
            scale = unit * np.sqrt(np.average(ratio**2, axis=0, weights=sample_weight))
            constant = is_constant(scale, y)
            if self._has_heavy_tails and not constant:
                weight = None if sample_weight is None else to_tensor(sample_weight)
                mean, scale = robust_location_scale(to_tensor(y), weight)
            scale = np.where(constant, 1.0, scale)
        several = y.ndim > 1
        self.y_mean_, self.y_scale_ = (mean, scale) if several else (float(mean), float(scale))
        z = np.where(constant, 0.0, (y - mean) / scale)  # and not the rounding of their mean
        if several:
            found = np.flatnonzero(~np.broadcast_to(constant, y.shape[1]))
            self._varying = found if len(found) else np.arange(y.shape[1])
            z = np.ascontiguousarray(z[:, self._varying])
        return z

    def _to_z(self, y: Values) -> Values:
        """Standardise targets with ``y_mean_`` and ``y_scale_``."""
        return (self._log(y) - self.y_mean_) / self.y_scale_

    def _log(self, y: Any) -> Any:
        """The logarithms of y, where these are modelled; ValueError of targets without one."""
        if not self._of_log:
            return y
        if (bad := y <= 0).any():
            remedy = "Use likelihood='gaussian', or leave these rows out."
            if self.likelihood == "auto":
                remedy = (
                    "likelihood='auto' chose so by the targets of fit. Call fit with all "
                    "observations, or with likelihood='gaussian'."
                )
            row = int(bad.argmax())
            raise ValueError(
                f"y must be positive where log y is modelled; got {y[row].item()!r} in row {row} "
                f"({bad.sum()} of {len(y)} rows are not positive). {remedy}"
            )
        return np.log(y)

    def _to_y(self, z: Values) -> Values:
        """Return standardised values, of any shape, in the units of y; (n, t, ...) of targets."""
        if not self._has_several:
            return self.y_mean_ + self.y_scale_ * z
        mean, scale = (with_axes(v, np.ndim(z) - 2) for v in (self.y_mean_, self.y_scale_))
        return mean + scale * z

    def _by_target(self, mean: Any) -> Any:
        """Means (n, t) of all targets, given those of targets that vary; of one as (n,)."""
        if not self._has_several:
            return mean if mean.ndim == 1 else mean[:, 0]
        if len(self._varying) == len(self.y_scale_):
            return mean
        shape = len(mean), len(self.y_scale_)
        all_means = mean.new_zeros(shape) if torch.is_tensor(mean) else np.zeros(shape)
        all_means[:, self._varying.tolist()] = mean
        return all_means

    def _observed(self, z: np.ndarray) -> np.ndarray:
        """Return standardised observations, or quantiles of such, in the units of y."""
        y = self._to_y(z)
        return exponential(y) if self._of_log else y

    def _observed_mean(self, X: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """Return what is predicted of y at the rows of X, given means of z.

        Of log-normal y its mean given f, at the mean of f.
        """
        mean = self._to_y(mean)
        if not self._of_log:
            return mean
        noise = self.noise_variance_ + self.y_scale_**2 * self._excess_noise(X)
        return exponential(mean + 0.5 * noise)

    def _excess_noise(self, X: np.ndarray) -> Any:
        """Variance (n,) of the noise of z at the rows of X over the constant one."""
        return 0.0

    def _observed_moments(
        self, X: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what is predicted of y, and its standard deviation, given moments of z."""
        std = self.y_scale_ * np.sqrt(var)
        if self._of_log:
            std = log_normal_std(self._to_y(mean), self.y_scale_**2 * var)
        return self._observed_mean(X, mean), std

    def _observed_covariance(self, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """Return the covariance of y, (n, n) or (n, n, t), given mean and covariance of z."""
        covariance = of_targets(covariance, self.y_scale_**2)
        return exponential_covariance(self._to_y(mean), covariance) if self._of_log else covariance

    def _observed_gradients(self, X, mean, var, d_mean, d_var) -> FourArrays:
        """Return what `_predictive_gradients` of `RegressionData` does, given those of z."""
        scale = with_axes(self.y_scale_, 1)
        slopes = scale * d_mean, scale**2 * d_var
        if not self._of_log:
            std = self.y_scale_ * np.sqrt(var)
            return self._to_y(mean), std, slopes[0], std_gradient(slopes[1], std)
        centre = self._observed_mean(X, mean)
        std, d_std = log_normal_gradients(self._to_y(mean), scale**2 * var, *slopes)
        # Where f has no variance that of y is that of the noise.
        d_noise = self._varied_gradients(X, np.zeros(len(X)), np.zeros(X.shape))[1]
        d_centre = slopes[0] + 0.5 * scale**2 * d_noise
        return centre, std, centre[..., None] * d_centre, d_std

    def _observed_log_density(self, X: np.ndarray, y: np.ndarray, **offset: Any) -> np.ndarray:
        """Return log-densities of y, (n,) or (n, t), in nats.

        Minus infinity of log-normal y without a logarithm, save of gross errors.
        """
        some = np.maximum(y, np.finfo(np.float64).tiny) if self._of_log else y
        log_density = self._log_density(X, self._to_z(some), **offset) - np.log(self.y_scale_)
        if not self._of_log:
            return log_density
        rate, below = self._gross_errors_below()
        others = np.log(rate) + norm.logpdf(y, *self._moments_of_y) if rate else -np.inf
        return np.where(y > 0, np.log1p(-below) + (log_density - np.log(some)), others)

    def _observed_quantiles(self, X: np.ndarray, levels: np.ndarray, **offset: Any) -> np.ndarray:
        """Return the quantiles of y at the rows of X, shape (n, q)."""
        rate, below = self._gross_errors_below()
        if not below:
            return self._observed(self._quantiles(X, levels, **offset))
        above = np.maximum(levels - below, 1e-300) / (1 - below)
        mean, std = self._moments_of_y
        others = mean + std * ndtri(np.minimum(levels / rate, 1))
        found = self._observed(self._quantiles(X, above, **offset))
        return np.where(levels < below, others, found)

    def _gross_errors_below(self) -> tuple[float, float]:
        """Rate of gross errors of y as others are, and that of y that is not positive.

        Where the data were positive and log y is the estimator's own choice; 0 and 0 elsewhere.
        """
        if not (self._gross_error_rate and self._of_log and self.likelihood == "auto"):
            return 0.0, 0.0
        mean, std = self._moments_of_y
        return self._gross_error_rate, self._gross_error_rate * float(norm.cdf(-mean / std))


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


class LogScale(TargetScale):
    """A regressor that may be of log y.

    Attributes
    ----------
    likelihood_ : str or instance
        "gaussian" or "lognormal" of "auto", else `likelihood`.
    """

    likelihood: Any
    kernel: Any

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

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.likelihood == "lognormal"
        return tags

    def _choose_scale(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        asked = self.likelihood == "auto" and self.kernel is None and self._learns
        asked = asked and getattr(self, "heteroscedastic", None) is not True
        low, high = defaults.LOG_RATIOS
        positive = asked and y.ndim == 1 and y.min() > 0
        if positive and low * y.min() <= y.max() <= high * y.min():
            self._of_log = self._logs_predict_better(X, y, weight)

    def _logs_predict_better(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> bool:
        given = None if weight is None else to_tensor(weight)
        # Copies of an observation would predict each other.
        data = Data(to_tensor(X), to_tensor(y), given).merged(any_likelihood=True)
        if len(data) < defaults.LOG_ROWS[0]:
            return False
        some = capped(data.some(defaults.LOG_ROWS[1], torch.Generator().manual_seed(0)))
        return logs_predict_better(default_kernels(*arrays(some))[0], some)


def capped(data: Data) -> Data:
    """Observations none of which decides alone by its weight."""
    weight = capped_weights(arrays(data)[1])
    return Data(data.X, data.y, None if weight is None else to_tensor(weight))


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
