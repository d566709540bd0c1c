"""What estimators check of X, y, labels and exposures beside what scikit-learn does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import issparse

from skgp.blocks import is_dask
from skgp.estimators._time import absent, is_dates, table_columns
from skgp.estimators.defaults import JOINT_MATRICES, LARGEST_INPUT, LARGEST_TARGET
from skgp.linalg.runtime import memory_budget, require_memory

_ADVICE = {
    "input": "Drop or correct such rows, or impute what is missing in a pipeline, by "
    "sklearn.impute.SimpleImputer.",
    "target": "Drop the rows without a target; in a series, StateSpaceGPRegressor takes NaN for "
    "what was not observed.",
    "label": "Drop the rows without a label.",
    "infinite": "Correct or drop such rows.",
    "missing": "Drop or impute such rows.",
    "negative": "Correct or drop such rows, or take a likelihood for real numbers.",
    "fractional": "Round them if they are counts, give the counts of rates with their exposure, or "
    "take a likelihood for real numbers.",
    "shape": "X must be a table of numbers whose rows are of one length.",
    "sparse": "Sparse data was passed for X, which must be dense: X.toarray(), or of a DataFrame "
    "X.sparse.to_dense(). In a pipeline, "
    "OneHotEncoder(sparse_output=False), or sparse_threshold=0 of a ColumnTransformer.",
    "text": "Encode categories by sklearn.preprocessing.OneHotEncoder in a "
    "sklearn.compose.make_column_transformer, convert text dates by pandas.to_datetime, or drop "
    "such columns.",
    "dates": "Give days since a first date, (X - date) / np.timedelta64(1, 'D'), or take "
    "StateSpaceGPRegressor or StateSpaceGPClassifier, whose time= is a column of dates.",
}


def validate_training_data(
    estimator, X: ArrayLike, y: ArrayLike, *, one_target: str | None = "", **params: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return X and y of a fit as the estimator's ``_validated`` does.

    y is (n,) or, if `one_target` is None, (n, t) of several targets; else that says where the
    estimator takes one alone, such as " with solver='sgd'", or nothing if everywhere.

    ValueError as it raises, with a remedy where y holds several targets, and for an input or target
    too large to be squared, naming value and row.
    """
    numeric, name = bool(params.get("y_numeric")), type(estimator).__name__
    several = one_target is None and not issparse(y)
    try:
        inputs, targets = estimator._validated(X, y, multi_output=several, **params)
    except ValueError as error:
        if "y should be a 1d array" not in str(error):
            raise
        each = f"sklearn.multioutput.MultiOutput{'Regressor' if numeric else 'Classifier'}"
        shared = ", and GaussianProcessRegressor one kernel for all" if numeric else ""
        raise ValueError(
            f"{error} {name}{one_target or ''} takes one target; of several, {each}({name}(...)) "
            f"fits one model each{shared}."
        ) from error
    targets = targets[:, 0] if targets.ndim == 2 and targets.shape[1] == 1 else targets
    targets = _refuse_large(targets) if numeric else targets
    return _refuse_large(inputs, getattr(estimator, "dtype", "float64")), targets


@contextmanager
def told_of_text(X: Any, y: Any = None, *, numeric: bool = False) -> Iterator[None]:
    """ValueError with a remedy where scikit-learn refuses X or y, or takes what is no number.

    That is text and dates where y is `numeric`, objects without a value (None, NA), of which
    scikit-learn makes NaN, and masked values, of which it takes what is under the mask. Of text,
    dates, NaN and infinity in X it names the columns.
    """
    _refuse_masked(X, "X")
    if not (y is None or is_dask(y) or issparse(y)):
        _refuse_masked(y, "y")
        check_targets(y, numeric)
    try:
        yield
    except (TypeError, ValueError) as error:
        if issparse(X) or "Sparse data was passed" in str(error):
            raise TypeError(_ADVICE["sparse"]) from error
        if "inhomogeneous" in str(error):
            raise ValueError(f"{_ADVICE['shape']} {error}") from error
        advice = (
            _advice_on_text(X)
            or _advice_on_missing(X, str(error))
            or _advice_on_infinity(y, str(error))
            or _advice_on_names(X, str(error))
        )
        if not advice:
            raise
        raise ValueError(advice) from error


@contextmanager
def told_by_rows(rows: np.ndarray | None) -> Iterator[None]:
    """ValueError names a row as the caller counts it, where some `rows` of all are validated."""
    try:
        yield
    except ValueError as error:
        if rows is None:
            raise
        told = re.sub(r"\brow (\d+)", lambda found: f"row {rows[int(found[1])]}", str(error))
        raise ValueError(told) from error


def _refuse_masked(values: Any, name: str) -> None:
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name} is a masked array without values{_places(np.ma.getmaskarray(values))} Drop "
            f"such rows, or give what {name}.filled(np.nan) returns where NaN is taken or imputed."
        )


def check_targets(y: Any, numeric: bool) -> None:
    """ValueError of targets without a value; if `numeric` of text and dates, too."""
    values = np.asarray(y)
    if numeric and values.dtype.kind not in "biuf":
        # Of objects scikit-learn makes numbers, of arrays of text not even where they spell such.
        text = values.ravel()[:1].tolist() if values.dtype.kind in "SU" else [_first_text(values)]
        if text not in ([], [None]):
            raise ValueError(
                f"y holds text, such as {text[0]!r}, where a regressor needs numbers. Take a "
                "classifier if these are labels, or convert them by y.astype(float)."
            )
        if is_dates(np.array(y[:1], dtype=object) if isinstance(y, list | tuple) else y, "y"):
            raise ValueError(
                "y holds dates, which have no unit to be predicted in. Give numbers, such as days "
                "since a date: (y - date) / np.timedelta64(1, 'D')."
            )
    objects = values.dtype == object
    missing = absent(values.ravel()).reshape(values.shape) if objects else values != values
    if np.any(missing):
        advice = _ADVICE["target" if numeric else "label"]
        raise ValueError(f"Input y contains NaN{_places(missing)} {advice}")


def _places(bad: Any) -> str:
    """The first of the rows (n,) or (n, d) with what is bad, and how many they are."""
    rows = np.asarray(np.atleast_1d(bad).any(axis=tuple(range(1, np.ndim(bad)))))
    return f"; first in row {int(rows.argmax())} ({rows.sum()} of {len(rows)} rows)."


def _advice_on_names(X: Any, message: str) -> str:
    """Which columns of a data frame share a name, or that there are none; "" of other errors."""
    if message.startswith("at least one array"):
        return f"X has no columns: its shape is {X.shape}. Give it one or more."
    if "unique column names" not in message:
        return ""
    repeated = [name for name, count in Counter(X.columns).items() if count > 1]
    return (
        f"X has several columns of the name {listing(repeated)}. Give each a name of its own, or "
        "drop the copies: X.loc[:, ~X.columns.duplicated()]."
    )


def _advice_on_missing(X: Any, message: str) -> str:
    """Where X holds NaN or infinity, and the remedy; "" of other errors."""
    if "NAType" in message:  # of pandas among objects, which scikit-learn takes for no number
        message = "Input X contains NaN"
    if not message.startswith("Input X contains"):
        return ""
    try:
        as_numbers = {"na_value": np.nan} if hasattr(X, "iloc") else {}  # NA of pandas
        table = X.to_numpy(np.float64, **as_numbers) if as_numbers else np.asarray(X, np.float64)
        missing = ~np.isfinite(table)
    except (TypeError, ValueError):  # absent values of other kinds
        values = np.asarray(X, dtype=object)
        missing = absent(values.ravel()).reshape(values.shape)
    if missing.ndim != 2 or not missing.any():
        return ""
    names = np.asarray(getattr(X, "columns", np.arange(missing.shape[1])))[missing.any(0)]
    return (
        f"{message.splitlines()[0].rstrip('.')}, in the column(s) {listing(names.tolist())}"
        f"{_places(missing)} {_ADVICE['input']}"
    )


def _advice_on_infinity(y: Any, message: str) -> str:
    """Where y holds infinity, and the remedy; "" of other errors."""
    if not message.startswith("Input y contains infinity"):
        return ""
    bad = np.isinf(np.asarray(y, dtype=np.float64))
    return f"{message.rstrip('.')}{_places(bad)} {_ADVICE['infinite']}"


def _advice_on_text(X: Any) -> str:
    """What of X is text or dates, and the remedy; "" of other things."""
    columns = table_columns(X)
    if columns is None:
        found = None if is_dask(X) else _first_text(X)
        return "" if found is None else f"X holds text, such as {found!r}. {_ADVICE['text']}"
    names = list(getattr(X, "columns", range(len(columns))))
    dates = [name for name, column in zip(names, columns, strict=True) if is_dates(column)]
    if dates:
        return f"X holds dates in the column(s) {listing(dates)}. {_ADVICE['dates']}"
    texts = {n: _first_text(column) for n, column in zip(names, columns, strict=True)}
    texts = {name: value for name, value in texts.items() if value is not None}
    if not texts:
        return ""
    such = next(iter(texts.values()))
    return (
        f"X holds text in the column(s) {listing(list(texts))}, such as {such!r}. {_ADVICE['text']}"
    )


def _first_text(values: Any) -> str | None:
    """The first string that is no number; None without any."""
    values = np.asarray(values)
    for value in values.ravel() if values.dtype.kind in "OSU" else ():
        if isinstance(value, str):
            try:
                float(value)
            except ValueError:
                return str(value)
    return None


def is_valid(estimator: object, X: ArrayLike) -> bool:
    """Whether X is as `validate_data` would return it, for the estimator's later methods.

    It takes 0.07 ms, a third of a prediction of one row.
    """
    return (
        type(X) is np.ndarray
        and X.dtype == np.float64
        and X.ndim == 2
        and len(X) > 0
        and X.shape[1] == getattr(estimator, "n_features_in_", None)
        and not hasattr(estimator, "feature_names_in_")
        and getattr(estimator, "_table", None) is None
        and bool(np.isfinite(X).all())
    )


def bounded_inputs(X: np.ndarray, stationary: bool) -> np.ndarray:
    """Return inputs of a prediction, those beyond the bound of a fit moved to it.

    Nothing is as far away; a kernel that is not stationary grows without bound there: ValueError.
    """
    limit = LARGEST_INPUT["float64"]
    if not stationary or not X.size or max(X.max(), -X.min()) <= limit:
        return _refuse_large(X, "float64")
    return np.clip(X, -limit, limit)


def check_joint_memory(n_rows: int, remedy: str, n_targets: int = 1) -> None:
    """Refuse joint covariances of rows, one a target, for which there is no room."""
    entry = (JOINT_MATRICES + n_targets - 1) * 8.0
    most = int((memory_budget() / entry) ** 0.5)
    what = f"The joint covariance of {n_rows} rows"
    require_memory(entry * n_rows**2, what, f"{remedy} (there is room for {most})")


def checked_levels(quantiles: Any) -> np.ndarray:
    """Levels of quantiles, () or (q,), as an array."""
    levels = np.asarray(quantiles, dtype=np.float64)
    if levels.ndim > 1 or levels.size == 0 or not ((levels > 0) & (levels < 1)).all():
        raise ValueError(
            "quantiles must be one probability or a list of them, strictly between 0 and 1; "
            f"got {quantiles!r}. Give shares, such as 0.05 for 5%."
        )
    return levels


def ends_of(coverage: float) -> list[float]:
    """Levels of the two ends of a central interval."""
    if not 0 < coverage < 1:
        raise ValueError(
            f"coverage must lie strictly between 0 and 1; got {coverage!r}. Give a share, such as "
            "0.95 for 95%."
        )
    tail = (1 - coverage) / 2
    return [tail, 1 - tail]


def check_n_samples(n_samples: Any) -> None:
    """Refuse a number of draws that is none."""
    if not isinstance(n_samples, Integral) or isinstance(n_samples, bool) or n_samples < 0:
        raise ValueError(
            f"n_samples must be a whole number of draws, 0 or more; got {n_samples!r}. Give one "
            "such as n_samples=100."
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
            "Leave exposure out, or take DLMGPRegressor, SWSGPRegressor, StateSpaceGPRegressor or "
            "VecchiaGPRegressor with likelihood='poisson'."
        )
    if (text := _first_text(exposure)) is not None:
        raise ValueError(
            f"exposure holds text, such as {text!r}; give numbers, one for each row of X, and of a "
            "column of a DataFrame its values."
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


def _refuse_large(values: np.ndarray, dtype: str | None = None) -> np.ndarray:
    """Refuse inputs of a fit of that dtype, or targets, that are too large to be squared."""
    limit = LARGEST_TARGET if dtype is None else LARGEST_INPUT[dtype]
    if values.size and max(float(values.max()), -float(values.min())) > limit:
        place = np.unravel_index(np.abs(values).argmax(), values.shape)
        name = "y" if dtype is None else f"X of dtype={dtype!r}"
        column = "" if dtype is None else f", column {place[1]}"
        raise ValueError(
            f"{name} must lie between -{limit:g} and {limit:g}; got {values[place]:g} in row "
            f"{place[0]}{column}. Drop the row, or take other units."
        )
    return values


def natural_dtype(y: np.ndarray) -> np.ndarray:
    """Return objects of one Python type other than str as an array of that type.

    scikit-learn reads an array of objects as labels only if they are strings.
    """
    if y.dtype != object or len({type(label) for label in y}) != 1 or isinstance(y[0], str):
        return y
    return np.array(y.tolist())


def distinct_labels(labels: ArrayLike, name: str) -> np.ndarray:
    """Return the sorted distinct labels.

    ValueError names the types where they have no order, as numbers among strings.
    """
    labels = np.asarray(labels)
    try:
        return np.unique(labels)
    except TypeError as error:
        types = sorted({type(label).__name__ for label in labels})
        raise ValueError(
            f"{name} mixes labels of the types {types}, which have no order. "
            "Convert them to one type."
        ) from error


def listing(labels: list) -> str:
    """Return up to ten labels as text."""
    text = ", ".join(map(repr, labels[:10]))
    return f"{text} and {len(labels) - 10} more" if len(labels) > 10 else text
