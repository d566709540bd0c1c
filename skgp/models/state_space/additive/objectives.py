r"""Evidence of an additive model as a function of its components' dynamics and its likelihood.

Gaussian noise has closed forms, in bins (:mod:`.binned`) and in rows
(:mod:`.rows`). Other likelihoods get a Gaussian site a row: with N(m_i, v_i) the posterior
of the sum :math:`\eta_i` of the components in a row, and :math:`g_i`, :math:`h_i` the expected
first and second derivative of its log-density,

.. math:: \omega_i = -h_i, \qquad \beta_i = g_i + \omega_i m_i

is the natural gradient's target. All components take the step at once, where one in a component at
a time would have to be repeated as backfitting must. Steps are halved when the bound falls.
Outliers are met as in :mod:`..sites`, by the reweighted least squares of EM until the bound has
nearly settled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.likelihoods import Likelihood
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.models.families import Family
from skgp.models.state_space.additive.state import AdditiveState, Outcome
from skgp.models.state_space.inducing.fit import expectations
from skgp.training.loop import NonFiniteLossError

__all__ = ["Evaluation", "Objective", "Posterior", "Rows", "VariationalRows"]

_SETTLED = 1e-2  # nats a row, gained by a step, at which caution is given up
_SHORTEST = 2.0**-20
_ROUNDING = 1e-12  # of the bound's terms, which cancel
_NEGLIGIBLE = 0.1  # of the tolerance: expected gain that is not worth a step


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
    """

    @property
    def y(self) -> Tensor: ...

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
    family : Family
    max_iter : int, default=50
        Steps of an evaluation.
    tol : float, default=1e-6
        Gain of the last one, in nats a row.
    """

    def __init__(
        self, rows: Rows, family: Family, *, max_iter: int = 50, tol: float = 1e-6
    ) -> None:
        self.rows, self.family = rows, family
        self.total = float(rows.weighted(torch.ones_like(rows.y)).sum())
        self._max_iter, self._tol = max_iter, tol
        self._sites: tuple[Tensor, Tensor] | None = None

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        likelihood = self.family.make(parameters)
        point = self._climb(self.rows.prior(dynamics), likelihood)
        self._sites = point.linear, point.curved
        return Evaluation(point.elbo, point.posterior, self._slope(point, parameters))

    def state(self, kernels: Sequence[Any], q: Any, outcome: Outcome) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior of an evaluation."""
        return self.rows.state(kernels, q, outcome)

    def _climb(self, prior: Any, likelihood: Likelihood) -> "_Point":
        """Sites where the bound is highest; the loop of `fit_sites`, over rows."""
        point, cautious = self._first(prior, likelihood)
        enough, step = self._tol * self.total, 1.0
        for _ in range(self._max_iter):
            cautious = cautious and bool((point.second > 0).any())
            linear, curved = self._targets(point, likelihood, cautious)
            if not cautious and self._expected_gain(point, linear, curved) <= _NEGLIGIBLE * enough:
                break
            trial = self._evaluate(
                prior,
                likelihood,
                torch.lerp(point.linear, linear, step),
                torch.lerp(point.curved, curved, step),
            )
            if trial is None or trial.elbo < point.elbo - trial.rounding:
                step, cautious = (1.0, False) if cautious else (0.5 * step, False)
                if step < _SHORTEST:
                    break
                continue
            gain, point = (trial.elbo - point.elbo) / step, trial
            if gain <= enough and not cautious:
                break
            cautious = cautious and gain > max(enough, _SETTLED * self.total)
            step = min(1.0, 2 * step)
        return point

    def _first(self, prior: Any, likelihood: Likelihood) -> tuple["_Point", bool]:
        if self._sites is not None:
            point = self._evaluate(prior, likelihood, *self._sites)
            if point is not None:
                return point, False
        point = self._evaluate(prior, likelihood, *self._parabolas(likelihood))
        if point is None:
            raise NonFiniteLossError(
                "The evidence bound is not finite at the start. Check for targets or inputs of "
                "extreme size, and for a kernel with a variance or length scale that is 0 or "
                "infinite.",
                iteration=0,
                parameter=None,
            )
        return point, True

    def _parabolas(self, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        """Sites that touch each row's log-density at its mode, or at the prior mean."""
        mode = likelihood.mode(self.rows.y)
        place = torch.where(mode.isfinite(), mode, self.rows.offset)
        slope, curvature = (d.detach() for d in likelihood.derivatives(self.rows.y, place))
        return slope - curvature * (place - self.rows.offset), -curvature

    def _evaluate(
        self, prior: Any, likelihood: Likelihood, linear: Tensor, curved: Tensor
    ) -> "_Point | None":
        """The bound at sites (n,), (n,); None where they leave no valid posterior."""
        rows = self.rows
        try:
            q, mean, var = rows.posterior(prior, linear, curved)
        except NotPositiveDefiniteError:
            return None
        if not bool((var >= 0).all()):  # NaN counts as invalid
            return None
        expected, first, second = expectations(likelihood, rows.y, mean, var)
        fit, divergence = float(rows.weighted(expected).sum()), q.divergence
        if not math.isfinite(fit - divergence):
            return None
        rounding = _ROUNDING * (abs(fit) + abs(divergence))
        return _Point(linear, curved, q, fit - divergence, rounding, mean, var, first, second)

    def _targets(
        self, point: "_Point", likelihood: Likelihood, cautious: bool
    ) -> tuple[Tensor, Tensor]:
        curved = -point.second
        if cautious:
            to_mode = likelihood.mode(self.rows.y) - point.mean
            curved = torch.where(curved >= 0, curved, point.first / to_mode)
        return point.first + curved * (point.mean - self.rows.offset), curved

    def _expected_gain(self, point: "_Point", linear: Tensor, curved: Tensor) -> float:
        """What a full step gains through the means, to second order; nats."""
        rows = self.rows
        push = linear - point.linear - (curved - point.curved) * (point.mean - rows.offset)
        return point.posterior.gain(rows.sums(push))

    def _slope(self, point: "_Point", parameters: Tensor) -> Tensor:
        """Gradient of the expected log-density in the likelihood's parameters."""
        if not parameters.numel():
            return parameters
        leaf = parameters.detach().requires_grad_()
        with torch.enable_grad():
            expected = self.family.make(leaf).expected_log_prob(self.rows.y, point.mean, point.var)
            return torch.autograd.grad(self.rows.weighted(expected).sum(), leaf)[0]


@dataclass(frozen=True)
class _Point:
    """Sites (n,) of the rows that were tried, and what came of it."""

    linear: Tensor
    curved: Tensor
    posterior: Posterior
    elbo: float
    rounding: float
    mean: Tensor
    var: Tensor
    first: Tensor
    second: Tensor
