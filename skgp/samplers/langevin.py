"""Langevin dynamics with unbiased estimates of the gradient of a log-density: chains.

Chains advance in segments; each owns its random numbers, so that results do not depend on the
number of workers. The covariance of the noise is estimated from pairs of estimates at the same
places and pooled over the chains between segments. Of the corrected steps, draws and gradients
together give the weights of :func:`~skgp.samplers.diagnostics.stein_weights`. The steps themselves,
their notation and references, are in :mod:`skgp.samplers.langevin_steps`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from joblib import Parallel, delayed

from skgp.linalg.runtime import WithinBudget
from skgp.samplers import defaults as tuned
from skgp.samplers.diagnostics import Run, cholesky_factor, mixing, stein_weights
from skgp.samplers.langevin_steps import STEPS, LangevinChain, NoisyGradient, Settings, kick_matrix


@dataclass(frozen=True)
class LangevinResult:
    """What c chains drew after their warm-up."""

    points: np.ndarray  # (c, n_draws, p)
    weights: np.ndarray  # (c, n_draws), of sum one; zero for chains gone astray
    r_hat: np.ndarray  # (p,), unweighted, over the chains not gone astray
    ess: np.ndarray  # (p,), for the bulk, likewise
    n_astray: np.ndarray  # (c,), iterations that were clipped or undone
    astray: np.ndarray  # (c,), where these are more than a tenth, unless they are so in all
    acceptance: np.ndarray  # (c,), mean acceptance probability; 1 without a Metropolis step
    step_size: np.ndarray  # (c,), the last
    #: Largest eigenvalue of the covariance of the gradient's noise, whitened. Of "sgld", in which
    #: it cannot be told from the gradient, of both.
    noise_ratio: float
    floored: float  # sum of eigenvalues raised to 0: noise beyond what a kick can make up for
    criterion: np.ndarray  # (c,), (7) of "sgld"; NaN before 100 iterations
    frozen: bool  # of "sgld": all chains hold their step; the draws before are left out
    n_gradients: int
    memories: list  # of the gradient, one a chain
    converged: bool  # R-hat and ESS reached what was asked for


def stochastic_langevin(
    target: NoisyGradient,
    mean: np.ndarray,  # (p,) and (p, p), of an approximation of the density;
    covariance: np.ndarray,  # chains start from draws of it
    *,
    rng: np.random.Generator,  # spawns one generator a chain
    run: Run | None = None,
    sampler: str = "langevin",  # "langevin", "mala" or "sgld"
    schedule: Callable[[int], float] | float = 1.0,  # whitened step, below 4; by number from 1
    bounds: np.ndarray | None = None,  # (p, 2), outside of which the density is zero
) -> LangevinResult:
    """Draw from a density of which unbiased estimates of the log-density's gradient are known.

    ``callback(iteration, {"loss": float, "ess": float, "r_hat": float})`` stops by True, keeping
    what was drawn; without a log-density, the loss is half the mean squared distance from `mean`,
    whitened. An iteration costs one gradient, three of "mala", and one more at every tenth
    iteration and every second of the warm-up. A ValueError refuses a covariance that is not
    positive definite, and steps beyond 0 to 4.
    """
    run, p = run or Run(), len(mean)
    bounds = np.full((p, 2), [-math.inf, math.inf]) if bounds is None else np.asarray(bounds)
    settings = Settings(
        target, np.asarray(mean, float), cholesky_factor(covariance), bounds, schedule, sampler,
        run.n_warmup, noise=np.zeros((p, p)),
    )  # fmt: skip
    if not all(0 < settings.step_size(t) < 4 for t in (1, run.n_warmup + run.n_draws)):
        raise ValueError(
            "steps of schedule must lie between 0 and 4, beyond which Langevin dynamics is "
            f"unstable; got {settings.step_size(1)} at first. Use steps of about 1."
        )
    chains = [_begin(settings, child) for child in rng.spawn(run.n_chains)]
    draws: list[tuple[np.ndarray, ...]] = []
    with Parallel(n_jobs=run.n_jobs) as parallel:
        for n_steps, segment_ends in run.stretches():
            advance = delayed(WithinBudget(_advance, run.n_jobs))
            advanced = parallel(advance(settings, chain, n_steps) for chain in chains)
            chains = [chain for chain, _, _ in advanced]
            drawn = tuple(np.stack([each[i] for each in advanced]) for i in (1, 2))  # (c, n, p)
            if chains[0].n_done > run.n_warmup:
                draws.append(drawn)
            if segment_ends:
                settings = replace(settings, noise=_pooled_noise(chains))
            result = _result(settings, chains, draws, run)
            info = {
                "loss": 0.5 * float((drawn[0] ** 2).sum(-1).mean()),
                "ess": float(result.ess.min()),
                "r_hat": float(result.r_hat.max()),
            }
            if run.stops(chains[0].n_done, info) or (segment_ends and result.converged):
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
        step = settings.step_size(chain.n_done + 1)
        if not chain.frozen_at:
            chain.step_size = step
        STEPS[settings.sampler](settings, chain, step)
        chain.n_done += 1
        points.append(chain.draw)
        gradients.append(chain.gradient)
    return chain, np.array(points), np.array(gradients)


def _pooled_noise(chains: list[LangevinChain]) -> np.ndarray:
    """Covariance (p, p) of the gradient's noise, whitened, over the pairs of all chains."""
    total = sum((chain.noise for chain in chains), np.zeros_like(chains[0].noise))
    return total / max(1, sum(chain.n_pairs for chain in chains))


def _result(
    settings: Settings, chains: list[LangevinChain], draws: list, run: Run
) -> LangevinResult:
    """Everything drawn after the warm-up, weighted equally, and whether it is as good as wanted."""
    none = np.empty((len(chains), 0, len(settings.mean)))
    x = np.concatenate([none, *(points for points, _ in draws)], axis=1)
    n_drawn = max(1, x.shape[1])
    frozen = all(chain.frozen_at for chain in chains)
    if frozen:
        x = x[:, max(0, max(chain.frozen_at for chain in chains) - settings.n_warmup) :]
    n_astray = np.array([chain.n_astray for chain in chains])
    astray = n_astray > tuned.ASTRAY * n_drawn
    astray &= not astray.all()
    points = settings.position(x)
    r_hats, ess, *_ = mixing(points[~astray])
    of_sgld, mala = settings.sampler == "sgld", settings.sampler == "mala"
    kept = np.where(astray, 0.0, 1.0)[:, None] * np.ones(x.shape[:2])
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
        converged=bool(np.all(ess >= run.target_ess) and np.all(r_hats <= run.max_r_hat))
        and (frozen or not of_sgld),
    )


def _weighted(result: LangevinResult, draws: list, settings: Settings) -> LangevinResult:
    """With the weights of Stein's identity, which noise kept by "sgld" would invalidate."""
    if settings.sampler == "sgld" or result.points.shape[1] == 0:
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
