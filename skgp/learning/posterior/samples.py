r"""Weighted samples of the posterior over hyper-parameters, and whether they stand for it.

:func:`sample_by_density` draws them by values of the likelihood, exact ones or Vecchia's, from the
Laplace approximations of all modes found, in coordinates in which bounds that the posterior feels
are infinitely far (:mod:`skgp.learning.posterior.modes`):

``"importance"``
    Adaptive importance sampling: values of the posterior only, two to four rounds of them where
    the posterior has one mode (:mod:`skgp.samplers.importance`). Some of the points come from a
    Student-t as wide as the prior, so that a part of the posterior that no mode stands for shows.
``"hmc"``
    Hamiltonian Monte Carlo, which copes with posteriors far from any Student-t
    (:mod:`skgp.samplers.hmc`), its chains side by side. Two rounds of importance sampling come
    first: their points are where the chains begin, their proposals where these jump.

Samples by stochastic gradients are drawn in :mod:`skgp.models.bayesian`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import logsumexp

from skgp.inference.gp_mixture import GPMixture, mixture_moments
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import Mode, laplace_modes, without_felt_bounds
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import StopRecorder
from skgp.samplers import (
    SEGMENT,
    HMCResult,
    ImportanceSamples,
    LangevinResult,
    Rounds,
    Run,
    adaptive_importance_sampling,
    ess_tail,
    hamiltonian_monte_carlo,
    stratified_resample,
)

STOPPED = "sampling was stopped before the first draw: the mode stands for the posterior"


@dataclass(frozen=True)
class PosteriorSamples:
    """Weighted samples of u, the logarithms of the hyper-parameters.

    `diagnostics` holds "sampler", "converged" and "problems", a list of sentences, empty where
    converged; "ess" (effective number of samples, the least over coordinates, bulk and tail),
    "ess_spread" (the same for variances), "n_likelihoods", "n_gradients", "n_modes" and
    "log_evidence"; for importance sampling "pareto_k" and "n_rounds"; for chains "r_hat",
    "ess_bulk" and "ess_tail" (p,), "acceptance", "n_divergent" and "step_size" (n_chains,).
    """

    u: np.ndarray  # (s, p)
    weights: np.ndarray  # (s,), of sum one
    #: (s,), which chain a sample belongs to; the round, for importance sampling. Chains of which
    #: more than a tenth of the paths diverged are left out, unless all did.
    chain: np.ndarray
    log_posterior: np.ndarray  # (s,), up to the log marginal likelihood, nats
    map_: np.ndarray  # (p,), the mode
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def mean(self) -> np.ndarray:
        """Posterior mean (p,) of u."""
        return self.weights @ self.u

    def covariance(self) -> np.ndarray:
        """Posterior covariance (p, p) of u."""
        centred = self.u - self.mean()
        return (self.weights[:, None] * centred).T @ centred

    def keep(self, n_keep: int, rng: np.random.Generator) -> np.ndarray:
        """Indices (n_keep,) of samples that stand for all, equally weighted; they may repeat."""
        points = self.u if self.diagnostics.get("sampler") == "importance" else None
        return stratified_resample(self.weights, n_keep, rng, points=points)


def single_sample(u: np.ndarray, log_density: float, diagnostics: dict) -> PosteriorSamples:
    """Hyper-parameters u (p,) that stand for their posterior alone; a log-density may be NaN."""
    return PosteriorSamples(
        u[None], np.ones(1), np.zeros(1, int), np.array([log_density]), u, diagnostics
    )


def outcome(sampler: str, problems: list[str], **entries: Any) -> dict[str, Any]:
    """Diagnostics with the entries that all have."""
    common = {"ess": math.nan, "n_likelihoods": 0, "log_evidence": math.nan} | entries
    return {"sampler": sampler, "converged": not problems, "problems": problems} | common


def iterations_between_calls(n: int) -> int:
    """How often samplers call back for n rows, so that a stop takes seconds and not minutes."""
    return max(1, int(SEGMENT * min(1.0, (tuned.LARGE / n) ** 2)))


# ---- problems, each with a remedy


def too_few(of_what: str, ess: np.ndarray | float, wanted: float) -> list[str]:
    """Whether the least ESS is less than wanted."""
    least = float(np.min(ess))
    if least >= wanted:
        return []
    number = f"{least:.0f} of {wanted:g} wanted"
    return [f"the effective number of samples{of_what} is {number}; raise n_samples"]


def mixing_problems(r_hat: np.ndarray, ess: np.ndarray, target_ess: float) -> list[str]:
    """Whether R-hat and ESS (p,) of chains are not as they should be, each with a remedy."""
    problems, worst = [], float(np.max(r_hat))
    if not worst <= tuned.MAX_R_HAT:
        problems.append(
            f"R-hat is {worst:.3f}, above {tuned.MAX_R_HAT}; raise n_samples or n_warmup"
        )
    return problems + too_few("", ess, target_ess)


def chain_problems(
    found: LangevinResult, sampler: str, target_ess: float, bank_error: float
) -> list[str]:
    """What keeps the chains from being trusted, each with a remedy."""
    problems = mixing_problems(found.r_hat, found.ess, target_ess)
    some = np.flatnonzero(found.n_astray > tuned.DIVERGENT * found.points.shape[1])
    if len(some):
        left_out = np.flatnonzero(found.astray).tolist()
        problems.append(
            f"more than {tuned.DIVERGENT:.0%} of the iterations of chains {some.tolist()} left the "
            "bounds or met gradients out of proportion"
            + (f" (left out: {left_out})" if left_out else "")
            + "; use priors that keep off the bounds, or more rows"
        )
    if found.floored > 0:
        problems.append(
            f"the noise of the gradients, {found.noise_ratio:.2g} times the posterior's precision, "
            "is more than the steps can make up for; raise n_probes or the preconditioner's rank"
        )
    if bank_error > tuned.WORST_BANK_ERROR:
        problems.append(
            "the mean gradient at the mode is so noisy that it shifts the samples by up to "
            f"{math.sqrt(bank_error):.2f} standard deviations; raise n_probes or the "
            "preconditioner's rank"
        )
    if sampler == "sgld" and not found.frozen:
        worst = float(np.max(found.criterion))
        measured = "was not measured" if math.isnan(worst) else f"is {worst:.2g}, above 0.002"
        problems.append(
            f"criterion (7), the gradient's noise over that injected, {measured}: the step size "
            'was never held; raise n_samples, or use sampler="langevin"'
        )
    n_unsolved = sum(memory.n_unsolved for memory in found.memories if memory)
    share = n_unsolved / max(1, found.n_gradients)  # none where all steps left the bounds
    if share > tuned.UNSOLVED:
        problems.append(
            f"{share:.0%} of the gradients are biased, their linear systems not solved within the "
            "allowed iterations; raise the preconditioner's rank"
        )
    return problems


def samples_of_chains(
    found: LangevinResult, sampler: str, mode: np.ndarray, problems: list[str], **entries: Any
) -> PosteriorSamples:
    """The chains that have not gone astray as samples; `entries` are further diagnostics."""
    kept = np.flatnonzero(~found.astray)
    points = found.points[kept]  # (c, n_drawn, p)
    n_drawn, p = points.shape[1:]
    n_products = sum(memory.n_products for memory in found.memories if memory)
    diagnostics = outcome(
        sampler,
        problems,
        ess=float(found.ess.min()),
        ess_bulk=found.ess,
        ess_tail=np.array([ess_tail(column) for column in points.transpose(2, 0, 1)]),
        r_hat=found.r_hat,
        acceptance=found.acceptance,
        n_divergent=found.n_astray,
        step_size=found.step_size,
        noise_ratio=found.noise_ratio,
        n_iter_cg=n_products / max(1, found.n_gradients),
        **entries,
    )
    if sampler == "sgld":
        diagnostics["criterion"] = found.criterion
    return PosteriorSamples(
        points.reshape(-1, p),
        found.weights[kept].ravel(),
        np.repeat(kept, n_drawn),
        np.full(len(kept) * n_drawn, math.nan),
        mode,
        diagnostics,
    )


def probe_rows(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Points half way between pairs of rows of X (n, d), and rows with their columns shuffled."""
    pairs = rng.integers(len(X), size=(2, tuned.PROBE_ROWS))
    shuffled = [column[rng.integers(len(X), size=tuned.PROBE_ROWS)] for column in X.T]
    return np.concatenate([X[pairs].mean(axis=0), np.column_stack(shuffled)])


def samples_needed(pilot: GPMixture, X: np.ndarray) -> int:
    r"""Samples, from 8 to 64, that predict to 0.03 standard deviations and 2% of these at X (t, d).

    S equally weighted samples give the moments of the mixture up to

    .. math:: \frac{\mathrm{sd}(\hat m)}{\sigma} = \sqrt{\frac{V_s[m_s]}{S \sigma^2}}, \qquad
              \frac{\mathrm{sd}(\hat \sigma)}{\sigma}
              = \frac{1}{2 \sigma^2} \sqrt{\frac{V_s[v_s + (m_s - m)^2]}{S}},

    with :math:`m_s, v_s` the moments of an observation under each sample and :math:`m, \sigma^2`
    those of the mixture: root mean squares over the rows of X, of the few samples of a pilot.
    """
    mean, var = pilot.component_moments(X)  # (S, t)
    var = var + pilot.noise[:, None]
    centre, total = mixture_moments(pilot.weights, mean, var)
    spread = pilot.weights @ (mean - centre) ** 2
    energies = var + (mean - centre) ** 2
    uneven = pilot.weights @ (energies - total) ** 2
    of_mean = np.mean(spread / total) / tuned.MEAN_TOL**2
    of_std = np.mean(uneven / (4 * total**2)) / tuned.STD_TOL**2
    # The pilot's own variances are low by one of its effective samples.
    worth = 1 / float((pilot.weights**2).sum())
    needed = max(of_mean, of_std) * worth / max(1.0, worth - 1)
    return int(np.clip(math.ceil(needed), tuned.LEAST_SAMPLES, tuned.MOST_SAMPLES))


# ---- by values of the density


def sample_by_density(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    sampler: str = "importance",  # or "hmc"
    n_chains: int | None = None,  # of HMC: 8 by default where evaluated side by side, else 4
    n_warmup: int = 50,  # of HMC
    n_samples: int | None = None,  # at most: points (default 5120), or draws of a chain (1000)
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
    if modes is None:
        modes = laplace_modes(posterior, rng=rng, callback=recorder)
    if recorder.stopped:
        found = _of_mode(sampler, modes[0], [STOPPED]) | {"ess": 1.0, "n_modes": 1}
        return single_sample(modes[0].u, modes[0].log_density, found)
    free = _Free(posterior, modes, rng, n_jobs, recorder)
    if sampler == "importance":
        return _by_importance(
            free, tuned.MOST_POINTS if n_samples is None else n_samples, target_ess
        )
    run = Run(
        n_chains=n_chains or (8 if posterior.batched else 4),
        n_warmup=n_warmup,
        n_draws=tuned.MOST_DRAWS if n_samples is None else n_samples,
        target_ess=target_ess,
        max_r_hat=tuned.MAX_R_HAT,
        n_jobs=n_jobs,
        every=iterations_between_calls(len(posterior.data.y)),
        callback=recorder,
    )
    return _by_hmc(free, run)


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
                chunk_size=tuned.ROUND_OF_FEW if target.batched else tuned.CHUNK,
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


def _by_importance(free: _Free, n_samples: int, target_ess: float) -> PosteriorSamples:
    """Weighted samples, until as many are effective as asked for or were drawn."""
    n_points = min(free.round, max(2, n_samples + n_samples % 2))
    target = free.target
    found = free.importance(
        target_ess=target_ess,
        n_points=n_points,
        max_rounds=max(1, n_samples // n_points),
        every=n_points if len(target.data.y) <= tuned.LARGE else 16 * tuned.CHUNK,
    )
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


def _by_hmc(free: _Free, run: Run) -> PosteriorSamples:
    """Chains that start from, and jump by, what some rounds of importance sampling found."""
    pilot = free.importance(n_points=free.round, max_rounds=tuned.PILOT_ROUNDS, target_ess=math.inf)
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
