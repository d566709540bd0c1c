r"""Minimisation with an approximate Hessian at every point, such as Fisher's information.

A step is :math:`d = -(M(x))^{-1} g(x)` with a positive definite M; one that falls short (Armijo) is
shortened by a parabola. Coordinates at a bound that d leaves are held there [1]_.

References
----------
.. [1] Bertsekas (1982), Projected Newton methods for optimization problems with simple constraints.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy.linalg import lapack

from skgp.optim.bfgs import falls_enough, held_at_bounds, shortening
from skgp.optim.defaults import LONGEST_STEP, SHORTEST_STEP

#: At x (p,): the loss, inf where it is not defined; its gradient (p,); and a function that returns
#: the approximate Hessian (p, p), or None to keep the one before.
Scored = tuple[float, np.ndarray, Callable[[], np.ndarray] | None]


def minimize_scored(
    function: Callable[[np.ndarray], Scored],
    start: np.ndarray,  # (p,), inside the bounds
    bounds: np.ndarray,  # (p, 2)
    *,
    max_evaluations: int,  # besides that at the start
    tol: float,
    tell: Callable[[float], bool] = lambda loss: False,
) -> tuple[np.ndarray, float]:
    """The best point (p,) and its loss.

    The search ends where the fall that the quadratic model expects of a whole step,
    :math:`g^T M^{-1} g / 2`, is less than `tol`, or where `tell`, called with the least loss after
    each evaluation, returns True.
    """
    (low, high), x = bounds.T, start
    loss, gradient, hessian = function(x)
    if hessian is None or not math.isfinite(loss):
        return x, loss
    M = hessian()
    (d, slope, t), overshoots = _step(M, x, gradient, low, high), False
    for _ in range(max_evaluations):
        if -0.5 * slope < tol or t < SHORTEST_STEP:
            break
        trial = np.minimum(np.maximum(x + t * d, low), high)
        value, at_trial, hessian = function(trial)
        expected = float(gradient @ (trial - x))
        if falls_enough(value, loss, expected):
            M = M if hessian is None else hessian()
            if overshoots:
                M = _with_secant(M, trial - x, at_trial - gradient)
            x, loss, gradient = trial, value, at_trial
            d, slope, t = _step(M, x, gradient, low, high)
        else:
            t, overshoots = t * shortening(value, loss, expected), True
        if tell(loss):
            break
    return x, loss


def _step(
    M: np.ndarray, x: np.ndarray, gradient: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float, float]:
    """Direction, slope along it, and the length to begin with."""
    held = held_at_bounds(x, gradient, low, high)
    if held.any():
        free, d = np.flatnonzero(~held), np.zeros_like(gradient)
        d[free] = -_solve(M[np.ix_(free, free)], gradient[free])
    else:
        d = -_solve(M, gradient)
    longest = float(np.abs(d).max(initial=0.0))
    return d, float(gradient @ d), min(1.0, LONGEST_STEP / longest) if longest > 0 else 1.0


def _with_secant(M: np.ndarray, s: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The BFGS update of M by the last step s, over which the gradient changed by y.

    Left out where the curvature along the step is no more than M has there.
    """
    Ms, curvature = M @ s, float(s @ y)
    if curvature <= s @ Ms:
        return M
    return M + np.outer(y, y) / curvature - np.outer(Ms, Ms) / (s @ Ms)


def _solve(M: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``M^-1 b``, by Cholesky where rounding leaves M positive definite."""
    if not len(b):
        return b
    x, failed = lapack.dposv(M, b)[1:]
    return np.linalg.solve(M, b) if failed else x
