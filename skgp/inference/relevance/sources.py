"""Columns of a dictionary of kernels, and their products with observations, for single steps."""

from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.defaults import (
    DICTIONARY_BYTES,
    KEPT_FEATURES,
    MAPPED_ROWS,
)
from skgp.inference.stochastic.basis import Array, KernelColumns, take_rows
from skgp.inference.weights.design import StreamedDesign, check_sample_weight
from skgp.inference.weights.gram import StreamingGram
from skgp.kernels import gram_tile
from skgp.linalg.runtime import memory_budget


class Source(Protocol):
    """What evidence maximisation reads of the data."""

    squares: Tensor  # (m,), diagonal of Phi' W Phi
    moment: Tensor  # (m,), Phi' W y
    sum_square: float  # y' W y
    n_rows: float  # sum of W

    def gram_columns(self, indices: Tensor) -> Tensor:
        r"""Columns `indices` (k,) of :math:`\Phi^T W \Phi`, shape (m, k)."""


class Dictionary(StreamedDesign):
    """The candidates' functions at the training inputs X (n, d), float64."""

    basis: KernelColumns

    def some(self, indices: Tensor) -> Tensor:
        """Columns `indices` (k,) of Phi, shape (n, k), in O(n k d)."""
        if not len(indices):
            return self.X.new_zeros(len(self.X), 0)
        return gram_tile(self.basis.kernel, self.X, self.basis.Z[indices].to(self.X))


class DesignSource:
    """Gram columns by a pass over the dictionary each, O(n m k); row i counts as weight_i rows."""

    def __init__(self, dictionary: Dictionary, y: Tensor, weight: Tensor) -> None:
        self._dictionary, self._weight = dictionary, weight
        self.squares = dictionary.curvature_diagonal(weight[:, None])[:, 0]
        self.moment = dictionary.rmatmul((weight * y)[:, None])[:, 0]
        self.sum_square = float(weight @ y.square())
        self.n_rows = float(weight.sum())

    def gram_columns(self, indices: Tensor) -> Tensor:
        """Columns of Phi' W Phi, shape (m, k)."""
        return self._dictionary.rmatmul(self._weight[:, None] * self._dictionary.some(indices))


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


def make_source(basis: KernelColumns, X: Array, y: Array, sample_weight: Tensor | None) -> Source:
    """Keep Phi if it is small enough, else its Gram matrix if that is, or stream Phi.

    A memory map X (n, d) is read in chunks when the Gram matrix is accumulated.
    """
    n, m = len(X), basis.n_features
    kept = min(DICTIONARY_BYTES, KEPT_FEATURES * memory_budget())
    if n * m * 8 > kept >= m * m * 8:
        statistics = StreamingGram(basis)
        for rows in all_rows(X).split(MAPPED_ROWS):
            weight = None if sample_weight is None else sample_weight[rows]
            X_chunk, y_chunk = (take_rows(A, rows, torch.float64) for A in (X, y))
            statistics.update(X_chunk, y_chunk, weight)
        return GramSource(statistics)
    X, y = (take_rows(A, all_rows(A), torch.float64) for A in (X, y))
    weight = torch.ones_like(y) if sample_weight is None else sample_weight.to(y)
    check_sample_weight(weight, n)
    return DesignSource(Dictionary(basis, X), y, weight)


def all_rows(X: Array) -> Tensor:
    """Indices of the rows of a tensor or array, on its device."""
    return torch.arange(len(X), device=X.device)
