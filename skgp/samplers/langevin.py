r"""Langevin dynamics with unbiased estimates of a gradient in the place of gradients.

Nothing but the gradient of the log-density is asked for, and that with noise. The kinds of steps,
and what their noise is corrected by, are in :mod:`skgp.samplers.langevin_steps`. Of the corrected
ones, draws and gradients together give the weights of :mod:`skgp.samplers.stein`.

Chains advance in segments. The covariance of the noise is estimated from pairs of estimates at the
same places and pooled over the chains between segments. Each chain owns its random numbers: results
do not depend on the number of workers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from joblib import Parallel

from skgp.samplers.chains import (
    SEGMENT,
    Callback,
    advance_all,
    check_counts,
    cholesky_factor,
    mixing,
    stretches,
)
from skgp.samplers.langevin_steps import (
    STEPS,
    LangevinChain,
    NoisyGradient,
    Settings,
    kick_matrix,
)
from skgp.samplers.schedules import ConstantSchedule
from skgp.samplers.stein import stein_weights

__all__ = ["LangevinResult", "stochastic_langevin"]

_ASTRAY = 0.1  # share of a chain's iterations: such a chain is left out


@dataclass(frozen=True)
class LangevinResult:
    """What the chains drew after their warm-up.

    Attributes
    ----------
    points : ndarray of shape (n_chains, n_draws, p)
    weights : ndarray of shape (n_chains, n_draws)
        Of sum one; zero for chains gone astray.
    r_hat, ess : ndarray of shape (p,)
        Rank-normalised split R-hat and bulk ESS of each coordinate, unweighted, over the chains not
        gone astray.
    n_astray : ndarray of int, shape (n_chains,)
        Iterations that were clipped or undone.
    astray : ndarray of bool, shape (n_chains,)
        Chains where these are more than a tenth, unless they are so in all.
    acceptance : ndarray of shape (n_chains,)
        Mean acceptance probability; 1 without a Metropolis step.
    step_size : ndarray of shape (n_chains,)
        The last.
    noise_ratio : float
        Largest eigenvalue of the covariance of the gradient's noise, whitened. Of "sgld", in which
        it cannot be told from the gradient, of both.
    floored : float
        Sum of the eigenvalues raised to 0 where the noise was more than a kick can make up for.
    criterion : ndarray of shape (n_chains,)
        Of "sgld": variance of the noise over that injected; NaN before 100 iterations.
    frozen : bool
        Of "sgld": whether all chains hold their step. Then the draws before are left out.
    n_gradients : int
    memories : list
        What the gradient remembers of each chain.
    converged : bool
        Whether R-hat and ESS reached what was asked for.
    """

    points: np.ndarray
    weights: np.ndarray
    r_hat: np.ndarray
    ess: np.ndarray
    n_astray: np.ndarray
    astray: np.ndarray
    acceptance: np.ndarray
    step_size: np.ndarray
    noise_ratio: float
    floored: float
    criterion: np.ndarray
    frozen: bool
    n_gradients: int
    memories: list
    converged: bool


def stochastic_langevin(
    target: NoisyGradient,
    mean: np.ndarray,
    covariance: np.ndarray,
    *,
    rng: np.random.Generator,
    sampler: str = "langevin",
    schedule: Callable[[int], float] | None = None,
    bounds: np.ndarray | None = None,
    n_chains: int = 4,
    n_warmup: int = 50,
    n_draws: int = 1000,
    target_ess: float = math.inf,
    max_r_hat: float = 1.01,
    n_jobs: int | None = None,
    every: int = SEGMENT,
    callback: Callback | None = None,
) -> LangevinResult:
    """Draw from a density of which unbiased estimates of the log-density's gradient are known.

    Parameters
    ----------
    target : NoisyGradient
    mean, covariance : ndarray of shape (p,) and (p, p)
        Of an approximation of the density; chains start from draws of it.
    rng : numpy.random.Generator
        Spawns one generator a chain.
    sampler : {"langevin", "mala", "sgld"}
    schedule : callable, optional
        Whitened step of an iteration, counted from 1, below 4; by default 1.
    bounds : ndarray of shape (p, 2), optional
        Outside of which the density is zero.
    n_chains, n_warmup, n_draws : int, default=4, 50 and 1000
        The warm-up is dropped; at most `n_draws` iterations of each chain follow.
    target_ess, max_r_hat : float, default=inf and 1.01
        Sampling ends early where every coordinate meets both.
    n_jobs : int, optional
        Of joblib.
    every : int, default=25
        Iterations between two calls of `callback`, at most 25. Results do not depend on it.
    callback : callable, optional
        ``callback(iteration, {"loss": float, "ess": float, "r_hat": float})``; True stops, keeping
        what was drawn. Without a log-density, the loss is half the mean squared distance from
        `mean`, whitened.

    Returns
    -------
    LangevinResult

    Raises
    ------
    ValueError
        For an unknown sampler, a covariance that is not positive definite, a count less than 1 or
        steps that do not lie between 0 and 4.

    Notes
    -----
    An iteration costs one gradient, three of "mala"; both evaluate one more at every tenth
    iteration, and at every second of the warm-up.
    """
    check_counts(n_chains, n_warmup, n_draws, every)
    if sampler not in STEPS:
        raise ValueError(f"sampler must be one of {sorted(STEPS)}, got {sampler!r}.")
    schedule = ConstantSchedule(1.0) if schedule is None else schedule
    if not all(0 < schedule(t) < 4 for t in (1, n_warmup + n_draws)):
        raise ValueError(
            "steps of schedule must lie between 0 and 4, beyond which Langevin dynamics is "
            f"unstable; got {schedule(1)} at first. Use steps of about 1."
        )
    p = len(mean)
    settings = Settings(
        target=target,
        mean=np.asarray(mean, float),
        factor=cholesky_factor(covariance),
        bounds=np.full((p, 2), [-math.inf, math.inf]) if bounds is None else np.asarray(bounds),
        schedule=schedule,
        step=STEPS[sampler],
        n_warmup=n_warmup,
        noise=np.zeros((p, p)),
    )
    chains = [_begin(settings, child) for child in rng.spawn(n_chains)]
    draws: list[tuple[np.ndarray, ...]] = []
    with Parallel(n_jobs=n_jobs) as parallel:
        for n_steps, segment_ends in stretches(n_warmup, n_draws, every):
            chains, drawn = advance_all(parallel, _advance, settings, chains, n_steps)
            if chains[0].n_done > n_warmup:
                draws.append(drawn)
            if segment_ends:
                settings = replace(settings, noise=_pooled_noise(chains))
            result = _result(settings, chains, draws, (target_ess, max_r_hat))
            info = {
                "loss": 0.5 * float((drawn[0] ** 2).sum(-1).mean()),
                "ess": float(result.ess.min()),
                "r_hat": float(result.r_hat.max()),
            }
            stopped = callback is not None and callback(chains[0].n_done, info)
            if stopped or (segment_ends and result.converged):
                break
    return _weighted(result, draws, settings)


def _begin(settings: Settings, rng: np.random.Generator) -> LangevinChain:
    """A chain at a draw of the approximation, nearer to its mean where that is out of bounds."""
    p = len(settings.mean)
    x = rng.standard_normal(p)
    for _ in range(20):
        if settings.inside(x):
            break
        x = x / 2
    return LangevinChain(x, rng, x, np.zeros(p), np.zeros((p, p)))


def _advance(
    settings: Settings, chain: LangevinChain, n_iterations: int
) -> tuple[LangevinChain, np.ndarray, np.ndarray]:
    """The chain after some iterations, its draws and the gradients there, (n, p), whitened."""
    points, gradients = [], []
    for _ in range(n_iterations):
        step = settings.schedule(chain.n_done + 1)
        if not chain.frozen_at:
            chain.step_size = step
        settings.step(settings, chain, step)
        chain.n_done += 1
        points.append(chain.draw)
        gradients.append(chain.gradient)
    return chain, np.array(points), np.array(gradients)


def _pooled_noise(chains: list[LangevinChain]) -> np.ndarray:
    """Covariance (p, p) of the gradient's noise, whitened, over the pairs of all chains."""
    total = sum((chain.noise for chain in chains), np.zeros_like(chains[0].noise))
    return total / max(1, sum(chain.n_pairs for chain in chains))


def _result(
    settings: Settings, chains: list[LangevinChain], draws: list, wanted: tuple[float, float]
) -> LangevinResult:
    """Everything drawn after the warm-up, weighted equally, and whether it is as good as wanted."""
    p, n_chains = len(settings.mean), len(chains)
    x = np.concatenate([np.empty((n_chains, 0, p)), *(points for points, _ in draws)], axis=1)
    n_drawn = max(1, x.shape[1])
    frozen = all(chain.frozen_at for chain in chains)
    if frozen:
        x = x[:, max(0, max(chain.frozen_at for chain in chains) - settings.n_warmup) :]
    n_astray = np.array([chain.n_astray for chain in chains])
    astray = n_astray > _ASTRAY * n_drawn
    astray &= not astray.all()
    points = settings.position(x)
    r_hats, ess, *_ = mixing(points[~astray])
    of_sgld = settings.step is STEPS["sgld"]
    kept = np.where(astray, 0.0, 1.0)[:, None] * np.ones(x.shape[:2])
    mala = settings.step is STEPS["mala"]
    return LangevinResult(
        points=points,
        weights=kept / max(1.0, kept.sum()),
        r_hat=r_hats,
        ess=ess,
        n_astray=n_astray,
        astray=astray,
        acceptance=np.array([chain.acceptance / n_drawn if mala else 1.0 for chain in chains]),
        step_size=np.array([chain.step_size for chain in chains]),
        noise_ratio=float(np.linalg.eigvalsh(settings.noise)[-1]),
        floored=0.0 if of_sgld else kick_matrix(chains[0].step_size, settings.noise)[1],
        criterion=np.array([chain.ratio for chain in chains]),
        frozen=frozen,
        n_gradients=sum(chain.n_gradients for chain in chains),
        memories=[chain.memory for chain in chains],
        converged=bool(np.all(ess >= wanted[0]) and np.all(r_hats <= wanted[1]))
        and (frozen or not of_sgld),
    )


def _weighted(result: LangevinResult, draws: list, settings: Settings) -> LangevinResult:
    """With the weights of Stein's identity, which noise kept by "sgld" would invalidate."""
    if settings.step is STEPS["sgld"] or result.points.shape[1] == 0:
        return result
    kept = ~result.astray
    x, gradients = (np.concatenate(each, axis=1)[kept] for each in zip(*draws, strict=True))
    p = x.shape[-1]
    ess = float(np.nan_to_num(result.ess.min()))
    weights = np.zeros_like(result.weights)
    weights[kept] = stein_weights(x.reshape(-1, p), gradients.reshape(-1, p), ess).reshape(
        x.shape[:2]
    )
    return replace(result, weights=weights)
