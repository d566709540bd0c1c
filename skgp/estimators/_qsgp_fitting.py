"""Fits of `QSGPRegressor` from parameters to plans and back, and what `QSGPClassifier` shares."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel, WhiteKernel
from torch import Tensor

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._base_regressor import StreamingGPRegressor
from skgp.estimators._fitting import Callback, FitSession
from skgp.estimators._parameters import Interval, StrOptions, warn_at_bounds
from skgp.estimators._reduction import cluster_centres
from skgp.estimators._varying_noise import VaryingNoise
from skgp.estimators._warping import WarpedInputs
from skgp.estimators.defaults import GRAPH_COPIES
from skgp.inference.weights.gram import StreamingGram
from skgp.kernels.expression import split_noise
from skgp.kernels.spectra import has_spectral_density
from skgp.learning.hyperparameters import learn_hyperparameters
from skgp.learning.plan import (
    Fit,
    Options,
    Plan,
    check_laplace,
    resolve_laplace,
    resolve_relevance,
    streaming_plan,
)
from skgp.likelihoods import Laplace
from skgp.models import qsgp
from skgp.models.qsgp import Problem

#: Fitted attributes that not every fit sets.
OPTIONAL = (
    "log_marginal_likelihood_value_ elbo_ likelihood_scale_ relevance_ n_relevance_vectors_".split()
)


class QSGPMixin(WarpedInputs):
    """Plans, options, warm starts and fitted attributes of both QSGP estimators.

    Parameters
    ----------
    augment : bool, default=True
        Add a basis function at each test point to the inducing basis, so that variances
        return to the prior's far from the data.
    feature_map : {"orthogonal", "iid", "hadamard"}, default="orthogonal"
        How Fourier frequencies are drawn.
    n_dense_columns : int, default=100
        For ``covariance="chevron"``.

    Attributes
    ----------
    n_basis_ : int
    reason_ : str
        Why these were chosen.
    relevance_ : ndarray of int
        With ``basis="relevance"``: the observations that are relevance vectors, increasing.
    n_relevance_vectors_ : int
    """

    _parameter_constraints = {
        "n_basis": [Interval(Integral, 1, None, closed="left"), None],
        "n_dense_columns": [Interval(Integral, 1, None, closed="left")],
        "basis_batch_size": [Interval(Integral, 1, None, closed="left")],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "n_support": [Interval(Integral, 0, None, closed="left")],
        "augment": ["boolean"],
        "feature_map": [StrOptions({"orthogonal", "iid", "hadamard"})],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "tol": [Interval(Real, 0, None, closed="neither"), None],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "warm_start": ["boolean"],
    }

    basis: str
    n_basis: int | None
    likelihood: str
    solver: str
    covariance: str
    augment: bool
    feature_map: str
    warm_start: bool
    basis_: str
    n_basis_: int
    _posterior: Any
    #: Seed and state of the last stochastic fit, where a later one may go on from it.
    _sgd_state: tuple[int, Any] | None = None

    def _plan(self) -> Plan:
        """What the parameters ask for."""
        return Plan(self.basis, self.n_basis, self.solver, self.covariance)

    def _shared_options(self, backend: Backend, **more: Any) -> Options:
        """Options of the solvers, those of one estimator beside the shared ones."""
        shared = (
            "n_dense_columns basis_batch_size batch_size n_support augment feature_map max_iter "
            "tol learning_rate"
        )
        return Options(
            **{name: getattr(self, name) for name in shared.split()},
            dtype=backend.dtype,
            seed=self._previous(backend)[0],
            **more,
        )

    def _previous(self, backend: Backend) -> tuple[int, Any]:
        """Seed and state of the last stochastic fit, for a warm start; else a new seed."""
        if self._goes_on and self._sgd_state is not None:
            return self._sgd_state
        return backend.seed, None

    def _keep_fit(self, fit: Fit, attributes: dict[str, Any], backend: Backend) -> None:
        """Copy the fitted state to attributes; those of an earlier fit go."""
        keeps = self.warm_start and fit.state is not None
        self._sgd_state = (self._previous(backend)[0], fit.state) if keeps else None
        self._forget_optional()
        for name, value in attributes.items():
            setattr(self, name, value)

    def _forget_optional(self) -> None:
        for name in OPTIONAL:
            self.__dict__.pop(name, None)

    def _fit_attributes(self, fit: Fit) -> dict[str, Any]:
        """What a fit of either estimator sets, optional attributes aside."""
        values = {"log_marginal_likelihood_value_": fit.log_marginal_likelihood, "elbo_": fit.elbo}
        return {
            **{name: value for name, value in values.items() if value is not None},
            "basis_": fit.plan.basis,
            "solver_": fit.plan.solver,
            "n_basis_": fit.plan.n_basis,
            "covariance_": fit.plan.covariance,
            "reason_": fit.plan.reason,
            "n_iter_": fit.n_iter,
            "_posterior": fit.posterior,
        }

    def _keep_relevance(self, fit: Fit, session: FitSession) -> None:
        """Number relevance vectors as the rows given to `fit`, not all of which have a weight."""
        if fit.relevance is None:
            return
        rows, weights = fit.relevance.cpu().numpy(), session.data["metadata"].get("sample_weight")
        if (weights := np.asarray(weights)).ndim:
            rows = np.flatnonzero(weights > 0)[rows]
        self.relevance_ = rows
        self.n_relevance_vectors_ = self.n_basis_ = len(self.relevance_)


def inducing_points(problem: Problem, plan: Plan, given: Data) -> Tensor | None:
    """Return all distinct inputs, or centres of clusters, if the plan is of such."""
    if plan.basis != "inducing":
        return None
    rng = np.random.RandomState(problem.options.seed)
    Z = cluster_centres(given, plan.size, problem.kernel, random_state=rng)
    return to_tensor(Z, device=problem.data.X.device)


class QSGPFitting(QSGPMixin, VaryingNoise, StreamingGPRegressor):
    """The hooks of the regressors' interface, by the functions of :mod:`skgp.models.qsgp`."""

    early_stopping: bool
    validation_fraction: float
    calibration_: float
    _statistics: StreamingGram

    def _streams(self) -> bool:
        """Whether there is a ``partial_fit``; the reason becomes that of an AttributeError."""
        if not self._has_gaussian_name:
            raise AttributeError(
                "partial_fit needs likelihood='gaussian', whose data have sums that suffice; got "
                f"likelihood={self.likelihood!r}."
            )
        if self.basis in ("neighbors", "relevance"):
            raise AttributeError(
                "partial_fit needs basis='fourier' or 'inducing', which later rows leave as it is; "
                f"got basis={self.basis!r}."
            )
        return True

    @property
    def _has_stream(self) -> bool:
        return hasattr(self, "_statistics")

    @property
    def _one_target(self) -> str | None:
        alone = {"relevance": "basis", "sgd": "solver", True: "heteroscedastic"}
        alone |= dict.fromkeys(("laplace", "lognormal"), "likelihood")
        asked = (f" with {k}={v!r}" for v, k in alone.items() if getattr(self, k) == v)
        return next(asked, None)

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if stream and self.solver not in ("auto", "cholesky"):
            raise ValueError(f"partial_fit needs solver='cholesky'; got solver={self.solver!r}.")
        self._asked()

    def _may_vary(self, data: Data) -> bool:
        # Between relevance vectors variances of f are too small, and of noise stand for them.
        asked = self.basis != "relevance" or self.heteroscedastic is True
        return asked and super()._may_vary(data)

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        asked, generator = self._asked(), backend.generator()
        rows = distinct = self._distinct(data, backend)
        if asked.basis == "relevance":  # which `relevance_` counts: none merged
            rows = data.to(backend.device)
        kernel, scale, rival = self._learn_kernel(session, data, distinct, rows, generator)
        if stream:
            asked = streaming_plan(asked, len(distinct), split_noise(kernel)[0])
        state = None
        if self.solver == "sgd" and asked.basis != "relevance":

            def state():  # what it has learnt so far can predict at any time
                return self._fitted_attributes(kernel, callback.info["fit"]())

        with session.stage("solve", state=state) as callback:
            given = self._problem(kernel, rows, backend, generator, callback)
            fit = self._solve(replace(given, rival=rival), asked, scale, self._previous(backend)[1])
        self.__dict__.pop("_statistics", None)
        if stream:
            basis = cast(StreamingGram, fit.statistics).basis
            self._statistics = StreamingGram(basis, dtype=backend.dtype, shift=self.y_mean_)
            self._statistics.update(*self._as_given(data, backend))
        self._keep_fit(fit, self._fitted_attributes(kernel, fit), backend)
        self._keep_relevance(fit, session)

    def _takes_blocks(self, n_columns: int) -> bool:
        if self.likelihood not in ("auto", "gaussian") or self.basis in ("neighbors", "relevance"):
            return False
        if self.solver == "sgd":
            fourier = self.kernel is None or has_spectral_density(split_noise(self.kernel)[0])
            return self.basis != "inducing" and fourier and not self.early_stopping
        return self.solver in ("auto", "cholesky")

    def _learn_blocks(self, blocks: MappedBlocks, session: FitSession, backend: Backend) -> None:
        some, given = blocks.some, blocks.blocks
        generator, asked = backend.generator(), self._asked()
        rows = self._distinct(some, backend)
        kernel, *_ = self._learn_kernel(session, some, rows, rows, generator)
        with session.stage("solve") as callback:
            problem = self._problem(kernel, rows, backend, generator, callback)
            if self.solver == "sgd":
                read = given.by_rows()  # by minibatches
                data = Data(cast(torch.Tensor, read.X), self._to_z(to_tensor(read.y)))
                fit = qsgp.fit_regression(replace(problem, data=data), asked)
            else:
                target = {"shift": self.y_mean_, "scale": self.y_scale_}
                fit = qsgp.fit_blocks(problem, asked, given, **target)
        self.__dict__.pop("_statistics", None)
        if fit.statistics is not None:
            self._statistics = fit.statistics
        self._keep_fit(fit, self._fitted_attributes(kernel, fit), backend)

    def _update(self, data: Data, backend: Backend) -> None:
        statistics = self._statistics
        statistics.update(*self._as_given(data, backend))
        if self.normalize_y:  # from sums over all rows seen, as `fit` would
            self.y_mean_ = statistics.mean
            self.y_scale_ = float(np.sqrt(statistics.variance)) or 1.0
        plan = Plan(self.basis_, self.n_basis_, self.solver_, self.covariance_, self.reason_)
        problem = self._problem(self.kernel_, data, backend, backend.generator())
        found = statistics.standardised(self.y_mean_, self.y_scale_)
        fit = qsgp.fit_statistics(problem, plan, found, refit=problem.options.refit_noise)
        self._keep_fit(fit, self._fitted_attributes(self.kernel_, fit), backend)

    def _as_given(self, data: Data, backend: Backend) -> tuple:
        """X, y in the units of the user, and weights, on the device of the fit."""
        columns = data.X, self._to_y(data.y), data.weight
        return tuple(None if c is None else c.to(backend.device) for c in columns)

    def _asked(self) -> Plan:
        """What the parameters ask for, refused at once where it cannot be had."""
        asked = self._plan()
        if self.basis == "relevance":
            return resolve_relevance(asked, self.likelihood)
        if self.likelihood == "laplace":
            check_laplace(asked)
        return asked

    def _distinct(self, data: Data, backend: Backend) -> Data:
        """Observations, those of equal inputs merged where the likelihood allows."""
        if self.solver != "sgd":
            data = data.merged(any_likelihood=not self._has_gaussian_name)
        elif data.weight is not None:
            raise ValueError(
                "sample_weight is not supported by solver='sgd'; use solver='cholesky' or "
                "'cg', or 'auto'."
            )
        return data.to(backend.device)

    @property
    def _has_heavy_tails(self) -> bool:  # type: ignore[override]
        return self.likelihood == "laplace"

    def _learn_kernel(
        self, session: FitSession, given: Data, data: Data, rows: Data, generator: torch.Generator
    ) -> tuple[Kernel, float | None, Kernel | None]:
        """Return the kernel, noise included, with learned hyper-parameters; a scale; and a rival.

        The scale is where that of Laplace noise may start, the rival the kernel of the greatest
        evidence of some observations; None where there is none.
        """
        self.history_ = {"hyperparameters": [], "solve": [], "validation": []}
        kernels = [self.kernel_] if self._goes_on else self._kernels(given)
        if not self._learns:
            return kernels[0], None, None
        with session.stage("hyperparameters") as callback:
            found, scale = learn_hyperparameters(
                kernels,
                data,
                rows,
                robust=self.likelihood == "laplace",
                relevance=self.basis == "relevance",
                generator=generator,
                callback=callback,
            )
        self.history_["hyperparameters"] = found.history
        warn_at_bounds(found.kernel, self.kernel)
        return found.kernel, scale, found.of_evidence

    def _problem(
        self,
        kernel: Kernel,
        data: Data,
        backend: Backend,
        generator: torch.Generator,
        callback: Callback | None = None,
    ) -> qsgp.Problem:
        """What the solvers start from for fixed hyper-parameters."""
        signal, noise = split_noise(kernel)
        white = cast(WhiteKernel, noise)
        options = self._shared_options(
            backend,
            early_stopping=self.early_stopping,
            validation_fraction=self.validation_fraction,
            learn_hyperparameters=self._learns,
            refit_noise=self.optimizer is not None and not white.hyperparameter_noise_level.fixed,
        )
        return qsgp.Problem(signal, data, float(white.noise_level), options, generator, callback)

    def _solve(self, problem: qsgp.Problem, asked: Plan, scale, state) -> Fit:
        """Fit the posterior for fixed hyper-parameters."""
        if asked.basis == "relevance":
            return qsgp.fit_relevance_vectors(problem, asked)
        if self._has_gaussian_name:
            return qsgp.fit_regression(problem, asked, state=state)
        plan = resolve_laplace(asked, len(problem.data), problem.kernel)
        Z = inducing_points(problem, plan, problem.data)
        return qsgp.fit_laplace(problem, plan, scale=scale, Z=Z)

    def _fitted_attributes(self, kernel, fit: Fit) -> dict[str, Any]:
        """What makes this estimator one fitted by `fit`, the standardisation of y aside."""
        signal, noise = split_noise(kernel)
        white = cast(WhiteKernel, noise)
        if fit.noise != white.noise_level or fit.kernel != signal:
            kernel = fit.kernel + WhiteKernel(fit.noise, white.noise_level_bounds)
        attributes = {
            **self._fit_attributes(fit),
            "kernel_": kernel,
            "residual_": fit.residual,
            "calibration_": fit.calibration,
            "history_": {**self.history_, "solve": fit.history, "validation": fit.validation},
            "_noise_variance": fit.calibration * fit.noise,
            "_likelihood": None,
        }
        if fit.likelihood_scale is not None:
            attributes["_likelihood"] = Laplace(fit.likelihood_scale)
            attributes["likelihood_scale_"] = fit.likelihood_scale * self.y_scale_
        return attributes

    def _moments(self, X):
        mean, variance = super()._moments(X)
        return mean, self.calibration_ * variance

    def _moment_tensors(self, rows):
        mean, variance = super()._moment_tensors(rows)
        return mean, self.calibration_ * variance

    def _graph_bytes_per_row(self):
        return max(super()._graph_bytes_per_row(), 8 * GRAPH_COPIES * self.n_basis_)

    def _latent_mean_and_covariance(self, X):
        covariance, mean = self._evaluate("covariance mean", X)
        return self._by_target(mean), self.calibration_ * covariance
