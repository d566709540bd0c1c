"""Algebra of many small matrices at once: matrices ``(d, e, *batch)``, vectors ``(d, *batch)``.

The batch comes last and contiguous. Products of small matrices are unrolled into a few
multiply-adds over the whole batch, which keeps vector units (or a GPU) busy where a batched matrix
product would spend its time in the loop over the batch; larger ones go to ``torch.matmul``. That
result lies batch-first in memory under a batch-last view, and further products take it as it is.

References
----------
.. [1] Osborne (1960), On pre-conditioning of matrices, Journal of the ACM 7.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from skgp.linalg.defaults import LARGE_ENTRY, SWEEPS, UNROLLED


def matmul(A: Tensor, B: Tensor) -> Tensor:
    """Product ``A B``, (d, f, *batch), of (d, e, *batch) and (e, f, *batch); batches broadcast."""
    if A.shape[1] > UNROLLED:
        return _batch_last(_batch_first(A) @ _batch_first(B))
    out = A[:, 0, None] * B[0]
    for k in range(1, A.shape[1]):
        out.addcmul_(A[:, k, None], B[k])
    return out


def matvec(A: Tensor, v: Tensor) -> Tensor:
    """Product ``A v``, of shape ``(d, *batch)``; the batch shapes broadcast."""
    if A.shape[1] > UNROLLED:
        return matmul(A, v[:, None])[:, 0]
    out = A[:, 0] * v[0]
    for k in range(1, A.shape[1]):
        out.addcmul_(A[:, k], v[k])
    return out


def inner(u: Tensor, v: Tensor) -> Tensor:
    """Inner products ``u' v``, of shape ``batch``."""
    return matvec(u[None], v)[0]


def outer(u: Tensor, v: Tensor) -> Tensor:
    """Outer products ``u v'``, of shape ``(d, e, *batch)``."""
    return u[:, None] * v[None]


def symmetrize(A: Tensor) -> Tensor:
    """The symmetric part ``(A + A') / 2``, which removes what rounding has left of the other."""
    return (A + A.transpose(0, 1)).mul_(0.5)


def identity_plus(M: Tensor) -> Tensor:
    """``I + M``, in place."""
    M.diagonal(dim1=0, dim2=1).add_(1.0)
    return M


def inverse_and_log_det(A: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse (d, d, *batch) and log-determinant (*batch) of matrices with positive determinants.

    Cofactors up to d = 3, LU with pivoting beyond. Where entries are large the matrices are
    balanced first: rows of different units, as of a level and a slope, mislead the choice of
    pivots, where cofactors do not heed units. A determinant that is not positive gives a
    log-determinant of NaN or -inf and no error: the callers look at their result once.
    """
    if len(A) > 3 and float(A.abs().amax()) > LARGE_ENTRY:
        scale = _balance(A)
        inverse, log_det = _by_lu(A * scale / scale[:, None])
        return inverse * scale[:, None] / scale, log_det
    if len(A) > 3:
        return _by_lu(A)
    if len(A) == 1:
        return A.reciprocal(), A[0, 0].log()
    adjugate = _adjugate_2(A) if len(A) == 2 else _adjugate_3(A)
    det = inner(A[0], adjugate[:, 0])
    return adjugate.div_(det), det.log()


def _by_lu(A: Tensor) -> tuple[Tensor, Tensor]:
    """`inverse_and_log_det` by LU."""
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    inverse, log_det = _solve_by_lu(_batch_first(A), eye)
    return _batch_last(inverse), log_det


def solve_and_log_det(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Solutions ``A^-1 B``, (c, d, k), and log-determinants (c,), of batches that come first.

    Of A (c, d, d) and B (c, d, k); all else as of `inverse_and_log_det`.
    """
    if A.shape[1] <= 3 or max(map(abs, map(float, A.aminmax()))) > LARGE_ENTRY:
        inverse, log_det = inverse_and_log_det(_batch_last(A))
        return _batch_first(inverse) @ B, log_det
    return _solve_by_lu(A, B)


def _solve_by_lu(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    factor, pivots, _ = torch.linalg.lu_factor_ex(A)
    pivot = factor.diagonal(dim1=-2, dim2=-1)
    swaps = pivots != torch.arange(1, A.shape[-1] + 1, device=A.device)
    # Of the sign of the determinant: swaps, and pivots below 0.
    odd = (swaps ^ (pivot < 0)).sum(-1).remainder(2)
    log_det = torch.where(odd == 0, pivot.abs().log().sum(-1), torch.nan)
    return torch.linalg.lu_solve(factor, pivots, B), log_det


def batch_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Matrices (c, d, e) and vectors (c, d) from batches that come last."""
    return tuple(t.movedim(-1, 0) for t in tensors)


def batch_last(vectors: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The way back of vectors (c, d) and matrices (c, d, e), contiguous."""
    return vectors.movedim(0, -1).contiguous(), matrices.movedim(0, -1).contiguous()


def square_root(A: Tensor) -> Tensor:
    """Lower triangular R with ``R R' = A``, for positive semi-definite A (d, d, *batch).

    Pivots that vanish to rounding, as where a state is known exactly, leave a column of zeros.
    """
    R, rest = torch.zeros_like(A), A.clone()
    for i in range(len(A)):
        pivot = rest[i, i]
        regular = pivot > 1e-14 * A[i, i]
        scale = torch.where(regular, pivot, torch.ones_like(pivot)).rsqrt() * regular
        column = rest[i:, i] * scale
        R[i:, i] = column
        rest[i + 1 :, i + 1 :] -= outer(column[1:], column[1:])
    return R


def _balance(A: Tensor) -> Tensor:
    """Powers of two D (d, *batch): off the diagonal of D^-1 A D rows and columns are of one size.

    [1]_ in sweeps over all states at once, which is exact where the states differ in units alone.
    """
    size = A.abs()
    size.diagonal(dim1=0, dim2=1).zero_()
    scale = torch.ones_like(A[0])
    for _ in range(SWEEPS):
        rows, columns = matvec(size, scale) / scale, matvec(size.transpose(0, 1), 1 / scale) * scale
        ratio = (rows / columns).nan_to_num_(1.0, 1.0, 1.0)
        ratio = torch.where(ratio > 0, ratio, 1.0)
        scale = scale * (0.5 * ratio.log2()).round_().exp2_()
    return scale


def _adjugate_2(A: Tensor) -> Tensor:
    adjugate = A.flip(0, 1).transpose(0, 1).neg()
    adjugate[0, 0], adjugate[1, 1] = A[1, 1], A[0, 0]
    return adjugate


def _adjugate_3(A: Tensor) -> Tensor:
    """Column i of the adjugate is the cross product of the other two rows."""
    rows = [torch.linalg.cross(A[(i + 1) % 3], A[(i + 2) % 3], dim=0) for i in range(3)]
    return torch.stack(rows, 1)


def _batch_first(A: Tensor) -> Tensor:
    """(*batch, d, e), whose matrices BLAS takes without a copy of each."""
    return A.movedim((0, 1), (-2, -1)).contiguous()


def _batch_last(A: Tensor) -> Tensor:
    return A.movedim((-2, -1), (0, 1))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` of values (n, k) and indices of any shape (...): (..., k); differentiable.

    Rows are copied whole, which takes a CPU a quarter of the seconds of an indexing expression.
    """
    return embedding(index, values)
