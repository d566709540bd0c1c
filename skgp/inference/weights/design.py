r"""Features of a model linear in its weights, :math:`f = \Phi w`, :math:`w \sim N(0, I)`.

A basis gives the columns of :math:`\Phi` block by block, ``basis.features(X, block)``: Fourier
features (:mod:`skgp.kernels.spectral`), inducing points (:class:`WhitenedInducingBasis`) or both
side by side (:class:`SumBasis`). :class:`StreamedDesign` turns it into products with :math:`\Phi`,
:math:`\Phi^T` and :math:`\Phi^T C \Phi`, tile by tile; the matrix is never stored whole.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.defaults import (
    GRAM_TILE,
    KEPT_FEATURES,
    MADE_OF,
    SINGLE_TOLERANCE,
    TILE_BYTES,
)
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.runtime import TensorState, memory_budget, tile_rows

__all__ = [
    "Basis",
    "StreamedDesign",
    "SumBasis",
    "WhitenedInducingBasis",
    "inducing_parts",
]


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


class WhitenedInducingBasis(TensorState):
    r"""Features :math:`\Phi = k(X, Z) L^{-T}`, :math:`L L^T = k(Z, Z)`, of m inducing points.

    The model with basis :math:`k(\cdot, Z)` and prior precision :math:`S = k(Z, Z)`, in coordinates
    in which the prior of the weights is ``N(0, I)``:
    :math:`\Phi \Phi^T = k(X, Z) k(Z, Z)^{-1} k(Z, X)`.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (m, d)
        Inducing points; m up to about 1e4.

    Attributes
    ----------
    jitter : float
        Added to the diagonal of ``k(Z, Z)``, absolute.

    Raises
    ------
    NotPositiveDefiniteError
        If ``k(Z, Z)`` is singular beyond what jitter repairs, e.g. by duplicated points.

    Notes
    -----
    Set-up ``O(m^3)``; all features ``O(n m^2)``, by solving with L. Memory ``8 m^2`` bytes, which a
    pickle leaves out and recomputes. L is ill conditioned, so it is solved with in float64 and the
    result rounded to the dtype of ``X``, unless `in_single_precision`.
    """

    n_blocks = 1

    def __init__(self, kernel, Z: Tensor):
        self.kernel, self.Z, self.single = kernel, Z.to(torch.float64), False
        self.n_features = len(Z)
        self._factor, self.jitter = jittered_cholesky(gram(kernel, self.Z))  # (m, m)

    def block_slice(self, block: int) -> slice:
        """All columns."""
        return slice(0, self.n_features)

    def features(self, X: Tensor, block: int) -> Tensor:
        """All columns, shape (n, m)."""
        dtype = X.dtype if self.single else torch.float64
        cross = gram_tile(self.kernel, X.to(dtype), self.Z.to(X.device, dtype))
        factor = self._factor.to(X.device, dtype)
        whitened = torch.linalg.solve_triangular(factor.mT, cross, upper=True, left=False)
        return whitened.to(X.dtype)

    def unexplained(self, X: Tensor) -> Tensor:
        r""":math:`k(x, x) - \phi(x)^T \phi(x)`, what the points leave of the prior; shape (p,)."""
        return (gram_diag(self.kernel, X) - self.features(X, 0).square().sum(1)).clamp_(min=0.0)

    def unexplained_covariance(self, X: Tensor) -> Tensor:
        r""":math:`K_{**} - Q_{**}`, the joint law of what they leave; shape (p, p)."""
        Phi = self.features(X, 0)
        left = gram(self.kernel, X) - Phi @ Phi.mT
        left.diagonal().clamp_(min=0.0)
        return left

    def in_single_precision(self, X: Tensor) -> "WhitenedInducingBasis":
        """A basis that takes float32 inputs in float32 if that costs no accuracy, or itself.

        Judged by the features of a few dozen inputs X: float32 is four times as fast, and fine
        where neither ``k(Z, Z)`` is ill conditioned nor the length scales are far below the inputs.
        """
        fast = self._copy(single=True)
        scale = self._factor[0, 0].item()  # the prior's standard deviation at the first point
        error = (fast.features(X.float(), 0) - self.features(X.double(), 0)).abs().max()
        return fast if bool(error <= SINGLE_TOLERANCE * scale) else self

    def _copy(self, *, single: bool) -> "WhitenedInducingBasis":
        """The same basis, factor shared, in another precision."""
        other = WhitenedInducingBasis.__new__(WhitenedInducingBasis)
        other.__dict__.update(self.__dict__, single=single)
        return other

    def _lasting(self) -> dict:
        lasting = super()._lasting()
        del lasting["_factor"]
        return lasting

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._factor, self.jitter = jittered_cholesky(gram(self.kernel, self.Z))

    def __deepcopy__(self, memo: dict) -> "WhitenedInducingBasis":
        return self  # nothing changes it


class SumBasis(TensorState):
    """Bases of the summands of a kernel side by side, whose Gram matrices add."""

    def __init__(self, parts: list[Basis]):
        self.parts = parts
        self.n_features = sum(part.n_features for part in parts)
        self.n_blocks = sum(part.n_blocks for part in parts)

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        first, part, block = self._place(block)
        columns = part.block_slice(block)
        return slice(first + columns.start, first + columns.stop)

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block, shape (n, width)."""
        _, part, block = self._place(block)
        return part.features(X, block)

    def _place(self, block: int) -> tuple[int, Basis, int]:
        """First column of a block's part, the part, and the block within it."""
        first = 0
        for part in self.parts:
            if block < part.n_blocks:
                return first, part, block
            first, block = first + part.n_features, block - part.n_blocks
        raise IndexError(f"block {block} is beyond the last.")


def inducing_parts(basis: Basis) -> list[WhitenedInducingBasis]:
    """The inducing points among the parts of a basis, which leave something of the prior."""
    if isinstance(basis, WhitenedInducingBasis):
        return [basis]
    return [points for part in getattr(basis, "parts", ()) for points in inducing_parts(part)]


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
        if block not in self._kept:
            width = block_width(self.basis, block)
            n_bytes = self.n_rows * width * self.dtype.itemsize
            if n_bytes > self._bytes_left:
                return self._regenerate(block, rows)
            whole = self.X.new_empty(self.n_rows, width)
            for tile in self.tiles(width):
                whole[tile] = self._regenerate(block, tile)
            self._kept[block] = whole
            self._bytes_left -= n_bytes
        return self._kept[block][rows]

    def columns(self, blocks: range, rows: slice | Tensor = slice(None)) -> Tensor:
        """The features of several neighbouring blocks side by side."""
        if len(blocks) == 1:
            return self.features(blocks[0], rows)
        return torch.cat([self.features(block, rows) for block in blocks], dim=1)

    def matmul(self, V: Tensor) -> Tensor:
        """``W^(1/2) Phi V`` of shape (n, k) for `V` of shape (m, k), in float64."""
        out = torch.zeros(self.n_rows, V.shape[1], dtype=torch.float64, device=self.device)
        for block, part, rows in self._tiles_of_blocks():
            out[rows] += self.features(block, rows) @ V[part].to(self.X)
        return out

    def rmatmul(self, R: Tensor) -> Tensor:
        """``Phi^T W^(1/2) R`` of shape (m, k) for `R` of shape (n, k), in float64."""
        R = R.to(self.X)
        out = torch.zeros(self.n_features, R.shape[1], dtype=torch.float64, device=self.device)
        for block, part, rows in self._tiles_of_blocks():
            out[part] += self.features(block, rows).mT @ R[rows]
        return out

    def gram_matmul(self, V: Tensor) -> Tensor:
        """``Phi^T W Phi V`` of shape (m, k), in float64; features are generated once."""
        return self.curvature_matmul(V, None)[0]

    def curvature_matmul(self, V: Tensor, curvature: Tensor | None) -> tuple[Tensor, Tensor]:
        r"""Product of each column with a Hessian of its own, from features generated once.

        Parameters
        ----------
        V : Tensor of shape (m, k)
        curvature : Tensor of shape (n, k) or None
            Column j is the diagonal of :math:`C_j`; None is the identity.

        Returns
        -------
        product : Tensor of shape (m, k)
            :math:`\Phi^T C_j \Phi v_j`, float64.
        image : Tensor of shape (n, k)
            :math:`\Phi V`, float64. With sample weights :math:`\Phi` is ``W^(1/2) Phi``.
        """
        V, k = V.to(self.X), V.shape[1]
        out = torch.zeros(self.n_features, k, dtype=torch.float64, device=self.device)
        image = torch.zeros(self.n_rows, k, dtype=torch.float64, device=self.device)
        columns = [self.basis.block_slice(block) for block in self.blocks]
        # Holds all m features of a slice of rows, at most 8 tiles: each slice draws the
        # frequencies of every block anew, which only many rows repay.
        for rows in self.tiles(self.n_features, 8 * TILE_BYTES):
            Phi = [self.features(block, rows) for block in self.blocks]
            for F, part in zip(Phi, columns, strict=True):
                image[rows] += F @ V[part]  # (rows, k)
            fitted = image[rows].to(self.dtype)
            if curvature is not None:
                fitted = fitted * curvature[rows].to(self.X)
            for F, part in zip(Phi, columns, strict=True):
                out[part] += F.mT @ fitted  # (width, k)
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

    def _regenerate(self, block: int, rows: slice | Tensor) -> Tensor:
        F = self.basis.features(self.X[rows], block)
        return F if self._root_weight is None else F * self._root_weight[rows]


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
