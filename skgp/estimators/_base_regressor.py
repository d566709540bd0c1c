r"""The interface of the regressors.

A concrete regressor derives from `BaseGPRegressor`, or `StreamingGPRegressor` where it has a
``partial_fit``; has an ``__init__`` that keeps its parameters (`keep_parameters`); and says the
constraints of those of its own in ``_parameter_constraints``. Let :math:`z = (y - \bar y) / s_y` be
the standardised target, of which :math:`p(z \mid f)` is the likelihood; with Gaussian noise
:math:`z = f(x) + \varepsilon`. The estimator provides

===================================== ==========================================================
``_learn(data, session, backend)``    fits, as below
``_update(data, backend)``            changes the posterior by more data, for ``partial_fit``
``_means(X)``                         :math:`E[f]`, shape (n,) or (n, 1); the fast path of
                                      ``predict(X)``
``_moments(X)``                       :math:`E[f], V[f]`, shapes (n,) or (n, 1) each; no noise
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
vary, and ``_by_target`` gives means those of the others. By default the first two hooks ask
``_posterior``.

The data of the first two are validated, of positive weight, standardised, and on the CPU; they may
share the memory of X, so that a fit that keeps observations keeps a copy. The latent hooks take a
float64 array X (n, d) that may be read-only, in the units of the user, and return float64 arrays,
the same for a row whatever rows come with it. It may also override ``_check_parameters()``;
``_bytes_per_row()``, the memory that the latent hooks take for a row of X; and
``_latent_samples(X, n, rng)``, joint draws of f of shape (n_rows, n), which then need no dense
covariance. Where f is not Gaussian, ``_quantiles(X, levels)``, ``_log_density(X, z)`` and
``_observation_samples(X, n, rng)`` say what the moments of f do not. A fit reads::

    def _learn(self, data, session, backend, *, stream=False):
        kernels = self._kernels(data)
        with session.stage("solve", max_iter=self.max_iter) as callback:
            ...
        self.kernel_ = kernel.clone_with_theta(theta)
        self._warn_at_bounds()
        self._likelihood = StudentT(scale, df)

``fit_context`` makes it a transaction: ``self`` is a draft, whose state replaces that of the
estimator at the end; where the fit raises, nothing has changed. It warns by ``warn_caller``.

A regressor of counts has ``_counts`` true and ``_is_additive`` false, and refuses a WhiteKernel by
`skgp.estimators._kernels.refuse_noise`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from numbers import Real
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel, WhiteKernel
from sklearn.utils.metaestimators import available_if

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import Backend, arrays
from skgp.estimators._blocks import in_memory, training_blocks
from skgp.estimators._fitting import fit_context, fit_session
from skgp.estimators._kernels import default_kernels, refuse_noise, with_noise
from skgp.estimators._parameters import Interval, StrOptions
from skgp.estimators._regression_predictions import RegressionPredictions
from skgp.estimators._target_scale import LogScale
from skgp.kernels.scales import target_units
from skgp.likelihoods import Gaussian, NumericLikelihood, Poisson, StudentT


class BaseGPRegressor(RegressionPredictions):
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
    """

    _parameter_constraints = {"normalize_y": ["boolean"]}

    #: Of the variance of f, where the kernel is not given.
    _signal_bounds = defaults.SIGNAL_BOUNDS

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
            Likelihood weights: a weight of 2 equals the observation given twice. Where the noise is
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
            blocks = None if stream else training_blocks(self, *given, exposure=exposure)
            if blocks is not None:
                standardised = self._standardised(blocks, backend)
                self._learn_blocks(standardised, session, backend)
                self._expect_gross_errors(standardised.total)
                return
            rows, target, weight = map(in_memory, given)
            data = self._training_data(rows, target, weight, exposure, stream=stream)
            self._learn(data, session, backend, stream=stream)
            if data.varies and not stream:
                self._expect_gross_errors(data.total)
            self._learn_from_errors(data, stream=stream)

    def _expect_gross_errors(self, n: float) -> None:
        """Of n observations, where the model is the estimator's own choice."""
        if self.kernel is None and self._learns and self.normalize_y and self._likelihood is None:
            self._gross_error_rate = defaults.GROSS_ERRORS / (n + 1)

    def _learn_from_errors(self, data: Data, *, stream: bool) -> None:
        """Learn what the errors of the fitted process tell of."""

    def _kernels(self, data: Data) -> list[Kernel]:
        """Kernels to choose among, with noise: the one given, or the default ones."""
        X, weight = arrays(data)
        if self.kernel is None:
            given = self._is_additive and not self.normalize_y
            units = target_units(data.y.numpy(), weight) if given else (1.0, 1.0)
            return default_kernels(X, weight, bounds=self._signal_bounds, units=units)
        return [with_noise(self._given_kernel(X))]


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
        data = self._training_data(X, y, sample_weight, exposure, reset=False)
        self._update(data, self._resolve_backend())
        return self

    @abstractmethod
    def _update(self, data: Data, backend: Backend) -> None:
        """Change the posterior by observations beyond those of the last call."""


class LikelihoodGPRegressor(LogScale, BaseGPRegressor):
    """A regressor with one latent function and Gaussian or Student-t noise, counts, or any other.

    Parameters
    ----------
    likelihood : str or instance, default="auto"
        Observation noise: "gaussian"; "lognormal" of positive targets whose noise grows with their
        level, log y = f + Gaussian noise; "student_t" of targets with outliers; "poisson" of
        counts. "auto" is "gaussian", or "lognormal" of 50 positive targets or more, with
        ``kernel=None``, where predictions left out are clearly likelier so (`likelihood_`). An
        instance of a class of ``skgp.likelihoods``, or of your own, learns its free parameters;
        additive noise is relative to the standardised targets, as the kernel is.
    link : {"exp", "softplus"}, default="exp"
        Of "poisson": the rate is exp(f) or log(1 + exp(f)). Other likelihoods have none.
    degrees_of_freedom : float or "auto", default="auto"
        Of "student_t"; "auto" learns them, with a Gamma prior of mode 4.
    normalize_y : bool, default=True
        Centre and scale the targets; ``kernel_`` is then in units of the scaled target. Counts are
        left as they are.

    Attributes
    ----------
    kernel_ : Kernel
        With the hyper-parameters learned, noise included.
    noise_variance_ : float or ndarray of shape (t,)
        In squared units of y, or of log y; none for counts.
    likelihood_scale_ : float
        Of Student-t noise, in units of y.
    degrees_of_freedom_ : float
        Of Student-t noise.
    y_mean_, y_scale_ : float or ndarray of shape (t,)
        Mean and standard deviation of the targets, for Student-t noise of those that are no gross
        outliers, or of their logarithms.
    """

    _parameter_constraints = {
        "likelihood": [
            StrOptions({"auto", "gaussian", "lognormal", "student_t", "poisson"}),
            NumericLikelihood,
        ],
        "link": [StrOptions({"exp", "softplus"})],
        "degrees_of_freedom": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
    }

    #: Least variance of noise that is learned, of that of the targets.
    _noise_floor: float = 0.0

    likelihood: str | NumericLikelihood
    link: str
    degrees_of_freedom: float | str

    @property
    def _own_likelihood(self) -> NumericLikelihood | None:
        """The likelihood with parameters of its own; None where a WhiteKernel has the noise."""
        if self.likelihood == "poisson":
            return Poisson(self.link)
        return None if isinstance(self.likelihood, str) else self.likelihood

    @property
    def _learns_noise(self) -> bool:
        own = self._own_likelihood
        if own is not None:
            return self.optimizer is not None and bool(own.free_parameters())
        return super()._learns_noise

    @property
    def _counts(self) -> bool:  # type: ignore[override]
        return self._own_likelihood is not None and self._own_likelihood.is_count

    @property
    def _is_gaussian(self) -> bool:
        return self._has_gaussian_name or getattr(self.likelihood, "is_gaussian", False)

    @property
    def _is_additive(self) -> bool:  # type: ignore[override]
        return self._own_likelihood is None or self._own_likelihood.is_additive

    @property
    def _has_heavy_tails(self) -> bool:  # type: ignore[override]
        own = self._own_likelihood
        return self.likelihood == "student_t" if own is None else own.has_heavy_tails

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if self.likelihood != "poisson" and self.link != "exp":
            raise ValueError(
                f"link={self.link!r} is that of likelihood='poisson'; got "
                f"likelihood={self.likelihood!r}, which has none. Leave link out."
            )
        if self.likelihood != "student_t" and self.degrees_of_freedom != "auto":
            raise ValueError(
                f"degrees_of_freedom={self.degrees_of_freedom!r} are those of "
                f"likelihood='student_t'; got likelihood={self.likelihood!r}. Leave them out."
            )

    @property
    def _signal_bounds(self) -> tuple[float, float]:  # type: ignore[override]
        own, (low, high) = self._own_likelihood, super()._signal_bounds
        if own is not None and own.is_count:
            f = float(own.mode(torch.tensor(defaults.LARGE_COUNT, dtype=torch.float64)))
            high = max(high, f**2) if math.isfinite(f) else high
        return low, high

    def _given_kernel(self, X: np.ndarray) -> Kernel:
        kernel = super()._given_kernel(X)
        if self._own_likelihood is not None:
            refuse_noise(kernel, self)
        return kernel

    def _make_likelihood(self, white: WhiteKernel | None) -> NumericLikelihood:
        """The likelihood and its free parameters; `white` is the noise to begin with."""
        own = self._own_likelihood
        if white is None or not (own is None or own.is_gaussian):
            return cast(NumericLikelihood, own)
        level = float(white.noise_level)
        bounds = level, level
        if self.optimizer is not None and not white.hyperparameter_noise_level.fixed:
            low, high = map(float, np.ravel(white.noise_level_bounds))
            bounds = min(max(low, self._noise_floor), high), high
        if self._is_gaussian:
            return Gaussian(level, bounds=bounds)
        free = self.degrees_of_freedom == "auto"
        return StudentT(
            math.sqrt(level),
            defaults.DF_START if free else float(self.degrees_of_freedom),
            scale_bounds=(math.sqrt(bounds[0]), math.sqrt(bounds[1])),
            df_bounds=defaults.DF_BOUNDS if free else None,
        )

    def _offset(self, data: Data) -> np.ndarray:
        """Prior mean of f, shape (1,): that of the mean count; 0 of others."""
        own = self._own_likelihood
        if own is None or own.is_additive:
            return np.zeros(1)
        total = float(data.weighted_sum(data.y))
        total = max(total, defaults.LEAST_COUNT) if own.is_count else total
        f = float(own.mode_of_mean(torch.tensor(total / data.exposure, dtype=torch.float64)))
        return np.array([f if math.isfinite(f) else 0.0])

    def _describe(
        self, kernel: Kernel, parameters: torch.Tensor, white: WhiteKernel | None
    ) -> None:
        """Set the attributes that tell of the kernel (without noise) and the likelihood.

        `parameters` (p,) are those of the likelihood as learned, `white` is as of
        `_make_likelihood`.
        """
        self._describe_gaussian(kernel, math.nan)
        likelihood = cast(
            NumericLikelihood, self._make_likelihood(white).with_parameters(parameters)
        )
        if self._own_likelihood is not None or white is None:
            self._likelihood = likelihood
            return
        level = float(parameters[0].exp())
        self.kernel_ = kernel + WhiteKernel(level, white.noise_level_bounds)
        if self._is_gaussian:
            self._noise_variance = level
            return
        self._likelihood = likelihood
        self.likelihood_scale_ = np.sqrt(level) * self.y_scale_
        self.degrees_of_freedom_ = float(parameters[1].exp())

    def _describe_gaussian(self, kernel: Kernel, noise: float) -> None:
        """Set the attributes of a kernel, noise included, and Gaussian noise."""
        self.kernel_, self._likelihood, self._noise_variance = kernel, None, noise
        for name in ("likelihood_scale_", "degrees_of_freedom_"):  # of an earlier fit
            self.__dict__.pop(name, None)
