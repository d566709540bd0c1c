r"""Low-rank approximations of kernel matrices and the preconditioner built on them.

References
----------
.. [1] Chen, Epperly, Tropp and Webber (2024), Randomly pivoted Cholesky: practical approximation
   of a kernel matrix with few entry evaluations.
.. [2] Frangella, Tropp and Udell (2023), Randomized Nystrom preconditioning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.linalg.cholesky import tri_solve
from skgp.linalg.defaults import BLOCK_COPIES
from skgp.linalg.runtime import tile_rows


@dataclass(frozen=True)
class LowRank:
    """Partial Cholesky factorisation ``K ~= factor @ factor.T`` with ``K - F F^T`` psd."""

    factor: Tensor  # (n, r)
    pivots: Tensor  # (r,), int64: rows chosen; K[pivots] is reproduced up to rounding
    residual_diag: Tensor  # (n,), diag(K - F F^T), clipped at zero

    @property
    def residual_trace(self) -> float:
        """``tr(K - F F^T)``: bounds the error of the approximation in trace norm."""
        return float(self.residual_diag.sum())


def rp_cholesky(
    columns: Callable[[Tensor], Tensor],  # pivot indices (b,) -> K[:, pivots] (n, b)
    diag: Tensor,  # (n,), of K; its dtype is that of the work: use float64
    rank: int,  # at most; fewer columns once the residual trace is below `tol` times that of K
    *,
    generator: torch.Generator,
    block_size: int = 128,
    tol: float = 0.0,
) -> LowRank:
    """Randomly pivoted partial Cholesky [1]_ of a positive semi-definite matrix, in blocks.

    Pivots are drawn with probability proportional to the diagonal of what is left of K, which
    spares the rows that are already explained. A block's pivots are thinned by a greedy Cholesky
    of their own residual matrix, so that near-duplicates within a block do not enter. Blocks are
    smaller where the memory budget has no room for `block_size` columns of K and of what is left.
    ``O(n r^2)`` flops, ``n r`` kernel evaluations and ``n r`` numbers.
    """
    n = diag.shape[0]
    rank = min(rank, n)
    column = BLOCK_COPIES * diag.element_size() * n
    block_size = tile_rows(column, column * block_size) if n else block_size
    F = diag.new_empty((rank, n)).T  # column by column: what is not reached is never touched
    residual = diag.clone()
    trace = float(diag.sum())
    floor = 16 * torch.finfo(diag.dtype).eps * float(diag.max()) if n else 0.0
    pivots: list[Tensor] = []
    r = 0
    while r < rank:
        weights = torch.where(residual > floor, residual, torch.zeros_like(residual))
        candidates = int((weights > 0).sum())
        if candidates == 0 or float(residual.sum()) <= tol * trace:
            break
        b = min(block_size, rank - r, candidates)
        # torch.multinomial takes at most 2^24 categories: the first of them.
        share = weights[: 2**24].to(generator.device)
        drawn = torch.multinomial(share, b, generator=generator).to(diag.device)
        G = columns(drawn) - F[:, :r] @ F[drawn, :r].T  # (n, b) residual columns
        kept, L = _greedy_cholesky(G[drawn], floor)
        if len(kept) == 0:
            residual[drawn] = 0.0
            continue
        chosen = drawn[kept]
        new = tri_solve(L, G[:, kept].T, upper=False).T
        k = new.shape[1]
        F[:, r : r + k] = new
        residual = (residual - new.square().sum(1)).clamp_(min=0.0)
        residual[chosen] = 0.0
        pivots.append(chosen)
        r += k
    chosen_all = torch.cat(pivots) if pivots else diag.new_empty(0, dtype=torch.int64)
    return LowRank(F[:, :r], chosen_all, residual)


def _greedy_cholesky(A: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Pivoted Cholesky of a small psd matrix; keeps pivots above 0.1% of what they were.

    The rows kept (k,), in the order of elimination, and the lower factor (k, k) of their block.
    """
    b = A.shape[0]
    start = A.diagonal().clone()
    left = start.clone()
    rows = A.new_zeros((b, b))  # column j holds the j-th Cholesky column over all b rows
    kept: list[int] = []
    for j in range(b):
        # A pivot that its block mates explain to 99.9% adds little and conditions L badly.
        eligible = left > torch.clamp(1e-3 * start, min=floor)
        if not bool(eligible.any()):
            break
        p = int(torch.where(eligible, left, torch.full_like(left, -1.0)).argmax())
        column = (A[:, p] - rows[:, :j] @ rows[p, :j]) / left[p].sqrt()
        rows[:, j] = column
        left = left - column.square()
        left[p] = -1.0
        kept.append(p)
    index = torch.tensor(kept, dtype=torch.int64, device=A.device)
    k = len(kept)
    return index, rows[index, :k].tril()


class NystromPreconditioner:
    r"""Application of :math:`(F F^T + \sigma^2 I)^{-1}` by the Woodbury identity [2]_.

    .. math:: P^{-1} V = \sigma^{-2} (V - Q Q^T V), \qquad
              Q = F L^{-T}, \quad L L^T = \sigma^2 I + F^T F.

    The memory of F (n, r) becomes that of Q. Set-up ``O(n r^2)``; ``4 n r k`` flops an application
    to k columns. The subtraction cancels all but a fraction :math:`\sigma^2 / \lambda` of V along
    an eigenvector with eigenvalue :math:`\lambda`, so F should be float64.
    """

    def __init__(self, factor: Tensor, noise: float):
        r = factor.shape[1]
        B = factor.T @ factor
        B.diagonal().add_(noise)
        L = torch.linalg.cholesky(B)
        self.noise = float(noise)
        # log|FF^T + s2 I| = (n - r) log s2 + log|B|
        self.log_det = float(2 * L.diagonal().log().sum() + (factor.shape[0] - r) * math.log(noise))
        self._Q = factor
        for start in range(0, factor.shape[0], 8192):
            rows = factor[start : start + 8192]
            rows.copy_(tri_solve(L, rows.T, upper=False).T)

    def __call__(self, V: Tensor) -> Tensor:
        """Return :math:`P^{-1} V` for V of shape (n, k)."""
        return (V - self._Q @ (self._Q.T @ V)) / self.noise


class LowRankPreconditioner:
    r"""Diagonal plus low rank, :math:`P = F^T F + D`, for right-hand sides in rows.

    With F (r, n), where r may be 0, D the positive diagonal (n,), :math:`A = F D^{-1/2}` and
    :math:`C = I + A A^T = L L^T`,

    .. math:: P^{-1} = D^{-1/2} (I - Q^T Q) D^{-1/2}, \quad Q = L^{-1} A, \qquad
              \log|P| = \log|D| + \log|C|.

    Set-up ``3 n r^2`` flops, an application to k rows ``4 n r k``; memory ``2 n r`` numbers. With
    `overwrite` that of F becomes that of Q, and there is the inverse and nothing else. C is formed
    and factored in float64, whatever the dtype of F.
    """

    def __init__(self, factor: Tensor, noise: Tensor, *, overwrite: bool = False):
        self._F, self._root = factor, noise.sqrt()
        A = factor.div_(self._root) if overwrite else factor / self._root
        C = torch.eye(len(A), dtype=torch.float64, device=A.device)
        for piece in A.split(8192, dim=1):
            C.addmm_(piece.double(), piece.double().T)
        L = torch.linalg.cholesky(C)
        self.log_det = float(noise.double().log().sum() + 2 * L.diagonal().log().sum())
        #: Inverse of L, (r, r) in float64.
        self.inverse_root = tri_solve(L, torch.eye(len(L)).to(L), upper=False)
        root = without_subnormals(self.inverse_root, A.dtype)
        #: Q, (r, n).
        self.Q = A
        if not overwrite:
            self.Q = without_subnormals(root @ A)
            return
        for piece in A.split(8192, dim=1):
            piece.copy_(without_subnormals(root @ piece))

    def __call__(self, V: Tensor) -> Tensor:
        """``V P^{-1}`` for V of shape (k, n).

        The difference cancels where F F^T is large: in float32 use :meth:`probes` for what must
        be exact.
        """
        W = V / self._root
        return torch.addmm(W, W @ self.Q.T, self.Q, alpha=-1) / self._root

    def probes(self, e1: Tensor, e2: Tensor) -> tuple[Tensor, Tensor]:
        r"""Vectors z (k, n) of covariance P, and v, what :math:`P^{-1}` makes of them.

        .. math:: z = F^T e_1 + D^{1/2} e_2, \qquad
                  P^{-1} z = D^{-1/2} \{e_2 + A^T C^{-1} (e_1 - A e_2)\},

        from independent entries of mean 0 and variance 1 in e1 (k, r) and e2 (k, n). It cancels
        nothing: :math:`e_1 - A e_2` is of the size of its terms.
        """
        z = e1 @ self._F + self._root * e2
        inner = e1.double() - ((e2 / self._root) @ self._F.T).double()
        inner = (inner @ self.inverse_root.T).to(e2)
        return z, (e2 + inner @ self.Q) / self._root

    def solve_factor(self, left: Tensor) -> Tensor:
        r""":math:`B F P^{-1} = (B C^{-1}) F D^{-1}` for B (k, r) in float64: (k, n), of F's dtype.

        Nothing cancels, and of all that has n columns there is one product.
        """
        combined = left @ self.inverse_root.T @ self.inverse_root
        return without_subnormals(combined, self.Q.dtype) @ (self._F / self._root.square())

    def explained(self) -> Tensor:
        r""":math:`F P^{-1} F^T = I - C^{-1}`, (r, r) in float64."""
        C_inverse = self.inverse_root.T @ self.inverse_root
        return torch.eye(len(C_inverse)).to(C_inverse) - C_inverse

    def inverse_diag(self) -> Tensor:
        """Diagonal of the inverse of P, (n,), in float64."""
        lost = torch.linalg.vector_norm(self.Q, dim=0, dtype=torch.float64).square()
        return (1 - lost) / self._root.double().square()


def without_subnormals(A: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A in a dtype, its entries below eps^2 times the largest set to 0.

    They are lost in any sum with the others, but subnormal numbers, which they or their products
    may be, take a processor a hundred times as long. Factors of a matrix of far rows are full of
    them.
    """
    A = A if dtype is None else A.to(dtype)
    if A.numel() == 0:
        return A
    largest = float(torch.linalg.vector_norm(A, math.inf))
    return torch.nn.functional.hardshrink(A, torch.finfo(A.dtype).eps ** 2 * largest)
