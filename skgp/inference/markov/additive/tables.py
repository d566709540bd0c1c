r"""What Gaussian noise leaves of the rows of an additive model: cross tables and sums over bins.

With the indicators :math:`Z` (n, M) of the bins of all columns side by side, the likelihood of the
bins' values :math:`f = (f_1, \dots, f_c)` depends on the rows through

.. math:: N = Z^\top W Z, \qquad Z^\top W y, \qquad y^\top W y

alone. They add up over batches of rows, so that a stream of them is fitted exactly in
:math:`O(M^2)` memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.markov.additive.binning import Bins
from skgp.linalg.tensor_state import TensorState

__all__ = ["AdditiveStatistics", "add_cross_tables", "bin_sums", "rows_of"]


def add_cross_tables(table: Tensor, bins: Bins, index: Tensor, weight: Tensor | None) -> None:
    r"""Add :math:`Z^\top W Z` of some rows to a table, in place.

    Parameters
    ----------
    table : Tensor of shape (M, M)
    bins : Bins
    index : Tensor of shape (c, n)
        From `Bins.index`.
    weight : Tensor of shape (n,) or None
        None for 1.

    Notes
    -----
    :math:`O(n c^2)`, each pair of columns in one pass; of few rows one column and many others.
    """
    parts, sizes, (c, n) = bins.slices, bins.sizes, index.shape
    table.diagonal().add_(bin_sums(bins, index, weight))
    width = max(1, 2**16 // max(1, n))  # columns whose cells stay in the cache
    for j in range(c):
        for first in range(j + 1, c, width):
            some = slice(first, min(first + width, c))
            across = slice(parts[first].start, parts[some.stop - 1].stop)
            size = across.stop - across.start
            starts = torch.tensor([part.start - across.start for part in parts[some]])
            cell = index[some] + starts.to(index.device)[:, None] + size * index[j].long()
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
    """Sufficient statistics of an additive model with Gaussian noise; batches of rows add to them.

    Made by `AdditiveStatistics.empty`.

    Attributes
    ----------
    bins : Bins
        Fixed before the first row.
    cross : Tensor of shape (M, M)
        Weight of the rows in each pair of bins.
    sums : Tensor of shape (M,)
        Weighted sum of y less the origin in each bin.
    squares, total, weight : float
        Weighted sum of the squares of y less the origin, of y less the origin, and of 1.
    origin : float
        About the mean of y, so that the squares do not cancel.
    """

    bins: Bins
    cross: Tensor
    sums: Tensor
    squares: float = 0.0
    total: float = 0.0
    weight: float = 0.0
    origin: float = 0.0

    @classmethod
    def empty(cls, bins: Bins, origin: float = 0.0) -> "AdditiveStatistics":
        """Statistics of no rows."""
        size = len(bins.values)
        cross = torch.zeros(size, size, dtype=torch.float64)
        return cls(bins, cross, torch.zeros(size, dtype=torch.float64), origin=origin)

    def add(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Take in a batch of rows, in O(n c^2).

        Parameters
        ----------
        X : Tensor of shape (n, c)
        y : Tensor of shape (n,)
        weight : Tensor of shape (n,), optional
            A weight of 2 counts as two rows.
        """
        index = self.bins.index(X)
        y = y.double() - self.origin
        weighted = y if weight is None else weight * y
        add_cross_tables(self.cross, self.bins, index, weight)
        self.sums += bin_sums(self.bins, index, weighted)
        self.squares += float(weighted @ y)
        self.total += float(weighted.sum())
        self.weight += float(len(y) if weight is None else weight.sum())

    @property
    def mean(self) -> float:
        """Weighted mean of y."""
        return self.origin + self.total / self.weight

    def centred(self, offset: float) -> tuple[Tensor, float]:
        """Sums (M,) and squares of y less an offset."""
        shift = offset - self.origin
        squares = self.squares - 2 * shift * self.total + shift**2 * self.weight
        return self.sums - shift * self.cross.diagonal(), squares
