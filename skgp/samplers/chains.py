"""What samplers of several chains share: their counts, their segments and their metric."""

from collections.abc import Callable, Iterator

import numpy as np

from skgp.samplers import defaults as tuned

Callback = Callable[[int, dict], bool | None]


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

    >>> list(stretches(25, 30, 10))[3:]
    [(10, False), (10, False), (5, True), (5, True)]
    """
    for n in (n_warmup, n_draws):
        for start in range(0, n, tuned.SEGMENT):
            left = min(tuned.SEGMENT, n - start)
            while left > 0:
                n_steps = min(every, left)
                left -= n_steps
                yield n_steps, left == 0
