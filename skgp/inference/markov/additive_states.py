r"""Posteriors of additive models: predictions of f, of its components, and draws.

A level may move from one component to another without changing the sum. Components are therefore
reported about their own mean over the training rows, with the bins' shares :math:`p_j` of the
rows' weight,

.. math:: \bar f_j(x) = f_j(x) - p_j^\top f_j, \qquad
          \operatorname{var} \bar f_j(x) = v_j(x) - 2 \operatorname{cov}(f_j(x), p_j^\top f_j)
          + \operatorname{var}(p_j^\top f_j),

and the offset takes the means up, so that offset and components sum to the prediction.

In bins, with the covariance :math:`S_j(x, \cdot)` of the mean field between x and the bins, the
exact posterior's covariance of components j and k is :math:`\delta_{jk} S_j(x, x') - S_j(x, \cdot)
C_{jk} S_k(\cdot, x')`, whether x is a bin or not. In the space of the rows, with the covariances
:math:`k_j(x, \cdot)` of component j at x with the sum at the rows, the level
:math:`\ell_j = \sum_i p_i k_j(x_i, \cdot)`, and :math:`\alpha`, R of :mod:`.additive_sites`,

.. math:: E \bar f_j(x) = a^\top \alpha, \qquad
          \operatorname{var} \bar f_j(x) = k_j(0) - 2\, k_j(x, \cdot)\, p + \ell_j^\top p
          - a^\top R\, a, \qquad a = k_j(x, \cdot) - \ell_j.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, pairwise
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import BATCH_BYTES, BATCH_NUMBERS
from skgp.inference.markov.additive_bins import AdditivePosterior, Bins
from skgp.inference.markov.additive_sites import RowsPosterior, RowsPrior, condition_rows
from skgp.inference.markov.conditionals import condition
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.states import LazyState, SeriesState
from skgp.kernels.sde import Dynamics, state_space
from skgp.linalg.cholesky import semidefinite_root
from skgp.linalg.runtime import (
    TensorState,
    asks_for_gradients,
    constant_like,
    standard_normal,
    tile_rows,
)


@dataclass(frozen=True)
class PointCovariances:
    r"""Covariances of f at n times with f at the m points of a series, not worked out.

    Given the states :math:`v = (s_a, s_b)` at the points on both sides of x, f(x) is independent of
    all other states, with mean :math:`h^\top v` (:mod:`.conditionals`). With the posterior
    covariances G of the states at the points and f there, (m, d, m), therefore

    .. math:: \operatorname{Cov}(f(x), f(t_k)) = \sum_{p} h_p(x)\, G_{v_p k},

    and a quadratic form :math:`a^\top C\, a'` of such covariances with the points of two series is
    one of :math:`G\, C\, G'^\top`, of which a row takes :math:`4 d^2` entries.
    """

    h: Tensor  # (2d, n), weights of the states at the points before and after
    first: Tensor  # (n,) row of G of the first of them
    G: Tensor  # ((m + 2) d, m): zeros where there is no point before or after

    @staticmethod
    def of(dynamics: Dynamics, posterior: Posterior, x: Tensor) -> "PointCovariances":
        """At times x (n,) in any order. O(m^2 d^2) at the first call for a posterior; O(n d^3)."""
        G = posterior.state_covariances  # (m, d, m)
        d, m = G.shape[1:]
        found = condition(dynamics, posterior.times, x)
        padded = torch.nn.functional.pad(G.reshape(m * d, m), (0, 0, d, d))
        return PointCovariances(found.h, d * found.interval, padded)

    def __getitem__(self, rows: slice) -> "PointCovariances":
        """Of some of the times."""
        return PointCovariances(self.h[:, rows], self.first[rows], self.G)

    def __matmul__(self, v: Tensor) -> Tensor:
        """Products (n, k) with v (m, k)."""
        return self._weighted(self.G @ v)

    def dense(self) -> Tensor:
        """The covariances (n, m)."""
        return self._weighted(self.G)

    def _weighted(self, table: Tensor) -> Tensor:
        """Rows (n, k) of a table with the rows of G, weighted by h."""
        total = self.h.new_zeros(len(self.first), table.shape[1])
        for p, weight in enumerate(self.h):
            total.addcmul_(weight[:, None], table[self.first + p])
        return total

    def form(self, C: Tensor, other: "PointCovariances") -> Tensor:
        """``a' C b`` (n,) for the covariances a (m,) of each time and b (m',) of the `other`'s.

        With C (m, m'): O(n m m') of few times; of many O(m m' d (m + m' d) + n d^2).
        """
        (rows, m), (columns, _) = self.G.shape, other.G.shape
        if rows * columns > BATCH_NUMBERS or len(self.first) * m < rows * (m + columns):
            step, out = tile_rows(8 * 3 * (m + C.shape[1])), torch.empty_like(self.h[0])
            for some in (slice(i, i + step) for i in range(0, len(out), step)):
                out[some] = ((self[some] @ C) * other[some].dense()).sum(1)
            return out
        table = (self.G @ C @ other.G.T).reshape(-1)
        start = self.first * columns + other.first
        total = torch.zeros_like(self.h[0])
        for p, left in enumerate(self.h):
            for q, right in enumerate(other.h):
                total += left * right * table[start + (p * columns + q)]
        return total


class AdditiveState(TensorState, ABC):
    """Posterior of a sum of functions of one column each, c in all."""

    offset: float  # what the components leave: their sum is about 0 over the training rows

    @property
    @abstractmethod
    def kernels(self) -> list[Any]:
        """Of each component."""

    @abstractmethod
    def mean(self, X: Tensor) -> Tensor:
        """Mean (n,) of the sum at X (n, c), as `moments`, and quicker."""

    @abstractmethod
    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (n,) of the sum at X (n, c): between those seen and beyond them too."""

    @abstractmethod
    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, c) of the components, each about its mean over the training rows.

        The means and the offset sum to those of `moments`.
        """

    @abstractmethod
    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of the sum."""

    def samples(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of the sum, (n, n_samples). O(n^3)."""
        mean, covariance = self.covariance(X)
        noise = standard_normal((len(X), n_samples), generator, X.dtype)
        return mean[:, None] + semidefinite_root(covariance) @ noise


@dataclass(frozen=True)
class BinnedState(AdditiveState):
    """The posterior in bins: 4 M numbers, and M^2 where it is exact."""

    series: tuple[SeriesState, ...]  # each component under the mean field, centred by its offset
    offset: float
    shares: Tensor  # (M,) of the training rows' weight in each bin
    coupling: Tensor | None  # (M, M), C of the exact posterior; None for the mean field

    @property
    def kernels(self) -> list[Any]:
        """Of each component."""
        return [each.kernel for each in self.series]

    def mean(self, X: Tensor) -> Tensor:
        """O(n c)."""
        return self._marginals(X)[0].sum(1) + self.offset

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """O(n c), or O(n c^2 + M^3) where the posterior is exact."""
        if self.coupling is not None and asks_for_gradients(X):
            raise ValueError(
                "Gradients in X are not there for several columns in bins and their joint "
                'posterior. Set posterior="mean_field", or fit fewer rows, which need no bins.'
            )
        means, variances = self._marginals(X)
        mean, var = means.sum(1) + self.offset, variances.sum(1)
        if self.coupling is not None:
            # Weights of states on both sides in every column, and a few numbers.
            row_bytes = 8 * sum(2 * each.form.n_states + 6 for each in self.series)
            batches = X.split(tile_rows(row_bytes, BATCH_BYTES))
            batches = [self._shared_var(rows, self.coupling) for rows in batches]
            var = var - torch.cat(batches)
        return mean, var.clamp_(min=0)

    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """As `moments`."""
        means, variances = self._marginals(X)
        for j, (level, part) in enumerate(zip(self._levels, self._parts, strict=True)):
            x = X[:, j].contiguous()
            shared, _ = level.moments(x)  # covariance with the mean over the rows
            own, _ = level.moments(level.times)
            variances[:, j] += self.shares[part] @ own - 2 * shared
            if self.coupling is not None:
                to_bins, C = self._to_bins(j, x), self.coupling[part, part]
                push = C @ own
                about = to_bins.form(C, to_bins) - 2 * (to_bins @ push[:, None])[:, 0]
                variances[:, j] -= about + own @ push
        return means, variances.clamp_(min=0)

    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """O(n^2 c), and O(n M (n + M)) more where the posterior is exact."""
        total = X.new_zeros(len(X), len(X))
        distinct = _distinct_of_columns(X)
        for each, (values, place) in zip(self.series, distinct, strict=True):
            total += each.covariance(values)[1][place][:, place]
        if self.coupling is not None:
            to_bins = [self._to_bins(j, x).dense() for j, x in enumerate(X.T.contiguous())]
            A = torch.cat(to_bins, 1)
            total -= A @ self.coupling @ A.T
        return self.moments(X)[0], total

    def samples(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """O(n n_samples c), or O(n^3) where the posterior is exact."""
        if self.coupling is not None:
            return super().samples(X, n_samples, generator)
        total = X.new_full((len(X), n_samples), self.offset)
        for each, (values, place) in zip(self.series, _distinct_of_columns(X), strict=True):
            total += each.samples(values, n_samples, generator)[place]
        return total

    @property
    def _parts(self) -> list[slice]:
        ends = accumulate((len(each.times) for each in self.series), initial=0)
        return [slice(*pair) for pair in pairwise(ends)]

    @property
    def _levels(self) -> list[SeriesState]:
        """Series whose mean at x is the covariance of f_j(x) with p_j'f_j."""
        return [
            SeriesState(each.kernel, each.times, self.shares[part], each.weight)
            for each, part in zip(self.series, self._parts, strict=True)
        ]

    def _marginals(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each component under the mean field, (n, c) each."""
        columns = X.T.contiguous()
        found = [each.moments(x) for each, x in zip(self.series, columns, strict=True)]
        means, variances = zip(*found, strict=True)
        return torch.stack(means, 1), torch.stack(variances, 1)

    def _to_bins(self, j: int, x: Tensor) -> PointCovariances:
        """Covariances of component j at x (n,) with its bins, under the mean field."""
        each = self.series[j]
        return PointCovariances.of(each.form.at(), each.posterior, x)

    def _shared_var(self, X: Tensor, coupling: Tensor) -> Tensor:
        """``a' C a``, (n,), for the covariances a (M,) of each row with the bins."""
        to_bins = [self._to_bins(j, x) for j, x in enumerate(X.T.contiguous())]
        total = X.new_zeros(len(X))
        for j, k in combinations_with_replacement(range(len(to_bins)), 2):
            C = coupling[self._parts[j], self._parts[k]]
            total += (1 if j == k else 2) * to_bins[j].form(C, to_bins[k])
        return total


def _distinct_of_columns(X: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Distinct values of every column, and which of them each row has."""
    return [column.unique(return_inverse=True) for column in X.T.contiguous()]


@dataclass(frozen=True)
class RowsState(LazyState, AdditiveState):
    """The exact posterior, in the space of the m distinct training rows: m (c + 3) numbers.

    What predictions need is worked out at the first of them, in O(m^3).
    """

    parts: tuple[Any, ...]  # the kernels
    X: Tensor  # (m, c)
    beta: Tensor  # (m,) sites of the sum less its prior mean
    weight: Tensor  # (m,)
    shares: Tensor  # (m,) of the training rows' weight
    offset: float

    @property
    def kernels(self) -> list[Any]:
        """Of each component."""
        return list(self.parts)

    def mean(self, X: Tensor) -> Tensor:
        """O(n m c)."""
        mean = X.new_empty(len(X))
        for rows, k in self._with_rows(X):
            mean[rows] = self._mean(k)
        return mean

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """O(n m c) for the mean, O(n m^2) for the variance."""
        q, _ = self.posterior
        prior_var = sum(q.prior.covariances.variances)
        mean, var = X.new_empty(len(X)), X.new_empty(len(X))
        for rows, k in self._with_rows(X):
            mean[rows] = self._mean(k)
            var[rows] = prior_var - q.reduce(k.T)
        return mean, var.clamp_(min=0)

    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """O(n m^2 c)."""
        q, levels = self.posterior
        prior_var = constant_like(q.prior.covariances.variances, X)
        mean, var = torch.empty_like(X), torch.empty_like(X)
        for rows, x in self._batches(X):
            k = q.prior.covariances.each(x, q.prior.x)  # (c, b, m)
            var[rows] = prior_var + levels @ self.shares - 2 * (k @ self.shares).T
            k -= levels[:, None]
            mean[rows] = (k @ q.alpha).T
            for j, about in enumerate(k):
                var[rows, j] -= q.reduce(about.T)
        return mean, var.clamp_(min=0)

    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """O(n m (n + m))."""
        q, _ = self.posterior
        x = X.T.contiguous()
        k = q.prior.covariances.total(q.prior.x, x)
        return self.moments(X)[0], q.prior.covariances.symmetric(x) - q.reduce_all(k)

    @cached_property
    def posterior(self) -> tuple[RowsPosterior, Tensor]:
        """The posterior, and the components' levels (c, m)."""
        dynamics = [state_space(kernel).at() for kernel in self.parts]
        prior = RowsPrior(dynamics, self.X.T.contiguous())
        return condition_rows(prior, self.beta, self.weight), prior.levels(self.shares)

    def _mean(self, k: Tensor) -> Tensor:
        """Mean (b,) of rows whose covariances with the training rows are k (b, m)."""
        q, levels = self.posterior
        return (k - levels.sum(0)) @ q.alpha + self.offset

    def _with_rows(self, X: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Batches of new rows: which, and their covariances with the training rows."""
        q, _ = self.posterior
        for rows, x in self._batches(X):
            yield rows, q.prior.covariances.total(x, q.prior.x)

    def _batches(self, X: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Batches of new rows: which, and as columns."""
        size = tile_rows(8 * self.X.numel(), 8 * BATCH_NUMBERS)
        for a in range(0, len(X), size):
            rows = slice(a, min(len(X), a + size))
            yield rows, X[rows].T.contiguous()


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
