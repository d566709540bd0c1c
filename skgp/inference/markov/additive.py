"""Rows of an additive model, and the posterior that Gaussian sites on them give.

In bins (:mod:`.additive_bins`), the sites of the rows are tabulated over pairs of bins. Few rows
stay in their own space (:mod:`.additive_sites`): columns of numbers have about as many bins as
there are rows, c of them together c times as many, and inference in bins is cubic in that, while
the sum of the components has one value in a row. Rows of equal inputs share it, and one site.

Likelihoods other than Gaussian get a site a row by natural gradients (:mod:`.sites`). All
components take a step at once, where one in a component at a time would have to be repeated as
backfitting must.

What predicts is in :mod:`.additive_states`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.additive_bins import (
    AdditivePosterior,
    Bins,
    Tables,
    add_cross_tables,
    bin_priors,
    bin_sums,
    rows_of,
)
from skgp.inference.markov.additive_sites import RowsPosterior, RowsPrior, condition_rows
from skgp.inference.markov.additive_states import (
    AdditiveState,
    BinnedState,
    RowsState,
    binned_state,
)
from skgp.inference.markov.short import Prior
from skgp.inference.markov.sites import SiteBound, SiteFit
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError


@dataclass(frozen=True, kw_only=True)
class Rows(ABC):
    """n rows of an additive model, of which sites (n,), (n,) give a posterior."""

    y: Tensor  # (n,)
    weight: Tensor | None  # (n,)
    offset: float  # prior mean of the sum
    log_exposure: Tensor | None = None  # (n,) of counts

    @cached_property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weighted(torch.ones_like(self.y)).sum())

    def weighted(self, values: Tensor) -> Tensor:
        """Values (n,) times the weights."""
        return values if self.weight is None else values * self.weight

    @abstractmethod
    def sums(self, values: Tensor) -> Tensor:
        """Weighted sums of values (n,) at the points whose functions the posterior is of."""

    @abstractmethod
    def prior(self, dynamics: Sequence[Any]) -> Any:
        """What all posteriors at the same dynamics share."""

    @abstractmethod
    def posterior(self, prior: Any, linear: Tensor, curved: Tensor) -> Any:
        """Posterior given sites (n,), (n,)."""

    @abstractmethod
    def moments(self, q: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of the sum in every row, (n,) each."""

    @abstractmethod
    def state(self, kernels: Sequence[Any], q: Any) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior found."""


@dataclass(frozen=True, kw_only=True)
class BinnedRows(Rows):
    """Rows in bins."""

    bins: Bins
    index: Tensor  # (c, n), from `Bins.index`
    joint: bool  # whether the Gaussian is free or a product over the components

    def sums(self, values: Tensor) -> Tensor:
        """Of each bin, (M,)."""
        return bin_sums(self.bins, self.index, self.weighted(values))

    def prior(self, dynamics: Sequence[Any]) -> list[Prior]:
        """Covariances at the bins of each column."""
        return bin_priors(dynamics, self.bins.columns)

    def posterior(self, prior: list[Prior], linear: Tensor, curved: Tensor) -> AdditivePosterior:
        """From the cross tables of the sites; O(n c^2) and O(M^3)."""
        size = len(self.bins.values)
        cross = linear.new_zeros(size, size)
        add_cross_tables(cross, self.bins, self.index, self.weighted(curved))
        return AdditivePosterior(prior, Tables(cross, 1.0, self.sums(linear)), self.joint)

    def moments(self, q: AdditivePosterior) -> tuple[Tensor, Tensor]:
        """O(n c), or O(n c^2) of the exact posterior."""
        mean = rows_of(self.bins, self.index, q.mean) + self.offset
        var = rows_of(self.bins, self.index, q.var)
        if q.joint:
            covariance = q.covariance
            columns = zip(self.index, self.bins.slices, strict=True)
            for (i, first), (j, second) in combinations(columns, 2):
                cell = i.long().mul_(second.stop - second.start).add_(j)
                var += 2 * covariance[first, second].reshape(-1)[cell]
        return mean, var

    def state(self, kernels: Sequence[Any], q: AdditivePosterior) -> BinnedState:
        """See `binned_state`."""
        counts = bin_sums(self.bins, self.index, self.weight)
        return binned_state(kernels, q, self.bins, counts, self.offset)


@dataclass(frozen=True, kw_only=True)
class DistinctRows(Rows):
    """Rows in the space of their m distinct inputs."""

    x: Tensor  # (c, m): distinct rows, as columns
    index: Tensor  # (n,) the distinct row of each

    @staticmethod
    def of(X: Tensor, **rows: Any) -> "DistinctRows":
        """Find the distinct rows of X (n, c). O(n c log n)."""
        distinct, index = torch.unique(X, dim=0, return_inverse=True)
        return DistinctRows(x=distinct.T.contiguous(), index=index, **rows)

    def sums(self, values: Tensor) -> Tensor:
        """Of each distinct row, (m,)."""
        zeros = values.new_zeros(self.x.shape[1])
        return zeros.index_add_(0, self.index, self.weighted(values))

    def prior(self, dynamics: Sequence[Any]) -> RowsPrior:
        """Covariance of the sum at the distinct rows."""
        return RowsPrior(dynamics, self.x)

    def posterior(self, prior: RowsPrior, linear: Tensor, curved: Tensor) -> RowsPosterior:
        """From one site a distinct row; O(m^3)."""
        return condition_rows(prior, self.sums(linear), self.sums(curved))

    def moments(self, q: RowsPosterior) -> tuple[Tensor, Tensor]:
        """Those of the distinct rows."""
        return q.mean[self.index] + self.offset, q.var[self.index]

    def state(self, kernels: Sequence[Any], q: RowsPosterior) -> RowsState:
        """The components about their means over the rows, which go to the offset."""
        shares = self.sums(torch.ones_like(self.y)) / self.total
        offset = self.offset + float(q.prior.levels(shares).sum(0) @ q.alpha)
        X = self.x.T.contiguous()
        return RowsState(tuple(kernels), X, q.beta, q.weight, shares, offset)


class AdditiveBound(SiteBound):
    """The ELBO with one site a row, at given dynamics of the components."""

    negligible = 0.1

    def __init__(self, rows: Rows, dynamics: Sequence[Any], likelihood: Likelihood) -> None:
        self.rows, self.prior = rows, rows.prior(dynamics)
        self.likelihood = likelihood.at(rows.log_exposure)
        self.y, self.offset, self.total = rows.y, rows.offset, rows.total

    def __call__(self, beta: Tensor, weight: Tensor) -> SiteFit | None:
        """Evaluate the bound; None where the sites leave no valid posterior."""
        try:
            q = self.rows.posterior(self.prior, beta, weight)
            mean, var = self.rows.moments(q)
        except NotPositiveDefiniteError:
            return None
        if not bool((var >= 0).all()):  # NaN counts as invalid
            return None
        return self.point((beta, weight), q, (mean, var), q.divergence)

    def collect(self, rows: Tensor) -> Tensor:
        """Each row has a site of its own."""
        return rows

    def fit(self, expected: Tensor) -> float:
        """Weighted sum of the rows' expected log-densities (n,)."""
        return float(self.rows.weighted(expected).sum())

    def moments(self, point: SiteFit) -> tuple[Tensor, Tensor]:
        """In each row."""
        return point.mean - self.offset, point.var

    def whitened(self, point: SiteFit, changes: Tensor) -> Tensor:
        """A row counts as often as it weighs."""
        of_one = super().whitened(point, changes).unflatten(1, (2, -1))  # (k, 2, n)
        root = self.rows.weighted(torch.ones_like(self.y)).sqrt()
        return (of_one * root).flatten(1)

    def expected_gain(self, point: SiteFit, beta: Tensor, weight: Tensor) -> float:
        """What a full step gains through the means, to second order; nats."""
        push = beta - point.beta - (weight - point.weight) * (point.mean - self.offset)
        return point.posterior.gain(self.rows.sums(push))
