"""Predictions of a regressor, in the units of y: of new observations, and of f."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from skgp.blocks import is_dask
from skgp.estimators._blocks import in_memory, over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._predictive import gaussian_draws, of_targets, parts_asked
from skgp.estimators._regression_data import RegressionData
from skgp.estimators._validation import (
    check_joint_memory,
    check_n_samples,
    check_targets,
    checked_levels,
    ends_of,
)
from skgp.inference.gp_mixture import mixture_log_density, mixture_moments, mixture_quantiles


class RegressionPredictions(RegressorMixin, RegressionData):
    r"""What every regressor says of new observations, noise included, and of f.

    f is in the units of y, of counts on the scale of the link. Gradients are those of autograd
    through the hook ``_moment_tensors``.

    Where none of n observations errs grossly, one in 2 (n + 1) others is expected to (Krichevsky
    and Trofimov's estimate), which a normal distribution finds unlikely by hundreds of nats. Where
    kernel and Gaussian noise are of the estimator's own choice, densities and quantiles of y are
    therefore those of

    .. math:: (1 - \epsilon)\, p(z) + \epsilon\, N(z; E[z], V[z] + 1), \qquad
              \epsilon = \frac{1}{2 (n + 1)}

    in units of the standard deviation of all targets. Means, standard deviations, draws and f are
    without gross errors. The experiment stands at :data:`skgp.estimators.defaults.GROSS_ERRORS`.
    """

    @property
    def noise_variance_(self) -> float:
        """Variance of the observation noise, in squared units of y."""
        check_is_fitted(self)
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
        asked = parts_asked(return_std, return_cov, return_mean_grad, return_std_grad)
        X = self._validate_prediction(X)
        offset = self._offset_at(exposure, X)
        if return_cov:
            remedy = "Ask for fewer of them at once, or for return_std=True"
            check_joint_memory(len(X), remedy, np.size(self.y_scale_))
            mean, covariance = self._observation_covariance(X, **offset)
            return self._observed_mean(X, mean), self._observed_covariance(mean, covariance)
        if asked:
            return tuple(itertools.compress(self._predictive_gradients(X, **offset), asked))
        if self._predicts_latent and not return_std:
            return self._observed_mean(X, self._by_target(self._by_chunks(self._means, X)))
        mean, var = self._observation_moments(X, **offset)
        mean, std = self._observed_moments(X, mean, var)
        return (mean, std) if return_std else mean

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
        y = self._observed_quantiles(X, np.atleast_1d(levels), **self._offset_at(exposure, X))
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
        self, X: ArrayLike, n_samples: int = 1, random_state=0, exposure: ArrayLike | None = None
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
        return self._observed(
            self._observation_samples(X, n_samples, rng, **self._offset_at(exposure, X))
        )

    @over_rows
    @within_limits
    def log_predictive_density(
        self, X: ArrayLike, y: ArrayLike, exposure: ArrayLike | None = None
    ) -> np.ndarray:
        r"""Return the log-density of each observation under its own prediction.

        .. math:: \log p(y_i \mid x_i) = \log p(z_i \mid x_i) - \log s_y.

        With ``kernel=None`` and Gaussian noise it allows, as quantiles do, for gross errors, one in
        2 (n + 1): see the user guide, "Uncertainty and calibration".

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
        return self._observed_log_density(X, y, **self._offset_at(exposure, X))

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
        targets, mean = map(in_memory, (y, self.predict(X, exposure=exposure)))
        check_targets(targets, numeric=True)
        return r2_score(targets, mean, sample_weight=in_memory(sample_weight))

    @over_rows
    @within_limits
    def latent_mean_and_variance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of the latent function, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean, var : ndarray of shape (n,) or (n, t)
            In the units of y, and in squared units of y. Of counts, f itself, on the scale of the
            link: the logarithm of the rate with ``link="exp"``. Of log-normal y, in those of log y.
        """
        mean, var = self._latent_moments(self._validate_prediction(X))
        return self._to_y(mean), self.y_scale_**2 * var

    @over_rows
    @within_limits
    def latent_mean_and_covariance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and joint covariance of the latent function, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean : ndarray of shape (n,) or (n, t)
            In the units of y; of counts as `latent_mean_and_variance`.
        covariance : ndarray of shape (n, n) or (n, n, t)
            In squared units of y. Its diagonal is the variance.

        Raises
        ------
        MemoryError
            If there is no room for the covariance.
        """
        X = self._validate_prediction(X)
        check_joint_memory(len(X), "Ask for fewer of them at once", np.size(self.y_scale_))
        mean, covariance = self._joint_moments(X)
        return self._to_y(mean), of_targets(covariance, self.y_scale_**2)

    @over_rows
    @within_limits
    def sample_f(self, X: ArrayLike, n_samples: int = 1, random_state=0) -> np.ndarray:
        """Draw the latent function, jointly over the rows of X, without noise.

        Parameters
        ----------
        X : array-like of shape (n, d)
        n_samples : int, default=1
        random_state : int, RandomState instance or None, default=0

        Returns
        -------
        ndarray of shape (n, n_samples) or (n, t, n_samples)
            One column a draw, in the units of y; of counts as `latent_mean_and_variance`.
        """
        check_n_samples(n_samples)
        X = self._validate_prediction(X)
        return self._to_y(self._latent_samples(X, n_samples, check_random_state(random_state)))

    def _latent_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, var = super()._latent_moments(X)
        mean, var = self._by_target(mean), var.reshape(len(var), -1)[:, 0]
        return mean, var if mean.ndim == 1 else var[:, None]

    #: Whether z is a mixture of normal distributions, `_components`, and not as `_likelihood` says.
    _is_mixture = False

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return weights (S,), means and variances (S, n) of z, without gross errors."""
        mean, var = self._observation_moments(X)
        return np.ones(1), mean[None], var[None]

    def _mixture(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the same with gross errors, of one component more."""
        (weights, mean, var), rate = self._components(X), self._gross_error_rate
        if not rate:
            return weights, mean, var
        centre, total = mixture_moments(weights, mean, var)
        weights = np.append((1 - rate) * weights, rate)
        return weights, np.vstack([mean, centre]), np.vstack([var, total + 1])

    def _quantiles(self, X: np.ndarray, levels: np.ndarray, **offset: np.ndarray) -> np.ndarray:
        """Return the quantiles of z at the rows of X, shape (n, q)."""
        if not (self._is_mixture or self._gross_error_rate):
            return self._predictive_quantiles(*self._latent_moments(X), levels, **offset)
        return self._by_chunks(lambda rows: mixture_quantiles(*self._mixture(rows), levels), X)

    def _log_density(self, X: np.ndarray, z: np.ndarray, **offset: np.ndarray) -> np.ndarray:
        """Return log p(z) of each row of X and its z, shape (n,)."""
        if not (self._is_mixture or self._gross_error_rate):
            return self._predictive_log_density(z, *self._latent_moments(X), **offset)
        return self._by_chunks(
            lambda rows: mixture_log_density(*self._mixture(rows[:, :-1]), rows[:, -1]),
            np.column_stack([X, z]),
        )

    def _observation_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState, **offset: np.ndarray
    ) -> np.ndarray:
        """Return joint draws of z at the rows of X, shape (n, n_samples)."""
        return self._sample_observations(self._latent_samples(X, n_samples, rng), rng, **offset)

    def _latent_samples(
        self, X: np.ndarray, n_samples: int, rng: np.random.RandomState
    ) -> np.ndarray:
        """Return joint draws of f at the rows of X, (n, n_samples) or (n, t, n_samples); O(n^3)."""
        check_joint_memory(len(X), "Draw at fewer of them at once")
        return gaussian_draws(*self._joint_moments(X), n_samples, rng)
