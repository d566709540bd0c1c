r"""Hamiltonian Monte Carlo with exact gradients [1]_, all chains in lockstep.

In coordinates :math:`x = F^{-1} (u - m)`, in which an approximation :math:`N(m, F F^T)` of the
target is standard normal, each iteration draws a momentum, integrates Hamilton's equations by some
leapfrog steps and accepts the end by Metropolis. The number of steps is drawn afresh each time,
uniformly up to half a period of that normal distribution, against resonances.
Chains share the step size and the number of steps, so that one call of the target gives the
gradients of all. Where a global approximation is given, some iterations are jumps instead: a
point drawn from it, accepted by Metropolis with the ratio of the weights of both [3]_. They link
modes that paths do not, and tails that these reach slowly.

The warm-up finds the step size by dual averaging of the chains' mean acceptance [2]_; in its middle
half the metric, the covariance of the chains' draws, shrunk to the first approximation; and how
often jumps are refused, which is how often there will be paths. All are then held.

References
----------
.. [1] Neal (2011), MCMC using Hamiltonian dynamics. Handbook of Markov Chain Monte Carlo.
.. [2] Hoffman and Gelman (2014), The No-U-Turn Sampler: adaptively setting path lengths in
   Hamiltonian Monte Carlo. JMLR 15.
.. [3] Tierney (1994), Markov chains for exploring posterior distributions. Annals of Statistics 22:
   independence chains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from joblib import Parallel

from skgp.samplers.chains import SEGMENT, Callback, check_counts, cholesky_factor, mixing, stretches
from skgp.samplers.hmc_chains import (
    Chains,
    Jumps,
    LogDensityAndGradient,
    evaluator,
    value_evaluator,
)
from skgp.samplers.student_t import StudentMixture

__all__ = ["HMCResult", "hamiltonian_monte_carlo"]

_JUMPS = 6  # of an iteration


@dataclass(frozen=True)
class HMCResult:
    """What the chains drew after their warm-up.

    Attributes
    ----------
    points : ndarray of shape (n_chains, n_draws, p)
    log_density : ndarray of shape (n_chains, n_draws)
    r_hat, ess, ess_tail, ess_spread : ndarray of shape (p,)
        Rank-normalised split R-hat, and effective numbers of draws for the bulk, the tails and the
        variance of each coordinate.
    acceptance : ndarray of shape (n_chains,)
        Mean acceptance probability.
    n_divergent : ndarray of int, shape (n_chains,)
    step_size : ndarray of shape (n_chains,)
        The same for all.
    n_gradients : int
    converged : bool
        Whether R-hat and ESS reached what was asked for.
    warming_up : bool
        Whether the callback ended the warm-up: the draws are those of it.
    """

    points: np.ndarray
    log_density: np.ndarray
    r_hat: np.ndarray
    ess: np.ndarray
    ess_tail: np.ndarray
    ess_spread: np.ndarray
    acceptance: np.ndarray
    n_divergent: np.ndarray
    step_size: np.ndarray
    n_gradients: int
    converged: bool
    warming_up: bool = False

    def select(self, chains: np.ndarray) -> "HMCResult":
        """The result of some of the chains: `chains` holds their indices, or a flag for each."""
        points = self.points[chains]
        rhats, ess, tail, spread = mixing(points)
        return replace(
            self,
            points=points,
            log_density=self.log_density[chains],
            r_hat=rhats,
            ess=ess,
            ess_tail=tail,
            ess_spread=spread,
            acceptance=self.acceptance[chains],
            n_divergent=self.n_divergent[chains],
            step_size=self.step_size[chains],
        )


def hamiltonian_monte_carlo(
    target: LogDensityAndGradient,
    mean: np.ndarray,
    covariance: np.ndarray,
    *,
    rng: np.random.Generator,
    starts: np.ndarray | None = None,
    jumps: StudentMixture | None = None,
    log_density: Callable[[np.ndarray], Any] | None = None,
    n_chains: int = 4,
    n_warmup: int = 50,
    n_draws: int = 500,
    target_ess: float = math.inf,
    max_r_hat: float = 1.01,
    target_acceptance: float = 0.8,
    batched: bool = False,
    n_jobs: int | None = None,
    every: int = SEGMENT,
    callback: Callback | None = None,
) -> HMCResult:
    """Draw from a density known up to a constant, with its gradient.

    Parameters
    ----------
    target : callable
        Maps a point (p,) to its log-density and the gradient (p,), or, if `batched`, points (k, p)
        to (k,) and (k, p). Picklable where `n_jobs` and joblib's backend ask for processes.
    mean, covariance : ndarray of shape (p,) and (p, p)
        Of an approximation of the target.
    rng : numpy.random.Generator
    starts : ndarray of shape (n_chains, p), optional
        Where the chains begin; draws of the approximation by default.
    jumps : StudentMixture, optional
        Proposes jumps.
    log_density : callable, optional
        The log-density alone, which jumps ask for.
    n_chains : int, default=4
    n_warmup : int, default=50
        Iterations that find step size and metric, and are dropped.
    n_draws : int, default=500
        Most iterations of a chain after these.
    target_ess : float, default=inf
    max_r_hat : float, default=1.01
        Sampling ends early where every coordinate meets both, by bulk and tail, and by half of
        that for its variance.
    target_acceptance : float, default=0.8
    batched : bool, default=False
    n_jobs : int, optional
        Of joblib, over the chains unless `batched`. Results do not depend on it.
    every : int, default=25
        Iterations between two calls of `callback`, at most 25. Results do not depend on it.
    callback : callable, optional
        ``callback(iteration, {"loss": -mean log-density, "ess": float, "r_hat": float})``; True
        stops, keeping what was drawn.

    Returns
    -------
    HMCResult

    Raises
    ------
    ValueError
        If `covariance` is not positive definite, a count is less than 1, or the target vanishes
        near the mean.

    Notes
    -----
    An iteration costs one gradient a leapfrog step, about two or three where the approximation is
    good.
    """
    check_counts(n_chains, n_warmup, n_draws, every)
    mean, factor = np.asarray(mean, float), cholesky_factor(covariance)
    points: list[np.ndarray] = []
    values: list[np.ndarray] = []
    with Parallel(n_jobs=None if batched else n_jobs) as parallel:
        evaluate, leaps = evaluator(target, batched, parallel), None
        if jumps is not None and log_density is not None:
            leaps = Jumps(jumps, value_evaluator(log_density, batched, parallel), _JUMPS)
        chains = Chains(
            evaluate, mean, factor, rng, n_chains, n_warmup, target_acceptance, starts, leaps
        )
        for n_steps, segment_ends in stretches(n_warmup, n_draws, every):
            for _ in range(n_steps):
                chains.iterate()
                points.append(chains.u())
                values.append(chains.value)
            result = _result(chains, points, values, (target_ess, max_r_hat))
            info = {
                "loss": -float(np.mean(values[-n_steps:])),
                "ess": float(np.minimum(result.ess, result.ess_tail).min()),
                "r_hat": float(result.r_hat.max()),
            }
            stopped = callback is not None and callback(chains.n_done, info)
            if stopped or (segment_ends and result.converged):
                break
    return result


def _result(chains: Chains, points, values, wanted: tuple[float, float]) -> HMCResult:
    """Everything drawn after the warm-up, and whether it is as good as wanted."""
    warming_up = len(points) <= chains.n_warmup
    first = 0 if warming_up else chains.n_warmup
    drawn = np.stack(points[first:], axis=1)  # (c, n, p)
    rhats, ess, tail, spread = mixing(drawn)
    enough = np.all(np.minimum(ess, tail) >= wanted[0]) and np.all(spread >= wanted[0] / 2)
    good = enough and np.all(rhats <= wanted[1])
    return HMCResult(
        points=drawn,
        log_density=np.stack(values[first:], axis=1),
        r_hat=rhats,
        ess=ess,
        ess_tail=tail,
        ess_spread=spread,
        acceptance=chains.acceptance,
        n_divergent=chains.n_divergent.copy(),
        step_size=np.full(len(drawn), chains.step_size),
        n_gradients=chains.n_gradients,
        converged=bool(good) and not warming_up,
        warming_up=warming_up,
    )
