"""Displays of a fit: its objective by iterations, and what components of an additive model add."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtri

from skgp.displays.common import (
    column_of,
    columns_of,
    in_first_column,
    panel_axes,
    require_matplotlib,
    spread_over,
    table_like,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Up to so many distinct values a feature is drawn at these and not along a grid.
N_DISCRETE = 20  # shape: of an axis
TENTHS = np.arange(1, 10) / 10  # mathematical


@dataclass(eq=False, repr=False)
class AdditiveEffectsDisplay:
    """The components of a state-space GP, one panel each, in bands that should hold them.

    With several columns of X there is a component a feature; with one, a component for each summand
    of the kernel. A panel's band is about its component alone; bands of several do not add up.

    Make it with `from_estimator`; the constructor takes arrays ready to draw.

    Parameters
    ----------
    x : sequence of p ndarrays of shape (g_j,)
        Values of the feature of each panel, increasing.
    mean, std : sequence of p ndarrays of shape (g_j,) or (g_j, n_classes)
        Posterior mean and standard deviation of each component, in the units of y (of counts and
        classes, on the scale of the link).
    coverage : float
        Nominal probability of the bands.
    panel_names : sequence of p str
        Labels of the horizontal axes.
    target_name : str, default="effect"
        Label of the vertical axes.
    deciles : sequence of p ndarrays of shape (9,) or None, default=None
        Of the features' values, drawn as ticks.
    class_names : sequence of str or None, default=None
        Where there is a function a class.

    Attributes
    ----------
    axes_ : ndarray of p matplotlib Axes
    figure_ : matplotlib Figure
    lines_, bands_ : lists of p lists of matplotlib artists
        One a panel and class.
    """

    x: Sequence[np.ndarray]
    mean: Sequence[np.ndarray]
    std: Sequence[np.ndarray]
    _: KW_ONLY
    coverage: float
    panel_names: Sequence[str]
    target_name: str = "effect"
    deciles: Sequence[np.ndarray] | None = None
    class_names: Sequence[str] | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator,
        X,
        *,
        features: Sequence[int | str] | None = None,
        coverage: float = 0.95,
        grid_resolution: int = 200,
        target_name: str = "effect",
        ax: "Axes | Sequence[Axes] | None" = None,
        **kwargs: Any,
    ) -> "AdditiveEffectsDisplay":
        """Predict the components along their features and draw.

        Parameters
        ----------
        estimator : fitted estimator with ``predict_components`` and ``component_columns_``
        X : array-like or pandas DataFrame of shape (n, d)
            Gives the ranges of the features.
        features : sequence of int or str, or None, default=None
            Columns of X whose components to draw, in this order; names need a DataFrame. None draws
            all.
        coverage : float, default=0.95
            Of the bands.
        grid_resolution : int, default=200
            Number of points along a feature. One of at most 20 distinct values is drawn at these.
        target_name : str, default="effect"
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as panels; None makes a new figure.
        **kwargs
            Passed to `plot`.

        Returns
        -------
        AdditiveEffectsDisplay

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If the estimator has no components.
        ValueError
            If an entry of ``features`` is no column of X, or one without a component.
        """
        require_matplotlib(cls.__name__)
        if not hasattr(estimator, "predict_components"):
            raise TypeError(
                f"{type(estimator).__name__} has no predict_components and so no components to "
                "draw; StateSpaceGPRegressor and StateSpaceGPClassifier have. In a Pipeline, give "
                "its last step and X as that step sees it."
            )
        names = [str(name) for name in getattr(X, "columns", [])]
        values = columns_of(X)
        columns = estimator.component_columns_
        shown = _shown(features, columns, names, len(values))
        grids = [_grid(column, grid_resolution) for column in values]
        # A component sees its own column, so that one call serves all columns side by side.
        rows = [np.pad(x, (0, max(map(len, grids)) - len(x)), "edge") for x in grids]
        found = [
            np.asarray(part)
            for part in estimator.predict_components(table_like(X, rows), return_std=True)
        ]
        x = [grids[columns[p]] for p in shown]
        mean, std = ([part[: len(g), p] for g, p in zip(x, shown, strict=True)] for part in found)
        labels = names or [f"x{column}" for column in range(len(values))]
        several = [columns.count(columns[p]) > 1 or len(values) == 1 for p in range(len(columns))]
        display = cls(
            x,
            mean,
            std,
            coverage=coverage,
            panel_names=[
                f"{labels[columns[p]]}\n{estimator.component_names_[p]}"
                if several[p]
                else labels[columns[p]]
                for p in shown
            ],
            target_name=target_name,
            deciles=None if len(values) == 1 else [_deciles(values[columns[p]]) for p in shown],
            class_names=[str(c) for c in estimator.classes_] if mean[0].ndim == 2 else None,
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self,
        ax: "Axes | Sequence[Axes] | None" = None,
        *,
        n_cols: int = 3,
        line_kwargs: dict[str, Any] | None = None,
        band_kwargs: dict[str, Any] | None = None,
    ) -> "AdditiveEffectsDisplay":
        """Draw on given axes or on a new figure.

        Parameters
        ----------
        ax : matplotlib Axes, sequence of them or None, default=None
        n_cols : int, default=3
            Panels beside each other on a new figure, whose vertical axes are shared.
        line_kwargs, band_kwargs : dict or None, default=None
            Passed to ``ax.plot`` (mean) and ``ax.fill_between``.

        Returns
        -------
        AdditiveEffectsDisplay
            This object.

        Raises
        ------
        ValueError
            If the axes given are not as many as the panels.
        """
        self.axes_ = panel_axes(len(self.x), ax, n_cols, caller=type(self).__name__, sharey=True)
        self.figure_ = self.axes_[0].figure
        self.lines_: list[list[Any]] = []
        self.bands_: list[list[Any]] = []
        for panel, axis in enumerate(self.axes_):
            self._draw(panel, axis, line_kwargs or {}, band_kwargs or {})
            axis.set(xlabel=self.panel_names[panel])
            if in_first_column(axis):
                axis.set(ylabel=self.target_name)
        if self.class_names is not None:
            self.axes_[0].legend()
        return self

    def _draw(
        self, panel: int, axis: "Axes", line_kwargs: dict[str, Any], band_kwargs: dict[str, Any]
    ) -> None:
        """Mean and band of each class, and the deciles of the feature."""
        x = self.x[panel]
        mean, std = (part[panel].reshape(len(x), -1) for part in (self.mean, self.std))
        reach = ndtri((1 + self.coverage) / 2)
        lines, bands = [], []
        for k, (m, s) in enumerate(zip(mean.T, std.T, strict=True)):
            label = None if self.class_names is None else self.class_names[k]
            style = {"marker": "o" if len(x) <= N_DISCRETE else None, "label": label}
            (line,) = axis.plot(x, m, **{**style, **line_kwargs})
            lines.append(line)
            shade = {"alpha": 0.25, "color": line.get_color()}
            bands.append(
                axis.fill_between(x, m - reach * s, m + reach * s, **{**shade, **band_kwargs})
            )
        if self.deciles is not None and len(self.deciles[panel]):
            axis.vlines(
                self.deciles[panel], 0, 0.04, transform=axis.get_xaxis_transform(), color="black"
            )
        self.lines_.append(lines)
        self.bands_.append(bands)


def _shown(
    features: Sequence[int | str] | None, columns: list[int], names: list[str], n_columns: int
) -> list[int]:
    """The components of the features asked for, in their order."""
    if features is None:
        return list(range(len(columns)))
    shown: list[int] = []
    for feature in features:
        wanted = column_of(feature, names, n_columns)
        found = [p for p, column in enumerate(columns) if column == wanted]
        if not found:
            raise ValueError(
                f"features holds {feature!r}, of which the kernel has no part; columns with one "
                f"are {sorted(set(columns))}."
            )
        shown.extend(found)
    return shown


def _grid(column: np.ndarray, resolution: int) -> np.ndarray:
    """Distinct values where they are few, else evenly spread ones over the range."""
    distinct = np.unique(column)
    if len(distinct) <= N_DISCRETE:
        return distinct
    return spread_over(column, resolution)


def _deciles(column: np.ndarray) -> np.ndarray:
    """Deciles (9,) of numbers; none of dates and text."""
    return np.quantile(column, TENTHS) if column.dtype.kind == "f" else np.empty(0)


class LossHistoryDisplay:
    """What a fit reported after each iteration, a panel for each of its stages.

    A curve that still moves at its end asks for more iterations (``max_iter``) or a greater
    learning rate; one that never moves began where it ended. Which quantity a stage reports is
    documented under ``history_`` of each estimator. Make it with `from_estimator`; the constructor
    takes arrays ready to draw.

    Parameters
    ----------
    stages : mapping of str to ndarray of shape (n_iter,)
        Values after each iteration; those that are not finite leave gaps.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
        One a stage.
    figure_ : matplotlib Figure
    lines_ : list of matplotlib Line2D
    """

    def __init__(self, stages: Mapping[str, np.ndarray]) -> None:
        self.stages = stages

    @classmethod
    def from_estimator(
        cls,
        estimator,
        *,
        stages: Sequence[str] | None = None,
        ax: "Axes | Sequence[Axes] | None" = None,
        **kwargs: Any,
    ) -> "LossHistoryDisplay":
        """Take ``history_`` of a fitted estimator and draw it.

        Parameters
        ----------
        estimator : fitted estimator with ``history_``
            Of `GaussianProcessRegressor` and `GaussianProcessClassifier`, with another method than
            "exact", the fitted ``estimator_`` is meant.
        stages : sequence of str or None, default=None
            Entries of ``history_``, in this order; None takes those of two iterations or more.
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as stages; None makes a new figure.
        **kwargs
            Passed to `plot`.

        Returns
        -------
        LossHistoryDisplay

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a stage is unknown, or the fit had none of two iterations.
        """
        require_matplotlib(cls.__name__)
        history = getattr(estimator, "estimator_", estimator).history_
        if stages is None:
            stages = [name for name, values in history.items() if len(values) > 1]
        for name in stages:
            if name not in history:
                raise ValueError(
                    f"stages holds {name!r}; history_ of this {type(estimator).__name__} has "
                    f"{sorted(history)}."
                )
        if not stages:
            raise ValueError(
                f"no stage of this {type(estimator).__name__} has two iterations to draw: its "
                "hyper-parameters were given, and its solution is in closed form."
            )
        display = cls({name: np.asarray(history[name], dtype=float) for name in stages})
        return display.plot(ax=ax, **kwargs)

    def plot(
        self, ax: "Axes | Sequence[Axes] | None" = None, *, n_cols: int = 2, **kwargs: Any
    ) -> "LossHistoryDisplay":
        """Draw on given axes or on a new figure.

        Parameters
        ----------
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as stages.
        n_cols : int, default=2
            Panels beside each other on a new figure.
        **kwargs
            Passed to ``ax.plot``.

        Returns
        -------
        LossHistoryDisplay
            This object.
        """
        self.axes_ = panel_axes(len(self.stages), ax, n_cols, caller=type(self).__name__)
        self.figure_ = self.axes_[0].figure
        self.lines_ = []
        for axis, (name, values) in zip(self.axes_, self.stages.items(), strict=True):
            finite = np.where(np.isfinite(values), values, np.nan)
            self.lines_ += axis.plot(np.arange(1, len(values) + 1), finite, **kwargs)
            axis.set(title=name, xlabel="iteration", ylabel="reported value")
        return self
