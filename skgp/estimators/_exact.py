"""What the exact regressor and classifier share: starts, optimizers, and checks of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from skgp.estimators._validation import is_valid, told_of_text
from skgp.estimators.defaults import CALLED_MATRICES, EXACT_MATRICES
from skgp.kernels.training import is_called
from skgp.learning.starts import search_from_starts
from skgp.linalg.runtime import require_memory


def validated(estimator: Any, X: ArrayLike, y: Any = "no_validation", **checks: Any) -> Any:
    """X, or X and y, checked as scikit-learn's Gaussian processes do: lists of objects, too."""
    kernel = estimator.kernel
    vectors = kernel is None or kernel.requires_vector_input
    checks |= {"ensure_2d": vectors, "dtype": "numeric" if vectors else None}
    if isinstance(y, str):
        if vectors and is_valid(estimator, X):
            return X
        with told_of_text(X):
            return validate_data(estimator, X, reset=False, **checks)
    with told_of_text(X, y if checks.get("y_numeric") else None):
        rows, targets = validate_data(estimator, X, y, **checks)
        # scikit-learn leaves a data frame with a categorical column as objects.
        as_numbers = vectors and rows.dtype.kind == "O"
        return (rows.astype(np.float64) if as_numbers else rows), targets


def theta_starts(kernel: Kernel, n_restarts: int, random_state: Any) -> np.ndarray:
    """The kernel's theta and draws that are uniform within its bounds, (1 + n_restarts, p)."""
    bounds = kernel.bounds
    if n_restarts and not np.isfinite(bounds).all():
        raise ValueError(
            f"n_restarts_optimizer={n_restarts} requires that all bounds are finite, between which "
            f"the starts are drawn; got {np.exp(bounds).tolist()}. Give the kernel finite bounds."
        )
    draws = ()
    if n_restarts:
        rng = check_random_state(random_state)
        draws = rng.uniform(bounds[:, 0], bounds[:, 1], (n_restarts, len(bounds)))
    return np.vstack([kernel.theta, *draws])


def learn_theta(
    evidence: Any,  # theta to minus the log marginal likelihood, and its gradient
    kernel: Kernel,
    optimizer: str | Callable,
    starts: np.ndarray,
    *,
    of_many: Callable | None = None,
    n_rows: int = 0,
    tell: Callable[[float], bool] = lambda loss: False,
) -> tuple[np.ndarray, float]:
    """Theta (p,) of the greatest log marginal likelihood found, and minus that."""
    if isinstance(optimizer, str):
        return search_from_starts(
            evidence, starts, kernel.bounds, of_many=of_many, n_rows=n_rows, tell=tell
        )

    def objective(theta: np.ndarray, eval_gradient: bool = True) -> Any:
        value, gradient = evidence_or_infinity(evidence, np.asarray(theta, dtype=float))
        tell(value)
        return (value, gradient) if eval_gradient else value

    found = [optimizer(objective, start, bounds=kernel.bounds) for start in starts]
    return min(found, key=itemgetter(1))


def evidence_or_infinity(evidence: Any, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """Minus the log marginal likelihood and its gradient; infinity where there is no factor."""
    try:
        return evidence(theta)
    except ValueError:
        return math.inf, np.zeros(len(theta))


def check_exact_memory(kernel: Any, X: Any, *, learns: bool) -> None:
    """Raise MemoryBudgetError where the matrices of an exact fit exceed the budget.

    A kernel that is called returns all its derivatives at once.
    """
    n, count, remedy = len(X), EXACT_MATRICES, ""
    if learns and kernel.n_dims and is_called(kernel, X):
        count += CALLED_MATRICES * kernel.n_dims
        remedy = "register the kernel by skgp.kernels.register_kernel, set optimizer=None, "
    require_memory(
        8.0 * count * n**2,
        f"An exact fit, which holds {count} matrices of {n} x {n} numbers,",
        f'Fit fewer rows, {remedy}set method="qsgp", "neighbors" or "state_space" where kernel and '
        "targets allow",
    )
