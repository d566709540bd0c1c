r"""Steps of Langevin dynamics with unbiased estimates of the gradient, three ways.

Coordinates :math:`x = F^{-1} (u - m)` are whitened by an approximation :math:`N(m, F F^T)` of the
target; G is an unbiased estimate of the gradient there, V the covariance of its noise,
:math:`\varepsilon` the step and z standard normal.

``"langevin"``
    The usual step :math:`x' = x + \frac\varepsilon2 G(x) + \sqrt\varepsilon z` multiplies x by
    :math:`1 - \varepsilon/2` and adds variance :math:`\varepsilon + \frac{\varepsilon^2}{4} V`: for
    a standard normal target the stationary variance s solves
    :math:`s = (1 - \varepsilon/2)^2 s + \varepsilon + \frac{\varepsilon^2}{4} V`, that is
    :math:`s = (1 + \frac\varepsilon4 V) / (1 - \varepsilon/4)`, too wide. Injecting
    :math:`\varepsilon (1 - \varepsilon/4) I - \frac{\varepsilon^2}{4} V` instead gives s = 1, but
    only for a target as wide as its approximation, and a skew target loses a part
    :math:`O(\varepsilon)` of its skewness. Here the gradient is evaluated half a kick ahead, at the
    draw y [1]_,

    .. math:: y = x + d, \quad d = \tfrac12 \sqrt\varepsilon z, \qquad
              x' = x + \tfrac\varepsilon2 G(y) + k d .

    With k = 2 and no noise, x has variance :math:`1 - \varepsilon/4` and y exactly 1; that holds
    for a Gaussian target of any width, and other targets err by :math:`O(\varepsilon^2)`. The noise
    widens x; a smaller kick narrows it by as much. As x is multiplied by
    :math:`1 - \varepsilon/2` and d by :math:`k - \varepsilon/2`, var y = 1 asks for

    .. math:: \tfrac\varepsilon4 (k - \tfrac\varepsilon2)^2 + \tfrac{\varepsilon^2}{4} V
              = (1 - \tfrac\varepsilon4)^2 \varepsilon , \qquad
              k = \tfrac\varepsilon2 + \sqrt{4 (1 - \tfrac\varepsilon4)^2 - \varepsilon V} ,

    the root being that of a matrix, its negative eigenvalues raised to 0 (and reported).
    The autocorrelations of y sum to an ESS of :math:`\varepsilon / 4` a draw.
``"mala"``
    The usual step, refused by Metropolis [2]_ with the log-density ratio
    :math:`\int G \cdot dx` along the segment by Simpson's rule: exact for a log-density of fourth
    degree. All three gradients share one entry of the noise, so that the step is nearly reversible
    with respect to a target moved by that entry's noise. Moving targets widen the draws by
    about :math:`\frac{\varepsilon}{4 - \varepsilon} V`, were none refused: they are narrowed by
    so much, :math:`G - \frac{\varepsilon}{4 - \varepsilon} V x`. Refusals make chains follow the
    moving targets more closely: a widening of about 0.2 V remains at a step of 1.
``"sgld"``
    The usual step [3]_, uncorrected, with a step size that falls until the ratio (7) of [4]_ is
    below 0.002 and then stays, and with a realisation of the noise kept for 20 iterations.

References
----------
.. [1] Leimkuhler and Matthews (2013), Rational construction of stochastic numerical methods for
   molecular sampling. Applied Mathematics Research eXpress.
.. [2] Roberts and Tweedie (1996), Exponential convergence of Langevin distributions and their
   discrete approximations. Bernoulli 2(4).
.. [3] Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics.
.. [4] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
   Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from skgp.samplers import defaults as tuned


class NoisyGradient(Protocol):
    """Unbiased estimates of the gradient of a log-density; picklable."""

    n_entries: int  # realisations of the noise that there are

    def __call__(
        self, u: np.ndarray, entry: int, rng: np.random.Generator, memory: Any
    ) -> tuple[np.ndarray, Any]:
        """Gradient (p,) at u (p,) with an entry of the noise, and what to remember.

        `memory` is what the chain's last call returned, None at first; `rng` serves further noise.
        """
        ...


@dataclass
class LangevinChain:
    """One chain between two segments; picklable. All vectors are whitened."""

    x: np.ndarray  # (p,), position
    rng: np.random.Generator
    draw: np.ndarray  # (p,), the last draw
    gradient: np.ndarray  # (p,), and the estimate of the gradient there
    noise: np.ndarray  # (p, p), sum of outer products of differences of two estimates, over 2
    entry: int = -1  # of the noise, where it is kept
    memory: Any = None  # of the gradient
    n_done: int = 0  # iterations, warm-up included
    n_gradients: int = 0
    n_astray: int = 0  # after the warm-up: clipped, or undone (out of bounds, not finite)
    acceptance: float = 0.0  # sum of acceptance probabilities after the warm-up
    n_pairs: int = 0
    batch: list[np.ndarray] = field(default_factory=list)  # the last gradients of SGLD
    ratio: float = math.nan  # (7) of SGLD's last full batch
    step_size: float = math.nan  # of the last iteration
    frozen_at: int = 0  # iteration from which on the step is held; 0 before


@dataclass(frozen=True)
class Settings:
    """What all chains share in a segment."""

    target: NoisyGradient
    mean: np.ndarray  # m (p,)
    factor: np.ndarray  # F (p, p)
    bounds: np.ndarray  # (p, 2), of u
    schedule: Callable[[int], float] | float  # step of an iteration, counted from 1
    sampler: str
    n_warmup: int
    noise: np.ndarray  # V (p, p), as estimated so far

    def step_size(self, t: int) -> float:
        """Step of iteration t."""
        return self.schedule(t) if callable(self.schedule) else self.schedule

    def position(self, x: np.ndarray) -> np.ndarray:
        """Positions u of whitened x (..., p)."""
        return self.mean + x @ self.factor.T

    def inside(self, x: np.ndarray) -> bool:
        """Whether whitened x (p,) is within the bounds; not where it is not finite."""
        u = self.position(x)
        return bool(np.all((u >= self.bounds[:, 0]) & (u <= self.bounds[:, 1])))

    def gradient(self, chain: LangevinChain, x: np.ndarray, entry: int) -> np.ndarray | None:
        """Whitened gradient (p,) at x, clipped; None where the iteration must be undone.

        Counts what it finds.
        """
        counts = chain.n_done >= self.n_warmup
        if not self.inside(x):
            chain.n_astray += counts
            return None
        found, chain.memory = self.target(self.position(x), entry, chain.rng, chain.memory)
        chain.n_gradients += 1
        gradient = self.factor.T @ found
        length, longest = float(np.linalg.norm(gradient)), tuned.CLIP * math.sqrt(len(x))
        if length <= longest:
            return gradient
        chain.n_astray += counts
        return gradient * (longest / length) if math.isfinite(length) else None


@dataclass(frozen=True)
class PowerSchedule:
    r"""Falling steps :math:`\varepsilon_t = a (b + t)^{-\gamma}` [3]_, [4]_ eq. (6).

    Of exponents above 1/2 and at most 1, the squares of the steps have a finite sum and the steps
    an infinite one.

    >>> schedule = PowerSchedule.between(0.1, 0.001, 1000)
    >>> [round(schedule(t), 6) for t in (1, 1000)]
    [0.1, 0.001]
    """

    a: float
    b: float
    gamma: float = 1.0

    @classmethod
    def between(
        cls, first: float, last: float, n_iterations: int, gamma: float = 1.0
    ) -> "PowerSchedule":
        """The schedule with given steps at iterations 1 and `n_iterations` (at least 2)."""
        ratio = (first / last) ** (1 / gamma)  # (b + n) / (b + 1)
        offset = (n_iterations - 1) / (ratio - 1)  # b + 1
        return cls(first * offset**gamma, offset - 1, gamma)

    def __call__(self, t: int) -> float:
        """Step of iteration t, counted from 1."""
        return self.a * (self.b + t) ** -self.gamma


def noise_ratio(step: float, covariance: np.ndarray) -> float:
    r"""Variance of the gradient's noise over that of the injected noise, [4]_ eq. (7).

    .. math:: \frac{\varepsilon}{4} \lambda_{\max}(M^{1/2} V M^{1/2})

    `covariance` (p, p) is that of the whitened gradients, which has these eigenvalues. Langevin
    dynamics prevails where this is small.
    """
    return step / 4 * float(np.linalg.eigvalsh(covariance)[-1])


def kick_matrix(step: float, noise: np.ndarray) -> tuple[np.ndarray, float]:
    """Matrix k (p, p) of the step with noise V (p, p), and the eigenvalues raised to 0, summed."""
    values, vectors = np.linalg.eigh(noise)
    square = 4 * (1 - step / 4) ** 2 - step * values
    root = np.sqrt(np.maximum(square, 0))
    return (vectors * (step / 2 + root)) @ vectors.T, float(-np.minimum(square, 0).sum())


def _langevin(settings: Settings, chain: LangevinChain, step: float) -> None:
    d = 0.5 * math.sqrt(step) * chain.rng.standard_normal(len(chain.x))
    y = chain.x + d
    gradient = settings.gradient(chain, y, _entry(settings, chain))
    if gradient is None:
        return
    _look_at_noise(settings, chain, y, gradient)
    chain.draw, chain.gradient = y, gradient
    kick, _ = kick_matrix(step, settings.noise)
    chain.x = chain.x + step / 2 * gradient + kick @ d


def _mala(settings: Settings, chain: LangevinChain, step: float) -> None:
    """A Langevin step, corrected by Metropolis' rule, its log ratio by Simpson's along the step."""
    x, rng, entry = chain.x, chain.rng, _entry(settings, chain)
    narrowing = step / (4 - step) * settings.noise
    gradient = settings.gradient(chain, x, entry)
    noise, log_uniform = rng.standard_normal(len(x)), math.log1p(-rng.uniform())
    if gradient is None:
        return
    _look_at_noise(settings, chain, x, gradient)
    chain.draw, chain.gradient = x, gradient
    before = gradient - narrowing @ x
    proposal = x + step / 2 * before + math.sqrt(step) * noise
    if not settings.inside(proposal):  # the density there is zero
        return
    centre = settings.gradient(chain, (x + proposal) / 2, entry)
    after = settings.gradient(chain, proposal, entry)
    if centre is None or after is None:
        return
    centre, after = centre - narrowing @ (x + proposal) / 2, after - narrowing @ proposal
    log_ratio = float((proposal - x) @ (before + 4 * centre + after)) / 6
    back = (x - proposal - step / 2 * after) / math.sqrt(step)
    log_ratio += 0.5 * float(noise @ noise - back @ back)
    if chain.n_done >= settings.n_warmup:
        chain.acceptance += math.exp(min(0.0, log_ratio))
    if log_uniform < log_ratio:
        chain.x = proposal


def _sgld(settings: Settings, chain: LangevinChain, step: float) -> None:
    """A step of the paper: half a step up the gradient, and noise of variance `step`."""
    if chain.frozen_at:
        step = chain.step_size
    if chain.n_done % tuned.KEPT == 0:
        chain.entry = _entry(settings, chain)
    gradient = settings.gradient(chain, chain.x, chain.entry)
    injected = math.sqrt(step) * chain.rng.standard_normal(len(chain.x))
    if gradient is None:
        return
    chain.draw, chain.gradient, chain.step_size = chain.x, gradient, step
    chain.x = chain.x + step / 2 * gradient + injected
    chain.batch.append(gradient)
    if len(chain.batch) == tuned.BATCH:
        covariance = np.atleast_2d(np.cov(np.array(chain.batch), rowvar=False))
        chain.ratio = noise_ratio(step, covariance)
        chain.noise, chain.n_pairs, chain.batch = covariance, 1, []
        if chain.ratio < tuned.FREEZE and not chain.frozen_at:
            chain.frozen_at = chain.n_done + 1


def _entry(settings: Settings, chain: LangevinChain) -> int:
    return int(chain.rng.integers(settings.target.n_entries))


def _look_at_noise(
    settings: Settings, chain: LangevinChain, x: np.ndarray, gradient: np.ndarray
) -> None:
    """Now and then, the difference to a second estimate at the same place."""
    every = tuned.PAIR_WARMUP if chain.n_done < settings.n_warmup else tuned.PAIR
    if chain.n_done % every:
        return
    n_astray = chain.n_astray
    second = settings.gradient(chain, x, _entry(settings, chain))
    chain.n_astray = n_astray  # the step does not use it
    if second is not None:
        chain.noise = chain.noise + np.outer(gradient - second, gradient - second) / 2
        chain.n_pairs += 1


STEPS = {"langevin": _langevin, "mala": _mala, "sgld": _sgld}
