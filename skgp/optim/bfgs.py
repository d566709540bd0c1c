r"""Deterministic minimisation by quasi-Newton steps: over tensors, over a vector, from many starts.

:func:`minimize_lbfgs` and :func:`minimize_within` hand SciPy's L-BFGS-B [1]_ one vector and keep
the best point seen, whatever ends the search.

:func:`minimize_batch` runs projected BFGS searches in lockstep. Each keeps its own approximation H
of the inverse Hessian [2]_. A round evaluates one trial point of every search still running,
:math:`x + t d` with :math:`d = -H g`, in one call: a trial that falls short (Armijo) halves its own
t, or does better by a parabola, and the others go on. Coordinates at a bound that d leaves are held
there for the step [3]_.

References
----------
.. [1] Byrd, Lu, Nocedal and Zhu (1995), A limited memory algorithm for bound constrained
   optimization.
.. [2] Nocedal and Wright (2006), Numerical Optimization, chapter 6.
.. [3] Bertsekas (1982), Projected Newton methods for optimization problems with simple constraints.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import Bounds, minimize
from torch import Tensor

from skgp.linalg.runtime import Callback
from skgp.optim import defaults


def held_at_bounds(
    x: np.ndarray, gradient: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Which coordinates (p,) lie at a bound that a step against the gradient would leave."""
    return ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))


def falls_enough(value: float, loss: float, expected: float) -> bool:
    """Armijo's rule: the value of a trial beside the loss before and the change that g expects."""
    return value <= loss + defaults.ARMIJO * min(expected, 0.0)


def shortening(value: float, loss: float, expected: float) -> float:
    """Factor of a step refused: to the least value of the parabola through both ends and g."""
    excess = value - loss - expected
    best = -0.5 * expected / excess if math.isfinite(excess) and excess > 0 else 0.0
    return min(max(best, defaults.SHORTENED[0]), defaults.SHORTENED[1])


ValueAndGradient = Callable[[np.ndarray], tuple[float, np.ndarray]]


class _Refusing:
    """An objective that remembers its best point, and refuses steps to where it is not usable.

    That is where it is not finite or raises an error that says so (a matrix that cannot be
    factored, a `NonFiniteLossError`). A refusal is a loss not far above the best, with no slope:
    neither an infinity nor, of nearly singular covariances, 1e9 lets the line search interpolate.

    It ends a search, by StopIteration, that stands still: `STANDS_STILL` evaluations in a row
    within `tol` of the best, relative to it if above 1, of which none lowers it by more. Where the
    gradient is less exact than the loss (that of an ELBO), a line search would go on.
    """

    def __init__(
        self,
        objective: ValueAndGradient,
        start: np.ndarray,
        *,
        strict: bool = False,  # pass an error at the start on
        refuse_far: bool = False,  # refuse what is finite, too, where it is far above the best
        tol: float = 0.0,
        tell: Callable[[float], bool] = lambda loss: False,
    ) -> None:
        self._objective, self._tell = objective, tell
        self._strict, self._refuse_far, self._tol, self._n_still = strict, refuse_far, tol, 0
        self.best, self.x, self.n_evaluations = math.inf, start, 0

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        self.n_evaluations += 1
        found = math.isfinite(self.best)
        least = self.best if found else 0.0
        refusal = least + defaults.REFUSAL * (1 + abs(least))
        try:
            value, gradient = self._objective(x)
            usable = math.isfinite(value) and bool(np.isfinite(gradient).all())
        except (ValueError, FloatingPointError):
            if self._strict and not found:
                raise
            usable = False
        if not usable or (found and self._refuse_far and value > refusal):
            return refusal, np.zeros_like(x)
        fall, negligible = self.best - value, self._tol * max(1.0, abs(least))
        if fall > negligible:
            self._n_still = 0
        elif fall > -negligible:
            self._n_still += 1
        if value < self.best:
            self.best, self.x = value, x.copy()
        if self._tell(value) or self._n_still >= defaults.STANDS_STILL:
            raise StopIteration
        return value, gradient


@dataclass
class LBFGSResult:
    """Where the search ended."""

    parameters: dict[str, Tensor]  # the best point seen; new tensors
    loss: float
    n_iter: int = 0
    n_evaluations: int = 0
    history: list[float] = field(default_factory=list)  # loss after each iteration
    converged: bool = False  # the tolerance ended the search, not `max_iter` or the callback
    stopped: bool = False  # the callback did


def minimize_lbfgs(
    compute_loss: Callable[[dict[str, Tensor]], Tensor | tuple[float, dict[str, Tensor]]],
    start: Mapping[str, Tensor],  # not modified
    *,
    max_iter: int,  # iterations, of one evaluation each but for line searches
    tol: float = 1e-7,  # relative fall of the loss at which to stop; absolute below a loss of 1
    bounds: Mapping[str, tuple[Tensor, Tensor]] | None = None,  # (low, high); others are free
    callback: Callback | None = None,
) -> LBFGSResult:
    """Minimise a loss over several tensors at once.

    `compute_loss` maps tensors of the names and shapes of `start`, which is moved inside the
    bounds, to a scalar with a graph to them, or to a number and the gradients by name. A loss or
    gradient that is not finite, or an error that says so (a matrix that cannot be factored, a
    `NonFiniteLossError`), refuses the step. ``callback(iteration, {"loss": float, "parameters":
    callable})``, of which the callable returns the tensors reached, stops by True.

    O(k p) an iteration besides the loss, for p numbers and k <= 50 curvature pairs, fewer where
    they would take more than 400 MB.
    """
    shapes = {name: value.shape for name, value in start.items()}
    sizes = [value.numel() for value in start.values()]
    like = next(iter(start.values()))
    low, high = _box(start, bounds or {})
    x0 = np.clip(_to_vector(start.values()), low, high)
    result = LBFGSResult({}, math.inf)

    def unpack(x: np.ndarray) -> dict[str, Tensor]:
        parts = torch.from_numpy(x.copy()).to(device=like.device, dtype=like.dtype).split(sizes)
        return {name: p.reshape(shapes[name]) for name, p in zip(shapes, parts, strict=True)}

    def of_vector(x: np.ndarray) -> tuple[float, np.ndarray]:
        leaves = {name: value.requires_grad_() for name, value in unpack(x).items()}
        loss = compute_loss(leaves)
        if isinstance(loss, tuple):
            return loss[0], _to_vector(loss[1][name] for name in leaves)
        parts = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        value_and_gradient = _to_vector([loss, *parts])
        return float(value_and_gradient[0]), value_and_gradient[1:]

    def after_iteration(intermediate_result) -> None:
        result.n_iter += 1
        result.history.append(float(intermediate_result.fun))
        x = intermediate_result.x
        info = {"loss": result.history[-1], "parameters": lambda: unpack(x)}
        if callback is not None and callback(result.n_iter, info):
            result.stopped = True
            raise StopIteration

    objective = _Refusing(of_vector, x0, strict=True, tol=tol)
    n_pairs = max(5, min(defaults.N_PAIRS, int(defaults.HISTORY_NUMBERS / (2 * len(x0)))))
    limits: dict = {"max_iter": max_iter, "tol": tol, "gtol": 1e-8, "n_pairs": n_pairs}
    success = _lbfgs(objective, x0, Bounds(low, high), after_iteration, **limits)
    result.converged = success and not result.stopped
    result.n_evaluations = objective.n_evaluations
    result.loss, result.parameters = objective.best, unpack(objective.x)
    return result


def _lbfgs(
    objective: _Refusing,
    start: np.ndarray,
    bounds: Bounds,
    callback: Callable | None = None,
    *,
    max_iter: int,
    tol: float,
    gtol: float,
    n_pairs: int,
) -> bool:
    """SciPy's L-BFGS-B; whether a tolerance ended it, or the objective by StopIteration."""
    options = {"maxiter": max_iter, "maxcor": n_pairs, "ftol": tol, "gtol": gtol}
    how: dict = {"jac": True, "method": "L-BFGS-B", "callback": callback, "options": options}
    if np.isfinite([bounds.lb, bounds.ub]).any():  # SciPy loops over them in Python
        how["bounds"] = bounds
    try:
        return bool(minimize(objective, start, **how).success)
    except StopIteration:
        return True


def _to_vector(tensors) -> np.ndarray:
    """Concatenate tensors of one device to one float64 vector, in one transfer."""
    return torch.cat([t.detach().double().reshape(-1) for t in tensors]).cpu().numpy()


def _box(start: Mapping[str, Tensor], bounds) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the vector, infinite where there are none."""
    free = {name: torch.full_like(value, math.inf) for name, value in start.items()}
    low = [bounds[name][0] if name in bounds else -free[name] for name in start]
    high = [bounds[name][1] if name in bounds else free[name] for name in start]
    return _to_vector(low), _to_vector(high)


def minimize_within(
    objective: ValueAndGradient,
    start: np.ndarray,
    bounds: np.ndarray,
    *,
    max_iter: int,
    tol: float,
    gtol: float = 1e-4,
    refuse_far: bool = True,
    strict: bool = False,
    n_pairs: int = 10,
    tell: Callable[[float], bool] = lambda loss: False,
) -> tuple[np.ndarray, float]:
    """The best point (p,) that L-BFGS-B sees, and its loss; infinite where the start is not usable.

    The start is moved inside the bounds (p, 2). `tol` is the relative fall of the loss in an
    iteration below which to stop, absolute below a loss of 1, `gtol` the greatest element of the
    projected gradient at which to; `refuse_far` bounds losses far above the best, which are those
    of nearly singular covariances; `strict` passes an error at the start on; `tell` is told of the
    loss of each evaluation, and ends the search by True.
    """
    start = np.clip(start, bounds[:, 0], bounds[:, 1])
    how: dict = {"strict": strict, "refuse_far": refuse_far, "tol": tol, "tell": tell}
    guarded = _Refusing(objective, start, **how)
    if len(start) == 0:
        guarded(start)
        return start, guarded.best
    limits: dict = {"max_iter": max_iter, "tol": tol, "gtol": gtol, "n_pairs": n_pairs}
    _lbfgs(guarded, start, Bounds(*bounds.T), **limits)
    return guarded.x, guarded.best


def minimize_by_curvature(
    objective: ValueAndGradient,
    start: np.ndarray,
    bounds: np.ndarray,
    *,
    inverse_hessian: np.ndarray,
    max_iter: int,
    tol: float,
    tell: Callable[[float], bool] = lambda loss: False,
) -> tuple[np.ndarray, float]:
    """As :func:`minimize_within`, by BFGS from a start (p,) near which the curvature is known.

    The search ends where the inverse Hessian (p, p), updated, expects a fall below `tol`.
    """
    guarded = _Refusing(objective, start, refuse_far=True, tell=tell)

    def of_one(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = guarded(points[0])
        return np.array([value]), gradient[None]

    options: dict = {"max_iter": max_iter, "tol": tol, "inverse_hessian": inverse_hessian}
    try:
        minimize_batch(of_one, start[None], bounds=bounds, **options)
    except StopIteration:
        pass
    return guarded.x, guarded.best


ValuesAndGradients = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class BatchMinimum:
    """Where the searches ended."""

    x: np.ndarray  # (k, p)
    value: np.ndarray  # (k,), inf where the start was unusable
    converged: np.ndarray  # (k,), bool
    n_evaluations: int  # of single points
    stopped: bool  # by the callback


def minimize_batch(
    function: ValuesAndGradients,  # points (k, p) -> values (k,), inf where none; gradients (k, p)
    starts: np.ndarray,  # (k, p), moved inside the bounds
    *,
    bounds: np.ndarray,  # (p, 2)
    max_iter: int = 100,  # rounds, of one evaluation of each search
    tol: float = 1e-6,
    inverse_hessian: np.ndarray | None = None,  # (p, p), about what it is at the starts
    callback: Callback | None = None,  # callback(round, {"loss": least value}); True stops
) -> BatchMinimum:
    """Search a minimum from each of the starts.

    A search ends where the fall that its quadratic model expects of a whole step,
    :math:`g^T H g / 2`, is less than `tol`.
    """
    low, high = bounds.T
    x = np.clip(np.asarray(starts, float), low, high)
    value, gradient = function(x)
    state = _Searches(x, value, gradient, low, high, inverse_hessian)
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

    def __init__(self, x, value, gradient, low, high, inverse_hessian) -> None:
        self.x, self.value, self.gradient = x, np.array(value, float), np.array(gradient, float)
        self._low, self._high = low, high
        k, p = x.shape
        known = inverse_hessian is not None
        self._H = np.broadcast_to(inverse_hessian if known else np.eye(p), (k, p, p)).copy()
        self._fresh = np.full(k, not known)  # no curvature seen yet
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
            if falls_enough(value[j], self.value[i], expected):
                s, y = trial[j] - self.x[i], gradient[j] - self.gradient[i]
                self.x[i], self.value[i], self.gradient[i] = trial[j], value[j], gradient[j]
                self._update(i, s, y)
                self._direct(i)
            else:
                self._t[i] *= shortening(value[j], self.value[i], expected)
                self._ended[i] |= self._t[i] < defaults.SHORTEST_STEP

    def _update(self, i: int, s: np.ndarray, y: np.ndarray) -> None:
        """BFGS, [2]_ eq. (6.17); left out where the curvature along the step is not positive."""
        curvature = float(s @ y)
        if curvature <= defaults.LEAST_CURVATURE * float(np.sqrt((s @ s) * (y @ y))):
            return
        if self._fresh[i]:
            self._H[i] *= curvature / float(y @ y)
            self._fresh[i] = False
        V = np.eye(len(s)) - np.outer(s, y) / curvature
        self._H[i] = V @ self._H[i] @ V.T + np.outer(s, s) / curvature

    def _direct(self, i: int) -> None:
        """The direction from the point reached, no longer than allowed."""
        g, x = self.gradient[i], self.x[i]
        free = ~held_at_bounds(x, g, self._low, self._high)
        d = np.zeros_like(g)
        d[free] = -self._H[i][np.ix_(free, free)] @ g[free]
        self._d[i], self._t[i] = d, 1.0
        self._slope[i] = float(g @ d)
        longest = np.abs(d).max(initial=0.0)
        if longest > defaults.LONGEST_STEP or (self._fresh[i] and longest > 0):
            self._t[i] = min(
                1.0, (defaults.FIRST_STEP if self._fresh[i] else defaults.LONGEST_STEP) / longest
            )
