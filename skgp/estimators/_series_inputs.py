"""X of a series: dates become days, predictions come indexed like their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_array, check_X_y, validate_data

from skgp.estimators._base import BaseGP
from skgp.estimators._time import Times, check_resolution, is_dates, table_columns


class SeriesInputs(BaseGP):
    """X of numbers, or with a column of dates.

    Attributes
    ----------
    time_origin_ : numpy.datetime64
        The midnight from which the days of the model count, where times are dates.
    """

    #: None where times are numbers.
    _times: Times | None

    @property
    def time_origin_(self) -> np.datetime64:
        """The midnight from which the days of the model count, where times are dates."""
        if self._times is None:
            raise AttributeError("Times are numbers, which count from 0; give dates to fit.")
        return self._times.origin

    def _validated(self, X: ArrayLike, *y: ArrayLike, reset: bool = True, **checks: bool) -> Any:
        columns = table_columns(X)
        dates = [j for j, each in enumerate(columns or ()) if is_dates(each)]
        before = None if reset else self._times
        if columns is None or not dates:
            if before is not None:
                before.days(np.empty(0))  # says what is wrong
            _check_numbers(X)
            if reset:
                self._times = None
            return super()._validated(X, *y, reset=reset, **checks)
        times = _times_of(columns, dates, before, reset=reset)
        columns[dates[0]] = times.days(columns[dates[0]])
        table = np.column_stack([np.asarray(each, dtype=np.float64) for each in columns])
        if reset:
            self._times = times
        if np.ndim(X) < 2:  # dates alone
            return super()._validated(table, *y, reset=reset, **checks)
        validate_data(self, X, reset=reset, skip_check_array=True)  # names and number of columns
        check = check_X_y if y else check_array
        return check(table, *y, dtype=np.float64, estimator=self, **checks)


def _times_of(columns: list, dates: list[int], before: Times | None, *, reset: bool) -> Times:
    """How the dates of a table are read; `before` is how those of the fit were."""
    if len(dates) > 1:
        raise ValueError(
            f"X has dates in {len(dates)} columns, and one is time. Drop the others, or convert "
            "them to numbers."
        )
    if reset:
        return Times.of(columns[dates[0]])
    if before is None:
        raise ValueError(
            "X holds dates, and fit had numbers as times. Fit with dates, or give numbers in the "
            "unit of those of fit."
        )
    return before


def _check_numbers(X: Any) -> None:
    """Refuse a column of times whose type cannot tell them apart."""
    shape: tuple[int, ...] = getattr(X, "shape", ())
    if len(shape) == 2 and shape[1] == 1:
        columns = table_columns(X)
        check_resolution(np.asarray(X)[:, 0] if columns is None else np.asarray(columns[0]))
