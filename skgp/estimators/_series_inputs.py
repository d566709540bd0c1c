"""X of a series: which column is time, which others are covariates and of what kind."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import check_array, check_X_y, validate_data

from skgp.estimators._base import BaseGP
from skgp.estimators._kernels import split_terms
from skgp.estimators._parameters import take_rows
from skgp.estimators._time import (
    Times,
    absent,
    check_resolution,
    is_dates,
    table_columns,
    warn_of_dated_index,
)
from skgp.estimators._validation import listing, told_of_text
from skgp.estimators.defaults import SMOOTH_COVARIATES, WIDE_PRIOR
from skgp.inference.markov.terms import Categorical, Linear, Polynomial, Smooth, Step, Term, Terms

_KINDS = {"linear": Linear, "flag": Linear, "categorical": Categorical, "smooth": Smooth}


@dataclass(frozen=True)
class Table:
    """How a fit took the columns of X, and how those of a prediction are read."""

    place: int | None  # of time; None where columns are terms of an additive model
    times: Times | None  # None where times are numbers
    names: Sequence[Any]
    kinds: Mapping[int, str] = field(default_factory=dict)  # of each covariate
    levels: Mapping[int, np.ndarray] = field(default_factory=dict)  # of the categorical ones

    def read(self, columns: Sequence[Any]) -> np.ndarray:
        """X (n, d): days, numbers, and the places of levels, the new ones after those of fit.

        ValueError where times are not of the kind of those of fit.
        """
        if len(columns) != len(self.names):  # for scikit-learn to refuse
            return np.empty((len(columns[0]), len(columns)))
        return np.column_stack([self._numbers(j, column) for j, column in enumerate(columns)])

    def _numbers(self, j: int, column: Any) -> np.ndarray:
        if j in self.levels:
            known, values = self.levels[j], _levels(column, self.names[j])
            if values.dtype.kind != known.dtype.kind:
                text = known.dtype.kind == "U"  # of any length, which known.dtype is not
                values = _written(column) if text else self._cast(j, values)
            code = np.searchsorted(known, values).clip(max=len(known) - 1)
            new = len(known) + np.unique(values, return_inverse=True)[1]
            place = np.where(known[code] == values, code, new).astype(np.float64)
            # A missing number is no level; scikit-learn refuses it.
            return np.where(np.isnan(values), np.nan, place) if values.dtype.kind == "f" else place
        if self.times is not None and j == self.place:
            return self.times.days(column)
        if is_dates(column):
            raise ValueError(
                "X holds dates, and fit had numbers as times. Fit with dates, or give numbers in "
                "the unit of those of fit."
                if j == self.place
                else f"X holds dates in the column {self.names[j]!r}, which is not time. Convert "
                "it to numbers, or name it by time=."
            )
        values = np.asarray(column)
        if j == self.place:
            check_resolution(values)
        return self._cast(j, values)

    def _cast(self, j: int, values: np.ndarray) -> np.ndarray:
        """Values (n,) of a column as numbers; ValueError names the column that holds others."""
        try:
            return values.astype(np.float64)
        except ValueError as error:
            remedy = (
                "Give dates: np.asarray(column, dtype='datetime64[s]'), or pandas.to_datetime."
                if j == self.place
                else "Give numbers, or name it 'categorical' in covariates."
            )
            raise ValueError(
                f"X holds text in the column {self.names[j]!r}, which fit takes as numbers "
                f"({error}). {remedy}"
            ) from error


class SeriesInputs(BaseGP):
    """X of numbers, or with a column of times and covariates.

    Parameters
    ----------
    time : str, int or None, default=None
        Name or position of the column of times. None is a column of dates, or the only column.

    Attributes
    ----------
    time_origin_ : numpy.datetime64
        Where times are dates, the midnight from which the days of the model count.
    covariate_kinds_ : dict
        Kind of each column beside the times, by name or position.
    component_columns_ : list of int
        Column of X that each column of `predict_components` is a function of.
    """

    time: str | int | None
    covariates: str | dict
    trend: int | None
    n_inducing: int | str | None
    #: Columns of X that the model sees.
    _columns: list[int]
    #: None where X holds numbers that are taken as they are.
    _table: Table | None = None
    #: Beside the process, if there are any.
    _terms: Terms | None = None

    @property
    def time_origin_(self) -> np.datetime64:
        """The midnight from which the days of the model count, where times are dates."""
        if self._table is None or self._table.times is None:
            raise AttributeError("Times are numbers, which count from 0; give dates to fit.")
        return self._table.times.origin

    def _validated(self, X: ArrayLike, *y: ArrayLike, reset: bool = True, **checks: bool) -> Any:
        columns = table_columns(X)
        if columns is None and (self.time is not None if reset else self._table is not None):
            found = np.asarray(X)
            columns = list(found.T) if found.ndim == 2 and found.size else None
        table = self._read(X, columns) if reset else self._table
        if table is None or columns is None:
            if not reset and any(map(is_dates, columns or ())):
                Table(0, None, [0]).read([columns[0]] if columns else [])
            _check_numbers(X)
            if reset:
                self._table = None
            return super()._validated(X, *y, reset=reset, **checks)
        alone = np.ndim(X) < 2  # dates
        if not alone:  # names and number of columns
            validate_data(self, X, reset=reset, skip_check_array=True)
        numbers = table.read(columns)
        if reset:
            self._table = table
        if alone:
            return super()._validated(numbers, *y, reset=reset, **checks)
        check = check_X_y if y else partial(check_array, input_name="X")
        with told_of_text(numbers, *y, numeric=checks.get("y_numeric", False)):
            return check(numbers, *y, dtype=np.float64, estimator=self, **checks)

    def _read(self, X: Any, columns: list[Any] | None) -> Table | None:
        """How the columns of a fit are taken; None where they are numbers alike."""
        if columns is None:
            self._check_no_time(X)
            return None
        names = list(getattr(X, "columns", range(len(columns))))
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(
                f"X has several columns of the name {listing(repeated)}. Give each a name of its "
                "own, or drop the copies: X.loc[:, ~X.columns.duplicated()]."
            )
        dates = [j for j, column in enumerate(columns) if is_dates(column)]
        place = _place(self.time, names, dates)
        if self.time is None and not dates:
            warn_of_dated_index(X, names)
        if place is None:
            self._check_no_time(X)
            return None
        times = Times.of(columns[place]) if place in dates else None
        kinds = _kinds(self.covariates, names, columns, place)
        if times is None and not kinds and self.time is None:
            return None
        levels = {
            j: np.unique(_levels(columns[j], names[j]))
            for j, kind in kinds.items()
            if kind == "categorical"
        }
        return Table(place, times, names, kinds, levels)

    def _check_no_time(self, X: Any) -> None:
        """Refuse what needs a column of times."""
        if self.covariates != "auto":
            raise ValueError(
                "covariates are columns beside one of times. Name it by time=, or leave covariates "
                "out for an additive model."
            )
        if self.trend is not None and np.ndim(X) == 2 and np.shape(X)[1] > 1:
            raise ValueError(
                f"trend={self.trend} is of times, and X has {np.shape(X)[1]} columns of numbers. "
                "Name the column of times by time=, or leave trend out."
            )

    @property
    def covariate_kinds_(self) -> dict[Any, str]:
        """Kind of each column beside the times, by its name or position."""
        table = self._table
        return {} if table is None else {table.names[j]: k for j, k in table.kinds.items()}

    @property
    @abstractmethod
    def component_kernels_(self) -> list[Kernel]:
        """Kernels of the process."""

    @property
    def component_columns_(self) -> list[int]:
        """Column of X that each column of `predict_components` is a function of."""
        if self._place is None:
            return list(self._columns)
        terms = () if self._terms is None else self._terms.parts
        return [self._place] * len(self.component_kernels_) + [term.place for term in terms]

    def _refuse_new_levels(self, X: torch.Tensor) -> None:
        """Refuse rows (n, d) that join a fit whose effects of levels theirs are not among."""
        if self._table is None:
            return
        for j, known in self._table.levels.items():
            new = X[:, j] >= len(known)
            if new.any():
                raise ValueError(
                    f"X has levels in the column {self._table.names[j]!r} that fit had not, in "
                    f"{int(new.sum())} of {len(X)} rows, and partial_fit keeps the effects that "
                    "there are. Call fit with all rows."
                )

    @property
    def _place(self) -> int | None:
        """Column of the times of a series; None for an additive model."""
        if self._table is not None:
            return self._table.place
        return 0 if self.n_features_in_ == 1 else None

    @property
    def _is_default(self) -> bool:
        """Whether the structure of a series is left to the data."""
        return self.kernel is None and self.n_inducing is None and self.trend is None

    def _process_columns(self, X: np.ndarray) -> np.ndarray:
        """Columns (n, c) of X (n, d) that processes run along: the times, or all."""
        return X if self._place is None else X[:, [self._place]]

    @property
    def _asked_kernel(self) -> Kernel | None:
        return self._kernel_parts[0]

    @property
    def _kernel_parts(self) -> tuple[Kernel | None, dict[int, str]]:
        """The kernel asked for of the process, and kinds of the columns that it names besides."""
        if self.kernel is None or self._place is None:
            return self.kernel, {}
        return split_terms(self.kernel, self._place)

    def _make_terms(
        self, X: torch.Tensor, weight: torch.Tensor | None, additive: bool
    ) -> Terms | None:
        """The terms of training rows X (n, d) of some weights (n,), if there are any.

        `additive` noise is of standardised targets.
        """
        place, table, wide = self._place, self._table, WIDE_PRIOR[additive]
        if place is None:
            return None
        parts: list[Term] = []
        kinds = {**({} if table is None else table.kinds), **self._kernel_parts[1]}
        degree = max(-1 if self.trend is None else self.trend, 1 if kinds.pop(place, None) else -1)
        if degree >= 0:
            parts.append(Polynomial.over(X[:, place], degree, wide, place=place))
        for j, kind in kinds.items():
            assert table is not None
            options: dict[str, Any] = {"weight": weight}
            if kind == "categorical":
                options["n_levels"] = len(table.levels[j])
            parts.append(_KINDS[kind].of(X[:, j], str(table.names[j]), j, wide, **options))
        if self._goes_on and self._is_default and self._terms is not None:
            parts += [part for part in self._terms.parts if isinstance(part, Step)]
        if parts and self.n_inducing is not None:
            raise ValueError(
                f"n_inducing={self.n_inducing!r} has no covariates and no trend. Leave n_inducing "
                "out, which is exact at a cost linear in the rows."
            )
        return Terms(tuple(parts), place) if parts else None


def _place(time: str | int | None, names: list, dates: list[int]) -> int | None:
    """Place of the column of times: the one asked for, else the only one of dates."""
    if time is None:
        if len(dates) > 1:
            raise ValueError(
                f"X has dates in {len(dates)} columns, and one is time. Name it by time=, and "
                "convert the others to numbers or drop them."
            )
        return dates[0] if dates else 0 if len(names) == 1 else None
    if time in names:
        return names.index(time)
    if isinstance(time, int) and -len(names) <= time < len(names):
        return time % len(names)
    raise ValueError(
        f"time={time!r} is no column of X, which has {listing(names)}. Give the name of one, or "
        "its position."
    )


def _kinds(asked: Any, names: list, columns: list, place: int) -> dict[int, str]:
    """Kind of every column but the times, as asked for or by what it holds."""
    asked = {} if isinstance(asked, str) else dict(asked)
    unknown = [name for name in asked if name not in names or names.index(name) == place]
    if unknown:
        raise ValueError(
            f"covariates names {listing(unknown)}, no column of X beside time. The columns are "
            f"{listing(names)}."
        )
    wrong = [kind for kind in asked.values() if kind not in _KINDS]
    if wrong:
        raise ValueError(f"covariates must be of the kinds {listing(list(_KINDS))}; got {wrong}.")
    others = [j for j in range(len(names)) if j != place]
    found = {j: asked.get(names[j]) or _kind(columns[j]) for j in others}
    if sum(found[j] == "smooth" and names[j] not in asked for j in others) > SMOOTH_COVARIATES:
        for j in others:
            if found[j] == "smooth" and names[j] not in asked:
                found[j] = "linear"
    return found


def _kind(column: Any) -> str:
    """Kind of a column by what it holds; of dates a number, which `Table.read` refuses."""
    if is_dates(column):
        return "smooth"
    values, dtype = _values(column), str(getattr(column, "dtype", ""))
    if values.dtype.kind == "U" or dtype.startswith(("category", "Categorical", "Enum")):
        return "categorical"
    return "flag" if len(np.unique(values)) <= 2 else "smooth"


def _values(column: Any) -> np.ndarray:
    """Numbers of a column, or text: of objects where one of them is."""
    values = np.asarray(column)
    if values.dtype.kind in "fiub":
        return values.astype(np.float64)
    if values.dtype.kind != "O" or any(isinstance(value, str) for value in values):
        return _written(values)
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return _written(values)


def _written(column: Any) -> np.ndarray:
    """Values as text, whole numbers without a point: 1.0 is "1"."""
    values = np.asarray(column)
    if values.dtype.kind not in "fO":
        return values.astype(str)
    whole = (isinstance(value, float | np.floating) and value.is_integer() for value in values)
    pairs = zip(whole, values, strict=True)
    return np.array([str(int(value) if number else value) for number, value in pairs], dtype=str)


def _levels(column: Any, name: Any) -> np.ndarray:
    """Values of a categorical column; ValueError where text is missing, of numbers it is NaN."""
    values = _values(column)
    if values.dtype.kind == "f":
        return values
    missing = (values == "nan") | absent(column)  # NumPy writes NaN as text
    if missing.any():
        raise ValueError(
            f"X has no value in the column {name!r}, row {int(missing.argmax())} ({missing.sum()} "
            f"of {len(values)} rows). Drop such rows, or fill them with a level of their own: "
            "fillna('missing')."
        )
    return values


def _check_numbers(X: Any) -> None:
    """Refuse a column of times whose type cannot tell them apart."""
    shape: tuple[int, ...] = getattr(X, "shape", ())
    if len(shape) == 2 and shape[1] == 1 and not issparse(X):
        columns = table_columns(X)
        check_resolution(np.asarray(X)[:, 0] if columns is None else np.asarray(columns[0]))


def observed_rows(
    X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, exposure: Any = None
):
    """Return the observations whose target is there, and all where y is not a vector of numbers.

    Their places come last, None where all are taken. ValueError if every target is NaN, None or NA.
    """
    whole = X, y, sample_weight, exposure, None
    try:
        values = np.asarray(y)
        if values.dtype == object:
            values = np.where(absent(values.ravel()).reshape(values.shape), np.nan, values)
        missing = np.isnan(values if values.dtype.kind == "c" else values.astype(np.float64))
    except (TypeError, ValueError):  # labels or worse: validation says what is wrong
        return whole
    if missing.ndim != 1 or not missing.any():
        return whole
    if missing.all():
        raise ValueError(
            f"y holds no number: all its {len(missing)} targets are missing (NaN). Give at least "
            "one that was observed."
        )
    check_consistent_length(X, y, sample_weight)
    rows = np.flatnonzero(~missing)
    columns = (X, y, sample_weight, exposure if np.ndim(exposure) else None)
    *taken, exposures = (take_rows(column, rows) for column in columns)
    return *taken, exposure if exposures is None else exposures, rows
