r"""Modes of the posterior and their Laplace approximations, from which samplers start.

Searches from several starts run side by side (:mod:`skgp.optim.bfgs`), for many
observations on some hundreds of them first; those of their ends that differ are polished on all.
Few data often have two explanations, a short length scale with little noise and a long one with
much: both modes count. The curvature of each is measured by central differences of the gradient.

Of **Vecchia's likelihood** [1]_, O(n) an evaluation, with the order of the observations, their
neighbours and the inducing points held fixed, the log marginal likelihood
(:mod:`skgp.learning.vecchia`) is one smooth function of u: its posterior has modes, curvatures and
samples as the exact one has. :func:`approximate` chooses what is fixed at the mode, which moves
with the choice, a few times. Where observations are likelier, what is sampled has some inducing
points and predictions, of which there are few, many. Searches with estimated gradients of the exact
posterior begin at the mode of Vecchia's likelihood of some rows (:func:`find_start`).

References
----------
.. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.learning.defaults import VECCHIA_MOVED
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import Density, FreePosterior, LogPosterior
from skgp.learning.vecchia import (
    VecchiaEvidence,
    VecchiaSettings,
    approximation,
    evidence_of,
    ordered,
)
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_batch
from skgp.optim.stopping import StopRecorder


@dataclass(frozen=True)
class Mode:
    """A mode and, where it was measured, the Gaussian approximation of the posterior there."""

    u: np.ndarray  # (p,)
    log_density: float
    converged: bool  # the search met its tolerance
    n_gradients: int  # on all observations, of all searches together
    #: (p, p), inverse of the negative Hessian, its eigenvalues bounded.
    covariance: np.ndarray | None = None

    @property
    def log_evidence(self) -> float:
        r"""Laplace's estimate :math:`\log p(\hat u, y) + \tfrac12 \log |2 \pi \Sigma|`, nats."""
        _, log_det = np.linalg.slogdet(2 * math.pi * self.spread)
        return self.log_density + 0.5 * float(log_det)

    @property
    def spread(self) -> np.ndarray:
        """The covariance, where it was measured."""
        if self.covariance is None:
            raise RuntimeError("The curvature at this mode was not measured.")
        return self.covariance

    def distance(self, u: np.ndarray) -> float:
        """From u (p,), in standard deviations."""
        variances, axes = np.linalg.eigh(self.spread)
        least = np.finfo(float).eps * variances[-1]  # of variances beside it there is only rounding
        return float(np.linalg.norm((u - self.u) @ axes / np.sqrt(variances.clip(least))))


def search_modes(
    posterior: Density,
    starts: Sequence[np.ndarray] | np.ndarray,  # (k, p); those outside the bounds are moved inside
    *,
    max_iter: int = tuned.MAX_ITER,  # gradients of each search
    tol: float = tuned.TOL,  # nats that it expects to gain by a further step, below which it ends
    covariance: np.ndarray | None = None,  # (p, p), about what it is at the modes
    callback: Callback | None = None,
) -> list[Mode]:
    """Ends of searches within the kernel's bounds, the highest first.

    A ValueError where the posterior vanishes at every start.
    """
    low, high = posterior.bounds.T
    inset = np.clip((high - low) / 2, 0.0, 1e-9)  # equal bounds have no inside

    def function(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, gradients = posterior.log_densities_and_gradients(u)
        return -values, -gradients

    found = minimize_batch(
        function,
        np.array(starts, dtype=float),
        bounds=np.stack([low + inset, high - inset], axis=1),
        max_iter=max_iter,
        tol=tol,
        inverse_hessian=covariance,
        callback=callback,
    )
    order = np.argsort(found.value, kind="stable")
    order = order[np.isfinite(found.value[order])]
    if len(order) == 0:
        raise ValueError(posterior.why_it_vanishes(found.x[0]))
    return [
        Mode(found.x[i], -float(found.value[i]), bool(found.converged[i]), found.n_evaluations)
        for i in order
    ]


def find_mode(posterior: LogPosterior, starts: Sequence[np.ndarray], **settings: Any) -> Mode:
    """The highest end of :func:`search_modes`."""
    return search_modes(posterior, starts, **settings)[0]


def laplace_modes(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),
    callback: Callback | None = None,
) -> list[Mode]:
    """Modes of the posterior with their curvatures, the highest first.

    At most four, at least a standard deviation apart, and at most 12 nats below the highest; of
    more than 1000 observations the highest alone. `starts` are besides the priors' medians, half of
    them and four draws of the prior. Beyond 200 observations some 15 gradients on all of them a
    mode, and 2 p for its curvature.
    """
    recorder = StopRecorder(callback)
    data, p = posterior.data, posterior.n_dims
    root = np.linalg.cholesky(posterior.prior_covariance)
    drawn = posterior.medians + rng.standard_normal((tuned.MORE_STARTS, p)) @ root.T
    # Short and long length scales with little and much noise explain the same data: two starts.
    starts = [posterior.medians, posterior.medians - math.log(2), *starts, *drawn]
    if len(data.y) <= tuned.SEARCH_ROWS:
        return with_curvature(posterior, search_modes(posterior, starts, callback=recorder))
    few = LogPosterior(posterior.kernel, data.take(some_rows(posterior, tuned.SEARCH_ROWS, rng)),
                       posterior.priors)  # fmt: skip
    coarse = with_curvature(few, search_modes(few, starts, tol=tuned.COARSE_TOL))
    near = sorted((mode.u for mode in coarse), key=posterior.log_density, reverse=True)
    ends: list[Mode] = []
    for start in near if len(data.y) <= tuned.SEVERAL else near[:1]:
        ends.append(find_mode(posterior, [start], callback=recorder))
        if recorder.stopped:
            break
    n_gradients = sum(end.n_gradients for end in ends)
    ends.sort(key=lambda end: -end.log_density)
    return with_curvature(posterior, [replace(end, n_gradients=n_gradients) for end in ends])


def some_rows(posterior: LogPosterior, size: int, rng: np.random.Generator) -> Tensor:
    """Indices of some observations, or of all in random order."""
    y = posterior.data.y
    return torch.from_numpy(rng.permutation(len(y))[:size]).to(y.device)


def with_curvature(posterior: LogPosterior | FreePosterior, ends: list[Mode]) -> list[Mode]:
    """Those ends of searches, the highest first, that are modes of their own."""
    modes: list[Mode] = []
    for end in ends:
        if len(modes) == tuned.MOST_MODES or end.log_density < ends[0].log_density - tuned.LOST:
            break
        if all(mode.distance(end.u) >= tuned.APART for mode in modes):
            covariance = bounded_inverse(-hessian_by_differences(posterior, end.u))
            modes.append(replace(end, covariance=covariance))
    n_gradients = ends[0].n_gradients + 2 * posterior.n_dims * len(modes)
    return [replace(mode, n_gradients=n_gradients) for mode in modes]


def without_felt_bounds(
    posterior: LogPosterior, modes: list[Mode]
) -> tuple[FreePosterior, list[Mode]]:
    """The posterior with no bounds within three standard deviations of a mode, and its modes."""
    low, high = posterior.bounds.T
    felt = np.zeros(posterior.n_dims, dtype=bool)
    for each in modes:
        reach = tuned.NEAR_BOUND * np.sqrt(each.spread.diagonal())
        felt |= (each.u - low < reach) | (high - each.u < reach)
    free = FreePosterior(posterior, felt & np.isfinite(high - low))
    if (free.bounds != posterior.bounds).any():
        starts = free.to_x(np.array([each.u for each in modes]))
        modes = with_curvature(free, search_modes(free, starts))
    return free, modes


def hessian_by_differences(posterior: Density, u: np.ndarray) -> np.ndarray:
    """Hessian (p, p) of the log posterior at u by central differences; 2 p gradients.

    Within the bounds; where u lies at one, the difference is one-sided, and a coordinate without
    room between its bounds counts as flat.
    """
    low, high = posterior.bounds.T
    steps = tuned.HESSIAN_STEP * np.eye(len(u))
    above, below = np.minimum(u + steps, high), np.maximum(u - steps, low)
    _, gradients = posterior.log_densities_and_gradients(np.concatenate([above, below]))
    room = (above - below).diagonal()
    change = gradients[: len(u)] - gradients[len(u) :]
    hessian = change / np.where(room > 0, room, 1.0)[:, None]
    return (hessian + hessian.T) / 2


def bounded_inverse(precision: np.ndarray) -> np.ndarray:
    """Inverse, eigenvalues below the least curvature raised to it."""
    values, vectors = np.linalg.eigh(precision)
    return (vectors / np.maximum(values, tuned.LEAST_CURVATURE)) @ vectors.T


def measure_curvature(
    gradient: Any, u: np.ndarray, metric: np.ndarray, tell: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Inverse (p, p) of the negative Hessian at u, by 2 p gradients; eigenvalues bounded.

    The probes of `gradient` (:class:`~skgp.learning.posterior.set_up.FixedProbeGradient`) stay. A
    point where the linear systems fail is left out, and the difference one-sided.
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


def noise_of(gradients: np.ndarray, covariance: np.ndarray) -> float:
    """Largest variance of the estimates (k, p), in squared standard deviations."""
    whitened = gradients @ np.linalg.cholesky(covariance)
    return float(np.linalg.eigvalsh(np.atleast_2d(np.cov(whitened, rowvar=False)))[-1])


class NeighborPosterior(LogPosterior):
    """The posterior with the likelihood of `evidence`, whose data are ordered; picklable.

    A density costs O(t H^2 (H + d + m)) for t rows that stand for all, with H neighbours each and m
    inducing points; its gradient some three times that.
    """

    def __init__(self, posterior: LogPosterior, evidence: VecchiaEvidence) -> None:
        super().__init__(posterior.kernel, evidence.data, posterior.priors)
        self.evidence = evidence

    @property
    def batched(self) -> bool:
        """One theta at a time."""
        return False

    def _likelihoods(self, u: np.ndarray, slope: bool) -> tuple[np.ndarray, np.ndarray | None]:
        if not slope:
            return np.array([self.evidence.log_density(each) for each in u]), None
        found = [self.evidence.log_density_and_gradient(each) for each in u]
        values, gradients = zip(*found, strict=True)
        return np.array(values), np.array(gradients)

    def _try(self, u: np.ndarray) -> None:
        self.evidence.log_density(u)


def of_its_own(rng: np.random.Generator) -> torch.Generator:
    """A generator that leaves the numbers of `rng` to what is the same for all solvers."""
    return torch.Generator().manual_seed(int(rng.spawn(1)[0].integers(2**63)))


def sampled(n: int) -> VecchiaSettings:
    """Of the approximation for n observations whose posterior is sampled."""
    most = min(tuned.SAMPLED_INDUCING, tuned.SAMPLED_FEATURES // n)
    return VecchiaSettings(tuned.N_EARLIER, None, most_inducing=most)


def predictive() -> VecchiaSettings:
    """Of the approximation that predicts."""
    return VecchiaSettings(tuned.N_EARLIER, None)


def approximate(
    posterior: LogPosterior,  # evaluated on at most 500 observations
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),  # of the search for the mode, besides the priors' medians
    callback: Callback | None = None,
) -> tuple[NeighborPosterior, list[Mode]]:
    """Vecchia's approximation of the posterior, as chosen near its mode; its modes.

    Neighbours and inducing points are chosen where a search ends, and it goes on from there, until
    no logarithm moves by more than `VECCHIA_MOVED`.
    """
    recorder = StopRecorder(callback)
    generator = of_its_own(rng)
    if len(posterior.data) <= tuned.JOINT_ROWS:
        ends = laplace_modes(posterior, rng=rng, starts=starts, callback=recorder)
    else:
        ends = [find_start(posterior, rng, starts, recorder)]
    n_gradients, spread = ends[0].n_gradients, ends[0].spread
    kernel = posterior.kernel.clone_with_theta(ends[0].u)
    data = ordered(kernel, posterior.data, "random", generator)
    settings = sampled(len(data))
    for _ in range(tuned.CHOICES):
        before = ends[0].u
        kernel = posterior.kernel.clone_with_theta(before)
        target = NeighborPosterior(posterior, approximation(kernel, data, settings, generator))
        search: dict[str, Any] = {"covariance": spread, "tol": tuned.COARSE_TOL}
        ends = search_modes(target, [end.u for end in ends], callback=recorder, **search)
        n_gradients += ends[0].n_gradients
        if recorder.stopped or np.abs(ends[0].u - before).max() < VECCHIA_MOVED:
            break
    return target, with_curvature(target, [replace(end, n_gradients=n_gradients) for end in ends])


def find_start(
    posterior: LogPosterior,  # evaluated on at most 500 observations
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),  # besides the priors' medians and half of them
    callback: Callback | None = None,
) -> Mode:
    """Mode and curvature by Vecchia's likelihood of some rows, from the best of several starts.

    Of few observations those of the posterior itself. A ValueError if the posterior of 500 of them
    vanishes at every start.
    """
    recorder = StopRecorder(callback)
    data = posterior.data.take(some_rows(posterior, len(posterior.data), rng))
    few = slice(tuned.JOINT_ROWS)
    first = LogPosterior(posterior.kernel, data.take(few), posterior.priors)
    given = [np.asarray(start, dtype=float) for start in starts]
    ends, failure = [], None
    for start in [posterior.medians, posterior.medians - math.log(2), *given]:
        try:
            ends.append(find_mode(first, [start], tol=tuned.COARSE_TOL, callback=recorder).u)
        except ValueError as error:
            failure = error
        if recorder.stopped:
            break
    if not ends:
        raise failure if failure is not None else ValueError("There is nowhere to start.")
    candidates = ends + [np.clip(start, *posterior.bounds.T) for start in given]
    rows = torch.from_numpy(rng.permutation(len(data))[: tuned.SAMPLED_ROWS]).sort().values

    def target_at(u: np.ndarray) -> LogPosterior:
        if len(data) <= tuned.JOINT_ROWS:
            return first
        kernel, settings = posterior.kernel.clone_with_theta(u), VecchiaSettings(tuned.N_NEIGHBORS)
        some = rows.to(data.X.device)
        evidence = evidence_of(kernel, data, some, settings, torch.Generator())
        return NeighborPosterior(posterior, evidence)

    u = max(candidates, key=lambda each: target_at(each).log_density(each))
    value = -math.inf
    for _ in range(tuned.ROUNDS if len(data) > tuned.JOINT_ROWS else 0):
        if recorder.stopped:
            break
        found = find_mode(
            target_at(u), [u], max_iter=tuned.ITERATIONS, tol=tuned.COARSE_TOL, callback=recorder
        )
        if found.log_density < value + tuned.LEAST_GAIN:
            break
        u, value = found.u, found.log_density
    target = target_at(u)
    covariance = bounded_inverse(-hessian_by_differences(target, u))
    return Mode(u, target.log_density(u), not recorder.stopped, 0, covariance)
