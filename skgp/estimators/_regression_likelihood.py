"""The base of regressors whose likelihood is a parameter: Gaussian, Student-t, Poisson, own."""

import math
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel, WhiteKernel

from skgp.estimators._base_regressor import BaseGPRegressor
from skgp.estimators._kernels import refuse_noise
from skgp.estimators._parameters import Interval, StrOptions
from skgp.estimators.defaults import DF_BOUNDS, DF_START, LARGE_COUNT, LEAST_COUNT
from skgp.likelihoods import Gaussian, NumericLikelihood, Poisson, StudentT


class LikelihoodGPRegressor(BaseGPRegressor):
    """A regressor with one latent function and Gaussian or Student-t noise, counts, or any other.

    Its latent hooks `_means` and `_moments` are of shapes (n, 1); or (n, t) and (n, 1) of several
    targets.

    Parameters
    ----------
    likelihood : {"gaussian", "student_t", "poisson"} or instance, default="gaussian"
        Observation noise: "student_t" for targets with outliers, "poisson" for counts. An instance
        of a class of ``skgp.likelihoods``, or of your own, learns its free parameters; additive
        noise is relative to the standardised targets, as the kernel is.
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
        In squared units of y; none for counts.
    likelihood_scale_ : float
        Of Student-t noise, in units of y.
    degrees_of_freedom_ : float
        Of Student-t noise.
    y_mean_, y_scale_ : float or ndarray of shape (t,)
        Mean and standard deviation of the targets, for Student-t noise of those that are no gross
        outliers.
    """

    _parameter_constraints: dict[str, list[Any]] = {
        **BaseGPRegressor._parameter_constraints,
        "likelihood": [StrOptions({"gaussian", "student_t", "poisson"}), NumericLikelihood],
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
        gaussian = ("gaussian", "lognormal", "auto")  # the last two of `StateSpaceGPRegressor`
        return self.likelihood in gaussian or getattr(self.likelihood, "is_gaussian", False)

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
            f = float(own.mode(torch.tensor(LARGE_COUNT, dtype=torch.float64)))
            high = max(high, f**2) if math.isfinite(f) else high
        return low, high

    def _given_kernel(self, X: np.ndarray) -> Kernel:
        kernel = super()._given_kernel(X)
        if self._own_likelihood is not None:
            refuse_noise(kernel, self)
        return kernel

    def _make_likelihood(
        self, white: WhiteKernel | None, *, floor: float | None = None
    ) -> NumericLikelihood:
        """The likelihood and its free parameters.

        `white` is the noise to begin with, None of counts; `floor` the least variance of noise that
        is learned, ``_noise_floor`` by default.
        """
        floor = self._noise_floor if floor is None else floor
        if self._own_likelihood is not None or white is None:
            return self._own_likelihood or Poisson(self.link)
        level = float(white.noise_level)
        bounds = level, level
        if self.optimizer is not None and not white.hyperparameter_noise_level.fixed:
            low, high = map(float, np.ravel(white.noise_level_bounds))
            bounds = min(max(low, floor), high), high
        if self._is_gaussian:
            return Gaussian(level, bounds=bounds)
        free = self.degrees_of_freedom == "auto"
        return StudentT(
            math.sqrt(level),
            DF_START if free else float(self.degrees_of_freedom),
            scale_bounds=(math.sqrt(bounds[0]), math.sqrt(bounds[1])),
            df_bounds=DF_BOUNDS if free else None,
        )

    def _offset(self, total: float, weight: float) -> float:
        """Prior mean of f: 0 of a standardised target, else that of the mean count.

        From the weighted sum of the targets and the sum of the weights.
        """
        own = self._own_likelihood
        if own is None or own.is_additive:
            return 0.0
        total = max(total, LEAST_COUNT) if own.is_count else total
        f = float(own.mode_of_mean(torch.tensor(total / weight, dtype=torch.float64)))
        return f if math.isfinite(f) else 0.0

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

    def _by_target(self, mean: Any) -> Any:
        """Means (n, t) of all targets, those (n, 1) of one as (n,)."""
        return super()._by_target(mean) if self._has_several else mean[:, 0]

    def _latent_mean(self, X):
        return self._by_target(self._means(X))

    def _latent_mean_and_variance(self, X):
        mean, var = self._moments(X)
        return self._by_target(mean), var[:, 0]

    def _moment_tensors(self, rows):
        mean, var = self._posterior.mean_and_variance(rows)
        return self._by_target(mean), var.reshape(len(rows), -1)[:, 0]
