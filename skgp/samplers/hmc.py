r"""Hamiltonian Monte Carlo with exact gradients [1]_.

In coordinates :math:`x = F^{-1} (u - m)`, in which an approximation :math:`N(m, F F^T)` of the
target is standard normal, each iteration draws a momentum, integrates Hamilton's equations by some
leapfrog steps and accepts the end by Metropolis. The number of steps is drawn afresh each time,
uniformly up to a quarter more than half a period of that normal distribution, against resonances;
the step size is found in the warm-up by dual averaging [2]_ and then held.

Chains advance together and may be stopped in between. Each owns its random numbers: results do not
depend on the number of workers.

References
----------
.. [1] Neal (2011), MCMC using Hamiltonian dynamics. Handbook of Markov Chain Monte Carlo.
.. [2] Hoffman and Gelman (2014), The No-U-Turn Sampler: adaptively setting path lengths in
   Hamiltonian Monte Carlo. JMLR 15.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from joblib import Parallel, delayed

from skgp.samplers.chains import (
    SEGMENT,
    Callback,
    advance_all,
    check_counts,
    cholesky_factor,
    mixing,
    stretches,
)

__all__ = ["ChainState", "HMCResult", "hamiltonian_monte_carlo"]

LogDensityAndGradient = Callable[[np.ndarray], tuple[float, np.ndarray]]

_PATH = 1.25 * math.pi  # longest path in whitened coordinates, where the period is 2 pi
_MAX_STEPS = 64
_DIVERGENCE = 50.0  # nats of energy lost on a path: the integrator has left the level set
# Dual averaging, with the names and values of [2]_, section 3.2.
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75


@dataclass
class ChainState:
    """One chain between two segments; picklable.

    Attributes
    ----------
    x : ndarray of shape (p,)
        Position, whitened.
    log_density : float
    gradient : ndarray of shape (p,)
        Of the log-density, whitened.
    rng : numpy.random.Generator
    step_size : float
    n_done : int
        Iterations, warm-up included.
    n_gradients, n_divergent : int
        The latter after the warm-up.
    acceptance : float
        Sum of acceptance probabilities after the warm-up.
    statistic, log_average, centre : float
        Of the dual averaging.
    """

    x: np.ndarray
    log_density: float
    gradient: np.ndarray
    rng: np.random.Generator
    step_size: float
    n_done: int = 0
    n_gradients: int = 1
    n_divergent: int = 0
    acceptance: float = 0.0
    statistic: float = 0.0
    log_average: float = 0.0
    centre: float = 0.0


@dataclass(frozen=True)
class _Settings:
    """What all chains share."""

    target: LogDensityAndGradient
    mean: np.ndarray
    factor: np.ndarray
    n_warmup: int
    target_acceptance: float

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Log-density and gradient in whitened coordinates; -inf and 0 where not finite."""
        value, gradient = self.target(self.mean + self.factor @ x)
        if not (math.isfinite(value) and np.isfinite(gradient).all()):
            return -math.inf, np.zeros_like(x)
        return float(value), self.factor.T @ gradient


@dataclass(frozen=True)
class HMCResult:
    """What the chains drew after their warm-up.

    Attributes
    ----------
    points : ndarray of shape (n_chains, n_draws, p)
    log_density : ndarray of shape (n_chains, n_draws)
    r_hat, ess : ndarray of shape (p,)
        Rank-normalised split R-hat and bulk ESS of each coordinate.
    acceptance : ndarray of shape (n_chains,)
        Mean acceptance probability.
    n_divergent : ndarray of int, shape (n_chains,)
    step_size : ndarray of shape (n_chains,)
    n_gradients : int
    converged : bool
        Whether R-hat and ESS reached what was asked for.
    """

    points: np.ndarray
    log_density: np.ndarray
    r_hat: np.ndarray
    ess: np.ndarray
    acceptance: np.ndarray
    n_divergent: np.ndarray
    step_size: np.ndarray
    n_gradients: int
    converged: bool

    def select(self, chains: np.ndarray) -> "HMCResult":
        """The result of some of the chains: `chains` holds their indices, or a flag for each."""
        points = self.points[chains]
        rhats, ess = mixing(points)
        return replace(
            self,
            points=points,
            log_density=self.log_density[chains],
            r_hat=rhats,
            ess=ess,
            acceptance=self.acceptance[chains],
            n_divergent=self.n_divergent[chains],
            step_size=self.step_size[chains],
        )


@dataclass
class _Draws:
    """Segments drawn so far, one list an array of (n_chains, n_iterations, ...)."""

    points: list[np.ndarray] = field(default_factory=list)
    log_density: list[np.ndarray] = field(default_factory=list)


def hamiltonian_monte_carlo(
    target: LogDensityAndGradient,
    mean: np.ndarray,
    covariance: np.ndarray,
    *,
    rng: np.random.Generator,
    n_chains: int = 4,
    n_warmup: int = 50,
    n_draws: int = 500,
    target_ess: float = math.inf,
    max_r_hat: float = 1.01,
    target_acceptance: float = 0.8,
    n_jobs: int | None = None,
    every: int = SEGMENT,
    callback: Callback | None = None,
) -> HMCResult:
    """Draw from a density known up to a constant, with its gradient.

    Parameters
    ----------
    target : callable
        Maps a point (p,) to its log-density and the gradient (p,). Picklable where `n_jobs` and
        joblib's backend ask for processes.
    mean, covariance : ndarray of shape (p,) and (p, p)
        Of an approximation of the target; chains start from draws of it.
    rng : numpy.random.Generator
        Spawns one generator a chain.
    n_chains : int, default=4
    n_warmup : int, default=50
        Iterations that find the step size, and are dropped.
    n_draws : int, default=500
        Most iterations of a chain after these.
    target_ess : float, default=inf
    max_r_hat : float, default=1.01
        Sampling ends early where every coordinate meets both.
    target_acceptance : float, default=0.8
    n_jobs : int, optional
        Of joblib.
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
        If `covariance` is not positive definite, or a count is less than 1.

    Notes
    -----
    An iteration costs one gradient a leapfrog step, about two or three where the approximation is
    good.
    """
    check_counts(n_chains, n_warmup, n_draws, every)
    settings = _Settings(
        target, np.asarray(mean, float), cholesky_factor(covariance), n_warmup, target_acceptance
    )
    draws = _Draws()
    with Parallel(n_jobs=n_jobs) as parallel:
        chains = parallel(delayed(_begin)(settings, child) for child in rng.spawn(n_chains))
        for n_steps, segment_ends in stretches(n_warmup, n_draws, every):
            chains, (points, values) = advance_all(parallel, _advance, settings, chains, n_steps)
            if chains[0].n_done > n_warmup:
                draws.points.append(points)
                draws.log_density.append(values)
            result = _result(settings, chains, draws, (target_ess, max_r_hat))
            info = {"loss": -float(values.mean()), **_worst(result)}
            stopped = callback is not None and callback(chains[0].n_done, info)
            if stopped or (segment_ends and result.converged):
                break
    return result


def _worst(result: HMCResult) -> dict[str, float]:
    return {"ess": float(result.ess.min()), "r_hat": float(result.r_hat.max())}


def _result(settings: _Settings, chains: list[ChainState], draws: _Draws, wanted) -> HMCResult:
    """Everything drawn after the warm-up, and whether it is as good as wanted."""
    shape = (len(chains), 0, len(settings.mean))
    points = np.concatenate([np.empty(shape), *draws.points], axis=1)
    rhats, ess = mixing(points)
    n_draws = max(1, points.shape[1])
    return HMCResult(
        points=points,
        log_density=np.concatenate([np.empty(shape[:2]), *draws.log_density], axis=1),
        r_hat=rhats,
        ess=ess,
        acceptance=np.array([chain.acceptance / n_draws for chain in chains]),
        n_divergent=np.array([chain.n_divergent for chain in chains]),
        step_size=np.array([chain.step_size for chain in chains]),
        n_gradients=sum(chain.n_gradients for chain in chains),
        converged=bool(np.all(ess >= wanted[0]) and np.all(rhats <= wanted[1])),
    )


def _begin(settings: _Settings, rng: np.random.Generator) -> ChainState:
    """A chain at a draw of the approximation; nearer to its mean where the target vanishes."""
    p = len(settings.mean)
    x = rng.standard_normal(p)
    value, gradient = settings(x)
    n_gradients = 1
    while not math.isfinite(value) and n_gradients < 10:
        x = x / 2
        value, gradient = settings(x)
        n_gradients += 1
    if not math.isfinite(value):
        raise ValueError(
            f"The target is zero or its gradient not finite near the mean {settings.mean}; start "
            "from a point where both are finite."
        )
    step_size = 1.2 * p**-0.25  # acceptance of about 0.8 for a standard normal target
    centre = math.log(2 * step_size)  # [2]_ takes 10, for a start about which nothing is known
    return ChainState(x, value, gradient, rng, step_size, n_gradients=n_gradients, centre=centre)


def _advance(
    settings: _Settings, chain: ChainState, n_iterations: int
) -> tuple[ChainState, np.ndarray, np.ndarray]:
    """The chain after some iterations, where it was after each (n, p), and the log-density."""
    path, values = [], []
    for _ in range(n_iterations):
        probability, divergent = _iterate(settings, chain)
        chain.n_done += 1
        if chain.n_done <= settings.n_warmup:
            _adapt(chain, settings, probability)
        else:
            chain.acceptance += probability
            chain.n_divergent += divergent
        path.append(settings.mean + settings.factor @ chain.x)
        values.append(chain.log_density)
    return chain, np.array(path), np.array(values)


def _iterate(settings: _Settings, chain: ChainState) -> tuple[float, bool]:
    """One path and its acceptance, in place; the probability, and whether the path diverged."""
    rng, step = chain.rng, chain.step_size
    momentum = rng.standard_normal(len(chain.x))
    longest = min(_MAX_STEPS, max(1, math.ceil(_PATH / step)))
    n_steps = int(rng.integers(1, longest, endpoint=True))
    energy = chain.log_density - 0.5 * float(momentum @ momentum)
    x, value, gradient = chain.x, chain.log_density, chain.gradient
    for _ in range(n_steps):
        momentum = momentum + 0.5 * step * gradient
        x = x + step * momentum
        value, gradient = settings(x)
        chain.n_gradients += 1
        momentum = momentum + 0.5 * step * gradient
        change = value - 0.5 * float(momentum @ momentum) - energy
        if not change > -_DIVERGENCE:
            rng.uniform()  # the same count of random numbers whether a path is cut or not
            return 0.0, True
    probability = math.exp(min(0.0, change))
    if rng.uniform() < probability:
        chain.x, chain.log_density, chain.gradient = x, value, gradient
    return probability, False


def _adapt(chain: ChainState, settings: _Settings, probability: float) -> None:
    """Dual averaging of the log step size [2]_, eq. (6); its average at the warm-up's end."""
    t = chain.n_done
    weight = 1 / (t + _T0)
    missing = settings.target_acceptance - probability
    chain.statistic = (1 - weight) * chain.statistic + weight * missing
    log_step = chain.centre - math.sqrt(t) / _GAMMA * chain.statistic
    decay = t**-_KAPPA
    chain.log_average = decay * log_step + (1 - decay) * chain.log_average
    chain.step_size = math.exp(chain.log_average if t == settings.n_warmup else log_step)
