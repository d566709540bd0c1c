r"""Bases of models linear in their weights: columns of :math:`\Phi`, block by block."""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.defaults import SINGLE_TOLERANCE
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.linalg.cholesky import CholeskyResult, jittered_cholesky
from skgp.linalg.runtime import TensorState


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

    Z (m, d) are up to about 1e4 points; `jitter` is what was added to the diagonal of ``k(Z, Z)``,
    in squared units of f. A NotPositiveDefiniteError says that ``k(Z, Z)`` is singular beyond what
    jitter repairs, e.g. by duplicated points.

    Set-up ``O(m^3)``; all features ``O(n m^2)``, by solving with L. Memory ``8 m^2`` bytes, which a
    pickle leaves out and recomputes. L is ill conditioned, so it is solved with in float64 and the
    result rounded to the dtype of ``X``, unless `in_single_precision`.
    """

    n_blocks = 1

    def __init__(self, kernel, Z: Tensor):
        self.kernel, self.Z, self.single = kernel, Z.to(torch.float64), False
        self.n_features, self.jitter = len(Z), self._cholesky.jitter

    def block_slice(self, block: int) -> slice:
        """All columns."""
        return slice(0, self.n_features)

    @cached_property
    def _cholesky(self) -> CholeskyResult:
        return jittered_cholesky(gram(self.kernel, self.Z))

    @property
    def root(self) -> Tensor:
        """L, lower triangular (m, m)."""
        return self._cholesky.factor

    def covariances(self, X: Tensor) -> Tensor:
        """``k(X, Z)``, the features before L whitens them, in the dtype of X; O(n m d)."""
        return gram_tile(self.kernel, X, self.Z.to(X.device, X.dtype))

    def features(self, X: Tensor, block: int) -> Tensor:
        """All columns, shape (n, m)."""
        dtype = X.dtype if self.single else torch.float64
        cross = self.covariances(X.to(dtype))
        factor = self.root.to(X.device, dtype)
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
        scale = self.root[0, 0].item()  # the prior's standard deviation at the first point
        error = (fast.features(X.float(), 0) - self.features(X.double(), 0)).abs().max()
        return fast if bool(error <= SINGLE_TOLERANCE * scale) else self

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
