"""The inverse of A = K + D, exact or by conjugate gradients.

`solve` is for targets; `explained` and `explained_jointly` are what the data take from the variance
of new rows.
"""

from typing import Any

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.kernels import gram_tile
from skgp.kernels.operators import RowOperator
from skgp.linalg.cg import block_cg
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve
from skgp.linalg.preconditioners import LowRankPreconditioner
from skgp.linalg.runtime import Callback, asks_for_gradients


class ExactInverse:
    """By the lower Cholesky factor (n, n) of A."""

    def __init__(self, factor: Tensor) -> None:
        self._L = factor

    def solve(self, B: Tensor, callback: Callback | None = None) -> Tensor:
        r""":math:`A^{-1} B` for B (n, k)."""
        return cho_solve(self._L, B)

    def explained(self, K: Tensor) -> Tensor:
        r"""Diagonal (t,) of :math:`K^T A^{-1} K` for K (n, t)."""
        return tri_solve(self._L, K, upper=False).square().sum(0)

    def explained_jointly(self, K: Tensor) -> Tensor:
        r""":math:`K^T A^{-1} K`, (t, t)."""
        V = tri_solve(self._L, K, upper=False)
        return V.T @ V


class IterativeInverse:
    r"""By conjugate gradients preconditioned by F'F + D; what is explained falls short.

    The memory of F (r, n) is that of the preconditioner.

    With a residual r the variance of a row is too great by
    :math:`r^T A^{-1} r \le |r|^2 / \min D`, at most 0.01 min D.
    """

    def __init__(self, operator: RowOperator, D: Tensor, low_rank: Tensor) -> None:
        self._operator, self._D, self._dtype = operator, D, operator.dtype
        self._precondition = LowRankPreconditioner(low_rank, D, overwrite=True)

    def solve(self, B: Tensor, callback: Callback | None = None) -> Tensor:
        r""":math:`A^{-1} B` for B (n, k)."""
        return self._solve(B, defaults.SOLVED[self._dtype], callback)[0]

    def explained(self, K: Tensor) -> Tensor:
        """As `ExactInverse.explained`; never more. Its gradient in K is 2 A^-1 K."""
        # k'A^-1 k = x'k + x'r + e'A e with the error e of x and its residual r = k - A x.
        if not asks_for_gradients(K):
            X, left = self._solve_rows(K)
            return (X * (K + left)).sum(0)
        fixed = K.detach()
        X, left = self._solve(fixed, defaults.SOLVED[self._dtype])  # its error: the gradient's
        return 2 * (X * K).sum(0) - (X * (fixed - left)).sum(0)

    def explained_jointly(self, K: Tensor) -> Tensor:
        """As `ExactInverse.explained_jointly`, less a matrix without negative eigenvalues."""
        X, left = self._solve_rows(K)
        joint = X.T @ (K + left)
        return (joint + joint.T) / 2

    def _solve_rows(self, K: Tensor) -> tuple[Tensor, Tensor]:
        size = torch.linalg.vector_norm(K, dim=0).clamp_min(torch.finfo(K.dtype).tiny)
        tol = defaults.VARIANCE_TOL**0.5 * self._D.min() / size
        return self._solve(K, tol.clamp(defaults.SOLVED[self._dtype], 0.1))

    def _solve(
        self, B: Tensor, tol: float | Tensor, callback: Callback | None = None
    ) -> tuple[Tensor, Tensor]:
        """X (n, k), and B - A X."""
        precondition = lambda V: self._precondition(V.T).T  # noqa: E731
        found = block_cg(self._matmul, B, preconditioner=precondition, tol=tol, callback=callback)
        return found.solution, found.left

    def _matmul(self, V: Tensor) -> Tensor:
        return self._operator.matmul(V.T.to(self._dtype)).T.to(V) + self._D[:, None] * V


def nystrom_root(kernel: Any, M: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor:
    """Lower Cholesky factor (r, r) of K(M, M), with the jitter that products in `dtype` ask for."""
    K = gram_tile(kernel, M, M, theta)
    if len(M):
        K.diagonal().add_(defaults.MIXTURE_JITTER[dtype] * K.diagonal().mean())
    return jittered_cholesky(K).factor


Inverse = ExactInverse | IterativeInverse
