"""What `DLMGPRegressor` and `DLMGPClassifier` share: parameters, inducing points, the fit."""

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators._base import Backend, arrays, to_tensor
from skgp.estimators._input_units import InputUnits
from skgp.estimators._parameters import Auto, Interval, Option, StrOptions, options
from skgp.estimators._reduction import (
    INITIALISERS,
    distinct_rows,
    inducing_points,
    warn_of_few_rows,
)
from skgp.estimators._warping import WarpedInputs
from skgp.inference.collapsed import sparse_posterior
from skgp.inference.sparse import SparseState
from skgp.learning.defaults import FEW_ROWS
from skgp.learning.sparse import defaults
from skgp.learning.sparse.evidence import has_evidence
from skgp.learning.sparse.objective import (
    STOCHASTIC_GRADIENTS,
    Objective,
    Problem,
    Settings,
    update,
)
from skgp.learning.sparse.start import has_outliers, is_conjugate, require_room
from skgp.likelihoods import Likelihood
from skgp.models.dlm import SparseFit, fit_beta_path, fit_sparse
from skgp.optim.stopping import StopRecorder


class SparseGPMixin(WarpedInputs):
    """Parameters and fit of sparse GPs; an estimator class adds likelihood and predictions.

    The estimator has the parameters of ``_parameter_constraints``.

    Parameters
    ----------
    beta : float or "auto", default=1.0
        Weight of the KL divergence. "auto" chooses among 8, 4, ..., 0.015 by held-out data, along a
        path of warm starts from 1 down and up, which costs three to five single fits.
    inducing : {"learned", "fixed"}, default="learned"
        Whether the points move.
    init : {"k-means", "random", "greedy"}, default="k-means"
        Initial inducing points: centres of clusters, observations at random, or observations chosen
        greedily, each where the conditional variance given the others is greatest.
    hyperparameters : {"joint", "fixed"}, default="joint"
        Whether the objective learns hyper-parameters and points too, beginning at the optimum of
        the ELBO, or q alone, with those of the ELBO.
    gradient : {"auto", "exact", "quadrature", "bmc", "smooth_bmc", "ups"}, default="auto"
        Of the log-loss: a closed form or adaptive quadrature ("auto", "exact", "quadrature"), or
        sampled as in the paper: biased Monte Carlo, with a smoothed denominator, or unbiased
        product sampling. Sampled ones train by stochastic steps.
    n_gradient_samples : int, default=10
        Samples per observation and step of the last three.
    optimizer : "auto" or None, default="auto"
        None keeps the kernel's hyper-parameters and the points.
    max_iter : int, default=200
        Iterations over all observations at once, or pairs of steps with minibatches, of each part
        of the fit.
    tol : float, default=1e-6
        Relative fall of the objective in an iteration below which to stop, 1e5 / n times as much
        with few observations: n at most `n_inducing` (twice that for counts and labels), and 500.
    learning_rate : float or None, default=None
        Of minibatches; None for a default that suits.
    warm_start : bool, default=False
        Start from the hyper-parameters, points and posterior of the last fit. Another kernel,
        likelihood, number of points or of columns, or set of classes begins anew.
    early_stopping : bool or "auto", default="auto"
        Whether observations are held out to say when a joint search stops, which could overfit; q
        then learns from all observations. "auto" does from 100 observations and more than two an
        inducing point on; with fewer the hyper-parameters stay those of the evidence.
    validation_fraction : float, default=0.1
        Of the observations to hold out, at most 4000.

    Attributes
    ----------
    inducing_points_ : ndarray of shape (M, d)
    n_inducing_ : int
    beta_ : float
    beta_path_ : dict of float to float
        Of ``beta="auto"``: the loss of the held-out data for each beta tried.
    elbo_ : float
        ELBO of the posterior found, likewise. ``partial_fit`` leaves both those of the first call.
    validation_loss_ : float or None
        Mean loss of the held-out data; None without any.
    n_iter_ : int
        Of the longest part of the fit, at most `max_iter`.
    history_ : dict of lists
        "start" and "solve": objective an observation, of the ELBO and of the objective;
        "validation": losses of the held-out data.
    """

    objective: str
    beta: float | Auto
    n_inducing: int | Auto
    inducing: str
    init: str
    hyperparameters: str
    gradient: str
    n_gradient_samples: int
    max_iter: int
    tol: float
    learning_rate: float | None
    batch_size: int | None
    early_stopping: bool | Auto
    validation_fraction: float
    _n_rows: int  # seen so far, equal ones of a call merged
    _total: float  # number of these observations, those of weight w counted w times
    #: Of the inputs that the posterior sees; None of those as given.
    _units: InputUnits | None = None

    _parameter_constraints = {
        "beta": [Interval(Real, 0, None, closed="left"), StrOptions({"auto"})],
        "n_inducing": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "inducing": [StrOptions({"learned", "fixed"})],
        "init": [StrOptions(set(INITIALISERS))],
        "hyperparameters": [StrOptions({"joint", "fixed"})],
        "gradient": [StrOptions({"auto", "exact", "quadrature", *STOCHASTIC_GRADIENTS})],
        "n_gradient_samples": [Interval(Integral, 1, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither"), None],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "warm_start": ["boolean"],
        "early_stopping": ["boolean", StrOptions({"auto"})],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
    }

    _n_stages = 1
    _option_rules: tuple[Option, ...] = (
        options("beta", objective=("log_loss", "square_loss", "elbo")),
        options("gradient", objective=("log_loss",)),
        options("n_gradient_samples", gradient=STOCHASTIC_GRADIENTS),
        options("early_stopping", hyperparameters=("joint",)),
        options("validation_fraction", early_stopping=(True, "auto"), beta=("auto",)),
    )

    def _objective(
        self, likelihood: Likelihood, *, name: str | None = None, learn: bool = True
    ) -> Objective:
        """What to minimise, as the parameters say; `learn` allows hyper-parameters to move."""
        learn = learn and self._learns
        return Objective(
            likelihood=likelihood,
            name=name or self.objective,
            beta=1.0 if self.beta == "auto" else float(self.beta),
            gradient=self.gradient if self.gradient in STOCHASTIC_GRADIENTS else "exact",
            n_gradient_samples=self.n_gradient_samples,
            learn_kernel=learn,
            learn_likelihood=learn,
            learn_inducing=learn and self.inducing == "learned",
        )

    def _is_exact(self, data: Data, objective: Objective) -> bool:
        """Whether the fit is that of a dense process."""
        exact = self.n_inducing == "auto" and self.beta != "auto" and is_conjugate(objective)
        return exact and len(distinct_rows(data.X.cpu().numpy())) <= defaults.EXACT_ROWS

    def _settings(
        self, data: Data, objective: Objective, kernels: list[Kernel], n_inducing: int
    ) -> Settings:
        """How to search with `n_inducing` points, as the parameters say."""
        n_rows = len(data)
        few = n_rows <= defaults.FEW_PER_INDUCING * n_inducing
        enough = n_rows >= FEW_ROWS and not few
        # Fewer points than rows leave variance that counts as noise; labels have none to learn.
        exact = n_rows <= n_inducing or not objective.is_gaussian
        known = exact and (has_evidence(objective, kernels) or has_outliers(objective))
        known &= n_rows <= defaults.DENSE_ROWS
        rescales = known and self._rescales(data)
        dense = known and (few or rescales)
        # Without rows to hold out, a joint search would have nothing to stop it.
        joint = self.hyperparameters == "joint" and (enough or self.early_stopping != "auto")
        default_prior = self.kernel is None and not getattr(self, "_counts", False)
        many = self.n_inducing == "auto" and n_rows > defaults.EXACT_ROWS
        few_falls = defaults.TOL_ROWS * self._class_balance(data) / n_rows if dense else 1.0
        return Settings(
            # A joint search goes on where the start stops.
            start_iter=max(1, 3 * self.max_iter // 10) if joint else max(1, self.max_iter // 2),
            max_iter=self.max_iter,
            tol=self.tol * max(1.0, few_falls),
            early_stopping=enough if self.early_stopping == "auto" else self.early_stopping,
            validation_fraction=self.validation_fraction,
            joint=joint,
            few=few,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            dense_start=dense,
            ratio_std=defaults.RATIO_STD if default_prior else None,
            rescales=rescales,
            sizes=defaults.AUTO_SIZES if many else (),
        )

    def _class_balance(self, data: Data) -> float:
        """1; of labels, the share of the rarest class relative to that of equal classes."""
        return 1.0

    def _rescales(self, data: Data) -> bool:
        """Whether scales of the kernel follow labels left out."""
        return False

    def _in_units(self, data: Data) -> tuple[InputUnits | None, Data]:
        """The observations in units that suit default kernels; a kernel given has its own."""
        if self.kernel is not None:
            return None, data
        units = InputUnits.of(data, self._kernels(data))
        return units, units.data(data)

    def _inputs(self, X: Any) -> Any:
        return X if self._units is None else self._units.inputs(X)

    def _fit_sparse(
        self,
        kernels: list[Kernel],
        data: Data,
        objective: Objective,
        offset: np.ndarray,
        units: InputUnits | None,  # of the data; None of those as given
        backend: Backend,
        callback: Callable[[int, dict], bool],
        *,
        exact: bool = False,
    ) -> SparseFit:
        """Run the fit and keep what both estimators keep of it."""
        most = len(data) if exact else min(defaults.AUTO_INDUCING, len(data))
        size: int = most if self.n_inducing == "auto" else self.n_inducing
        require_room(objective, len(data), min(size, len(data)), len(offset))

        def inducing(kernel: Kernel, n_points: int = size) -> torch.Tensor:
            rng = np.random.RandomState(backend.seed)
            points = inducing_points(data, n_points, kernel, init=self.init, random_state=rng)
            return backend.tensor(points)

        if exact:
            settings = Settings(max_iter=self.max_iter, joint=False, exact=True)
        else:
            settings = self._settings(data, objective, kernels, size)
        if size >= len(data):  # points at all inputs are as good as can be
            objective = replace(objective, learn_inducing=False)
        problem = Problem(
            kernels,
            data,
            objective,
            settings,
            inducing,
            backend.tensor(offset),
            backend.generator(),
            StopRecorder(callback),
            self._warm_state(len(data), units, backend),
        )
        if self.beta == "auto" and self.objective != "fitc" and len(data) > 1:
            fit, self.beta_path_ = fit_beta_path(problem)
        else:
            fit, self.beta_path_ = fit_sparse(problem), {}
        self._keep(fit, units)
        self._n_rows, self._total = len(data), data.total
        if self.n_inducing != "auto" and self.n_inducing_ < self.n_inducing:
            warn_of_few_rows(self.n_inducing, len(distinct_rows(arrays(data)[0])))
        return fit

    def _state(self, backend: Backend) -> SparseState:
        """The fitted model, for training on."""
        fitted = self._posterior
        dense = fitted.noise is not None
        q = sparse_posterior(fitted) if dense else (fitted.whitened_mean, fitted.root)
        tensors = fitted.Z, *q, fitted.offset
        return SparseState(
            fitted.kernel,
            backend.tensor(self._likelihood_parameters),
            *(tensor.to(backend.device, backend.dtype) for tensor in tensors),
        )

    def _warm_state(
        self, n_rows: int, units: InputUnits | None, backend: Backend
    ) -> SparseState | None:
        """Where the last fit ended, if this one goes on from there with as many points."""
        if not (self._goes_on and self._asked_inducing == self.n_inducing):
            return None
        state = self._state(backend)
        if units is not None and self._units is not None:
            state = units.state(state, self._units)
        # Points of an exact fit are too many for a sparse one.
        sparse = self.n_inducing == "auto" and n_rows > defaults.EXACT_ROWS
        return None if sparse and len(state.Z) > max(defaults.AUTO_SIZES) else state

    def _keep(self, fit: SparseFit, units: InputUnits | None) -> None:
        """Copy what was learned to attributes."""
        self._posterior, self._units = fit.posterior(), units
        self._likelihood_parameters = fit.state.likelihood.cpu().double().numpy()
        self._asked_inducing = self.n_inducing
        self._minimised = fit.objective.name
        self.beta_ = fit.objective.beta
        self._keep_points()
        self.loss_ = fit.loss
        self.elbo_ = fit.elbo
        self.validation_loss_ = fit.held_out_loss
        self.n_iter_ = fit.n_iter
        self.history_ = fit.history

    def _add_rows(self, data: Data, objective: Objective, backend: Backend) -> None:
        """Change the posterior by rows beyond those of the last call."""
        data = self._distinct(replace(data, X=to_tensor(self._inputs(arrays(data)[0]))), backend)
        state = self._state(backend)
        if objective.is_gaussian and self._learns and len(state.likelihood):
            state = state.with_spread(self._misfit(state, data, objective))
            self._likelihood_parameters = state.likelihood.cpu().double().numpy()
        room = self._most_inducing(objective) - len(state.Z)
        self._n_rows += len(data)
        self._total += data.total
        # As if as many rows again were to come: of 2000 rows in the order of a column, ten batches,
        # the first to come took all, and the NLPD all over was .1 to .4 nats more.
        room = math.ceil(max(room, 0) * len(data) / self._n_rows)
        state = update(
            state.with_novel(data.X, room, backend.generator()),
            data,
            replace(objective, beta=self.beta_),
            max_iter=self.max_iter,
            tol=self.tol,
        )
        self._posterior = state.posterior()
        self._keep_points()

    def _misfit(self, state: SparseState, data: Data, objective: Objective) -> float:
        """Variances of all observations over those predicted, by `data` not yet seen.

        1 if that is less: in the order of a column rows are predicted by those next to them.
        """
        mean, var = state.posterior().mean_and_variance(data.X.double())
        var = var + objective.likelihood.gaussian_noise(state.likelihood)
        squares = float(data.weighted_sum((data.y - mean).square() / var))
        return max(1.0, (self._total + squares) / (self._total + data.total))

    def _most_inducing(self, objective: Objective) -> int:
        """Inducing points up to which a stream may add some."""
        if self.n_inducing != "auto":
            return int(self.n_inducing)
        return max(defaults.AUTO_SIZES) if objective.has_closed_form else defaults.AUTO_INDUCING

    def _keep_points(self) -> None:
        Z, units = self._posterior.Z.cpu().numpy(), self._units
        self.inducing_points_ = Z if units is None else units.origin + units.unit * Z
        self.n_inducing_ = len(self.inducing_points_)

    @property
    def _found_kernel(self) -> Kernel:
        """That of the posterior, in the units of X."""
        kernel = self._posterior.kernel
        return kernel if self._units is None else self._units.kernel_of_x(kernel)

    def _bytes_per_row(self) -> int:
        M, c = self._posterior.n_inducing, self._posterior.n_latent
        return 8 * M * (6 + c)
