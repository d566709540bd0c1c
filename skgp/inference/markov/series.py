r"""Observations along one axis: distinct sorted times, and what was seen at each.

Given f, all that was observed at one time enters the inference of f as one *site*,

.. math:: \prod_{i : x_i = t} p(y_i \mid f)^{w_i} \approx \exp(\beta_t f - \omega_t f^2 / 2),

so that rows may come in any order and repeat a time. For Gaussian noise the site is exact,
:math:`\beta_t = \sum_i w_i y_i / \sigma^2`, :math:`\omega_t = \sum_i w_i / \sigma^2`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Series", "make_series"]


@dataclass(frozen=True)
class Series:
    """Rows in the order of their times."""

    times: Tensor  # (m,) distinct, rising, float64
    index: Tensor | None  # (n,) the time of each row, rising; None where m = n
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

    def gaussian_constant(self, noise: float) -> float:
        r"""What the sites leave out of :math:`\sum_i w_i \log N(y_i; f, \sigma^2)`, in nats."""
        return -0.5 * (self.total * math.log(2 * math.pi * noise) + self.squares / noise)

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
        return self.rows(torch.arange(0, len(self.y), step))

    def stretches(self, n_rows: int, size: int) -> "Series":
        """About `n_rows` rows in stretches of `size` consecutive ones, apart for ever."""
        n_stretches = max(1, n_rows // size)
        starts = torch.linspace(0, len(self.y) - size, n_stretches).long()
        rows = (starts[:, None] + torch.arange(size)).reshape(-1)
        return self.rows(rows, torch.arange(size, len(rows), size))


def make_series(
    x: Tensor, y: Tensor, weight: Tensor | None = None, log_exposure: Tensor | None = None
) -> Series:
    """Sort rows (n,) with finite times by time, and find equal times. O(n log n); of copies."""
    x = x.double()
    x, order = x.sort(stable=True)
    columns = (None if c is None else c[order] for c in (weight, log_exposure))
    return _merge(x, y[order], *columns)


def _merge(x: Tensor, y: Tensor, weight: Tensor | None, log_exposure: Tensor | None) -> Series:
    """The series of rows in the order of their times."""
    if len(x) < 2 or bool((x.diff() > 0).all()):
        return Series(x, None, y, weight, log_exposure=log_exposure)
    times, index = torch.unique_consecutive(x, return_inverse=True)
    return Series(times, index, y, weight, log_exposure=log_exposure)
