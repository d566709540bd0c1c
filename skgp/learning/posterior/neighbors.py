r"""The posterior of the hyper-parameters by Vecchia's likelihood [1]_, O(n) an evaluation.

With the order of the observations, their neighbours and the inducing points held fixed, the log
marginal likelihood of :mod:`skgp.learning.vecchia` is one smooth function of u: its posterior has
modes, curvatures and samples as the exact one has. :func:`approximate` chooses what is fixed at the
mode, which moves with the choice, a few times.

Where observations are likelier, what is sampled has some inducing points and predictions, of which
there are few, many.

Where gradients of the exact posterior are estimated, their search begins at the mode of Vecchia's
likelihood of some rows (:func:`find_start`).

References
----------
.. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.learning.defaults import VECCHIA_MOVED
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import (
    Mode,
    bounded_inverse,
    find_mode,
    hessian_by_differences,
    laplace_modes,
    search_modes,
    some_rows,
    with_curvature,
)
from skgp.learning.vecchia import (
    VecchiaEvidence,
    VecchiaSettings,
    approximation,
    evidence_of,
    ordered,
)
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import StopRecorder


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

    def _try(self, theta: Tensor) -> None:
        self.evidence.log_density(theta.cpu().numpy())


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
            target_at(u),
            [u],
            max_iter=tuned.ITERATIONS,
            tol=tuned.COARSE_TOL,
            callback=recorder,
        )
        if found.log_density < value + tuned.LEAST_GAIN:
            break
        u, value = found.u, found.log_density
    target = target_at(u)
    covariance = bounded_inverse(-hessian_by_differences(target, u))
    return Mode(u, target.log_density(u), not recorder.stopped, 0, covariance)
