r"""The interface of the regressors.

A concrete regressor derives from `BaseGPRegressor`, or `StreamingGPRegressor` where it has a
``partial_fit``; has an ``__init__`` that keeps its parameters (`keep_parameters`); and extends
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

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils.metaestimators import available_if

from skgp.data import Data
from skgp.estimators._base import Backend, BaseGP
from skgp.estimators._blocks import in_memory, training_blocks
from skgp.estimators._fitting import fit_context, fit_session
from skgp.estimators._kernels import default_kernels, with_noise
from skgp.estimators._regression_predictions import RegressionPredictions
from skgp.estimators.defaults import SIGNAL_BOUNDS


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
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    """

    _parameter_constraints: dict[str, list[Any]] = {
        **BaseGP._parameter_constraints,
        "normalize_y": ["boolean"],
    }

    #: Of the variance of f, where the kernel is not given.
    _signal_bounds = SIGNAL_BOUNDS

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

    def _kernels(self, X: np.ndarray, sample_weight: np.ndarray | None) -> list[Kernel]:
        """Kernels to choose among, with noise: the one given, or the default ones."""
        if self.kernel is None:
            return default_kernels(X, sample_weight, bounds=self._signal_bounds)
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
