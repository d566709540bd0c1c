"""Axes of all displays, and tables whose columns they vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib(caller: str) -> None:
    """Raise an ImportError that says how to install matplotlib, if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: pip install skgp[plot]") from error


def own_axes(ax: Axes | None, caller: str) -> Axes:
    """Return ``ax``, or the axes of a new figure."""
    if ax is not None:
        return ax
    require_matplotlib(caller)
    import matplotlib.pyplot as plt

    return plt.subplots()[1]


def panel_axes(
    n: int, ax: Axes | Sequence[Axes] | None, n_cols: int, *, caller: str, **kwargs: Any
) -> np.ndarray:
    """The n axes given, or those of a new figure, `n_cols` beside each other; one a panel.

    ValueError if those given are not n. `caller` is named where matplotlib is missing.
    """
    if ax is not None:
        given = np.array(ax, dtype=object).ravel()
        if len(given) != n:
            raise ValueError(f"ax holds {len(given)} axes for {n} panels; give as many.")
        return given
    require_matplotlib(caller)
    import matplotlib.pyplot as plt

    n_cols = min(n_cols, n)
    n_rows = -(-n // n_cols)
    size = {"figsize": (3.6 * n_cols, 2.8 * n_rows)}
    figure, axes = plt.subplots(
        n_rows, n_cols, squeeze=False, layout="constrained", **{**size, **kwargs}
    )
    for unused in axes.flat[n:]:
        figure.delaxes(unused)
    return axes.ravel()[:n]


def in_first_column(axis: Axes) -> bool:
    """Whether nothing is to the left of it on its figure."""
    place = axis.get_subplotspec()
    return place is None or place.is_first_col()


def columns_of(X: Any) -> list[np.ndarray]:
    """Columns (n,) of a table, numbers in float64, dates and text as they are."""
    if hasattr(X, "columns"):
        columns = [np.asarray(X[name]) for name in X.columns]
    else:
        columns = list(np.atleast_2d(np.asarray(X).T))
    return [each.astype(np.float64) if each.dtype.kind in "fiub" else each for each in columns]


def spread_over(column: np.ndarray, n: int) -> np.ndarray:
    """n values evenly from the lowest to the highest of numbers or dates; all that a text has."""
    if column.dtype.kind in "OU":
        return np.unique(column)
    low, high = column.min(), column.max()
    if column.dtype.kind == "f":
        return np.linspace(low, high, n)
    return low + (high - low) * np.linspace(0, 1, n)


def table_like(X: Any, columns: Sequence[np.ndarray]) -> Any:
    """A table of the kind of X with other columns (g,)."""
    if hasattr(X, "columns"):
        return type(X)(dict(zip(X.columns, columns, strict=True)))
    alike = len({each.dtype for each in columns}) == 1
    return np.column_stack(columns if alike else [each.astype(object) for each in columns])


def middle(column: np.ndarray) -> Any:
    """The median; of dates and text the one in the middle of their order."""
    return np.median(column) if column.dtype.kind == "f" else np.sort(column)[len(column) // 2]


def column_of(feature: int | str, names: list[str], n_columns: int) -> int:
    """Return the index of a column given by index or name."""
    if isinstance(feature, str) and feature in names:
        return names.index(feature)
    if not isinstance(feature, str) and 0 <= feature < n_columns:
        return int(feature)
    known = names or f"integers from 0 to {n_columns - 1}"
    raise ValueError(f"feature={feature!r} is not a column of X; the columns are {known}.")
