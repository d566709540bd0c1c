r"""Inducing points as a basis with unit prior: the features that the weight-space solvers share.

.. math:: \Phi = k(X, Z) L^{-T}, \quad L L^T = k(Z, Z) \quad\Rightarrow\quad
          \Phi \Phi^T = k(X, Z)\, k(Z, Z)^{-1} k(Z, X).

It is the model of inducing points (basis :math:`k(\cdot, Z)`, prior precision
:math:`S = k(Z, Z)`) in coordinates in which the prior of the weights is ``N(0, I)``.
"""

import torch
from torch import Tensor

from skgp.inference.weights.design import Basis
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.tensor_state import TensorState

# Largest error of a float32 feature, relative to the prior's standard deviation, that passes.
_SINGLE_TOLERANCE = 1e-3


class WhitenedInducingBasis(TensorState):
    r"""Features :math:`k(X, Z) L^{-T}` of m inducing points, for m up to about 1e4.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (m, d)
        Inducing points.
    block_size : int, optional
        Features of a block; all m by default. Several blocks evaluate the kernel and solve with
        parts of L about ``n_blocks / 2`` times.
    single : bool, default=False
        Evaluate features in the dtype of X instead of float64: see :meth:`in_single_precision`.

    Attributes
    ----------
    n_features, n_blocks : int
    jitter : float
        Added to the diagonal of ``k(Z, Z)``, absolute.

    Raises
    ------
    NotPositiveDefiniteError
        If ``k(Z, Z)`` is singular beyond what jitter repairs, e.g. by duplicated points.
    ValueError
        If `block_size` is not positive.

    Notes
    -----
    Set-up ``O(m^3)``; all features ``O(n m^2)``, by solving with L. Memory ``8 m^2`` bytes, which a
    pickle leaves out and recomputes. L is ill conditioned, so it is solved with in float64 and the
    result rounded to the dtype of ``X``.
    """

    def __init__(self, kernel, Z: Tensor, *, block_size: int | None = None, single: bool = False):
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be a positive integer or None; got {block_size!r}.")
        self.kernel = kernel
        self.Z = Z.to(torch.float64)
        self.single = single
        self.n_features = Z.shape[0]
        self.block_features = min(block_size or self.n_features, self.n_features)
        self.n_blocks = -(-self.n_features // self.block_features)
        self._factor, self.jitter = jittered_cholesky(gram(kernel, self.Z))

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        start = block * self.block_features
        return slice(start, min(start + self.block_features, self.n_features))

    def features(self, X: Tensor, block: int, theta: Tensor | None = None) -> Tensor:
        """Return the columns of a block.

        Parameters
        ----------
        X : Tensor of shape (n, d)
        block : int
        theta : Tensor of shape (n_theta,), optional
            Log hyper-parameters to use instead of the kernel's own, differentiably. Factors
            ``k(Z, Z)`` anew at every call, ``O(m^3)``.

        Returns
        -------
        Tensor of shape (n, width)
        """
        columns = self.block_slice(block)
        # Forward substitution: these columns involve the first inducing points only.
        Z = self.Z[: columns.stop]
        dtype = X.dtype if self.single else torch.float64
        rows, points = X.to(dtype), Z.to(X.device, dtype)
        if theta is None:
            factor = self._factor[: columns.stop, : columns.stop]
            cross = gram_tile(self.kernel, rows, points)
        else:
            factor, _ = jittered_cholesky(gram(self.kernel, Z, theta=theta))
            cross = gram(self.kernel, rows, points, theta=theta)
        factor = factor.to(X.device, dtype)
        whitened = torch.linalg.solve_triangular(factor.mT, cross, upper=True, left=False)
        return whitened[:, columns].to(X.dtype)

    def unexplained(self, X: Tensor) -> Tensor:
        r""":math:`k(x, x) - \phi(x)^T \phi(x)`, what the points leave of the prior; shape (p,)."""
        explained = sum(self.features(X, b).square().sum(1) for b in range(self.n_blocks))
        return (gram_diag(self.kernel, X) - explained).clamp_(min=0.0)

    def unexplained_covariance(self, X: Tensor) -> Tensor:
        r""":math:`K_{**} - Q_{**}`, the joint law of what they leave; shape (p, p)."""
        left = gram(self.kernel, X)
        for block in range(self.n_blocks):
            features = self.features(X, block)  # (p, width)
            left -= features @ features.mT
        left.diagonal().clamp_(min=0.0)
        return left

    def in_single_precision(self, X: Tensor) -> "WhitenedInducingBasis":
        """Return a basis that takes float32 rows in float32 if that costs no accuracy, or itself.

        It is judged by the features of some rows: float32 is four times as fast, and fine where
        neither ``k(Z, Z)`` is ill conditioned nor the length scales are far below the inputs.

        Parameters
        ----------
        X : Tensor of shape (n, d)
            A few dozen rows.
        """
        fast = self._copy(single=True)
        scale = self._factor[0, 0].item()  # the prior's standard deviation at the first point
        for block in range(self.n_blocks):
            error = fast.features(X.float(), block) - self.features(X.double(), block)
            if not bool(error.abs().max() <= _SINGLE_TOLERANCE * scale):
                return self
        return fast

    def in_double_precision(self) -> "WhitenedInducingBasis":
        """Return the basis with features evaluated in float64."""
        return self._copy(single=False) if self.single else self

    def _copy(self, *, single: bool) -> "WhitenedInducingBasis":
        """The same basis, factor shared, in another precision."""
        other = WhitenedInducingBasis.__new__(WhitenedInducingBasis)
        other.__dict__.update(self.__dict__, single=single)
        return other

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        del state["_factor"]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._factor, self.jitter = jittered_cholesky(gram(self.kernel, self.Z))

    def __deepcopy__(self, memo: dict) -> "WhitenedInducingBasis":
        return self  # nothing changes it


class SumBasis:
    r"""Bases of the summands of a kernel side by side, whose Gram matrices add.

    Parameters
    ----------
    parts : list of Basis
    """

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
