r"""Rows of an additive model in bins: what their number no longer matters to.

Gaussian noise needs the sufficient statistics only (:mod:`.tables`), and its evidence is a
closed form; the sites of the rows under other likelihoods are tabulated over pairs of bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from torch import Tensor

from skgp.inference.markov.additive.binning import Bins
from skgp.inference.markov.additive.inference import AdditivePosterior, Prior, Tables
from skgp.inference.markov.additive.state import BinnedState, Outcome
from skgp.inference.markov.additive.tables import (
    AdditiveStatistics,
    add_cross_tables,
    bin_sums,
    rows_of,
)
from skgp.inference.markov.state import SeriesState
from skgp.learning.markov.additive_objectives import Evaluation

__all__ = ["BinnedGaussian", "BinnedRows"]


class BinnedGaussian:
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
        self.total, self._offset = statistics.weight, offset
        self._bins, self._joint = statistics.bins, joint
        self._cross = statistics.cross
        self._sums, self._squares = statistics.centred(offset)

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        noise = float(parameters[0].exp())
        tables = Tables(self._cross, 1 / noise, self._sums / noise)
        q = AdditivePosterior(Prior.of_each(dynamics, self._bins.columns), tables, self._joint)
        constant = -0.5 * (self.total * math.log(2 * math.pi * noise) + self._squares / noise)
        residual = self._squares - float(q.mean @ (2 * self._sums - self._cross @ q.mean))
        slope = 0.5 * (residual / noise + q.spread - self.total)
        return Evaluation(q.log_normalizer + constant, q, parameters.new_tensor([slope]))

    def state(self, kernels: Sequence[Any], q: AdditivePosterior, outcome: Outcome) -> BinnedState:
        """What predicts, with the components' kernels and the posterior found."""
        return _state(kernels, q, outcome, self._bins, self._cross.diagonal(), self._offset)


@dataclass(frozen=True)
class BinnedRows:
    """Rows in bins, for likelihoods other than Gaussian.

    Attributes
    ----------
    bins : Bins
    index : Tensor of shape (c, n)
        From `Bins.index`.
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,) or None
    offset : float
        Prior mean of the sum.
    joint : bool
        Whether the Gaussian is free or a product over the components.
    log_exposure : Tensor of shape (n,) or None
        Of counts.
    """

    bins: Bins
    index: Tensor
    y: Tensor
    weight: Tensor | None
    offset: float
    joint: bool
    log_exposure: Tensor | None = None

    @cached_property
    def counts(self) -> Tensor:
        """Weight of the rows in each bin, (M,)."""
        return bin_sums(self.bins, self.index, self.weight)

    def prior(self, dynamics: Sequence[Any]) -> Sequence[Prior]:
        """The components at their bins."""
        return Prior.of_each(dynamics, self.bins.columns)

    def weighted(self, values: Tensor) -> Tensor:
        """Values (n,) times the weights."""
        return values if self.weight is None else values * self.weight

    def sums(self, values: Tensor) -> Tensor:
        """Weighted sums in each bin, (M,), of values (n,)."""
        return bin_sums(self.bins, self.index, self.weighted(values))

    def posterior(
        self, prior: Sequence[Prior], linear: Tensor, curved: Tensor
    ) -> tuple[AdditivePosterior, Tensor, Tensor]:
        """Posterior given sites (n,), (n,); mean and variance of the sum in every row."""
        size = len(self.bins.values)
        cross = linear.new_zeros(size, size)
        add_cross_tables(cross, self.bins, self.index, self.weighted(curved))
        tables = Tables(cross, 1.0, self.sums(linear))
        q = AdditivePosterior(prior, tables, self.joint)
        return q, *self.moments(q)

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

    def state(self, kernels: Sequence[Any], q: AdditivePosterior, outcome: Outcome) -> BinnedState:
        """What predicts, with the components' kernels and the posterior found."""
        return _state(kernels, q, outcome, self.bins, self.counts, self.offset)


def _state(
    kernels: Sequence[Any],
    q: AdditivePosterior,
    outcome: Outcome,
    bins: Bins,
    counts: Tensor,
    offset: float,
) -> BinnedState:
    """The components about their means over the rows, which go to the offset."""
    shares, series = counts / counts[bins.slices[0]].sum(), []
    for kernel, part in zip(kernels, bins.slices, strict=True):
        centre = float(shares[part] @ q.mean[part])
        series.append(SeriesState(kernel, bins.values[part], q.beta[part], q.weight[part], -centre))
        offset += centre
    coupling = q.coupling if q.joint else None
    return BinnedState(tuple(series), offset, shares, coupling, bins.spread, **vars(outcome))
