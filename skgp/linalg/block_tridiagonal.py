r"""Symmetric matrices of m x m blocks, (d, d) each, of which only three diagonals are not zero.

Such is the precision :math:`Q = L L^\top` of a Gaussian Markov chain of m states, and L has two
diagonals of blocks. Below :math:`C = Q^{-1}`, which is dense; its *band* are the blocks where Q is
not zero, and the band alone determines Q.

========================  ==============================================
Durrande et al. (2019),   code
Adam et al. (2020)
========================  ==============================================
Q                         `BlockTridiagonal`
L                         `BlockCholesky`
subset inverse            `BlockCholesky.inverse_band`
reverse subset inverse    `reverse_band_inverse` (Algorithm 1)
========================  ==============================================

Algorithm 1 of Adam et al. takes, of each *column* i of a matrix of bandwidth r, the first column of
the inverse of :math:`C_{i:i+r, i:i+r}`. That holds for a column of *blocks* as well, with the same
proof, and then needs no entry outside the blocks. Its input is the band of :math:`Q^{-1}` (the
listing has it of Q), and the block taken is of r + 1 rows, not r.

Everything is differentiable in torch. Loops over m cost about 10 microseconds a step (a banded
LAPACK routine is quicker and has no derivative); what can be done for all blocks at once is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skgp.linalg.cholesky import log_det
from skgp.linalg.exceptions import NotPositiveDefiniteError

__all__ = ["BlockCholesky", "BlockTridiagonal", "reverse_band_inverse"]


class BlockTridiagonal(NamedTuple):
    """A symmetric block-tridiagonal matrix, or the band of one that is dense.

    Attributes
    ----------
    diagonal : Tensor of shape (m, d, d)
        Symmetric blocks (i, i).
    lower : Tensor of shape (m - 1, d, d)
        Blocks (i + 1, i), each of which stands in the upper half too. As an argument of a
        function of the whole matrix, its gradient is therefore twice that of the lower half.

    Examples
    --------
    >>> import torch
    >>> eye = torch.eye(1, dtype=torch.float64)
    >>> Q = BlockTridiagonal(2 * eye.expand(3, 1, 1), -eye.expand(2, 1, 1))
    >>> round(float(Q.factor().log_det().exp()), 12)
    4.0
    """

    diagonal: Tensor
    lower: Tensor

    def to_dense(self) -> Tensor:
        """All (m d, m d) entries."""
        below = _dense(torch.zeros_like(self.diagonal), self.lower)
        return _dense(self.diagonal, self.lower) + below.mT

    def matvec(self, v: Tensor) -> Tensor:
        """Product with vectors, (m, d) or (m, d, k), in O(m d^2 k)."""
        v, single = _columns(v)
        out = self.diagonal @ v
        out = out + _shifted_down(self.lower @ v[:-1]) + _shifted_up(self.lower.mT @ v[1:])
        return out[..., 0] if single else out

    def factor(self) -> "BlockCholesky":
        r"""Cholesky factor :math:`L L^\top`.

        Returns
        -------
        BlockCholesky
            O(m d^3), in a loop over m.

        Raises
        ------
        NotPositiveDefiniteError
            Naming the first block that fails.
        """
        factors, below, infos = [], [], []
        pivot = self.diagonal[0]
        for i in range(len(self.diagonal)):
            L, info = torch.linalg.cholesky_ex(pivot)
            factors.append(L)
            infos.append(info)
            if i < len(self.lower):
                B = _right_divide(self.lower[i], L.mT, upper=True)
                below.append(B)
                pivot = self.diagonal[i + 1] - B @ B.mT
        _check_pivots(torch.stack(infos))
        lower = torch.stack(below) if below else self.lower
        return BlockCholesky(torch.stack(factors), lower)


class BlockCholesky(NamedTuple):
    r"""Lower factor of a block-tridiagonal matrix, :math:`Q = L L^\top`.

    Attributes
    ----------
    diagonal : Tensor of shape (m, d, d)
        Lower triangular blocks (i, i).
    lower : Tensor of shape (m - 1, d, d)
        Blocks (i + 1, i).
    """

    diagonal: Tensor
    lower: Tensor

    def to_dense(self) -> Tensor:
        """All (m d, m d) entries of L."""
        return _dense(self.diagonal, self.lower)

    def log_det(self) -> Tensor:
        """Log-determinant of Q, in nats; O(m d)."""
        return log_det(self.diagonal).sum()

    def product(self) -> BlockTridiagonal:
        r""":math:`Q = L L^\top`; O(m d^3)."""
        diagonal = self.diagonal @ self.diagonal.mT + _shifted_down(self.lower @ self.lower.mT)
        return BlockTridiagonal(diagonal, self.lower @ self.diagonal[:-1].mT)

    def solve(self, v: Tensor) -> Tensor:
        r""":math:`Q^{-1} v` of vectors (m, d) or (m, d, k); O(m d^2 k), in two loops over m."""
        return self.solve_upper(self.solve_lower(v))

    def solve_lower(self, v: Tensor) -> Tensor:
        r""":math:`L^{-1} v`; whitens draws of N(0, Q)."""
        v, single = _columns(v)
        right = _triangular_solve(self.diagonal, v, upper=False)
        carry = -_triangular_solve(self.diagonal[1:], self.lower, upper=False)
        out = [right[0]]
        for i in range(len(carry)):
            out.append(torch.addmm(right[i + 1], carry[i], out[-1]))
        return _stacked(out, single)

    def solve_upper(self, v: Tensor) -> Tensor:
        r""":math:`L^{-\top} v`; turns white noise into draws of :math:`N(0, Q^{-1})`."""
        v, single = _columns(v)
        right = _triangular_solve(self.diagonal.mT, v, upper=True)
        carry = self._regression().mT
        out = [right[-1]]
        for i in reversed(range(len(carry))):
            out.append(torch.addmm(right[i], carry[i], out[-1]))
        return _stacked(out[::-1], single)

    def inverse_band(self) -> BlockTridiagonal:
        r"""Band of :math:`C = Q^{-1}` without the rest of it (Takahashi et al., 1973).

        From the last block up, with :math:`G_i = -L_{i+1,i} L_{ii}^{-1}`,

        .. math:: C_{i+1,i} = C_{i+1,i+1} G_i, \qquad
                  C_{ii} = L_{ii}^{-\top} L_{ii}^{-1} + G_i^\top C_{i+1,i}.

        Returns
        -------
        BlockTridiagonal
            O(m d^3), in a loop over m.
        """
        alone = torch.cholesky_inverse(self.diagonal)
        G = self._regression()
        diagonal, lower = [alone[-1]], []
        for i in reversed(range(len(G))):
            lower.append(diagonal[-1] @ G[i])
            diagonal.append(torch.addmm(alone[i], G[i].mT, lower[-1]))
        band = torch.stack(lower[::-1]) if lower else self.lower
        return BlockTridiagonal(torch.stack(diagonal[::-1]), band)

    def _regression(self) -> Tensor:
        """G of `inverse_band`, (m - 1, d, d)."""
        return -_right_divide(self.lower, self.diagonal[:-1], upper=False)


def reverse_band_inverse(band: BlockTridiagonal) -> BlockCholesky:
    r"""Factor of Q from the band of :math:`C = Q^{-1}` (Adam et al., 2020, Algorithm 1).

    The first column of blocks of the inverse of :math:`C_{oo}`, o = (i, i + 1), is
    :math:`(L_{ii}; L_{i+1,i})\, L_{ii}^\top` (eq. 30), which the Schur complement gives:

    .. math:: L_{ii} L_{ii}^\top = (C_{ii} - C_{i+1,i}^\top C_{i+1,i+1}^{-1} C_{i+1,i})^{-1},
              \qquad L_{i+1,i} = -C_{i+1,i+1}^{-1} C_{i+1,i} L_{ii}.

    Parameters
    ----------
    band : BlockTridiagonal
        Of the inverse: the covariances of states and of neighbouring states.

    Returns
    -------
    BlockCholesky
        O(m d^3), all blocks at once. Its derivative is the paper's Algorithm 2, there with
        :math:`\bar c = -c^{-1} H^\top \bar l e^\top c^{-1}` (the listing transposes the wrong
        factor).

    Raises
    ------
    NotPositiveDefiniteError
        If the covariance of two neighbours is not positive definite.
    """
    following = _cholesky(band.diagonal[1:])
    gain = torch.cholesky_solve(band.lower, following)
    schur = band.diagonal[:-1] - band.lower.mT @ gain
    left = torch.cat([schur, band.diagonal[-1:]])
    # The lower factor of an inverse is the inverse of the factor that starts from the last row.
    upper = _cholesky(left.flip(-2, -1)).flip(-2, -1)
    eye = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device).expand_as(left)
    diagonal = torch.linalg.solve_triangular(upper.mT, eye, upper=False)
    return BlockCholesky(diagonal, -gain @ diagonal[:-1])


def _cholesky(A: Tensor) -> Tensor:
    L, info = torch.linalg.cholesky_ex(A)
    _check_pivots(info)
    return L


def _check_pivots(info: Tensor) -> None:
    failed = info.nonzero()
    if len(failed):
        raise NotPositiveDefiniteError(
            f"{len(failed)} of {len(info)} pivots of a block-tridiagonal matrix are not positive "
            f"definite, the first is that of block {int(failed[0])}. Likely causes: states at "
            "times that coincide, or a covariance with a state that is determined by the others; "
            "merge such times, or add a little to the diagonal."
        )


def _dense(diagonal: Tensor, lower: Tensor) -> Tensor:
    m, d, _ = diagonal.shape
    dense = diagonal.new_zeros(m, m, d, d)
    index = torch.arange(m, device=diagonal.device)
    dense = dense.index_put((index, index), diagonal)
    dense = dense.index_put((index[1:], index[:-1]), lower)
    return dense.transpose(1, 2).reshape(m * d, m * d)


def _columns(v: Tensor) -> tuple[Tensor, bool]:
    """Vectors as (m, d, k), and whether k = 1 was not there."""
    return (v[..., None], True) if v.ndim == 2 else (v, False)


def _stacked(blocks: list[Tensor], single: bool) -> Tensor:
    out = torch.stack(blocks)
    return out[..., 0] if single else out


def _shifted_down(blocks: Tensor) -> Tensor:
    """A zero block put before blocks (m - 1, ...)."""
    return torch.cat([torch.zeros_like(blocks[:1]), blocks]) if len(blocks) else blocks.sum(0)


def _shifted_up(blocks: Tensor) -> Tensor:
    """A zero block put behind blocks (m - 1, ...)."""
    return torch.cat([blocks, torch.zeros_like(blocks[:1])]) if len(blocks) else blocks.sum(0)


def _triangular_solve(A: Tensor, B: Tensor, *, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(A, B, upper=upper)


def _right_divide(B: Tensor, A: Tensor, *, upper: bool) -> Tensor:
    """``B A^-1`` for triangular A."""
    return torch.linalg.solve_triangular(A, B, upper=upper, left=False)
