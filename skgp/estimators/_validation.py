"""What estimators check of X and y beside what scikit-learn does, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import validate_data

from skgp.linalg.memory import free_memory

_JOINT_MATRICES = 3  # of the size of a joint covariance, that are held at once
#: Largest magnitude of an input, by the dtype of a fit: squares of distances stay finite.
LARGEST_INPUT = {"float64": 1e100, "float32": 1e15}


def validate_training_data(estimator, X: ArrayLike, y: ArrayLike, **params):
    """Return X and y of a fit as `sklearn.utils.validation.validate_data` does.

    Raises
    ------
    ValueError
        As it does, with a remedy where y holds NaN; and for an input too large to be squared, of
        which the message names value, row and column.
    """
    try:
        X, y = validate_data(estimator, X, y, dtype=np.float64, **params)
    except ValueError as error:
        if "Input y contains NaN" not in str(error):
            raise
        raise ValueError(
            "Input y contains NaN. Drop the rows without a target; in a series, "
            "StateSpaceGPRegressor takes NaN for what was not observed."
        ) from error
    return _refuse_large(X, getattr(estimator, "dtype", "float64")), y


def bounded_inputs(X: np.ndarray, stationary: bool) -> np.ndarray:
    """Return inputs of a prediction, those beyond the bound of a fit moved to it.

    Nothing is as far away; a kernel that is not stationary grows without bound there.

    Raises
    ------
    ValueError
        If the kernel is not stationary and there is such an input.
    """
    limit = LARGEST_INPUT["float64"]
    if not stationary or not X.size or max(X.max(), -X.min()) <= limit:
        return _refuse_large(X, "float64")
    return np.clip(X, -limit, limit)


def check_joint_memory(n_rows: int, remedy: str) -> None:
    """Refuse a joint covariance of rows for which there is no room.

    Raises
    ------
    MemoryError
        Says how much it takes and how much there is.
    """
    need, free = _JOINT_MATRICES * 8.0 * n_rows**2, free_memory()
    if need > free:
        most = int((free / (_JOINT_MATRICES * 8.0)) ** 0.5)
        raise MemoryError(
            f"The joint covariance of {n_rows} rows takes {need / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free: room for {most} rows. {remedy}."
        )


def check_likelihood(estimator, base: type) -> None:
    """Say which estimators, derived from `base`, have a likelihood that this one lacks.

    Raises
    ------
    ValueError
        If there are any; else scikit-learn's own message is as good.
    """
    asked = getattr(estimator, "likelihood", None)
    own = _likelihoods(type(estimator))
    if not isinstance(asked, str) or asked in own:
        return
    takers = sorted(cls.__name__ for cls in _descendants(base) if asked in _likelihoods(cls))
    if takers:
        raise ValueError(
            f"The 'likelihood' parameter of {type(estimator).__name__} must be one of "
            f"{sorted(own)}; got {asked!r}, which these take: {', '.join(takers)}."
        )


def _likelihoods(cls: type) -> set[str]:
    """Values of the parameter of that name; empty for a class without it."""
    constraints = cls._parameter_constraints.get("likelihood", [None])
    return set(getattr(constraints[0], "options", ()))


def _descendants(base: type) -> Iterator[type]:
    """Classes of this package that derive from a class."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("skgp."):
            yield cls
            yield from _descendants(cls)


def _refuse_large(X: np.ndarray, dtype: str) -> np.ndarray:
    limit = LARGEST_INPUT[dtype]
    if X.size and max(X.max(), -X.min()) > limit:
        row, column = np.unravel_index(np.abs(X).argmax(), X.shape)
        raise ValueError(
            f"X must lie between -{limit:g} and {limit:g} for dtype={dtype!r}; got "
            f"{X[row, column]:g} in row {row}, column {column}. Drop the row, or give the column "
            "other units."
        )
    return X
