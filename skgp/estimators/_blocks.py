"""Rows that do not fit in memory, or lie on other machines: who takes them, and what is checked.

A fit takes rows in blocks where it can (`BaseGP._takes_blocks`) and they are dask's, or what it
would hold of them in memory exceeds the budget; other fits load dask's rows where the budget has
room. The budget decides, and not the kind of array: an array and a memory map of it give one model.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.exceptions import DataConversionWarning
from sklearn.utils import check_consistent_length, column_or_1d, gen_batches
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from skgp.blocks import ArrayBlocks, Blocks, DaskBlocks, aligned, dask_rows, is_dask, some_numbers
from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._validation import distinct_labels, natural_dtype
from skgp.linalg.runtime import memory_budget, require_memory


def training_blocks(
    estimator: Any, X: Any, y: Any, sample_weight: Any, **others: Any
) -> Blocks | None:
    """The observations of a fit in blocks, or None where it holds all of them in memory.

    With blocks ``feature_names_in_`` and ``n_features_in_`` are set. `others` are arguments of the
    fit that blocks do not have. MemoryBudgetError where dask's rows must be loaded and there is no
    room.
    """
    lazy = is_dask(X)
    if lazy:
        _check_form(X, estimator)
    elif not (isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "fiu"):
        return None  # no table of real numbers
    takes = estimator._takes_blocks(X.shape[1]) and all(v is None for v in others.values())
    for name in ("warp_inputs", "heteroscedastic"):  # all rows are asked where these are True
        takes &= getattr(estimator, name, False) in (False, "auto")
    if lazy and takes:
        names = X._meta if hasattr(X, "columns") else X  # of a data frame an empty one
        validate_data(estimator, names, skip_check_array=True)
        blocks = DaskBlocks.of(X, _targets(y, estimator), _weights(sample_weight))
        _check_rows(len(blocks), X, estimator)
        return blocks
    row_bytes = defaults.ROW_COPIES * 8 * (X.shape[1] + 1)
    if lazy:
        n = sum(dask_rows(X)[1])
        what = f"{type(estimator).__name__} with these parameters holds all {n} rows, which"
        remedy = _REMEDY[is_classifier(estimator)]
        require_memory(n * row_bytes, what, remedy)
    budget = memory_budget()
    if not takes or len(X) * row_bytes <= budget:
        return None
    y = _targets(in_memory(y), estimator)
    check_consistent_length(X, y)
    validate_data(estimator, X, skip_check_array=True)
    size = int(min(defaults.BLOCK_ROWS, max(defaults.LEAST_BLOCK_ROWS, budget // row_bytes)))
    return ArrayBlocks(X, y, _weights(in_memory(sample_weight), len(X)), size)


_REMEDY = {
    False: "Give fewer rows, or take an estimator that reads them in blocks, as "
    "QSGPRegressor(basis='fourier')",
    True: "Give fewer rows, take a classifier that reads them in blocks, as SWSGPClassifier or "
    "QSGPClassifier, or give some at a time to "
    "QSGPClassifier(basis='fourier').partial_fit(X[rows].compute(), y[rows].compute(), classes)",
}


def _weights(given: Any, n_rows: int | None = None) -> Any:
    """Weights of the rows, dask's or an array (n,); a number serves all rows.

    ValueError as in memory where their shape is another; `n_rows` of dask's are not known.
    """
    if given is None:
        return None
    if isinstance(given, numbers.Number):
        return given if n_rows is None else np.broadcast_to(np.asarray(given), n_rows)
    weight = given if is_dask(given) else np.asarray(given)
    if weight.ndim != 1:
        raise ValueError(
            f"Sample weights must be 1D array or scalar, got {weight.ndim}D array. Expected either "
            "a scalar value or a 1D array with a weight for each row."
        )
    if n_rows is not None and len(weight) != n_rows:
        raise ValueError(f"sample_weight.shape == {weight.shape}, expected {(n_rows,)}!")
    return weight


def in_memory(X: Any) -> Any:
    """What dask holds, loaded: a data frame or an array; anything else as it is."""
    return X.compute() if is_dask(X) else X


def _targets(y: Any, estimator: Any) -> Any:
    """Targets (n,), dask's or an array: labels, or real numbers; ValueError as in memory."""
    if is_dask(y):
        if y.ndim == 2 and y.shape[1] == 1:
            message = "A column-vector y was passed when a 1d array was expected."
            warnings.warn(message, DataConversionWarning, stacklevel=2)
            y = y.iloc[:, 0] if hasattr(y, "columns") else y[:, 0]
        elif y.ndim != 1:
            raise _refused_targets(y)
    elif np.ndim(y) == 2 and np.shape(y)[1] > 1:
        raise _refused_targets(y)
    elif not (isinstance(y, np.ndarray) and y.ndim == 1):  # a column of a map is not copied
        y = column_or_1d(y, warn=True)
    if is_classifier(estimator):
        return y
    _check_real(y, "y")
    return y.astype(np.float64) if y.dtype.kind in "bO" else y


def _refused_targets(y: Any) -> ValueError:
    return ValueError(
        f"y should be a 1d array, got an array of {np.ndim(y)} dimensions instead, where rows are "
        "read in blocks: dask's, and those beyond memory_budget. Fit an estimator to each column, "
        "as sklearn.multioutput.MultiOutputRegressor does."
    )


def _check_form(X: Any, estimator: Any) -> None:
    """Refuse dask's X that is no table of real numbers, as what is in memory is refused."""
    if X.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {X.ndim}D array instead, of dask, for "
            f"{type(estimator).__name__}. Reshape it by X.reshape(-1, 1) if it has a single "
            "feature or X.reshape(1, -1) if it contains a single sample; of a data frame take "
            "[['name']]."
        )
    _check_real(X, "X")


def _check_real(column: Any, name: str) -> None:
    frame = column.ndim == 2 and hasattr(column, "columns")  # which dask's series have, too
    dtypes = column.dtypes if frame else [column.dtype]
    for dtype in dtypes:
        if dtype.kind in "cSUVMm" or dtype.name in ("str", "string"):
            remedy = {"c": "Complex data not supported: give its parts as columns."}
            raise ValueError(
                f"{name} must hold real numbers; got the dtype {dtype}. "
                + remedy.get(dtype.kind, "Convert it to numbers.")
            )


def _check_rows(n_rows: int, X: Any, estimator: Any) -> None:
    """Refuse dask's X without rows, as scikit-learn refuses an array."""
    if not n_rows:
        raise ValueError(
            f"Found array with 0 sample(s) (shape={(0, X.shape[1])}) while a minimum of 1 is "
            f"required by {type(estimator).__name__}."
        )


@dataclass(frozen=True)
class Moments:
    """Weighted mean and scatter of the targets of some rows, and their largest input."""

    n_rows: int
    weight: float  # sum
    mean: float
    scatter: float  # sum of squared deviations from the mean
    largest: float  # magnitude in X
    largest_target: float
    n_counts: int  # whole numbers of at least 0 among the targets

    @staticmethod
    def of(data: Data) -> Moments:
        """Of the observations of a block."""
        total = data.total
        mean = float(data.weighted_sum(data.y)) / total if total else 0.0
        scatter = float(data.weighted_sum((data.y - mean).square()))
        largest = [float(values.abs().max()) if len(data) else 0.0 for values in (data.X, data.y)]
        n_counts = int(((data.y >= 0) & (data.y == data.y.round())).sum())
        return Moments(len(data), total, mean, scatter, largest[0], largest[1], n_counts)

    def __add__(self, other: Moments) -> Moments:
        weight = self.weight + other.weight
        share, gap = other.weight / weight if weight else 0.0, other.mean - self.mean
        return Moments(
            self.n_rows + other.n_rows,
            weight,
            self.mean + share * gap,
            self.scatter + other.scatter + gap * gap * share * self.weight,
            max(self.largest, other.largest),
            max(self.largest_target, other.largest_target),
            self.n_counts + other.n_counts,
        )


def checked_moments(blocks: Blocks, dtype: str) -> Moments:
    """One pass over all rows; ValueError for what a fit refuses."""
    found = blocks.sum(Moments.of)
    for name, largest, most in (
        (f"X of dtype={dtype!r}", found.largest, defaults.LARGEST_INPUT[dtype]),
        ("y", found.largest_target, defaults.LARGEST_TARGET),
    ):
        if largest > most:
            raise ValueError(
                f"{name} must lie between -{most:g} and {most:g}; its largest magnitude is "
                f"{largest:g}. Drop such rows, or take other units."
            )
    if not found.n_rows:
        raise ValueError("sample_weight is 0 for every row. Give one row a positive weight.")
    return found


def check_all_counts(moments: Moments) -> None:
    """Refuse targets that are no counts."""
    bad = moments.n_rows - moments.n_counts
    if bad:
        raise ValueError(
            f"y must hold counts, whole numbers of at least 0; {bad} of {moments.n_rows} rows hold "
            "none. Correct or drop such rows, or take a likelihood for real numbers."
        )


def class_blocks(blocks: Blocks) -> tuple[np.ndarray, Blocks]:
    """Distinct labels of positive weight, and the blocks with indices of them as targets."""
    found = [labels for labels in blocks.labels(_distinct) if len(labels)]
    classes = distinct_labels(natural_dtype(np.concatenate(found)), "y") if found else np.empty(0)
    return classes, blocks.coded(partial(_codes, classes=classes))


def _distinct(y: Any) -> np.ndarray:
    if not len(y):
        return y
    found = distinct_labels(natural_dtype(y), "y")
    check_classification_targets(found)
    return found


def _codes(y: Any, *, classes: np.ndarray) -> np.ndarray:
    """Indices (n,) into the classes; of labels that only rows of weight 0 have, any."""
    codes = np.searchsorted(classes, natural_dtype(np.asarray(y)))
    return codes.clip(max=len(classes) - 1).astype(np.min_scalar_type(len(classes)))


def class_masses(data: Data, *, n_classes: int) -> np.ndarray:
    """Sums (n_classes,) of the weights of the rows of each class."""
    weight = None if data.weight is None else data.weight.numpy()
    return np.bincount(data.y.numpy().astype(np.int64), weight, n_classes).astype(np.float64)


def some_of(blocks: Blocks, backend: Any) -> Data:
    """Some observations at random: those from which hyper-parameters are learned."""
    return blocks.take(numbers_of_some(blocks, backend))


def numbers_of_some(blocks: Blocks, backend: Any) -> np.ndarray:
    """Rising numbers of these rows; the same for equal seeds."""
    room = memory_budget() // (defaults.ROW_COPIES * 8 * (blocks.n_columns + 1))
    size = int(min(defaults.SUBSET_ROWS, max(defaults.LEAST_SUBSET_ROWS, room)))
    return some_numbers(len(blocks), size, backend.generator())


#: Arguments of predictions that have a value a row, where they are arrays.
_BY_ROW = ("y", "exposure")
#: Predictions that are joint over the rows.
_JOINT = ("sample_y", "sample_f", "latent_mean_and_covariance")


def over_rows(method: Callable) -> Callable:
    """Decorate a prediction of each row of X, its first argument, to take any number of them.

    Of many rows in an array or a memory map it is worked out slice by slice. Of dask's rows it is a
    dask array in the chunks of X, or several: worked out, block by block, when they are asked for.
    Other arguments that have a value a row may be dask's or not.
    """
    signature, name = inspect.signature(method), method.__name__

    @functools.wraps(method)
    def predict(self, X, *args, **kwargs):
        many = isinstance(X, np.ndarray) and X.ndim == 2 and len(X) > defaults.BLOCK_ROWS
        if not many and not is_dask(X):
            return method(self, X, *args, **kwargs)
        given = signature.bind(self, X, *args, **kwargs).arguments
        arguments = {key: value for key, value in given.items() if key not in ("self", "X")}
        joint = arguments.get("return_cov") or name in _JOINT
        if not is_dask(X):
            check_is_fitted(self)
            return method(self, X, **arguments) if joint else _in_slices(self, name, X, arguments)
        if joint:
            raise ValueError(
                f"{name} is joint over the rows, which dask holds in blocks. Give some rows in "
                "memory: X[:1000].compute()."
            )
        return _lazily(self, name, X, arguments)

    return predict


def _in_slices(estimator: Any, name: str, X: np.ndarray, arguments: dict[str, Any]) -> Any:
    """Apply a method to slices of X, and join what it returns."""
    lengths = [len(X[rows]) for rows in gen_batches(len(X), defaults.BLOCK_ROWS)]
    alike, by_row = _split(arguments, lengths)
    found = [
        getattr(estimator, name)(X[rows], **alike, **{k: v[i] for k, v in by_row.items()})
        for i, rows in enumerate(gen_batches(len(X), defaults.BLOCK_ROWS))
    ]
    if not isinstance(found[0], tuple):
        return np.concatenate(found)
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def _lazily(estimator: Any, name: str, X: Any, arguments: dict[str, Any]) -> Any:
    """Apply a method to blocks of dask's rows; dask arrays in the form of what it returns."""
    import dask
    import dask.array as da

    check_is_fitted(estimator)
    _check_form(X, estimator)
    parts, lengths = dask_rows(X)
    _check_rows(sum(lengths), X, estimator)
    alike, by_row = _split(arguments, lengths)
    # A number a row and target, where rows are scored.
    example = np.empty((1, *np.shape(getattr(estimator, "y_scale_", 1.0))))
    if "y" not in arguments:
        one = X._meta_nonempty[:1] if hasattr(X, "columns") else np.ones((1, X.shape[1]))
        example = getattr(estimator, name)(one, **alike, **dict.fromkeys(by_row, np.ones(1)))
    asked = object.__new__(type(estimator))  # a fit replaces attributes, and changes none in place
    asked.__dict__.update(estimator.__dict__)
    shared = dask.delayed(asked, traverse=False)
    found = [
        getattr(shared, name)(part, **alike, **{k: v[i] for k, v in by_row.items()})
        for i, part in enumerate(parts)
    ]

    def joined(like: np.ndarray, pick: Callable) -> Any:
        return da.concatenate(
            [
                da.from_delayed(pick(part), (length, *like.shape[1:]), dtype=like.dtype)
                for part, length in zip(found, lengths, strict=True)
                if length
            ]
        )

    if not isinstance(example, tuple):
        return joined(example, lambda part: part)
    return tuple(joined(like, operator.itemgetter(i)) for i, like in enumerate(example))


def _split(arguments: dict[str, Any], lengths: list[int]) -> tuple[dict, dict]:
    """Arguments that serve all rows, and parts of those that have a value a row."""
    by_row = {key: value for key, value in arguments.items() if key in _BY_ROW and np.ndim(value)}
    alike = {key: value for key, value in arguments.items() if key not in by_row}
    return alike, {key: aligned(value, lengths, key) for key, value in by_row.items()}
