"""Regressors with Gaussian noise whose variance, and that of f, may depend on x.

As of :mod:`skgp.learning.noise_function`: what each prediction of a process of constant variance is
once the logarithm g of a factor is known at the rows, up to a variance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import arrays, to_tensor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._parameters import Auto, StrOptions
from skgp.estimators._predictive import gaussian_draws
from skgp.estimators._regression_predictions import RegressionPredictions
from skgp.estimators._target_scale import LogScale, capped
from skgp.estimators._validation import check_joint_memory
from skgp.learning.noise_function import NoiseFunction, component_weights, learn_noise_function
from skgp.linalg.runtime import to_arrays
from skgp.samplers.diagnostics import effective_sample_size


class VaryingNoise(LogScale, RegressionPredictions):
    """A regressor with Gaussian noise whose variance, and that of f, may depend on x.

    Parameters
    ----------
    heteroscedastic : bool or "auto", default="auto"
        Whether variances depend on x: that of Gaussian noise, of y or of log y, is multiplied by a
        function of x (`predict_noise_variance`), and that of f by its power of 0, 1/2 or 1,
        learned from the errors of up to 1000 observations. Means, but those of log-normal y, and
        ``noise_variance_`` are those of constant variances; densities, quantiles and draws average
        over what is known of the function, and are heavier in the tails than normal ones:
        log-normal y then has no moments, its mean and standard deviation being those of the mean
        variance of log y, and those of draws grow with their number. "auto"
        does with ``kernel=None``, of 100 observations of one target or more, where observations
        held out, of up to 4000, are clearly likelier then; not of streams, rows in blocks,
        principal components or relevance vectors, nor where some rows repeat far more often than
        others.
    """

    _parameter_constraints = {"heteroscedastic": ["boolean", StrOptions({"auto"})]}

    heteroscedastic: bool | Auto

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
        return self._learns and data.varies

    def _learn_noise_function(self, data: Data) -> NoiseFunction | None:
        data = data.merged(any_likelihood=True)
        weight = arrays(data)[1]
        if self.heteroscedastic == "auto" and weight is not None:
            if effective_sample_size(np.log(weight)) < defaults.NOISE_EVENNESS * len(data):
                return None
        data = capped(data)
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
        constant = np.multiply.outer(np.ones(len(X)), self.noise_variance_)
        return constant + self.y_scale_**2 * self._excess_noise(X)

    def _excess_noise(self, X: np.ndarray) -> Any:
        if self._noise_function is None:
            return super()._excess_noise(X)
        return self._variances_of_noise(*self._moments_of_g(X)) - self._noise_variance

    def _moments_of_g(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n,) of g at the rows of X."""
        function = self._noise_function

        def moments(rows: np.ndarray) -> tuple[np.ndarray, ...]:
            return to_arrays(*function.moments(to_tensor(rows)))

        return self._by_chunks(moments, X, 32 * len(function.X))

    def _variances_of_f(self, var: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
        """Mean variances (n,) of f, given those at constant variance and the moments of g."""
        return self._noise_function.of_f(*map(torch.from_numpy, (var, mean, spread))).numpy()

    def _variances_of_noise(self, mean: np.ndarray, spread: Any = 0.0) -> np.ndarray:
        """Mean variances of the noise of z, given moments of g, of their shape."""
        return self._noise_at(torch.from_numpy(mean + 0.5 * spread)).numpy()

    def _noise_at(self, g: torch.Tensor) -> torch.Tensor:
        """Variances of the noise of z at values of g, of their shape."""
        constant = self._noise_variance
        return constant * self._noise_function.of_noise(g, constant)

    def _latent_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, var = super()._latent_moments(X)
        if self._noise_function is None or not self._noise_function.exponent:
            return mean, var
        return mean, self._variances_of_f(var, *self._moments_of_g(X))

    def _observation_moments(self, X: np.ndarray, **offset: np.ndarray) -> tuple[Any, Any]:
        if self._noise_function is None:
            return super()._observation_moments(X, **offset)
        (mean, var), of_g = super()._latent_moments(X), self._moments_of_g(X)
        return mean, self._variances_of_f(var, *of_g) + self._variances_of_noise(*of_g)

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

        Given the covariance of f at constant variance. The scatter of g, one an observation, counts
        in the mean: draws of f are continuous, of the variance that it has with the scatter.
        """
        function = self._noise_function
        half = 0.5 * function.power(torch.from_numpy(covariance.diagonal().copy()))
        mean, C = function.joint_moments(to_tensor(X))
        return to_arrays(half, mean + half * function.scatter, C)

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
        f, g = self._joint_draws(X, n_samples, rng, of_y=True)
        return f + np.sqrt(self._variances_of_noise(g)) * rng.standard_normal(f.shape)

    def _joint_draws(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState, *, of_y: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of f and of g at the rows of X, (n, n_samples) each; ``O(n^3)``.

        `of_y` they have the scatter of observations.
        """
        check_joint_memory(len(X), "Draw at fewer of them at once")
        mean, covariance = super()._joint_moments(X)
        half, centre, covariance_of_g = self._joint_logs(X, covariance)
        g = gaussian_draws(centre, covariance_of_g, n_samples, rng)
        if of_y:
            scatter = self._noise_function.scatter
            g += scatter**0.5 * rng.standard_normal(g.shape) - scatter * half[:, None]
        f = gaussian_draws(np.zeros_like(mean), covariance, n_samples, rng)
        return mean[:, None] + np.exp(half[:, None] * g) * f, g

    @property
    def _is_mixture(self) -> bool:  # type: ignore[override]
        return self._noise_function is not None

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._noise_function is None:
            return super()._components(X)
        function, (mean, var) = self._noise_function, super()._latent_moments(X)

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
                of_noise = self._noise_at(mean + 0.5 * spread)
                by_X, by_var = torch.autograd.grad((of_f + of_noise).sum(), (X, var))
            return to_arrays(of_f + of_noise - self._noise_variance, by_X, by_var)

        size = 8 * defaults.GRAPH_COPIES * len(function.X)
        total, by_X, by_var = self._by_chunks(gradients, np.column_stack([X, var]), size)
        return total, by_var[:, None] * d_var + self._in_units_of_columns(X, by_X)
