"""Quadruply stochastic GP classification: the estimator of :mod:`skgp.models.qsgp`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.blocks import MappedBlocks
from skgp.data import Data, replicates
from skgp.estimators._base import Backend, arrays, to_tensor
from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._blocks import numbers_of_some
from skgp.estimators._fitting import Callback, FitSession
from skgp.estimators._parameters import StrOptions, options, warn_at_bounds
from skgp.estimators._projection import ProjectedClassifierMixin
from skgp.estimators._qsgp_common import CONSTRAINTS, QSGPMixin
from skgp.estimators._reduction import cluster_centres
from skgp.estimators._validation import one_vs_rest
from skgp.inference.laplace import OnlineLaplace
from skgp.inference.weights.posterior import AugmentedPosterior
from skgp.kernels import has_spectral_density
from skgp.kernels.scales import amplitude_range, scale_amplitude
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    fit_classification_hyperparameters,
)
from skgp.learning.defaults import FEW_ROWS_MODERATION, SCALE_ROWS, SUBSET_ROWS
from skgp.learning.label_scales import refine_length_scales
from skgp.learning.plan import (
    Fit,
    Options,
    in_sums,
    resolve_classification,
    streaming_classification,
    unit_prior_basis,
)
from skgp.learning.search import HyperparameterFit
from skgp.learning.stochastic import SomeRows
from skgp.likelihoods import Bernoulli
from skgp.models import qsgp

_NO_WEIGHTS = (
    "sample_weight and class_weight are not supported by solver='sgd'; use solver='newton'."
)


class QSGPClassifier(ProjectedClassifierMixin, QSGPMixin, StreamingGPClassifier):
    r"""Gaussian process classification with up to millions of basis functions.

    The latent function of class j is :math:`f_j(x) = o_j + \sum_r w_{rj} \phi_r(x)` with
    :math:`w_j \sim N(0, S^{-1})`, :math:`\phi(x)^T S^{-1} \phi(x') \approx k(x, x')` and
    :math:`P(y = j) = g(f_j)` [1]_; :math:`o_j` predicts the base rate. Beyond two classes each is
    set against the rest, over shared features, and the probabilities are divided by their sum.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels by evidence
        and held-out labels; labels left out then correct amplitude and length scales.
    basis : {"auto", "fourier", "inducing", "relevance"}, default="auto"
        Random Fourier features, kernels centred on inducing points (centres of clusters of the
        observations), or kernels centred on the few observations that the evidence keeps.
    n_basis : int or None, default=None
        Number of basis functions m. By default all observations up to 2000, then as many as about a
        minute allows, at most 4096; 100000 for "sgd". Of "relevance", the observations that are
        candidates.
    likelihood : {"logit", "probit"}, default="logit"
        The link g.
    projection : int, "auto" or None, default="auto"
        Principal components of X that the kernel sees in place of its columns, divided by their
        standard deviations if observations are predicted better by their neighbours then. "auto" is
        50 with ``kernel=None`` and more than 50 columns of arrays, unless these predict held-out
        labels better; None of "sgd", streams and blocks.
    solver : {"auto", "newton", "sgd"}, default="auto"
        Newton's method for the Laplace approximation, with conjugate gradients where the Hessian
        is large; or stochastic gradients of a variational bound (Theorem 3), whose iterations cost
        the same for any number of observations and basis functions, and which need many of them.
    bound : {"plug-in", "strict"}, default="plug-in"
        Of "sgd": integrate the likelihood over the sampled mean and variance of f, which is nearer
        to the bound of the whole basis, or over sampled weights, which never exceeds it.
    covariance : {"auto", "full", "chevron", "diagonal"}, default="auto"
        Posterior covariance of the weights: exact, with `n_dense_columns` dense columns of the
        Cholesky factor, or mean-field. "auto" is the first where it is affordable, else the last.
    n_dense_columns : int, default=100
        For ``covariance="chevron"``.
    basis_batch_size : int, default=20_000
        Basis functions sampled an iteration of "sgd".
    batch_size : int, default=100
        Observations sampled an iteration of "sgd".
    n_support : int, default=200
        Observations that shape the directions of "sgd"; 0 for plain AdaGrad.
    {augment, feature_map, class_weight, optimizer}
    max_iter : int or None, default=None
        Newton steps (30 by default), or iterations of "sgd" (1000).
    tol : float or None, default=None
        Relative gradient at which Newton's method ends (1e-4 by default); relative fall of the
        smoothed loss below which "sgd" ends (never by default).
    learning_rate : float, default=0.1
        Of "sgd".
    warm_start : bool, default=False
        Start from the hyper-parameters of the last fit and, with "sgd", from its weights. Another
        kernel, likelihood, basis, projection, number of columns or set of classes begins anew.
    {random_state, device}
    dtype : {"float64", "float32"}, default="float64"
        Of the features of the fit. Beyond 2e7 of them (observations times basis functions) they are
        float32 either way, where a comparison shows that they can. Predictions are in float64.
    {n_jobs, memory_budget, verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {kernel_}
    basis_, solver_, covariance_ : str
    n_basis_ : int
    reason_ : str
        Why these were chosen.
    moderation_ : float
        Probabilities average over f with this factor of its posterior variance; 0 takes f at its
        mean. Chosen on held-out observations; of up to 200 by leaving out each in turn.
    offset_ : ndarray of shape (1,) or (n_classes,)
        Constant parts of the latent functions.
    log_marginal_likelihood_value_ : float
        Laplace's approximation, in nats, under the basis used, summed over the latent functions.
        Set where the covariance is full, and for relevance vectors.
    elbo_ : float
        Of "sgd": the bound in nats, estimated by the last tenth of the iterations.
    n_iter_ : int
    validation_ : dict of str to dict
        Mean log density of held-out observations, in nats: "amplitude", by factor of the amplitude
        that a subset suggested, and "moderation", by factor of the posterior variance.
    history_ : dict of lists
        "hyperparameters": log evidence per observation; "solve": the loss in nats.
    relevance_ : ndarray of int
        With ``basis="relevance"``: the observations that are relevance vectors.
    n_relevance_vectors_ : int
        Their number.
    {interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    sklearn.gaussian_process.GaussianProcessClassifier : The dense GP of up to two thousand points.

    Notes
    -----
    ``partial_fit`` changes the posterior, which is the prior of the next call; observations are not
    kept. The first call learns the hyper-parameters and the base rates and chooses the basis:
    Fourier features (1024 by default) or as many inducing points. Later calls keep them. The result
    is near that of a fit to all observations, and depends a little on their order.

    Observations that dask holds, or that exceed `memory_budget` in memory, are read in blocks: by
    Newton's method with Fourier features or inducing points in a pass a step, which adds up
    gradients and Hessians, exact, of fewer basis functions by default; by ``solver="sgd"`` with
    Fourier features in minibatches. Hyper-parameters, the amplitude and ``moderation_`` are those
    of 60000 observations at random. The indices of the labels are held in memory, a byte or two an
    observation.

    References
    ----------
    .. [1] Evans and Nair (2020), Quadruply stochastic Gaussian processes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from skgp import QSGPClassifier
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> model = QSGPClassifier(random_state=0).fit(X, y)
    >>> model.predict([[0.0, 1.0], [1.0, -0.5]])
    array([0, 1])
    >>> model.solver_, model.basis_, model.n_basis_
    ('newton', 'inducing', 100)
    """

    _parameter_constraints: dict = {
        **StreamingGPClassifier._parameter_constraints,
        **CONSTRAINTS,
        "basis": [StrOptions({"auto", "fourier", "inducing", "relevance"})],
        "likelihood": [StrOptions({"logit", "probit"})],
        "solver": [StrOptions({"auto", "newton", "sgd"})],
        "bound": [StrOptions({"plug-in", "strict"})],
        "covariance": [StrOptions({"auto", "full", "chevron", "diagonal"})],
        **ProjectedClassifierMixin._projection_constraints,
    }

    _option_rules = (
        options("batch_size basis_batch_size n_support learning_rate bound", solver=("sgd",)),
        options("n_dense_columns", covariance=("chevron",)),
        options("feature_map", basis=("fourier",)),
    )
    _updated_in_place = frozenset({"_online", "_sgd_state"})

    def __init__(
        self,
        kernel=None,
        *,
        basis="auto",
        n_basis=None,
        likelihood="logit",
        projection="auto",
        solver="auto",
        bound="plug-in",
        covariance="auto",
        n_dense_columns=100,
        basis_batch_size=20_000,
        batch_size=100,
        n_support=200,
        augment=True,
        feature_map="orthogonal",
        class_weight=None,
        optimizer="auto",
        max_iter=None,
        tol=None,
        learning_rate=0.1,
        warm_start=False,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        self.kernel = kernel
        self.basis = basis
        self.n_basis = n_basis
        self.likelihood = likelihood
        self.projection = projection
        self.solver = solver
        self.bound = bound
        self.covariance = covariance
        self.n_dense_columns = n_dense_columns
        self.basis_batch_size = basis_batch_size
        self.batch_size = batch_size
        self.n_support = n_support
        self.augment = augment
        self.feature_map = feature_map
        self.class_weight = class_weight
        self.optimizer = optimizer
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.memory_budget = memory_budget
        self.verbose = verbose

    bound: str
    validation_: dict[str, dict[float, float]]
    _online: OnlineLaplace

    # ---- training ------------------------------------------------------------------------

    @property
    def _has_stream(self) -> bool:
        return hasattr(self, "_online")

    def _check_parameters(self, *, stream: bool = False) -> None:
        if stream and (self.solver == "sgd" or self.basis == "relevance"):
            raise ValueError(
                "partial_fit needs solver='newton' with Fourier features or inducing points; got "
                f"solver={self.solver!r} and basis={self.basis!r}."
            )

    def _takes_blocks(self, n_columns: int) -> bool:
        if self.solver != "sgd":
            return self.basis != "relevance"
        fourier = self.kernel is None or has_spectral_density(self.kernel)
        return self.basis in ("auto", "fourier") and self.class_weight is None and fourier

    def _learn_blocks(self, blocks: MappedBlocks, session: FitSession, backend: Backend) -> None:
        if self.solver != "sgd":
            of_classes = partial(_coded, n_classes=len(self.classes_))
            given = blocks.then(of_classes, blocks.some).to(backend.device)
            self._learn(blocks.some, session, backend, blocks=given)
            return
        read = blocks.blocks.by_rows()
        numbers = numbers_of_some(blocks.blocks, backend)
        coded = partial(one_vs_rest, n_classes=len(self.classes_))
        rows = SomeRows(read.X, read.y, numbers, coded)
        if read.weight is not None:
            raise ValueError(_NO_WEIGHTS)
        self._learn(blocks.some, session, backend, rows=rows)

    def _learn(
        self,
        data: Data,
        session: FitSession,
        backend: Backend,
        *,
        stream: bool = False,
        rows: SomeRows | None = None,
        blocks: MappedBlocks | None = None,
    ) -> None:
        self.__dict__.pop("_online", None)  # a stream ends here
        if stream:
            self._start_stream(data, session, backend)
            return
        if self.solver != "sgd" and self.basis != "relevance":
            data = merge_equal(data)
        whole = rows is None and blocks is None
        if isinstance(self.projection, Integral) and not whole:
            raise ValueError(
                f"projection={self.projection} needs all rows in memory; give arrays, not blocks, "
                "or None."
            )
        chooses = whole and self.solver != "sgd"
        data = self._projected(data, self._one_vs_rest(data), backend, chooses=chooses)
        given = self._coded_rows(data, cautious=False)
        data, generator = given.to(backend.device), backend.generator()
        found = self._learn_kernel(session, given, data, generator)
        state = None
        if self.solver == "sgd":  # what it has learnt so far can predict at any time

            def state():
                return self._fitted_attributes(callback.info["fit"]())

        with session.stage("solve", state=state) as callback:
            problem = self._problem(found, data, backend, generator, callback)
            fit = self._solve(problem, given, self._previous(backend)[1], rows, blocks)
        self._keep_fit(fit, self._fitted_attributes(fit), backend)
        if self._learns:
            warn_at_bounds(self.kernel_, self.kernel)
        self._keep_relevance(fit, session)

    def _coded_rows(self, data: Data, *, cautious: bool) -> Data:
        """Set likelihood and base rates; the observations with y (n, c) coded."""
        Y = self._one_vs_rest(data)
        self._likelihood = Bernoulli(self.likelihood)
        self._set_offset(Y, arrays(data)[1], cautious=cautious)
        return replace(data, y=to_tensor(Y))

    def _start_stream(self, data: Data, session: FitSession, backend: Backend) -> None:
        """Learn from the first rows of a stream what all its rows will share."""
        # A row of each kind more: a class that comes late must not have an infinite offset.
        projected = self._projected(data, self._one_vs_rest(data), backend, chooses=False)
        given = self._coded_rows(projected, cautious=True)
        rows = given.to(backend.device)
        found = self._learn_kernel(session, given, rows, backend.generator())
        plan = streaming_classification(self._plan(), len(rows), found.kernel)
        Z = None
        if plan.basis == "inducing":
            rng = np.random.RandomState(backend.seed)
            centres = cluster_centres(given.X.numpy(), plan.size, found.kernel, random_state=rng)
            Z = to_tensor(centres, device=backend.device)
        settings = Options(feature_map=self.feature_map, seed=backend.seed)
        basis = unit_prior_basis(found.kernel, rows.X, plan, settings, Z)
        offset = to_tensor(self.offset_, device=backend.device)
        self._online = OnlineLaplace(basis, offset, self._likelihood)
        self.kernel_, self.basis_, self.n_basis_ = found.kernel, plan.basis, plan.size
        self.solver_, self.covariance_, self.reason_ = plan.solver, plan.covariance, plan.reason
        self.moderation_, self.validation_ = FEW_ROWS_MODERATION, {}
        self._forget_optional()
        self._update(data, backend)

    def _update(self, data: Data, backend: Backend) -> None:
        X = to_tensor(self._inputs(data.X.numpy()))
        rows = replace(data, X=X, y=to_tensor(self._one_vs_rest(data))).to(backend.device)
        self._online.update(rows.X, rows.y, rows.weight)
        posterior = self._online.posterior()
        augmented = self.augment and self.basis_ == "inducing"
        self._posterior = AugmentedPosterior(posterior) if augmented else posterior
        self.n_iter_ = max(1, self._online.n_iter)

    def _learn_kernel(
        self, session: FitSession, given: Data, data: Data, generator: torch.Generator
    ) -> HyperparameterFit:
        """Return the kernel with learned hyper-parameters, and what the search found out.

        `given` are the observations on the CPU, `data` the same on the device.
        """
        self.history_ = {"hyperparameters": [], "solve": []}
        kernels = [self.kernel_] if self._goes_on else self._kernels(*arrays(given))
        if not self._learns:
            return HyperparameterFit(kernels[0])
        shared: dict[str, Any] = {
            "offset": to_tensor(self.offset_, device=data.X.device),
            "row_weight": data.weight,
            "generator": generator,
        }
        settings = ClassificationSettings(**self._search_options(data))
        if len(data) >= SCALE_ROWS:  # more correct the scales below
            settings = replace(settings, rescales=False)
        with session.stage("hyperparameters") as callback:
            found = fit_classification_hyperparameters(
                kernels,
                data.X,
                data.y,
                likelihood=self._likelihood,
                settings=settings,
                callback=callback,
                **shared,
            )
            self.history_["hyperparameters"] = found.history
            refined = refine_length_scales(
                found.kernel, data.X, data.y, self._likelihood, callback=callback, **shared
            )
        return replace(found, kernel=refined)

    def _problem(
        self,
        found: HyperparameterFit,
        data: Data,
        backend: Backend,
        generator: torch.Generator,
        callback: Callback,
    ) -> qsgp.Problem:
        """What the solvers start from for fixed hyper-parameters."""
        few = len(data) <= SUBSET_ROWS  # the search has seen every row
        moderation = found.moderation if few and found.history else None
        learns = self._learns and cast(Kernel, found.kernel).n_dims > 0
        options = self._shared_options(
            backend, bound=self.bound, moderation=moderation, learn_hyperparameters=learns
        )
        model = self._likelihood, to_tensor(self.offset_, device=backend.device)
        return qsgp.Problem(found.kernel, data, 0.0, options, generator, callback, *model)

    def _solve(
        self,
        problem: qsgp.Problem,
        given: Data,
        state: Any,
        rows: SomeRows | None,
        blocks: MappedBlocks | None,
    ) -> Fit:
        """Fit the posteriors of the latent functions to the data `given` on the CPU, too.

        With `rows` or `blocks` these are learned from, of which the data are some.
        """
        data = problem.data
        n = len(data) if rows is None else len(rows.X)
        n = n if blocks is None else len(blocks)
        plan = resolve_classification(self._plan(), n, data.y.shape[1], problem.kernel)
        if blocks is not None:
            plan = in_sums(self._plan(), plan, n, len(data), data.y.shape[1])
        Z = None
        if plan.basis == "inducing":
            X, weight = arrays(given)
            rng = np.random.RandomState(problem.options.seed)
            centres = cluster_centres(
                X, plan.size, problem.kernel, sample_weight=weight, random_state=rng
            )
            Z = to_tensor(centres, device=data.X.device)
        return qsgp.fit_classifier(problem, plan, Z=Z, state=state, rows=rows, blocks=blocks)

    def _fitted_attributes(self, fit: Fit) -> dict[str, Any]:
        """What makes this estimator one fitted by `fit`, the labels aside."""
        low, high = amplitude_range(fit.kernel)
        return {
            **self._fit_attributes(fit),
            "kernel_": scale_amplitude(fit.kernel, fit.amplitude if low < high else 1.0),
            "moderation_": fit.moderation,
            "validation_": fit.scores,
            "history_": {**self.history_, "solve": fit.history},
        }

    # ---- prediction ------------------------------------------------------------------------

    def _latent_mean(self, X):
        return self._evaluate("mean", self._inputs(X))[0]

    def _latent_mean_and_variance(self, X):
        return self._evaluate("mean_and_variance", self._inputs(X))


def _coded(data: Data, *, n_classes: int) -> Data:
    """Observations of a block, their codes as y (n, c) in {-1, +1}."""
    return replace(data, y=to_tensor(one_vs_rest(data.y.numpy().astype(np.int64), n_classes)))


def merge_equal(data: Data) -> Data:
    """Observations, those of equal input and label merged to one of their total weight.

    Where the first of them stood, so that without any nothing changes.
    """
    X, weight = arrays(data)
    number = replicates(np.column_stack([X, data.y.numpy()]))
    first = np.unique(number, return_index=True)[1]
    if len(first) == len(X):
        return data
    total = np.bincount(number, weights=weight).astype(np.float64)
    return replace(data.take(torch.from_numpy(first)), weight=to_tensor(total))
