r"""Cholesky factors of nearly singular matrices, and the jitter that they needed.

The factor of one float64 matrix may be a NumPy array, and so may what is made of it: for a hundred
rows a call of torch outlasts its work. Matrices on the CPU are factored, inverted and solved by the
LAPACK of SciPy, which on processors that torch's was not written for takes .6 to .8 of the time.

**Least squares** with a Gaussian prior whose observations have noise of very unlike size. Normal
equations, :math:`I + \Phi^T D^{-1} \Phi`, lose what is eps times the heaviest observation;
:math:`\Phi \Phi^T + D` loses noise below eps times the prior's variance. The QR factorisation of
the rows themselves loses neither: with columns pivoted and rows sorted by size, each row is in
error by eps relative to its own size [1]_.

References
----------
.. [1] Cox and Higham (1998), Stability of Householder QR factorization for weighted least squares
   problems.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from scipy.linalg import qr_multiply
from scipy.linalg.blas import dtrsm, dtrsv, strsm, strsv
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs, dpstrf, spotrf, spotri, spstrf
from torch import Tensor

from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.defaults import (
    BLAS_COLUMNS,
    EIGENVALUE_ROWS,
    LAPACK_ROWS,
    LARGE_RATIO,
)
from skgp.linalg.runtime import large_operation


class CholeskyResult(NamedTuple):
    """A triangular factor and the price paid for it."""

    factor: Tensor  # (..., n, n), with a positive diagonal
    jitter: float  # largest value added to a diagonal, in the units of the matrix; 0.0 for none


def jittered_cholesky(A: Tensor, *, max_jitter: float = 1e-4) -> CholeskyResult:
    r"""Lower Cholesky factor of a symmetric matrix, its diagonal raised only if it must be.

    .. math:: L L^T = A + \epsilon\, \bar a\, I, \qquad \bar a = \operatorname{tr}(A) / n,

    where :math:`\epsilon` is 0 if that succeeds, otherwise the first of eps, 10 eps, 100 eps, ...,
    `max_jitter` that does (eps of ``A.dtype``). In a batch only the matrices that fail are raised.

    The lower triangle of A (..., n, n) is read, and A not modified. The factor is differentiable in
    A, with the jitter as a constant. The jitter, :math:`\epsilon` times the mean diagonal, is for
    the caller to record and warn about. A NotPositiveDefiniteError refuses NaN or inf, or a matrix
    for which `max_jitter` is not enough, and names likely causes.

    :math:`O(n^3 / 3)`, memory for one factor; an attempt that fails stops at its first bad pivot.
    With jitter a raised copy of `A` is held as well.

    Examples
    --------
    >>> import torch
    >>> A = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    >>> jittered_cholesky(A)
    CholeskyResult(factor=tensor([[2.0000, 0.0000],
            [1.0000, 1.4142]], dtype=torch.float64), jitter=0.0)
    """
    if isinstance(A, np.ndarray):
        return _of_few_rows(A, max_jitter)
    _check_square(A)
    with large_operation(A.numel() * A.shape[-1] / 3):
        factor, failed = _factor(A)
    if not failed.any():
        return CholeskyResult(factor, 0.0)
    del factor  # two more are held below: what was raised, and its factor
    with torch.no_grad():
        jitter = A.new_zeros(A.shape[:-2])
        jitter[failed] = _smallest_jitter(_some(A, failed), max_jitter)
    factor = torch.linalg.cholesky(_add_to_diagonal(A, jitter))
    return CholeskyResult(factor, float(jitter.max()))


def semidefinite_root(A: Tensor) -> Tensor:
    """R (n, n) with R R^T = A up to rounding, A symmetric and positive semi-definite but for it.

    The Cholesky factor; or, where no jitter relative to A helps since A is a difference of far
    larger matrices, the symmetric root, with negative eigenvalues taken as 0: some ten times the
    cost.
    """
    try:
        return jittered_cholesky(A).factor
    except NotPositiveDefiniteError:
        if not A.isfinite().all():
            raise
        values, vectors = torch.linalg.eigh(A)
        return vectors * values.clamp_min(0.0).sqrt() @ vectors.mT


def reverse_cholesky(A: Tensor) -> CholeskyResult:
    r"""Upper factor of the Cholesky decomposition that starts from the last row.

    .. math:: U U^T = A \quad (U \text{ upper triangular}), \qquad (U^{-T}) (U^{-T})^T = A^{-1},

    so that :math:`U^{-T}` is the *lower* Cholesky factor of the inverse. As `jittered_cholesky`;
    O(n^3 / 3), two copies of A (..., n, n) in memory (the flips).
    """
    _check_square(A)
    lower, jitter = jittered_cholesky(A.flip(-2, -1))
    return CholeskyResult(lower.flip(-2, -1), jitter)


def inverse_factor(A: Tensor) -> Tensor:
    """Lower Cholesky factor of the inverse of A (..., n, n), by `reverse_cholesky`; O(n^3)."""
    U = reverse_cholesky(A).factor
    identity = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device).expand_as(U)
    return tri_solve(U.mT, identity, upper=False)


def cho_solve(L: Tensor, B: Tensor) -> Tensor:
    r"""Solve :math:`L L^T X = B` for the lower factor L (..., n, n); O(n^2 k).

    B is (..., n, k), or (..., n) where it has one dimension fewer than L.
    """
    if isinstance(L, np.ndarray):
        return dpotrs(L.T, B)[0]
    if B.ndim == L.ndim - 1:
        return cho_solve(L, B.unsqueeze(-1)).squeeze(-1)
    if L.ndim == 2:  # a fifth to a half of the seconds of torch.cholesky_solve for few columns
        return tri_solve(L.mT, tri_solve(L, B, upper=False), upper=True)
    with large_operation(2 * B.numel() * L.shape[-1]):
        return torch.cholesky_solve(B, L)


def cho_inverse(L: Tensor) -> Tensor:
    """Inverse of :math:`L L^T`, (..., n, n), given the lower factor; O(n^3)."""
    if isinstance(L, np.ndarray):
        return _inverse(L)
    with large_operation(2 / 3 * L.numel() * L.shape[-1]):
        if len(L) < LAPACK_ROWS or not _is_plain(L):
            return torch.cholesky_inverse(L)
        return torch.from_numpy(_inverse(L.detach().numpy()))


def tri_solve(A: Tensor, B: Tensor, *, upper: bool) -> Tensor:
    """Solve :math:`A X = B` for a triangular A (..., n, n) and B (..., n, k); O(n^2 k)."""
    with large_operation(B.numel() * A.shape[-1]):
        if 1 < B.shape[-1] < BLAS_COLUMNS or not (_is_plain(A) and _is_plain(B)):
            return torch.linalg.solve_triangular(A, B, upper=upper)
        a, b = A.detach().numpy(), B.detach().numpy()
        columns = a.flags.f_contiguous
        a, lower = (a if columns else a.T), upper != columns  # in columns nothing is copied
        trsv, trsm = (dtrsv, dtrsm) if A.dtype == torch.float64 else (strsv, strsm)
        if b.shape[1] == 1:
            return torch.from_numpy(trsv(a, b[:, 0], lower=lower, trans=not columns))[:, None]
        solved = trsm(1.0, a, b.T, side=1, lower=lower, trans_a=columns)  # X' A' = B'
        return torch.from_numpy(solved.T)


def log_det(L: Tensor) -> Tensor:
    r"""Log-determinant :math:`\log |L L^T| = 2 \sum_i \log L_{ii}` (...), L triangular; O(n)."""
    if isinstance(L, np.ndarray):
        return 2 * np.log(L.diagonal()).sum()
    return 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def raise_diagonal_(A: Tensor, by: Tensor | float) -> None:
    """Add to the diagonal of A (n, n), in place."""
    if isinstance(A, np.ndarray):
        A.flat[:: len(A) + 1] += by
    else:
        A.diagonal().add_(by)


def _of_few_rows(A: np.ndarray, max_jitter: float) -> CholeskyResult:
    """As `jittered_cholesky`: in rows of LAPACK, which are columns of NumPy, the upper factor."""
    upper, failed = dpotrf(A.T)
    factor, jitter = upper.T, 0.0
    if failed:
        raised = jittered_cholesky(torch.from_numpy(A), max_jitter=max_jitter)
        factor, jitter = raised.factor.numpy(), raised.jitter
    return CholeskyResult(cast(Tensor, factor), jitter)


def _inverse(L: np.ndarray) -> np.ndarray:
    """As `cho_inverse`, of an array."""
    lower = (dpotri if L.dtype == np.float64 else spotri)(L.T)[0].T  # the other triangle is 0
    lower.reshape(-1)[:: len(L) + 1] *= 0.5
    return lower + lower.T


def _is_plain(A: Tensor) -> bool:
    """Whether A is one matrix on the CPU, not empty, without derivatives: SciPy can take it."""
    return (
        A.ndim == 2
        and A.numel() > 0
        and A.device.type == "cpu"
        and A.dtype in (torch.float64, torch.float32)
        and not (A.requires_grad and torch.is_grad_enabled())
    )


def _factor(A: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors of A (..., n, n), and whether there is none (...)."""
    if A.shape[-1] < LAPACK_ROWS or not _is_plain(A):
        factor, info = torch.linalg.cholesky_ex(A)
        return factor, info != 0
    upper, info = (dpotrf if A.dtype == torch.float64 else spotrf)(A.detach().numpy().T)
    factor = torch.from_numpy(upper.T)
    return factor, factor[-1, -1].isnan() | (info != 0)


def _check_square(A: Tensor) -> None:
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ValueError(f"A must be square, of shape (..., n, n); got shape {tuple(A.shape)}.")


def _smallest_jitter(A: Tensor, max_jitter: float) -> Tensor:
    """Absolute jitter (b,) for each matrix of A (b, n, n), all of which failed without any."""
    if not A.isfinite().all():
        raise NotPositiveDefiniteError(
            "The matrix to factor contains NaN or inf, which no jitter can repair. Check the "
            "inputs and the hyper-parameters for overflow."
        )
    scale = A.diagonal(dim1=-2, dim2=-1).mean(-1)
    relative = torch.zeros_like(scale)
    pending = torch.ones_like(scale, dtype=torch.bool)
    for epsilon in _escalation(torch.finfo(A.dtype).eps, max_jitter):
        relative[pending] = epsilon
        attempt = _add_to_diagonal(_some(A, pending), (relative * scale)[pending])
        pending[pending.clone()] = torch.linalg.cholesky_ex(attempt).info != 0
        del attempt
        if not pending.any():
            break
    else:
        raise NotPositiveDefiniteError(
            f"{int(pending.sum())} of {len(A)} matrices of size {A.shape[-1]} ({A.dtype}, smallest "
            f"mean diagonal {float(scale.min()):.3g}) not positive definite with "
            f"max_jitter={max_jitter:g} times the mean diagonal added. "
            + _cause(A[pending][0], max_jitter)
        )
    return relative * scale


def _some(A: Tensor, chosen: Tensor) -> Tensor:
    """Those of the matrices (..., n, n) that are chosen (...), as (k, n, n); of all, no copy."""
    return A.reshape(-1, *A.shape[-2:]) if chosen.all() else A[chosen]


def _add_to_diagonal(A: Tensor, jitter: Tensor) -> Tensor:
    # diagonal_scatter holds one copy of A; adding a dense diagonal matrix would hold two.
    raised = A.diagonal(dim1=-2, dim2=-1) + jitter.unsqueeze(-1)
    return A.diagonal_scatter(raised, dim1=-2, dim2=-1)


def _escalation(smallest: float, largest: float) -> Iterator[float]:
    while smallest < largest:
        yield smallest
        smallest *= 10
    yield largest


def _cause(A: Tensor, max_jitter: float) -> str:
    """Why a matrix (n, n) has no factor, as its own entries show, and what to do about it."""
    variance = A.diagonal()
    if float(variance.min()) <= 0:
        return (
            f"Row {int(variance.argmin())} has a variance of {float(variance.min()):.3g}: the "
            "kernel is no covariance. Check the kernel's class and hyper-parameters."
        )
    if float(variance.max() / variance.median()) > LARGE_RATIO:
        return (
            f"Row {int(variance.argmax())} lies far from the others: its variance of "
            f"{float(variance.max()):.3g} leaves theirs, {float(variance.median()):.3g} in the "
            "median, without digits. Remove the row, or give the columns other units."
        )
    C = (A / variance.sqrt() / variance.sqrt()[:, None]).double()
    some = C[:: -(-len(C) // EIGENVALUE_ROWS), :: -(-len(C) // EIGENVALUE_ROWS)]
    least = float(torch.linalg.eigvalsh(some)[0])
    if least < -0.5 * max_jitter:
        return (
            f"It is indefinite: an eigenvalue of {least:.2g} times the variance. The kernel is no "
            "covariance on these inputs, as ExpSineSquared is none on several columns; give each "
            "such part one column, skgp.kernels.ActiveDims(kernel, [column])."
        )
    row, column = divmod(int(C.tril(-1).argmax()), len(C))
    if float(C[row, column]) > 1 - 1e-12:
        return (
            f"Rows {column} and {row} are duplicates, or nearly so, and the noise variance is tiny "
            "beside that of the signal. Remove duplicates, or raise the noise variance."
        )
    if A.dtype == torch.float32:
        return "It is singular in float32. Use dtype='float64', or raise the noise variance."
    return (
        "It is singular up to rounding: the length scales are long beside the distances of the "
        "rows, and the noise variance is tiny beside that of the signal. Raise the noise variance."
    )


def pivoted_rows(A: Tensor, n_pivots: int, least: float) -> tuple[list[int], Tensor]:
    """Rows of a symmetric A (n, n) in the order of the pivots of its Cholesky factor, by LAPACK.

    At most `n_pivots`, while the greatest diagonal element left is above `least`; and that diagonal
    (n,), 0 in the rows chosen, below 0 where A is not positive semi-definite. O(n^2 n_pivots).
    """
    a = A.cpu().numpy()
    pstrf = dpstrf if A.dtype == torch.float64 else spstrf
    L, order, rank, _ = pstrf(a, tol=least, lower=1)
    k, order = min(rank, n_pivots), order - 1
    left = A.diagonal().clone()
    spent = np.square(L[k:, :k]).sum(1)
    left[order[k:]] -= torch.from_numpy(spent).to(left)
    left[order[:k]] = 0.0
    return order[:k].tolist(), left


class Ridge(NamedTuple):
    """Posterior of w ~ N(0, I) given y = Phi w + N(0, D)."""

    mean: Tensor  # (m,); or (m, t) of t columns of y
    root: Tensor  # (m, m), lower triangular with root root' = S, its diagonal positive
    misfit: Tensor  # (), (y - Phi mean)' D^-1 (y - Phi mean) + mean' mean, summed over columns


def ridge_by_rows(Phi: Tensor, y: Tensor, noise: Tensor) -> Ridge:
    r"""The w of the least :math:`\|D^{-1/2} (y - \Phi w)\|^2 + \|w\|^2`, and its covariance.

    Of Phi (n, m), y (n,) or (n, t), and the diagonal `noise` (n,) of D, positive, all in float64.
    By Householder reflections on the CPU, about ten times the cost of normal equations;
    O((n + m) m^2) time, O((n + m) m) memory.
    """
    std = noise.sqrt().cpu().numpy()
    m = Phi.shape[1]
    rows = np.concatenate([Phi.cpu().numpy() / std[:, None], np.eye(m)])  # (n + m, m)
    scaled = y.cpu().numpy().T / std  # (n,) or (t, n)
    target = np.concatenate([scaled, np.zeros((*scaled.shape[:-1], m))], axis=-1)
    order = np.argsort(-np.abs(rows).max(1), kind="stable")
    half, R, pivots = qr_multiply(rows[order], target[..., order], mode="right", pivoting=True)
    eye, place = np.eye(m), np.argsort(pivots)
    inverse = torch.linalg.solve_triangular(torch.tensor(R), torch.tensor(eye), upper=True)[place]
    mean = inverse @ torch.tensor(half.T)
    upper = torch.linalg.qr(inverse.mT, mode="r").R  # S = (P R^-1)(P R^-1)'
    root = (upper * upper.diagonal().sign()[:, None]).mT.contiguous()
    misfit = torch.tensor(target.T - rows @ mean.numpy()).square().sum()
    return Ridge(*(tensor.to(Phi.device) for tensor in (mean, root, misfit)))
