r"""Set-up for sampling with stochastic gradients: mode, curvature, preconditioner, unattended.

::

    1. mode, by a search with 16 fixed probes from that of a likelihood by nearest neighbours
    2. rank: doubled until the noise of an estimate is less than 0.16 of the posterior's
       precision; of more than 4000 observations, where it is the rank that costs, less than 0.5
    3. curvature: central differences of the gradient with fixed probes, half a standard
       deviation to either side along each axis of the search's metric
    4. search and rank again, with this metric
    5. Newton steps with the mean over many probes, until one is short

The search knows gradients alone, as the value of the posterior cannot be had. Estimated with probes
that stay and without coins, they are a smooth function of u up to the tolerance of their linear
systems::

    repeat   step = M g, at most 0.7 long
             where the slope g.step at its end is too negative: the step was too long
             M <- BFGS update with the change of g, whether the step was taken or not
             the linear systems take more than 15 iterations: a larger preconditioner, new probes
    until    g' M g < 0.02^2

References
----------
.. [1] Nocedal and Wright (2006), Numerical optimization, section 6.1 and procedure 18.2 (damping).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import LOW_RANK_COPIES
from skgp.inference.pathwise import affordable_rank
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import bounded_inverse, find_start, measure_curvature, noise_of
from skgp.learning.posterior.priors import element_names
from skgp.learning.posterior.stochastic_gradient import Probes, StochasticGradient, wide_estimates
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import Stopped, StopRecorder

STOPPED = "the set-up was stopped by the callback: the mode found so far stands for the posterior's"
Tell = Callable[[], None]  # calls the callback, and raises Stopped where it returned True


@dataclass(frozen=True)
class SetUp:
    """What sampling starts from."""

    mode: np.ndarray  # (p,)
    covariance: np.ndarray  # (p, p), inverse of the negative Hessian there, eigenvalues bounded
    field: StochasticGradient  # its pivots chosen at the mode
    n_gradients: int  # stochastic gradients evaluated
    problems: list[str]  # sentences with a remedy, empty where converged
    #: Largest eigenvalue of the covariance of an estimate of `field` at the mode without coins,
    #: times `covariance`: the mean of B estimates errs by sqrt(noise / B) standard deviations. NaN
    #: where the set-up ended before it was measured.
    noise: float = math.nan

    @property
    def converged(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problems


def set_up(
    field: StochasticGradient,  # its rank and pivots are chosen here
    *,
    rng: np.random.Generator,
    rank: int | str = "auto",  # pivots, or "auto": as many as make systems easy and noise small
    starts: Sequence[np.ndarray] = (),  # of the search for the mode, besides the priors' medians
    max_iter: int = 25,  # steps of the search on all observations
    callback: Callback | None = None,  # its "loss" is the gain still expected, in nats
) -> SetUp:
    """Find the mode, the curvature and the preconditioner with which to sample.

    The density is evaluated on subsets alone. The callback stops with the mode so far.
    """
    recorder = StopRecorder(callback)
    start = find_start(field.posterior, rng, starts, recorder)
    generator = field.generator(int(rng.integers(2**63)))
    gradient = first_gradient(field, generator, rank, start.u)
    found = ModeSearch(gradient, start.u, start.spread).run(max_iter, recorder)
    covariance = found.metric
    if not found.converged:
        return _ended(found, covariance, found.problems)

    def tell() -> None:
        recorder.check({"loss": 0.5 * found.norm**2, "rank": gradient.field.rank})

    try:
        _raise_rank(gradient, found.u, covariance, tell)
        for _ in range(tuned.SET_UP_ROUNDS):
            covariance = measure_curvature(gradient, found.u, covariance, tell)
            before = found.u
            # The metric of the search may have been far from the curvature, its end too early.
            found = ModeSearch(gradient, before, covariance).run(max_iter, recorder)
            if not found.converged:
                return _ended(found, covariance, found.problems)
            moved = found.u - before
            if math.sqrt(float(moved @ np.linalg.solve(covariance, moved))) < tuned.NEAR_MODE:
                break
        return _centred(found, covariance, tell)
    except Stopped:
        return _ended(found, covariance, [STOPPED])


def first_gradient(
    field: StochasticGradient, generator: torch.Generator, rank: int | str, u: np.ndarray
) -> FixedProbeGradient:
    """The gradient of the search, with a rank to begin with and pivots drawn at u."""
    n = len(field.posterior.data.y)
    # Pivots cost O(n r^2): of few observations, most may be pivots.
    largest = min(tuned.LARGEST_RANK, max(1, n // 3, min(tuned.LARGEST_RANK_OF_FEW, 2 * n // 3)))
    first = min(tuned.FIRST_RANK, largest)
    if rank != "auto":
        largest = first = min(int(rank), n)
    largest = affordable_rank(n, largest, LOW_RANK_COPIES)
    first = min(first, largest)
    gradient = FixedProbeGradient(field, generator, largest)
    gradient.redraw(u, first)
    return gradient


def _ended(found: ModeSearch, covariance: np.ndarray, problems: list[str]) -> SetUp:
    """The set-up before its end."""
    bounded = bounded_inverse(np.linalg.inv(covariance))
    gradient = found.gradient
    return SetUp(found.u, bounded, gradient.field, gradient.n_gradients, problems)


def _raise_rank(
    gradient: FixedProbeGradient, u: np.ndarray, covariance: np.ndarray, tell: Tell
) -> np.ndarray:
    """Double the rank until noise is small; the last estimates (k, p), at u."""
    most = tuned.NOISE_OF_MANY if len(gradient.field.posterior.data.y) > tuned.MANY else tuned.NOISE
    gradients = _estimates(gradient, u, tuned.FEW_ESTIMATES, tell)
    while noise_of(gradients, covariance) > most and gradient.field.rank < gradient.max_rank:
        gradient.redraw(u, 2 * gradient.field.rank)
        gradients = _estimates(gradient, u, tuned.FEW_ESTIMATES, tell)
    return gradients


def _centred(found: ModeSearch, covariance: np.ndarray, tell: Tell) -> SetUp:
    """Steps 4 and 5: the mode as many probes see it, and not the few of the search."""
    gradient, u = found.gradient, found.u
    root = np.linalg.cholesky(covariance)
    low, high = gradient.field.posterior.bounds.T
    for _ in range(tuned.SET_UP_ROUNDS):
        gradients = _raise_rank(gradient, u, covariance, tell)
        more = _estimates(gradient, u, tuned.SOME_ESTIMATES - len(gradients), tell)
        gradients = np.concatenate([gradients, more])
        noise = noise_of(gradients, covariance)
        step = root.T @ _mean_gradient(gradient, u, gradients, noise / tuned.MODE_ERROR, tell)
        length = float(np.linalg.norm(step))
        u = np.clip(u + root @ step * min(1.0, 1 / max(length, 1e-12)), low, high)
        if length < tuned.SHORT:
            break
    return SetUp(u, covariance, gradient.field, gradient.n_gradients, [], noise)


def _estimates(gradient: FixedProbeGradient, u: np.ndarray, n_draws: int, tell: Tell) -> np.ndarray:
    """Estimates (n_draws, p) at u as samplers will make them, but without coins."""
    warm: Tensor | None = None
    rows = np.empty((n_draws, len(u)))
    for row in rows:
        probes = gradient.field.draw_probes(gradient.generator)
        at = gradient.field.estimate(
            u, probes, gradient.generator, warm=warm, stop=0.0, tol=tuned.SET_UP_TOL
        )
        warm, row[:] = at.warm, at.gradient
        gradient.n_gradients += 1
        tell()
    return rows


def _mean_gradient(
    gradient: FixedProbeGradient, u: np.ndarray, gradients: np.ndarray, n_wanted: float, tell: Tell
) -> np.ndarray:
    """Mean (p,) of the estimates (k, p) and of more, worth `n_wanted` of them in all."""
    field = gradient.field
    n_probes = math.ceil(min(n_wanted * field.n_probes, tuned.MOST_MODE_PROBES))
    n_probes -= len(gradients) * field.n_probes
    rows, sizes = list(gradients), [field.n_probes] * len(gradients)
    for at, size in wide_estimates(field, u, n_probes, gradient.generator, tol=tuned.SET_UP_TOL):
        rows.append(at.gradient)
        sizes.append(size)
        gradient.n_gradients += 1
        tell()
    return np.average(rows, axis=0, weights=sizes)


class FixedProbeGradient:
    """A :class:`StochasticGradient` with probes that stay, without coins, and a rank that grows.

    The rank, `max_rank` at most, and the pivots of the field are changed in place.
    """

    def __init__(
        self, field: StochasticGradient, generator: torch.Generator, max_rank: int
    ) -> None:
        self.field, self.generator, self.max_rank = field, generator, max_rank
        self.n_gradients = 0  # evaluated so far
        self._probes: Probes | None = None
        self._warm: Tensor | None = None

    def redraw(self, u: np.ndarray, rank: int) -> None:
        """New pivots at u, `rank` of them at most, and new probes."""
        self.field.rank = min(rank, self.max_rank)
        self.field.choose_pivots(u, self.generator)
        self._probes = self.field.draw_probes(self.generator, tuned.SEARCH_PROBES)

    def __call__(self, u: np.ndarray, tol: float = tuned.FINE) -> tuple[np.ndarray, int, bool]:
        """Gradient (p,) at u, the iterations it took, and whether it can be used."""
        if self._probes is None:
            raise RuntimeError("FixedProbeGradient has no probes yet; call redraw first.")
        capped = copy.copy(self.field)
        capped.solver = self.field.solver | {"max_iter": tuned.MAX_CG}
        self.n_gradients += 1
        try:
            with warnings.catch_warnings():
                # What the warning says decides about the step.
                warnings.simplefilter("ignore", NumericalWarning)
                at = capped.estimate(
                    u, self._probes, self.generator, warm=self._warm, stop=0.0, tol=tol
                )
        except (ValueError, torch.linalg.LinAlgError):  # a matrix that cannot be factored
            return np.zeros(len(u)), tuned.MAX_CG, False
        usable = at.converged and bool(np.isfinite(at.gradient).all())
        if usable:
            self._warm = at.warm
        return at.gradient, at.n_iter, usable

    def with_enough_rank(self, u: np.ndarray) -> tuple[np.ndarray, int, bool]:
        """As a call, with new pivots and twice the rank as long as the systems are hard."""
        got = self(u, tuned.ROUGH)
        while got[1] > tuned.EASY_CG and self.field.rank < self.max_rank:
            self.redraw(u, 2 * max(self.field.rank, 25))
            got = self(u, tuned.ROUGH)
        return got


class ModeSearch:
    r"""Quasi-Newton search (BFGS [1]_) for a root of the gradient from u (p,).

    With M, `metric`, near the covariance of the posterior, :math:`\sqrt{g^T M g}` (`norm`) is the
    distance to the mode in standard deviations as far as the probes can tell, and half its square
    the gain still to be had, in nats. There is no value to descend in: the slope along the step
    takes its place (a secant search).
    """

    def __init__(self, gradient: FixedProbeGradient, u: np.ndarray, metric: np.ndarray) -> None:
        self.gradient = gradient
        self._low, self._high = gradient.field.posterior.bounds.T
        self.u, self.metric = np.clip(u, self._low, self._high), metric
        self.trust, self.n_refused, self._hard = tuned.LONGEST, 0, False
        self.problems: list[str] = []
        self._begin()

    @property
    def converged(self) -> bool:
        """Whether nothing went wrong."""
        return self.usable and self.norm <= tuned.MODE_TOL

    def run(self, max_iter: int, recorder: StopRecorder) -> ModeSearch:
        """Steps until the end; `problems` say why it is not the mode, each with a remedy."""
        iteration = 0
        while (
            self.usable
            and not self.converged
            and iteration < max_iter
            and self.n_refused < tuned.REFUSALS
            and not recorder.stopped
        ):
            iteration += 1
            self.step()
            recorder(iteration, self.info())
        self.problems = [] if self.converged else [self.problem(recorder.stopped)]
        return self

    def _begin(self) -> None:
        """Gradient at u; the probes may be new."""
        self._g, self.n_iter, self.usable = self.gradient.with_enough_rank(self.u)
        if self.usable and self._tol < tuned.ROUGH:
            self._g, self.n_iter, self.usable = self.gradient(self.u, self._tol)

    @property
    def _tol(self) -> float:
        return min(tuned.ROUGH, max(tuned.FINE, tuned.TOL_SHARE * self.norm))

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
        direction *= min(1.0, self.trust / float(np.linalg.norm(direction)))
        trial = np.clip(self.u + direction, self._low, self._high)
        moved = trial - self.u
        tol = self._tol
        g, self.n_iter, usable = self.gradient(trial, tol)
        self._hard = not usable
        if not usable:
            self.trust = float(np.linalg.norm(moved)) / 4
            self.n_refused += 1
            return
        overshot = g @ moved < tuned.OVERSHOT * (self._g @ moved)
        if overshot or moved @ np.linalg.solve(self.metric, moved) > tuned.INFORMATIVE**2:
            self._update(moved, self._g - g)
        if overshot:
            self.n_refused += 1
            return
        self.n_refused = 0
        self.trust = min(tuned.LONGEST, 2 * self.trust)
        self.u, self._g = trial, g
        hard = tol > 0.1 * tuned.ROUGH and self.n_iter > tuned.EASY_CG
        if hard and self.gradient.field.rank < self.gradient.max_rank:
            self.gradient.redraw(self.u, 2 * self.gradient.field.rank)
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
            "rank": self.gradient.field.rank,
            "n_iter": self.n_iter,
            "n_refused": self.n_refused,
        }

    def problem(self, stopped: bool) -> str:
        """Why the search ended before its tolerance, and what may help."""
        if stopped:
            return STOPPED
        rank, place = self.gradient.field.rank, _where(self.u, self.gradient.field.posterior)
        if not self.usable or self._hard:
            return (
                f"the search for the mode met linear systems that take more than {tuned.MAX_CG} "
                f"iterations with a preconditioner of rank {rank}{place}; raise that rank, "
                "factor the kernel matrix instead (solver='cholesky'), or give the noise a prior "
                "that keeps it away from zero"
            )
        return (
            f"the search for the mode ended with a gradient norm of {self.norm:.2g} standard "
            f"deviations, above {tuned.MODE_TOL:g}{place}; give narrower priors, or a "
            "kernel whose hyper-parameters are nearer to the mode"
        )


def _where(u: np.ndarray, posterior: LogPosterior) -> str:
    """Which hyper-parameters went to a bound or far from their prior, if any did."""
    names = element_names(posterior.kernel)
    low, high = posterior.bounds.T
    at_bound = (u <= low + 1e-6) | (u >= high - 1e-6)
    far = np.abs(u - posterior.medians) > 3.0
    named = [f"{names[j]}={math.exp(u[j]):.2g}" for j in np.flatnonzero(far | at_bound)]
    return f" ({', '.join(named)}, far from the prior or at a bound)" if named else ""
