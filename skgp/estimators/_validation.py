"""What estimators check of X, y, labels and exposures beside what scikit-learn does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from scipy.special import logit, ndtri
from sklearn.utils.class_weight import compute_class_weight

from skgp.blocks import is_dask
from skgp.estimators._time import is_dates, refuse_dates, table_columns
from skgp.estimators.defaults import JOINT_MATRICES, LARGEST_INPUT, LARGEST_TARGET, LEAST_BASE_RATE
from skgp.kernels.scales import capped_weights
from skgp.learning.selection import class_codes
from skgp.linalg.runtime import memory_budget, require_memory

_ADVICE = {
    "input": "Drop or correct such rows, or impute what is missing in a pipeline, by "
    "sklearn.impute.SimpleImputer.",
    "target": "Drop the rows without a target; in a series, StateSpaceGPRegressor takes NaN for "
    "what was not observed.",
    "missing": "Drop or impute such rows.",
    "negative": "Correct or drop such rows, or take a likelihood for real numbers.",
    "fractional": "Round them if they are counts, give the counts of rates with their exposure, or "
    "take a likelihood for real numbers.",
    "shape": "X must be a table of numbers whose rows are of one length.",
    "sparse": "Sparse data was passed for X, which must be dense: X.toarray(). In a pipeline, "
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

    ValueError as it raises, with a remedy where y holds several targets; where the targets of a
    regression are dates; and for an input or target too large to be squared, naming value and row.
    """
    numeric, name = bool(params.get("y_numeric")), type(estimator).__name__
    if numeric:
        refuse_dates(y)
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
def told_of_text(X: Any, y: Any = None) -> Iterator[None]:
    """ValueError with a remedy where scikit-learn refuses X or y, or numeric y is text.

    y is None where it holds labels. Of text, dates, NaN and infinity in X it names the columns.
    """
    found = None if y is None or is_dask(y) else _first_text(y)
    if found is not None:
        raise ValueError(
            f"y holds text, such as {found!r}, where a regressor needs numbers. Take a classifier "
            "if these are labels, or convert them by y.astype(float)."
        )
    try:
        yield
    except (TypeError, ValueError) as error:
        if issparse(X):
            raise TypeError(_ADVICE["sparse"]) from error
        if "inhomogeneous" in str(error):
            raise ValueError(f"{_ADVICE['shape']} {error}") from error
        advice = _advice_on_text(X) or _advice_on_missing(X, str(error))
        if not advice:
            raise
        raise ValueError(advice) from error


def _advice_on_missing(X: Any, message: str) -> str:
    """Where X or y holds NaN or infinity, and the remedy; "" of other errors."""
    if message.startswith("Input y contains NaN"):
        return f"Input y contains NaN. {_ADVICE['target']}"
    if not message.startswith("Input X contains"):
        return ""
    try:
        missing = ~np.isfinite(np.asarray(X, dtype=np.float64))
    except (TypeError, ValueError):  # absent values of other kinds
        return ""
    if missing.ndim != 2:
        return ""
    rows = np.asarray(missing.any(1))
    names = np.asarray(getattr(X, "columns", np.arange(missing.shape[1])))[missing.any(0)]
    return (
        f"{message.splitlines()[0].rstrip('.')}, in the column(s) {listing(names.tolist())}; first "
        f"in row {int(rows.argmax())} ({rows.sum()} of {len(rows)} rows). {_ADVICE['input']}"
    )


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


def encode(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the index into ``classes`` of each label, shape (n,).

    ValueError names labels that are not among ``classes``.
    """
    index = {label: code for code, label in enumerate(classes.tolist())}
    labels = distinct_labels(y, "y")
    unseen = [label for label in labels.tolist() if label not in index]
    if unseen:
        raise ValueError(
            f"y holds labels that are not among the classes: {listing(unseen)}. The classes are "
            f"{listing(list(index))}. Leave such rows out, or fit with rows of every class "
            "(partial_fit: name all of them by classes= in the first call)."
        )
    codes = np.array([index[label] for label in labels.tolist()])
    return codes[np.searchsorted(labels, y)]


def class_weights(
    class_weight: dict | str,
    classes: np.ndarray,
    codes: np.ndarray,
    sample_weight: np.ndarray | None,
) -> np.ndarray:
    """Return the weight of each class, shape (n_classes,).

    ``class_weight`` holds weights by label, 1 where it is silent; "balanced" is inversely
    proportional to the (weighted) number of rows of the class. A key that is no class is an error
    only if a class goes without a weight: else it may be a class that has no row in a fold of
    cross-validation. ``codes`` (n,) index ``classes``.
    """
    if isinstance(class_weight, str):
        return compute_class_weight(
            class_weight, classes=np.arange(len(classes)), y=codes, sample_weight=sample_weight
        )
    labels = classes.tolist()
    unknown = [key for key in class_weight if key not in labels]
    silent = [label for label in labels if label not in class_weight]
    if unknown and silent:
        raise ValueError(
            f"class_weight has keys that are no classes, {listing(unknown)}, and no weight for "
            f"{listing(silent)}. The classes are {listing(labels)}."
        )
    weights = np.array([class_weight.get(label, 1.0) for label in labels], dtype=np.float64)
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError(
            f"class_weight must be positive and finite; got {class_weight}. To leave a class out, "
            "leave out its rows or give them sample_weight 0."
        )
    return weights


def one_vs_rest(codes: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the coding Y (n, c) in {-1., +1.}: c = 1 for two classes, else one column a class.

    ``codes`` (n,) run from 0; of two classes the column is +1 for code 1.
    """
    positive = np.array([1]) if n_classes == 2 else np.arange(n_classes)
    return np.where(codes[:, None] == positive, 1.0, -1.0)


def base_rate_offset(
    Y: np.ndarray,
    sample_weight: np.ndarray | None = None,
    *,
    link: str = "logit",
    cautious: bool = False,
) -> np.ndarray:
    r"""Return the constant latent function that predicts the base rates, shape (c,).

    .. math:: g^{-1}\Big(\sum_i w_i [Y_{ik} = 1] \Big/ \sum_i w_i\Big)

    with shares kept 1e-6 away from 0 and 1, where it is infinite, and weights capped: one row that
    outweighs all others by far is no base rate.

    ``Y`` (n, c) is in {-1., +1.}; g is the sigmoid of ``link``. ``cautious`` counts a row of each
    kind more: rows of a class may come later.
    """
    if cautious:
        Y = np.vstack([Y, np.ones_like(Y[:1]), -np.ones_like(Y[:1])])
        if sample_weight is not None:
            sample_weight = np.append(sample_weight, [sample_weight.mean()] * 2)
    share = np.average(Y > 0, axis=0, weights=capped_weights(sample_weight, class_codes(Y)))
    share = np.clip(share, LEAST_BASE_RATE, 1 - LEAST_BASE_RATE)
    return {"logit": logit, "probit": ndtri}[link](share)


def listing(labels: list) -> str:
    """Return up to ten labels as text."""
    text = ", ".join(map(repr, labels[:10]))
    return f"{text} and {len(labels) - 10} more" if len(labels) > 10 else text
