r"""The dictionary of the relevance vector machine: one kernel a training row, streamed.

The columns of :math:`\Phi = K(X, Z)`, Z some rows of X (the candidates), are seen only through
:math:`\Phi^T W \Phi`, of which the sequential algorithm asks one column a vector it adds. Two
sources answer, by what fits in memory:

=======================  ====================================  =================================
source                   a column of the Gram matrix           memory
=======================  ====================================  =================================
:class:`DesignSource`    one pass over Phi, O(n m)             n m numbers kept, or a tile of Phi
:class:`GramSource`      none: accumulated once, O(n m^2)      m^2 numbers and a tile of Phi
=======================  ====================================  =================================
"""

from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.relevance.defaults import CANDIDATES, CHUNK, MAX_ROWS
from skgp.inference.stochastic.basis import Array, KernelColumns, take_rows
from skgp.inference.weights.design import StreamedDesign, check_sample_weight
from skgp.inference.weights.gram import StreamingGram
from skgp.kernels import gram_tile
from skgp.optim import sample_without_replacement


class Source(Protocol):
    r"""What evidence maximisation reads of the data."""

    squares: Tensor  # (m,), diagonal of Phi' W Phi
    moment: Tensor  # (m,), Phi' W y
    sum_square: float  # y' W y
    n_rows: float  # sum of W

    def gram_columns(self, indices: Tensor) -> Tensor:
        r"""Columns `indices` (k,) of :math:`\Phi^T W \Phi`, shape (m, k)."""


class Dictionary:
    """The dictionary at the training rows X (n, d): whole blocks kept within a memory budget."""

    def __init__(self, basis: KernelColumns, X: Tensor, *, memory_budget: int) -> None:
        self.basis = basis
        self._X = X.to(torch.float64)
        self._design = StreamedDesign(basis, self._X, memory_budget=memory_budget)

    def columns(self, indices: Tensor) -> Tensor:
        """Columns `indices` (k,) of Phi, shape (n, k), in O(n k d)."""
        if not len(indices):
            return self._X.new_zeros(len(self._X), 0)
        return gram_tile(self.basis.kernel, self._X, self.basis.Z[indices].to(self._X))

    def rmatmul(self, V: Tensor) -> Tensor:
        """Return ``Phi' V`` of shape (m, k) for V of shape (n, k), in O(n m k)."""
        return self._design.rmatmul(V)

    def squares(self, weight: Tensor) -> Tensor:
        """Return the weighted sums of squares of the columns, shape (m,), in O(n m)."""
        out = weight.new_empty(self.basis.n_features)
        for block in range(self.basis.n_blocks):
            columns = self.basis.block_slice(block)
            out[columns] = sum(
                self._design.features(block, rows).square().mT @ weight[rows]
                for rows in self._design.tiles(columns.stop - columns.start)
            )
        return out


class DesignSource:
    """Gram columns by a pass over the dictionary each, O(n m k); row i counts as weight_i rows."""

    def __init__(self, dictionary: Dictionary, y: Tensor, weight: Tensor) -> None:
        self._dictionary, self._weight = dictionary, weight
        self.squares = dictionary.squares(weight)
        self.moment = dictionary.rmatmul((weight * y)[:, None])[:, 0]
        self.sum_square = float(weight @ y.square())
        self.n_rows = float(weight.sum())

    def gram_columns(self, indices: Tensor) -> Tensor:
        """Columns of Phi' W Phi, shape (m, k)."""
        columns = self._dictionary.columns(indices)
        return self._dictionary.rmatmul(self._weight[:, None] * columns)


class GramSource:
    """Gram columns out of statistics that need no row any more."""

    def __init__(self, statistics: StreamingGram) -> None:
        self._gram = statistics.gram
        self.squares = statistics.gram.diagonal().clone()
        self.moment = statistics.moment
        self.sum_square = statistics.sum_square
        self.n_rows = statistics.sum_weight

    def gram_columns(self, indices: Tensor) -> Tensor:
        """Columns of Phi' W Phi, shape (m, k)."""
        return self._gram[:, indices]


def make_source(
    basis: KernelColumns, X: Array, y: Array, sample_weight: Tensor | None, memory_budget: int
) -> Source:
    """Keep Phi if it fits in the budget (bytes), else its Gram matrix if that does, or stream Phi.

    A memory map X (n, d) is read in chunks when the Gram matrix is accumulated.
    """
    n, m = len(X), basis.n_features
    if n * m * 8 > memory_budget >= m * m * 8:
        statistics = StreamingGram(basis, memory_budget=min(memory_budget, 2**28))
        for rows in torch.arange(n).split(CHUNK):
            weight = None if sample_weight is None else sample_weight[rows]
            X_chunk, y_chunk = (take_rows(A, rows, torch.float64) for A in (X, y))
            statistics.update(X_chunk, y_chunk, weight)
        return GramSource(statistics)
    X, y = (take_rows(A, torch.arange(n), torch.float64) for A in (X, y))
    weight = torch.ones_like(y) if sample_weight is None else sample_weight.to(y)
    check_sample_weight(weight, n)
    return DesignSource(Dictionary(basis, X, memory_budget=memory_budget), y, weight)


def choose_candidates(
    n: int, candidates: int | Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Rows that may become relevance vectors, increasing, of n.

    `candidates` is a number to draw (with the generator), the rows themselves, or None for all of
    at most 20000 rows and 2000 drawn of more.
    """
    if isinstance(candidates, Tensor):
        rows = candidates.unique()
        if not len(rows) or int(rows[0]) < 0 or int(rows[-1]) >= n:
            raise ValueError(
                f"candidates must be rows in 0..{n - 1}, at least one; got {candidates}."
            )
        return rows
    size = (n if n <= MAX_ROWS else CANDIDATES) if candidates is None else candidates
    if size < 1:
        raise ValueError(f"candidates must be at least 1, got {size}.")
    if size >= n:
        return torch.arange(n)
    if generator is None:
        raise ValueError(
            f"{size} candidates of {n} rows are drawn: pass a generator, or candidates as rows."
        )
    return sample_without_replacement(n, size, generator=generator)
