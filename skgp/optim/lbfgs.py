r"""Deterministic minimisation of a differentiable loss over several tensors, by L-BFGS-B [1]_.

SciPy's implementation does the steps; this module hands it one vector made of the tensors and keeps
the best point seen, whatever ends the search.

References
----------
.. [1] Byrd, Lu, Nocedal and Zhu (1995), A limited memory algorithm for bound constrained
   optimization.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import Bounds, minimize
from torch import Tensor

from skgp.optim.defaults import HISTORY_NUMBERS, N_PAIRS

__all__ = ["LBFGSResult", "minimize_lbfgs"]

Callback = Callable[[int, dict], bool | None]


@dataclass
class LBFGSResult:
    """Where the search ended.

    Attributes
    ----------
    parameters : dict of str to Tensor
        The best point seen; new tensors.
    loss : float
        Its loss.
    n_iter, n_evaluations : int
    history : list of float
        Loss after each iteration.
    converged : bool
        Whether the tolerance ended the search, and not `max_iter` or the callback.
    stopped : bool
        Whether the callback did.
    """

    parameters: dict[str, Tensor]
    loss: float
    n_iter: int = 0
    n_evaluations: int = 0
    history: list[float] = field(default_factory=list)
    converged: bool = False
    stopped: bool = False


def minimize_lbfgs(
    compute_loss: Callable[[dict[str, Tensor]], Tensor | tuple[float, dict[str, Tensor]]],
    start: Mapping[str, Tensor],
    *,
    max_iter: int,
    tol: float = 1e-7,
    bounds: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    callback: Callback | None = None,
) -> LBFGSResult:
    """Minimise a loss over several tensors at once.

    Parameters
    ----------
    compute_loss : callable
        Maps tensors of the names and shapes of `start` to a scalar with a graph to them, or to a
        number and the gradients by name. A loss or gradient that is not finite, or an error that
        says so (a matrix that cannot be factored, a `NonFiniteLossError`), refuses the step.
    start : dict of str to Tensor
        Not modified.
    max_iter : int
        Iterations, of one evaluation each but for line searches.
    tol : float, default=1e-7
        Relative fall of the loss in an iteration below which to stop; absolute below a loss of 1.
    bounds : dict of str to (low, high), optional
        Tensors of the shape of the parameter; others are free. The start is moved inside.
    callback : callable, optional
        ``callback(iteration, {"loss": float, "parameters": callable})``, of which the callable
        returns the tensors reached; True stops.

    Returns
    -------
    LBFGSResult

    Notes
    -----
    Each iteration costs one loss and gradient, and O(k p) for p numbers and k <= 50 curvature
    pairs, fewer where they would take more than 400 MB.
    """
    shapes = {name: value.shape for name, value in start.items()}
    sizes = [value.numel() for value in start.values()]
    like = next(iter(start.values()))
    low, high = _box(start, bounds or {})
    x0 = np.clip(_to_vector(start.values()), low, high)
    best: list = [math.inf, x0]
    result = LBFGSResult({}, math.inf)

    def unpack(x: np.ndarray) -> dict[str, Tensor]:
        parts = torch.from_numpy(x.copy()).to(device=like.device, dtype=like.dtype).split(sizes)
        return {name: p.reshape(shapes[name]) for name, p in zip(shapes, parts, strict=True)}

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        result.n_evaluations += 1
        leaves = {name: value.requires_grad_() for name, value in unpack(x).items()}
        try:
            loss = compute_loss(leaves)
            if isinstance(loss, tuple):
                value, gradient = loss[0], _to_vector(loss[1][name] for name in leaves)
            else:
                parts = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                value, gradient = loss.item(), _to_vector(parts)
        except (ValueError, FloatingPointError):
            if math.isinf(best[0]):
                raise  # the start itself is not usable, and the error says why
            return _refusal(best[0], x)
        if not (math.isfinite(value) and np.isfinite(gradient).all()):
            return _refusal(best[0], x)
        if value < best[0]:
            best[:] = [value, x.copy()]
        return value, gradient

    def after_iteration(intermediate_result) -> None:
        result.n_iter += 1
        result.history.append(float(intermediate_result.fun))
        x = intermediate_result.x
        info = {"loss": result.history[-1], "parameters": lambda: unpack(x)}
        if callback is not None and callback(result.n_iter, info):
            result.stopped = True
            raise StopIteration

    n_pairs = max(5, min(N_PAIRS, int(HISTORY_NUMBERS / (2 * len(x0)))))
    found = minimize(
        objective,
        x0,
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(low, high) if bounds else None,
        callback=after_iteration,
        options={"maxiter": max_iter, "maxcor": n_pairs, "ftol": tol, "gtol": 1e-8},
    )
    result.converged = bool(found.success) and not result.stopped
    result.loss, result.parameters = best[0], unpack(best[1])
    return result


def _refusal(best: float, x: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient that send the line search back; it could not interpolate an infinity."""
    least = best if math.isfinite(best) else 0.0
    return least + 1e3 * (1 + abs(least)), np.zeros_like(x)


def _to_vector(tensors) -> np.ndarray:
    """Concatenate tensors to one float64 vector."""
    return np.concatenate([t.detach().cpu().double().numpy().ravel() for t in tensors])


def _box(start: Mapping[str, Tensor], bounds) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the vector, infinite where there are none."""
    free = {name: torch.full_like(value, math.inf) for name, value in start.items()}
    low = [bounds[name][0] if name in bounds else -free[name] for name in start]
    high = [bounds[name][1] if name in bounds else free[name] for name in start]
    return _to_vector(low), _to_vector(high)
