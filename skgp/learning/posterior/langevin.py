r"""Samples of the posterior over hyper-parameters from stochastic gradients alone.

The pipeline: mode, curvature and preconditioner (:mod:`skgp.learning.posterior.set_up`); a bank of
probes at the mode, and the mean gradient there of so many more that it is exact to 0.02 standard
deviations of the posterior (:mod:`skgp.learning.posterior.targets`); chains from
:math:`N(\text{mode}, \text{covariance})` in the whitened coordinates of that approximation
(:mod:`skgp.samplers.langevin`).

================  ==================================================================
``"langevin"``    one gradient a draw, its discretisation and its noise corrected
``"mala"``        three gradients a draw, with a Metropolis step: for skew posteriors
``"sgld"``        the dynamics of [1]_
================  ==================================================================

Deviations from [1]_, section 5.1, which ``sampler="sgld", schedule="paper", roulette="paper"``
follows: the preconditioner M is the covariance at the mode of all rows instead of 500 of them; the
schedule's 40 thousand iterations are `n_warmup` and `n_samples` together, whatever these are; the
trace's probes are kept for 20 iterations as there, but only the system of y starts from its last
solution. The other samplers differ in all but the gradient: anchored noise, P-preconditioned
systems, corrected steps, weights by Stein's identity.

References
----------
.. [1] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
   Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs

from skgp.learning.posterior.exact import (
    MAX_R_HAT,
    PosteriorSamples,
    iterations_between_calls,
    mixing_problems,
    single_sample,
)
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.set_up import SetUp, set_up
from skgp.learning.posterior.stochastic_gradient import StochasticGradient
from skgp.learning.posterior.targets import SEEDS, BankGradient, SeededGradient, make_target
from skgp.optim.stopping import Stopped, StopRecorder
from skgp.samplers import (
    LangevinResult,
    PowerSchedule,
    ess_tail,
    stochastic_langevin,
)

__all__ = ["sample_stochastic"]

Callback = Callable[[int, dict], bool | None]

_STOPPED = "sampling was stopped before the first draw: the mode stands for the posterior"
_REFUSED = "nothing was sampled from a set-up that did not converge: the mode stands alone"
_NONE_KEPT = "no draw was kept: SGLD keeps those after its step is held; raise n_samples"
_MOST_DRAWS = 1000  # of a chain
_WORST_BANK_ERROR = 0.005  # variance of the mean gradient at the mode: 0.07 deviations
_DIVERGENT = 0.01  # share of a chain's iterations clipped or undone that is reported
_UNSOLVED = 0.01  # share of the gradients with systems at their cap that is reported
_STEP, _STEP_FEW, _FEW = 1.0, 1.5, 3  # whitened step, and that for at most three dimensions
_MALA_STEP = 1.0
_FIRST, _LAST = 0.1, 1e-4  # steps of [1]_, section 5.1


def sample_stochastic(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    sampler: str = "langevin",
    schedule: str = "constant",
    roulette: str = "adaptive",
    n_chains: int | None = None,
    n_warmup: int = 50,
    n_samples: int | None = None,
    target_ess: float = 400,
    n_probes: int = 4,
    rank: int | str = "auto",
    dtype: torch.dtype = torch.float32,
    memory_budget: float = 4e9,
    starts: Sequence[np.ndarray] = (),
    n_jobs: int | None = None,
    callback: Callback | None = None,
) -> PosteriorSamples:
    """Sample the posterior with stochastic gradients of its logarithm.

    Parameters
    ----------
    posterior : LogPosterior
        Its density is evaluated on subsets of rows alone.
    rng : numpy.random.Generator
    sampler : {"langevin", "mala", "sgld"}
    schedule : {"constant", "paper"}
        Step sizes: 1 (1.5 for at most three hyper-parameters; 0.1 of "sgld"), or falling from 0.1
        to 1e-4 as in [1]_.
    roulette : {"adaptive", "paper"}
        See :func:`~skgp.linalg.ulisse.ulisse`.
    n_chains : int, default=4
    n_warmup : int, default=50
    n_samples : int, optional
        At most so many draws of each chain, by default 1000.
    target_ess : float, default=400
        Effective number of samples at which to stop, with an R-hat of at most 1.01. "sgld" goes
        on until its step is held.
    n_probes : int, default=4
        Of a gradient.
    rank, dtype, memory_budget, starts
        As :func:`~skgp.learning.posterior.set_up.set_up`. Each worker stores a kernel matrix: there
        are no more of them than fit in the budget.
    n_jobs : int, optional
        Of joblib. Results do not depend on it but by rounding.
    callback : callable, optional
        ``callback(iteration, {"loss": float, ...})``, numbered through set-up and sampling; True
        stops with what there is.

    Returns
    -------
    PosteriorSamples
        Diagnostics as of "hmc", "n_divergent" counting iterations whose gradient was clipped or
        which were undone, and "noise_ratio" (largest eigenvalue of the covariance of a gradient's
        noise, in standard deviations of the posterior), "rank", "n_entries" of the bank and
        "n_iter_cg" (products with the kernel matrix for a gradient, on average); of "sgld" also
        "criterion" (n_chains,), the ratio (7) of [1]_. Log posteriors are not evaluated: NaN.
        Where the set-up did not converge, the mode is the only sample.

    Raises
    ------
    ValueError
        For an unknown sampler, schedule or roulette, or as `set_up`.
    """
    _check(sampler=sampler, schedule=schedule, roulette=roulette)
    n_chains = 4 if n_chains is None else n_chains
    recorder = StopRecorder(callback)
    start = set_up(
        posterior, rng=rng, rank=rank, n_probes=n_probes, dtype=dtype, roulette=roulette,
        memory_budget=memory_budget, starts=starts, callback=recorder,
    )  # fmt: skip
    if recorder.stopped or not start.converged:
        return _mode_alone(sampler, start, _STOPPED if recorder.stopped else _REFUSED)
    generator = torch.Generator().manual_seed(int(rng.integers(SEEDS)))
    try:
        target, bank_error = make_target(
            sampler, start, generator, dtype, memory_budget, recorder.check
        )
    except Stopped:
        return _mode_alone(sampler, start, _STOPPED)
    n_draws = _MOST_DRAWS if n_samples is None else n_samples
    found = stochastic_langevin(
        target,
        start.mode,
        start.covariance,
        rng=rng,
        sampler=sampler,
        schedule=_schedule(sampler, schedule, posterior.n_dims, n_warmup + n_draws),
        bounds=posterior.bounds,
        n_chains=n_chains,
        n_warmup=n_warmup,
        n_draws=n_draws,
        target_ess=target_ess,
        max_r_hat=MAX_R_HAT,
        n_jobs=_workers(n_jobs, n_chains, start.field, dtype, memory_budget),
        every=iterations_between_calls(len(posterior.data.y)),
        callback=recorder,
    )
    if found.points.shape[1] == 0:
        return _mode_alone(sampler, start, _STOPPED if recorder.stopped else _NONE_KEPT)
    problems = _problems(found, sampler, target_ess, bank_error)
    return _as_samples(found, sampler, start, target, problems)


def _check(**given: str) -> None:
    known = {
        "sampler": ("langevin", "mala", "sgld"),
        "schedule": ("constant", "paper"),
        "roulette": ("adaptive", "paper"),
    }
    for name, value in given.items():
        if value not in known[name]:
            raise ValueError(f"{name} must be one of {known[name]}, got {value!r}.")


def _schedule(sampler: str, schedule: str, n_dims: int, n_iterations: int):
    if schedule == "paper" and n_iterations > 1:
        return PowerSchedule.between(_FIRST, _LAST, n_iterations)
    if sampler == "sgld":
        return _FIRST
    if sampler == "mala":
        return _MALA_STEP
    return _STEP_FEW if n_dims <= _FEW else _STEP


def _workers(
    n_jobs: int | None, n_chains: int, field: StochasticGradient, dtype: torch.dtype, budget: float
) -> int:
    """How many workers: each makes a kernel matrix of its own, where it is stored."""
    n_workers = min(effective_n_jobs(n_jobs), n_chains)
    if field.operator.stored:
        n_workers = min(
            n_workers, int(budget / (dtype.itemsize * len(field.posterior.data.y) ** 2))
        )
    return max(1, n_workers)


def _problems(
    found: LangevinResult, sampler: str, target_ess: float, bank_error: float
) -> list[str]:
    """What keeps the chains from being trusted, each with a remedy."""
    problems = mixing_problems(found.r_hat, found.ess, target_ess)
    some = np.flatnonzero(found.n_astray > _DIVERGENT * found.points.shape[1])
    if len(some):
        left_out = np.flatnonzero(found.astray).tolist()
        problems.append(
            f"more than {_DIVERGENT:.0%} of the iterations of chains {some.tolist()} left the "
            "bounds or met gradients out of proportion"
            + (f" (left out: {left_out})" if left_out else "")
            + "; use priors that keep off the bounds, or more rows"
        )
    if found.floored > 0:
        problems.append(
            f"the noise of the gradients, {found.noise_ratio:.2g} times the posterior's precision, "
            "is more than the steps can make up for; raise n_probes or the preconditioner's rank"
        )
    if bank_error > _WORST_BANK_ERROR:
        problems.append(
            "the mean gradient at the mode is so noisy that it shifts the samples by up to "
            f"{math.sqrt(bank_error):.2f} standard deviations; raise n_probes or the "
            "preconditioner's rank"
        )
    return problems + _problems_of_sgld(found, sampler) + _unsolved(found)


def _problems_of_sgld(found: LangevinResult, sampler: str) -> list[str]:
    if sampler != "sgld" or found.frozen:
        return []
    worst = float(np.max(found.criterion))
    measured = "was not measured" if math.isnan(worst) else f"is {worst:.2g}, above 0.002"
    return [
        f"criterion (7), the gradient's noise over that injected, {measured}: the step size was "
        'never held; raise n_samples, or use sampler="langevin"'
    ]


def _unsolved(found: LangevinResult) -> list[str]:
    share = sum(memory.n_unsolved for memory in found.memories if memory)
    share /= max(1, found.n_gradients)  # none where all steps left the bounds
    if share <= _UNSOLVED:
        return []
    return [
        f"{share:.0%} of the gradients are biased, their linear systems not solved within the "
        "allowed iterations; raise the preconditioner's rank"
    ]


def _as_samples(
    found: LangevinResult, sampler: str, start: SetUp, target: SeededGradient, problems: list[str]
) -> PosteriorSamples:
    kept = np.flatnonzero(~found.astray)
    points = found.points[kept]
    n_drawn, p = points.shape[1:]
    n_products = sum(memory.n_products for memory in found.memories if memory)
    diagnostics = _diagnostics(sampler, start, problems) | {
        "ess": float(found.ess.min()),
        "ess_bulk": found.ess,
        "ess_tail": np.array([ess_tail(column) for column in points.transpose(2, 0, 1)]),
        "r_hat": found.r_hat,
        "acceptance": found.acceptance,
        "n_divergent": found.n_astray,
        "step_size": found.step_size,
        "noise_ratio": found.noise_ratio,
        "n_iter_cg": n_products / max(1, found.n_gradients),
        "n_entries": target.n_entries if isinstance(target, BankGradient) else 0,
    }
    diagnostics["n_gradients"] += found.n_gradients + (
        target.anchored.n_gradients if isinstance(target, BankGradient) else 0
    )
    if sampler == "sgld":
        diagnostics["criterion"] = found.criterion
        diagnostics["rank"] = 0
    return PosteriorSamples(
        points.reshape(-1, p),
        found.weights[kept].ravel(),
        np.repeat(kept, n_drawn),
        np.full(len(kept) * n_drawn, math.nan),
        start.mode,
        diagnostics,
    )


def _diagnostics(sampler: str, start: SetUp, problems: list[str]) -> dict[str, Any]:
    """Entries that every outcome has."""
    return {
        "sampler": sampler,
        "converged": not problems,
        "problems": problems,
        "ess": math.nan,
        "n_likelihoods": 0,
        "n_gradients": start.n_gradients,
        "log_evidence": math.nan,
        "rank": start.field.rank,
    }


def _mode_alone(sampler: str, start: SetUp, problem: str) -> PosteriorSamples:
    """The mode as the only sample."""
    diagnostics = _diagnostics(sampler, start, [*start.problems, problem]) | {"ess": 1.0}
    return single_sample(start.mode, math.nan, diagnostics)
