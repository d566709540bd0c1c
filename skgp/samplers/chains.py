"""What samplers of several chains share: their segments, their start, and whether they mixed."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from skgp.samplers.diagnostics import ess_bulk, ess_spread, ess_tail, r_hat

__all__ = [
    "SEGMENT",
    "Callback",
    "advance_all",
    "check_counts",
    "cholesky_factor",
    "mixing",
    "stretches",
]

Callback = Callable[[int, dict], bool | None]

#: Iterations between two looks at what the chains have in common.
SEGMENT = 25


def check_counts(n_chains: int, n_warmup: int, n_draws: int, every: int) -> None:
    """Raise ValueError where there is nothing to draw, or `every` is not a number of iterations."""
    if min(n_chains, n_draws, every) < 1 or n_warmup < 0:
        raise ValueError(
            "n_chains, n_draws and every must be at least 1 and n_warmup not negative; got "
            f"n_chains={n_chains}, n_draws={n_draws}, n_warmup={n_warmup}, every={every}."
        )


def cholesky_factor(covariance: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor of a covariance (p, p); a ValueError with a remedy without one."""
    try:
        return np.linalg.cholesky(np.asarray(covariance, float))
    except np.linalg.LinAlgError:
        raise ValueError(
            "covariance must be symmetric and positive definite; its smallest eigenvalue is "
            f"{np.linalg.eigvalsh(covariance)[0]:.3g}. Raise its diagonal."
        ) from None


def stretches(n_warmup: int, n_draws: int, every: int) -> Iterator[tuple[int, bool]]:
    """How many iterations until the next call of the callback, and whether a segment ends there.

    Segments are 25 iterations of the warm-up or of the draws, less at the end of these, and their
    stretches at most `every` long: what is done between segments does not depend on it.

    Examples
    --------
    >>> list(stretches(25, 30, 10))[3:]
    [(10, False), (10, False), (5, True), (5, True)]
    """
    for n in (n_warmup, n_draws):
        for start in range(0, n, SEGMENT):
            left = min(SEGMENT, n - start)
            while left > 0:
                n_steps = min(every, left)
                left -= n_steps
                yield n_steps, left == 0


def advance_all(
    parallel: Parallel,
    advance: Callable[..., tuple],
    settings: Any,
    chains: list,
    n_iterations: int,
) -> tuple[list, tuple[np.ndarray, ...]]:
    """Some iterations of every chain.

    Parameters
    ----------
    parallel : joblib.Parallel
    advance : callable
        ``advance(settings, chain, n_iterations)`` gives the chain and arrays (n_iterations, ...).
    settings : object
        What all chains share; picklable, as chains are.
    chains : list
    n_iterations : int

    Returns
    -------
    chains : list
    arrays : tuple of ndarray of shape (n_chains, n_iterations, ...)
    """
    advanced = parallel(delayed(advance)(settings, chain, n_iterations) for chain in chains)
    arrays = zip(*(each[1:] for each in advanced), strict=True)
    return [each[0] for each in advanced], tuple(np.stack(each) for each in arrays)


def mixing(points: np.ndarray) -> tuple[np.ndarray, ...]:
    """R-hat, ESS of bulk, tail and spread, (p,) each, of points (n_chains, n_draws, p)."""
    columns = points.transpose(2, 0, 1)
    measures = (r_hat, ess_bulk, ess_tail, ess_spread)
    return tuple(np.array([of(column) for column in columns]) for of in measures)
