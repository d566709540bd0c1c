r"""Minimisation from many starts at once, by projected BFGS steps in lockstep.

Each search keeps its own approximation H of the inverse Hessian [1]_. A round evaluates one trial
point of every search still running, :math:`x + t d` with :math:`d = -H g`, in one call: a trial
that falls short (Armijo) halves its own t, or does better by a parabola, and the others go on.
Coordinates at a bound that d leaves are held there for the step [2]_.

References
----------
.. [1] Nocedal and Wright (2006), Numerical Optimization, chapter 6.
.. [2] Bertsekas (1982), Projected Newton methods for optimization problems with simple constraints.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from skgp.optim.defaults import ARMIJO, LONGEST_STEP, SHORTEST_STEP

__all__ = ["BatchMinimum", "minimize_batch"]

ValuesAndGradients = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class BatchMinimum:
    """Where the searches ended.

    Attributes
    ----------
    x : ndarray of shape (k, p)
    value : ndarray of shape (k,)
        inf where the start was unusable.
    converged : ndarray of bool, shape (k,)
    n_evaluations : int
        Of single points.
    stopped : bool
        By the callback.
    """

    x: np.ndarray
    value: np.ndarray
    converged: np.ndarray
    n_evaluations: int
    stopped: bool


def minimize_batch(
    function: ValuesAndGradients,
    starts: np.ndarray,
    *,
    bounds: np.ndarray,
    max_iter: int = 100,
    tol: float = 1e-6,
    callback: Callback | None = None,
) -> BatchMinimum:
    """Search a minimum from each of the starts.

    Parameters
    ----------
    function : callable
        Maps points (k, p) to values (k,), inf where there is none, and gradients (k, p).
    starts : ndarray of shape (k, p)
        Moved inside the bounds.
    bounds : ndarray of shape (p, 2)
    max_iter : int, default=100
        Rounds, of one evaluation of each search.
    tol : float, default=1e-6
        A search ends where the fall that its quadratic model expects of a whole step,
        :math:`g^T H g / 2`, is less.
    callback : callable, optional
        ``callback(round, {"loss": float})`` of the least value; True stops.

    Returns
    -------
    BatchMinimum
    """
    low, high = bounds.T
    x = np.clip(np.asarray(starts, float), low, high)
    value, gradient = function(x)
    state = _Searches(x, value, gradient, low, high)
    stopped, n_evaluations, n_rounds = False, len(x), 0
    while n_rounds < max_iter and not stopped:
        running = state.running(tol)
        if len(running) == 0:
            break
        trial = state.trial(running)
        state.receive(running, trial, *function(trial))
        n_evaluations += len(running)
        n_rounds += 1
        stopped = callback is not None and bool(
            callback(n_rounds, {"loss": float(state.value.min())})
        )
    state.running(tol)
    return BatchMinimum(state.x, state.value, state.converged, n_evaluations, stopped)


class _Searches:
    """Points, gradients, inverse Hessians and step lengths of all searches."""

    def __init__(self, x, value, gradient, low, high) -> None:
        self.x, self.value, self.gradient = x, np.array(value, float), np.array(gradient, float)
        self._low, self._high = low, high
        k, p = x.shape
        self._H = np.broadcast_to(np.eye(p), (k, p, p)).copy()
        self._fresh = np.ones(k, dtype=bool)  # no curvature seen yet
        self._t = np.ones(k)
        self._ended = ~np.isfinite(self.value)
        self.converged = np.zeros(k, dtype=bool)
        self._d = np.zeros_like(x)
        self._slope = np.zeros(k)
        for i in np.flatnonzero(~self._ended).tolist():
            self._direct(i)

    def running(self, tol: float) -> np.ndarray:
        """Indices of the searches that are not over."""
        self.converged |= ~self._ended & (-0.5 * self._slope < tol)
        self._ended |= self.converged
        return np.flatnonzero(~self._ended)

    def trial(self, running: np.ndarray) -> np.ndarray:
        """The next point of each."""
        step = self._t[running, None] * self._d[running]
        return np.clip(self.x[running] + step, self._low, self._high)

    def receive(self, running, trial, value, gradient) -> None:
        """Take the values and gradients at the trial points."""
        for j, i in enumerate(running):
            expected = float(self.gradient[i] @ (trial[j] - self.x[i]))
            if value[j] <= self.value[i] + ARMIJO * min(expected, 0.0):
                s, y = trial[j] - self.x[i], gradient[j] - self.gradient[i]
                self.x[i], self.value[i], self.gradient[i] = trial[j], value[j], gradient[j]
                self._update(i, s, y)
                self._direct(i)
            else:
                # The parabola through the value and slope at x and the value of the trial.
                excess = value[j] - self.value[i] - expected
                best = -0.5 * expected / excess if math.isfinite(excess) and excess > 0 else 0.0
                self._t[i] *= min(max(best, 0.1), 0.5)
                self._ended[i] |= self._t[i] < SHORTEST_STEP

    def _update(self, i: int, s: np.ndarray, y: np.ndarray) -> None:
        """BFGS, [1]_ eq. (6.17); left out where the curvature along the step is not positive."""
        curvature = float(s @ y)
        if curvature <= 1e-10 * float(np.sqrt((s @ s) * (y @ y))):
            return
        if self._fresh[i]:
            self._H[i] *= curvature / float(y @ y)
            self._fresh[i] = False
        V = np.eye(len(s)) - np.outer(s, y) / curvature
        self._H[i] = V @ self._H[i] @ V.T + np.outer(s, s) / curvature

    def _direct(self, i: int) -> None:
        """The direction from the point reached, no longer than allowed."""
        g, x = self.gradient[i], self.x[i]
        held = ((x <= self._low) & (g > 0)) | ((x >= self._high) & (g < 0))
        free = ~held
        d = np.zeros_like(g)
        d[free] = -self._H[i][np.ix_(free, free)] @ g[free]
        self._d[i], self._t[i] = d, 1.0
        self._slope[i] = float(g @ d)
        longest = np.abs(d).max(initial=0.0)
        if longest > LONGEST_STEP or (self._fresh[i] and longest > 0):
            # Without any curvature seen, a first step of half a unit.
            self._t[i] = min(1.0, (0.5 if self._fresh[i] else LONGEST_STEP) / longest)
