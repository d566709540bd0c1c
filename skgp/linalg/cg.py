r"""Preconditioned conjugate gradients for many right-hand sides over a matrix-vector closure.

The columns share every product with the matrix, which is where the time goes, and nothing else:
each has its own step sizes, stops on its own and is frozen from then on.

References
----------
.. [1] Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.
.. [2] Greenbaum (1997), Estimating the attainable accuracy of recursively computed residual
   methods. The recursion's residual drifts from the true one; see ``CGResult.residual``.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skgp.linalg.exceptions import NumericalWarning

Matmul = Callable[[Tensor], Tensor]
Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class CGResult:
    """Outcome of :func:`block_cg`."""

    #: (n, k), the last iterate, which has the smallest error in the norm of A; where the iteration
    #: broke down, the iterate before.
    solution: Tensor
    n_iter: int  # each costs one product with the matrix
    residual: Tensor  # (k,), true relative residual ||b - A x|| / ||b||, recomputed at the end
    converged: bool  # every column's true residual is within ten times the requested tolerance
    history: list[float] = field(default_factory=list)  # largest recursive residual, by iteration


def block_cg(
    matmul: Matmul,
    B: Tensor,
    *,
    preconditioner: Matmul | None = None,
    X0: Tensor | None = None,
    tol: float | Tensor = 1e-6,
    max_iter: int = 1000,
    callback: Callback | None = None,
    warn: bool = True,
) -> CGResult:
    """Solve :math:`A X = B` for symmetric positive definite A.

    Parameters
    ----------
    matmul : callable
        Maps ``V (n, k)`` to ``A V (n, k)``. May work in a lower precision than `B`.
    B : Tensor of shape (n, k)
    preconditioner : callable, optional
        Maps ``V`` to :math:`P^{-1} V`, symmetric positive definite. Identity by default.
    X0 : Tensor of shape (n, k), optional
        Start. Zero by default, which saves one product.
    tol : float or Tensor of shape (k,), default=1e-6
        Relative residual ``||b - A x|| / ||b||`` at which a column stops; one a column if given so.
    max_iter : int, default=1000
    callback : callable, optional
        Called as ``callback(iteration, {"residual": float})``; returning True stops.
    warn : bool, default=True
        A NumericalWarning where the true residual misses `tol` tenfold and `callback` did not ask
        to stop; False leaves it to the caller to look at ``converged``.

    Returns
    -------
    CGResult

    Notes
    -----
    In exact arithmetic the energy :math:`2 x^T b - x^T A x` rises from step to step, while the
    residual need not fall. An energy that drops, or a number that is not finite, ends the
    iteration: the products are too inexact, or A is not positive definite. One product with A and
    one with the preconditioner an iteration, plus ``O(n k)``; memory ``5 n k`` numbers.
    """
    b_norm = torch.linalg.vector_norm(B, dim=0)
    scale = torch.where(b_norm > 0, b_norm, torch.ones_like(b_norm))
    X = torch.zeros_like(B) if X0 is None else X0.clone()
    R = B.clone() if X0 is None else B - matmul(X).to(B)
    precondition = preconditioner or torch.clone
    residual = torch.linalg.vector_norm(R, dim=0) / scale
    best_X, best = X.clone(), (X * (B + R)).sum(0)

    Z = precondition(R)
    P = Z.clone()
    rz = (R * Z).sum(0)
    history: list[float] = []
    n_iter, stopped = 0, False
    while n_iter < max_iter and bool((residual > tol).any()):
        AP = matmul(P).to(B)
        curvature = (P * AP).sum(0)
        active = (residual > tol) & (curvature > 0)
        if not bool(active.any()):
            break
        step = torch.where(active, rz / curvature, torch.zeros_like(rz))
        X += step * P
        R -= step * AP
        n_iter += 1
        residual = torch.linalg.vector_norm(R, dim=0) / scale
        energy = (X * (B + R)).sum(0)
        if _broke_down(energy, best):
            X = best_X
            break
        best_X, best = X.clone(), energy
        history.append(float(residual.max()))
        stopped = callback is not None and bool(callback(n_iter, {"residual": history[-1]}))
        if stopped:
            break
        Z = precondition(R)
        rz_new = (R * Z).sum(0)
        P = Z + torch.where(rz > 0, rz_new / rz, torch.zeros_like(rz)) * P
        rz = rz_new

    true_residual = residual
    if n_iter > 0:
        true_residual = torch.linalg.vector_norm(B - matmul(X).to(B), dim=0) / scale
    converged = bool((true_residual <= 10 * torch.as_tensor(tol)).all())
    if warn and not (converged or stopped):
        warnings.warn(
            f"Conjugate gradients ended after n_iter={n_iter} at a relative residual of "
            f"{float(true_residual.max()):.1e}, by recursion {float(residual.max()):.1e}; "
            f"tol={float(torch.as_tensor(tol).min()):.1e} was asked for. Where the two differ, "
            "products in this precision are too inexact: use dtype='float64' or a larger noise "
            "variance. Otherwise raise max_iter or the rank of the preconditioner.",
            NumericalWarning,
            stacklevel=2,
        )
    return CGResult(X, n_iter, true_residual, converged, history)


def _broke_down(energy: Tensor, best: Tensor) -> bool:
    """True when an energy is not finite or fell by more than rounding explains."""
    return not bool(torch.isfinite(energy).all()) or bool((energy < best - 1e-3 * best.abs()).any())
