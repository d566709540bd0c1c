r"""Unattended set-up for sampling with stochastic gradients: mode, curvature, preconditioner.

::

    1. mode, by a search with 16 fixed probes                                  (polish.py)
    2. rank: doubled until the noise of an estimate is less than 0.16 of the posterior's
       precision; of more than 4000 rows, where it is the rank that costs, less than 0.5
    3. curvature: central differences of the gradient with fixed probes, half a standard
       deviation to either side along each axis of the search's metric
    4. search and rank again, with this metric
    5. Newton steps with the mean over many probes, until one is short

What samplers need of it: :attr:`SetUp.field` makes an
:class:`~skgp.learning.posterior.anchored_gradient.AnchoredGradient` at the mode, the mean of B
estimates exact to ``sqrt(noise / B)`` standard deviations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.learning.posterior.anchored_gradient import wide_estimates
from skgp.learning.posterior.laplace import bounded_inverse
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.polish import (
    STOPPED,
    FixedProbeGradient,
    StochasticMode,
    find_mode_stochastically,
    polish,
)
from skgp.learning.posterior.stochastic_gradient import StochasticGradient
from skgp.optim.stopping import Stopped, StopRecorder

__all__ = ["SetUp", "set_up"]

Callback = Callable[[int, dict], bool | None]
Tell = Callable[[], None]  # calls the callback, and raises Stopped where it returned True

_STEP = 0.5  # of the differences, in standard deviations of the search's metric
_ROUNDS, _NEAR = 3, 0.7  # of measurements: again where the mode moved further (deviations)
_LEAST_CURVATURE = 0.1  # relative to that metric
_NOISE, _NOISE_OF_MANY, _MANY = 0.16, 0.5, 4000  # of an estimate, and the rows that are many
_MODE_ERROR = 0.002  # variance of the mean gradient for a Newton step, whitened
_MOST_PROBES = 2048  # of that mean
_SHORT = 0.3  # length of the last one, in standard deviations
_FEW, _SOME = 6, 12  # estimates to judge their noise by, and to report it
_TOL = 1e-3  # of the linear systems at the mode


def _nobody() -> None:
    """Where there is no callback."""


@dataclass(frozen=True)
class SetUp:
    """What sampling starts from.

    Attributes
    ----------
    mode : ndarray of shape (p,)
    covariance : ndarray of shape (p, p)
        Inverse of the negative Hessian there, its eigenvalues bounded.
    field : StochasticGradient
        Its pivots chosen at the mode.
    n_gradients : int
        Stochastic gradients evaluated.
    converged : bool
    problems : list of str
        Sentences with a remedy, empty where converged.
    noise : float
        Largest eigenvalue of the covariance of an estimate of `field` at the mode without coins,
        times `covariance`: the mean of B estimates errs by ``sqrt(noise / B)`` standard deviations.
        NaN where the set-up ended before it was measured.
    """

    mode: np.ndarray
    covariance: np.ndarray
    field: StochasticGradient
    n_gradients: int
    converged: bool
    problems: list[str]
    noise: float = math.nan


def set_up(
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
    callback: Callback | None = None,
) -> SetUp:
    """Find the mode, the curvature and the preconditioner with which to sample.

    Parameters
    ----------
    posterior : LogPosterior
        Its density is evaluated on subsets of rows alone.
    rng : numpy.random.Generator
    rank : int or "auto"
        Pivots of the preconditioner; "auto" finds how many, up to 2000 and a third of the rows
        (up to 1000, two thirds).
    n_probes : int, default=4
        Of an estimate of the returned field.
    dtype, roulette, memory_budget
        As :class:`~skgp.learning.posterior.stochastic_gradient.StochasticGradient`.
    starts : sequence of ndarray of shape (p,), optional
        Of the search for the mode, besides the priors' medians.
    max_iter : int, default=25
        Steps of the search on all rows.
    callback : callable, optional
        ``callback(iteration, {"loss": float, ...})``; True stops with the mode so far.

    Returns
    -------
    SetUp

    Raises
    ------
    ValueError
        As :func:`~skgp.learning.posterior.starts.find_start`.
    """
    recorder = StopRecorder(callback)
    found = find_mode_stochastically(
        posterior, rng=rng, rank=rank, n_probes=n_probes, dtype=dtype, roulette=roulette,
        memory_budget=memory_budget, starts=starts, max_iter=max_iter, callback=recorder,
    )  # fmt: skip
    if not found.converged:
        return _ended(found, found.metric, found.problems)
    covariance = found.metric

    def tell() -> None:
        info = {"loss": 0.5 * found.gradient_norm**2, "rank": found.gradient.field.rank}
        recorder.check(info)

    try:
        _raise_rank(found.gradient, found.u, covariance, tell)
        for _ in range(_ROUNDS):
            covariance = measure_curvature(found.gradient, found.u, covariance, tell)
            before = found.u
            # The metric of the search may have been far from the curvature, its end too early.
            found = polish(found.gradient, before, covariance, max_iter=max_iter, callback=recorder)
            if not found.converged:
                return _ended(found, covariance, found.problems)
            if _distance(found.u, before, covariance) < _NEAR:
                break
        return _centred(found, covariance, tell)
    except Stopped:
        return _ended(found, covariance, [STOPPED])


def _distance(u: np.ndarray, v: np.ndarray, covariance: np.ndarray) -> float:
    """Distance of two points in standard deviations."""
    return math.sqrt(float((u - v) @ np.linalg.solve(covariance, u - v)))


def _ended(found: StochasticMode, covariance: np.ndarray, problems: list[str]) -> SetUp:
    """The set-up before its end."""
    bounded = bounded_inverse(np.linalg.inv(covariance))
    gradient = found.gradient
    return SetUp(found.u, bounded, gradient.field, gradient.n_gradients, False, problems)


def measure_curvature(
    gradient: FixedProbeGradient, u: np.ndarray, metric: np.ndarray, tell: Tell = _nobody
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
        for sign in (_STEP, -_STEP):
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
    inner = (vectors / np.maximum(values, _LEAST_CURVATURE)) @ vectors.T
    return bounded_inverse(np.linalg.inv(root @ inner @ root.T))


def _raise_rank(
    gradient: FixedProbeGradient, u: np.ndarray, covariance: np.ndarray, tell: Tell
) -> np.ndarray:
    """Double the rank until noise is small; the last estimates (k, p), at u."""
    most = _NOISE_OF_MANY if len(gradient.field.posterior.data.y) > _MANY else _NOISE
    gradients = _estimates(gradient, u, _FEW, tell)
    while _noise(gradients, covariance) > most and gradient.field.rank < gradient.max_rank:
        gradient.redraw(u, 2 * gradient.field.rank)
        gradients = _estimates(gradient, u, _FEW, tell)
    return gradients


def _centred(found: StochasticMode, covariance: np.ndarray, tell: Tell) -> SetUp:
    """Steps 4 and 5: the mode as many probes see it, and not the few of the search."""
    gradient, u = found.gradient, found.u
    root = np.linalg.cholesky(covariance)
    low, high = gradient.field.posterior.bounds.T
    for _ in range(_ROUNDS):
        gradients = _raise_rank(gradient, u, covariance, tell)
        more = _estimates(gradient, u, _SOME - len(gradients), tell)
        gradients = np.concatenate([gradients, more])
        noise = _noise(gradients, covariance)
        step = root.T @ _mean_gradient(gradient, u, gradients, noise / _MODE_ERROR, tell)
        length = float(np.linalg.norm(step))
        u = np.clip(u + root @ step * min(1.0, 1 / max(length, 1e-12)), low, high)
        if length < _SHORT:
            break
    return SetUp(u, covariance, gradient.field, gradient.n_gradients, True, [], noise)


def _estimates(gradient: FixedProbeGradient, u: np.ndarray, n_draws: int, tell: Tell) -> np.ndarray:
    """Estimates (n_draws, p) at u as samplers will make them, but without coins."""
    warm: Tensor | None = None
    rows = np.empty((n_draws, len(u)))
    for row in rows:
        probes = gradient.field.draw_probes(gradient.generator)
        at = gradient.field.estimate(u, probes, gradient.generator, warm=warm, stop=0.0, tol=_TOL)
        warm, row[:] = at.warm, at.gradient
        gradient.n_gradients += 1
        tell()
    return rows


def _mean_gradient(
    gradient: FixedProbeGradient, u: np.ndarray, gradients: np.ndarray, n_wanted: float, tell: Tell
) -> np.ndarray:
    """Mean (p,) of the estimates (k, p) and of more, worth `n_wanted` of them in all."""
    field = gradient.field
    n_probes = math.ceil(min(n_wanted * field.n_probes, _MOST_PROBES))
    n_probes -= len(gradients) * field.n_probes
    rows, sizes = list(gradients), [field.n_probes] * len(gradients)
    for at, size in wide_estimates(field, u, n_probes, gradient.generator, tol=_TOL):
        rows.append(at.gradient)
        sizes.append(size)
        gradient.n_gradients += 1
        tell()
    return np.average(rows, axis=0, weights=sizes)


def _noise(gradients: np.ndarray, covariance: np.ndarray) -> float:
    """Largest variance of the estimates (k, p), in squared standard deviations."""
    whitened = gradients @ np.linalg.cholesky(covariance)
    return float(np.linalg.eigvalsh(np.atleast_2d(np.cov(whitened, rowvar=False)))[-1])
