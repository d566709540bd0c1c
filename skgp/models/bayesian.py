r"""GP regression averaged over samples of the hyper-parameters: Langevin dynamics with ULISSE [1]_.

The posterior of the hyper-parameters is sampled by Langevin dynamics with unbiased estimates of the
gradient of its logarithm, which take linear systems alone, cut short without bias.

==============================  ==================================================================
paper                           here
==============================  ==================================================================
(1): sigma, tau, lambda         u, the logarithms of the p hyper-parameters of any kernel and noise
K, the noise within             :math:`A = K + D`, D the diagonal of the noise
(3): prediction                 `predictive_mixture`: `MixtureState`, by S samples kept
(4): log marginal likelihood    `LogPosterior`, with the priors of u
(5): SGLD, (6): its steps       `sample_stochastic`: `stochastic_langevin`, `PowerSchedule`
(7): when to hold the step      `noise_ratio`, ``diagnostics["criterion"]``
(8): exact gradient             `LogPosterior.log_densities_and_gradients`
(9): stochastic gradient        `StochasticGradient.estimate`, :math:`N_r` = `n_probes`
(12), section 4: ULISSE         :func:`skgp.linalg.ulisse.ulisse`
section 5.1: M                  `SetUp.covariance`
section 5: PSRF                 `r_hat`
==============================  ==================================================================

``sampler="sgld", schedule="paper", roulette="paper"`` follows the paper, with these deviations:

- M is the covariance at the mode of all observations instead of 500 of them (`set_up`).
- The schedule's 40 thousand iterations are `n_warmup` and `n_samples` together, whatever these are.
- The trace's probes are kept for 20 iterations as there, but only the system of y starts from its
  last solution. Tolerances are relative to right-hand sides.

The other samplers differ in all but the gradient (9), whose systems are preconditioned by a low
rank that probes are drawn from:

================  ==================================================================
``"langevin"``    one gradient a draw, its discretisation and its noise corrected
``"mala"``        three gradients a draw, with a Metropolis step: for skew posteriors
================  ==================================================================

Their noise is anchored at the mode, their draws are weighted by Stein's identity; in ULISSE
survival follows the size of the increments. Where the likelihood of all observations can be
evaluated, up to some thousands, exact likelihoods cost less than chains of the same effective
sample size (`sample_by_density`), and of many more observations Vecchia's approximation of it
(`approximate`), whose cost is linear in their number.

Errata: section 5.1 refers to section 4 for (7), which is in section 2.1. With the weights
:math:`w_r = e^{\beta r}` of section 4 the estimate is unbiased, but its variance rests on events
too rare to be seen: what is seen is the bias of a truncated iteration
(``doc/methods/paper_code_ulisse.rst``).

References
----------
.. [1] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
   Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs

from skgp.data import Data
from skgp.inference.gp_mixture import GPMixture
from skgp.inference.mixture import MixtureState
from skgp.inference.vecchia.posterior import VecchiaMixture
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import (
    Mode,
    approximate,
    find_mode,
    laplace_modes,
    of_its_own,
    predictive,
    sampled,
)
from skgp.learning.posterior.samples import (
    SAMPLERS,
    STOPPED,
    Plan,
    PosteriorSamples,
    chain_problems,
    iterations_between_calls,
    outcome,
    probe_rows,
    samples_needed,
    samples_of_chains,
    single_sample,
)
from skgp.learning.posterior.sampling import sample_by_density
from skgp.learning.posterior.set_up import SetUp, set_up
from skgp.learning.posterior.stochastic_gradient import (
    SEEDS,
    SampledGradient,
    StochasticGradient,
    make_anchor,
)
from skgp.learning.vecchia import VecchiaEvidence, approximation, ordered
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import Callback, memory_budget
from skgp.optim.stopping import Stopped, StopRecorder
from skgp.samplers import PowerSchedule, Run, stochastic_langevin

_REFUSED = "nothing was sampled from a set-up that did not converge: the mode stands alone"
_NONE_KEPT = "no draw was kept: SGLD keeps those after its step is held; raise n_samples"


def choose_kernel(
    kernels: list,
    data: Data,
    posterior_of: Callable[[Any, Data], LogPosterior],
    rng: np.random.Generator,
    callback: Callback,
) -> tuple[Any, list[np.ndarray]]:
    """The kernel of the highest posterior density at its mode, given a few hundred observations.

    All have the same hyper-parameters under the same priors, so that densities compare, and so that
    a search may begin anew at the mode of another kernel: of a function that oscillates within the
    median length scale, a search of a rough kernel from the medians finds more than noise where one
    of a smooth kernel does not. Returned besides are starts (p,) of the searches to come: the mode,
    where only that led to it. The callback stops with the best so far.
    """
    rows = torch.from_numpy(rng.permutation(len(data.y))[: tuned.COMPARED_ROWS]).to(data.y.device)
    few, recorder, ends = data.take(rows), StopRecorder(callback), []
    search = partial(find_mode, tol=tuned.COARSE_TOL, callback=recorder)
    posteriors = [posterior_of(kernel, few) for kernel in kernels]
    for posterior in posteriors:
        ends.append(search(posterior, [posterior.medians]))
        if recorder.stopped:
            break
    first = chosen = int(np.argmax([end.log_density for end in ends]))
    best = ends[first]
    for i, posterior in enumerate(posteriors):
        if recorder.stopped:
            break
        if i == first or not np.isfinite(posterior.log_density(ends[first].u)):
            continue
        again = search(posterior, [ends[first].u])
        if again.log_density > best.log_density + tuned.LEAST_GAIN:
            chosen, best = i, again
    return kernels[chosen], [] if best is ends[first] else [best.u]


def likelihood_by_neighbors(
    kernel: Any, data: Data, plan: Plan, rng: np.random.Generator
) -> VecchiaEvidence | None:
    """Vecchia's approximation at the kernel's own values, where the plan uses one."""
    if plan.solver != "vecchia":
        return None
    generator = of_its_own(rng)
    data = ordered(kernel, data, "random", generator)
    return approximation(kernel, data, sampled(len(data)), generator)


def modes_of(
    posterior: LogPosterior,
    plan: Plan,
    **settings: Any,  # of `laplace_modes`
) -> tuple[LogPosterior, list[Mode], VecchiaEvidence | None]:
    """The posterior, its modes, and by the plan the likelihood of Vecchia's approximation of it."""
    if plan.solver == "cholesky":
        return posterior, laplace_modes(posterior, **settings), None
    target, modes = approximate(posterior, **settings)
    return target, modes, target.evidence


def draw_samples(
    posterior: LogPosterior,
    plan: Plan,
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray],
    schedule: str,
    of_cg: dict[str, Any],
    callback: Callback,
    **of_run: Any,  # of `sample_by_density`, besides: None is for what the sampler takes by default
) -> tuple[PosteriorSamples, VecchiaEvidence | None]:
    """Samples of the posterior by the sampler of the plan; and the likelihood of `modes_of`."""
    if plan.solver == "cg":
        of_run["n_draws"] = of_run.pop("n_samples")
        of_run = {name: value for name, value in of_run.items() if value is not None}
        run = Run(callback=callback, **of_run)
        chains: dict[str, Any] = {"sampler": plan.sampler, "schedule": schedule, "starts": starts}
        return sample_stochastic(posterior, rng=rng, run=run, **chains, **of_cg), None
    recorder = StopRecorder(callback)
    sampler = "auto" if plan.automatic else plan.sampler
    target, modes, evidence = modes_of(posterior, plan, rng=rng, starts=starts, callback=recorder)
    of_run = {"rng": rng, "modes": modes, "callback": recorder, **of_run}
    return sample_by_density(target, sampler=sampler, **of_run), evidence


def find_optimum(
    posterior: LogPosterior,
    plan: Plan,
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray],
    callback: Callback,
    rank: int | str = "auto",
    **of_field: Any,
) -> tuple[PosteriorSamples, VecchiaEvidence | None]:
    """The mode as the only sample; and the likelihood of `modes_of`."""
    search: dict[str, Any] = {"rng": rng, "starts": starts, "callback": callback}
    if plan.solver == "cg":
        field = StochasticGradient(posterior, **of_field)
        start = set_up(field, rank=rank, **search)
        diagnostics = outcome("map", start.problems, ess=1.0, n_gradients=start.n_gradients)
        return single_sample(start.mode, math.nan, diagnostics), None
    _, modes, evidence = modes_of(posterior, plan, **search)
    found = modes[0]
    problems = [] if found.converged else ["the search for the optimum did not converge"]
    diagnostics = outcome(
        "map", problems, ess=1.0, n_gradients=found.n_gradients,
        log_evidence=found.log_evidence, log_posterior_map=found.log_density,
    )  # fmt: skip
    return single_sample(found.u, found.log_density, diagnostics), evidence


# ---- sections 2 to 5: samples by stochastic gradients


def sample_stochastic(
    posterior: LogPosterior,  # its density is evaluated on subsets of the observations alone
    *,
    rng: np.random.Generator,
    run: Run | None = None,  # to an ESS of 400 by default
    sampler: str = "langevin",  # "langevin", "mala" or "sgld"
    schedule: str = "constant",  # or "paper": falling from 0.1 to 1e-4, section 5.1
    starts: Sequence[np.ndarray] = (),
    rank: int | str = "auto",  # of the preconditioner
    roulette: str = "adaptive",  # or "paper": see `ulisse`
    **of_field: Any,  # of `StochasticGradient`: `n_probes`, `dtype`
) -> PosteriorSamples:
    """Sample the posterior with stochastic gradients of its logarithm.

    ``callback(iteration, {"loss": float, ...})``, numbered through set-up and sampling, stops by
    True with what there is. Diagnostics are those of "hmc", "n_divergent" counting iterations whose
    gradient was clipped or which were undone, and "noise_ratio" (largest eigenvalue of the
    covariance of a gradient's noise, in standard deviations of the posterior), "rank", "n_entries"
    of the bank and "n_iter_cg" (products with the kernel matrix for a gradient, on average); of
    "sgld" also "criterion" (n_chains,), the ratio (7). Log posteriors are not evaluated: NaN. Where
    the set-up did not converge, the mode is the only sample.
    """
    _check(sampler=sampler, schedule=schedule, roulette=roulette)
    run = run or Run(target_ess=400)
    recorder = StopRecorder(run.callback)
    # Eq. (9), and section 5.1: a mode and the metric M there.
    field = StochasticGradient(posterior, roulette=roulette, **of_field)
    start = set_up(field, rng=rng, rank=rank, starts=starts, callback=recorder)
    if recorder.stopped or not start.converged:
        return _mode_alone(sampler, start, STOPPED if recorder.stopped else _REFUSED)
    generator = field.generator(int(rng.integers(SEEDS)))
    try:
        target, error = _noisy_gradient(sampler, start, of_field, generator, recorder)
    except Stopped:
        return _mode_alone(sampler, start, STOPPED)
    # Eq. (5), chains from N(mode, M) in coordinates whitened by M.
    found = stochastic_langevin(
        target,
        start.mode,
        start.covariance,
        rng=rng,
        run=replace(
            run,
            n_jobs=_workers(run, start.field),
            every=iterations_between_calls(len(posterior.data.y)),
            callback=recorder,
        ),
        sampler=sampler,
        schedule=_schedule(sampler, schedule, posterior.n_dims, run.n_warmup + run.n_draws),
        bounds=posterior.bounds,
    )
    if found.points.shape[1] == 0:
        return _mode_alone(sampler, start, STOPPED if recorder.stopped else _NONE_KEPT)
    spent = target.anchor.n_gradients if target.anchor else 0
    return samples_of_chains(
        found, sampler, start.mode, chain_problems(found, sampler, run.target_ess, error),
        n_entries=len(target.anchor.bank) if target.anchor else 0, rank=target.field.rank,
        n_gradients=start.n_gradients + spent + found.n_gradients,
    )  # fmt: skip


def _check(**given: str) -> None:
    known = {
        "sampler": SAMPLERS["cg"],
        "schedule": ("constant", "paper"),
        "roulette": ("adaptive", "paper"),
    }
    for name, value in given.items():
        if value not in known[name]:
            raise ValueError(f"{name} must be one of {known[name]}, got {value!r}.")


def _schedule(sampler: str, schedule: str, n_dims: int, n_iterations: int) -> PowerSchedule | float:
    """Whitened steps, eq. (6) for "paper"."""
    if schedule == "paper" and n_iterations > 1:
        return PowerSchedule.between(tuned.FIRST_STEP, tuned.LAST_STEP, n_iterations)
    constant = {"sgld": tuned.FIRST_STEP, "mala": tuned.MALA_STEP}
    return constant.get(sampler, tuned.STEP_FEW if n_dims <= tuned.FEW_DIMS else tuned.STEP)


def _noisy_gradient(
    sampler: str,
    start: SetUp,
    of_field: dict[str, Any],
    generator: torch.Generator,
    recorder: StopRecorder,
) -> tuple[SampledGradient, float]:
    """Gradients anchored at the mode, and the variance of the mean there, whitened.

    Of "sgld" as in the paper: no anchor, no preconditioner, probes of entries +-1.
    """
    field = start.field
    if sampler == "sgld":
        plain = StochasticGradient(field.posterior, rank=0, **of_field)
        plain.solver = dict(field.solver)
        return SampledGradient(plain), 0.0
    size = field.n_probes * (len(field.posterior.data.y) + field.rank)
    share = tuned.BANK_MEMORY * memory_budget()
    affordable = int(share / (size * field.operator.dtype.itemsize))
    noise = start.noise if math.isfinite(start.noise) else math.inf
    n_entries = math.ceil(
        min(max(noise / tuned.BANK_ERROR, tuned.BANK), tuned.LARGEST_BANK, max(affordable, 2))
    )
    n_probes = math.ceil(min(field.n_probes * noise / tuned.MEAN_ERROR, tuned.MOST_MEAN_PROBES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # the error measured tells
        anchor = make_anchor(
            field, start.mode, generator, n_entries=n_entries, n_probes=n_probes,
            tell=recorder.check,
        )  # fmt: skip
    factor = np.linalg.cholesky(start.covariance)
    error = np.linalg.eigvalsh(factor.T @ anchor.mean_covariance @ factor)[-1]
    return SampledGradient(field, anchor), float(error)


def _workers(run: Run, field: StochasticGradient) -> int:
    """How many workers: each makes a kernel matrix of its own, where it is stored."""
    n_workers, operator = min(effective_n_jobs(run.n_jobs), run.n_chains), field.operator
    if operator.stored:
        matrix = operator.dtype.itemsize * len(field.posterior.data.y) ** 2
        n_workers = min(n_workers, int(memory_budget() / matrix))
    return max(1, n_workers)


def _mode_alone(sampler: str, start: SetUp, problem: str) -> PosteriorSamples:
    """The mode as the only sample."""
    diagnostics = outcome(
        sampler, [*start.problems, problem], ess=1.0, n_gradients=start.n_gradients,
        rank=start.field.rank,
    )  # fmt: skip
    return single_sample(start.mode, math.nan, diagnostics)


# ---- eq. (3): predictions


def predictive_mixture(
    kernel: Any,
    data: Data,
    samples: PosteriorSamples,
    n_keep: int | str,  # S, of equal weight, or "auto"
    plan: Plan,
    rng: np.random.Generator,
    *,
    evidence: VecchiaEvidence | None,  # of the approximation that was sampled, if one was
    double: bool,  # whether kernel products of "cg" are in float64, where that fits
    rank: int | str,
    callback: Callback | None = None,  # of a solution by "cg"
) -> GPMixture:
    """The mixture of the GPs of some samples, equal ones merged: exact, or approximate."""
    n = len(data.y)
    double = double and 8.0 * n**2 <= memory_budget()
    settings: dict[str, Any] = {
        "solver": plan.solver,
        "dtype": torch.float64 if double else torch.float32,
        "rank": min(tuned.STATE_RANK, n // 2) if rank == "auto" else min(int(rank), n),
        "callback": callback,
    }

    if evidence is not None:
        at_mean = kernel.clone_with_theta(samples.mean())
        evidence = approximation(at_mean, evidence.data, predictive(), of_its_own(rng))

    def of_size(size: int) -> GPMixture:
        kept, counts = np.unique(samples.keep(size, rng), return_counts=True)
        if evidence is None:
            return MixtureState(kernel, data, samples.u[kept], counts, **settings)
        fixed = evidence.data, evidence.group, evidence.Z
        n_near = max(1, tuned.PREDICTIVE * (evidence.group.shape[1] - 1))
        return VecchiaMixture(kernel, *fixed, samples.u[kept], counts, n_neighbors=n_near)

    size = min(tuned.PILOT_SAMPLES, len(samples.u)) if n_keep == "auto" else int(n_keep)
    if n_keep == "auto" and size > 1:
        size = samples_needed(of_size(size), probe_rows(data.X.cpu().numpy(), rng))
    return of_size(size)
