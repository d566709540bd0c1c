r"""Fisher scoring and Anderson mixing: iterations that need few places.

Of a minimisation with an approximate Hessian at every point, such as Fisher's information, a step
is :math:`d = -(M(x))^{-1} g(x)` with a positive definite M; one that falls short (Armijo) is
shortened by a parabola. Coordinates at a bound that d leaves are held there [1]_.

Fixed-point iterations of a map :math:`x \mapsto G(x)` are mixed from their last few places [2]_,
whose residuals :math:`r = G(x) - x` say, to first order, how r changes with x. The next place is
the image of the one where it would be least,

.. math:: G(x_k) - \sum_i \gamma_i (\Delta x_i + \Delta r_i), \qquad
          \gamma = \arg\min_\gamma \Big\| r_k - \sum_i \gamma_i \Delta r_i \Big\|,
          \qquad \Delta x_i = x_k - x_i,

a secant method of several secants [3]_ that needs no more evaluations than the iteration itself.

References
----------
.. [1] Bertsekas (1982), Projected Newton methods for optimization problems with simple constraints.
.. [2] Anderson (1965), Iterative procedures for nonlinear integral equations.
.. [3] Walker and Ni (2011), Anderson acceleration for fixed-point iterations.
"""

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from scipy.linalg import lapack
from torch import Tensor

from skgp.linalg.runtime import namespace
from skgp.optim.bfgs import falls_enough, held_at_bounds, shortening
from skgp.optim.defaults import LONGEST_STEP, MIXED_PLACES, MIXING_RIDGE, SHORTEST_STEP

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


class AndersonMixing:
    """The places that an iteration has come through."""

    def __init__(self) -> None:
        self._places = deque[Tensor](maxlen=MIXED_PLACES + 1)

    def __len__(self) -> int:
        return len(self._places)

    def restart(self) -> None:
        """Forget them: the iteration jumped, or its map changed."""
        self._places.clear()

    def __call__(self, x: Tensor, image: Tensor, whiten: Callable[[Tensor], Tensor]) -> Tensor:
        """Where to go from x (...) with that image (...), tensors or arrays.

        `whiten` maps changes of x (k, ...) to vectors (k, p), whose norms say what counts.
        """
        xp = namespace(x)
        residual = image - x
        self._places.append(xp.stack([x, residual]))
        if len(self._places) == 1:
            return image
        *past, last = self._places
        changes = last - xp.stack(past)  # (k, 2, ...) of x and of its residual
        whitened = whiten(xp.concatenate([changes[:, 1], residual[None]]))
        A, rest = whitened[:-1], whitened[-1]
        gram = A @ A.T
        gram = gram + xp.diag(MIXING_RIDGE * gram.diagonal() + xp.finfo(gram.dtype).tiny)
        share = xp.linalg.solve(gram, A @ rest)
        return image - (share @ changes.sum(1).reshape(len(share), -1)).reshape(x.shape)
