r"""Preconditioned conjugate gradients [1]_ on many right-hand sides, to a tolerance.

They share every product with the matrix, which is where the time goes, and nothing else: each has
its own step sizes, stops on its own and is frozen from then on. :func:`block_cg` goes on until all
have converged; :func:`skgp.linalg.ulisse.ulisse` stops early without bias.

References
----------
.. [1] Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.
.. [2] Greenbaum (1997), Estimating the attainable accuracy of recursively computed residual
   methods. The recursion's residual drifts from the true one; see ``CGResult.residual``.
.. [3] Ubaru, Chen and Saad (2017), Fast estimation of tr(f(A)) via stochastic Lanczos quadrature.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import Callback

Matmul = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CGResult:
    """Outcome of :func:`block_cg`."""

    #: (n, k), the last iterate, which has the smallest error in the norm of A; where the iteration
    #: broke down, the iterate before.
    solution: Tensor
    n_iter: int  # each costs one product with the matrix
    residual: Tensor  # (k,), true relative residual ||b - A x|| / ||b||, recomputed at the end
    converged: bool  # every column's true residual is within ten times the requested tolerance
    left: Tensor  # (n, k), B - A X
    history: list[float] = field(default_factory=list)  # largest recursive residual, by iteration
    #: Of each iteration the step and conjugation (1, k), 0 of columns that have ended.
    coefficients: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def block_cg(
    matmul: Matmul,  # V (n, k) -> A V; may work in a lower precision than B
    B: Tensor,  # (n, k)
    *,
    preconditioner: Matmul | None = None,  # V -> P^-1 V, symmetric positive definite
    splitting: Matmul | None = None,  # V -> (A - P) V, where that is cheaper than A V
    X0: Tensor | None = None,  # (n, k), the start; zero by default, which saves one product
    tol: float | Tensor = 1e-6,  # relative residual at which a column stops; (k,) for one a column
    norm: Callable[[Tensor], Tensor] | None = None,  # of residuals (n, k): (1, k); Euclid's
    max_iter: int = 1000,
    callback: Callback | None = None,  # callback(iteration, {"residual": float}); True stops
    warn: bool = True,
) -> CGResult:
    """Solve :math:`A X = B` for symmetric positive definite A.

    A NumericalWarning where the true residual misses `tol` tenfold and `callback` did not ask to
    stop; with `warn` False it is for the caller to look at ``converged``.

    In exact arithmetic the energy :math:`2 x^T b - x^T A x` rises from step to step, while the
    residual need not fall. An energy that drops, or a number that is not finite, ends the
    iteration: the products are too inexact, or A is not positive definite. One product with A and
    one with the preconditioner an iteration, plus ``O(n k)``; memory ``5 n k`` numbers. With a
    `splitting` :math:`A z = r + (A - P) z`, :math:`z = P^{-1} r`, replaces the products with A.
    """
    X = torch.zeros_like(B) if X0 is None else X0.clone()
    R = B.clone() if X0 is None else B - matmul(X).to(B)
    cg = Recursion(matmul, preconditioner, B, X, R, tol, norm, splitting, dim=0)
    best_X, best = cg.X.clone(), cg.energy()
    history: list[float] = []
    stopped = False
    while cg.n_iter < max_iter and cg.unfinished() and not stopped:
        if cg.step() is None:
            break
        energy = cg.energy()
        if _broke_down(energy, best):
            cg.X = best_X
            break
        best_X, best = cg.X.clone(), energy
        history.append(float(cg.residual.max()))
        stopped = callback is not None and bool(callback(cg.n_iter, {"residual": history[-1]}))

    left = cg.R if cg.n_iter == 0 else B - matmul(cg.X).to(B)
    true = cg.relative(left)[0]
    converged = bool((true <= 10 * torch.as_tensor(tol)).all())
    if warn and not (converged or stopped):
        warn_caller(
            f"Conjugate gradients ended after n_iter={cg.n_iter} at a relative residual of "
            f"{float(true.max()):.1e}, by recursion {float(cg.residual.max()):.1e}; "
            f"tol={float(torch.as_tensor(tol).min()):.1e} was asked for. Where the two differ, "
            "products in this precision are too inexact: use dtype='float64' or a larger noise "
            "variance. Otherwise raise max_iter or the rank of the preconditioner.",
            NumericalWarning,
        )
    return CGResult(cg.X, cg.n_iter, true, converged, left, history, cg.coefficients)


def _broke_down(energy: Tensor, best: Tensor) -> bool:
    """True when an energy is not finite or fell by more than rounding explains."""
    return not bool(torch.isfinite(energy).all()) or bool((energy < best - 1e-3 * best.abs()).any())


class Recursion:
    """State of preconditioned conjugate gradients on k right-hand sides B along `dim`.

    Columns (n, k) where `dim` is 0 and rows (k, n) where it is 1; numbers of each, (1, k) and
    (k, 1). R is the residual B - A X of the start X; both are overwritten.
    """

    def __init__(self, matmul, preconditioner, B, X, R, tol, norm=None, splitting=None, *, dim):
        self._matmul, self._precondition, self._dim = matmul, preconditioner or torch.clone, dim
        self._splitting = splitting
        self._norm = norm or partial(torch.linalg.vector_norm, dim=dim, keepdim=True)
        self.tol, self.n_iter, self.stalled = tol, 0, False
        self.coefficients: list[tuple[Tensor, Tensor]] = []
        size = self._norm(B)
        self._scale = torch.where(size > 0, size, torch.ones_like(size))
        self._B, self.X, self.R = B, X, R
        self._direction = self._precondition(R)
        self._rz = self._dot(R, self._direction)
        # A times the direction, where the splitting tells it.
        self._product = None if splitting is None else R + splitting(self._direction)
        self._step = torch.ones_like(self._rz)
        self.last_energy = torch.zeros_like(size)
        self.residual = self.relative(R)

    def _dot(self, A: Tensor, B: Tensor) -> Tensor:
        return (A * B).sum(self._dim, keepdim=True)

    def relative(self, R: Tensor) -> Tensor:
        """Norms of residuals over those of the right-hand sides."""
        return self._norm(R) / self._scale

    def unfinished(self, tol: float = 0.0) -> bool:
        """Whether a residual is above `tol` and above its own tolerance."""
        return bool(((self.residual > self.tol) & (self.residual > tol)).any())

    def energy(self) -> Tensor:
        r""":math:`2 x^T b - x^T A x`, which rises from step to step."""
        return self._dot(self.X, self._B + self.R)

    def predicted_energy(self) -> Tensor:
        r"""Squared norms in A of the next increments, relative to their right-hand sides.

        They are :math:`\alpha_j\, e^T P^{-1} e`, with the last :math:`\alpha` for the next.
        """
        return self._of_increment(self._step)

    def energy_scale(self, stop: float) -> Tensor:
        r"""Squared norm in A of an increment that is worth one iteration, likewise relative.

        The last one's, or `stop` times the solution's :math:`\sqrt{x^T b}` where that is less.
        """
        solution = self._dot(self.X, self._B) / self._scale.square()
        return torch.minimum(self.last_energy, stop**2 * solution)

    def _of_increment(self, step: Tensor) -> Tensor:
        return torch.where(self.residual > self.tol, step * self._rz / self._scale.square(), 0.0)

    def step(self) -> Tensor | None:
        """One iteration; the increment, or None where no direction has a positive curvature.

        What is done, or has no such direction (`stalled`), stays as it is.
        """
        known, direction = self._product, self._direction
        product = self._matmul(direction).to(self._B) if known is None else known
        curvature = self._dot(self._direction, product)
        unfinished = self.residual > self.tol
        active = unfinished & torch.isfinite(curvature) & (curvature > 0)
        self.stalled = bool((unfinished & ~active).any())
        if not bool(active.any()):
            return None
        step = torch.where(active, self._rz / curvature, 0.0)
        self.last_energy = self._of_increment(step)
        increment = step * self._direction
        self.X += increment
        self.R -= step * product
        self._step = torch.where(active, step, self._step)
        self.n_iter += 1
        self.residual = self.relative(self.R)
        Z = self._precondition(self.R)
        rz = self._dot(self.R, Z)
        ratio = torch.where(active & (self._rz > 0), rz / self._rz, 0.0)
        self._direction = Z + ratio * self._direction
        if self._splitting is not None:
            self._product = self.R + self._splitting(Z) + ratio * product
        self._rz = rz
        self.coefficients.append((step, ratio))
        return increment

    def keep(self, k: int) -> None:
        """Go on with the first k rows alone."""
        for name in ("X", "R", "_B", "_direction", "_rz", "_step", "_scale", "residual"):
            setattr(self, name, getattr(self, name)[:k])


def log_quadrature(coefficients: list[tuple[Tensor, Tensor]]) -> Tensor:
    r"""e_1' log(T) e_1 (k,) of the steps and conjugations (1, k) of each iteration.

    Conjugate gradients of A, preconditioned by P, from a right-hand side z ~ N(0, P) build the
    Lanczos matrix T of :math:`P^{-1/2} A P^{-1/2}` begun at :math:`P^{-1/2} z`: of steps
    :math:`\alpha_j` and conjugations :math:`\beta_j` it has the diagonal
    :math:`1 / \alpha_j + \beta_{j-1} / \alpha_{j-1}` and beside it
    :math:`\sqrt{\beta_j} / \alpha_j`, and

    .. math:: E\big[z^T P^{-1} z \; e_1^T \log(T)\, e_1\big] \approx \log |P^{-1} A|

    up to the quadrature's error, which falls geometrically in the iterations [3]_.
    """
    steps, ratios = (torch.cat(each).T for each in zip(*coefficients, strict=True))  # (k, J)
    active = steps > 0
    inverse = torch.where(active, 1 / torch.where(active, steps, 1.0), 0.0)
    diagonal = torch.where(active, inverse, 1.0)
    diagonal[:, 1:] += torch.where(active[:, 1:], ratios[:, :-1] * inverse[:, :-1], 0.0)
    beside = torch.where(active[:, 1:], ratios[:, :-1].sqrt() * inverse[:, :-1], 0.0)
    T = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(T)
    return (vectors[:, 0].square() * values.clamp_min(torch.finfo(T.dtype).tiny).log()).sum(1)
