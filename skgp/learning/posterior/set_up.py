r"""Set-up for sampling with stochastic gradients: mode, curvature, preconditioner, unattended.

::

    1. mode, by a search with 16 fixed probes (mode_search.py) from that of a likelihood by nearest
       neighbours (modes.py)
    2. rank: doubled until the noise of an estimate is less than 0.16 of the posterior's
       precision; of more than 4000 observations, where it is the rank that costs, less than 0.5
    3. curvature: central differences of the gradient with fixed probes, half a standard
       deviation to either side along each axis of the search's metric
    4. search and rank again, with this metric
    5. Newton steps with the mean over many probes, until one is short
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.mode_search import STOPPED, FixedProbeGradient, ModeSearch
from skgp.learning.posterior.modes import bounded_inverse, find_start
from skgp.learning.posterior.stochastic_gradient import StochasticGradient, wide_estimates
from skgp.optim.stopping import Stopped, StopRecorder

Callback = Callable[[int, dict], bool | None]
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
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
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
    gradient = FixedProbeGradient(field, generator, largest)
    gradient.redraw(u, first)
    return gradient


def _ended(found: ModeSearch, covariance: np.ndarray, problems: list[str]) -> SetUp:
    """The set-up before its end."""
    bounded = bounded_inverse(np.linalg.inv(covariance))
    gradient = found.gradient
    return SetUp(found.u, bounded, gradient.field, gradient.n_gradients, problems)


# ---- rank, curvature and the mode of many probes


def measure_curvature(
    gradient: FixedProbeGradient, u: np.ndarray, metric: np.ndarray, tell: Tell = lambda: None
) -> np.ndarray:
    """Inverse (p, p) of the negative Hessian at u, by 2 p gradients; eigenvalues bounded.

    A point where the linear systems fail is left out, and the difference one-sided.
    """
    low, high = gradient.field.posterior.bounds.T
    values, vectors = np.linalg.eigh(metric)
    root = vectors * np.sqrt(values)  # columns: the axes, one standard deviation long
    centre: np.ndarray | None = None
    moves, falls = [], []
    for axis in root.T:
        ends = []
        for sign in (tuned.CURVATURE_STEP, -tuned.CURVATURE_STEP):
            at = np.clip(u + sign * axis, low, high)
            g, _, usable = gradient(at)
            tell()
            if usable:
                ends.append((at, g))
        if len(ends) < 2:
            centre = gradient(u)[0] if centre is None else centre
            ends.append((u, centre))
        (above, g_above), (below, g_below) = ends[:2]
        moves.append(above - below)
        falls.append(g_below - g_above)
    hessian = np.linalg.lstsq(np.array(moves), np.array(falls), rcond=None)[0]
    whitened = root.T @ (hessian + hessian.T) @ root / 2
    values, vectors = np.linalg.eigh(whitened)
    inner = (vectors / np.maximum(values, tuned.LEAST_RELATIVE_CURVATURE)) @ vectors.T
    return bounded_inverse(np.linalg.inv(root @ inner @ root.T))


def _raise_rank(
    gradient: FixedProbeGradient, u: np.ndarray, covariance: np.ndarray, tell: Tell
) -> np.ndarray:
    """Double the rank until noise is small; the last estimates (k, p), at u."""
    most = tuned.NOISE_OF_MANY if len(gradient.field.posterior.data.y) > tuned.MANY else tuned.NOISE
    gradients = _estimates(gradient, u, tuned.FEW_ESTIMATES, tell)
    while _noise(gradients, covariance) > most and gradient.field.rank < gradient.max_rank:
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
        noise = _noise(gradients, covariance)
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


def _noise(gradients: np.ndarray, covariance: np.ndarray) -> float:
    """Largest variance of the estimates (k, p), in squared standard deviations."""
    whitened = gradients @ np.linalg.cholesky(covariance)
    return float(np.linalg.eigvalsh(np.atleast_2d(np.cov(whitened, rowvar=False)))[-1])
