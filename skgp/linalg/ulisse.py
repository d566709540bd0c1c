r"""ULISSE: unbiased solutions of linear systems from conjugate gradients that stop early [1]_.

Conjugate gradients build :math:`A^{-1} b = x_0 + \delta_1 + \dots + \delta_T`. Once the residual
is below a loose tolerance, at :math:`l`, every further increment is taken with some probability
and scaled up by its inverse:

::

    x_0 + delta_1 + ... + delta_l  +  delta_{l+1} / q_1  +  delta_{l+2} / q_2  + ...
          always                      survived 1 coin       survived 2 coins

where :math:`q_j` is the probability of surviving j coins. The expectation is the sum up to T.

======================  ===============================================================
This module             The paper, equation (12)
======================  ===============================================================
`stop`                  :math:`\alpha / \|b\|` (there :math:`\alpha = q \sqrt n`)
`tol`                   :math:`\epsilon / \|b\|`
``survival[j]``         :math:`q_j = 1 / \prod_{r \le j} w_r`, with :math:`w_0 = 1`
======================  ===============================================================

Deviations. The increments are orthogonal in the norm of A, so the error has the mean square
:math:`\sum_j a_j^2 (1 / q_j - 1)`, :math:`a_j = \|\delta_{l+j}\|_A`, and at given cost
:math:`q_j \propto a_j` makes it least. That is the default,

.. math:: q_j = \min_{i \le j} \min(1, a_i / c), \qquad c = \min(a_0, \text{stop}\, \|x_l\|_A),

which spends iterations until increments are small by `stop`, even where few were needed to get
there. The paper's :math:`w_r = e^{\beta r}` decays like a Gaussian in j where :math:`a_j` decays
like an exponential: its variance is finite but rests on events too rare to be seen (four coins are
survived with probability 4.5e-5 at :math:`\beta = 1`), and what is seen is the bias of the
truncated iteration.

References
----------
.. [1] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
   Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE), section 4.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.linalg.cg import Matmul
from skgp.linalg.defaults import CONVERGED
from skgp.linalg.exceptions import NumericalWarning


@dataclass(frozen=True)
class UlisseResult:
    """Outcome of :func:`ulisse`."""

    solution: Tensor  # (k, n), unbiased for B A^-1; all rows share their coins
    second: Tensor  # (n_paired, n), independent draws of the first rows, given B and the start
    #: (k, n), plain iterate of conjugate gradients, which is biased and has the smaller error:
    #: where to start a system nearby.
    iterate: Tensor
    n_iter: int  # each costs one product
    n_sure: int  # iterations before the coins
    residual: Tensor  # (k,), relative, of `iterate`, by recursion
    survival: list[float]  # probabilities with which each iteration after `n_sure` was reached
    truncated: tuple[bool, bool]  # a coin ended `solution`, `second`; else the iteration converged
    converged: bool  # the coins or `tol` ended the iteration, not `max_iter` nor a breakdown


def ulisse(
    matmul: Matmul,
    B: Tensor,
    *,
    generator: torch.Generator,
    preconditioner: Matmul | None = None,
    start: Tensor | None = None,
    stop: float = 0.03,
    tol: float | None = None,
    roulette: str = "adaptive",
    beta: float = 1.0,
    n_paired: int = 0,
    max_iter: int = 1000,
    warn: bool = True,
) -> UlisseResult:
    r"""Unbiased estimate of :math:`B A^{-1}`, A symmetric positive definite; see the module.

    Right-hand sides are rows: a product ``V K`` with few rows is two to three times as fast as
    ``K V`` with few columns.

    Parameters
    ----------
    matmul : callable
        Maps ``V (k, n)`` to ``V A``.
    B : Tensor of shape (k, n)
    generator : torch.Generator
        Of the coins; on the CPU.
    preconditioner : callable, optional
        Maps ``V (k, n)`` to ``V P^{-1}``, symmetric positive definite. Identity by default.
    start : Tensor of shape (k, n), optional
        Zero by default. Must not depend on the coins of the same estimate: an `iterate` and not a
        `solution` of before.
    stop : float, default=0.03
        Relative residual of all rows at which the coins begin; at or below `tol` there are none
        and this is the usual iteration, biased by its tolerance.
    tol : float, optional
        Relative residual at which a row has converged; 1e-5 in float32 and 1e-10 in float64.
    roulette : {"adaptive", "paper"}
        Survival in proportion to the increments, or :math:`\exp(-\beta j (j+1) / 2)`.
    beta : float, default=1.0
        Of the paper's weights.
    n_paired : int, default=0
        Rows that get a second solution, from coins of their own.
    max_iter : int, default=1000
    warn : bool, default=True
        A NumericalWarning where `max_iter` or a matrix that is not positive definite ended the
        iteration; False leaves it to the caller to look at ``converged``.

    Returns
    -------
    UlisseResult

    Raises
    ------
    ValueError
        If `roulette` is none of its values or `beta` is negative.

    Notes
    -----
    A coin is flipped before the product that it decides upon. The size of the increment is known
    by then but for its step length, for which the last one stands: any rule that looks at no coin
    is unbiased. One product with A and one with the preconditioner an iteration; ``7 k n`` numbers.
    """
    if roulette not in ("adaptive", "paper"):
        raise ValueError(f'roulette must be "adaptive" or "paper", got {roulette!r}.')
    if beta < 0:
        raise ValueError(f"beta must not be negative, got {beta}: weights must not be below 1.")
    tol = CONVERGED[B.dtype] if tol is None else tol
    cg = _Recursion(matmul, preconditioner, B, start, tol)
    if stop > tol and not cg.unfinished(stop):
        cg.step()  # a start within `stop`: the first increment gives the others their scale
    while cg.n_iter < max_iter and cg.unfinished(stop) and cg.step() is not None:
        pass
    n_sure = cg.n_iter
    reached = not (cg.broken or cg.unfinished(stop))
    survival: list[float] = []
    draws = _Draws(cg.X, n_paired)
    if stop > tol and reached:
        weights = _Survival(cg.energy_scale(stop), beta if roulette == "paper" else None)
        while cg.n_iter < max_iter and cg.unfinished() and draws.alive:
            chance = weights.advance(cg.predicted_energy())
            draws.flip(chance, generator, cg)
            if draws.alive:
                survival.append(weights.survival)
                increment = cg.step()
                if increment is None:
                    break
                draws.add(increment, weights.survival)
    ended = not draws.alive or not cg.unfinished() or stop <= tol
    converged = reached and not cg.broken and ended
    if warn and not converged:
        _warn(cg, max_iter, stop)
    iterate, residual = draws.iterate(cg)
    return UlisseResult(
        *draws.solutions, iterate, cg.n_iter, n_sure, residual, survival, draws.ended, converged
    )


class _Recursion:
    """State of preconditioned conjugate gradients on k rows."""

    def __init__(self, matmul, preconditioner, B, start, tol):
        self._matmul, self._precondition = matmul, preconditioner or torch.clone
        self.tol, self.n_iter, self.broken = tol, 0, False
        norm = torch.linalg.vector_norm(B, dim=1)
        self._scale = torch.where(norm > 0, norm, torch.ones_like(norm))
        self._B, self.X, self.R = B, torch.zeros_like(B), B.clone()
        if start is not None:
            moved = (start != 0).any(1)  # only these rows need the product
            self.X = start.clone()
            if bool(moved.any()):
                self.R[moved] -= matmul(start[moved])
        Z = self._precondition(self.R)
        self._direction, self._rz = Z, (self.R * Z).sum(1)
        self._step = torch.ones_like(self._rz)
        self.last_energy = torch.zeros_like(norm)
        self._update_residual()

    def _update_residual(self):
        self.residual = torch.linalg.vector_norm(self.R, dim=1) / self._scale

    def unfinished(self, tol: float = 0.0) -> bool:
        """Whether a row's residual is above `tol` and above its own tolerance."""
        return not self.broken and bool((self.residual > max(tol, self.tol)).any())

    def predicted_energy(self) -> Tensor:
        r"""Squared norms in A of the next increments (k,), relative to their right-hand sides.

        They are :math:`\alpha_j\, e^T P^{-1} e`, with the last :math:`\alpha` for the next.
        """
        return self._energy(self._step)

    def energy_scale(self, stop: float) -> Tensor:
        r"""Squared norm in A of an increment that is worth one iteration, (k,), likewise relative.

        The last one's, or `stop` times the solution's :math:`\sqrt{x^T b}` where that is less.
        """
        solution = (self.X * self._B).sum(1) / self._scale.square()
        return torch.minimum(self.last_energy, stop**2 * solution)

    def _energy(self, step: Tensor) -> Tensor:
        return torch.where(self.residual > self.tol, step * self._rz / self._scale.square(), 0.0)

    def step(self) -> Tensor | None:
        """One iteration; the increment (k, n), or None after a breakdown. Done rows stay."""
        product = self._matmul(self._direction)
        curvature = (self._direction * product).sum(1)
        active = self.residual > self.tol
        if not bool((torch.isfinite(curvature) & (curvature > 0))[active].all()):
            self.broken = True
            return None
        step = torch.where(active, self._rz / curvature, 0.0)
        self.last_energy = self._energy(step)
        increment = step[:, None] * self._direction
        self.X += increment
        self.R -= step[:, None] * product
        self._step = torch.where(active, step, self._step)
        self.n_iter += 1
        self._update_residual()
        Z = self._precondition(self.R)
        rz = (self.R * Z).sum(1)
        ratio = torch.where(active & (self._rz > 0), rz / self._rz, 0.0)
        self._direction = Z + ratio[:, None] * self._direction
        self._rz = rz
        return increment

    def keep(self, k: int) -> None:
        """Go on with the first k rows alone."""
        for name in ("X", "R", "_B", "_direction", "_rz", "_step", "_scale", "residual"):
            setattr(self, name, getattr(self, name)[:k])


class _Survival:
    """Probability of reaching each increment beyond the stop; `beta` None adapts it to them."""

    def __init__(self, energy: Tensor, beta: float | None):
        self._first, self._beta = energy, beta
        self._count, self.survival = 0, 1.0

    def advance(self, energy: Tensor) -> float:
        """Probability of taking the next increments (k,), given that they are reached."""
        self._count += 1
        if self._beta is not None:
            chance = math.exp(-self._beta * self._count)
        else:
            first = float(self._first[: len(energy)].sum())
            wanted = math.sqrt(max(0.0, float(energy.sum())) / first) if first > 0 else 0.0
            chance = min(1.0, wanted / self.survival) if self.survival > 0 else 0.0
        self.survival *= chance
        return chance


class _Draws:
    """The two solutions, which differ in their coins; all rows share the first's."""

    def __init__(self, X: Tensor, n_paired: int):
        self._n_paired = n_paired
        self.solutions = (X.clone(), X[:n_paired].clone())
        self._alive = [True, n_paired > 0]
        self.ended = (False, False)
        self._left: tuple[Tensor, Tensor] | None = None

    @property
    def alive(self) -> bool:
        return any(self._alive)

    def flip(self, chance: float, generator: torch.Generator, cg: _Recursion) -> None:
        """A coin for each solution that is alive; the rows that nobody needs leave `cg`."""
        coins = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        died = [a and u >= chance for a, u in zip(self._alive, coins, strict=True)]
        self._alive = [a and not d for a, d in zip(self._alive, died, strict=True)]
        self.ended = (self.ended[0] or died[0], self.ended[1] or died[1])
        if died[0] and self._alive[1]:
            self._left = cg.X[self._n_paired :], cg.residual[self._n_paired :]
            cg.keep(self._n_paired)

    def add(self, increment: Tensor, survival: float) -> None:
        for solution, alive in zip(self.solutions, self._alive, strict=True):
            if alive:
                solution.add_(increment[: len(solution)], alpha=1 / survival)

    def iterate(self, cg: _Recursion) -> tuple[Tensor, Tensor]:
        """Plain iterate (k, n) and its residual (k,), of rows gone and rows that went on."""
        if self._left is None:
            return cg.X, cg.residual
        return torch.cat([cg.X, self._left[0]]), torch.cat([cg.residual, self._left[1]])


def _warn(cg: _Recursion, max_iter: int, stop: float) -> None:
    reason = (
        "the matrix is not positive definite to the precision of its products: use float64 or a "
        "larger noise variance"
        if cg.broken
        else f"max_iter={max_iter} was reached: raise it or the rank of the preconditioner"
    )
    warnings.warn(
        f"ULISSE ended after {cg.n_iter} iterations at a relative residual of "
        f"{float(cg.residual.max()):.1e} (coins begin at stop={stop:.1e}) and is biased; {reason}.",
        NumericalWarning,
        stacklevel=3,
    )
