"""Times of any type as days, and predictions in the form and with the index of their rows.

A time stamp of any resolution is its whole days since an origin, a midnight, plus the rest of its
day over the length of a day, both from differences of integers: equal times are equal numbers,
whatever their resolution, and what is lost is one rounding of the sum. Time zones become UTC, and
a period its first moment. pandas and polars are never imported unless asked for.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skgp.blocks import is_dask
from skgp.estimators.defaults import LOST_GAP, OFFSET_RANGES
from skgp.kernels.scales import far_apart
from skgp.linalg import warn_caller

_DAY = np.timedelta64(1, "D")  # mathematical
_REMEDY = "Give dates: datetime64, or time stamps of pandas or polars."


@dataclass(frozen=True)
class Times:
    """How a fit took its dates, and how later ones are read."""

    origin: np.datetime64  # a midnight, in days
    zoned: bool  # of time stamps with a time zone, in UTC

    @classmethod
    def of(cls, column: Any) -> Times:
        """Of the dates of a fit: the origin is the midnight before the first of them."""
        found, zoned = stamps(column)
        if not len(found):
            raise ValueError("X has 0 rows, and a fit needs one or more.")
        return cls(found.astype("datetime64[D]").min(), zoned)

    def days(self, column: Any) -> np.ndarray:
        """Days (n,) since the origin; ValueError where the column is no dates like those of fit."""
        if not is_dates(column):
            raise ValueError(
                f"X holds numbers as times, and fit had dates. {_REMEDY} A number of days x is the "
                "date model.time_origin_ + x * np.timedelta64(1, 'D')."
            )
        found, zoned = stamps(column)
        if zoned != self.zoned:
            kinds = ("without a time zone", "with a time zone")
            raise ValueError(
                f"X holds times {kinds[zoned]}, and fit had times {kinds[self.zoned]}. In pandas, "
                ".dt.tz_localize(zone) says where times were taken, and tz_localize(None) drops "
                "the zone: do the same to both."
            )
        days = found.astype("datetime64[D]")
        return (days - self.origin).astype(np.float64) + (found - days) / _DAY


def table_columns(X: Any) -> list[Any] | None:
    """Columns of a data frame, of an array that holds more than numbers, or of dates alone.

    None of anything else, which holds numbers or is for scikit-learn to refuse.
    """
    if is_dask(X):
        return None
    if hasattr(X, "columns") and hasattr(X, "shape"):
        names = list(X.columns)
        positional = getattr(X, "iloc", None)  # names may be repeated
        if positional is not None:
            return [positional[:, place] for place in range(len(names))]
        return [X[name] for name in names]
    if isinstance(X, list | tuple):
        rows = (row if isinstance(row, list | tuple) else (row,) for row in X)
        if not any(map(_is_date, next((row for row in rows if not absent(row).any()), ()))):
            return None
        X = np.array(X, dtype=object)
    shape: tuple[int, ...] = getattr(X, "shape", ())
    if len(shape) == 1 and shape[0] and is_dates(X):
        return [X]
    if len(shape) == 2 and isinstance(X, np.ndarray) and X.dtype.kind in "MmO":
        return list(X.T)
    return None


def is_dates(column: Any, name: str = "X") -> bool:
    """Whether a column holds dates: by its type, of Python objects by the first that is there.

    ValueError of durations, which are no dates and have a unit that a number has not.
    """
    dtype = getattr(column, "dtype", None)
    kind = getattr(dtype, "kind", None)
    if kind == "m" or str(dtype).startswith("Duration"):
        raise ValueError(
            f"{name} holds durations ({dtype}). Divide them by np.timedelta64(1, 'D') for days"
            f"{', or give dates' if name == 'X' else ''}."
        )
    if kind == "M" or str(dtype).startswith(("period", "Datetime", "Date")):
        return True
    if kind != "O" or not len(column):
        return False
    values = column if isinstance(column, np.ndarray) else column.to_numpy()
    return _is_date(next((value for value in values if not _is_absent(value)), None))


def absent(values: Iterable[Any]) -> np.ndarray:
    """Which of some Python objects (n,) are missing: None, or unlike themselves as NaN, NaT, NA."""
    return np.array([_is_absent(value) for value in values], dtype=bool)


def _is_absent(value: Any) -> bool:
    try:
        return value is None or not bool(value == value)
    except (TypeError, ValueError):  # NA of pandas has no truth value; an array is there
        return not isinstance(value, np.ndarray)


def _is_date(value: Any) -> bool:
    return isinstance(value, datetime.date | np.datetime64) or hasattr(value, "to_timestamp")


def stamps(column: Any) -> tuple[np.ndarray, bool]:
    """Time stamps (n,) of a column of dates, in UTC, and whether they had a time zone.

    ValueError where one is missing, no date, or of another kind than the first.
    """
    dtype = getattr(column, "dtype", None)
    unit = getattr(dtype, "unit", None) or getattr(dtype, "time_unit", None)
    zoned = any(getattr(dtype, name, None) is not None for name in ("tz", "time_zone"))
    if str(dtype).startswith("period"):
        found = np.asarray(column.array.to_timestamp())
    elif getattr(dtype, "kind", "") == "O":
        found, zoned = _of_objects(column)
    elif isinstance(column, np.ndarray) or unit is None:
        found = np.asarray(column).astype("datetime64", copy=False)
    else:
        found = np.asarray(column, dtype=f"datetime64[{unit}]")
    missing = np.isnat(found)
    if missing.any():
        raise ValueError(
            f"X has no time (NaT) in row {int(missing.argmax())} ({missing.sum()} of "
            f"{len(found)} rows). Drop such rows; of what was not observed, y is NaN."
        )
    return found, zoned


def _of_objects(column: Any) -> tuple[np.ndarray, bool]:
    """The same of Python objects: dates, time stamps, periods."""
    values = [
        value.to_timestamp() if hasattr(value, "to_timestamp") else value
        for value in (column if isinstance(column, np.ndarray) else column.to_numpy())
    ]
    values = [np.datetime64("NaT") if _is_absent(value) else value for value in values]
    zones = {getattr(v, "tzinfo", None) is not None for v in values if not _is_absent(v)}
    if len(zones) > 1:
        raise ValueError("X mixes times with and without a time zone. Give all of them one.")
    if zones == {True}:
        utc = datetime.UTC
        values = [v if _is_absent(v) else v.astimezone(utc).replace(tzinfo=None) for v in values]
    try:
        return np.array([np.datetime64(_exact(value)) for value in values]), zones == {True}
    except (TypeError, ValueError) as error:
        raise ValueError(f"X holds among its dates what is none: {error}. {_REMEDY}") from error


def _exact(value: Any) -> Any:
    """What NumPy reads: a time stamp of pandas with its nanoseconds; TypeError of text."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is text, which pandas.to_datetime reads")
    return value.to_datetime64() if hasattr(value, "to_datetime64") else value


def check_resolution(times: np.ndarray) -> None:
    """Refuse times (n,) whose floating-point type cannot tell neighbours apart, as of unix seconds.

    That of integers is float64. ValueError where rounding moves times by a tenth of the mean gap,
    because they lie far from 0.
    """
    if times.dtype.kind not in "fiu" or len(times) < 2 or not np.isfinite(times).all():
        return
    if times.dtype.kind == "f":
        span = float(np.ptp(times))
    else:
        span, times = float(int(times.max()) - int(times.min())), times.astype(np.float64)
    largest = np.abs(times).max()
    unit = float(np.spacing(largest))
    if 0 < span * OFFSET_RANGES < float(largest) and unit > LOST_GAP * span / (len(times) - 1):
        raise ValueError(
            f"X holds times up to {largest:.6g}, which {times.dtype} rounds to multiples of "
            f"{unit:.3g}: {len(np.unique(times))} of {len(times)} are left. Give dates "
            "(datetime64), float64, or times since an origin near them."
        )


def warn_of_far_times(model: Any, X: np.ndarray) -> None:
    """Warn of times of X (n, d) so far from all others that no season is sought up to there."""
    if not model._is_default or model._place is None:
        return
    times = np.unique(X[:, model._place])
    far: Any = times[far_apart(times)]
    if not len(far):
        return
    if model._table is not None and model._table.times is not None:
        seconds = (far * (_DAY / np.timedelta64(1, "s"))).astype("timedelta64[s]")
        far = model._table.times.origin + seconds
    warn_caller(
        f"X has times far from all others, {', '.join(map(str, far[:3]))} ({len(far)} of "
        f"{len(times)}): seasons are sought without them. Correct such times, or leave them out, "
        "if they are wrong."
    )


def warn_of_dated_index(X: Any, names: Sequence[Any]) -> None:
    """Warn of a data frame whose index holds the times, which no estimator reads."""
    dtype = getattr(getattr(X, "index", None), "dtype", None)  # of a list a method
    if getattr(dtype, "kind", "") == "M" or str(dtype).startswith("period"):
        taken = f"the column {names[0]!r} is" if len(names) == 1 else "none of its columns is"
        warn_caller(
            f"X has dates in its index, which is not read, and {taken} taken as time. If the index "
            "is, make it a column: X.reset_index(), and name it by time=. If not, drop it: "
            "X.reset_index(drop=True)."
        )


class IndexedOutput:
    """`set_output` of an estimator whose predictions are decorated by `framed`."""

    def set_output(self, *, transform: str | None = None):
        """Choose the container of predictions.

        Parameters
        ----------
        transform : {"default", "pandas", "polars"} or None, default=None
            "pandas" returns Series and DataFrames with the index of X: its own, or its times.
            None changes nothing.

        Returns
        -------
        object
            The estimator.
        """
        if transform not in ("default", "pandas", "polars", None):
            raise ValueError(
                f'transform must be "default", "pandas" or "polars"; got {transform!r}.'
            )
        if transform is not None:
            # The name of scikit-learn's own, which its `clone` keeps.
            self._sklearn_output_config = {"transform": transform}
        return self


def framed(*names: str, columns: Callable | None = None) -> Callable[[Callable], Callable]:
    """Decorate a prediction to return what `set_output` asked for.

    `names` are of the arrays (n,) that it may return; `columns` maps the estimator and the
    arguments of the call by name to those of an array (n, k).
    """

    def decorator(method: Callable) -> Callable:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def predict(self, X, *args, **kwargs):
            found = method(self, X, *args, **kwargs)
            form = getattr(self, "_sklearn_output_config", {}).get("transform", "default")
            if form == "default" or is_dask(X):
                return found
            arrays, given = found if isinstance(found, tuple) else (found,), None
            if columns is not None:
                given = columns(self, signature.bind(self, X, *args, **kwargs).arguments)
            tables = _tables(X, arrays, names, form, given)
            return tables if isinstance(found, tuple) else tables[0]

        return predict

    return decorator


def _tables(
    X: Any, arrays: Sequence[np.ndarray], names: tuple[str, ...], form: str, columns: Any
) -> tuple[Any, ...]:
    """A Series of each array (n,), a DataFrame of each (n, k), in the library `form`."""
    library, found = importlib.import_module(form), []
    options = _options(X, form, library)
    for values, name in zip(arrays, [*names, *names[-1:] * len(arrays)], strict=False):
        if values.ndim == 1:
            found.append(library.Series(name=name, **options(values)))
            continue
        labels = range(values.shape[1]) if columns is None else columns
        # polars has text alone for the names of columns
        table = {
            str(key) if form == "polars" else key: c
            for key, c in zip(labels, values.T, strict=True)
        }
        found.append(library.DataFrame(**options(table)))
    return tuple(found)


def _options(X: Any, form: str, library: Any) -> Callable[[Any], dict[str, Any]]:
    """Arguments of a Series or a DataFrame, from its values."""
    if form == "polars":
        return lambda values: {"values" if isinstance(values, np.ndarray) else "data": values}
    index = getattr(X, "index", None)  # of a list a method
    if isinstance(X, library.Index):
        index = X
    elif not isinstance(index, library.Index):
        dated = table_columns(X)
        index = library.Index(dated[0]) if dated is not None and is_dates(dated[0]) else None
    return lambda values: {"data": values, "index": index}
