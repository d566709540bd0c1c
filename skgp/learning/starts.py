r"""Where a search for hyper-parameters starts beside the kernel given; searches from many starts.

The log marginal likelihood has several optima [1]_: from length scales far above those of the data,
or far below, a search ends where the function is noise. Other starts keep the form of the kernel
and what it has besides length scales, amplitude and noise:

length scales
    :math:`\ell_0, \ell_0 / 2, \ell_0 / 4, \dots`, where :math:`\ell_0` puts two typical inputs one
    length scale apart, down to the spacing of n inputs, about :math:`n^{-1/d} \ell_0`: what is
    shorter looks like noise whatever it is.
amplitude
    The variance of the targets.
noise
    Shares of it (`NOISE_GRID`), within the bounds of the kernel.

A search for a model with jitter, a share of the variance of f, also looks at smaller variances.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, section 5.4.1.
"""

import math
from collections.abc import Callable

import numpy as np

from skgp.data import Data
from skgp.inference.neighbors.search import distinct
from skgp.kernels.expression import split_noise
from skgp.kernels.hyperparameters import bounds_of, theta_of, with_theta
from skgp.kernels.scales import at_spread, length_scale_places, scale_within, with_variance
from skgp.learning import defaults
from skgp.learning.evidence import ExactEvidence
from skgp.linalg import NotPositiveDefiniteError
from skgp.optim.bfgs import minimize_batch, minimize_within


def starts(kernel, data: Data, *, known: int = 1) -> list:
    """Expressions of other length scales, in the order of these, each with noises of the grid.

    Those that are shorter than the spacing of `known` inputs, and at least that of all distinct
    ones, n of d columns; [] of a kernel whose length scales are fixed, or without any.
    """
    if not length_scale_places(kernel).any() or len(data) < 2:
        return []
    X = data.X[distinct(data.X)[0]]
    n, d = len(X), X.unique(dim=1).shape[1]
    signal, white = split_noise(kernel)
    lengths = at_spread(signal, X)
    variance = float(data.weighted_sum(data.y.square())) / (data.total * data.n_targets)
    typical = with_variance(lengths, X, variance)
    halvings = range(math.ceil(math.log2(known) / d), math.floor(math.log2(n) / d) + 1)
    found, before = [], None
    for k in halvings:
        theta = theta_of(typical) - k * math.log(2) * length_scale_places(typical)
        theta = np.clip(theta, *bounds_of(typical).T)
        if before is None or not np.array_equal(theta, before):
            found += with_noises(with_theta(typical, theta), white, variance)
        before = theta
    return found


def with_noises(signal, white, variance: float = 1.0) -> list:
    """The expression with each noise of the grid that its bounds allow; with its own if none."""
    levels: list[float] = []
    if white is not None and not white.hyperparameter_noise_level.fixed:
        low, high = white.noise_level_bounds
        levels = [
            level for share in defaults.NOISE_GRID if low <= (level := share * variance) <= high
        ]
    if not levels:
        return [signal if white is None else signal + white]
    return [signal + type(white)(level, white.noise_level_bounds) for level in levels]


def with_less_variance(kernel) -> list:
    """The expression with shares of the variance of f, at its length scales and at shorter ones.

    The slopes of a smooth function without noise tell the ratio of amplitude and length scales
    better than either: both grow until digits end.
    """
    signal, white = split_noise(kernel)
    places = length_scale_places(signal)
    found = []
    for share in defaults.VARIANCE_SHARES:
        less = scale_within(signal, share)
        for factor in defaults.LENGTH_SHARES:
            theta = theta_of(less) + math.log(factor) * places
            moved = with_theta(less, np.clip(theta, *bounds_of(less).T))
            found.append(moved if white is None else moved + white)
    return found


def likeliest_start(kernel, data: Data):
    """The start of the greatest log marginal likelihood, and that in nats; None without starts."""
    candidates = starts(kernel, data)
    if not candidates:
        return None
    evidence = ExactEvidence(candidates[0], data)
    values = [_value(evidence, theta_of(candidate)) for candidate in candidates]
    best = int(np.argmax(values))
    return candidates[best], values[best]


def _value(evidence: ExactEvidence, theta: np.ndarray) -> float:
    """In nats; minus infinity of a covariance without a Cholesky factor."""
    try:
        return evidence.value(theta)
    except NotPositiveDefiniteError:
        return -math.inf


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
ManyObjective = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def search_from_starts(
    objective: Objective,  # theta (p,) to minus the log marginal likelihood, and its gradient
    starts: np.ndarray,  # (k, p), the first that of the kernel
    bounds: np.ndarray,  # (p, 2)
    *,
    of_many: ManyObjective | None = None,  # the same at (b, p), infinite where it has no value
    n_rows: int = 0,  # of the matrices that `of_many` makes, which bounds b
    tell: Callable[[float], bool] = lambda loss: False,  # hears of losses; True ends the search
) -> tuple[np.ndarray, float]:
    """Theta (p,) of the least loss found, and the loss; infinite where no start is usable.

    The first start has a search of its own by L-BFGS-B. The others run in lockstep, a batch of
    theta an evaluation, where the objective takes one (:func:`~skgp.optim.bfgs.minimize_batch`);
    the best of them is then searched on from as closely as the first. More starts never lose the
    optimum of fewer.
    """
    ended = False

    def told(loss: float) -> bool:
        nonlocal ended
        ended = ended or tell(loss)
        return ended

    def search(start: np.ndarray) -> tuple[np.ndarray, float]:
        return minimize_within(
            objective,
            start,
            bounds,
            max_iter=defaults.EXACT_ITERATIONS,
            tol=defaults.EXACT_TOL,
            gtol=defaults.EXACT_GTOL,
            refuse_far=False,  # as scikit-learn: a first step to 1e7 nats is interpolated at once
            tell=told,
        )

    found = [search(starts[0])]
    if of_many is None:
        found += [search(start) for start in starts[1:] if not ended]
        return min(found, key=lambda each: each[1])
    size = max(1, defaults.BATCH_NUMBERS // max(1, n_rows**2))
    for first in range(1, len(starts), size):
        batch = minimize_batch(
            of_many,
            starts[first : first + size],
            bounds=bounds,
            max_iter=0 if ended else defaults.EXACT_ITERATIONS,
            tol=defaults.BATCH_TOL,
            callback=lambda step, info: told(info["loss"]),
        )
        least = int(batch.value.argmin())
        found.append((batch.x[least], float(batch.value[least])))
    best = min(found, key=lambda each: each[1])
    if best is found[0] or ended:
        return best
    return min(best, search(best[0]), key=lambda each: each[1])
