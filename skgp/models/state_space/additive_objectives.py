r"""Evidence of an additive model as a function of its components' dynamics and its likelihood.

Gaussian noise needs the sufficient statistics only, whatever the number of rows, and its evidence
is a closed form. Other likelihoods get a Gaussian site a row: with N(m_i, v_i) the posterior of
the sum :math:`\eta_i` of the components in a row, and :math:`g_i`, :math:`h_i` the expected first
and second derivative of its log-density,

.. math:: \omega_i = -h_i, \qquad \beta_i = g_i + \omega_i m_i

is the natural gradient's target. Tabulated over pairs of bins the sites give all components at
once, where a step in one component at a time would have to be repeated as backfitting must. Steps
are halved when the bound falls. Outliers are met as in :mod:`.sites`, by the reweighted least
squares of EM until the bound has nearly settled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.likelihoods import Likelihood
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.models.dlm.families import Family
from skgp.models.state_space.additive_inference import AdditivePosterior, Tables
from skgp.models.state_space.additive_tables import (
    AdditiveStatistics,
    add_cross_tables,
    bin_sums,
    rows_of,
)
from skgp.models.state_space.binning import Bins
from skgp.models.state_space.sites import _expectations
from skgp.training.loop import NonFiniteLossError

__all__ = ["Evaluation", "GaussianRows", "Objective", "Rows", "VariationalRows"]

_SETTLED = 1e-2  # nats a row, gained by a step, at which caution is given up
_SHORTEST = 2.0**-20
_ROUNDING = 1e-12  # of the bound's terms, which cancel
_NEGLIGIBLE = 0.1  # of the tolerance: expected gain that is not worth a step


@dataclass(frozen=True)
class Evaluation:
    """Evidence in nats, and what its gradients are made of.

    Attributes
    ----------
    value : float
    posterior : AdditivePosterior
        Its gradients are those of the evidence.
    likelihood_gradient : Tensor of shape (p,)
        In the parameters of the family.
    """

    value: float
    posterior: AdditivePosterior
    likelihood_gradient: Tensor


class Objective(Protocol):
    """Evidence of an additive model.

    Attributes
    ----------
    bins : Bins
    total : float
        Weight of all rows.
    counts : Tensor of shape (M,)
        Weight of the rows in each bin.
    """

    bins: Bins
    total: float
    counts: Tensor

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        """Evaluate at the components' dynamics and parameters (p,) of the likelihood's family."""


class GaussianRows:
    """Log marginal likelihood under Gaussian noise, or its bound by the mean field.

    Parameters
    ----------
    statistics : AdditiveStatistics
    offset : float
        Prior mean of the sum.
    joint : bool
        Whether exact.
    """

    def __init__(self, statistics: AdditiveStatistics, offset: float, joint: bool) -> None:
        self.bins, self.total = statistics.bins, statistics.weight
        self.counts = statistics.cross.diagonal()
        self._cross, self._joint = statistics.cross, joint
        self._sums, self._squares = statistics.centred(offset)
        self._times = [self.bins.values[part] for part in self.bins.slices]

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        noise = float(parameters[0].exp())
        tables = Tables(self._cross, 1 / noise, self._sums / noise)
        q = AdditivePosterior(dynamics, self._times, tables, self._joint)
        constant = -0.5 * (self.total * math.log(2 * math.pi * noise) + self._squares / noise)
        residual = self._squares - float(q.mean @ (2 * self._sums - self._cross @ q.mean))
        slope = 0.5 * (residual / noise + q.spread - self.total)
        return Evaluation(q.log_normalizer + constant, q, parameters.new_tensor([slope]))


@dataclass(frozen=True)
class Rows:
    """Rows in bins.

    Attributes
    ----------
    bins : Bins
    index : Tensor of shape (c, n)
        From `Bins.index`.
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,) or None
    offset : float
        Prior mean of the sum.
    """

    bins: Bins
    index: Tensor
    y: Tensor
    weight: Tensor | None
    offset: float

    def weighted(self, values: Tensor) -> Tensor:
        """Values (n,) times the weights."""
        return values if self.weight is None else values * self.weight

    def moments(self, q: AdditivePosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of the sum in every row, (n,) each."""
        mean = rows_of(self.bins, self.index, q.mean) + self.offset
        var = rows_of(self.bins, self.index, q.var)
        if q.joint:
            covariance = q.covariance
            for (i, first), (j, second) in combinations(
                zip(self.index, self.bins.slices, strict=True), 2
            ):
                table = covariance[first, second].reshape(-1)
                cell = i.long().mul_(second.stop - second.start).add_(j)
                var += 2 * table[cell]
        return mean, var


class VariationalRows:
    """Evidence bound of the Gaussian nearest to the posterior, for any likelihood.

    The sites of an evaluation are where the next one starts.

    Parameters
    ----------
    rows : Rows
    family : Family
    joint : bool
        Whether the Gaussian is free or a product over the components.
    max_iter : int, default=50
        Steps of an evaluation.
    tol : float, default=1e-6
        Gain of the last one, in nats a row.
    """

    def __init__(
        self, rows: Rows, family: Family, joint: bool, *, max_iter: int = 50, tol: float = 1e-6
    ) -> None:
        self.rows, self.family, self.bins = rows, family, rows.bins
        self.counts = bin_sums(rows.bins, rows.index, rows.weight)
        self.total = float(self.counts[rows.bins.slices[0]].sum())
        self._joint, self._max_iter, self._tol = joint, max_iter, tol
        self._times = [self.bins.values[part] for part in self.bins.slices]
        self._sites: tuple[Tensor, Tensor] | None = None

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        likelihood = self.family.make(parameters)
        point = self._climb(dynamics, likelihood)
        self._sites = point.linear, point.curved
        return Evaluation(point.elbo, point.posterior, self._slope(point, parameters))

    def _climb(self, dynamics: Sequence[Any], likelihood: Likelihood) -> "_Point":
        """Sites where the bound is highest; the loop of `fit_sites`, over rows."""
        point, cautious = self._first(dynamics, likelihood)
        enough, step = self._tol * self.total, 1.0
        for _ in range(self._max_iter):
            cautious = cautious and bool((point.second > 0).any())
            linear, curved = self._targets(point, likelihood, cautious)
            if not cautious and self._expected_gain(point, linear, curved) <= _NEGLIGIBLE * enough:
                break
            trial = self._evaluate(
                dynamics,
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

    def _first(self, dynamics: Sequence[Any], likelihood: Likelihood) -> tuple["_Point", bool]:
        if self._sites is not None:
            point = self._evaluate(dynamics, likelihood, *self._sites)
            if point is not None:
                return point, False
        point = self._evaluate(dynamics, likelihood, *self._parabolas(likelihood))
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
        self, dynamics: Sequence[Any], likelihood: Likelihood, linear: Tensor, curved: Tensor
    ) -> "_Point | None":
        """The bound at sites (n,), (n,); None where they leave no valid posterior."""
        rows = self.rows
        size = len(rows.bins.values)
        cross = linear.new_zeros(size, size)
        add_cross_tables(cross, rows.bins, rows.index, rows.weighted(curved))
        tables = Tables(cross, 1.0, bin_sums(rows.bins, rows.index, rows.weighted(linear)))
        try:
            q = AdditivePosterior(dynamics, self._times, tables, self._joint)
        except NotPositiveDefiniteError:
            return None
        mean, var = rows.moments(q)
        if not bool((var >= 0).all()):  # NaN counts as invalid
            return None
        expected, first, second = _expectations(likelihood, rows.y, mean, var)
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
        return point.posterior.gain(bin_sums(rows.bins, rows.index, rows.weighted(push)))

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
    posterior: AdditivePosterior
    elbo: float
    rounding: float
    mean: Tensor
    var: Tensor
    first: Tensor
    second: Tensor
