"""What `QSGPRegressor` and `QSGPClassifier` share: parameters, fitted state and warm starts."""

from __future__ import annotations

import pickle
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._parameters import Interval, StrOptions
from skgp.learning.plan import Fit, Options, Plan
from skgp.linalg.runtime import memory_budget

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
    "memory_budget": [Interval(Real, 0, None, closed="neither"), None],
}

#: Fitted attributes that not every fit sets, by the attribute of `Fit` that gives them.
OPTIONAL = {
    "log_marginal_likelihood_value_": "log_marginal_likelihood",
    "elbo_": "elbo",
    "likelihood_scale_": "likelihood_scale",
    "relevance_": "relevance",
    "n_relevance_vectors_": "relevance",
}


class QSGPState:
    """Plans, options, warm starts and fitted attributes of both QSGP estimators."""

    #: Seed and state of the last stochastic fit, where a later one may go on from it.
    _sgd_state: tuple[int, Any] | None = None

    def _plan(self) -> Plan:
        """What the parameters ask for."""
        return Plan(self.basis, self.n_basis, self.solver, self.covariance)  # type: ignore[attr-defined]

    def _shared_options(self, backend: Backend, **more: Any) -> Options:
        """Options of the solvers, those of one estimator beside the shared ones."""
        shared = (
            "n_dense_columns basis_batch_size batch_size n_support augment feature_map max_iter "
            "tol learning_rate"
        )
        return Options(
            **{name: getattr(self, name) for name in shared.split()},
            memory_budget=memory_budget(self.memory_budget, backend.device),  # type: ignore[attr-defined]
            dtype=backend.dtype,
            seed=self._previous(backend)[0],
            **more,
        )

    def _previous(self, backend: Backend) -> tuple[int, Any]:
        """Seed and state of the last stochastic fit, for a warm start; else a new seed."""
        if self._goes_on and self._sgd_state is not None:  # type: ignore[attr-defined]
            return self._sgd_state
        return backend.seed, None

    def _keep_fit(self, fit: Fit, attributes: dict[str, Any], backend: Backend) -> None:
        """Copy the fitted state to attributes; those of an earlier fit go."""
        if backend.device.type != "cpu":
            fit.posterior = pickle.loads(pickle.dumps(fit.posterior))  # brings its arrays here
        state = self._previous(backend)[0], fit.state
        keeps = self.warm_start and fit.state is not None  # type: ignore[attr-defined]
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

    def _keep_relevance(self, fit: Fit, sample_weight, n: int) -> None:
        """Number relevance vectors as the rows given to `fit`, of which n have a weight."""
        if fit.relevance is None:
            return
        weights = None if sample_weight is None else np.asarray(sample_weight)
        kept = np.arange(n)
        if weights is not None and weights.ndim:
            kept = np.flatnonzero(weights > 0)
        self.relevance_ = kept[fit.relevance.numpy()]
        self.n_relevance_vectors_ = self.n_basis_ = len(self.relevance_)


def to_tensors(device: torch.device, *arrays) -> tuple:
    """Return float64 tensors on `device`; None stays None."""
    return tuple(
        None if a is None else to_tensor(a, dtype=torch.float64, device=device) for a in arrays
    )
