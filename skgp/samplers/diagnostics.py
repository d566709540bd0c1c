r"""How long chains run, whether they have mixed, whether importance weights can be trusted.

Chains are arrays (n_chains, n_draws) of one quantity; weights are given by their logarithms (s,),
up to a constant, -inf being a weight of zero. Costs are O(N log N).

References
----------
.. [1] Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021), Rank-normalization, folding, and
   localization: an improved R-hat for assessing convergence of MCMC. Bayesian Analysis 16(2).
.. [2] Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling. JMLR 25.
.. [3] Zhang and Stephens (2009), A new and efficient estimation method for the generalized Pareto
   distribution. Technometrics 51(3).
.. [4] Geyer (1992), Practical Markov chain Monte Carlo. Statistical Science 7(4).
.. [5] Mira, Solgi and Imparato (2013), Zero variance Markov chain Monte Carlo for Bayesian
   estimators. Statistics and Computing 23.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps

import numpy as np
from scipy.special import logsumexp, ndtri
from scipy.stats import rankdata

from skgp.linalg.runtime import Callback
from skgp.samplers import defaults as tuned


@dataclass(frozen=True)
class Run:
    """How long several chains run, when they are done, and the callback."""

    n_chains: int = 4
    n_warmup: int = 50  # iterations that adapt the sampler, and are dropped
    n_draws: int = 1000  # most iterations of a chain after these
    target_ess: float = math.inf  # sampling ends early where every coordinate meets this
    max_r_hat: float = 1.01  # and this
    n_jobs: int | None = None  # of joblib; draws depend on it only by rounding
    every: int = tuned.SEGMENT  # iterations between two callbacks, at most 25
    callback: Callback | None = None

    def __post_init__(self) -> None:
        if min(self.n_chains, self.n_draws, self.every) < 1 or self.n_warmup < 0:
            raise ValueError(
                "n_chains, n_draws and every must be at least 1 and n_warmup not negative; got "
                f"n_chains={self.n_chains}, n_draws={self.n_draws}, n_warmup={self.n_warmup}, "
                f"every={self.every}."
            )

    def stretches(self) -> Iterator[tuple[int, bool]]:
        """How many iterations until the next callback, and whether a segment ends there.

        Segments are 25 iterations of the warm-up or of the draws, less at the end of these, and
        their stretches at most `every` long: what is done between segments does not depend on it.

        >>> list(Run(n_warmup=25, n_draws=30, every=10).stretches())[3:]
        [(10, False), (10, False), (5, True), (5, True)]
        """
        for n in (self.n_warmup, self.n_draws):
            for start in range(0, n, tuned.SEGMENT):
                left = min(tuned.SEGMENT, n - start)
                while left > 0:
                    n_steps = min(self.every, left)
                    left -= n_steps
                    yield n_steps, left == 0

    def stops(self, iteration: int, info: dict) -> bool:
        """Whether the callback, told of an iteration, ends the sampling."""
        return self.callback is not None and bool(self.callback(iteration, info))


def _of_chains(measure: Callable[[np.ndarray], float]) -> Callable[[np.ndarray], float]:
    """NaN for chains of fewer than 4 draws or with values that are not finite."""

    @wraps(measure)
    def measured(chains: np.ndarray) -> float:
        chains = np.asarray(chains, dtype=float)
        usable = chains.shape[1] >= tuned.LEAST_DRAWS and bool(np.isfinite(chains).all())
        return measure(chains) if usable else math.nan

    return measured


@_of_chains
def r_hat(chains: np.ndarray) -> float:
    r"""Rank-normalised split R-hat [1]_: near 1 for chains that have mixed, 1.01 the usual limit.

    .. math:: \hat R = \sqrt{\frac{(m - 1) W / m + B / m}{W}}

    of half chains of m draws, W the mean of their variances and B / m the variance of their means,
    after the draws are replaced by normal scores of their ranks; the greater of this and the same
    of the absolute distances from the median (folded draws), which sees unequal spreads.
    """
    halves = _split(chains)
    folded = np.abs(halves - np.median(halves))
    return max(_plain_r_hat(_normal_scores(halves)), _plain_r_hat(_normal_scores(folded)))


@_of_chains
def ess_bulk(chains: np.ndarray) -> float:
    """Effective number of draws for the centre of a distribution: of the normal scores [1]_."""
    return _ess(_normal_scores(_split(chains)))


@_of_chains
def ess_tail(chains: np.ndarray) -> float:
    """Effective number of draws for the 5% and 95% quantiles, the lesser of the two [1]_."""
    quantiles = np.quantile(chains, [0.05, 0.95])
    return min(_ess(_split((chains <= q).astype(float))) for q in quantiles)


@_of_chains
def ess_spread(chains: np.ndarray) -> float:
    r"""How many independent draws of a Gaussian would give the variance as exactly.

    Of squared deviations s from the mean, :math:`2 v^2 / (V[s] / n_s)` with their own number of
    effective draws: a heavy tail takes more draws than means do.
    """
    squares = (chains - chains.mean()) ** 2
    spread = squares.var()
    if spread == 0:
        return math.inf
    return float(2 * squares.mean() ** 2 / spread * _ess(_split(squares)))


def mixing(points: np.ndarray) -> tuple[np.ndarray, ...]:
    """R-hat, ESS of bulk, tail and spread, (p,) each, of points (n_chains, n_draws, p)."""
    columns = points.transpose(2, 0, 1)
    measures = (r_hat, ess_bulk, ess_tail, ess_spread)
    return tuple(np.array([of(column) for column in columns]) for of in measures)


def _split(chains: np.ndarray) -> np.ndarray:
    """Halves of the chains as chains; the middle draw of an odd number is left out."""
    half = chains.shape[1] // 2
    return np.concatenate([chains[:, :half], chains[:, -half:]])


def _normal_scores(chains: np.ndarray) -> np.ndarray:
    """Normal quantiles of pooled ranks, (r - 3/8) / (N + 1/4): Blom's offsets, [1]_ eq. (14)."""
    ranks = rankdata(chains).reshape(chains.shape)
    return ndtri((ranks - 0.375) / (chains.size + 0.25))


def _plain_r_hat(chains: np.ndarray) -> float:
    n_draws = chains.shape[1]
    within = chains.var(axis=1, ddof=1).mean()
    between = chains.mean(axis=1).var(ddof=1)
    if within == 0:
        return 1.0 if between == 0 else math.inf
    return math.sqrt((n_draws - 1) / n_draws + between / within)


def _ess(chains: np.ndarray) -> float:
    r"""Draws over the autocorrelation time :math:`1 + 2 \sum_t \hat\rho_t`, [1]_ eq. (10).

    Sums of adjacent autocorrelations are positive and fall [4]_; where their estimates no longer
    are, the sum ends.
    """
    n_chains, n_draws = chains.shape
    if np.ptp(chains) < np.finfo(float).resolution:
        return float(chains.size)
    autocovariance = _autocovariance(chains).mean(axis=0)
    within = autocovariance[0] * n_draws / (n_draws - 1)
    total = autocovariance[0]
    if n_chains > 1:
        total = total + chains.mean(axis=1).var(ddof=1)
    rho = 1 - (within - autocovariance) / total
    rho[0] = 1.0
    n_pairs = max(1, math.ceil(n_draws / 2) - 2)  # the last lags rest on too few products
    pairs = rho[: 2 * n_pairs].reshape(n_pairs, 2).sum(axis=1)
    negative = np.flatnonzero(pairs < 0)
    last = int(negative[0]) if len(negative) else n_pairs
    falling = np.minimum.accumulate(pairs[:last])
    # One further autocorrelation, where positive, halves the variance of antithetic chains.
    further = max(0.0, rho[2 * last]) if 2 * last < n_draws else 0.0
    time = -1 + 2 * falling.sum() + further
    return float(chains.size / max(time, 1 / math.log10(chains.size)))


def _autocovariance(chains: np.ndarray) -> np.ndarray:
    """Autocovariances (n_chains, n_draws) of all lags, by FFT, divided by the number of draws."""
    n_draws = chains.shape[1]
    centred = chains - chains.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, n=2 * n_draws)  # zeros behind: no wrapping round
    return np.fft.irfft(np.abs(spectrum) ** 2)[:, :n_draws] / n_draws


def cholesky_factor(covariance: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor of a covariance (p, p); a ValueError with a remedy without one."""
    try:
        return np.linalg.cholesky(np.asarray(covariance, float))
    except np.linalg.LinAlgError:
        raise ValueError(
            "covariance must be symmetric and positive definite; its smallest eigenvalue is "
            f"{np.linalg.eigvalsh(covariance)[0]:.3g}. Raise its diagonal."
        ) from None


def effective_sample_size(log_weights: np.ndarray) -> float:
    r"""Kish's effective number of weighted draws, :math:`(\sum w)^2 / \sum w^2`; 0 for none."""
    log_weights = np.asarray(log_weights, dtype=float)
    total = logsumexp(log_weights)
    if not np.isfinite(total):
        return 0.0
    return float(np.exp(2 * total - logsumexp(2 * log_weights)))


def pareto_k(log_weights: np.ndarray) -> float:
    r"""Shape k of the generalised Pareto distribution fitted to the largest weights [2]_.

    The :math:`\min(s / 5, 3 \sqrt s)` largest weights less the next one are fitted by [3]_, and k
    is drawn towards 1/2 as by ten more of them [2]_. Weights have :math:`1/k` moments: below 0.7
    their averages can be trusted, above they may be dominated by a draw not yet seen. inf where
    fewer than five weights make the tail, -inf where they are all equal.
    """
    log_weights = np.sort(np.asarray(log_weights, dtype=float))
    size = len(log_weights)
    n_tail = math.ceil(min(size / 5, 3 * math.sqrt(size)))
    if size == 0 or n_tail < tuned.LEAST_TAIL or not np.isfinite(log_weights[-1]):
        return math.inf
    weights = np.exp(log_weights - log_weights[-1])
    excess = weights[-n_tail:] - weights[-n_tail - 1]
    excess = excess[excess > 0]
    if len(excess) < tuned.LEAST_TAIL:
        return -math.inf if weights[-n_tail - 1] > 0 else math.inf
    n = len(excess)
    return (n * _generalised_pareto_shape(excess) + 10 * 0.5) / (n + 10)


def _generalised_pareto_shape(excess: np.ndarray) -> float:
    """Shape of the distribution of sorted positive numbers: the profile posterior mean of [3]_."""
    n = len(excess)
    n_grid = 30 + math.isqrt(n)
    quartile = excess[int(n / 4 + 0.5) - 1]
    grid = 1 - np.sqrt(n_grid / (np.arange(1, n_grid + 1) - 0.5))
    b = grid / (3 * quartile) + 1 / excess[-1]
    k = np.log1p(-b[:, None] * excess).mean(axis=1)
    profile = n * (np.log(-b / k) - k - 1)
    posterior = np.exp(profile - logsumexp(profile))
    return float(np.log1p(-(posterior @ b) * excess).mean())


def stratified_resample(
    weights: np.ndarray,  # (s,), not negative, in any scale
    n_keep: int,
    rng: np.random.Generator,
    *,
    points: np.ndarray | None = None,  # (s, p), the draws
) -> np.ndarray:
    r"""Indices (n_keep,), rising, of draws kept by their weights: systematic resampling.

    The draws share the unit interval according to their weights, and those at
    :math:`(i + U) / n_\mathrm{keep}`, with one uniform U, are kept; one of weight above
    1 / n_keep may repeat. Of equal weights in the order of a chain that is thinning; with `points`,
    draws are ordered along their principal axis first, so that those kept spread over the
    distribution as all did.
    """
    weights = np.asarray(weights, dtype=float)
    total = weights.sum()
    order = np.arange(len(weights)) if points is None else _along_axis(points, weights / total)
    edges = np.cumsum(weights[order])
    positions = (np.arange(n_keep) + rng.uniform()) / n_keep * edges[-1]
    return np.sort(order[np.searchsorted(edges, positions, side="right").clip(max=len(order) - 1)])


def _along_axis(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Order of the points along the first principal axis of their standardised columns."""
    centred = points - weights @ points
    spread = np.sqrt(weights @ centred**2)
    centred = centred / np.where(spread > 0, spread, 1.0)
    _, axes = np.linalg.eigh((weights[:, None] * centred).T @ centred)
    return np.argsort(centred @ axes[:, -1], kind="stable")


def stein_weights(points: np.ndarray, gradients: np.ndarray, ess: float) -> np.ndarray:
    r"""Positive weights (s,) of sum one under which draws (s, p) satisfy Stein's identity.

    Under a density :math:`\pi` with gradient :math:`g = \nabla \log \pi` that vanishes at infinity,

    .. math:: E[g] = 0, \qquad E[(x - c) g^T] = -I

    for any constant c. Both hold exactly under the weights nearest to equal ones in relative
    entropy, :math:`w_i \propto e^{\lambda^T f(x_i)}`: the regression estimator with control
    variates f [5]_ as positive weights. Near a Gaussian, g and (x - c) g^T are nearly linear and
    quadratic in x, so that most of the Monte Carlo error of means and covariances is gone. Unbiased
    noise in the gradients (s, p), independent of the draws, costs some of the gain alone.

    Both identities are used where `ess`, the effective number of draws, is at least four for each
    of their p (p + 3) / 2 equations, the first alone with four for each of its p, else none. The
    weights are equal where none fulfil the identities without leaving out half of the draws.
    ``O(s p^4)`` for a Newton step, of which there are about five.
    """
    size, p = points.shape
    equal = np.full(size, 1 / size)
    if not (ess >= tuned.DRAWS_PER_FUNCTION * p and np.ptp(points, axis=0).all()):
        return equal
    scale = points.std(axis=0)
    x, g = (points - points.mean(axis=0)) / scale, gradients * scale
    functions = [g]
    if ess >= tuned.DRAWS_PER_FUNCTION * p * (p + 3) / 2:
        i, j = np.triu_indices(p)
        functions.append((x[:, i] * g[:, j] + x[:, j] * g[:, i]) / 2 + (i == j))
    weights = _tilted(np.concatenate(functions, axis=1))
    if weights is None or 1 / (weights**2).sum() < tuned.LEAST_DRAWS_SHARE * size:
        return equal
    return weights


def _tilted(functions: np.ndarray) -> np.ndarray | None:
    """Weights proportional to exp(functions @ tilt) that average `functions` (s, q) to zero.

    Newton's method on the convex log-sum-exp; None where it does not arrive.
    """
    scale = functions.std(axis=0)
    if not scale.all():
        return None
    functions = functions / scale
    tilt = np.zeros(functions.shape[1])
    for _ in range(tuned.STEIN_STEPS):
        exponent = functions @ tilt
        weights = np.exp(exponent - exponent.max())
        weights /= weights.sum()
        mean = weights @ functions
        if np.abs(mean).max() < tuned.STEIN_TOL:
            return weights
        covariance = (weights[:, None] * functions).T @ functions - np.outer(mean, mean)
        step = np.linalg.lstsq(covariance, -mean, rcond=1e-10)[0]
        # A full step where no weight changes more than eightfold; the rest is damped.
        tilt += step * min(1.0, 2 / max(np.abs(functions @ step).max(), 1e-300))
    return None


def spread_sample_size(
    centred: np.ndarray, var: np.ndarray, weights: np.ndarray, pair: np.ndarray
) -> float:
    r""":math:`2 v_j^2 / V[\hat v_j]`, the least over the coordinates.

    The delta method for a ratio of sums over mirrored pairs, which are independent of each other:
    :math:`V[\hat v] \approx \sum_{pairs} (\sum_{i \in pair} w_i ((x_i - m)^2 - v))^2`.
    """
    influence = weights[:, None] * (centred**2 - var)
    sums = np.stack([np.bincount(pair, column) for column in influence.T], axis=1)
    errors = (sums**2).sum(axis=0)
    sizes = np.divide(2 * var**2, errors, out=np.full(len(var), np.inf), where=errors > 0)
    return float(sizes.min())


def weighted_moments(x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (p,) and covariance (p, p) of points x (s, p) of weights (s,), of sum one."""
    mean = weights @ x
    centred = x - mean
    return mean, (weights[:, None] * centred).T @ centred


def normalised(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Log of weights (s,) of sum one, and that of their sum before; of infinite ones as they are.

    Relative to the largest: a log density of 1e10 leaves its logarithm six digits after the point,
    and the weights as many of their sum.
    """
    largest = log_weights.max()
    if not math.isfinite(largest):
        return log_weights, float(largest)
    relative = log_weights - largest
    rest = logsumexp(relative)
    return relative - rest, float(largest + rest)


def tempered(log_weights: np.ndarray, enough: float) -> np.ndarray:
    """Log of weights raised to the greatest power, at most 1, that leaves an ESS of `enough`."""
    power, low = 1.0, 0.0
    if effective_sample_size(log_weights) < enough:
        high = 1.0
        for _ in range(30):
            power = (low + high) / 2
            usable = effective_sample_size(power * log_weights) >= enough
            low, high = (power, high) if usable else (low, power)
        power = low
    # A power of exactly 0 would count points outside the support.
    return normalised(np.where(np.isfinite(log_weights), power * log_weights, -np.inf))[0]
