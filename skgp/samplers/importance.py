r"""Adaptive importance sampling with Student-t proposals and deterministic-mixture weights.

A round draws :math:`N_q` points from each of its proposals q, and all points of all rounds so far
are weighted by the mixture of all proposals so far (AMIS [1]_),

.. math:: w_i = \frac{\pi(x_i)}{\frac1N \sum_q N_q\, q(x_i)}, \qquad N = \sum_q N_q.

A poor first proposal thus costs points and leaves no heavy weights behind. The proposals of a round
are one Student-t for each component of a mixture, which starts at the modes that are known and is
fitted to the weighted points by a step of expectation maximisation [3]_, and, where one is given, a
wide one that never changes: points in a region that the others miss carry heavy weights, so that
it shows. Rounds end when the effective sample size suffices, for means and for spreads, and the
Pareto shape k of the weights [2]_ shows that their averages can be trusted.

Deviations from [1]_: points are mirrored pairs :math:`\mu \pm \delta` of a scrambled Sobol' set,
which spares most of the Monte Carlo error of smooth functions (each point is still distributed as
its proposal, so nothing is biased), and weights too uneven to refit a covariance are tempered for
the refit.

References
----------
.. [1] Cornuet, Marin, Mira and Robert (2012), Adaptive multiple importance sampling. Scandinavian
   Journal of Statistics 39(4).
.. [2] Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling. JMLR 25.
.. [3] Cappe, Douc, Guillin, Marin and Robert (2008), Adaptive importance sampling in general
   mixture classes. Statistics and Computing 18.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from scipy.special import chdtri, gammaln, logsumexp, ndtri

from skgp.linalg.runtime import Callback, WithinBudget
from skgp.samplers import defaults as tuned
from skgp.samplers.diagnostics import (
    cholesky_factor,
    effective_sample_size,
    normalised,
    pareto_k,
    spread_sample_size,
    tempered,
    weighted_moments,
)


@dataclass(frozen=True)
class StudentDensity:
    """Multivariate Student-t distribution; `factor` is the lower Cholesky factor of its scale."""

    location: np.ndarray  # (p,)
    factor: np.ndarray  # (p, p)
    df: float

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log-density of the rows of x (n, p), in nats; O(n p^2)."""
        p, df = len(self.location), self.df
        inverse, log_constant = self._inverse
        z = (x - self.location) @ inverse.T
        return log_constant - 0.5 * (df + p) * np.log1p((z**2).sum(axis=1) / df)

    @cached_property
    def _inverse(self) -> tuple[np.ndarray, float]:
        """Inverse factor (p, p), and the log-density at the location."""
        p, df = len(self.location), self.df
        constant = gammaln((df + p) / 2) - gammaln(df / 2) - 0.5 * p * math.log(df * math.pi)
        log_volume = np.log(np.diag(self.factor)).sum()
        return np.linalg.inv(self.factor), float(constant - log_volume)

    def draw(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Quasi-random points (n_points, p) in pairs mirrored at the location; n_points even."""
        p = len(self.location)
        engine = torch.quasirandom.SobolEngine(p + 1, scramble=True, seed=int(rng.integers(2**31)))
        uniform = (
            engine.draw(n_points // 2, dtype=torch.float64).numpy().clip(tuned.EDGE, 1 - tuned.EDGE)
        )
        radius = np.sqrt(self.df / chdtri(self.df, uniform[:, -1:]))
        step = (ndtri(uniform[:, :-1]) * radius) @ self.factor.T
        return self.location + np.concatenate([step, -step])

    def sample(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Independent points (n_points, p)."""
        radius = np.sqrt(self.df / rng.chisquare(self.df, (n_points, 1)))
        normal = rng.standard_normal((n_points, len(self.location)))
        return self.location + (normal * radius) @ self.factor.T


@dataclass(frozen=True)
class StudentMixture:
    """Mixture of Student-t distributions of the given shares (m,), of sum one."""

    components: list[StudentDensity]
    shares: np.ndarray

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log-density of the rows of x (n, p), in nats."""
        terms = [q.log_density(x) for q in self.components]
        return logsumexp(np.stack(terms, axis=1) + np.log(self.shares), axis=1)

    def sample(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Independent points (n_points, p)."""
        owner = rng.choice(len(self.shares), size=n_points, p=self.shares)
        x = np.empty((n_points, len(self.components[0].location)))
        for m in np.unique(owner):
            x[owner == m] = self.components[m].sample(int((owner == m).sum()), rng)
        return x

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean (p,), and covariance (p, p) were the components normal."""
        locations = np.array([q.location for q in self.components])
        mean = self.shares @ locations
        between = (locations - mean).T * self.shares @ (locations - mean)
        within = [
            share * q.factor @ q.factor.T
            for share, q in zip(self.shares, self.components, strict=True)
        ]
        return mean, between + np.sum(within, axis=0)


LogDensity = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class ImportanceSamples:
    """Weighted points."""

    points: np.ndarray  # (s, p)
    log_density: np.ndarray  # (s,), of the target, up to its constant
    log_weights: np.ndarray  # (s,); their exponentials sum to one
    round: np.ndarray  # (s,), int: which round drew the point, from 0
    ess: float  # effective number of points, of independent draws of the same weights
    ess_spread: float  # likewise for the variance of each coordinate, the least
    pareto_k: float
    mean: np.ndarray  # (p,)
    covariance: np.ndarray  # (p, p)
    #: Logarithm of the integral of the target; too low by about p (p + 3) / 4 s, as the proposals
    #: were fitted to points that they then weigh.
    log_normalizer: float
    converged: bool  # `ess`, `ess_spread` and `pareto_k` reached what was asked for
    proposal: StudentMixture  # what a further round would draw from

    @property
    def weights(self) -> np.ndarray:
        """Weights (s,), of sum one."""
        return np.exp(self.log_weights)


@dataclass
class _Round:
    """Points drawn together, in the order of their proposals, and what is evaluated so far."""

    proposals: list[StudentDensity]
    drawn: np.ndarray  # (n_points, p)
    owner: np.ndarray  # (n_points,), index of the proposal
    pair: np.ndarray  # (n_points,), mirrored points have the same
    values: np.ndarray  # (n_evaluated,)

    @property
    def points(self) -> np.ndarray:
        return self.drawn[: len(self.values)]

    def counts(self) -> np.ndarray:
        """Points evaluated of each proposal."""
        return np.bincount(self.owner[: len(self.values)], minlength=len(self.proposals))


@dataclass(frozen=True)
class Rounds:
    """How many points are drawn, when they are enough, and the callback."""

    n_points: int = 256  # a round; even
    max_rounds: int = 20
    target_ess: float = 400  # effective points at which to end, half of them for variances (of
    max_pareto_k: float = 0.7  # which mirrored pairs of a Gaussian have as many), with this k
    df: float = 10  # of the proposals: tails heavier than a Gaussian's
    chunk_size: int | None = None  # the target takes so many points (k, p) at once; None: one
    n_jobs: int | None = None  # of joblib, over chunks of fixed composition: results are the same
    every: int | None = None  # points between two callbacks; None: a round
    callback: Callback | None = None

    def __post_init__(self) -> None:
        if self.n_points < 2 or self.n_points % 2 or self.max_rounds < 1 or self.stretch < 1:
            raise ValueError(
                "n_points must be even and at least 2, and max_rounds and every at least 1; got "
                f"n_points={self.n_points}, max_rounds={self.max_rounds}, every={self.stretch}."
            )

    @property
    def stretch(self) -> int:
        """Points between two callbacks."""
        return self.n_points if self.every is None else self.every


def adaptive_importance_sampling(
    log_density: LogDensity,  # (p,) -> float; -inf (or NaN) where it vanishes
    mean: np.ndarray,  # (p,) and (p, p), of a first, rough approximation of the target,
    covariance: np.ndarray,  # or (m, p) and (m, p, p), of the m components of one
    *,
    rng: np.random.Generator,
    rounds: Rounds | None = None,
    shares: np.ndarray | None = None,  # (m,), of the components; equal by default
    wide: tuple[np.ndarray, np.ndarray] | None = None,  # centre and covariance of a proposal that
    wide_share: float = 1 / 8,  # has this share of every round, to reach what the others may miss
) -> ImportanceSamples:
    """Weighted points of a density known up to a constant.

    ``callback(round, {"loss": -mean log-density, "ess": float, "pareto_k": float})``, rounds
    counted from 1, stops by True, keeping the points so far. Each round costs `n_points`
    evaluations of the target, which is picklable where joblib asks for processes. A ValueError says
    that a covariance is not positive definite, or that the target vanishes at every point of the
    first round.
    """
    plan = rounds or Rounds()
    means = np.atleast_2d(np.asarray(mean, float))
    covariances = np.asarray(covariance, float).reshape(len(means), means.shape[1], -1)
    mixture = [_proposal(*each, 0, plan.df) for each in zip(means, covariances, strict=True)]
    weights = np.ones(len(mixture)) if shares is None else np.asarray(shares, float)
    others = [] if wide is None else [StudentDensity(wide[0], cholesky_factor(wide[1]), plan.df)]
    n_wide = 2 * round(wide_share * plan.n_points / 2) * len(others)
    done: list[_Round] = []
    with Parallel(n_jobs=plan.n_jobs) as parallel:
        for t in range(plan.max_rounds):
            shares = weights / weights.sum()
            done.append(_draw(mixture, shares, others, n_wide, plan.n_points, rng))
            samples, stopped = _evaluated(done, log_density, plan, parallel)
            if samples.converged or stopped or t + 1 == plan.max_rounds:
                break
            mixture, weights = _refitted(samples, mixture, weights, plan.df)
    mixture, weights = _refitted(samples, mixture, weights, plan.df)
    share = n_wide / plan.n_points
    shares = np.append((1 - share) * weights / weights.sum(), [share] * len(others))
    return replace(samples, proposal=StudentMixture([*mixture, *others], shares))


def _evaluated(
    rounds: list[_Round], log_density: LogDensity, plan: Rounds, parallel: Parallel
) -> tuple[ImportanceSamples, bool]:
    """All points, those of the last round evaluated, and whether the callback stopped that."""
    now = rounds[-1]
    while True:
        more = now.drawn[len(now.values) : len(now.values) + plan.stretch]
        found = _evaluate(log_density, more, parallel, plan.chunk_size)
        now.values = np.r_[now.values, found]
        ended = len(now.values) == plan.n_points
        if not ended and not any(np.isfinite(each.values).any() for each in rounds):
            continue
        samples = _weigh(rounds, plan.target_ess, plan.max_pareto_k)
        inside = samples.weights > 0  # elsewhere the log-density may be -inf
        loss = -float(samples.weights[inside] @ samples.log_density[inside])
        info = {"ess": samples.ess, "pareto_k": samples.pareto_k, "loss": loss}
        stopped = plan.callback is not None and bool(plan.callback(len(rounds), info))
        if ended or stopped:
            return samples, stopped


def _draw(
    mixture: list[StudentDensity],
    shares: np.ndarray,
    others: list[StudentDensity],
    n_wide: int,
    n_points: int,
    rng: np.random.Generator,
) -> _Round:
    """Points of a round: an even number of each proposal, in proportion to the shares."""
    edges = 2 * np.rint(np.cumsum(shares) * (n_points - n_wide) / 2).astype(int)
    counts = [*np.diff(edges, prepend=0).tolist(), *[n_wide] * len(others)]
    proposals = [*mixture, *others]
    drawn = [q.draw(n, rng) for q, n in zip(proposals, counts, strict=True) if n]
    owner = np.repeat(np.arange(len(proposals)), counts)
    firsts = np.cumsum([0, *counts])[:-1]
    pair = [first + np.tile(np.arange(n // 2), 2) for first, n in zip(firsts, counts, strict=True)]
    return _Round(proposals, np.concatenate(drawn), owner, np.concatenate(pair), np.empty(0))


def _evaluate(
    log_density: LogDensity, points: np.ndarray, parallel: Parallel, chunk_size: int | None
) -> np.ndarray:
    """Log-density (n,) of the points, NaN read as -inf."""
    size = tuned.CHUNK if chunk_size is None else chunk_size
    evaluate = partial(_one_by_one, log_density) if chunk_size is None else log_density
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    each = delayed(WithinBudget(evaluate, parallel.n_jobs))
    found = np.concatenate(parallel(each(chunk) for chunk in chunks))
    return np.where(np.isnan(found), -np.inf, found)


def _one_by_one(log_density: LogDensity, points: np.ndarray) -> np.ndarray:
    return np.array([log_density(point) for point in points], dtype=float)


def _proposal(mean: np.ndarray, covariance: np.ndarray, t: int, df: float) -> StudentDensity:
    scale = tuned.FIRST_SCALE if t == 0 else tuned.SCALE
    return StudentDensity(mean, scale * cholesky_factor(covariance), df)


def _weigh(rounds: list[_Round], target_ess: float, max_pareto_k: float) -> ImportanceSamples:
    """All points so far, weighted by the mixture of all proposals so far; O(rounds s p^2)."""
    x = np.concatenate([each.points for each in rounds])
    log_density = np.concatenate([each.values for each in rounds])
    terms = [
        math.log(count / len(x)) + q.log_density(x)
        for each in rounds
        for q, count in zip(each.proposals, each.counts(), strict=True)
        if count
    ]
    log_weights, total = normalised(log_density - logsumexp(terms, 0))
    if not math.isfinite(total):
        raise ValueError(
            f"The target is zero (or infinite) at all {len(x)} points of the first proposal; start "
            "from a mean and covariance nearer to it."
        )
    mean, covariance = weighted_moments(x, np.exp(log_weights))
    sizes = [len(each.points) for each in rounds]
    firsts = np.cumsum([0, *sizes])
    pair = np.concatenate(
        [first + each.pair[:size] for first, each, size in zip(firsts, rounds, sizes, strict=False)]
    )
    ess, k = effective_sample_size(log_weights), pareto_k(log_weights)
    spread = spread_sample_size(x - mean, covariance.diagonal(), np.exp(log_weights), pair)
    good = ess >= target_ess and spread >= target_ess / 2 and k < max_pareto_k
    return ImportanceSamples(
        points=x,
        log_density=log_density,
        log_weights=log_weights,
        round=np.repeat(np.arange(len(rounds)), sizes),
        ess=ess,
        ess_spread=spread,
        pareto_k=k,
        mean=mean,
        covariance=covariance,
        log_normalizer=total - math.log(len(x)),
        converged=good,
        proposal=StudentMixture(rounds[-1].proposals, rounds[-1].counts() / len(rounds[-1].points)),
    )


def _refitted(
    samples: ImportanceSamples, mixture: list[StudentDensity], shares: np.ndarray, df: float
) -> tuple[list[StudentDensity], np.ndarray]:
    """The next components: moments of the points, weights tempered where few carry them.

    Each point counts for a component in proportion to its density there [3]_, and the more the
    farther out it is in any coordinate: variances, whose number of effective points is the least,
    are settled by the tails. A component of too few points stays as it is, and one of next to no
    weight is dropped.
    """
    x, p = samples.points, samples.points.shape[1]
    # p (p + 1) / 2 numbers are fitted.
    enough = min(10 + tuned.POINTS_A_DIRECTION * p, 0.5 * len(x))
    squares = (x - samples.mean) ** 2 / np.maximum(samples.covariance.diagonal(), tuned.TINY)
    log_weights = tempered(samples.log_weights + np.log1p(squares.max(axis=1)), enough)
    terms = np.stack([q.log_density(x) for q in mixture]) + np.log(shares / shares.sum())[:, None]
    log_parts = log_weights + terms - logsumexp(terms, axis=0)  # (m, s)
    totals = logsumexp(log_parts, axis=1)
    found, weights = [], []
    for q, log_part, total in zip(mixture, log_parts, totals, strict=True):
        if total < math.log(tuned.LEAST_SHARE):
            continue
        n_effective = effective_sample_size(log_part)
        fit = len(mixture) == 1 or n_effective >= enough / 2
        found.append(_fitted(q, x, np.exp(log_part - total), n_effective, df) if fit else q)
        weights.append(math.exp(total))
    return found, np.array(weights)


def _fitted(
    q: StudentDensity, x: np.ndarray, weights: np.ndarray, n_effective: float, df: float
) -> StudentDensity:
    """A component of the moments of points x (n, p) of weights (n,).

    Where these are fewer than half of what a direction needs, times p, their covariance, of a rank
    no higher than their number, is shrunk to the one that the component has.
    """
    mean, covariance = weighted_moments(x, weights)
    share = min(1.0, n_effective / (0.5 * tuned.POINTS_A_DIRECTION * x.shape[1]))
    if share < 1.0:
        covariance = share * covariance + (1 - share) * (q.factor @ q.factor.T) / tuned.SCALE**2
    return _proposal(mean, covariance, 1, df)
