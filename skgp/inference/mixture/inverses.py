r"""The inverse of a training matrix :math:`A = K + D`, exact or by conjugate gradients.

Both have ``solve``, for targets, and ``explained`` and ``explained_jointly``, what the data take
from the variance of new rows.
"""

from typing import Any

import torch
from torch import Tensor

from skgp.kernels import gram_tile
from skgp.kernels.operators import RowOperator
from skgp.linalg.cg import block_cg
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve
from skgp.linalg.preconditioners import LowRankPreconditioner

__all__ = ["ExactInverse", "IterativeInverse", "nystrom_factor"]

# Relative residual that products in this precision attain.
_TOL = {torch.float32: 1e-5, torch.float64: 1e-8}
_VARIANCE_TOL = 0.01  # of the noise variance: the most that a variance may exceed the exact one
_JITTER = {torch.float32: 1e-5, torch.float64: 1e-8}  # of K_mm, relative to its mean diagonal


class ExactInverse:
    """By the lower Cholesky factor (n, n) of A."""

    def __init__(self, factor: Tensor) -> None:
        self._L = factor

    def solve(self, B: Tensor) -> Tensor:
        r""":math:`A^{-1} B` for B (n, k)."""
        return cho_solve(self._L, B)

    def explained(self, K: Tensor) -> Tensor:
        r"""Diagonal (t,) of :math:`K^T A^{-1} K` for K (n, t)."""
        return self._half(K).square().sum(0)

    def explained_jointly(self, K: Tensor) -> Tensor:
        r""":math:`K^T A^{-1} K`, (t, t)."""
        V = self._half(K)
        return V.T @ V

    def _half(self, K: Tensor) -> Tensor:
        return tri_solve(self._L, K, upper=False)


class IterativeInverse:
    r"""By preconditioned conjugate gradients; what is explained falls short, by little.

    With a residual r the variance of a row is too great by
    :math:`r^T A^{-1} r \le |r|^2 / \min D`, at most 0.01 min D.

    Parameters
    ----------
    operator : RowOperator
        K, its hyper-parameters set.
    D : Tensor of shape (n,)
    low_rank : Tensor of shape (r, n)
        F of the preconditioner :math:`F^T F + D`.

    Warns
    -----
    NumericalWarning
        As :func:`~skgp.linalg.cg.block_cg`.
    """

    def __init__(self, operator: RowOperator, D: Tensor, low_rank: Tensor) -> None:
        self._operator, self._D, self._dtype = operator, D, operator.dtype
        self._precondition = LowRankPreconditioner(low_rank, D)

    def solve(self, B: Tensor) -> Tensor:
        r""":math:`A^{-1} B` for B (n, k)."""
        return self._solve(B, _TOL[self._dtype])

    def explained(self, K: Tensor) -> Tensor:
        """As `ExactInverse.explained`; never more."""
        return (self._solve_rows(K) * K).sum(0)

    def explained_jointly(self, K: Tensor) -> Tensor:
        """As `ExactInverse.explained_jointly`, less a matrix without negative eigenvalues."""
        X = self._solve_rows(K)
        cross = X.T @ K
        # K'A^-1 K = K'X + X'K - X'A X + E'A E with the error E of X.
        return cross + cross.T - X.T @ self._matmul(X)

    def _solve_rows(self, K: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(K, dim=0).clamp_min(torch.finfo(K.dtype).tiny)
        tol = _VARIANCE_TOL**0.5 * self._D.min() / size
        return self._solve(K, tol.clamp(_TOL[self._dtype], 0.1))

    def _solve(self, B: Tensor, tol: float | Tensor) -> Tensor:
        return block_cg(
            self._matmul, B, preconditioner=lambda V: self._precondition(V.T).T, tol=tol
        ).solution

    def _matmul(self, V: Tensor) -> Tensor:
        return self._operator.matmul(V.T.to(self._dtype)).T.to(V) + self._D[:, None] * V


def nystrom_factor(kernel: Any, theta: Tensor, M: Tensor, X: Tensor, dtype: torch.dtype) -> Tensor:
    r"""F (r, n) of which :math:`F^T F` is the Nystrom approximation of K(X, X) by pivots M (r, d).

    `dtype` is that of the products that it preconditions.
    """
    if len(M) == 0:
        return X.new_empty(0, len(X))
    K = gram_tile(kernel, M, M, theta)
    K.diagonal().add_(_JITTER[dtype] * K.diagonal().mean())
    L = jittered_cholesky(K).factor
    return tri_solve(L, gram_tile(kernel, M, X, theta), upper=False)
