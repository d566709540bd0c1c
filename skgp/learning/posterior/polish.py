r"""The mode of the posterior by gradients alone, where its value cannot be had.

A quasi-Newton search (BFGS [1]_) for a root of the gradient, estimated with probes that stay, so
that it is a smooth function of u, up to the tolerance of its linear systems:

::

    start: mode and curvature of a likelihood by nearest neighbours (starts.py)
    repeat   step = M g, at most 0.7 long
             where the slope g.step at its end is too negative: the step was too long
             M <- BFGS update with the change of g, whether the step was taken or not
             the linear systems take more than 15 iterations: a larger preconditioner, new probes
    until    g' M g < 0.02^2

There is no value to descend in: the slope along the step takes its place (a secant search). With M
near the covariance of the posterior, :math:`\sqrt{g^T M g}` is the distance to the mode in standard
deviations, and half its square the gain still to be had, in nats.

References
----------
.. [1] Nocedal and Wright (2006), Numerical optimization, section 6.1 and procedure 18.2 (damping).
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.starts import find_start
from skgp.learning.posterior.stochastic_gradient import Probes, StochasticGradient
from skgp.linalg.exceptions import NumericalWarning
from skgp.optim.stopping import StopRecorder

__all__ = ["FixedProbeGradient", "StochasticMode", "find_mode_stochastically", "polish"]

Callback = Callable[[int, dict], bool | None]

STOPPED = "the set-up was stopped by the callback: the mode found so far stands for the posterior's"

_N_PROBES = 16
_ROUGH, _FINE = 0.01, 1e-4  # relative residuals of the linear systems, far from the mode and near
_TOL_SHARE = 3e-3  # and between, of the distance to it in standard deviations
_MAX_CG = 150  # iterations after which a step is refused
_EASY_CG = 15  # iterations to a rough solution that do not call for a larger preconditioner
_FIRST_RANK = 100
_LONGEST = 0.7  # step, in logarithms
_OVERSHOT = -0.5  # slope at the end of a step, relative to its start, that refuses it
_REFUSALS = 8  # in a row
_INFORMATIVE = 0.2  # length of a step, in standard deviations, below which M learns noise from it


@dataclass(frozen=True)
class StochasticMode:
    """Outcome of :func:`find_mode_stochastically`.

    Attributes
    ----------
    u : ndarray of shape (p,)
    metric : ndarray of shape (p, p)
        BFGS's approximation of the posterior's covariance.
    gradient_norm : float
        Distance that seems left to the mode, in standard deviations.
    gradient : FixedProbeGradient
        With the pivots and probes that were used last.
    converged : bool
    stopped : bool
        Whether the callback ended the search.
    problems : list of str
        Why it did not converge, with a remedy.
    """

    u: np.ndarray
    metric: np.ndarray
    gradient_norm: float
    gradient: "FixedProbeGradient"
    converged: bool
    stopped: bool
    problems: list[str] = field(default_factory=list)


class FixedProbeGradient:
    """A :class:`StochasticGradient` with probes that stay, without coins, and a rank that grows.

    Parameters
    ----------
    field : StochasticGradient
        Its `rank` and pivots are changed in place.
    generator : torch.Generator
    max_rank : int
        At most so many pivots.

    Attributes
    ----------
    n_gradients : int
        Evaluated so far.
    n_products : int
        Products with the kernel matrix so far.
    """

    def __init__(
        self, field: StochasticGradient, generator: torch.Generator, max_rank: int
    ) -> None:
        self.field, self.generator, self.max_rank = field, generator, max_rank
        self.n_gradients, self.n_products = 0, 0
        self._probes: Probes | None = None
        self._warm: Tensor | None = None

    def redraw(self, u: np.ndarray, rank: int) -> None:
        """New pivots at u, `rank` of them at most, and new probes."""
        self.field.rank = min(rank, self.max_rank)
        self.field.choose_pivots(u, self.generator)
        self._probes = self.field.draw_probes(self.generator, _N_PROBES)

    def __call__(self, u: np.ndarray, tol: float = _FINE) -> tuple[np.ndarray, int, bool]:
        """Gradient (p,) at u, the iterations it took, and whether it can be used."""
        if self._probes is None:
            raise RuntimeError("FixedProbeGradient has no probes yet; call redraw first.")
        capped = copy.copy(self.field)
        capped.solver = self.field.solver | {"max_iter": _MAX_CG}
        self.n_gradients += 1
        try:
            with warnings.catch_warnings():
                # What the warning says decides about the step.
                warnings.simplefilter("ignore", NumericalWarning)
                at = capped.estimate(
                    u, self._probes, self.generator, warm=self._warm, stop=0.0, tol=tol
                )
        except (ValueError, torch.linalg.LinAlgError):  # a matrix that cannot be factored
            return np.zeros(len(u)), _MAX_CG, False
        self.n_products += at.n_iter
        usable = at.converged and bool(np.isfinite(at.gradient).all())
        if usable:
            self._warm = at.warm
        return at.gradient, at.n_iter, usable

    def with_enough_rank(self, u: np.ndarray, tol: float = _ROUGH) -> tuple[np.ndarray, int, bool]:
        """As a call, with new pivots and twice the rank as long as the systems are hard."""
        got = self(u, tol)
        while got[1] > _EASY_CG and self.field.rank < self.max_rank:
            self.redraw(u, 2 * max(self.field.rank, 25))
            got = self(u, tol)
        return got


def find_mode_stochastically(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    rank: int | str = "auto",
    n_probes: int = 4,
    dtype: torch.dtype = torch.float32,
    roulette: str = "adaptive",
    memory_budget: float = 4e9,
    starts: Sequence[np.ndarray] = (),
    max_iter: int = 25,
    tol: float = 0.02,
    callback: Callback | None = None,
) -> StochasticMode:
    """Mode of the posterior without a factorisation of the kernel matrix.

    Parameters
    ----------
    posterior : LogPosterior
    rng : numpy.random.Generator
    rank : int or "auto"
        Pivots of the preconditioner; "auto" doubles them where the linear systems are hard.
    n_probes : int, default=4
        Of the estimates that ``gradient.field`` will make later; the search takes 16.
    dtype, roulette, memory_budget
        As :class:`StochasticGradient`.
    starts : sequence of ndarray of shape (p,), optional
        As :func:`~skgp.learning.posterior.starts.find_start`.
    max_iter : int, default=25
        Steps.
    tol : float, default=0.02
        Distance to the mode in standard deviations, as far as the probes can tell.
    callback : callable, optional
        ``callback(iteration, {"loss": float, ...})``; in the search proper the loss is the gain
        still expected, in nats. True stops.

    Returns
    -------
    StochasticMode
    """
    recorder = StopRecorder(callback)
    start = find_start(posterior, rng, starts, recorder)
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
    n = len(posterior.data.y)
    # Pivots cost O(n r^2): of few rows, most may be pivots.
    largest = min(2000, max(1, n // 3, min(1000, 2 * n // 3)))
    first = min(_FIRST_RANK, largest)
    if rank != "auto":
        largest = first = min(int(rank), n)
    field = StochasticGradient(
        posterior, rank=first, n_probes=n_probes, dtype=dtype, roulette=roulette,
        memory_budget=memory_budget,
    )  # fmt: skip
    gradient = FixedProbeGradient(field, generator, largest)
    gradient.redraw(start.u, first)
    return polish(gradient, start.u, start.metric, max_iter=max_iter, tol=tol, callback=recorder)


def polish(
    gradient: FixedProbeGradient,
    u: np.ndarray,
    metric: np.ndarray,
    *,
    max_iter: int = 25,
    tol: float = 0.02,
    callback: Callback | None = None,
) -> StochasticMode:
    """Search for a root of the gradient from u (p,), `metric` (p, p) its first M.

    Returns
    -------
    StochasticMode
    """
    recorder = callback if isinstance(callback, StopRecorder) else StopRecorder(callback)
    search = _Search(gradient, u, metric)
    iteration = 0
    while (
        search.usable
        and search.norm > tol
        and iteration < max_iter
        and search.n_refused < _REFUSALS
        and not recorder.stopped
    ):
        iteration += 1
        search.step()
        recorder(iteration, search.info())
    converged = search.usable and search.norm <= tol
    problems = [] if converged else [search.problem(recorder.stopped, tol)]
    return StochasticMode(
        search.u, search.metric, search.norm, gradient, converged, recorder.stopped, problems
    )


class _Search:
    """State of the quasi-Newton search."""

    def __init__(self, gradient: FixedProbeGradient, u: np.ndarray, metric: np.ndarray) -> None:
        self._gradient = gradient
        self._low, self._high = gradient.field.posterior.bounds.T
        self.u, self.metric = np.clip(u, self._low, self._high), metric
        self._trust, self.n_refused, self._hard = _LONGEST, 0, False
        self._begin()

    def _begin(self) -> None:
        """Gradient at u; the probes may be new."""
        self._g, self.n_iter, self.usable = self._gradient.with_enough_rank(self.u)
        if self.usable and self._tol < _ROUGH:
            self._g, self.n_iter, self.usable = self._gradient(self.u, self._tol)

    @property
    def _tol(self) -> float:
        return min(_ROUGH, max(_FINE, _TOL_SHARE * self.norm))

    @property
    def _free(self) -> np.ndarray:
        """Places (p,) that are not held at a bound by their gradient."""
        below = (self.u <= self._low) & (self._g < 0)
        return ~(below | ((self.u >= self._high) & (self._g > 0)))

    def _direction(self) -> np.ndarray:
        free = self._free
        direction = np.zeros_like(self.u)
        # Of the others as given: the block of the inverse, inverted.
        precision = np.linalg.inv(self.metric)[np.ix_(free, free)]
        direction[free] = np.linalg.solve(precision, self._g[free])
        return direction

    @property
    def norm(self) -> float:
        """Length of the gradient in the metric."""
        return math.sqrt(max(0.0, float(self._direction() @ self._g))) if self.usable else math.inf

    def step(self) -> None:
        """One trial step, taken or refused."""
        direction = self._direction()
        direction *= min(1.0, self._trust / float(np.linalg.norm(direction)))
        trial = np.clip(self.u + direction, self._low, self._high)
        moved = trial - self.u
        tol = self._tol
        g, self.n_iter, usable = self._gradient(trial, tol)
        self._hard = not usable
        if not usable:
            self._trust = float(np.linalg.norm(moved)) / 4
            self.n_refused += 1
            return
        overshot = g @ moved < _OVERSHOT * (self._g @ moved)
        if overshot or moved @ np.linalg.solve(self.metric, moved) > _INFORMATIVE**2:
            self._update(moved, self._g - g)
        if overshot:
            self.n_refused += 1
            return
        self.n_refused = 0
        self._trust = min(_LONGEST, 2 * self._trust)
        self.u, self._g = trial, g
        hard = tol > 0.1 * _ROUGH and self.n_iter > _EASY_CG
        if hard and self._gradient.field.rank < self._gradient.max_rank:
            self._gradient.redraw(self.u, 2 * self._gradient.field.rank)
            self._begin()

    def _update(self, s: np.ndarray, y: np.ndarray) -> None:
        """BFGS update of the metric with a step and the fall of the gradient along it."""
        B = np.linalg.inv(self.metric)
        Bs = B @ s
        expected, seen = float(s @ Bs), float(s @ y)
        if seen < 0.2 * expected:  # damped: along s the metric grows fivefold at most
            share = 0.8 * expected / (expected - seen)
            y = share * y + (1 - share) * Bs
        B = B - np.outer(Bs, Bs) / expected + np.outer(y, y) / float(s @ y)
        metric = np.linalg.inv(B)
        self.metric = (metric + metric.T) / 2

    def info(self) -> dict:
        """What a callback is told."""
        return {
            "loss": 0.5 * self.norm**2,
            "gradient_norm": self.norm,
            "rank": self._gradient.field.rank,
            "n_iter": self.n_iter,
            "n_refused": self.n_refused,
        }

    def problem(self, stopped: bool, tol: float) -> str:
        """Why the search ended before its tolerance, and what may help."""
        if stopped:
            return STOPPED
        rank, place = self._gradient.field.rank, _where(self.u, self._gradient.field.posterior)
        if not self.usable or self._hard:
            return (
                f"the search for the mode met linear systems that take more than {_MAX_CG} "
                f"iterations with a preconditioner of rank {rank}{place}; raise that rank, "
                "factor the kernel matrix instead (solver='cholesky'), or give the noise a prior "
                "that keeps it away from zero"
            )
        return (
            f"the search for the mode ended with a gradient norm of {self.norm:.2g} standard "
            f"deviations, above {tol:g}{place}; give narrower priors, or a "
            "kernel whose hyper-parameters are nearer to the mode"
        )


def _where(u: np.ndarray, posterior: LogPosterior) -> str:
    """Which hyper-parameters went to a bound or far from their prior, if any did."""
    names = [
        h.name if h.n_elements == 1 else f"{h.name}[{j}]"
        for h in posterior.kernel.hyperparameters
        if not h.fixed
        for j in range(h.n_elements)
    ]
    low, high = posterior.bounds.T
    at_bound = (u <= low + 1e-6) | (u >= high - 1e-6)
    far = np.abs(u - posterior.medians) > 3.0
    named = [f"{names[j]}={math.exp(u[j]):.2g}" for j in np.flatnonzero(far | at_bound)]
    return f" ({', '.join(named)}, far from the prior or at a bound)" if named else ""
