r"""The design matrix of a model linear in its weights, streamed and never stored whole.

A basis gives the columns of :math:`\Phi` block by block, ``basis.features(X, block)``.
:class:`StreamedDesign` turns it into products with :math:`\Phi`, :math:`\Phi^T` and
:math:`\Phi^T \Phi`, in tiles sized by a memory budget. Its rows are scaled by :math:`\sqrt{w_i}`,
which is all that sample weights (noise variance :math:`\sigma^2 / w_i`) need. For other
likelihoods there is :math:`\Phi^T C_j \Phi`, with diagonal curvatures :math:`C_j` that differ from
column to column: products, matrices and diagonals.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

MEMORY_BUDGET = 2**29
"""Default bytes of features that a streamed computation may hold at once."""

GRAM_TILE = 512
"""Columns of a tile of a Gram matrix: full matrix-multiply speed, little of the upper triangle."""

_TILE_BYTES = 2**25  # larger tiles leave the processor's caches and gain nothing


class Basis(Protocol):
    """What the weight-space solvers ask of a basis; the prior of its weights is ``N(0, I)``."""

    @property
    def n_features(self) -> int:
        """Number of basis functions m."""

    @property
    def n_blocks(self) -> int:
        """Number of column blocks."""

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block, of shape (n, width), in the dtype of ``X``."""


def block_width(basis: Basis, block: int) -> int:
    """Return the number of features of a block."""
    columns = basis.block_slice(block)
    return columns.stop - columns.start


def row_chunks(n_rows: int, row_bytes: int, budget: int, max_rows: int) -> Iterator[slice]:
    """Cut ``0..n_rows`` into slices of at most `max_rows` rows and `budget` bytes (one row)."""
    step = min(max_rows, max(1, budget // max(1, row_bytes)))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def add_gram(gram: Tensor, F: Tensor) -> None:
    """Add ``F^T F`` to the lower triangle of `gram`, in tiles; most of the upper is left alone."""
    for start in range(0, F.shape[1], GRAM_TILE):
        left = F[:, start : start + GRAM_TILE].mT
        for other in range(0, start + 1, GRAM_TILE):
            tile = left @ F[:, other : other + GRAM_TILE]
            gram[start : start + GRAM_TILE, other : other + GRAM_TILE] += tile


class StreamedDesign:
    r"""Products with :math:`W^{1/2} \Phi(X)`, tile by tile.

    Parameters
    ----------
    basis : Basis
        Source of the columns.
    X : Tensor of shape (n, d)
    sample_weight : Tensor of shape (n,), optional
        Positive weights; row i is multiplied by ``sqrt(w_i)``.
    dtype : torch.dtype, default=torch.float64
        Precision of the features. Sums over blocks and over row tiles are float64 either way.
    memory_budget : int, default=2**29
        Bytes of features kept between calls: whole blocks, first come first kept. The rest is
        regenerated. 0 keeps nothing. One tile of at most 32 MiB (or one row) comes on top.

    Raises
    ------
    ValueError
        If `sample_weight` is not n positive finite numbers.

    Notes
    -----
    A product with k columns costs ``O(n m k)`` plus the features that are not kept. Memory: the
    features kept, one tile and the float64 result.
    """

    def __init__(
        self,
        basis: Basis,
        X: Tensor,
        *,
        sample_weight: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        memory_budget: int = MEMORY_BUDGET,
    ):
        self.basis = basis
        self.dtype = dtype
        self.memory_budget = memory_budget
        self._X = X.to(dtype)
        self._root_weight = None
        if sample_weight is not None:
            check_sample_weight(sample_weight, X.shape[0])
            self._root_weight = sample_weight.to(self._X).sqrt()[:, None]
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = memory_budget

    @property
    def n_rows(self) -> int:
        """Number of rows n."""
        return self._X.shape[0]

    @property
    def n_features(self) -> int:
        """Number of columns m."""
        return self.basis.n_features

    @property
    def is_weighted(self) -> bool:
        """Whether the rows are scaled by sample weights."""
        return self._root_weight is not None

    @property
    def device(self) -> torch.device:
        """Device of ``X`` and of every product."""
        return self._X.device

    def tiles(self, width: int, tile_bytes: int = _TILE_BYTES) -> Iterator[slice]:
        """Cut the rows so that `width` features of a slice fill at most one tile."""
        return row_chunks(self.n_rows, width * self.dtype.itemsize, tile_bytes, self.n_rows)

    def scale_rows(self, values: Tensor) -> Tensor:
        """Multiply the rows of `values` (n, k) by ``sqrt(w_i)``, in float64."""
        values = values.to(self.device, torch.float64)
        return values if self._root_weight is None else values * self._root_weight

    def features(self, block: int, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return ``(W^(1/2) Phi)[rows, block]``, out of the features kept where there is room."""
        if block not in self._kept:
            width = block_width(self.basis, block)
            n_bytes = self.n_rows * width * self.dtype.itemsize
            if n_bytes > self._bytes_left:
                return self._regenerate(block, rows)
            whole = self._X.new_empty(self.n_rows, width)
            for tile in self.tiles(width):
                whole[tile] = self._regenerate(block, tile)
            self._kept[block] = whole
            self._bytes_left -= n_bytes
        return self._kept[block][rows]

    def columns(self, blocks: range, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return the features of several neighbouring blocks side by side."""
        if len(blocks) == 1:
            return self.features(blocks[0], rows)
        return torch.cat([self.features(block, rows) for block in blocks], dim=1)

    def matmul(self, V: Tensor) -> Tensor:
        """Return ``W^(1/2) Phi V`` of shape (n, k) for `V` of shape (m, k), in float64."""
        out = torch.zeros(self.n_rows, V.shape[1], dtype=torch.float64, device=self.device)
        for block in range(self.basis.n_blocks):
            part = V[self.basis.block_slice(block)].to(self._X)
            for rows in self.tiles(part.shape[0]):
                out[rows] += self.features(block, rows) @ part
        return out

    def rmatmul(self, R: Tensor) -> Tensor:
        """Return ``Phi^T W^(1/2) R`` of shape (m, k) for `R` of shape (n, k), in float64."""
        R = R.to(self._X)
        out = torch.zeros(self.n_features, R.shape[1], dtype=torch.float64, device=self.device)
        for block in range(self.basis.n_blocks):
            columns = self.basis.block_slice(block)
            for rows in self.tiles(columns.stop - columns.start):
                out[columns] += self.features(block, rows).mT @ R[rows]
        return out

    def gram_matmul(self, V: Tensor) -> Tensor:
        """Return ``Phi^T W Phi V`` of shape (m, k), in float64; features are generated once."""
        return self._fused_product(V, None)[0]

    def curvature_matmul(self, V: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        r"""Product of each column with a Hessian of its own, from features generated once.

        Parameters
        ----------
        V : Tensor of shape (m, k)
        curvature : Tensor of shape (n, k)
            Column j is the diagonal of :math:`C_j`.

        Returns
        -------
        product : Tensor of shape (m, k)
            :math:`\Phi^T C_j \Phi v_j`, float64.
        image : Tensor of shape (n, k)
            :math:`\Phi V`, float64.

        Notes
        -----
        :math:`\Phi` is ``W^(1/2) Phi`` where the design has sample weights.
        """
        return self._fused_product(V, curvature.to(self._X))

    def _fused_product(self, V: Tensor, curvature: Tensor | None) -> tuple[Tensor, Tensor]:
        V = V.to(self._X)
        k = V.shape[1]
        out = torch.zeros(self.n_features, k, dtype=torch.float64, device=self.device)
        image = torch.zeros(self.n_rows, k, dtype=torch.float64, device=self.device)
        columns = [self.basis.block_slice(block) for block in range(self.basis.n_blocks)]
        # Holds all m features of a slice of rows, at most 8 tiles: each slice draws the
        # frequencies of every block anew, which only many rows repay.
        for rows in self.tiles(self.n_features, 8 * _TILE_BYTES):
            Phi = [self.features(block, rows) for block in range(self.basis.n_blocks)]
            for F, part in zip(Phi, columns, strict=True):
                image[rows] += F @ V[part]
            fitted = image[rows].to(self.dtype)
            if curvature is not None:
                fitted = fitted * curvature[rows]
            for F, part in zip(Phi, columns, strict=True):
                out[part] += F.mT @ fitted
        return out, image

    def curvature_gram(self, curvature: Tensor, index: Tensor | None = None) -> Tensor:
        r"""Hessians :math:`\Phi^T C_j \Phi` as matrices, from features generated once.

        Parameters
        ----------
        curvature : Tensor of shape (p, k)
            Not negative.
        index : Tensor of shape (p,), optional
            Rows that enter; all n by default.

        Returns
        -------
        Tensor of shape (k, m, m)
            Float64, symmetric.

        Notes
        -----
        ``p m^2 k`` flops. Memory beside the result: at most 16 tiles of 32 MiB.
        """
        m, k = self.n_features, curvature.shape[1]
        out = torch.zeros(k, m, m, dtype=torch.float64, device=self.device)
        root = curvature.sqrt().to(self._X)
        for rows in row_chunks(len(root), m * self.dtype.itemsize, 8 * _TILE_BYTES, len(root)):
            Phi = self.columns(range(self.basis.n_blocks), rows if index is None else index[rows])
            for gram, scale in zip(out, root[rows].mT, strict=True):
                add_gram(gram, Phi * scale[:, None])
        for gram in out:
            _mirror(gram)
        return out

    def curvature_diagonal(self, curvature: Tensor) -> Tensor:
        r"""Diagonals of :math:`\Phi^T C_j \Phi`, of shape (m, k), float64; `curvature` (n, k)."""
        curvature = curvature.to(self._X)
        shape = self.n_features, curvature.shape[1]
        out = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for block in range(self.basis.n_blocks):
            columns = self.basis.block_slice(block)
            for rows in self.tiles(columns.stop - columns.start):
                out[columns] += self.features(block, rows).square().mT @ curvature[rows]
        return out

    def subset(self, index: Tensor) -> "StreamedDesign":
        """Return the design of the rows `index` (p,), which keeps no features."""
        other = StreamedDesign(self.basis, self._X[index], dtype=self.dtype, memory_budget=0)
        if self._root_weight is not None:
            other._root_weight = self._root_weight[index]
        return other

    def _regenerate(self, block: int, rows: slice | Tensor) -> Tensor:
        F = self.basis.features(self._X[rows], block)
        return F if self._root_weight is None else F * self._root_weight[rows]


def _mirror(gram: Tensor) -> None:
    """Copy the tiles below the diagonal to above it, in place."""
    for start in range(GRAM_TILE, len(gram), GRAM_TILE):
        rows = slice(start, start + GRAM_TILE)
        gram[:start, rows] = gram[rows, :start].mT


def check_sample_weight(sample_weight: Tensor, n_rows: int) -> None:
    """Raise a ValueError unless `sample_weight` is `n_rows` positive finite numbers."""
    if sample_weight.shape != (n_rows,):
        raise ValueError(
            f"sample_weight must have shape ({n_rows},), one weight a row; got "
            f"{tuple(sample_weight.shape)}."
        )
    if not bool((torch.isfinite(sample_weight) & (sample_weight > 0)).all()):
        raise ValueError(
            "sample_weight must be positive and finite; got values from "
            f"{float(sample_weight.min()):.3g} to {float(sample_weight.max()):.3g}. Drop the rows "
            "of weight 0: they hold no information."
        )
