r"""Samples of the posterior over hyper-parameters where the likelihood is evaluated exactly.

Both samplers start from the Laplace approximations of all modes found
(:mod:`skgp.learning.posterior.laplace`), in coordinates in which bounds that the posterior feels
are infinitely far (:mod:`skgp.learning.posterior.box`):

``"importance"``
    Adaptive importance sampling: values of the posterior only, two to four rounds of them where
    the posterior has one mode (:mod:`skgp.samplers.importance`). Some of the points come from a
    Student-t as wide as the prior, so that a part of the posterior that no mode stands for shows.
``"hmc"``
    Hamiltonian Monte Carlo, which copes with posteriors far from any Student-t
    (:mod:`skgp.samplers.hmc`), its chains side by side. Two rounds of importance sampling come
    first: their points are where the chains begin, their proposals where these jump.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import logsumexp

from skgp.learning.posterior.box import FreePosterior, felt_bounds
from skgp.learning.posterior.laplace import LaplaceApproximation, laplace_modes, modes_of_all
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.samples import PosteriorSamples, single_sample
from skgp.optim.stopping import StopRecorder
from skgp.samplers import (
    SEGMENT,
    HMCResult,
    ImportanceSamples,
    adaptive_importance_sampling,
    hamiltonian_monte_carlo,
)

__all__ = [
    "MAX_R_HAT",
    "PosteriorSamples",
    "iterations_between_calls",
    "mixing_problems",
    "sample_exact",
    "single_sample",
]

Callback = Callable[[int, dict], bool | None]
_MAX_PARETO_K = 0.7
#: Above which chains count as not mixed.
MAX_R_HAT = 1.01
_DIVERGENT, _ASTRAY = 0.01, 0.1  # shares of a chain's paths: reported, and left out
_ROUND, _ROUND_OF_FEW = 256, 512  # points of importance sampling between two refits
_FEW = 45  # rows, whose likelihoods cost less than what goes with a round
# Shares of the points for a law as wide as the prior, kept in every round, and for one that begins
# there and is refitted to what the modes leave over; degrees of freedom. Of 180 fits of
# tests/benchmarks/bench_bayesian_small.py, these leave no spread off by more than 12%; an eighth,
# no such component and 10 degrees of freedom leave four off by 15%.
_WIDE, _WIDE_OF_FEW, _REST, _DF = 1 / 8, 1 / 4, 1 / 4, 5
_CHUNK = 4  # of these, for one worker
_LARGE = 1000  # rows beyond which callbacks are told more often
_PILOT_ROUNDS = 2  # of importance sampling, before "hmc"
_LEAST_SHARE = 0.1  # of the points of importance sampling, for each mode
_MOST_POINTS, _MOST_DRAWS = 5120, 1000


def iterations_between_calls(n: int) -> int:
    """How often samplers call back for n rows, so that a stop takes seconds and not minutes."""
    return max(1, int(SEGMENT * min(1.0, (_LARGE / n) ** 2)))


def sample_exact(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    sampler: str = "importance",
    n_chains: int | None = None,
    n_warmup: int = 50,
    n_samples: int | None = None,
    target_ess: float = 400,
    starts: Sequence[np.ndarray] = (),
    n_jobs: int | None = None,
    callback: Callback | None = None,
) -> PosteriorSamples:
    """Sample the posterior, its density evaluated by Cholesky factorisation.

    Parameters
    ----------
    posterior : LogPosterior
    rng : numpy.random.Generator
    sampler : {"importance", "hmc"}
    n_chains : int, optional
        Of HMC: 8 by default up to 200 rows, which are evaluated side by side, else 4.
    n_warmup : int, default=50
        Of HMC.
    n_samples : int, optional
        At most so many samples: points of importance sampling (default 5120), draws of each chain
        of HMC (default 1000).
    target_ess : float, default=400
        Effective number of samples at which to stop, with a Pareto k below 0.7 or an R-hat of at
        most 1.01.
    starts : sequence of ndarray of shape (p,), optional
        Of the search for the mode, besides the priors' medians.
    n_jobs : int, optional
        Of joblib. Results depend on it only by rounding.
    callback : callable, optional
        ``callback(iteration, {"loss": float, ...})``, numbered through the search for the mode and
        the sampling; True stops with what there is.

    Returns
    -------
    PosteriorSamples

    Raises
    ------
    ValueError
        For an unknown sampler, or as `laplace_approximation`.
    """
    if sampler not in ("importance", "hmc"):
        raise ValueError(f'sampler must be "importance" or "hmc", got {sampler!r}.')
    recorder = StopRecorder(callback)
    modes = laplace_modes(posterior, rng=rng, starts=starts, callback=recorder)
    if recorder.stopped:
        return _mode_alone(sampler, modes[0])
    free = _Free(posterior, modes)
    common: dict[str, Any] = {
        "rng": rng,
        "target_ess": target_ess,
        "n_jobs": n_jobs,
        "callback": recorder,
    }
    if sampler == "importance":
        n_points = _MOST_POINTS if n_samples is None else n_samples
        return _by_importance(free, n_samples=n_points, **common)
    n_draws = _MOST_DRAWS if n_samples is None else n_samples
    if n_chains is None:
        n_chains = 8 if posterior.batched else 4
    return _by_hmc(free, n_chains=n_chains, n_warmup=n_warmup, n_samples=n_draws, **common)


class _Free:
    """What samplers see: the posterior without bounds, and its modes there.

    Attributes
    ----------
    target : FreePosterior
    best : LaplaceApproximation
        The mode of u.
    modes : list of LaplaceApproximation
        Of x.
    shares : ndarray of shape (m,)
        Of the posterior's mass, by Laplace's approximation.
    """

    def __init__(self, posterior: LogPosterior, modes: list[LaplaceApproximation]) -> None:
        felt = felt_bounds(posterior, modes)
        self.target, self.best, self.modes = FreePosterior(posterior, felt), modes[0], modes
        if felt.any():
            starts = self.target.to_x(np.array([each.mode for each in modes]))
            self.modes = modes_of_all(self.target, starts)
        evidence = np.array([each.log_evidence for each in self.modes])
        self.shares = np.exp(evidence - logsumexp(evidence)).clip(_LEAST_SHARE)
        self.shares /= self.shares.sum()

    @property
    def round(self) -> int:
        """Points of importance sampling between two refits."""
        few = self.target.batched and len(self.target.data.y) <= _FEW
        return _ROUND_OF_FEW if few else _ROUND

    def importance(self, **common: Any) -> ImportanceSamples:
        """Adaptive importance sampling from the modes."""
        target = self.target
        means = [*(each.mode for each in self.modes), target.medians]
        covariances = [*(each.covariance for each in self.modes), np.diag(target.prior_sd**2)]
        return adaptive_importance_sampling(
            target.log_densities,
            np.array(means),
            np.array(covariances),
            shares=np.append((1 - _REST) * self.shares, _REST),
            wide=(target.medians, target.prior_sd),
            wide_share=_WIDE_OF_FEW if target.batched else _WIDE,
            df=_DF,
            max_pareto_k=_MAX_PARETO_K,
            chunk_size=_ROUND_OF_FEW if target.batched else _CHUNK,
            **common,
        )


def _by_importance(
    free: _Free, *, n_samples: int, target_ess: float, **common: Any
) -> PosteriorSamples:
    n_points = min(free.round, max(2, n_samples + n_samples % 2))
    target = free.target
    found = free.importance(
        target_ess=target_ess,
        n_points=n_points,
        max_rounds=max(1, n_samples // n_points),
        every=n_points if len(target.data.y) <= _LARGE else 16 * _CHUNK,
        **common,
    )
    problems = []
    if found.ess < target_ess:
        problems.append(
            f"the effective number of samples is {found.ess:.0f} of {target_ess:g} wanted; raise "
            'n_samples or use sampler="hmc"'
        )
    if found.ess_spread < target_ess / 2:
        problems.append(_spread_problem(found.ess_spread, target_ess) + ' or use sampler="hmc"')
    if not found.pareto_k < _MAX_PARETO_K:
        problems.append(
            f"the Pareto k of the importance weights is {found.pareto_k:.2f}, above "
            f'{_MAX_PARETO_K}: few samples may carry all the weight; use sampler="hmc"'
        )
    diagnostics = _diagnostics("importance", free, problems) | {
        "ess": found.ess,
        "ess_spread": found.ess_spread,
        "pareto_k": found.pareto_k,
        "n_rounds": int(found.round[-1]) + 1,
        "n_likelihoods": len(found.points),
        "log_evidence": found.log_normalizer,
    }
    return PosteriorSamples(
        target.to_u(found.points),
        found.weights,
        found.round,
        found.log_density - target.log_jacobian(found.points),
        free.best.mode,
        diagnostics,
    )


def _by_hmc(
    free: _Free,
    *,
    rng: np.random.Generator,
    n_chains: int,
    n_warmup: int,
    n_samples: int,
    target_ess: float,
    **common: Any,
) -> PosteriorSamples:
    target = free.target
    pilot = free.importance(
        rng=rng, n_points=free.round, max_rounds=_PILOT_ROUNDS, target_ess=math.inf, **common
    )
    begin = rng.choice(len(pilot.points), size=n_chains, p=pilot.weights)
    found = hamiltonian_monte_carlo(
        target.log_densities_and_gradients if target.batched else target.log_density_and_gradient,
        *pilot.proposal.scale(),
        rng=rng,
        starts=pilot.points[begin],
        jumps=pilot.proposal,
        log_density=target.log_densities if target.batched else target.log_density,
        batched=target.batched,
        n_chains=n_chains,
        n_warmup=n_warmup,
        n_draws=n_samples,
        target_ess=target_ess,
        max_r_hat=MAX_R_HAT,
        every=iterations_between_calls(len(target.data.y)),
        **common,
    )
    n_drawn = found.points.shape[1]
    astray = found.n_divergent > _ASTRAY * n_drawn
    problems = _hmc_problems(found, astray, target_ess)
    chains = np.arange(n_chains) if astray.all() else np.flatnonzero(~astray)
    found = found.select(chains)
    size = found.log_density.size
    diagnostics = _diagnostics("hmc", free, problems) | {
        "ess": float(np.minimum(found.ess, found.ess_tail).min()),
        "ess_bulk": found.ess,
        "ess_tail": found.ess_tail,
        "ess_spread": float(np.min(found.ess_spread)),
        "r_hat": found.r_hat,
        "acceptance": found.acceptance,
        "n_divergent": found.n_divergent,
        "step_size": found.step_size,
    }
    diagnostics["n_gradients"] += found.n_gradients
    diagnostics["n_likelihoods"] = len(pilot.points)
    x = found.points.reshape(size, -1)
    return PosteriorSamples(
        target.to_u(x),
        np.full(size, 1 / size),
        np.repeat(chains, n_drawn),
        found.log_density.reshape(size) - target.log_jacobian(x),
        free.best.mode,
        diagnostics,
    )


def _spread_problem(ess: float, target_ess: float) -> str:
    return (
        f"the effective number of samples for standard deviations is {ess:.0f} of "
        f"{target_ess / 2:g} wanted; raise n_samples"
    )


def mixing_problems(
    r_hat: np.ndarray, ess: np.ndarray, target_ess: float, ess_tail: np.ndarray | None = None
) -> list[str]:
    """Whether R-hat and ESS (p,) of chains are not as they should be, each with a remedy."""
    problems = []
    worst, least = float(np.max(r_hat)), float(np.min(ess))
    if ess_tail is not None and not np.min(ess_tail) >= target_ess:
        problems.append(
            f"the effective number of samples for tails is {np.min(ess_tail):.0f} of "
            f"{target_ess:g} wanted; raise n_samples"
        )
    if not worst <= MAX_R_HAT:
        problems.append(f"R-hat is {worst:.3f}, above {MAX_R_HAT}; raise n_samples or n_warmup")
    if not least >= target_ess:
        problems.append(
            f"the effective number of samples is {least:.0f} of {target_ess:g} wanted; raise "
            "n_samples"
        )
    return problems


def _hmc_problems(found: HMCResult, astray: np.ndarray, target_ess: float) -> list[str]:
    """What keeps the chains from being trusted, each with a remedy; chains are named."""
    problems = mixing_problems(found.r_hat, found.ess, target_ess, found.ess_tail)
    if not np.min(found.ess_spread) >= target_ess / 2:
        problems.append(_spread_problem(float(np.min(found.ess_spread)), target_ess))
    if found.warming_up:
        problems.insert(0, "sampling was stopped in the warm-up, whose draws stand for the rest")
    some = np.flatnonzero(found.n_divergent > _DIVERGENT * found.points.shape[1])
    if len(some):
        problems.append(
            f"more than {_DIVERGENT:.0%} of the paths of chains {some.tolist()} diverged"
            + (f" (left out: {np.flatnonzero(astray).tolist()})" if astray.any() else "")
            + "; raise n_warmup, or use priors that keep off the edge where the kernel matrix is "
            "singular"
        )
    return problems


def _diagnostics(sampler: str, free: _Free, problems: list[str]) -> dict:
    """Entries that every sampler has."""
    return _of_mode(sampler, free.best, problems) | {"n_modes": len(free.modes)}


def _of_mode(sampler: str, laplace: LaplaceApproximation, problems: list[str]) -> dict:
    return {
        "sampler": sampler,
        "converged": not problems,
        "problems": problems,
        "ess": math.nan,
        "n_likelihoods": 0,
        "n_gradients": laplace.n_gradients,
        "log_posterior_map": laplace.log_density,
        "log_evidence": laplace.log_evidence,
    }


def _mode_alone(sampler: str, laplace: LaplaceApproximation) -> PosteriorSamples:
    """The mode as the only sample, where sampling was stopped before it began."""
    problem = "sampling was stopped before the first draw: the mode stands for the posterior"
    diagnostics = _of_mode(sampler, laplace, [problem]) | {"ess": 1.0, "n_modes": 1}
    return single_sample(laplace.mode, laplace.log_density, diagnostics)
