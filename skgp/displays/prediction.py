"""Displays of what a regressor predicts, a band and how often it holds; axes of all displays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Nominal coverages that `CoverageDisplay` compares with the observed ones.
LEVELS = np.linspace(0.05, 0.95, 19)  # mathematical


class PredictiveBandDisplay:
    """The predictive mean along one feature, in a band that should hold a given share of y.

    Make it with `from_estimator`; the constructor takes arrays ready to draw.

    Parameters
    ----------
    x : ndarray of shape (g,)
        Values of the feature, increasing.
    mean, lower, upper : ndarray of shape (g,)
        Predictive mean and ends of the band of a new observation, in the units of y.
    coverage : float
        Nominal probability of the band.
    observed : tuple of two ndarrays of shape (n,) or None, default=None
        Feature and target of observations to draw as points.
    feature_name, target_name : str
        Labels of the axes.

    Attributes
    ----------
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure
    line_, band_, points_ : matplotlib artists
        Of the mean, the band and the observations (None without).
    """

    def __init__(
        self,
        x: np.ndarray,
        mean: np.ndarray,
        lower: np.ndarray,
        upper: np.ndarray,
        *,
        coverage: float,
        observed: tuple[np.ndarray, np.ndarray] | None = None,
        feature_name: str = "x",
        target_name: str = "y",
    ) -> None:
        self.x = x
        self.mean = mean
        self.lower = lower
        self.upper = upper
        self.coverage = coverage
        self.observed = observed
        self.feature_name = feature_name
        self.target_name = target_name

    @classmethod
    def from_estimator(
        cls,
        estimator,
        X,
        y: ArrayLike | None = None,
        *,
        feature: int | str = 0,
        coverage: float = 0.95,
        grid_resolution: int = 200,
        feature_name: str | None = None,
        target_name: str | None = None,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> PredictiveBandDisplay:
        """Predict along one feature, the others held at their medians, and draw.

        Parameters
        ----------
        estimator : fitted regressor with ``predict`` and ``predict_interval``
        X : array-like or pandas DataFrame of shape (n, d)
            Gives the range of the feature and the medians of the others. Rows of gaps and of the
            future, where there is no y yet, widen the range.
        y : array-like of shape (n,) or None, default=None
            Drawn as points when given, but for those that are missing (NaN).
        feature : int or str, default=0
            Column of X; a name needs a DataFrame.
        coverage : float, default=0.95
        grid_resolution : int, default=200
            Number of points along the feature.
        feature_name, target_name : str or None, default=None
            Labels of the axes, with units say; None takes the names of the DataFrame and of the
            Series y.
        ax : matplotlib Axes or None, default=None
            None makes a new figure.
        **kwargs
            Passed to `plot`.

        Returns
        -------
        PredictiveBandDisplay

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If ``feature`` is not a column of X.
        """
        require_matplotlib(cls.__name__)
        names = [str(name) for name in getattr(X, "columns", [])]
        values = columns_of(X)
        column = column_of(feature, names, len(values))
        x = spread_over(values[column], grid_resolution)
        grid = [np.repeat(_middle(each), len(x)) for each in values]
        grid[column] = x
        rows = table_like(X, grid)
        display = cls(
            x,
            _of_one_target(estimator.predict(rows), 1, cls),
            *estimator.predict_interval(rows, coverage=coverage),
            coverage=coverage,
            observed=None if y is None else _observed(values[column], y),
            feature_name=feature_name or (names[column] if names else f"x{column}"),
            target_name=target_name or getattr(y, "name", None) or "y",
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        line_kwargs: dict[str, Any] | None = None,
        band_kwargs: dict[str, Any] | None = None,
        points_kwargs: dict[str, Any] | None = None,
    ) -> PredictiveBandDisplay:
        """Draw on ``ax`` or on a new figure.

        Parameters
        ----------
        ax : matplotlib Axes or None, default=None
        line_kwargs, band_kwargs, points_kwargs : dict or None, default=None
            Passed to ``ax.plot`` (mean), ``ax.fill_between`` and ``ax.scatter``.

        Returns
        -------
        PredictiveBandDisplay
            This object.
        """
        self.ax_ = _axes(ax, type(self).__name__)
        self.figure_ = self.ax_.figure
        label = f"{self.coverage:.0%} interval of {self.target_name}"
        self.band_ = self.ax_.fill_between(
            self.x, self.lower, self.upper, **{"alpha": 0.25, "label": label, **(band_kwargs or {})}
        )
        (self.line_,) = self.ax_.plot(
            self.x, self.mean, **{"label": "predictive mean", **(line_kwargs or {})}
        )
        self.points_ = None
        if self.observed is not None:
            style = {"s": 8, "color": "black", "alpha": 0.5, "label": "observed"}
            self.points_ = self.ax_.scatter(*self.observed, **{**style, **(points_kwargs or {})})
        self.ax_.set(xlabel=self.feature_name, ylabel=self.target_name)
        self.ax_.legend()
        return self


class CoverageDisplay:
    """How often central predictive intervals hold the target, against how often they should.

    A curve on the diagonal is calibrated; below it the intervals are too narrow. Make it with
    `from_estimator`; the constructor takes arrays ready to draw.

    Parameters
    ----------
    nominal : ndarray of shape (k,)
        Coverages asked for.
    observed : ndarray of shape (k,)
        Share of the targets inside each interval.
    estimator_name : str or None, default=None
        Label of the curve.

    Attributes
    ----------
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure
    line_, diagonal_ : matplotlib Line2D
    """

    def __init__(
        self, nominal: np.ndarray, observed: np.ndarray, *, estimator_name: str | None = None
    ) -> None:
        self.nominal = nominal
        self.observed = observed
        self.estimator_name = estimator_name

    @classmethod
    def from_estimator(
        cls,
        estimator,
        X,
        y: ArrayLike,
        *,
        levels: ArrayLike = LEVELS,
        name: str | None = None,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> CoverageDisplay:
        """Count the targets inside the intervals that an estimator predicts, and draw.

        Parameters
        ----------
        estimator : fitted regressor with ``predict_quantiles``
        X : array-like or pandas DataFrame of shape (n, d)
            Held out: on the training data the curve flatters.
        y : array-like of shape (n,)
        levels : array-like of shape (k,), default=0.05, 0.10, ..., 0.95
            Nominal coverages, strictly between 0 and 1.
        name : str or None, default=None
            Label of the curve; None takes the class of the estimator.
        ax : matplotlib Axes or None, default=None
            None makes a new figure.
        **kwargs
            Passed to `plot`.

        Returns
        -------
        CoverageDisplay

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        require_matplotlib(cls.__name__)
        nominal = np.asarray(levels, dtype=np.float64)
        tails = (1 - nominal) / 2
        quantiles = estimator.predict_quantiles(X, np.concatenate([tails, 1 - tails]))
        lower, upper = np.hsplit(_of_one_target(quantiles, 2, cls), 2)
        y = np.asarray(y)[:, None]
        observed = ((lower <= y) & (y <= upper)).mean(axis=0)
        display = cls(nominal, observed, estimator_name=name or type(estimator).__name__)
        return display.plot(ax=ax, **kwargs)

    def plot(self, ax: Axes | None = None, **kwargs: Any) -> CoverageDisplay:
        """Draw on ``ax`` or on a new figure.

        Parameters
        ----------
        ax : matplotlib Axes or None, default=None
        **kwargs
            Passed to ``ax.plot`` for the curve.

        Returns
        -------
        CoverageDisplay
            This object.
        """
        self.ax_ = _axes(ax, type(self).__name__)
        self.figure_ = self.ax_.figure
        drawn = "calibrated" in self.ax_.get_legend_handles_labels()[1]
        label = None if drawn else "calibrated"
        (self.diagonal_,) = self.ax_.plot([0, 1], [0, 1], "k:", label=label)
        (self.line_,) = self.ax_.plot(
            self.nominal,
            self.observed,
            **{"marker": ".", "label": self.estimator_name, **kwargs},
        )
        self.ax_.set(
            xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1)
        )
        self.ax_.legend()
        return self


def require_matplotlib(caller: str) -> None:
    """Raise an ImportError that says how to install matplotlib, if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: pip install skgp[plot]") from error


def _axes(ax: Axes | None, caller: str) -> Axes:
    """Return ``ax``, or the axes of a new figure."""
    if ax is not None:
        return ax
    require_matplotlib(caller)
    import matplotlib.pyplot as plt

    return plt.subplots()[1]


def _observed(x: np.ndarray, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the feature and the target of the rows whose target is not NaN."""
    target = np.asarray(y, dtype=np.float64)
    kept = ~np.isnan(target)
    return x[kept], target[kept]


def _of_one_target(values: np.ndarray, n_axes: int, caller: type) -> np.ndarray:
    if np.ndim(values) > n_axes:
        raise ValueError(
            f"{caller.__name__}.from_estimator draws one target; the estimator was fitted to "
            f"{values.shape[1]}. Give the arrays of one to {caller.__name__}."
        )
    return values


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


def _middle(column: np.ndarray) -> Any:
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def panel_axes(
    n: int, ax: Axes | Sequence[Axes] | None, n_cols: int, *, caller: str, **kwargs: Any
) -> np.ndarray:
    """The axes to draw on, one a panel.

    Parameters
    ----------
    n : int
        Number of panels.
    ax : matplotlib Axes, sequence of n of them or None
        None makes a new figure.
    n_cols : int
        Panels beside each other on a new figure.
    caller : str
        Named by the error where matplotlib is missing.
    **kwargs
        Passed to ``plt.subplots``.

    Raises
    ------
    ValueError
        If the axes given are not n.
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
