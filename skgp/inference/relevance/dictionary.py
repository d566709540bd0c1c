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

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.sampling import take_rows
from skgp.inference.weights.design import StreamedDesign, check_sample_weight
from skgp.inference.weights.gram import StreamingGram
from skgp.kernels import gram_tile
from skgp.linalg.tensor_state import TensorState
from skgp.optim import sample_without_replacement

MAX_ROWS = 20_000
"""Rows up to which each of them is a candidate by default."""

DEFAULT_CANDIDATES = 2_000
"""Candidates drawn by default from more rows."""

_BLOCK = 1000  # columns of a block of the dictionary
_CHUNK = 20_000  # rows of a memory map read at once


class RelevanceBasis(TensorState):
    r"""Kernels centred on some rows, and a constant if asked: a :class:`~.design.Basis`.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (m, d)
        Centres.
    bias : bool, default=False
        Whether a last function is the constant 1.

    Attributes
    ----------
    n_features : int
        m, and one more with the constant.
    n_blocks : int
        Blocks of 1000 columns.
    """

    Z: Tensor

    def __init__(self, kernel: Any, Z: Tensor, *, bias: bool = False) -> None:
        self.kernel = kernel
        self.Z = Z.to(torch.float64)
        self.bias = bias

    @property
    def n_features(self) -> int:
        """Number of basis functions."""
        return len(self.Z) + self.bias

    @property
    def n_blocks(self) -> int:
        """Number of column blocks; 0 for an empty basis."""
        return -(-self.n_features // _BLOCK)

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..n_features``."""
        return slice(block * _BLOCK, min((block + 1) * _BLOCK, self.n_features))

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block at the rows of X, shape (n, width), in the dtype of X."""
        return self.columns(X, torch.arange(self.n_features)[self.block_slice(block)])

    def columns(self, X: Tensor, indices: Tensor) -> Tensor:
        """Columns `indices` (k,) at the rows of X, shape (n, k), in O(n k d)."""
        Phi = X.new_ones(len(X), len(indices))
        kernels = indices < len(self.Z)
        if bool(kernels.all()):
            return (
                gram_tile(self.kernel, X, self.Z[indices].to(X), out=Phi) if len(indices) else Phi
            )
        Phi[:, kernels] = self.columns(X, indices[kernels])
        return Phi

    def subset(self, indices: Tensor) -> "RelevanceBasis":
        """Return the basis of the functions `indices`, increasing."""
        kernels = indices < len(self.Z)
        return RelevanceBasis(self.kernel, self.Z[indices[kernels]], bias=not bool(kernels.all()))


class Source(Protocol):
    r"""What evidence maximisation reads of the data.

    Attributes
    ----------
    squares, moment : Tensor of shape (m,)
        The diagonal of :math:`\Phi^T W \Phi`, and :math:`\Phi^T W y`.
    sum_square, n_rows : float
        :math:`y^T W y` and :math:`\sum_i w_i`.
    """

    squares: Tensor
    moment: Tensor
    sum_square: float
    n_rows: float

    def gram_columns(self, indices: Tensor) -> Tensor:
        r"""Columns `indices` (k,) of :math:`\Phi^T W \Phi`, shape (m, k)."""


class Dictionary:
    """The dictionary at the training rows, kept within a memory budget and else made anew.

    Parameters
    ----------
    basis : RelevanceBasis
    X : Tensor of shape (n, d)
    memory_budget : int
        Bytes of columns kept, whole blocks of 1000.
    """

    def __init__(self, basis: RelevanceBasis, X: Tensor, *, memory_budget: int) -> None:
        self.basis = basis
        self._X = X.to(torch.float64)
        self._design = StreamedDesign(basis, self._X, memory_budget=memory_budget)

    def columns(self, indices: Tensor) -> Tensor:
        """Columns `indices` (k,) of Phi, shape (n, k)."""
        return self.basis.columns(self._X, indices)

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
    """Gram columns by a pass over the dictionary each.

    Parameters
    ----------
    dictionary : Dictionary
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,)
        A row of weight w counts as w rows.
    """

    def __init__(self, dictionary: Dictionary, y: Tensor, weight: Tensor) -> None:
        self._dictionary, self._weight = dictionary, weight
        self.squares = dictionary.squares(weight)
        self.moment = dictionary.rmatmul((weight * y)[:, None])[:, 0]
        self.sum_square = float(weight @ y.square())
        self.n_rows = float(weight.sum())

    def gram_columns(self, indices: Tensor) -> Tensor:
        """One pass, O(n m k)."""
        columns = self._dictionary.columns(indices)
        return self._dictionary.rmatmul(self._weight[:, None] * columns)


class GramSource:
    """Gram columns out of statistics that need no row any more.

    Parameters
    ----------
    statistics : StreamingGram
        Of a `RelevanceBasis`; a row of weight w counts as w rows.
    """

    def __init__(self, statistics: StreamingGram) -> None:
        self._gram = statistics.gram
        self.squares = statistics.gram.diagonal().clone()
        self.moment = statistics.moment
        self.sum_square = statistics.sum_square
        self.n_rows = statistics.sum_weight

    def gram_columns(self, indices: Tensor) -> Tensor:
        """Look the columns up."""
        return self._gram[:, indices]


def make_source(
    basis: RelevanceBasis,
    X: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    sample_weight: Tensor | None,
    memory_budget: int,
) -> Source:
    """Keep Phi if it fits in the budget, else its Gram matrix if that does, else stream Phi.

    Parameters
    ----------
    basis : RelevanceBasis
    X : Tensor or ndarray of shape (n, d)
        A memory map is read in chunks when the Gram matrix is accumulated.
    y : Tensor or ndarray of shape (n,)
    sample_weight : Tensor of shape (n,), optional
    memory_budget : int
        Bytes.
    """
    n, m = len(X), basis.n_features
    if n * m * 8 > memory_budget >= m * m * 8:
        statistics = StreamingGram(basis, memory_budget=min(memory_budget, 2**28))
        for rows in chunks(n):
            weight = None if sample_weight is None else sample_weight[rows.start : rows.stop]
            X_chunk, y_chunk = (take_rows(A, rows_of(rows), torch.float64) for A in (X, y))
            statistics.update(X_chunk, y_chunk, weight)
        return GramSource(statistics)
    X, y = (take_rows(A, rows_of(range(n)), torch.float64) for A in (X, y))
    weight = torch.ones_like(y) if sample_weight is None else sample_weight.to(y)
    check_sample_weight(weight, n)
    return DesignSource(Dictionary(basis, X, memory_budget=memory_budget), y, weight)


def chunks(n: int) -> Iterator[range]:
    """Cut 0..n into ranges of at most 20000 rows."""
    return (range(start, min(start + _CHUNK, n)) for start in range(0, n, _CHUNK))


def rows_of(rows: range) -> Tensor:
    """Indices of a range."""
    return torch.arange(rows.start, rows.stop)


def choose_candidates(
    n: int, candidates: int | Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Rows that may become relevance vectors, increasing.

    Parameters
    ----------
    n : int
        Rows.
    candidates : int, Tensor or None
        A number to draw, the rows themselves, or None for all of at most 20000 rows and 2000 drawn
        of more.
    generator : torch.Generator, optional
        Needed to draw.

    Returns
    -------
    Tensor of shape (m,)

    Raises
    ------
    ValueError
        If a number is below 1, rows leave 0..n, or there is no generator to draw with.
    """
    if isinstance(candidates, Tensor):
        rows = candidates.unique()
        if not len(rows) or int(rows[0]) < 0 or int(rows[-1]) >= n:
            raise ValueError(
                f"candidates must be rows in 0..{n - 1}, at least one; got {candidates}."
            )
        return rows
    size = (n if n <= MAX_ROWS else DEFAULT_CANDIDATES) if candidates is None else candidates
    if size < 1:
        raise ValueError(f"candidates must be at least 1, got {size}.")
    if size >= n:
        return torch.arange(n)
    if generator is None:
        raise ValueError(
            f"{size} candidates of {n} rows are drawn: pass a generator, or candidates as rows."
        )
    return sample_without_replacement(n, size, generator=generator)
