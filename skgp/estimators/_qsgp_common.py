"""What `QSGPRegressor` and `QSGPClassifier` share: parameters, fitted state and warm starts."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor

from skgp.data import Data
from skgp.estimators._base import Backend, BaseGP, arrays, to_tensor
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import Interval, StrOptions
from skgp.estimators._reduction import cluster_centres
from skgp.learning.plan import Fit, Options, Plan
from skgp.models.qsgp import Problem

CONSTRAINTS: dict[str, list[Any]] = {
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

#: Fitted attributes that not every fit sets, by the attribute of `Fit` that gives them.
OPTIONAL = {
    "log_marginal_likelihood_value_": "log_marginal_likelihood",
    "elbo_": "elbo",
    "likelihood_scale_": "likelihood_scale",
    "relevance_": "relevance",
    "n_relevance_vectors_": "relevance",
}


class QSGPMixin(BaseGP):
    """Plans, options, warm starts and fitted attributes of both QSGP estimators.

    Parameters
    ----------
    augment : bool, default=True
        Add a basis function at each test point to the inducing basis, so that variances
        return to the prior's far from the data.
    feature_map : {"orthogonal", "iid", "hadamard"}, default="orthogonal"
        How Fourier frequencies are drawn.
    """

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
        state = self._previous(backend)[0], fit.state
        keeps = self.warm_start and fit.state is not None
        self._sgd_state = state if keeps else None
        self._forget_optional()
        for name, value in attributes.items():
            setattr(self, name, value)

    def _forget_optional(self) -> None:
        for name in OPTIONAL:
            self.__dict__.pop(name, None)

    def _fit_attributes(self, fit: Fit) -> dict[str, Any]:
        """What a fit of either estimator sets, optional attributes aside."""
        values = {name: getattr(fit, OPTIONAL[name]) for name in list(OPTIONAL)[:2]}
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
        if np.ndim(weights):
            rows = np.flatnonzero(np.asarray(weights) > 0)[rows]
        self.relevance_ = rows
        self.n_relevance_vectors_ = self.n_basis_ = len(self.relevance_)


def inducing_points(problem: Problem, plan: Plan, given: Data) -> Tensor | None:
    """Return all distinct inputs, or centres of clusters, if the plan is of such."""
    if plan.basis != "inducing":
        return None
    X, weight = arrays(given)
    rng = np.random.RandomState(problem.options.seed)
    Z = cluster_centres(X, plan.size, problem.kernel, sample_weight=weight, random_state=rng)
    return to_tensor(Z, device=problem.data.X.device)
