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
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils.validation import check_is_fitted

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import arrays, to_tensor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._kernels import default_kernels
from skgp.estimators._parameters import Auto, StrOptions
from skgp.estimators._predictive import FourArrays, covariance_root, exponential_covariance
from skgp.estimators._regression_predictions import RegressionPredictions
from skgp.estimators.defaults import LOG_LEAST_ROWS, LOG_NATS, LOG_RATIOS, MAX_EXPONENT
from skgp.kernels.scales import capped_weights
from skgp.learning.hyperparameters import logs_predict_better
from skgp.learning.markov.defaults import STRUCTURE_ROWS
from skgp.learning.markov.series_search import Problem, evidence_near
from skgp.learning.noise_function import NoiseFunction, component_weights, learn_noise_function
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import to_arrays
from skgp.models.state_space import kernel_of, series_of
from skgp.samplers.diagnostics import effective_sample_size


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
        some = _capped(data.some(defaults.LOG_ROWS[1], torch.Generator().manual_seed(0)))
        return logs_predict_better(default_kernels(*arrays(some))[0], some)

    def _target(self, y: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
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

    def _observed_mean(self, mean: np.ndarray) -> np.ndarray:
        """Its mean given f, at the mean of f."""
        if not self._of_log:
            return super()._observed_mean(mean)
        return exponential(self._to_y(mean) + 0.5 * self.noise_variance_)

    def _observed_moments(self, mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self._of_log:
            return super()._observed_moments(mean, var)
        std = log_normal_std(self._to_y(mean), self.y_scale_**2 * var)
        return self._observed_mean(mean), std

    def _observed_covariance(self, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        covariance = super()._observed_covariance(mean, covariance)
        return exponential_covariance(self._to_y(mean), covariance) if self._of_log else covariance

    def _observed_gradients(self, mean, var, d_mean, d_var) -> FourArrays:
        if not self._of_log:
            return super()._observed_gradients(mean, var, d_mean, d_var)
        scale, centre = self.y_scale_, self._observed_mean(mean)
        slopes = scale * d_mean, scale**2 * d_var
        return log_normal_gradients(centre, self._to_y(mean), scale**2 * var, *slopes)

    def _observed_log_density(self, X: np.ndarray, y: np.ndarray, **offset: Any) -> np.ndarray:
        """Minus infinity of y without a logarithm."""
        if not self._of_log:
            return super()._observed_log_density(X, y, **offset)
        some = np.maximum(y, np.finfo(np.float64).tiny)
        log_density = super()._observed_log_density(X, some, **offset) - np.log(some)
        return np.where(y > 0, log_density, -np.inf)


def _capped(data: Data) -> Data:
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
    centre: np.ndarray, mean: np.ndarray, var: np.ndarray, d_mean: np.ndarray, d_var: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Prediction `centre` and standard deviation of y, and their gradients (n, d).

    Given mean and variance of log y, and their gradients.
    """
    std = log_normal_std(mean, var)
    # d log std / dv = 1 + 1 / (2 (e^v - 1))
    rate = np.divide(0.5, np.expm1(np.minimum(var, MAX_EXPONENT)), where=var > 0, out=0 * var)
    d_std = std[..., None] * (d_mean + (1 + rate[..., None]) * d_var)
    return centre, std, centre[..., None] * d_mean, d_std


def check_positive_targets(y: np.ndarray, remedy: str) -> None:
    """Refuse targets that have no logarithm: a ValueError names the first, its row, the remedy."""
    bad = y <= 0
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"y must be positive where log y is modelled; got {y[row].item()!r} in row {row} "
            f"({bad.sum()} of {len(y)} rows are not positive). {remedy}"
        )


class VaryingNoise(LogScale):
    """A regressor with Gaussian noise whose variance, and that of f, may depend on x.

    Parameters
    ----------
    heteroscedastic : bool or "auto", default="auto"
        Whether variances depend on x: that of Gaussian noise, of y or of log y, is multiplied by a
        function of x (`predict_noise_variance`), and that of f by its power of 0, 1/2 or 1,
        learned from the errors of up to 1000 observations. Means and ``noise_variance_`` are those
        of constant variances; densities, quantiles and draws average over what is known of the
        function, and are heavier in the tails than normal ones. "auto" does with ``kernel=None``,
        of 100 observations of one target or more, where observations held out, of up to 4000, are
        clearly likelier then; not of streams, rows in blocks, principal components or relevance
        vectors, nor where some rows repeat far more often than others.
    """

    _noise_constraints: dict[str, list[Any]] = {
        "heteroscedastic": ["boolean", StrOptions({"auto"})]
    }

    heteroscedastic: bool | Auto
    #: Of the logarithm of the variance over ``noise_variance_``; None where it is constant.
    _noise_function: NoiseFunction | None = None

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if self.heteroscedastic is not True:
            return
        if not (self._has_gaussian_name and self._learns_noise):
            raise ValueError(
                f"heteroscedastic=True is of Gaussian noise that is learned; got "
                f"likelihood={self.likelihood!r}, optimizer={self.optimizer!r} and "
                f"kernel={self.kernel!r}. Use likelihood='gaussian', an optimizer and a noise "
                "level that is not fixed, or heteroscedastic='auto'."
            )
        if stream:
            raise ValueError(
                "partial_fit has constant noise; got heteroscedastic=True. Use 'auto' or False, or "
                "fit."
            )

    def _begin_fit(self, *, informed: bool = True) -> None:
        super()._begin_fit(informed=informed)
        self._noise_function = None

    def _choose_scale(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        if self.heteroscedastic is not True:
            super()._choose_scale(X, y, weight)

    def _learn_from_errors(self, data: Data, *, stream: bool) -> None:
        if not stream and self._may_vary(data):
            self._noise_function = self._learn_noise_function(data)

    def _may_vary(self, data: Data) -> bool:
        """Whether to ask the errors of a process of constant noise."""
        if self.heteroscedastic == "auto":
            asked = self.kernel is None and self._has_gaussian_name
            if not asked or len(data) < defaults.NOISE_LEAST_ROWS:
                return False
        elif not self.heteroscedastic:
            return False
        return self._learns and data.y.ndim == 1 and bool(data.y.max() > data.y.min())

    def _learn_noise_function(self, data: Data) -> NoiseFunction | None:
        data = data.merged(any_likelihood=True)
        weight = arrays(data)[1]
        if self.heteroscedastic == "auto" and weight is not None:
            if effective_sample_size(np.log(weight)) < defaults.NOISE_EVENNESS * len(data):
                return None
        data = _capped(data)
        smoother = self._kernels(data)[0] if self.heteroscedastic == "auto" else None
        return learn_noise_function(self.kernel_, data, smoother)

    @over_rows
    @within_limits
    def predict_noise_variance(self, X: ArrayLike) -> np.ndarray:
        """Predict the variance of the observation noise at each row of X.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n,) or (n, t)
            In squared units of y, or of log y: ``noise_variance_`` unless noise is heteroscedastic.
        """
        check_is_fitted(self)
        X = self._validate_prediction(X)
        variance = np.multiply.outer(np.ones(len(X)), self.noise_variance_)
        return variance * np.exp(self._offset_at(None, X).get("offset", 0.0))

    def _offset_at(self, exposure: ArrayLike | None, X: np.ndarray) -> dict[str, np.ndarray]:
        """Of Gaussian noise that varies the logarithm of its factors."""
        offset, function = super()._offset_at(exposure, X), self._noise_function
        if function is None:
            return offset
        mean, spread = self._moments_of_g(X)
        factors = function.of_noise(torch.from_numpy(mean + 0.5 * spread), self._noise_variance)
        return {"offset": factors.log().numpy()}

    def _moments_of_g(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n,) of g at the rows of X."""
        function = cast(NoiseFunction, self._noise_function)

        def moments(rows: np.ndarray) -> tuple[np.ndarray, ...]:
            return to_arrays(*function.moments(to_tensor(rows)))

        return self._by_chunks(moments, X, 32 * len(function.X))

    def _latent_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, var = super()._latent_moments(X)
        function = self._noise_function
        if function is None or not function.exponent:
            return mean, var
        of_g = map(torch.from_numpy, self._moments_of_g(X))
        return mean, function.of_f(torch.from_numpy(var), *of_g).numpy()

    def _joint_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, covariance = super()._joint_moments(X)
        if self._noise_function is not None:
            # E[e^(h_i + h_j)] of h, half the logarithms of factors of the variances of f
            half, g, C = self._joint_logs(X, covariance)
            C = half[:, None] * C * half
            h = half * g + 0.5 * C.diagonal()
            covariance = covariance * np.exp(h[:, None] + h + C)
        return mean, covariance

    def _joint_logs(self, X: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, ...]:
        """Half the power (n,) of e^g in the variances of f, mean (n,) and covariance (n, n) of g.

        Given the covariance of f at constant variance.
        """
        function = cast(NoiseFunction, self._noise_function)
        power = function.power(torch.from_numpy(covariance.diagonal().copy()))
        return to_arrays(0.5 * power, *function.joint_moments(to_tensor(X)))

    def _latent_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState
    ) -> np.ndarray:
        if self._noise_function is None:
            return super()._latent_samples(X, n_samples, rng)
        return self._joint_draws(X, n_samples, rng)[0]

    def _observation_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState, **offset: np.ndarray
    ) -> np.ndarray:
        if self._noise_function is None:
            return super()._observation_samples(X, n_samples, rng, **offset)
        f, g = self._joint_draws(X, n_samples, rng)
        factors = self._noise_function.of_noise(torch.from_numpy(g), self._noise_variance)
        noise = self._noise_variance * factors.numpy()
        return f + np.sqrt(noise) * rng.standard_normal(f.shape)

    def _joint_draws(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of f and of g at the rows of X, (n, n_samples) each."""
        mean, covariance = super()._joint_moments(X)
        half, g, covariance_of_g = self._joint_logs(X, covariance)
        draws = rng.standard_normal((2, len(X), n_samples))
        g = g[:, None] + covariance_root(covariance_of_g) @ draws[1]
        scale = np.exp(half[:, None] * g)
        return mean[:, None] + scale * (covariance_root(covariance) @ draws[0]), g

    @property
    def _is_mixture(self) -> bool:  # type: ignore[override]
        return self._noise_function is not None

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        function = cast(NoiseFunction, self._noise_function)
        mean, var = super()._latent_moments(X)

        def variances(rows: np.ndarray) -> np.ndarray:
            X, var = to_tensor(rows[:, :-1]), to_tensor(rows[:, -1])
            of_f, of_noise = function.components(X, var, self._noise_variance)
            return (of_f * var + self._noise_variance * of_noise).T.numpy()

        var = self._by_chunks(variances, np.column_stack([X, var]), 32 * len(function.X)).T
        return component_weights(), np.broadcast_to(mean, var.shape), var

    def _varied_gradients(self, X: np.ndarray, var: np.ndarray, d_var: np.ndarray) -> Any:
        if self._noise_function is None:
            return super()._varied_gradients(X, var, d_var)
        function = self._noise_function

        def gradients(rows: np.ndarray) -> tuple[np.ndarray, ...]:
            X, var = (
                to_tensor(a).requires_grad_() for a in (rows[:, :-1].copy(), rows[:, -1].copy())
            )
            with torch.enable_grad():
                mean, spread = function.moments(X)
                of_f = function.of_f(var, mean, spread)
                of_noise = function.of_noise(mean + 0.5 * spread, self._noise_variance)
            by_X, by_var = torch.autograd.grad(of_f.sum(), (X, var), retain_graph=True)
            return to_arrays(of_f, by_X, by_var, *torch.autograd.grad(of_noise.sum(), X))

        size = 8 * defaults.GRAPH_COPIES * len(function.X)
        of_f, by_X, by_var, by_noise = self._by_chunks(gradients, np.column_stack([X, var]), size)
        of_X, of_noise = (self._in_units_of_columns(X, slope) for slope in (by_X, by_noise))
        return of_f, by_var[:, None] * d_var + of_X, self._noise_variance * of_noise


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
