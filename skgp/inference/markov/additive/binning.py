r"""Columns of inputs as few values each, so that what follows no longer depends on the rows.

A column with at most `n_bins` distinct values keeps them. Any other is cut where

.. math:: \tfrac12 \big[ P(x' \le x) + (x - x_{\min}) / (x_{\max} - x_{\min}) \big]

passes a multiple of 1 / `n_bins`: no bin then holds more than 2 / `n_bins` of the rows (unless
they share one value, which is never split) or spans more than 2 / `n_bins` of the range. Quantiles
alone would leave the thin tails to bins wider than a length scale, equal widths the dense parts.
A bin stands at the mean of its rows, so that a function f with slope f' is off by
:math:`f' (x - t)` in a row, which averages out over the bin to first order and adds
:math:`(f' \cdot` `spread` :math:`)^2` to the noise.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from skgp.linalg.tensor_state import TensorState

__all__ = ["Bins", "make_bins"]

_FEWEST = 16


@dataclass(frozen=True)
class Bins(TensorState):
    """The values that stand for those of each of c columns, one column after the other.

    Attributes
    ----------
    sizes : tuple of int
        How many each column has; M in all.
    values : Tensor of shape (M,)
        Rising within a column.
    edges : Tensor of shape (M,)
        Largest input of each bin; infinite for the last of a column.
    spread : Tensor of shape (c,)
        Root mean square distance of the rows from their bins' values, in units of the column:
        to be small beside the length scale. 0 where no values were merged.
    """

    sizes: tuple[int, ...]
    values: Tensor
    edges: Tensor
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
        """Bin of every input, counted within its column.

        Parameters
        ----------
        X : Tensor of shape (n, c)
            Values of a new row may lie between those seen, or beyond: the nearest bin has them.

        Returns
        -------
        Tensor of shape (c, n)
            int16 where that suffices, otherwise int32.

        Raises
        ------
        ValueError
            If X has another number of columns.
        """
        if X.ndim != 2 or X.shape[1] != len(self.sizes):
            raise ValueError(
                f"X must have the {len(self.sizes)} columns that the bins were made of; got shape "
                f"{tuple(X.shape)}."
            )
        dtype = torch.int16 if max(self.sizes) <= torch.iinfo(torch.int16).max else torch.int32
        found = torch.empty(X.shape[1], len(X), dtype=dtype)
        for column, part in enumerate(self.slices):
            edges = self.edges[part][:-1].contiguous()
            found[column] = torch.bucketize(X[:, column].contiguous(), edges, out_int32=True)
        return found


def make_bins(
    X: Tensor, weight: Tensor | None = None, *, n_bins: int = 512, most_bins: int = 2048
) -> Bins:
    """Choose the bins of every column.

    Parameters
    ----------
    X : Tensor of shape (n, c)
        float64, finite.
    weight : Tensor of shape (n,), optional
        Positive; a weight of 2 counts as two rows.
    n_bins : int, default=512
        Most bins of a column.
    most_bins : int, default=2048
        Of all columns together. Where that is less than they would have, those with most bins
        share the loss, down to 16 a column.

    Returns
    -------
    Bins
        O(c n log n).

    Raises
    ------
    ValueError
        If `n_bins` is less than 2.
    """
    if n_bins < 2:
        raise ValueError(f"n_bins must be at least 2; got {n_bins}.")
    distinct = [_distinct(X[:, j].contiguous(), weight) for j in range(X.shape[1])]
    level = _level([len(values) for values, _ in distinct], n_bins, most_bins)
    columns = [_bin_column(*each, level) for each in distinct]
    values, edges, spread = zip(*columns, strict=True)
    sizes = tuple(map(len, values))
    return Bins(sizes, torch.cat(values), torch.cat(edges), torch.stack(spread))


def _level(sizes: list[int], n_bins: int, most_bins: int) -> int:
    """Most bins of a column with which those of all columns are at most `most_bins`."""
    levels = range(min(_FEWEST, n_bins), n_bins + 1)
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
