r"""Evidence of an additive model as a function of its components' dynamics and its likelihood.

Gaussian noise has closed forms, in bins (:mod:`.binned`) and in rows
(:mod:`.rows`). Other likelihoods get a Gaussian site a row, found by natural gradients
(:mod:`..natural`). All components take a step at once, where one in a component at a time would
have to be repeated as backfitting must.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.inference.markov.additive.state import AdditiveState, Outcome
from skgp.inference.markov.natural import Point, SiteBound, climb, likelihood_gradient
from skgp.likelihoods import Likelihood
from skgp.linalg.exceptions import NotPositiveDefiniteError

__all__ = ["Evaluation", "Objective", "Posterior", "Rows", "VariationalRows"]


class Posterior(Protocol):
    """Posterior of the components given Gaussian sites."""

    @property
    def divergence(self) -> float:
        """Of the posterior from the prior, in nats."""

    def gain(self, push: Tensor) -> float:
        """What a push of the sites' linear terms adds to their log normaliser."""

    def gradients(self) -> list[Tensor]:
        """Derivatives of the log normaliser in the parameters of each component, (q_j,)."""


@dataclass(frozen=True)
class Evaluation:
    """Evidence in nats, and what its gradients are made of.

    Attributes
    ----------
    value : float
    posterior : Posterior
        Its gradients are those of the evidence.
    likelihood_gradient : Tensor of shape (p,)
        In the parameters of the family.
    """

    value: float
    posterior: Any
    likelihood_gradient: Tensor


class Objective(Protocol):
    """Evidence of an additive model.

    Attributes
    ----------
    total : float
        Weight of all rows.
    """

    total: float

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        """Evaluate at the components' dynamics and parameters (p,) of the likelihood's family."""

    def state(self, kernels: Sequence[Any], q: Any, outcome: Outcome) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior of an evaluation."""


class Rows(Protocol):
    """Rows of an additive model, and the posterior that Gaussian sites on them give.

    Attributes
    ----------
    y : Tensor of shape (n,)
    offset : float
        Prior mean of the sum.
    log_exposure : Tensor of shape (n,) or None
        Of counts.
    """

    @property
    def y(self) -> Tensor: ...

    @property
    def log_exposure(self) -> Tensor | None: ...

    @property
    def offset(self) -> float: ...

    def prior(self, dynamics: Sequence[Any]) -> Any:
        """What all posteriors at the same dynamics share."""

    def posterior(
        self, prior: Any, linear: Tensor, curved: Tensor
    ) -> tuple[Posterior, Tensor, Tensor]:
        """Posterior given sites (n,), (n,); mean and variance of the sum in every row."""

    def weighted(self, values: Tensor) -> Tensor:
        """Values (n,) times the weights."""

    def sums(self, values: Tensor) -> Tensor:
        """Weighted sums of values (n,) at the points whose functions the posterior is of."""

    def state(self, kernels: Sequence[Any], q: Any, outcome: Outcome) -> AdditiveState:
        """What predicts."""


class VariationalRows:
    """Evidence bound of the Gaussian nearest to the posterior, for any likelihood.

    The sites of an evaluation are where the next one starts.

    Parameters
    ----------
    rows : Rows
    family : Likelihood
    max_iter : int, default=50
        Steps of an evaluation.
    tol : float, default=1e-6
        Gain of the last one, in nats a row.
    """

    def __init__(
        self, rows: Rows, family: Likelihood, *, max_iter: int = 50, tol: float = 1e-6
    ) -> None:
        self.rows, self.family = rows, family
        self.total = float(rows.weighted(torch.ones_like(rows.y)).sum())
        self._max_iter, self._tol = max_iter, tol
        self._sites: tuple[Tensor, Tensor] | None = None

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        likelihood = self.family.with_parameters(parameters)
        bound = _RowsBound(self.rows, self.rows.prior(dynamics), likelihood, self.total)
        point = climb(bound, start=self._sites, max_iter=self._max_iter, tol=self._tol).point
        self._sites = point.beta, point.weight
        rows = self.rows.y, point.mean, point.var
        slope = likelihood_gradient(self.family, parameters, rows, self.rows.weighted)
        return Evaluation(point.elbo, point.found, slope)

    def state(self, kernels: Sequence[Any], q: Any, outcome: Outcome) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior of an evaluation."""
        return self.rows.state(kernels, q, outcome)


class _RowsBound(SiteBound):
    """One site a row, at given dynamics of the components."""

    negligible = 0.1

    def __init__(self, rows: Rows, prior: Any, likelihood: Likelihood, total: float) -> None:
        self.rows, self.prior, self.likelihood = rows, prior, likelihood.at(rows.log_exposure)
        self.y, self.offset, self.total = rows.y, rows.offset, total

    def __call__(self, beta: Tensor, weight: Tensor) -> Point | None:
        try:
            q, mean, var = self.rows.posterior(self.prior, beta, weight)
        except NotPositiveDefiniteError:
            return None
        if not bool((var >= 0).all()):  # NaN counts as invalid
            return None
        return self.point((beta, weight), q, (mean, var), (q.divergence,))

    def collect(self, rows: Tensor) -> Tensor:
        return rows

    def fit(self, expected: Tensor) -> float:
        return float(self.rows.weighted(expected).sum())

    def expected_gain(self, point: Point, beta: Tensor, weight: Tensor) -> float:
        """What a full step gains through the means, to second order; nats."""
        push = beta - point.beta - (weight - point.weight) * (point.mean - self.offset)
        return point.found.gain(self.rows.sums(push))
