r"""Rows of an additive model, and the posterior that Gaussian sites on them give.

In bins, the sites of the rows are tabulated over pairs of bins. Few rows stay in their own space:
columns of numbers have about as many bins as there are rows, c of them together c times as many,
and inference in bins is cubic in that, while the sum of the components has one value in a row. Rows
of equal inputs share it, and one site (:mod:`.series`).

Likelihoods other than Gaussian get a site a row by natural gradients (:mod:`.natural`). All
components take a step at once, where one in a component at a time would have to be repeated as
backfitting must.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.inference.markov.additive_binned import AdditivePosterior, Tables, bin_priors
from skgp.inference.markov.additive_bins import Bins, add_cross_tables, bin_sums, rows_of
from skgp.inference.markov.additive_rows import RowsPosterior, RowsPrior, condition_rows
from skgp.inference.markov.additive_states import AdditiveState, BinnedState, RowsState
from skgp.inference.markov.dense import DensePrior
from skgp.inference.markov.natural import Point, SiteBound
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import SeriesState
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError

__all__ = ["AdditiveBound", "BinnedRows", "DistinctRows", "Rows", "binned_state", "distinct_rows"]


class Rows(Protocol):
    """What `BinnedRows` and `DistinctRows` have in common; n rows in all."""

    @property
    def y(self) -> Tensor: ...  # (n,)

    @property
    def log_exposure(self) -> Tensor | None: ...  # (n,) of counts

    @property
    def offset(self) -> float: ...  # prior mean of the sum

    def prior(self, dynamics: Sequence[Any]) -> Any:
        """What all posteriors at the same dynamics share."""

    def posterior(self, prior: Any, linear: Tensor, curved: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Posterior given sites (n,), (n,); mean and variance of the sum in every row."""

    def weighted(self, values: Tensor) -> Tensor:
        """Values (n,) times the weights."""

    def sums(self, values: Tensor) -> Tensor:
        """Weighted sums of values (n,) at the points whose functions the posterior is of."""

    def state(self, kernels: Sequence[Any], q: Any) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior found."""


@dataclass(frozen=True)
class BinnedRows:
    """Rows in bins."""

    bins: Bins
    index: Tensor  # (c, n), from `Bins.index`
    y: Tensor  # (n,)
    weight: Tensor | None  # (n,)
    offset: float  # prior mean of the sum
    joint: bool  # whether the Gaussian is free or a product over the components
    log_exposure: Tensor | None = None  # (n,) of counts

    @cached_property
    def counts(self) -> Tensor:
        """Weight of the rows in each bin, (M,)."""
        return bin_sums(self.bins, self.index, self.weight)

    def prior(self, dynamics: Sequence[Any]) -> list[DensePrior]:
        return bin_priors(dynamics, self.bins.columns)

    def weighted(self, values: Tensor) -> Tensor:
        return values if self.weight is None else values * self.weight

    def sums(self, values: Tensor) -> Tensor:
        return bin_sums(self.bins, self.index, self.weighted(values))  # (M,)

    def posterior(
        self, prior: list[DensePrior], linear: Tensor, curved: Tensor
    ) -> tuple[AdditivePosterior, Tensor, Tensor]:
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

    def state(self, kernels: Sequence[Any], q: AdditivePosterior) -> BinnedState:
        return binned_state(kernels, q, self.bins, self.counts, self.offset)


def binned_state(
    kernels: Sequence[Any], q: AdditivePosterior, bins: Bins, counts: Tensor, offset: float
) -> BinnedState:
    """The components about their means over the rows, which go to the offset; counts (M,)."""
    shares, series = counts / counts[bins.slices[0]].sum(), []
    for kernel, part in zip(kernels, bins.slices, strict=True):
        centre = float(shares[part] @ q.mean[part])
        series.append(SeriesState(kernel, bins.values[part], q.beta[part], q.weight[part], -centre))
        offset += centre
    return BinnedState(tuple(series), offset, shares, q.coupling if q.joint else None)


@dataclass(frozen=True)
class DistinctRows:
    """Rows and their distinct inputs."""

    x: Tensor  # (c, m): distinct rows, as columns
    series: Series  # of the n rows; its times number the distinct ones
    offset: float  # prior mean of the sum

    @property
    def y(self) -> Tensor:
        return self.series.y

    @property
    def log_exposure(self) -> Tensor | None:
        return self.series.log_exposure

    def prior(self, dynamics: Sequence[Any]) -> RowsPrior:
        return RowsPrior(dynamics, self.x)

    def weighted(self, values: Tensor) -> Tensor:
        return values if self.series.weight is None else values * self.series.weight

    def sums(self, values: Tensor) -> Tensor:
        return self.series.sums(values)  # (m,)

    def posterior(
        self, prior: RowsPrior, linear: Tensor, curved: Tensor
    ) -> tuple[RowsPosterior, Tensor, Tensor]:
        q = condition_rows(prior, self.sums(linear), self.sums(curved))
        return q, self.series.at_rows(q.mean) + self.offset, self.series.at_rows(q.var)

    def state(self, kernels: Sequence[Any], q: RowsPosterior) -> RowsState:
        shares = self.series.counts / self.series.total
        offset = self.offset + float(q.prior.levels(shares).sum(0) @ q.alpha)
        X = self.x.T.contiguous()
        return RowsState(tuple(kernels), X, q.beta, q.weight, shares, offset)


def distinct_rows(
    X: Tensor, y: Tensor, weight: Tensor | None, offset: float, log_exposure: Tensor | None = None
) -> DistinctRows:
    """Find the distinct rows of X (n, c). O(n c log n)."""
    distinct, which = torch.unique(X, dim=0, return_inverse=True)
    series = make_series(which, y, weight, log_exposure)
    return DistinctRows(distinct.T.contiguous(), series, offset)


class AdditiveBound(SiteBound):
    """The ELBO with one site a row, at given dynamics of the components."""

    negligible = 0.1

    def __init__(
        self, rows: Rows, dynamics: Sequence[Any], likelihood: Likelihood, total: float
    ) -> None:
        self.rows, self.prior = rows, rows.prior(dynamics)
        self.likelihood = likelihood.at(rows.log_exposure)
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
