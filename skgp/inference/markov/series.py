r"""Observations along one axis, and how a sorted series is laid out in chunks.

Given f, all that was observed at one time enters the inference of f as one *site*,

.. math:: \prod_{i : x_i = t} p(y_i \mid f)^{w_i} \approx \exp(\beta_t f - \omega_t f^2 / 2),

so that rows may come in any order and repeat a time. For Gaussian noise the site is exact,
:math:`\beta_t = \sum_i w_i y_i / \sigma^2`, :math:`\omega_t = \sum_i w_i / \sigma^2`.

For inference a series of n points becomes C chunks of L consecutive points, which are worked on
side by side. Arrays over it are (L, C): row j holds the j-th point of every chunk, contiguous, so
that one step of a recursion serves all chunks. The last chunk is padded with points that weigh
nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import tile_rows

_ROUNDING = 2.0**-43  # mathematical: of times, relative to their span, with digits to spare


@dataclass(frozen=True)
class Series:
    """Observations in the order of their times."""

    times: Tensor  # (m,) distinct, rising, float64
    index: Tensor | None  # (n,) the time of each of y, rising; None where m = n
    y: Tensor  # (n,)
    weight: Tensor | None = None  # (n,) of the likelihood; None for 1
    breaks: Tensor | None = None  # (k,) where among the times an independent stretch begins
    log_exposure: Tensor | None = None  # (n,) of counts, for the likelihood

    @cached_property
    def gaps(self) -> Tensor:
        """Time since the one before, (m,); 0 for the first, infinite where a stretch begins."""
        gaps = self.times.diff(prepend=self.times[:1])
        if self.breaks is not None:
            gaps[self.breaks] = math.inf
        return gaps

    def gaps_of(self, dynamics: Dynamics) -> Tensor:
        """The same of some dynamics, (m,): the first is the time since their origin, if any."""
        if dynamics.origin is None:
            return self.gaps
        if self.breaks is not None:
            dynamics.require_stationary("a series in stretches")
        return dynamics.gaps(self.times)

    def lags_of(self, dynamics: Dynamics) -> "Lags | None":
        """Distances between all times, where these are few, and times since an origin, if any."""
        if len(self.times) > few_times(dynamics.n_states) or self._lags is None:
            return None
        if dynamics.origin is None:
            return self._lags
        if dynamics.origin not in self._lags_since:
            dynamics.gaps(self.times)  # ValueError before the origin
            since = self.times.numpy() - dynamics.origin
            self._lags_since[dynamics.origin] = self._lags.after(since)
        return self._lags_since[dynamics.origin]

    @cached_property
    def _lags(self) -> "Lags | None":
        return Lags.of(self.gaps)

    @cached_property
    def _lags_since(self) -> dict[float, "Lags"]:
        """The same with times since an origin, by origin."""
        return {}

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What was made of times and counts, for whoever asks again."""
        return {}

    @cached_property
    def _known_of_one(self) -> dict[Any, Any]:
        """The same of one value a time."""
        return {}

    def with_values(self, values: Tensor) -> "Series":
        """One value (m,) a time in place of the rows; distances are shared, and what is `known`."""
        other, known = Series(self.times, None, values, breaks=self.breaks), self._known_of_one
        other.__dict__.update(_lags=self._lags, _lags_since=self._lags_since, known=known)
        return other

    @cached_property
    def total(self) -> float:
        """Sum of the weights of all rows."""
        return float(len(self.y)) if self.weight is None else float(self.weight.sum())

    def at_rows(self, values: Tensor) -> Tensor:
        """Values of each row's time, (n,), given those of the times, (m,)."""
        return values if self.index is None else values[self.index]

    def sums(self, values: Tensor) -> Tensor:
        """Weighted sums at each time, (m,), of values of the rows, (n,)."""
        if self.weight is not None:
            values = values * self.weight
        if self.index is None:
            return values
        return values.new_zeros(len(self.times)).index_add_(0, self.index, values)

    @cached_property
    def counts(self) -> Tensor:
        """Sum of the weights at each time, (m,)."""
        return self.sums(torch.ones_like(self.y))

    @cached_property
    def totals(self) -> Tensor:
        """Weighted sum of y at each time, (m,)."""
        return self.sums(self.y)

    @cached_property
    def squares(self) -> float:
        """Weighted sum of y squared over all rows."""
        return float(self.sums(self.y**2).sum())

    def gaussian_sites(self, noise: float) -> tuple[Tensor, Tensor]:
        r""":math:`\beta` and :math:`\omega` (m,) of Gaussian noise of a variance."""
        return self.totals / noise, self.counts / noise

    def rows(self, rows: Tensor, breaks: Tensor | None = None) -> "Series":
        """The series of some rows (k,), rising; `breaks` are positions among them."""
        x = self.at_rows(self.times)[rows]
        columns = (None if c is None else c[rows] for c in (self.weight, self.log_exposure))
        part = _merge(x, self.y[rows], *columns)
        if breaks is not None and part.index is not None:
            # A time on both sides of a break stays one, and the stretch begins with it.
            breaks = part.index[breaks]
        return replace(part, breaks=breaks)

    def thinned(self, n_rows: int) -> "Series":
        """About `n_rows` rows, spread evenly over all."""
        step = max(1, len(self.y) // n_rows)
        return self.rows(torch.arange(0, len(self.y), step, device=self.y.device))

    def stretches(self, n_rows: int, size: int) -> "Series":
        """About `n_rows` rows in stretches of `size` consecutive ones, apart for ever."""
        n_stretches = max(1, n_rows // size)
        device = self.y.device
        starts = torch.linspace(0, len(self.y) - size, n_stretches, device=device).long()
        rows = (starts[:, None] + torch.arange(size, device=device)).reshape(-1)
        return self.rows(rows, torch.arange(size, len(rows), size, device=device))


def make_series(
    x: Tensor, y: Tensor, weight: Tensor | None = None, log_exposure: Tensor | None = None
) -> Series:
    """Sort observations by time, and find equal times. O(n log n); of copies.

    Parameters
    ----------
    x : Tensor of shape (n,)
        Finite times, in any order.
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,), optional
        Likelihood weights; 1 by default.
    log_exposure : Tensor of shape (n,), optional
        Of counts.

    Returns
    -------
    Series
        Of the m distinct times.
    """
    x = x.double()
    x, order = x.sort(stable=True)
    columns = (None if c is None else c[order] for c in (weight, log_exposure))
    return _merge(x, y[order], *columns)


def _merge(x: Tensor, y: Tensor, weight: Tensor | None, log_exposure: Tensor | None) -> Series:
    """The series of rows in the order of their times."""
    times, index = torch.unique_consecutive(x, return_inverse=True)
    places = None if len(times) == len(x) else index
    return Series(times, places, y, weight, log_exposure=log_exposure)


@dataclass(frozen=True)
class LagTable:
    """Some distances (k,), and which of them each pair of m times has."""

    lags: np.ndarray  # (k,)
    pairs: np.ndarray  # (m, m) the distance of each entry
    folded: np.ndarray | None = None  # (p,) the distance of each pair; None where it has its own
    since: np.ndarray | None = None  # (k,) time from an origin to the earlier of each pair
    known: dict = field(default_factory=dict)  # correlations (k,) at rates that are fixed
    squares: dict = field(default_factory=dict)  # the same as matrices (m, m)

    def fold(self, upper: np.ndarray) -> np.ndarray:
        """Sums (k,) over the pairs (p,) of each distance."""
        if self.folded is None:
            return upper
        return np.bincount(self.folded, upper, len(self.lags))


@dataclass(frozen=True)
class Lags:
    """Distances between the times of a short series, of p = m (m + 1) / 2 pairs.

    On a regular grid there are m distances, of which the covariance of a stationary process is a
    function; that of a process with an origin takes the distances of all pairs.
    """

    places: np.ndarray  # (p,) of the pairs in the upper triangle of an (m, m) matrix, flat
    pairs: np.ndarray  # (m, m) the pair of each entry
    tables: tuple[LagTable, ...]  # of stationary processes first, of others last

    @staticmethod
    def between(gaps: Tensor) -> "Lags":
        """Of a series (m,) in one piece."""
        times = np.cumsum(np.append(0.0, gaps.numpy()[1:]))
        row, column, places, pairs = _pairs(len(times))
        lags, apart = np.linspace(0.0, times[-1], len(times)), row - column
        if np.abs(times - lags).max() <= _ROUNDING * times[-1]:
            return Lags(places, pairs, (LagTable(lags, apart.take(pairs), apart),))
        return Lags(places, pairs, (LagTable(times[row] - times[column], pairs),))

    @staticmethod
    def of(gaps: Tensor) -> "Lags | None":
        """Of a series (m,) in main memory and of one piece."""
        whole = gaps.device.type == "cpu" and bool(gaps[1:].isfinite().all())
        return Lags.between(gaps) if whole else None

    def after(self, since: np.ndarray) -> "Lags":
        """The same with times (m,) since an origin."""
        row, column, *_ = _pairs(len(since))
        every = LagTable(since[row] - since[column], self.pairs, since=since[column])
        stationary = self.tables[0]
        return replace(self, tables=(every,) if stationary.folded is None else (stationary, every))

    def table_of(self, is_stationary: bool) -> int:
        """Which of them the covariance of a process is a function of."""
        return 0 if is_stationary else len(self.tables) - 1


def few_times(n_states: int) -> float:
    """Up to which a Cholesky factor, n^3, costs less than a sweep, n d^3."""
    return max(defaults.MAX_TIMES, min(defaults.TIMES_A_STATE * n_states**1.5, defaults.MOST_TIMES))


@lru_cache(maxsize=16)
def _pairs(m: int) -> tuple[np.ndarray, ...]:
    """Row and column of each pair of m times, (m (m + 1) / 2,), and what `Lags` holds of them."""
    row, column = np.tril_indices(m)
    pairs = np.empty((m, m), dtype=np.int64)
    pairs[row, column] = pairs[column, row] = np.arange(len(row))
    return row, column, column * m + row, pairs


class Chunks:
    """How n points, at least 1, with states of d numbers are laid out as L rows of C chunks."""

    def __init__(self, n: int, n_states: int) -> None:
        # A step has much the same price for few chunks as for many, a chunk that of its joints.
        length = min(
            max(defaults.MIN_LENGTH, int(defaults.LENGTH * n_states * n**0.5)), defaults.MAX_LENGTH
        )
        target = min(defaults.MAX_CHUNKS, max(1, n // length))
        self.n = n
        self.length = -(-n // target)
        self.count = -(-n // self.length)

    def spread(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Lay out values (n,) as (L, C); `fill` pads."""
        out = values.new_full((self.length, self.count), fill)
        full = self.n // self.length  # chunks without padding
        head, tail = values.split([full * self.length, self.n - full * self.length])
        out[:, :full] = head.view(full, self.length).t()
        out[: len(tail), full:] = tail[:, None]
        return out

    def gather(self, values: Tensor) -> Tensor:
        """Take values (L, C) back to (n,)."""
        return values.t().reshape(-1)[: self.n]

    def tiles(self, n_states: int, width: int = 0) -> Iterator[slice]:
        """Slices of chunks whose matrices, and `width` numbers a point, fit in memory together."""
        numbers = 6 * n_states**2 + 4 * n_states + 8 + width
        size = tile_rows(8 * numbers * self.length, defaults.CHUNKS_BYTES)
        for start in range(0, self.count, size):
            yield slice(start, min(start + size, self.count))


class Transitions:
    """F and Q of every step, computed once for equal gaps.

    On a regular grid one transition serves all points; few distinct gaps are looked up in a table.
    Gaps that differ by no more than the rounding of the times count as equal. `gaps` (n,) are times
    since the point before; infinite where nothing is remembered. That of the first point is not
    read, as a stationary prior may stand at any distance before it; of other dynamics it is the
    time since their origin.
    """

    def __init__(self, dynamics: Dynamics, gaps: Tensor, chunks: Chunks) -> None:
        self._dynamics = dynamics
        gaps = gaps.clone()
        if dynamics.origin is None:
            gaps[0] = gaps[1] if len(gaps) > 1 else 0.0
        distinct, which = _distinct(gaps)
        # Padding repeats the last gap, which keeps a regular grid regular.
        self.gaps = chunks.spread(gaps, float(gaps[-1]))  # (L, C)
        self._table = None if distinct is None else dynamics.transition(distinct)
        self._which = None if which is None else chunks.spread(which, int(which[-1]))
        self._tile: tuple[slice, Tensor, Tensor] | None = None

    def over(self, tile: slice) -> "Steps":
        """The transitions of a tile of chunks; the latest tile is kept."""
        if self._table is not None:
            which = None if self._which is None else self._which[:, tile]
            return Steps(*self._table, which)
        if self._tile is None or self._tile[0] != tile:
            self._tile = None  # frees the memory of the tile before
            gaps = self.gaps[:, tile]
            F, Q = self._dynamics.transition(gaps.reshape(-1))
            shape = (*F.shape[:2], *gaps.shape)
            self._tile = (tile, F.view(shape), Q.view(shape))
        return Steps(*self._tile[1:], None)


class Steps:
    """Transitions by step: F and Q, each (d, d, C), or (d, d, 1) where all chunks share one."""

    def __init__(self, F: Tensor, Q: Tensor, which: Tensor | None) -> None:
        self._F, self._Q, self._which = F, Q, which

    def __getitem__(self, j: int) -> tuple[Tensor, Tensor]:
        if self._F.ndim == 4:
            return self._F[:, :, j], self._Q[:, :, j]
        if self._which is None:
            return self._F, self._Q
        return _look_up(self._F, self._which[j]), _look_up(self._Q, self._which[j])


def _look_up(table: Tensor, which: Tensor) -> Tensor:
    return table.flatten(0, 1).index_select(1, which).unflatten(0, table.shape[:2])


def _distinct(gaps: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Distinct gaps (k,) and which one each gap is (n,); None where there are too many."""
    sample = gaps[:: max(1, len(gaps) // (4 * defaults.MAX_TABLE))]
    if len(_keys(sample, len(gaps) / len(sample)).unique()) > defaults.MAX_TABLE:
        return None, None
    keys = _keys(gaps)
    low, high = (float(v) for v in torch.aminmax(keys))
    if high - low <= 1 and high < torch.inf:
        return gaps.mean()[None], None
    values, which = keys.unique(return_inverse=True)
    if len(values) > min(defaults.MAX_TABLE, len(gaps) // 2):
        return None, None
    # Gaps that are equal, or infinite, keep their value to the last digit: remainders are averaged.
    first = gaps.new_empty(len(values)).scatter_(0, which, gaps)
    rest = torch.where(gaps.isfinite(), gaps - first[which], torch.zeros_like(gaps))
    count = torch.zeros_like(first).index_add_(0, which, torch.ones_like(gaps))
    return first + torch.zeros_like(first).index_add_(0, which, rest) / count, which


def _keys(gaps: Tensor, share: float = 1.0) -> Tensor:
    """Gaps in units of the rounding of the times, whose span is `share` times the sum of gaps.

    One time far from all others has a rounding of its own: the unit is at most a millionth of the
    median gap.
    """
    finite = gaps[gaps.isfinite()]
    info = torch.finfo(gaps.dtype)
    unit = 8 * info.eps * float(finite.sum()) * share
    some = finite[finite > 0]
    if len(some):
        unit = min(unit, 1e-6 * float(some.median()))
    return (gaps / max(unit, info.tiny)).round_()
