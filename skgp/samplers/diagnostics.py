r"""Whether chains have mixed and whether importance weights can be trusted.

Chains are arrays (n_chains, n_draws) of one quantity; weights are given by their logarithms, up to
a constant.

References
----------
.. [1] Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021), Rank-normalization, folding, and
   localization: an improved R-hat for assessing convergence of MCMC. Bayesian Analysis 16(2).
.. [2] Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling. JMLR 25.
.. [3] Zhang and Stephens (2009), A new and efficient estimation method for the generalized Pareto
   distribution. Technometrics 51(3).
.. [4] Geyer (1992), Practical Markov chain Monte Carlo. Statistical Science 7(4).
"""

import math

import numpy as np
from scipy.special import logsumexp, ndtri
from scipy.stats import rankdata

__all__ = [
    "effective_sample_size",
    "ess_bulk",
    "ess_spread",
    "ess_tail",
    "pareto_k",
    "r_hat",
    "stratified_resample",
]

_LEAST_DRAWS = 4
_LEAST_TAIL = 5  # weights, fewer do not determine two parameters


# ------------------------------------------------------------------------------------- chains


def r_hat(chains: np.ndarray) -> float:
    r"""Rank-normalised split R-hat [1]_.

    .. math:: \hat R = \sqrt{\frac{(m - 1) W / m + B / m}{W}}

    of half chains of m draws, W the mean of their variances and B / m the variance of their means,
    after the draws are replaced by normal scores of their ranks; the greater of this and the same
    of the absolute distances from the median (folded draws), which sees unequal spreads.

    Parameters
    ----------
    chains : ndarray of shape (n_chains, n_draws)

    Returns
    -------
    float
        Near 1 for chains that have mixed: 1.01 is the usual limit. NaN with fewer than 4 draws a
        chain or values that are not finite. Cost O(N log N).
    """
    chains = _check_chains(chains)
    if not _usable(chains):
        return math.nan
    halves = _split(chains)
    folded = np.abs(halves - np.median(halves))
    return max(_plain_r_hat(_normal_scores(halves)), _plain_r_hat(_normal_scores(folded)))


def ess_bulk(chains: np.ndarray) -> float:
    """Effective number of draws for the centre of a distribution: of the normal scores [1]_.

    Parameters
    ----------
    chains : ndarray of shape (n_chains, n_draws)

    Returns
    -------
    float
        NaN where `r_hat` is. Cost O(N log N).
    """
    chains = _check_chains(chains)
    return _ess(_normal_scores(_split(chains))) if _usable(chains) else math.nan


def ess_tail(chains: np.ndarray) -> float:
    """Effective number of draws for the 5% and 95% quantiles, the lesser of the two [1]_.

    Parameters
    ----------
    chains : ndarray of shape (n_chains, n_draws)

    Returns
    -------
    float
        NaN where `r_hat` is. Cost O(N log N).
    """
    chains = _check_chains(chains)
    if not _usable(chains):
        return math.nan
    quantiles = np.quantile(chains, [0.05, 0.95])
    return min(_ess(_split((chains <= q).astype(float))) for q in quantiles)


def ess_spread(chains: np.ndarray) -> float:
    """How many independent draws of a Gaussian would give the variance as exactly.

    Of squared deviations s from the mean, :math:`2 v^2 / (V[s] / n_s)` with their own number of
    effective draws: a heavy tail takes more draws than means do.

    Parameters
    ----------
    chains : ndarray of shape (n_chains, n_draws)

    Returns
    -------
    float
        NaN where `r_hat` is. Cost O(N log N).
    """
    chains = _check_chains(chains)
    if not _usable(chains):
        return math.nan
    squares = (chains - chains.mean()) ** 2
    spread = squares.var()
    return (
        float(2 * squares.mean() ** 2 / spread * _ess(_split(squares))) if spread > 0 else math.inf
    )


def _check_chains(chains: np.ndarray) -> np.ndarray:
    chains = np.asarray(chains, dtype=float)
    if chains.ndim != 2:
        raise ValueError(
            f"chains must have shape (n_chains, n_draws), got {chains.shape}; "
            "pass one quantity at a time, a single chain as chains[None]."
        )
    return chains


def _usable(chains: np.ndarray) -> bool:
    return chains.shape[1] >= _LEAST_DRAWS and bool(np.isfinite(chains).all())


def _split(chains: np.ndarray) -> np.ndarray:
    """Halves of the chains as chains; the middle draw of an odd number is left out."""
    half = chains.shape[1] // 2
    return np.concatenate([chains[:, :half], chains[:, -half:]])


def _normal_scores(chains: np.ndarray) -> np.ndarray:
    """Normal quantiles of the pooled ranks, (r - 3/8) / (N + 1/4): Blom's offsets, eq. (14)."""
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
    r"""Number of draws over the autocorrelation time :math:`1 + 2 \sum_t \hat\rho_t`, eq. (10).

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


# ------------------------------------------------------------------------------------ weights


def effective_sample_size(log_weights: np.ndarray) -> float:
    r"""Kish's effective number of weighted draws, :math:`(\sum w)^2 / \sum w^2`.

    Parameters
    ----------
    log_weights : ndarray of shape (s,)
        Up to a constant; -inf is a weight of zero.

    Returns
    -------
    float
        Between 1 and s; 0 where every weight is zero.
    """
    log_weights = np.asarray(log_weights, dtype=float)
    total = logsumexp(log_weights)
    if not np.isfinite(total):
        return 0.0
    return float(np.exp(2 * total - logsumexp(2 * log_weights)))


def pareto_k(log_weights: np.ndarray) -> float:
    r"""Shape k of the generalised Pareto distribution fitted to the largest weights [2]_.

    The :math:`\min(s / 5, 3 \sqrt s)` largest weights less the next one are fitted by [3]_, and k
    is drawn towards 1/2 as by ten more of them [2]_. Weights have :math:`1/k` moments: below 0.7
    their averages can be trusted, above they may be dominated by a draw not yet seen.

    Parameters
    ----------
    log_weights : ndarray of shape (s,)
        Up to a constant; -inf is a weight of zero.

    Returns
    -------
    float
        inf where fewer than five weights make the tail: there are too few draws to tell. -inf where
        they are all equal.
    """
    log_weights = np.sort(np.asarray(log_weights, dtype=float))
    size = len(log_weights)
    n_tail = math.ceil(min(size / 5, 3 * math.sqrt(size)))
    if size == 0 or n_tail < _LEAST_TAIL or not np.isfinite(log_weights[-1]):
        return math.inf
    weights = np.exp(log_weights - log_weights[-1])
    excess = weights[-n_tail:] - weights[-n_tail - 1]
    excess = excess[excess > 0]
    if len(excess) < _LEAST_TAIL:
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
    weights: np.ndarray,
    n_keep: int,
    rng: np.random.Generator,
    *,
    points: np.ndarray | None = None,
) -> np.ndarray:
    r"""Indices of draws kept in proportion to their weights, by systematic resampling.

    The draws share the unit interval according to their weights, and those at
    :math:`(i + U) / n_\mathrm{keep}`, with one uniform U, are kept. Of equal weights in the order
    of a chain that is thinning; with `points`, draws are ordered along their principal axis first,
    so that those kept spread over the distribution as all did.

    Parameters
    ----------
    weights : ndarray of shape (s,)
        Not negative, in any scale.
    n_keep : int
    rng : numpy.random.Generator
    points : ndarray of shape (s, p), optional
        The draws.

    Returns
    -------
    ndarray of int, shape (n_keep,)
        Rising; a draw of weight above 1 / n_keep may repeat. Its expected count is n_keep times its
        weight.
    """
    weights = np.asarray(weights, dtype=float)
    total = weights.sum()
    if n_keep < 1 or not (np.isfinite(total) and total > 0 and weights.min() >= 0):
        raise ValueError(
            "weights must be finite, not negative and not all zero, and n_keep at least 1; "
            f"got n_keep={n_keep} and weights of sum {total}."
        )
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
