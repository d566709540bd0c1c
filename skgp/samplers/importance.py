r"""Adaptive importance sampling with Student-t proposals and deterministic-mixture weights.

In round t, :math:`N_t` points are drawn from :math:`q_t = t_\nu(\mu_t, c_t^2 \Sigma_t)`, and all
points of all rounds so far are weighted by the mixture of all proposals so far (AMIS [1]_),

.. math:: w_i = \frac{\pi(x_i)}{\frac1N \sum_t N_t\, q_t(x_i)}, \qquad N = \sum_t N_t,

from which :math:`\mu_{t+1}` and :math:`\Sigma_{t+1}` follow. A poor first proposal thus costs
points and leaves no heavy weights behind. Rounds end when the effective sample size suffices and
the Pareto shape k of the weights [2]_ shows that their averages can be trusted.

Deviations from [1]_: points are mirrored pairs :math:`\mu \pm \delta` of a scrambled Sobol' set,
which spares most of the Monte Carlo error of smooth functions (each point is still distributed as
:math:`q_t`, so nothing is biased), and weights too uneven to refit a covariance are tempered for
the refit.

References
----------
.. [1] Cornuet, Marin, Mira and Robert (2012), Adaptive multiple importance sampling. Scandinavian
   Journal of Statistics 39(4).
.. [2] Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling. JMLR 25.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from scipy.special import chdtri, gammaln, logsumexp, ndtri

from skgp.samplers.chains import Callback, cholesky_factor
from skgp.samplers.diagnostics import effective_sample_size, pareto_k

__all__ = ["ImportanceSamples", "StudentT", "adaptive_importance_sampling"]

LogDensity = Callable[[np.ndarray], Any]

_CHUNK = 16  # points of one job: the same for any number of workers
_FIRST_SCALE, _SCALE = 1.1, 1.05
_EDGE = 1e-10  # quasi-random numbers keep this distance from 0 and 1


@dataclass(frozen=True)
class StudentT:
    """Multivariate Student-t distribution.

    Attributes
    ----------
    location : ndarray of shape (p,)
    factor : ndarray of shape (p, p)
        Lower Cholesky factor of the scale matrix.
    df : float
        Degrees of freedom.
    """

    location: np.ndarray
    factor: np.ndarray
    df: float

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log-density of the rows of x (n, p), in nats; O(n p^2)."""
        p, df = len(self.location), self.df
        z = np.linalg.solve(self.factor, (x - self.location).T)
        constant = gammaln((df + p) / 2) - gammaln(df / 2) - 0.5 * p * math.log(df * math.pi)
        log_volume = np.log(np.diag(self.factor)).sum()
        return constant - log_volume - 0.5 * (df + p) * np.log1p((z**2).sum(axis=0) / df)

    def draw(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Quasi-random points (n_points, p) in pairs mirrored at the location; n_points even."""
        p = len(self.location)
        engine = torch.quasirandom.SobolEngine(p + 1, scramble=True, seed=int(rng.integers(2**31)))
        uniform = engine.draw(n_points // 2, dtype=torch.float64).numpy().clip(_EDGE, 1 - _EDGE)
        radius = np.sqrt(self.df / chdtri(self.df, uniform[:, -1:]))
        step = (ndtri(uniform[:, :-1]) * radius) @ self.factor.T
        return self.location + np.concatenate([step, -step])


@dataclass(frozen=True)
class ImportanceSamples:
    """Weighted points.

    Attributes
    ----------
    points : ndarray of shape (s, p)
    log_density : ndarray of shape (s,)
        Of the target, up to its constant.
    log_weights : ndarray of shape (s,)
        Normalised: their exponentials sum to one.
    round : ndarray of int, shape (s,)
        Which round drew the point, from 0.
    ess : float
        Effective number of points, of independent draws of the same weights.
    pareto_k : float
    mean : ndarray of shape (p,)
    covariance : ndarray of shape (p, p)
    log_normalizer : float
        Logarithm of the integral of the target; too low by about p (p + 3) / 4 s, as the proposals
        were fitted to points that they then weigh.
    converged : bool
        Whether `ess` and `pareto_k` reached what was asked for.
    """

    points: np.ndarray
    log_density: np.ndarray
    log_weights: np.ndarray
    round: np.ndarray
    ess: float
    pareto_k: float
    mean: np.ndarray
    covariance: np.ndarray
    log_normalizer: float
    converged: bool

    @property
    def weights(self) -> np.ndarray:
        """Weights (s,), of sum one."""
        return np.exp(self.log_weights)


def adaptive_importance_sampling(
    log_density: LogDensity,
    mean: np.ndarray,
    covariance: np.ndarray,
    *,
    rng: np.random.Generator,
    target_ess: float = 400,
    max_pareto_k: float = 0.7,
    n_points: int = 256,
    max_rounds: int = 20,
    df: float = 10,
    chunk_size: int | None = None,
    n_jobs: int | None = None,
    every: int | None = None,
    callback: Callback | None = None,
) -> ImportanceSamples:
    """Weighted points of a density known up to a constant.

    Parameters
    ----------
    log_density : callable
        Maps a point (p,) to its log-density; -inf (or NaN) where it vanishes. Picklable where
        `n_jobs` and joblib's backend ask for processes.
    mean, covariance : ndarray of shape (p,) and (p, p)
        Of a first, rough approximation of the target.
    rng : numpy.random.Generator
    target_ess : float, default=400
    max_pareto_k : float, default=0.7
        Rounds end when both are met.
    n_points : int, default=256
        Points a round; even. Powers of two keep Sobol' points balanced.
    max_rounds : int, default=20
    df : float, default=10
        Degrees of freedom of the proposals: tails heavier than a Gaussian's.
    chunk_size : int, optional
        `log_density` takes up to so many points (k, p) at once and returns (k,). None: one by one.
    n_jobs : int, optional
        Of joblib; points are evaluated in chunks of fixed composition, so that results do not
        depend on it.
    every : int, optional
        Points between two calls of `callback`; None: a round. Results do not depend on it.
    callback : callable, optional
        ``callback(round, {"loss": -mean log-density, "ess": float, "pareto_k": float})``, rounds
        counted from 1; True stops, keeping the points so far.

    Returns
    -------
    ImportanceSamples

    Raises
    ------
    ValueError
        If `covariance` is not positive definite, `n_points` is odd or less than 2, or the target
        vanishes at every point of the first round.

    Notes
    -----
    Each round costs `n_points` evaluations of the target, no gradients.
    """
    every = n_points if every is None else every
    if n_points < 2 or n_points % 2 or min(max_rounds, every) < 1:
        raise ValueError(
            "n_points must be even and at least 2, and max_rounds and every at least 1; "
            f"got n_points={n_points}, max_rounds={max_rounds}, every={every}."
        )
    proposals = [_proposal(np.asarray(mean, float), np.asarray(covariance, float), 0, df)]
    points: list[np.ndarray] = []
    values: list[np.ndarray] = []
    with Parallel(n_jobs=n_jobs) as parallel:
        for t in range(max_rounds):
            drawn = proposals[-1].draw(n_points, rng)
            points.append(drawn[:0])
            values.append(np.empty(0))
            stopped = False
            while len(points[t]) < n_points and not stopped:
                more = drawn[len(points[t]) : len(points[t]) + every]
                found = _evaluate(log_density, more, parallel, chunk_size)
                points[t], values[t] = np.r_[points[t], more], np.r_[values[t], found]
                if len(points[t]) < n_points and not np.isfinite(np.concatenate(values)).any():
                    continue
                samples = _weigh(proposals, points, values, target_ess, max_pareto_k)
                stopped = callback is not None and bool(callback(t + 1, _info(samples)))
            if samples.converged or stopped or t + 1 == max_rounds:
                break
            proposals.append(_refitted(samples, df))
    return samples


def _info(samples: ImportanceSamples) -> dict[str, float]:
    """What a callback is told."""
    inside = samples.weights > 0  # elsewhere the log-density may be -inf
    loss = -float(samples.weights[inside] @ samples.log_density[inside])
    return {"ess": samples.ess, "pareto_k": samples.pareto_k, "loss": loss}


def _evaluate(
    log_density: LogDensity, points: np.ndarray, parallel: Parallel, chunk_size: int | None
) -> np.ndarray:
    """Log-density (n,) of the points, NaN read as -inf."""
    size = _CHUNK if chunk_size is None else chunk_size
    evaluate = partial(_one_by_one, log_density) if chunk_size is None else log_density
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    found = np.concatenate(parallel(delayed(evaluate)(chunk) for chunk in chunks))
    return np.where(np.isnan(found), -np.inf, found)


def _one_by_one(log_density: LogDensity, points: np.ndarray) -> np.ndarray:
    return np.array([log_density(point) for point in points], dtype=float)


def _proposal(mean: np.ndarray, covariance: np.ndarray, t: int, df: float) -> StudentT:
    scale = _FIRST_SCALE if t == 0 else _SCALE
    return StudentT(mean, scale * cholesky_factor(covariance), df)


def _weigh(
    proposals: list[StudentT],
    points: list[np.ndarray],
    values: list[np.ndarray],
    target_ess: float,
    max_pareto_k: float,
) -> ImportanceSamples:
    """All points so far, weighted by the mixture of all proposals so far; O(rounds s p^2)."""
    x, log_density = np.concatenate(points), np.concatenate(values)
    share = np.log([len(each) / len(x) for each in points])
    mixture = logsumexp([s + q.log_density(x) for s, q in zip(share, proposals, strict=True)], 0)
    log_weights = log_density - mixture
    total = float(logsumexp(log_weights))
    if not math.isfinite(total):
        raise ValueError(
            f"The target is zero (or infinite) at all {len(x)} points of the first proposal; start "
            "from a mean and covariance nearer to it."
        )
    log_weights = log_weights - total
    mean, covariance = _moments(x, np.exp(log_weights))
    ess, k = effective_sample_size(log_weights), pareto_k(log_weights)
    return ImportanceSamples(
        points=x,
        log_density=log_density,
        log_weights=log_weights,
        round=np.repeat(np.arange(len(points)), [len(each) for each in points]),
        ess=ess,
        pareto_k=k,
        mean=mean,
        covariance=covariance,
        log_normalizer=total - math.log(len(x)),
        converged=ess >= target_ess and k < max_pareto_k,
    )


def _moments(x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = weights @ x
    centred = x - mean
    return mean, (weights[:, None] * centred).T @ centred


def _refitted(samples: ImportanceSamples, df: float) -> StudentT:
    """The next proposal: the moments of the points, weights tempered where few carry them."""
    p = samples.points.shape[1]
    # p (p + 1) / 2 numbers are fitted; 5 points for each direction keep their noise harmless.
    enough = min(10 + 5 * p, 0.5 * len(samples.points))
    weights = _tempered(samples.log_weights, enough)
    mean, covariance = _moments(samples.points, weights)
    return _proposal(mean, covariance, 1, df)


def _tempered(log_weights: np.ndarray, enough: float) -> np.ndarray:
    """Weights raised to the greatest power, at most 1, that leaves an ESS of `enough`."""
    power, low = 1.0, 0.0
    if effective_sample_size(log_weights) < enough:
        high = 1.0
        for _ in range(30):
            power = (low + high) / 2
            usable = effective_sample_size(power * log_weights) >= enough
            low, high = (power, high) if usable else (low, power)
        power = low
    # A power of exactly 0 would count points outside the support.
    log_weights = np.where(np.isfinite(log_weights), power * log_weights, -np.inf)
    return np.exp(log_weights - logsumexp(log_weights))
