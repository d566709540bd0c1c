r"""Samples of the posterior over hyper-parameters by values of the likelihood, exact or Vecchia's.

They come from the Laplace approximations of all modes found, in coordinates in which bounds that
the posterior feels are infinitely far (:mod:`skgp.learning.posterior.modes`):

``"importance"``
    Adaptive importance sampling: values of the posterior only, two to four rounds of them where
    the posterior has one mode (:mod:`skgp.samplers.importance`). Some of the points come from a
    Student-t as wide as the prior, so that a part of the posterior that no mode stands for shows.
``"hmc"``
    Hamiltonian Monte Carlo, which copes with posteriors far from any Student-t
    (:mod:`skgp.samplers.hmc`), its chains side by side. Two rounds of importance sampling come
    first: their points are where the chains begin, their proposals where these jump.
``"auto"``
    The first, and where it ends far below the effective number that was asked for, the second,
    which begins with all its points. Of many hyper-parameters and few observations, where few
    points carry all the weight in any case, the second at once; of many observations the first
    alone: chains take hours.
"""

import math
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from scipy.special import logsumexp

from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import Mode, laplace_modes, without_felt_bounds
from skgp.learning.posterior.samples import (
    STOPPED,
    PosteriorSamples,
    iterations_between_calls,
    mixing_problems,
    outcome,
    single_sample,
    too_few,
)
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import StopRecorder
from skgp.samplers import (
    HMCResult,
    ImportanceSamples,
    Rounds,
    Run,
    adaptive_importance_sampling,
    hamiltonian_monte_carlo,
)


def sample_by_density(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    sampler: str = "importance",  # or "hmc" or "auto"
    n_chains: int | None = None,  # of HMC: 8 by default where evaluated side by side, else 4
    n_warmup: int = 50,  # of HMC
    n_samples: int | None = None,  # at most: points (default 5120), or draws of a chain (1000, and
    # of "auto" 400 or less); of given ones "auto" takes one sampler alone
    target_ess: float = 400,  # at which to stop, with a Pareto k below 0.7, or an R-hat below 1.01
    modes: list[Mode] | None = None,  # where they are known, with their curvatures
    n_jobs: int | None = None,  # of joblib; results depend on it only by rounding
    callback: Callback | None = None,
) -> PosteriorSamples:
    """Sample the posterior by values of its density: the exact one, or Vecchia's.

    ``callback(iteration, {"loss": float, ...})``, numbered through the search for the mode and the
    sampling, stops by True with what there is. A ValueError where the
    posterior vanishes at every start.
    """
    recorder = callback if isinstance(callback, StopRecorder) else StopRecorder(callback)
    automatic, n = sampler == "auto", len(posterior.data.y)
    if automatic:
        many = posterior.n_dims > tuned.MANY_DIMS and posterior.batched
        sampler = "hmc" if many else "importance"
    if modes is None:
        modes = laplace_modes(posterior, rng=rng, callback=recorder)
    if recorder.stopped:
        ended = _of_mode(sampler, modes[0], [STOPPED]) | {"ess": 1.0, "n_modes": 1}
        return single_sample(modes[0].u, modes[0].log_density, ended)
    free = _Free(posterior, modes, rng, n_jobs, recorder)
    pilot, weighted = None, None
    if sampler == "importance":
        most = tuned.MOST_POINTS if n_samples is None else n_samples
        pilot = _importance_of(free, most, target_ess)
        weighted = _weighted(free, pilot, target_ess)
        goes_on = automatic and n_samples is None and n <= tuned.LARGE
        if not goes_on or recorder.stopped or _usable(pilot, target_ess):
            return weighted
    if n_samples is None:
        n_samples = draws_of_many(n) if automatic else tuned.MOST_DRAWS
    run = Run(
        n_chains=n_chains or (8 if posterior.batched else 4),
        n_warmup=n_warmup,
        n_draws=n_samples,
        target_ess=target_ess,
        max_r_hat=tuned.MAX_R_HAT,
        n_jobs=n_jobs,
        every=iterations_between_calls(n),
        callback=recorder,
    )
    chains = _by_hmc(free, run, pilot)
    if weighted is None or chains.diagnostics["ess"] >= weighted.diagnostics["ess"]:
        return chains
    return weighted


def _usable(found: ImportanceSamples, target_ess: float) -> bool:
    """Whether the weights are near enough to what was asked for that chains would not pay."""
    least = tuned.FAR_BELOW * target_ess
    enough = found.ess >= least and found.ess_spread >= least / 2
    return bool(enough and found.pareto_k < tuned.MAX_PARETO_K)


def draws_of_many(n: int) -> int:
    """Of each chain: the fewer, the longer gradients of n observations take."""
    return round(tuned.DRAWS_OF_MANY * min(1.0, tuned.ROWS_OF_MANY / n))


class _Free:
    """What samplers see: the posterior without bounds (`target`), and its modes there."""

    def __init__(
        self,
        posterior: LogPosterior,
        modes: list[Mode],
        rng: np.random.Generator,
        n_jobs: int | None,
        callback: Callback,
    ) -> None:
        self.best, self.rng = modes[0], rng
        self._common: dict[str, Any] = {"n_jobs": n_jobs, "callback": callback}
        self.target, self.modes = without_felt_bounds(posterior, modes)
        evidence = np.array([each.log_evidence for each in self.modes])
        shares = np.exp(evidence - logsumexp(evidence)).clip(tuned.LEAST_MODE_SHARE)
        self.shares = shares / shares.sum()  # (m,), of mass

    @property
    def round(self) -> int:
        """Points of importance sampling between two refits."""
        few = self.target.batched and len(self.target.data.y) <= tuned.FEW
        return tuned.ROUND_OF_FEW if few else tuned.ROUND

    @property
    def every(self) -> int:
        """Points between two callbacks."""
        return self.round if len(self.target.data.y) <= tuned.LARGE else tuned.STRETCH

    @property
    def _chunk(self) -> int:
        """Points of a task: those of all workers at once, as each task takes the data along."""
        if self.target.batched:
            return tuned.ROUND_OF_FEW
        return math.ceil(self.every / effective_n_jobs(self._common["n_jobs"]))

    def importance(self, **rounds: Any) -> ImportanceSamples:
        """Adaptive importance sampling from the modes."""
        target = self.target
        means = [*(each.u for each in self.modes), target.medians]
        covariances = [*(each.spread for each in self.modes), target.prior_covariance]
        return adaptive_importance_sampling(
            target.log_densities,
            np.array(means),
            np.array(covariances),
            rng=self.rng,
            shares=np.append((1 - tuned.REST) * self.shares, tuned.REST),
            wide=(target.medians, target.prior_covariance),
            wide_share=tuned.WIDE,
            rounds=Rounds(
                df=tuned.DF,
                max_pareto_k=tuned.MAX_PARETO_K,
                chunk_size=self._chunk,
                **rounds,
                **self._common,
            ),
        )

    def hmc(self, run: Run, pilot: ImportanceSamples) -> HMCResult:
        """Chains from points of importance sampling, its proposals as jumps.

        Points that are worth too few to tell a covariance leave both to the modes: jumps would be
        refused, and a metric of noise makes paths of many short steps.
        """
        target, known = self.target, pilot.ess >= tuned.PILOT_WORTH * self.target.n_dims
        if known:
            mean, covariance = pilot.proposal.scale()
            begin = self.rng.choice(len(pilot.points), size=run.n_chains, p=pilot.weights)
            starts = pilot.points[begin]
        else:
            mean, covariance = self.modes[0].u, self.modes[0].spread
            starts = self._near_modes(run.n_chains)
        return hamiltonian_monte_carlo(
            target.log_densities_and_gradients
            if target.batched
            else target.log_density_and_gradient,
            mean,
            covariance,
            rng=self.rng,
            run=run,
            starts=starts,
            jumps=pilot.proposal if known else None,
            log_density=target.log_densities if target.batched else target.log_density,
            batched=target.batched,
        )

    def _near_modes(self, n_points: int) -> np.ndarray:
        """Draws (n_points, p) of the Laplace approximation of all modes."""
        owners = self.rng.choice(len(self.modes), size=n_points, p=self.shares)
        return np.array(
            [self.rng.multivariate_normal(m.u, m.spread) for m in (self.modes[i] for i in owners)]
        )


def _importance_of(free: _Free, n_samples: int, target_ess: float) -> ImportanceSamples:
    """Weighted points, until as many are effective as asked for or were drawn."""
    n_points = min(free.round, max(2, n_samples + n_samples % 2))
    return free.importance(
        target_ess=target_ess,
        n_points=n_points,
        max_rounds=max(1, n_samples // n_points),
        every=min(n_points, free.every),
    )


def _weighted(free: _Free, found: ImportanceSamples, target_ess: float) -> PosteriorSamples:
    """Samples of the points, and what keeps them from being trusted."""
    target = free.target
    problems = [
        problem + ' or use sampler="hmc"'
        for problem in too_few("", found.ess, target_ess)
        + too_few(" for standard deviations", found.ess_spread, target_ess / 2)
    ]
    if not found.pareto_k < tuned.MAX_PARETO_K:
        problems.append(
            f"the Pareto k of the importance weights is {found.pareto_k:.2f}, above "
            f'{tuned.MAX_PARETO_K}: few samples may carry all the weight; use sampler="hmc"'
        )
    diagnostics = _of_mode("importance", free.best, problems) | {
        "ess": found.ess,
        "ess_spread": found.ess_spread,
        "pareto_k": found.pareto_k,
        "n_modes": len(free.modes),
        "n_rounds": int(found.round[-1]) + 1,
        "n_likelihoods": len(found.points),
        "log_evidence": found.log_normalizer,
    }
    return PosteriorSamples(
        target.to_u(found.points),
        found.weights,
        found.round,
        found.log_density - target.log_jacobian(found.points),
        free.best.u,
        diagnostics,
    )


def _by_hmc(free: _Free, run: Run, pilot: ImportanceSamples | None) -> PosteriorSamples:
    """Chains that start from, and jump by, what some rounds of importance sampling found."""
    if pilot is None:
        pilot = free.importance(
            n_points=free.round, max_rounds=tuned.PILOT_ROUNDS, target_ess=math.inf
        )
    found = free.hmc(run, pilot)
    n_drawn = found.points.shape[1]
    astray = found.n_divergent > tuned.ASTRAY * n_drawn
    problems = _hmc_problems(found, astray, run.target_ess)
    chains = np.arange(run.n_chains) if astray.all() else np.flatnonzero(~astray)
    found = found.select(chains)
    diagnostics = _of_mode("hmc", free.best, problems) | {
        "ess": float(np.minimum(found.ess, found.ess_tail).min()),
        "ess_bulk": found.ess,
        "ess_tail": found.ess_tail,
        "ess_spread": float(np.min(found.ess_spread)),
        "n_modes": len(free.modes),
        "r_hat": found.r_hat,
        "acceptance": found.acceptance,
        "n_divergent": found.n_divergent,
        "step_size": found.step_size,
        "n_likelihoods": len(pilot.points),
    }
    diagnostics["n_gradients"] += found.n_gradients
    size = found.log_density.size
    x = found.points.reshape(size, -1)
    return PosteriorSamples(
        free.target.to_u(x),
        np.full(size, 1 / size),
        np.repeat(chains, n_drawn),
        found.log_density.reshape(size) - free.target.log_jacobian(x),
        free.best.u,
        diagnostics,
    )


def _hmc_problems(found: HMCResult, astray: np.ndarray, target_ess: float) -> list[str]:
    """What keeps the chains from being trusted, each with a remedy; chains are named."""
    problems = too_few(" for tails", found.ess_tail, target_ess)
    problems += mixing_problems(found.r_hat, found.ess, target_ess)
    problems += too_few(" for standard deviations", found.ess_spread, target_ess / 2)
    if found.warming_up:
        problems.insert(0, "sampling was stopped in the warm-up, whose draws stand for the rest")
    some = np.flatnonzero(found.n_divergent > tuned.DIVERGENT * found.points.shape[1])
    if len(some):
        problems.append(
            f"more than {tuned.DIVERGENT:.0%} of the paths of chains {some.tolist()} diverged"
            + (f" (left out: {np.flatnonzero(astray).tolist()})" if astray.any() else "")
            + "; raise n_warmup, or use priors that keep off the edge where the kernel matrix is "
            "singular"
        )
    return problems


def _of_mode(sampler: str, mode: Mode, problems: list[str]) -> dict[str, Any]:
    return outcome(
        sampler,
        problems,
        n_gradients=mode.n_gradients,
        log_posterior_map=mode.log_density,
        log_evidence=mode.log_evidence,
    )
