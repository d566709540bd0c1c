r"""Samples of the posterior over hyper-parameters where the likelihood is evaluated exactly.

Both samplers start from the Laplace approximation (:mod:`skgp.models.bayesian.laplace`):

``"importance"``
    Adaptive importance sampling: values of the posterior only, two to four rounds of them where
    the posterior has one mode (:mod:`skgp.samplers.importance`).
``"hmc"``
    Hamiltonian Monte Carlo, which copes with posteriors far from any Student-t, for about four
    times the work (:mod:`skgp.samplers.hmc`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skgp.models.bayesian.laplace import LaplaceApproximation, laplace_approximation
from skgp.models.bayesian.log_posterior import LogPosterior
from skgp.samplers import (
    HMCResult,
    adaptive_importance_sampling,
    ess_tail,
    hamiltonian_monte_carlo,
    stratified_resample,
)
from skgp.samplers.chains import SEGMENT
from skgp.training.stopping import StopRecorder

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
_ROUND = 256  # points of importance sampling between two refits
_CHUNK = 4  # of these, for one worker
_LARGE = 1000  # rows beyond which callbacks are told more often
_MOST_POINTS, _MOST_DRAWS = 20 * _ROUND, 1000


@dataclass(frozen=True)
class PosteriorSamples:
    """Weighted samples of u, the logarithms of the hyper-parameters.

    Attributes
    ----------
    u : ndarray of shape (s, p)
    weights : ndarray of shape (s,)
        Of sum one.
    chain : ndarray of int, shape (s,)
        Which chain a sample belongs to; the round, for importance sampling. Chains of which more
        than a tenth of the paths diverged are left out, unless all did.
    log_posterior : ndarray of shape (s,)
        Up to the evidence, nats.
    map_ : ndarray of shape (p,)
        The mode.
    diagnostics : dict
        "sampler", "converged" and "problems", a list of sentences, empty where converged;
        "ess" (effective number of samples, the least over coordinates), "n_likelihoods",
        "n_gradients" and "log_evidence"; for importance sampling "pareto_k" and "n_rounds"; for
        HMC "r_hat", "ess_bulk" and "ess_tail" (p,), "acceptance", "n_divergent" and "step_size"
        (n_chains,).
    """

    u: np.ndarray
    weights: np.ndarray
    chain: np.ndarray
    log_posterior: np.ndarray
    map_: np.ndarray
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


def iterations_between_calls(n: int) -> int:
    """How often samplers call back for n rows, so that a stop takes seconds and not minutes."""
    return max(1, int(SEGMENT * min(1.0, (_LARGE / n) ** 2)))


def sample_exact(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    sampler: str = "importance",
    n_chains: int = 4,
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
    n_chains, n_warmup : int, default=4 and 50
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
    laplace = laplace_approximation(posterior, rng=rng, starts=starts, callback=recorder)
    if recorder.stopped:
        return _mode_alone(sampler, laplace)
    common: dict[str, Any] = {
        "rng": rng,
        "target_ess": target_ess,
        "n_jobs": n_jobs,
        "callback": recorder,
    }
    if sampler == "importance":
        n_points = _MOST_POINTS if n_samples is None else n_samples
        return _by_importance(posterior, laplace, n_samples=n_points, **common)
    n_draws = _MOST_DRAWS if n_samples is None else n_samples
    return _by_hmc(
        posterior, laplace, n_chains=n_chains, n_warmup=n_warmup, n_samples=n_draws, **common
    )


def _by_importance(
    posterior: LogPosterior,
    laplace: LaplaceApproximation,
    *,
    n_samples: int,
    target_ess: float,
    **common: Any,
) -> PosteriorSamples:
    n_points = min(_ROUND, max(2, n_samples + n_samples % 2))
    found = adaptive_importance_sampling(
        posterior.log_densities,
        laplace.mode,
        laplace.covariance,
        target_ess=target_ess,
        max_pareto_k=_MAX_PARETO_K,
        n_points=n_points,
        max_rounds=max(1, n_samples // n_points),
        chunk_size=_ROUND if posterior.batched else _CHUNK,
        every=n_points if len(posterior.data.y) <= _LARGE else 16 * _CHUNK,
        **common,
    )
    problems = []
    if found.ess < target_ess:
        problems.append(
            f"the effective number of samples is {found.ess:.0f} of {target_ess:g} wanted; raise "
            'n_samples or use sampler="hmc"'
        )
    if not found.pareto_k < _MAX_PARETO_K:
        problems.append(
            f"the Pareto k of the importance weights is {found.pareto_k:.2f}, above "
            f'{_MAX_PARETO_K}: few samples may carry all the weight; use sampler="hmc"'
        )
    diagnostics = _diagnostics("importance", laplace, problems) | {
        "ess": found.ess,
        "pareto_k": found.pareto_k,
        "n_rounds": int(found.round[-1]) + 1,
        "n_likelihoods": len(found.points),
        "log_evidence": found.log_normalizer,
    }
    return PosteriorSamples(
        found.points, found.weights, found.round, found.log_density, laplace.mode, diagnostics
    )


def _by_hmc(
    posterior: LogPosterior,
    laplace: LaplaceApproximation,
    *,
    n_chains: int,
    n_warmup: int,
    n_samples: int,
    target_ess: float,
    **common: Any,
) -> PosteriorSamples:
    found = hamiltonian_monte_carlo(
        posterior.log_density_and_gradient,
        laplace.mode,
        laplace.covariance,
        n_chains=n_chains,
        n_warmup=n_warmup,
        n_draws=n_samples,
        target_ess=target_ess,
        max_r_hat=MAX_R_HAT,
        every=iterations_between_calls(len(posterior.data.y)),
        **common,
    )
    if found.points.shape[1] == 0:
        return _mode_alone("hmc", laplace)
    n_drawn = found.points.shape[1]
    astray = found.n_divergent > _ASTRAY * n_drawn
    problems = _hmc_problems(found, astray, target_ess)
    chains = np.arange(n_chains) if astray.all() else np.flatnonzero(~astray)
    found = found.select(chains)
    size = found.log_density.size
    tails = np.array([ess_tail(column) for column in found.points.transpose(2, 0, 1)])
    diagnostics = _diagnostics("hmc", laplace, problems) | {
        "ess": float(found.ess.min()),
        "ess_bulk": found.ess,
        "ess_tail": tails,
        "r_hat": found.r_hat,
        "acceptance": found.acceptance,
        "n_divergent": found.n_divergent,
        "step_size": found.step_size,
    }
    diagnostics["n_gradients"] += found.n_gradients
    return PosteriorSamples(
        found.points.reshape(size, -1),
        np.full(size, 1 / size),
        np.repeat(chains, n_drawn),
        found.log_density.reshape(size),
        laplace.mode,
        diagnostics,
    )


def mixing_problems(r_hat: np.ndarray, ess: np.ndarray, target_ess: float) -> list[str]:
    """Whether R-hat and ESS (p,) of chains are not as they should be, each with a remedy."""
    problems = []
    worst, least = float(np.max(r_hat)), float(np.min(ess))
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
    problems = mixing_problems(found.r_hat, found.ess, target_ess)
    some = np.flatnonzero(found.n_divergent > _DIVERGENT * found.points.shape[1])
    if len(some):
        problems.append(
            f"more than {_DIVERGENT:.0%} of the paths of chains {some.tolist()} diverged"
            + (f" (left out: {np.flatnonzero(astray).tolist()})" if astray.any() else "")
            + "; raise n_warmup, or use priors that keep off the edge where the kernel matrix is "
            "singular"
        )
    return problems


def _diagnostics(sampler: str, laplace: LaplaceApproximation, problems: list[str]) -> dict:
    """Entries that every sampler has."""
    return {
        "sampler": sampler,
        "converged": not problems,
        "problems": problems,
        "ess": math.nan,
        "n_likelihoods": 0,
        "n_gradients": laplace.n_gradients,
        "log_evidence": laplace.log_evidence,
    }


def _mode_alone(sampler: str, laplace: LaplaceApproximation) -> PosteriorSamples:
    """The mode as the only sample, where sampling was stopped before it began."""
    problem = "sampling was stopped before the first draw: the mode stands for the posterior"
    diagnostics = _diagnostics(sampler, laplace, [problem]) | {"ess": 1.0}
    return single_sample(laplace.mode, laplace.log_density, diagnostics)
