"""The parts of scikit-learn that are not public, imported in this one place.

skgp depends on scikit-learn >= 1.9. Third-party estimators need a few of its private helpers to
validate parameters as it does; a new scikit-learn release is checked here first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import _fit_context as validated_context
from sklearn.gaussian_process.kernels import CompoundKernel, Kernel
from sklearn.utils import _safe_indexing
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_sample_weight

from skgp.kernels import split_noise

__all__ = [
    "Interval",
    "StrOptions",
    "check_sample_weight",
    "is_one_of_many_fits",
    "take_rows",
    "validated_context",
    "warn_at_bounds",
]


def check_sample_weight(sample_weight: ArrayLike, X: np.ndarray) -> np.ndarray:
    """Return the weights as a float64 array of shape (n,).

    ValueError if a weight is negative or not finite, or their number is not that of the rows.
    """
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def warn_at_bounds(kernel: Kernel, given: Kernel | None) -> None:
    """Warn about each optimised hyper-parameter that the user wrote and that ended at a bound.

    The ``ConvergenceWarning`` is scikit-learn's own and names the parameter and the bound.

    ``kernel`` is as learned, one for each class perhaps; ``given`` as the user gave it. Of None
    nothing is checked, nor is noise that was added to it.
    """
    if given is None:
        return
    added = split_noise(given)[1] is None
    for part in kernel.kernels if isinstance(kernel, CompoundKernel) else [kernel]:
        (split_noise(part)[0] if added else part)._check_bounds_params()


def is_one_of_many_fits(estimator: object) -> bool:
    """Tell whether a search (``GridSearchCV`` and its like) runs this fit among others.

    A search announces itself by a callback context whose sub-tasks have no order.
    """
    context = getattr(estimator, "_parent_callback_ctx", None)
    while context is not None:
        if not context.sequential_subtasks:
            return True
        context = context.parent
    return False


def take_rows(X, rows: np.ndarray):
    """Return some rows of an array, a data frame or a list; None of None."""
    return None if X is None else _safe_indexing(X, rows)
