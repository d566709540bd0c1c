"""Sparse-within-sparse GP regression: the estimator of :mod:`skgp.models.swsgp`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sklearn.gaussian_process.kernels import Kernel, WhiteKernel

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._base_regressor import LikelihoodGPRegressor, StreamingGPRegressor
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import StrOptions, keep_parameters
from skgp.estimators._swsgp_common import SWSGPMixin
from skgp.estimators._varying_noise import VaryingNoise
from skgp.estimators._vecchia import VecchiaGPRegressor
from skgp.estimators.defaults import SWSGP_EXACT_ROWS, SWSGP_FULL_ROWS
from skgp.inference.defaults import LOCAL_JITTER
from skgp.kernels.expression import split_noise
from skgp.learning.local.hyperparameters import search_hyperparameters
from skgp.learning.sparse.evidence import search_by_evidence
from skgp.linalg import warn_caller
from skgp.linalg.runtime import to_arrays


class SWSGPRegressor(SWSGPMixin, VaryingNoise, LikelihoodGPRegressor, StreamingGPRegressor):
    r"""Sparse-within-sparse Gaussian processes: each observation uses few of many inducing points.

    All that is learned of f is :math:`q(u) = N(m, S)` of its values at M inducing points.
    An input x uses the H inducing points I nearest to it, near under the kernel, and no others
    [1]_:

    .. math:: f(x) \sim N(a^T m_I,\; k_{xx} - k^T a + a^T S_I a), \qquad a = K_I^{-1} k_I
              \qquad \text{(eq. 13)},

    so that it costs :math:`O(H^3)` whatever M. q maximises

    .. math:: \sum_n w_n \Big( E_q[\log p(y_n \mid f_n)]
              - \frac{\kappa}{\sum w} \mathrm{KL}(q(u_{I_n}) \,\|\, p(u_{I_n})) \Big)
              \qquad \text{(eq. 11)}

    with the KL weight :math:`\kappa = M / H`, or less without Gaussian noise, where the paper has
    1; H = M is the usual sparse GP.

    For functions that need more inducing points than an M x M matrix affords, and for outliers and
    counts on many observations, for streams, and for predictions without the observations; where
    these may be held, `VecchiaGPRegressor` predicts better as a rule. With a diagonal S, the
    default, variances of f alone are too small where inducing points are close together; those of y
    are less so, for noise is part of them. Below some 3000 observations an exact GP, such as that
    of `QSGPRegressor`, is usually better.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f; a ``WhiteKernel`` summand at the top level is the variance of Gaussian
        noise, or the squared scale of Student-t noise (one of level 0.01 is added where there is
        none; counts have none). None takes an RBF kernel or a Matern kernel of nu 3/2, whichever
        predicts better (of 200 observations or fewer, of nu 5/2), with one length scale a column.
    method : {"variational", "kriging"}, default="variational"
        The model above. "kriging", which needs Gaussian noise, is deprecated: it is
        `VecchiaGPRegressor`, of `kernel`, `n_neighbors` and `optimizer`.
    {likelihood, link, n_inducing}
    n_neighbors : int or "auto", default="auto"
        Inducing points H that an observation uses, or all there are if that is fewer. "auto" is 32;
        of up to 2500 observations with Gaussian noise and an inducing point each it is all of them,
        which is the exact GP, and of up to 1000 with other noise or counts.
    kl_weight : float or "auto", default="auto"
        :math:`\kappa`. "auto" is M / H; where the noise is not Gaussian, less by factors of ten,
        but not less than 1, while held-out observations gain. 1.0 is the paper's, which with
        Gaussian noise overfits where M is large.
    {covariance, inducing}
    init : {"random", "k-means", "greedy"}, default="random"
        Initial inducing points: observations at random, centres of clusters, or observations chosen
        greedily, each where the conditional variance given the others is greatest.
    {neighbors}
    solver : {"auto", "natural", "adam"}, default="auto"
        A closed form, or natural-gradient steps where the noise is not Gaussian ("auto",
        "natural"), followed by Adam for what that cannot do (full S with H < M, learned points); or
        Algorithm 1 of the paper, by which minibatches move everything together, hyper-parameters
        too.
    polish : bool or "auto", default="auto"
        Run Algorithm 1 at the end; its result is accepted only if the validation loss falls. "auto"
        does where there are no more than a quarter as many inducing points as observations, for
        which hyper-parameters learned from all observations are too fine.
    joint_prediction : {"local", "union"}, default="local"
        Covariances between points, for ``return_cov`` and ``sample_y``: each point from
        its own neighbours, in accord with its variance; or all from the union of their neighbours,
        as in section 4.5 of the paper, which depends on the points that come together.
    projection : int, "auto" or None, default="auto"
        Principal components of X that the kernel sees in place of its columns, divided by their
        standard deviations if observations are predicted better by their neighbours then. "auto" is
        50 with ``kernel=None``, more than 50 columns and fewer neighbours than observations, if
        fits to some observations then predict others better; else None.
    {degrees_of_freedom, heteroscedastic, warp_inputs, optimizer, normalize_y, max_iter, tol}
    {learning_rate, batch_size, warm_start}
    validation_fraction : float, default=0.1
        Of the observations to hold out where something is chosen by them (amplitude and KL weight
        without Gaussian noise, a polish): at most 4000, and no fewer than 500 or a third of the
        observations. q learns from all observations afterwards. Below 100 observations none are
        held out.
    {random_state, device, dtype, n_jobs, memory_budget, verbose}

    Attributes
    ----------
    {kernel_, input_powers_, inducing_points_}
    n_inducing_ : int
    {n_neighbors_, kl_weight_}
    elbo_ : float
        The bound with that weight, in nats of the standardised targets, summed over the
        observations; ``partial_fit`` leaves it that of the first call.
    {polished_, noise_variance_, likelihood_scale_, degrees_of_freedom_}
    n_iter_ : int
        Steps that were taken; 1 for a closed form.
    history_ : dict of lists
        "hyperparameters": log-density per observation, in nats; "prior": negative log-density of
        a held-out observation, for each prior tried; "solve" and "polish": minus the bound, per
        observation.
    {interrupted_, n_features_in_, feature_names_in_, y_mean_}

    See Also
    --------
    SWSGPClassifier : The same for classes.
    DLMGPRegressor : Some hundred inducing points, each used by all, trained by the log-loss.
    QSGPRegressor : The exact GP of a few thousand observations, and basis functions beyond.
    VecchiaGPRegressor : Neighbours among the observations, by a joint likelihood; no streams.

    Notes
    -----
    ``partial_fit`` keeps hyper-parameters and standardisation. Later observations become inducing
    points while there are fewer than ``n_inducing``, and change q(u); those before them are summed
    up by one precision an inducing point, so that late ones count for somewhat more than early
    ones.

    Observations that dask holds, or that exceed `memory_budget` in memory, are read in blocks.
    Inducing points and hyper-parameters are then those of 60000 observations at random, fewer where
    they would not fit, a polish included. All observations determine q(u): by one pass with
    Gaussian noise, by one a natural-gradient step without; or by minibatches, where steps of Adam
    are taken, and ``elbo_`` is then an estimate by the last of them. Equal observations are not
    merged before.

    References
    ----------
    .. [1] Tran, Milios, Michiardi and Filippone (2021), Sparse within sparse Gaussian processes
       using neighbor information.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import SWSGPRegressor
    >>> X = np.linspace(0, 10, 300)[:, None]
    >>> y = np.sin(X[:, 0]) + 0.1 * np.cos(37 * np.arange(300.0))
    >>> model = SWSGPRegressor(n_inducing=100, n_neighbors=16, random_state=0).fit(X, y)
    >>> mean, std = model.predict([[2.5]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(2.5)) < 0.1)
    True
    >>> model.kl_weight_, model.inducing_points_.shape
    (6.25, (100, 1))

    Observations that come later:

    >>> model.partial_fit([[10.5]], [np.sin(10.5)]).n_inducing_
    100
    """

    _parameter_constraints = {"joint_prediction": [StrOptions({"local", "union"})]}

    def __init__(
        self,
        kernel=None,
        *,
        method="variational",
        likelihood="auto",
        link="exp",
        n_inducing=None,
        n_neighbors="auto",
        kl_weight="auto",
        covariance="auto",
        inducing="auto",
        init="random",
        neighbors="auto",
        solver="auto",
        polish="auto",
        joint_prediction="local",
        projection="auto",
        degrees_of_freedom="auto",
        heteroscedastic="auto",
        warp_inputs="auto",
        optimizer="auto",
        normalize_y=True,
        max_iter=None,
        tol=1e-4,
        learning_rate=None,
        batch_size=256,
        warm_start=False,
        validation_fraction=0.1,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    @property
    def _one_target(self) -> str | None:
        return None if self.method == "kriging" else f" with method={self.method!r}"

    def _check_parameters(self, *, stream: bool = False) -> None:
        if self.method == "kriging" and not self._is_gaussian:
            raise ValueError(
                f"method='kriging' needs likelihood='gaussian'; got {self.likelihood!r}. Use "
                "method='variational'."
            )
        super()._check_parameters(stream=stream)

    def _may_vary(self, data: Data) -> bool:
        if self._projection is None:
            return super()._may_vary(data)
        if self.heteroscedastic is True:
            warn_caller("heteroscedastic=True has no effect with a projection. Set it to None.")
        return False

    def _learn(
        self,
        data: Data,
        session: FitSession,
        backend: Backend,
        *,
        stream: bool = False,
        blocks: MappedBlocks | None = None,
    ) -> None:
        if self.method == "kriging":
            self._projection = None
            other = VecchiaGPRegressor(
                self.kernel, n_neighbors=self._vecchia_neighbors, optimizer=self.optimizer
            )
            self._learn_as(other, data, session, backend)
            return
        given = self._projected(data, data.y.reshape(len(data), -1).numpy(), backend)
        data = given.merged(any_likelihood=not self._is_gaussian).to(backend.device)
        self.history_ = {"hyperparameters": []}
        rows = self._rows(data, backend)
        offset = self._offset(rows)
        kernel, white, rival = self._learn_kernel(session, given, data, offset, backend)
        with session.stage("solve", max_iter=self.max_iter) as callback:
            self._fit_variational(
                kernel,
                self._make_likelihood(white),
                rows,
                offset,
                backend,
                callback,
                blocks=blocks,
                rival=rival,
            )
        state = self._posterior.state
        kernel, parameters = state.kernel, state.likelihood.cpu()
        self._describe(kernel, parameters, white)
        self._warn_at_bounds()

    def _update(self, data: Data, backend: Backend) -> None:
        data = replace(data, X=to_tensor(self._inputs(data.X.numpy())))
        data = data.merged(any_likelihood=not self._is_gaussian).to(backend.device)
        likelihood = self._make_likelihood(split_noise(self.kernel_)[1])
        self._update_variational(self._rows(data, backend), likelihood, backend)

    def _rows(self, data: Data, backend: Backend) -> Data:
        """Observations in the dtype of the fit."""
        return replace(data, y=data.y[:, None]).to(backend.dtype)

    def _kernels(self, data: Data) -> list[Kernel]:
        """Gaussian noise that is given as a likelihood is learned with the kernel as any other."""
        kernels, own = super()._kernels(data), self._own_likelihood
        if own is None or not own.is_gaussian:
            return kernels
        ends = own.initial(data.X), *own.box(data.X)
        level, low, high = (float(own.gaussian_noise(each)) for each in ends)
        noise = WhiteKernel(level, (low, high) if low < high else "fixed")
        return [split_noise(kernel)[0] + noise for kernel in kernels]

    def _learn_kernel(
        self, session: FitSession, given: Data, data: Data, offset: np.ndarray, backend: Backend
    ) -> tuple[Kernel, WhiteKernel, Kernel | None]:
        """Return the kernel of f, the noise that goes with it, and a rival for held-out data.

        Counts have a kernel of the greatest evidence of some of them. That of numbers in their
        place, from all, is its rival where not every observation is a neighbour of all others.
        """
        if self._keeps_kernel(data):
            signal, white = split_noise(self.kernel_)
            return signal, white or WhiteKernel(), None
        kernels = self._kernels(given)
        if not self._learns:
            return *split_noise(kernels[0]), None
        model = data, self._make_likelihood(WhiteKernel())
        with session.stage("hyperparameters") as callback:
            told: dict = {"generator": backend.generator(), "callback": callback}
            signals = [split_noise(kernel)[0] for kernel in kernels]
            likeliest = search_by_evidence(signals, *model, backend.tensor(offset), **told)
            if likeliest is not None and len(data) <= SWSGP_FULL_ROWS:
                self.history_["hyperparameters"] = likeliest.history
                return likeliest.kernel, WhiteKernel(), None
            found = search_hyperparameters(kernels, *model, jitter=LOCAL_JITTER, **told)
        self.history_["hyperparameters"] = found.history
        signal, white = split_noise(found.kernel)
        return (signal, white, None) if likeliest is None else (likeliest.kernel, white, signal)

    def _few_points(self, n_latent: int) -> int:
        return SWSGP_EXACT_ROWS if self._is_gaussian else SWSGP_FULL_ROWS

    def _moment_tensors(self, rows):
        projected = rows if self._projection is None else self._projection.of_tensor(rows)
        return super()._moment_tensors(projected)

    def _latent_mean_and_covariance(self, X):
        rows = to_tensor(self._inputs(X), device=self._posterior.device)
        union = {"union": True} if self.joint_prediction == "union" else {}
        mean, covariance = to_arrays(*self._posterior.mean_and_covariance(rows, **union))
        return self._by_target(mean), covariance.reshape(len(X), len(X))
