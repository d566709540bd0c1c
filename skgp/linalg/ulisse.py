r"""ULISSE [1]_: preconditioned conjugate gradients stopped early without bias.

Of :math:`A^{-1} b = x_0 + \delta_1 + \dots + \delta_T`, once the residual is below a loose
tolerance, at :math:`l`, every further increment is taken with some probability and scaled up by its
inverse:

::

    x_0 + delta_1 + ... + delta_l  +  delta_{l+1} / q_1  +  delta_{l+2} / q_2  + ...
          always                      survived 1 coin       survived 2 coins

where :math:`q_j` is the probability of surviving j coins. The expectation is the sum up to T.

======================  ===============================================================
:func:`ulisse`          The paper, equation (12)
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

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.cg import Matmul, Recursion
from skgp.linalg.defaults import CONVERGED


@dataclass(frozen=True)
class UlisseResult:
    """Outcome of :func:`ulisse`."""

    solution: Tensor  # (k, n), unbiased for B A^-1; all rows share their coins
    second: Tensor  # (n_paired, n), independent draws of the first rows, given B and the start
    #: (k, n), plain iterate of conjugate gradients, which is biased and has the smaller error:
    #: where to start a system nearby.
    iterate: Tensor
    residual: Tensor  # (k,), relative, of `iterate`, by recursion
    n_iter: int  # each costs one product
    n_sure: int  # iterations before the coins
    survival: list[float]  # probabilities with which each iteration after `n_sure` was reached
    truncated: tuple[bool, bool]  # a coin ended `solution`, `second`; else the iteration converged
    converged: bool  # the coins or `tol` ended the iteration, not `max_iter` nor a breakdown


def ulisse(
    matmul: Matmul,  # V (k, n) -> V A
    B: Tensor,  # (k, n)
    *,
    generator: torch.Generator,  # of the coins
    preconditioner: Matmul | None = None,  # V (k, n) -> V P^-1, symmetric positive definite
    #: (k, n), zero by default. Must not depend on the coins of the same estimate: an `iterate` and
    #: not a `solution` of before.
    start: Tensor | None = None,
    #: Relative residual of all rows at which the coins begin; at or below `tol` there are none and
    #: this is the usual iteration, biased by its tolerance.
    stop: float = 0.03,
    tol: float | None = None,  # at which a row has converged; 1e-5 in float32, 1e-10 in float64
    roulette: str | float = "adaptive",
    n_paired: int = 0,  # rows that get a second solution, from coins of their own
    max_iter: int = 1000,
) -> UlisseResult:
    r"""Unbiased estimate of :math:`B A^{-1}`, A symmetric positive definite; see the module.

    Right-hand sides are rows: a product ``V K`` with few rows is two to three times as fast as
    ``K V`` with few columns. `roulette` is "adaptive", survival in proportion to the increments, or
    the :math:`\beta` of :math:`\exp(-\beta j (j+1) / 2)`, not negative and 1 for "paper". A
    NumericalWarning where the iteration did not converge.

    A coin is flipped before the product that it decides upon. The size of the increment is known
    by then but for its step length, for which the last one stands: any rule that looks at no coin
    is unbiased. One product with A and one with the preconditioner an iteration; ``7 k n`` numbers.
    """
    tol = CONVERGED[B.dtype] if tol is None else tol
    beta = _beta(roulette)
    X, R = torch.zeros_like(B) if start is None else start.clone(), B.clone()
    if start is not None:
        moved = (start != 0).any(1)  # only these rows need the product
        if bool(moved.any()):
            R[moved] -= matmul(start[moved])
    cg = Recursion(matmul, preconditioner, B, X, R, tol, dim=1)
    if stop > tol and not cg.unfinished(stop):
        cg.step()  # a start within `stop`: the first increment gives the others their scale
    while cg.n_iter < max_iter and cg.unfinished(stop) and not cg.stalled:
        cg.step()
    n_sure = cg.n_iter
    reached = not (cg.stalled or cg.unfinished(stop))
    draws, survival = _Draws(cg.X, n_paired), []
    if stop > tol and reached:
        weights = _Survival(cg.energy_scale(stop), beta)
        survival = _flip_coins(cg, weights, draws, generator, max_iter)
    ended = not draws.alive or not cg.unfinished() or stop <= tol
    converged = reached and not cg.stalled and ended
    if not converged:
        _warn(cg, max_iter, stop)
    return UlisseResult(
        *draws.solutions, *draws.iterate(cg), cg.n_iter, n_sure, survival, draws.ended, converged
    )


def _beta(roulette: str | float) -> float | None:
    """Of the paper's weights; None for survival in proportion to the increments."""
    named = {"adaptive": None, "paper": 1.0}
    if isinstance(roulette, str):
        if roulette in named:
            return named[roulette]
        raise ValueError(f'roulette must be "adaptive", "paper" or a number, got {roulette!r}.')
    if roulette < 0:
        raise ValueError(f"roulette={roulette} is negative: weights must not be below 1.")
    return roulette


def _flip_coins(
    cg: Recursion, weights: _Survival, draws: _Draws, generator: torch.Generator, max_iter: int
) -> list[float]:
    """Iterations as long as a coin allows; the probability with which each was reached."""
    survival: list[float] = []
    while cg.n_iter < max_iter and cg.unfinished() and not cg.stalled and draws.alive:
        chance = weights.advance(cg.predicted_energy())
        draws.flip(chance, generator, cg)
        if draws.alive:
            survival.append(weights.survival)
            increment = cg.step()
            if increment is not None:
                draws.add(increment, weights.survival)
    return survival


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

    def flip(self, chance: float, generator: torch.Generator, cg: Recursion) -> None:
        """A coin for each solution that is alive; the rows that nobody needs leave `cg`."""
        coins = torch.rand(
            2, generator=generator, dtype=torch.float64, device=generator.device
        ).tolist()
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

    def iterate(self, cg: Recursion) -> tuple[Tensor, Tensor]:
        """Plain iterate (k, n) and its residual (k,), of rows gone and rows that went on."""
        X, residual = cg.X, cg.residual
        if self._left is not None:
            X, residual = torch.cat([X, self._left[0]]), torch.cat([residual, self._left[1]])
        return X, residual[:, 0]


def _warn(cg: Recursion, max_iter: int, stop: float) -> None:
    """Say why unbiased estimates did not converge."""
    reason = (
        "the matrix is not positive definite to the precision of its products: use float64 or a "
        "larger noise variance"
        if cg.stalled
        else f"max_iter={max_iter} was reached: raise it or the rank of the preconditioner"
    )
    warn_caller(
        f"ULISSE ended after {cg.n_iter} iterations at a relative residual of "
        f"{float(cg.residual.max()):.1e} (coins begin at stop={stop:.1e}) and is biased; {reason}.",
        NumericalWarning,
    )
