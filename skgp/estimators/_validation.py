"""What estimators check of X and y beside what scikit-learn does, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils.validation import validate_data

from skgp.estimators.defaults import JOINT_MATRICES, LARGEST_INPUT
from skgp.kernels import split_noise
from skgp.linalg.runtime import free_memory

_ADVICE = {
    "missing": "Drop or impute such rows.",
    "negative": "Correct or drop such rows, or take a likelihood for real numbers.",
    "fractional": "Round them if they are counts, give the counts of rates with their exposure, or "
    "take a likelihood for real numbers.",
}


def validate_training_data(estimator, X: ArrayLike, y: ArrayLike, **params):
    """Return X and y of a fit as `sklearn.utils.validation.validate_data` does.

    ValueError as it raises, with a remedy where y holds NaN; and for an input too large to be
    squared, naming value, row and column.
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

    Nothing is as far away; a kernel that is not stationary grows without bound there: ValueError.
    """
    limit = LARGEST_INPUT["float64"]
    if not stationary or not X.size or max(X.max(), -X.min()) <= limit:
        return _refuse_large(X, "float64")
    return np.clip(X, -limit, limit)


def check_joint_memory(n_rows: int, remedy: str) -> None:
    """Refuse a joint covariance of rows for which there is no room."""
    need, free = JOINT_MATRICES * 8.0 * n_rows**2, free_memory()
    if need > free:
        most = int((free / (JOINT_MATRICES * 8.0)) ** 0.5)
        raise MemoryError(
            f"The joint covariance of {n_rows} rows takes {need / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free: room for {most} rows. {remedy}."
        )


def check_likelihood(estimator, base: type) -> None:
    """Say which estimators, derived from `base`, have a likelihood that this one lacks.

    Where there are none, scikit-learn's own message is as good.
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


def check_counts(y: np.ndarray, name: str = "y") -> None:
    """Refuse what is not a count: a whole number of at least 0.

    ValueError names the first of them, its row, and the remedy; ``y`` (n,) has any dtype.
    """
    missing, negative = ~np.isfinite(y), y < 0
    bad = missing | negative | (y != np.rint(y))
    if not bad.any():
        return
    row = int(bad.argmax())
    kind = "missing" if missing[row] else "negative" if negative[row] else "fractional"
    raise ValueError(
        f"{name} must hold counts, whole numbers of at least 0; got {y[row].item()!r} in row {row} "
        f"({bad.sum()} of {len(y)} rows hold no count). {_ADVICE[kind]}"
    )


def check_exposure(exposure, n_rows: int, owner: object) -> np.ndarray | None:
    """Logarithms of the exposures of counts: what is added to their log-rates.

    Returns (n,), or None of None. ValueError if ``owner`` has no likelihood of counts, or if they
    are not one a row, positive and finite.
    """
    if exposure is None:
        return None
    if not getattr(owner, "_counts", False):
        likelihood = getattr(owner, "likelihood", "gaussian")
        raise ValueError(
            f"exposure is the time, area or population that a count is of, and needs "
            f"likelihood='poisson'; got likelihood={likelihood!r} of {type(owner).__name__}. "
            "Leave exposure out, or take DLMGPRegressor, SWSGPRegressor or StateSpaceGPRegressor "
            "with likelihood='poisson'."
        )
    values = np.asarray(exposure, dtype=np.float64)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim > 1 or (values.ndim == 1 and len(values) != n_rows):
        raise ValueError(
            f"exposure must be a number or one for each of the {n_rows} rows of X; got an array of "
            f"shape {values.shape}."
        )
    values = np.broadcast_to(values, n_rows)
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"exposure must be positive and finite; got {values[row].item()!r} in row {row}. A row "
            "without exposure has no count: leave it out, or give it sample_weight 0."
        )
    return np.log(values)


def refuse_noise(kernel: Kernel, owner: object) -> None:
    """Refuse a WhiteKernel summand in the kernel of a regressor of counts."""
    if split_noise(kernel)[1] is not None:
        raise ValueError(
            f"kernel={kernel} has a WhiteKernel, which is the noise of a Gaussian likelihood; "
            f"the counts of {type(owner).__name__} have none. Leave the WhiteKernel out."
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
