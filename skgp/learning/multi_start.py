"""Searches of theta from one start, and from many, for any objective with a gradient.

The first start has a search of its own by L-BFGS-B. The others run in lockstep, a batch of theta an
evaluation, where the objective takes one (:func:`~skgp.optim.bfgs.minimize_batch`); the best of
them is then searched on from as closely as the first. More starts never lose the optimum of fewer.
"""

from collections.abc import Callable

import numpy as np

from skgp.learning.defaults import BATCH_NUMBERS, BATCH_TOL, EXACT_GTOL, EXACT_ITERATIONS, EXACT_TOL
from skgp.optim.bfgs import minimize_batch, minimize_within

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
    """Theta (p,) of the least loss found, and the loss; infinite where no start is usable."""
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
            max_iter=EXACT_ITERATIONS,
            tol=EXACT_TOL,
            gtol=EXACT_GTOL,
            refuse_far=False,  # as scikit-learn: a first step to 1e7 nats is interpolated at once
            tell=told,
        )

    found = [search(starts[0])]
    if of_many is None:
        found += [search(start) for start in starts[1:] if not ended]
        return min(found, key=lambda each: each[1])
    size = max(1, BATCH_NUMBERS // max(1, n_rows**2))
    for first in range(1, len(starts), size):
        batch = minimize_batch(
            of_many,
            starts[first : first + size],
            bounds=bounds,
            max_iter=0 if ended else EXACT_ITERATIONS,
            tol=BATCH_TOL,
            callback=lambda step, info: told(info["loss"]),
        )
        least = int(batch.value.argmin())
        found.append((batch.x[least], float(batch.value[least])))
    best = min(found, key=lambda each: each[1])
    if best is found[0] or ended:
        return best
    return min(best, search(best[0]), key=lambda each: each[1])
