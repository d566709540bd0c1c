r"""Features of a model linear in its weights, :math:`f = \Phi w`, :math:`w \sim N(0, I)`.

A basis gives the columns of :math:`\Phi` block by block, ``basis.features(X, block)``: Fourier
features (:mod:`skgp.kernels.spectral`), inducing points (:class:`.WhitenedInducingBasis`) or both
side by side (:class:`.SumBasis`). :class:`StreamedDesign` turns it into products with :math:`\Phi`,
:math:`\Phi^T` and :math:`\Phi^T C \Phi`, tile by tile; the matrix is never stored whole.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import GRAM_TILE, KEPT_FEATURES, MADE_OF, TILE_BYTES
from skgp.inference.weights.bases import Basis
from skgp.linalg.cholesky import tri_solve
from skgp.linalg.runtime import memory_budget, tile_rows


class StreamedDesign:
    r"""Products with :math:`W^{1/2} \Phi(X)`, tile by tile.

    Parameters
    ----------
    basis : Basis
        Source of the columns.
    X : Tensor of shape (n, d)
    sample_weight : Tensor of shape (n,), optional
        Positive weights; row i is multiplied by ``sqrt(w_i)``, which is all that a noise variance
        :math:`\sigma^2 / w_i` needs.
    dtype : torch.dtype, default=torch.float64
        Precision of the features. Sums over blocks and over row tiles are float64 either way.
    keep : bool, default=True
        Whether features are kept between calls: whole blocks, first come first kept, in half of
        :func:`~skgp.linalg.runtime.memory_budget`. The rest is regenerated.

    Raises
    ------
    ValueError
        If `sample_weight` is not n positive finite numbers.

    Notes
    -----
    A product with k columns costs ``O(n m k)`` plus the features that are not kept. Those of
    inducing points, ``n m^2`` flops, are not made for it at all: ``Phi v = k(X, Z) (L^{-T} v)``
    takes covariances alone. Memory: the features kept, one tile and the float64 result.
    """

    def __init__(
        self,
        basis: Basis,
        X: Tensor,
        *,
        sample_weight: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        keep: bool = True,
    ):
        self.basis, self.dtype = basis, dtype
        self.X = X.to(dtype)
        self._root_weight = None
        if sample_weight is not None:
            check_sample_weight(sample_weight, X.shape[0])
            self._root_weight = sample_weight.to(self.X).sqrt()[:, None]
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = KEPT_FEATURES * memory_budget(X.device) if keep else 0.0
        self.n_rows, self.n_features = len(X), basis.n_features
        self.device = self.X.device
        self.blocks = range(basis.n_blocks)

    @property
    def is_weighted(self) -> bool:
        """Whether the rows are scaled by sample weights."""
        return self._root_weight is not None

    def tiles(self, width: int, tile_bytes: int | None = None) -> Iterator[slice]:
        """Cut the rows so that `width` features of a slice fill at most one tile."""
        tile_bytes = TILE_BYTES if tile_bytes is None else tile_bytes
        return row_chunks(self.n_rows, width * self.dtype.itemsize, tile_bytes)

    def scale_rows(self, values: Tensor) -> Tensor:
        """Multiply the rows of `values` (n, k) by ``sqrt(w_i)``, in float64."""
        values = values.to(self.device, torch.float64)
        return values if self._root_weight is None else values * self._root_weight

    def features(self, block: int, rows: slice | Tensor = slice(None)) -> Tensor:
        """``(W^(1/2) Phi)[rows, block]``, out of the features kept where there is room."""
        if self._keeps(block):
            return self._kept[block][rows]
        return self._weighted(self.basis.features(self.X[rows], block), rows)

    def _keeps(self, block: int) -> bool:
        """Whether the features of a block are kept, from the first call on."""
        if block in self._kept:
            return True
        width = block_width(self.basis, block)
        n_bytes = self.n_rows * width * self.dtype.itemsize
        if n_bytes > self._bytes_left:
            return False
        whole = self.X.new_empty(self.n_rows, width)
        for tile in self.tiles(width):
            whole[tile] = self._weighted(self.basis.features(self.X[tile], block), tile)
        self._kept[block] = whole
        self._bytes_left -= n_bytes
        return True

    def columns(self, blocks: range, rows: slice | Tensor = slice(None)) -> Tensor:
        """The features of several neighbouring blocks side by side."""
        if len(blocks) == 1:
            return self.features(blocks[0], rows)
        return torch.cat([self.features(block, rows) for block in blocks], dim=1)

    def matmul(self, V: Tensor) -> Tensor:
        """``W^(1/2) Phi V`` of shape (n, k) for `V` of shape (m, k), in float64."""
        out = torch.zeros(self.n_rows, V.shape[1], dtype=torch.float64, device=self.device)
        for source, part in zip(self._sources(), self._parts, strict=True):
            v = source.unwhiten(V[part])
            for rows in self.tiles(len(v)):
                out[rows] += thin_product(source.tile(rows), v)
        return out

    def rmatmul(self, R: Tensor) -> Tensor:
        """``Phi^T W^(1/2) R`` of shape (m, k) for `R` of shape (n, k), in float64."""
        out = torch.zeros(self.n_features, R.shape[1], dtype=torch.float64, device=self.device)
        for source, part in zip(self._sources(), self._parts, strict=True):
            for rows in self.tiles(part.stop - part.start):
                out[part] += thin_product(source.tile(rows).mT, R[rows].to(source.like))
            out[part] = source.whiten(out[part])
        return out

    def gram_matmul(self, V: Tensor) -> Tensor:
        """``Phi^T W Phi V`` of shape (m, k), in float64; features are generated once."""
        return self.curvature_matmul(V, None)[0]

    def curvature_matmul(self, V: Tensor, curvature: Tensor | None) -> tuple[Tensor, Tensor]:
        r"""Product of each column with a Hessian of its own, from features generated once.

        Of V (m, k) and `curvature` (n, k), whose columns are the diagonals of :math:`C_j`, the
        identity if None: :math:`\Phi^T C_j \Phi v_j`, (m, k), and :math:`\Phi V`, (n, k), in
        float64. With sample weights :math:`\Phi` is ``W^(1/2) Phi``.
        """
        k, sources = V.shape[1], self._sources()
        out = torch.zeros(self.n_features, k, dtype=torch.float64, device=self.device)
        image = torch.zeros(self.n_rows, k, dtype=torch.float64, device=self.device)
        parts = list(zip(sources, self._parts, strict=True))
        unwhitened = [source.unwhiten(V[part]) for source, part in parts]
        # Holds all m features of a slice of rows, at most 8 tiles: each slice draws the
        # frequencies of every block anew, which only many rows repay.
        for rows in self.tiles(self.n_features, 8 * TILE_BYTES):
            Phi = [source.tile(rows) for source in sources]
            for F, v in zip(Phi, unwhitened, strict=True):
                image[rows] += thin_product(F, v)  # (rows, k)
            fitted = image[rows]
            for F, (_, part) in zip(Phi, parts, strict=True):
                bent = fitted.to(F)
                if curvature is not None:
                    bent = bent * curvature[rows].to(F)
                out[part] += thin_product(F.mT, bent)  # (width, k)
        for source, part in parts:
            out[part] = source.whiten(out[part])
        return out, image

    def curvature_gram(self, curvature: Tensor, index: Tensor | None = None) -> Tensor:
        r"""Hessians :math:`\Phi^T C_j \Phi` as symmetric matrices (k, m, m), float64.

        `curvature` (p, k), not negative, is of the rows `index` (p,); by default of all n.
        ``p m^2 k`` flops from features generated once; at most 16 tiles beside the result.
        """
        m, k = self.n_features, curvature.shape[1]
        out = torch.zeros(k, m, m, dtype=torch.float64, device=self.device)
        root = curvature.sqrt().to(self.X)
        for rows in row_chunks(len(root), m * self.dtype.itemsize, 8 * TILE_BYTES):
            Phi = self.columns(self.blocks, rows if index is None else index[rows])
            for hessian, scale in zip(out, root[rows].mT, strict=True):
                add_gram(hessian, Phi * scale[:, None])
        for hessian in out:
            mirror(hessian)
        return out

    def curvature_diagonal(self, curvature: Tensor) -> Tensor:
        r"""Diagonals of :math:`\Phi^T C_j \Phi`, of shape (m, k), float64; `curvature` (n, k)."""
        curvature = curvature.to(self.X)
        shape = self.n_features, curvature.shape[1]
        out = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for block, part, rows in self._tiles_of_blocks():
            out[part] += self.features(block, rows).square().mT @ curvature[rows]
        return out

    def _tiles_of_blocks(self) -> Iterator[tuple[int, slice, slice]]:
        """Every block, its columns, and slices of rows that fill a tile with them."""
        for block in self.blocks:
            part = self.basis.block_slice(block)
            for rows in self.tiles(part.stop - part.start):
                yield block, part, rows

    @property
    def n_made(self) -> int:
        """Numbers that every product makes anew: those of the blocks that are not kept."""
        widths = [block_width(self.basis, b) for b in self.blocks if not self._keeps(b)]
        return self.n_rows * sum(widths)

    def _weighted(self, F: Tensor, rows: slice | Tensor) -> Tensor:
        return F if self._root_weight is None else F * self._root_weight[rows].to(F)

    @property
    def _parts(self) -> list[slice]:
        """Columns of each block."""
        return [self.basis.block_slice(block) for block in self.blocks]

    def _sources(self) -> list["_Features | _Covariances"]:
        """What products take of each block: its features, or of inducing points not kept less."""
        root = getattr(self.basis, "root", None)
        if root is None or self._keeps(0):
            return [_Features(self, block) for block in self.blocks]
        return [_Covariances(self, root)]


class _Features:
    """Features of a block, made or kept, for products."""

    def __init__(self, design: StreamedDesign, block: int) -> None:
        self._design, self._block, self.like = design, block, design.X

    def tile(self, rows: slice) -> Tensor:
        """Factors (rows, width) of products."""
        return self._design.features(self._block, rows)

    def unwhiten(self, V: Tensor) -> Tensor:
        """What the tiles are multiplied by, given weights V (width, k)."""
        return V.to(self.like)

    def whiten(self, sums: Tensor) -> Tensor:
        """Products with the features, given those with the tiles, (width, k)."""
        return sums


class _Covariances:
    """Features of inducing points by their covariances ``k(X, Z)`` and L (m, m).

    Covariances are in the dtype that features are made in: an error of theirs and one of the
    triangular solution are magnified alike.
    """

    def __init__(self, design: StreamedDesign, root: Tensor) -> None:
        self._design, self._root = design, root.to(design.device)
        basis: Any = design.basis
        self.like = design.X if basis.single else design.X.double()

    def tile(self, rows: slice) -> Tensor:
        """As of features."""
        design: Any = self._design
        return design._weighted(design.basis.covariances(self.like[rows]), rows)

    def unwhiten(self, V: Tensor) -> Tensor:
        """``L^{-T} V``."""
        found = tri_solve(self._root.mT, V.to(self._root), upper=True)
        return found.to(self.like)

    def whiten(self, sums: Tensor) -> Tensor:
        """``L^{-1}`` times the sums."""
        return tri_solve(self._root, sums, upper=False)


def thin_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` for A (p, q) and few columns B (q, k), worked out as ``(B^T A^T)^T``.

    For k from 2 to 10 twice as fast, and of a transposed A in float32 four to twenty times: 0.6 ns
    an entry in place of 2.6 for 2400 rows of 3464 features, of 10.7 for 19000.
    """
    return (B.mT @ A.mT).mT


def block_width(basis: Basis, block: int) -> int:
    """The number of features of a block."""
    columns = basis.block_slice(block)
    return columns.stop - columns.start


def row_chunks(
    n_rows: int, row_bytes: int, cap: int, max_rows: int | None = None
) -> Iterator[slice]:
    """Cut ``0..n_rows`` into slices of at most `max_rows` rows, and as `tile_rows` says."""
    step = tile_rows(MADE_OF * row_bytes, MADE_OF * cap)
    step = step if max_rows is None else min(step, max_rows)
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def add_gram(gram: Tensor, F: Tensor) -> None:
    """Add ``F^T F`` to the lower triangle of `gram`, in tiles; most of the upper is left alone."""
    for start in range(0, F.shape[1], GRAM_TILE):
        left = F[:, start : start + GRAM_TILE].mT
        for other in range(0, start + 1, GRAM_TILE):
            tile = left @ F[:, other : other + GRAM_TILE]
            gram[start : start + GRAM_TILE, other : other + GRAM_TILE] += tile


def mirror(gram: Tensor) -> None:
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
