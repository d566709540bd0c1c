r"""Columns of inputs as few values each, and the posterior of an additive model there.

A column with at most `n_bins` distinct values keeps them. Any other is cut where

.. math:: \tfrac12 \big[ P(x' \le x) + (x - x_{\min}) / (x_{\max} - x_{\min}) \big]

passes a multiple of 1 / `n_bins`: no bin then holds more than 2 / `n_bins` of the rows (unless
they share one value, which is never split) or spans more than 2 / `n_bins` of the range. Quantiles
alone would leave the thin tails to bins wider than a length scale, equal widths the dense parts.
A bin stands at the mean of its rows, so that a function f with slope f' is off by
:math:`f' (x - t)` in a row, which averages out over the bin to first order and adds
:math:`(f' \cdot` `spread` :math:`)^2` to the noise.

With the indicators :math:`Z` (n, M) of the bins of all columns side by side, the likelihood of the
bins' values :math:`f = (f_1, \dots, f_c)` under Gaussian noise depends on the rows through

.. math:: Z^\top W Z, \qquad Z^\top W y, \qquad y^\top W y

alone. They add up over batches of rows, so that a stream of them is fitted exactly in
:math:`O(M^2)` memory. Sites of the rows of weight :math:`\Omega`, which for Gaussian noise is
:math:`W / \sigma^2`, tie the components together,

.. math:: \exp\big( b^\top f - \tfrac12 f^\top N f \big), \qquad N = Z^\top \Omega Z, \qquad
          f_j \sim N(0, K_j) \text{ at the } m_j \text{ bins of column } j.

The best mean field :math:`q = \prod_j q_j` has

.. math:: S_j = (K_j^{-1} + D_j)^{-1}, \qquad m_j = S_j \beta_j, \qquad
          \beta_j = b_j - \sum_{k \ne j} N_{jk} m_k,

:math:`D_j` being the diagonal :math:`N_{jj}`: each component sees sites of weight :math:`D_j` at
what the others leave. Its means are those of the exact posterior, its covariances the inverses of
diagonal blocks of a precision, hence too small.

Natural steps of rate 1, one component after the other (backfitting), are block Gauss-Seidel on
these equations: thousands of sweeps where columns are nearly functions of each other, for a level
or a trend that moves from one component to another hardly changes the sum. With few bins they are
solved at once. Let :math:`S_j = R_j R_j^\top` and :math:`O = N - D`; then

.. math:: m = R B^{-1} R^\top b, \qquad B = I + R^\top O R = L_B L_B^\top, \qquad
          V = R B^{-1} R^\top = S - S C S, \qquad C = O - T T^\top, \quad T = O R L_B^{-\top},

V being the exact posterior covariance. The log normaliser is :math:`\tfrac12 [b^\top m -
\sum_j \log |I + K_j D_j|]` of the mean field (a lower bound) and :math:`\tfrac12 \log |B| \le 0`
less than that, hence higher, of the exact posterior. Its derivative in :math:`K_j` is half of

.. math:: \alpha_j \alpha_j^\top - (D_j - D_j S_j D_j)
          \; [+ \, U_j U_j^\top, \; U_j = (I - D_j S_j) T_j], \qquad
          \alpha_j = \beta_j - D_j m_j,

the term in brackets being that of the exact posterior.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import BIN_MATRICES, CELLS, FEWEST_BINS
from skgp.inference.markov.series import Lags
from skgp.inference.markov.short import DensePrior, DevicePrior, Prior
from skgp.linalg.cholesky import jittered_cholesky, log_det
from skgp.linalg.runtime import TensorState, constant, memory_budget


@dataclass(frozen=True)
class Bins(TensorState):
    """The M values that stand for those of each of c columns, one column after the other."""

    sizes: tuple[int, ...]  # of each column
    values: Tensor  # (M,) rising within a column
    edges: Tensor  # (M,) largest input of each bin; infinite for the last of a column
    #: (c,) root mean square distance of the rows from their bins' values, in units of the column:
    #: to be small beside the length scale. 0 where no values were merged.
    spread: Tensor

    @property
    def slices(self) -> list[slice]:
        """Where each column lies among the M values."""
        return [slice(*ends) for ends in pairwise(accumulate(self.sizes, initial=0))]

    @property
    def columns(self) -> list[Tensor]:
        """The values of each column."""
        return list(self.values.split(self.sizes))

    def index(self, X: Tensor) -> Tensor:
        """Bin of every input of X (n, c), counted within its column, (c, n).

        Values of a new row may lie between those seen, or beyond: the nearest bin has them.
        """
        if X.ndim != 2 or X.shape[1] != len(self.sizes):
            raise ValueError(
                f"X must have the {len(self.sizes)} columns that the bins were made of; got shape "
                f"{tuple(X.shape)}."
            )
        dtype = torch.int16 if max(self.sizes) <= torch.iinfo(torch.int16).max else torch.int32
        found = torch.empty(X.shape[1], len(X), dtype=dtype, device=X.device)
        for column, part in enumerate(self.slices):
            edges = self.edges[part][:-1].contiguous()
            found[column] = torch.bucketize(X[:, column].contiguous(), edges, out_int32=True)
        return found


def make_bins(
    X: Tensor, weight: Tensor | None = None, *, n_bins: int = 512, most_bins: int = 2048
) -> Bins:
    """Choose the bins of every column of X (n, c); O(c n log n).

    A weight of 2 counts as two rows. Where `most_bins`, of all columns together, is less than they
    would have, those with most bins share the loss, down to 16 a column; so they do where memory
    has no room for the matrices of so many.
    """
    if n_bins < 2:
        raise ValueError(f"n_bins must be at least 2; got {n_bins}.")
    most_bins = min(most_bins, int((memory_budget(X.device) / (8 * BIN_MATRICES)) ** 0.5))
    distinct = [_distinct(X[:, j].contiguous(), weight) for j in range(X.shape[1])]
    level = _level([len(values) for values, _ in distinct], n_bins, most_bins)
    columns = [_bin_column(*each, level) for each in distinct]
    values, edges, spread = zip(*columns, strict=True)
    sizes = tuple(map(len, values))
    return Bins(sizes, torch.cat(values), torch.cat(edges), torch.stack(spread))


def _level(sizes: list[int], n_bins: int, most_bins: int) -> int:
    """Most bins of a column with which those of all columns are at most `most_bins`."""
    levels = range(min(FEWEST_BINS, n_bins), n_bins + 1)
    excess = [sum(min(size, level) for size in sizes) > most_bins for level in levels]
    return levels[max(0, excess.index(True) - 1)] if True in excess else n_bins


def _bin_column(distinct: Tensor, mass: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values (m,), edges (m,) and spread () of a column with the weights of its values."""
    if len(distinct) <= n_bins:
        return distinct, _edges(distinct, distinct), distinct.new_zeros(())
    share = (mass.cumsum(0) - 0.5 * mass) / mass.sum()
    place = (distinct - distinct[0]) / (distinct[-1] - distinct[0])
    cut = (0.5 * n_bins * (share + place)).long().clamp(max=n_bins - 1)
    label, count = torch.unique_consecutive(cut, return_inverse=True, return_counts=True)[1:]

    def sums(each: Tensor) -> Tensor:
        return distinct.new_zeros(len(count)).index_add_(0, label, each)

    last = count.cumsum(0) - 1
    origin = distinct[last]  # differences are summed, so that far from 0 no digits are lost
    values = origin + sums(mass * (distinct - origin[label])) / sums(mass)
    spread = (mass @ (distinct - values[label]) ** 2 / mass.sum()).sqrt()
    return values, _edges(distinct[last - count + 1], distinct[last]), spread


def _distinct(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Distinct values, rising, and the weight of the rows at each."""
    if weight is None:
        values, count = torch.unique(x, return_counts=True)
        return values, count.to(x)
    values, inverse = torch.unique(x, return_inverse=True)
    return values, x.new_zeros(len(values)).index_add_(0, inverse, weight)


def _edges(first: Tensor, last: Tensor) -> Tensor:
    """Halfway between the largest value of a bin and the smallest of the next, which is beyond."""
    middle = last[:-1] + 0.5 * (first[1:] - last[:-1])
    below_next = torch.nextafter(first[1:], torch.full_like(first[1:], -torch.inf))
    return torch.cat([torch.minimum(middle, below_next), last.new_full((1,), torch.inf)])


def add_cross_tables(table: Tensor, bins: Bins, index: Tensor, weight: Tensor | None) -> None:
    r"""Add :math:`Z^\top W Z` of some rows, with bins (c, n), to a table (M, M), in place.

    :math:`O(n c^2)`, each pair of columns in one pass; of few rows one column and many others. A
    weight of None stands for 1.
    """
    parts, sizes, (c, n) = bins.slices, bins.sizes, index.shape
    table.diagonal().add_(bin_sums(bins, index, weight))
    width = max(1, CELLS // max(1, n))
    for j in range(c):
        for first in range(j + 1, c, width):
            some = slice(first, min(first + width, c))
            across = slice(parts[first].start, parts[some.stop - 1].stop)
            size = across.stop - across.start
            starts = [part.start - across.start for part in parts[some]]
            offsets = constant(starts, dtype=torch.int64, device=index.device)[:, None]
            cell = index[some] + offsets + size * index[j].long()
            each = None if weight is None else weight.expand_as(cell).reshape(-1)
            counts = torch.bincount(cell.reshape(-1), each, sizes[j] * size)
            counts = counts.reshape(sizes[j], size)
            table[parts[j], across] += counts
            table[across, parts[j]] += counts.T


def bin_sums(bins: Bins, index: Tensor, values: Tensor | None) -> Tensor:
    r"""Sums :math:`Z^\top u`, (M,), of values (n,) of the rows; None counts the rows."""
    sums = [
        torch.bincount(each.long(), values, size)
        for each, size in zip(index, bins.sizes, strict=True)
    ]
    return torch.cat(sums).double()


def rows_of(bins: Bins, index: Tensor, values: Tensor) -> Tensor:
    r"""Sums :math:`Z u` over the columns, (n,), of values (M,) of the bins."""
    total = values.new_zeros(index.shape[1])
    for each, part in zip(index, bins.slices, strict=True):
        total += values[part][each.int()]
    return total


@dataclass
class AdditiveStatistics(TensorState):
    """Sufficient statistics of an additive model with Gaussian noise; batches add to them."""

    bins: Bins  # fixed before the first row
    cross: Tensor  # (M, M) weight of the rows in each pair of bins
    sums: Tensor  # (M,) weighted sum of y less the origin in each bin
    squares: float = 0.0  # weighted sums of the squares of y less the origin, of that, and of 1
    total: float = 0.0
    weight: float = 0.0
    origin: float = 0.0  # about the mean of y, so that the squares do not cancel

    @classmethod
    def empty(cls, bins: Bins, origin: float = 0.0) -> "AdditiveStatistics":
        """Statistics of no rows."""
        size = len(bins.values)
        cross = bins.values.new_zeros(size, size)
        return cls(bins, cross, bins.values.new_zeros(size), origin=origin)

    def add(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Take in a batch of rows X (n, c), y (n,), in O(n c^2); a weight of 2 is two rows."""
        index = self.bins.index(X)
        y = y.double() - self.origin
        weighted = y if weight is None else weight * y
        add_cross_tables(self.cross, self.bins, index, weight)
        self.sums += bin_sums(self.bins, index, weighted)
        self.squares += float(weighted @ y)
        self.total += float(weighted.sum())
        self.weight += float(len(y) if weight is None else weight.sum())

    def centred(self, offset: float) -> tuple[Tensor, float]:
        """Sums (M,) and squares of y less an offset."""
        shift = offset - self.origin
        squares = self.squares - 2 * shift * self.total + shift**2 * self.weight
        return self.sums - shift * self.cross.diagonal(), squares


@dataclass(frozen=True)
class Tables:
    """Sites of the rows of an additive model, in bins."""

    cross: Tensor  # (M, M)
    scale: float  # N is this times the cross tables: one copy serves every noise variance
    linear: Tensor  # (M,), b

    @property
    def weight(self) -> Tensor:
        """D, (M,)."""
        return self.cross.diagonal() * self.scale


def bin_priors(dynamics: Sequence[Any], columns: Sequence[Tensor]) -> list[Prior]:
    """Covariances of the components at the bins (m_j,) of each column."""
    pairs = zip(dynamics, columns, strict=True)
    if any(t.device.type != "cpu" for t in columns):
        return [DevicePrior(each, t) for each, t in pairs]
    return [DensePrior(each, Lags.between(t.diff(prepend=t[:1]))) for each, t in pairs]


class AdditivePosterior:
    """Posterior at the M bins of all columns, exact (`joint`) or by the mean field.

    `beta` (M,) are the sites of each component given the others, their weights those of the tables;
    the log normaliser is a lower bound by the mean field. :math:`O(M^3)`: for M = 1800 in 8 columns
    and with the gradients, 0.3 s on one core, 0.6 s for the exact posterior. Memory 3 or 4 matrices
    of M x M.
    """

    def __init__(self, priors: Sequence[Prior], tables: Tables, joint: bool) -> None:
        self.priors, self.tables, self.joint = priors, tables, joint
        self.weight = tables.weight
        ends = torch.tensor([0] + [len(prior.covariance) for prior in priors]).cumsum(0).tolist()
        self.parts = [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self.roots, log_dets = zip(*map(self._root, self.priors, self.parts), strict=True)
        self._OR = self._others_root()
        B = torch.cat([R.T @ self._OR[p] for R, p in zip(self.roots, self.parts, strict=True)])
        B.diagonal().add_(1.0)
        self._chol = jittered_cholesky(B).factor
        u = self._apply([R.T for R in self.roots], tables.linear)
        u = torch.cholesky_solve(u[:, None], self._chol)
        # A last sweep of backfitting: the means are exactly those that the sites give.
        self.beta = tables.linear - (self._OR @ u)[:, 0]
        self.mean = self._smooth(self.beta)
        total = float(sum(log_dets)) + (float(log_det(self._chol)) if joint else 0.0)
        self.log_normalizer = 0.5 * float(tables.linear @ self.mean - total)
        self._log_det = total

    @cached_property
    def var(self) -> Tensor:
        """Variances, (M,)."""
        var = torch.cat([R.square().sum(1) for R in self.roots])
        if not self.joint:
            return var
        return var + torch.cat([(ST**2).sum(1) for ST in self._ST])

    @cached_property
    def spread(self) -> float:
        r"""Expectation :math:`E[f^\top N f]` less that of the mean alone."""
        own = self.weight @ self.var
        if not self.joint:
            return float(own)
        # tr(N V) = tr(B^-1 R'N R), R'N R = B - I + R'D R and (B^-1)_jj = I + Y_j Y_j', Y = R'T.
        root_T = (R.T @ T for R, T in zip(self.roots, self._T.split(self._sizes), strict=True))
        return float(own) - float(sum((Y**2).sum() for Y in root_T))

    @property
    def divergence(self) -> tuple[float, ...]:
        """Terms that add up to that of the posterior from the prior, in nats."""
        fit = self.mean @ (self.tables.cross @ self.mean) * self.tables.scale
        terms = self.tables.linear @ self.mean, self._log_det, -fit, -self.spread
        return tuple(0.5 * float(term) for term in terms)

    def gain(self, push: Tensor) -> float:
        r"""Half of :math:`p^\top V p`: what moving b by p (M,) adds to the log normaliser."""
        u = self._apply([R.T for R in self.roots], push)[:, None]
        return 0.5 * float(torch.linalg.solve_triangular(self._chol, u, upper=False).square().sum())

    @cached_property
    def coupling(self) -> Tensor:
        """C, (M, M), of the exact posterior."""
        others = self.tables.cross * self.tables.scale
        others.diagonal().sub_(self.weight)
        return others - self._T @ self._T.T

    @property
    def covariance(self) -> Tensor:
        """V, (M, M), exact."""
        half = torch.linalg.solve_triangular(
            self._chol, torch.block_diag(*self.roots).T, upper=False
        )
        return half.T @ half

    def gradients(self) -> list[Tensor]:
        """Derivatives of the log normaliser in the parameters of each component, (q_j,)."""
        found = []
        for j, (prior, R, part) in enumerate(zip(self.priors, self.roots, self.parts, strict=True)):
            D = self.weight[part]
            DR = D[:, None] * R
            alpha = self.beta[part] - D * self.mean[part]
            K_bar = torch.outer(alpha, alpha) + DR @ DR.T
            K_bar.diagonal().sub_(D)
            if self.joint:
                U = self._T[part] - D[:, None] * self._ST[j]
                K_bar += U @ U.T
            found.append(prior.pull(K_bar))
        return found

    @property
    def _sizes(self) -> list[int]:
        return [len(R) for R in self.roots]

    @cached_property
    def _T(self) -> Tensor:
        return torch.linalg.solve_triangular(self._chol, self._OR.T, upper=False).T

    @cached_property
    def _ST(self) -> list[Tensor]:
        """``S_j T_j``, (m_j, M) each."""
        return [R @ (R.T @ self._T[p]) for R, p in zip(self.roots, self.parts, strict=True)]

    def _root(self, prior: Prior, part: slice) -> tuple[Tensor, Tensor]:
        """R (m, m) and log|I + K D|."""
        L = jittered_cholesky(prior.covariance).factor
        inner = (L.T * self.weight[part]) @ L
        inner.diagonal().add_(1.0)
        C = jittered_cholesky(inner).factor
        # S = L (I + L'D L)^{-1} L', without a difference that would cancel.
        return torch.linalg.solve_triangular(C, L.T, upper=False).T, log_det(C)

    def _others_root(self) -> Tensor:
        """``O R``, (M, M)."""
        product = torch.empty_like(self.tables.cross)
        for R, part in zip(self.roots, self.parts, strict=True):
            product[:, part] = self.tables.cross[:, part] @ (R * self.tables.scale)
            product[part, part] -= self.weight[part, None] * R
        return product

    def _smooth(self, v: Tensor) -> Tensor:
        """``S v``."""
        return self._apply(self.roots, self._apply([R.T for R in self.roots], v))

    def _apply(self, blocks: Sequence[Tensor], v: Tensor) -> Tensor:
        return torch.cat([A @ v[p] for A, p in zip(blocks, self.parts, strict=True)])
