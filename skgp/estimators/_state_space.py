"""Regression in state space: the estimator of :mod:`skgp.models.state_space`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel, WhiteKernel
from sklearn.utils.validation import check_is_fitted

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.estimators._base import Backend
from skgp.estimators._base_regressor import LikelihoodGPRegressor, StreamingGPRegressor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import FitSession, within_limits
from skgp.estimators._kernels import with_noise
from skgp.estimators._parameters import keep_parameters
from skgp.estimators._series_inputs import observed_rows
from skgp.estimators._state_space_common import StateSpaceMixin
from skgp.estimators._target_scale import SeriesScale
from skgp.estimators._time import framed
from skgp.estimators._validation import told_by_rows
from skgp.estimators.defaults import NOISE_BOUNDS, SERIES_NOISE
from skgp.inference.gp_mixture import AveragedState
from skgp.inference.markov.inducing import GaussianSums
from skgp.inference.markov.states import InducingState
from skgp.kernels import split_noise
from skgp.linalg.runtime import to_arrays
from skgp.models.state_space import Exact
from skgp.optim.stopping import StopRecorder


class StateSpaceGPRegressor(
    SeriesScale, StateSpaceMixin, LikelihoodGPRegressor, StreamingGPRegressor
):
    r"""Gaussian process regression of time series and additive models, in O(n).

    On one column of X, a Gaussian process whose kernel is the covariance of a linear stochastic
    differential equation is a Markov chain of states of d numbers (f and some of its derivatives),
    and exact inference is a walk along the times: :math:`O(n d^3)` for fits, predictions, draws and
    gradients. Columns beside that of the times are covariates, with q features and Gaussian
    coefficients, :math:`O(n (1 + q) d^2 + n q^2)` more. On several columns of numbers of which none
    is named as time the model is a sum of processes, one a column; a fit warns of two columns that
    act together, which the sum misses.

    Parameters
    ----------
    kernel : Kernel or None, default=None
        A scikit-learn kernel expression in the units of X; a WhiteKernel summand is the noise. Sums
        and products of Matern (nu 1/2, 3/2, 5/2), ConstantKernel, `skgp.kernels.Cosine` and
        `skgp.kernels.SHO` are exact; RBF, RationalQuadratic and ExpSineSquared are approximated
        (see the user guide); to one column `skgp.kernels.LocalLinearTrend` may be added. None, of
        one column, is the kernel of the greatest evidence among Matern kernels and the sum of two,
        of a long and a short length scale (of 10000 observations or fewer, also RBF). Of 20 to
        20000 times with trend=None it adds seasons of the periods that a periodogram shows, and of
        40 or more a `skgp.kernels.LocalLinearTrend` whose level wanders where a process that
        returns to a mean does not explain more; where both are likely, predictions under Gaussian
        noise are averaged over the two, and up to three steps of the level are added. Of 4 to 39
        times they are averaged over whether a straight line lies beneath the process. With five
        observations per hyper-parameter or fewer and no trend, it has the priors of
        `BayesianGPRegressor`, and predictions are averaged over Laplace's approximation of their
        posterior; of 40 to 3000 times over such about the optimum. Several columns: a kernel of
        which each column gets a copy, or a sum of `skgp.kernels.ActiveDims` of one column each;
        None is a Matern 3/2 each, of one variance and, in units of the ranges, one length scale for
        all columns, or of their own, with a prior, where the evidence gains enough by those that
        then matter.
    {time}
    covariates : {"auto"} or dict, default="auto"
        Kinds of the columns beside the times, by name or position: "linear" for a slope, "flag" for
        a step, "categorical" for an effect of each level, their variance learned, "smooth" for a
        slope and a Gaussian process of the column, its variance and length scale learned. "auto",
        and of columns that a dict leaves out: text is categorical, what has two values a flag, up
        to four columns of numbers are smooth, and more of them linear.
    trend : {0, 1, 2} or None, default=None
        Degree of a polynomial of time in the mean, of coefficients that are left to the data. A
        DotProduct summand of the kernel is a straight line, too.
    n_inducing : int, "auto" or None, default=None
        None is exact. A number M places inducing states at M of the times: a small fitted model,
        observations that come in parts. "auto" takes as many as the length scale learned asks for.
        With several columns, the most distinct values of a column, beyond which they are binned
        (None and "auto": 512).
    {inducing, batch_size, posterior, likelihood, link, degrees_of_freedom, optimizer, normalize_y}
    {max_iter, tol}
    warm_start : bool, default=False
        Start from the kernel and the likelihood of the last fit. Another kernel, likelihood or
        number of columns begins anew.
    random_state : int, RandomState instance or None, default=None
        Of minibatches and of the observations that stand for those in blocks; other fits draw
        nothing.
    {device, dtype, n_jobs, memory_budget, verbose}

    Attributes
    ----------
    kernel_ : Kernel
        With the hyper-parameters learned, noise included. Of several columns a sum of ActiveDims.
    log_marginal_likelihood_value_ : float
        Of the standardised targets, or their logarithms, in nats: exact with Gaussian noise, one
        column and no inducing states, else a lower bound. ``partial_fit`` of one column leaves it
        that of the first call.
    {inducing_points_, time_origin_}
    intercept_ : float
        What `predict_components` leaves of the mean of f, in the units of y, or of log y.
    {component_kernels_, covariate_kinds_, component_columns_, component_names_, likelihood_}
    {noise_variance_, likelihood_scale_, degrees_of_freedom_}
    n_iter_ : int
    {history_, interrupted_, n_features_in_, feature_names_in_, y_mean_}

    See Also
    --------
    StateSpaceGPClassifier : The same for classes.
    SWSGPRegressor : Any number of columns that act together.

    Notes
    -----
    Times come in any order, with repetitions; y is NaN where it was not observed. They are numbers
    in the unit of the kernel, or dates (datetime64 of any resolution, time stamps or periods of
    pandas or polars, in a data frame or alone), which become days since `time_origin_`, exactly;
    those with a time zone are instants in UTC, and a period is its first moment.

    Of "lognormal" the latent function, its components, `intercept_` and `noise_variance_` are of
    log y: the exponential of a component is a factor of y. With ``f, var`` the moments of f
    (`latent_mean_and_variance`), `predict` is ``np.exp(f + noise_variance_ / 2)``, the mean of y
    where f is known. The mean over what is not known of f, too, ``np.exp(f + (var +
    noise_variance_) / 2)``, is far above most of what may come where forecasts are wide; the median
    is ``np.exp(f)``. Later y must be positive.

    Covariates take part in the prediction at the values that X has for them, beyond the values seen
    as straight lines; a level that is new has the effect of a level drawn from their distribution.
    ``set_output(transform="pandas")`` gives predictions the index of X.

    ``partial_fit`` keeps hyper-parameters and standardisation; a stream that begins with it has no
    seasons, trends or steps, which ``fit`` looks for. Later observations may lie anywhere
    in time. With Gaussian noise the posterior is that of all observations at once; otherwise their
    sites are found given those before, which has no covariates. Sites at all times grow with them.
    With ``n_inducing`` the state does not, but for times beyond the inducing states, which get such
    of their own, as densely placed as before.

    Of several columns the posterior is that of all observations at once. With Gaussian noise sums
    over bins stand for more than 1000 observations, some M^2 numbers for the M bins that these
    have; other likelihoods keep the observations. A `fit` of more than 1000 observations keeps
    neither and cannot go on.

    With ``n_inducing``, one column and Gaussian noise, observations that dask holds, or that exceed
    `memory_budget` in memory, are read in blocks. Hyper-parameters and the places of the inducing
    states are then learned from 60000 observations at random.

    References
    ----------
    .. [1] Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), Doubly sparse variational
       Gaussian processes.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import StateSpaceGPRegressor
    >>> x = np.linspace(0, 10, 150)[:, None]
    >>> y = np.sin(x[:, 0]) + 0.1 * np.cos(40 * x[:, 0])
    >>> y[120:130] = np.nan
    >>> model = StateSpaceGPRegressor().fit(x, y)
    >>> mean, std = model.predict([[8.4]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(8.4)) < 2 * std[0])
    True
    """

    def __init__(
        self,
        kernel=None,
        *,
        time=None,
        covariates="auto",
        trend=None,
        n_inducing=None,
        inducing="fixed",
        batch_size=None,
        posterior="auto",
        likelihood="auto",
        link="exp",
        degrees_of_freedom="auto",
        optimizer="auto",
        normalize_y=True,
        max_iter=100,
        tol=1e-7,
        warm_start=False,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    @property
    def log_marginal_likelihood_value_(self) -> float:
        """Evidence of the standardised targets, in nats; a bound where it is not exact."""
        return self._evidence

    @property
    def intercept_(self) -> float:
        """What the components leave of the mean of f, in the units of y, or of log y."""
        return float(self._to_y(self._states[0].offset))

    # ---- training ------------------------------------------------------------------------

    def _training_data(self, X, y, sample_weight=None, exposure=None, **how):
        *observed, rows = observed_rows(X, y, sample_weight, exposure)
        with told_by_rows(rows):
            return super()._training_data(*observed, **how)

    def _learn(
        self,
        data: Data,
        session: FitSession,
        backend: Backend,
        *,
        stream: bool = False,
        blocks: MappedBlocks | None = None,
    ) -> None:
        given, white = self._split_kernel(self._process_columns(data.X.numpy()))
        offset = self._offset(data).tolist()
        likelihood = self._make_likelihood(white)
        with session.stage("solve") as report:
            callback = StopRecorder(report)

            def fit(model: Any, data: Data) -> tuple[Kernel, torch.Tensor]:
                place = given, likelihood, offset, backend, callback
                return model._fit_states(data, *place, stream=stream)

            kernel, parameters = fit(self, data)
            if blocks is not None:
                # Sites of all rows at the inducing states found, in place of those of some.
                noise = float(parameters[0].exp())
                state = cast(InducingState, self._states[0])
                prior: dict[str, Any] = {"kernel": state.kernel, "knots": state.knots}
                sums = blocks.sum(partial(GaussianSums.of, noise=noise, **prior), report)
                self._states = [replace(state, sites=sums.sites)]
                self._evidence = sums.elbo(**prior)
            elif self._chooses_scale and not (stream or callback.stopped):
                found = kernel, parameters
                kernel, parameters = self._on_better_scale(data, likelihood, found, fit)
        self._describe(kernel, parameters, white)
        self._warn_at_bounds()

    def _takes_blocks(self, n_columns: int) -> bool:
        sums = self.n_inducing is not None and n_columns == 1 and not self.warm_start
        return sums and self.likelihood in ("auto", "gaussian")

    def _learn_blocks(self, blocks: MappedBlocks, session: FitSession, backend: Backend) -> None:
        self._table = None  # blocks hold numbers
        self._learn(blocks.some, session, backend, blocks=blocks)

    def _update(self, data: Data, backend: Backend) -> None:
        self._add(data, self._make_likelihood(split_noise(self.kernel_)[1]), backend)

    def _split_kernel(self, X: np.ndarray) -> tuple[Kernel | None, WhiteKernel | None]:
        """The kernel given, without noise (None for the default), and the noise (None: counts)."""
        own = self._own_likelihood is not None
        if self.kernel is None:
            return None, None if own else WhiteKernel(SERIES_NOISE, NOISE_BOUNDS)
        kernel = self._given_kernel(X)
        return (kernel, None) if own else split_noise(with_noise(kernel))

    # ---- prediction ------------------------------------------------------------------------

    @framed("mean", "std")
    def predict(
        self,
        X,
        return_std=False,
        return_cov=False,
        exposure=None,
        return_mean_grad=False,
        return_std_grad=False,
        filtered=False,
    ):
        """Predict a new observation y at each row of X.

        Parameters
        ----------
        X : array-like of shape (n, d)
        {return_std, return_cov, exposure, return_mean_grad, return_std_grad}
        filtered : bool, default=False
            Predict each point from the observations at earlier times alone, one step ahead at those
            of the observations. The hyper-parameters are those of all. Of Gaussian noise.

        Returns
        -------
        mean : ndarray of shape (n,)
            With Student-t noise of one degree of freedom or fewer, which has none, the median; of
            "lognormal" that of y given f, at the mean of f.
        {std, covariance, mean_grad, std_grad}

        Raises
        ------
        RuntimeError
            If both ``return_std`` and ``return_cov`` are True.
        ValueError
            If gradients are asked for with ``return_cov``, or those of a standard deviation without
            ``return_std``; or if there is no filter for the model.
        MemoryError
            If there is no room for the covariance.
        """
        given = return_std, return_cov, exposure, return_mean_grad, return_std_grad
        if not filtered:
            return super().predict(X, *given)
        check_is_fitted(self)
        others = any(part is not None and part is not False for part in given[1:])
        if others or not self._is_gaussian or not isinstance(self._states[0], Exact):
            raise ValueError(
                "filtered=True has the mean and return_std of a series with Gaussian noise and "
                "without inducing states. Leave other arguments out, or filtered."
            )
        mean, std = self._predict_filtered(X)
        return (mean, std) if return_std else mean

    @over_rows
    @within_limits
    def _predict_filtered(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (n,) of y from what came before."""
        X = self._validate_prediction(X)
        state = cast(Exact, self._states[0])
        mean, var = self._predictive_moments(*to_arrays(*state.past_moments(self._inputs(X))))
        return self._observed_moments(X, mean, var)

    predict_interval = framed("lower", "upper")(LikelihoodGPRegressor.predict_interval)
    predict_quantiles = framed(
        "quantile", columns=lambda self, arguments: np.ravel(arguments["quantiles"]).tolist()
    )(LikelihoodGPRegressor.predict_quantiles)
    predict_components = framed("component", columns=lambda self, _: self.component_names_)(
        StateSpaceMixin.predict_components
    )

    @property
    def _latent_device(self):
        return self._states[0].device

    def _moment_tensors(self, rows):
        return self._states[0].moments(self._seen_columns(rows))

    def _latent_mean_and_covariance(self, X):
        mean, covariance = to_arrays(*self._states[0].covariance(self._inputs(X)))
        return mean, covariance

    def _latent_samples(self, X, n_samples, rng, **noise):
        x, seed = self._inputs(X), int(rng.randint(2**31 - 1))
        generator = torch.Generator(x.device).manual_seed(seed)
        return self._states[0].samples(x, n_samples, generator, **noise).cpu().numpy()

    # ---- averages over hyper-parameters: mixtures of Gaussians

    @property
    def _is_mixture(self) -> bool:  # type: ignore[override]
        return isinstance(self._states[0], AveragedState)

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not isinstance(self._states[0], AveragedState):
            return super()._components(X)
        weights, mean, var = to_arrays(*self._states[0].mixture(self._inputs(X)))
        return weights, mean, var

    def _observation_samples(self, X, n_samples, rng, **offset):
        if self._is_mixture:
            return self._latent_samples(X, n_samples, rng, noise=True)
        return super()._observation_samples(X, n_samples, rng, **offset)
