"""Figures 2 and 3 of ``ulisse.py``: linear systems, solved to a tolerance and without bias."""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from _s2vgp_study import Row, Study
from _ulisse_problem import Draw, Problem, by_decade, draws
from torch import Tensor

from skgp.kernels import gram_tile
from skgp.linalg.cg import block_cg
from skgp.linalg.preconditioners import LowRankPreconditioner, rp_cholesky
from skgp.linalg.ulisse import ulisse

RANKS = (20, 100, 200)
TOL = 1e-8  # the paper's epsilon
SHIFTS = (3.0, 30.0)  # delta of the paper's preconditioner, in noise variances
_INNER_TOL = 1e-10  # of its systems: an outer iteration takes them for exact
_MAX_ITER = 20_000


class Products:
    """The matrix, whose products it counts."""

    def __init__(self, problem: Problem, u: np.ndarray, dtype: torch.dtype) -> None:
        self._operator, self._dtype = problem.operator(u, dtype), dtype
        self._noise = problem.split(u)[1]
        self.count = 0

    def __call__(self, V: Tensor, shift: float = 0.0) -> Tensor:
        """``(K + (noise + shift) I) V`` for V of shape (n, k)."""
        self.count += 1
        product = self._operator.matmul(V.T.to(self._dtype)).T.to(V)
        return product + (self._noise + shift) * V


# ------------------------------------------------------------- figure 2: preconditioners


def figure2(problem: Problem, quick: bool) -> Study:
    """Products, time and error of solvers, by the condition number."""
    rows: list[Row] = []
    low_rank(problem, problem.posterior.medians, 10)  # first calls take longer
    for draw in draws(problem, 4 if quick else 16):
        A = problem.matrix(draw.u)
        exact = torch.cholesky_solve(problem.y[:, None], torch.linalg.cholesky(A))
        for name, solve in _solvers(problem, draw):
            start = time.process_time()
            solution, products, residual = solve()
            rows.append(
                {
                    "condition": draw.decade,
                    "solver": name,
                    "products": products,
                    "seconds": time.process_time() - start,
                    "error": float((solution - exact).norm()),
                    "residual": residual,
                    "kappa": draw.condition,
                }
            )
    table = list(by_decade(rows, ("condition", "solver")))
    return Study({f"figure 2, {problem.name}: K s = y to {TOL:g}": table}, {"rows": rows})


Solution = tuple[Tensor, int, float]
Solver = Callable[[], Solution]


def _solvers(problem: Problem, draw: Draw) -> Iterator[tuple[str, Solver]]:
    def plain(dtype: torch.dtype, preconditioner: Any = None) -> Solution:
        products = Products(problem, draw.u, dtype)
        return _run(problem, products, preconditioner)

    yield "CG", lambda: plain(torch.float64)
    yield "CG, single precision", lambda: plain(torch.float32)
    for name, dtype in (("double", torch.float64), ("single", torch.float32)):
        yield (
            f"PCG, K + delta I, {name}",
            lambda dtype=dtype: min(
                (_nested(problem, draw, shift, dtype) for shift in SHIFTS), key=lambda run: run[1]
            ),
        )
    for rank in RANKS:
        yield (
            f"PCG, rank {rank}",
            lambda rank=rank: plain(torch.float64, low_rank(problem, draw.u, rank)),
        )


def _run(problem: Problem, products: Products, preconditioner: Any) -> Solution:
    columns = None if preconditioner is None else lambda V: preconditioner(V.T).T
    found = block_cg(
        products,
        problem.y[:, None],
        preconditioner=columns,
        tol=TOL,
        max_iter=_MAX_ITER,
        warn=False,
    )
    return found.solution, found.n_iter, float(found.residual.max())


def low_rank(problem: Problem, u: np.ndarray, rank: int, seed: int = 0) -> LowRankPreconditioner:
    """Randomly pivoted Cholesky of K plus the noise."""
    theta, noise = problem.split(u)
    kernel, X = problem.signal().clone_with_theta(theta.numpy()), problem.X
    diag = X.new_full((len(X),), float(theta[0].exp()))
    generator = torch.Generator().manual_seed(seed)
    found = rp_cholesky(
        lambda index: gram_tile(kernel, X, X[index]), diag, rank, generator=generator
    )
    return LowRankPreconditioner(found.factor.T.contiguous(), X.new_full((len(X),), noise))


def _nested(problem: Problem, draw: Draw, shift: float, dtype: torch.dtype) -> Solution:
    """The paper's: J = K + delta I, whose systems are solved by conjugate gradients too."""
    outer = Products(problem, draw.u, torch.float64)
    inner = Products(problem, draw.u, dtype)
    delta = shift * problem.split(draw.u)[1]
    tol = _INNER_TOL if dtype == torch.float64 else 1e-6

    def precondition(V: Tensor) -> Tensor:
        return block_cg(
            lambda W: inner(W, delta), V, tol=tol, max_iter=_MAX_ITER, warn=False
        ).solution

    found = block_cg(
        outer,
        problem.y[:, None],
        preconditioner=precondition,
        tol=TOL,
        max_iter=200,
        warn=False,
    )
    return found.solution, outer.count + inner.count, float(found.residual.max())


# ------------------------------------------------------------------------ figure 3: ULISSE


def figure3(problem: Problem, quick: bool) -> Study:
    """Products, spread and bias of unbiased solutions, by the condition number."""
    sample = draws(problem, 8 if quick else 24)
    repetitions = 40 if quick else 300
    rows = []
    for draw in sample[2 :: 2 if quick else 6]:
        rows += list(_unbiased(problem, draw, repetitions))
    title = f"figure 3, {problem.name}: K^-1 y from {repetitions} runs of each solver"
    return Study({title: rows}, {"rows": rows})


def _settings() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, rank of the preconditioner, arguments of `ulisse`."""
    yield "CG", 0, {"stop": 0.0, "tol": TOL}
    for beta in (1.0, 100.0):
        for q in (0.1, 1.0):
            yield (
                f"paper, beta {beta:g}, q {q:g}",
                0,
                {"stop": q, "roulette": beta},
            )
    for stop in (0.1, 1.0):
        yield f"adaptive, q {stop:g}", 0, {"stop": stop}
    yield "adaptive, q 0.1, rank 100", 100, {"stop": 0.1}


def _unbiased(problem: Problem, draw: Draw, repetitions: int) -> Iterator[Row]:
    """A row a solver; norms are those of K, in which the increments are orthogonal."""
    A = problem.matrix(draw.u)
    factor = torch.linalg.cholesky(A)
    exact = torch.cholesky_solve(problem.y[:, None], factor)[:, 0]
    length = float((factor.T @ exact).norm())
    energies = increment_energies(A, problem.y)
    for name, rank, options in _settings():
        preconditioner = low_rank(problem, draw.u, rank) if rank else None
        generator = torch.Generator().manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the table is about
            runs = [
                ulisse(
                    lambda V: V @ A,
                    problem.y[None],
                    generator=generator,
                    preconditioner=preconditioner,
                    max_iter=_MAX_ITER,
                    **options,
                )
                for _ in range(1 if name == "CG" else repetitions)
            ]
        S = torch.cat([run.solution for run in runs])
        errors = (S - exact) @ factor / length
        bias, spread = float(errors.mean(0).norm()), float(errors.var(0, correction=0).sum()) ** 0.5
        # y's exceeds or falls short as a whole: the quadratic form of the evidence.
        forms = S @ problem.y - exact @ problem.y
        sure = runs[0].n_sure
        plain = energies[sure:].sum() / energies.sum() if rank == 0 else math.nan
        yield {
            "kappa": f"{draw.condition:.1e}",
            "solver": name,
            "products": float(np.mean([run.n_iter for run in runs])),
            "sd": float(S.std(0, correction=0).mean()),
            "sd / length": spread,
            "by formula": _formula(energies, sure, options) if rank == 0 else "",
            "stopped": float(plain) ** 0.5,
            "bias": bias,
            "noise of it": spread / math.sqrt(len(runs)),
            "z": _z(forms) if len(runs) > 1 else math.nan,
        }


def _z(errors: Tensor) -> float:
    """Mean in standard errors; without bound where all draws are the same and wrong."""
    mean, spread = float(errors.mean()), float(errors.std())
    certain = spread < 1e-9 * abs(mean)
    return math.copysign(math.inf, mean) if certain else mean / spread * math.sqrt(len(errors))


def increment_energies(A: Tensor, b: Tensor) -> np.ndarray:
    """Squared norms in A of the increments of algorithm 1, to the tolerance."""
    residual, direction, found = b.clone(), b.clone(), []
    squared = float(residual @ residual)
    target = squared * TOL**2
    while squared > target and len(found) < _MAX_ITER:
        product = A @ direction
        step = squared / float(direction @ product)
        found.append(step * squared)
        residual -= step * product
        new = float(residual @ residual)
        direction = residual + new / squared * direction
        squared = new
    return np.array(found)


def _formula(energies: np.ndarray, n_sure: int, options: dict[str, Any]) -> str:
    """Standard deviation over length by sum_j a_j^2 (1 / q_j - 1), of the paper's weights."""
    beta = options.get("roulette")
    if beta is None:
        return ""
    left = energies[n_sure:]
    j = np.arange(1, len(left) + 1)
    log10_terms = (np.log(left) + beta * j * (j + 1) / 2) / math.log(10)
    log10_total = float(log10_terms.max()) - math.log10(energies.sum())
    exponent = 0.5 * log10_total
    return f"1e{exponent:.0f}" if abs(exponent) > 3 else f"{10**exponent:.2g}"
