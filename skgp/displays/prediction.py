"""What is predicted and how often it holds: a band, its coverage, the calibration of classifiers.

The reliability diagram of a classifier is `sklearn.calibration.CalibrationDisplay`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from skgp.displays.common import (
    column_of,
    columns_of,
    middle,
    own_axes,
    require_matplotlib,
    spread_over,
    table_like,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from numbers import Integral

#: Nominal coverages that `CoverageDisplay` compares with the observed ones.
LEVELS = np.linspace(0.05, 0.95, 19)  # mathematical


@dataclass(eq=False, repr=False)
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

    x: np.ndarray
    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    _: KW_ONLY
    coverage: float
    observed: tuple[np.ndarray, np.ndarray] | None = None
    feature_name: str = "x"
    target_name: str = "y"

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
            Gives the range of the feature and the medians of the others. Observations of gaps and
            of the future, where there is no y yet, widen the range.
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
        grid = [np.repeat(middle(each), len(x)) for each in values]
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
        self.ax_ = own_axes(ax, type(self).__name__)
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


@dataclass(eq=False, repr=False)
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

    nominal: np.ndarray
    observed: np.ndarray
    _: KW_ONLY
    estimator_name: str | None = None

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
        self.ax_ = own_axes(ax, type(self).__name__)
        self.figure_ = self.ax_.figure
        drawn = "calibrated" in self.ax_.get_legend_handles_labels()[1]
        label = None if drawn else "calibrated"
        (self.diagonal_,) = self.ax_.plot([0, 1], [0, 1], "k:", label=label)
        (self.line_,) = self.ax_.plot(
            self.nominal, self.observed, **{"marker": ".", "label": self.estimator_name, **kwargs}
        )
        self.ax_.set(
            xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1)
        )
        self.ax_.legend()
        return self


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


def expected_calibration_error(
    y_true: ArrayLike, prob: ArrayLike, n_bins: int = 15, *, labels: ArrayLike | None = None
) -> float:
    r"""Mean distance between what a classifier says and how often it is right.

    .. math:: \mathrm{ECE} = \sum_{b=1}^{B} \frac{n_b}{n} \,
              \Big| \frac{1}{n_b} \sum_{i \in b} (h_i - p_i) \Big|,

    over bins of equal width in p [1]_. Given one column, :math:`p_i` is the probability of the
    second class and :math:`h_i` whether observation i is of it. Given one column a class,
    :math:`p_i` is the probability of the likeliest class and :math:`h_i` whether that is right.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Labels of observations that were not trained on.
    prob : array-like of shape (n,) or (n, n_classes)
        As of ``predict_proba(X)[:, 1]`` or ``predict_proba(X)``.
    n_bins : int, default=15
    labels : array-like of shape (n_classes,) or None, default=None
        Label of each column of `prob` (``estimator.classes_``), two for a single column. None
        takes the sorted labels in `y_true`.

    Returns
    -------
    float
        Between 0 and 1. Chance alone makes it about ``0.3 * sqrt(n_bins / n)`` for a classifier
        that is calibrated, less where it is sure.

    Raises
    ------
    ValueError
        If shapes do not fit, `prob` leaves [0, 1], `n_bins` is not a positive integer, or labels
        and columns do not match.

    See Also
    --------
    sklearn.calibration.CalibrationDisplay : Draws the bins of a single column.

    References
    ----------
    .. [1] Naeini, Cooper and Hauskrecht (2015), Obtaining well calibrated probabilities using
       Bayesian binning; Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural
       networks.

    Examples
    --------
    >>> round(expected_calibration_error([0, 1, 1, 1], [0.1, 0.7, 0.7, 0.7]), 3)
    0.25
    """
    if not isinstance(n_bins, Integral) or n_bins < 1:
        raise ValueError(f"n_bins must be a positive integer; got {n_bins!r}.")
    y, p = np.asarray(y_true), np.asarray(prob, dtype=np.float64)
    if y.ndim != 1 or p.ndim not in (1, 2) or len(p) != len(y) or not len(y):
        raise ValueError(
            "y_true must be of shape (n,) and prob of shape (n,) or (n, n_classes), n > 0; got "
            f"{y.shape} and {p.shape}."
        )
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"prob must lie in [0, 1]; got values from {p.min():.3g} to {p.max():.3g}."
        )
    known = _column_labels(y, p, labels)
    hit, confidence = y == known[1 if p.ndim == 1 else p.argmax(axis=1)], p
    if p.ndim > 1:
        confidence = p.max(axis=1)
    # Intervals closed on the right, as those of sklearn.calibration.calibration_curve.
    bins = np.searchsorted(np.linspace(0, 1, n_bins + 1)[1:-1], confidence)
    excess = np.bincount(bins, weights=hit - confidence, minlength=n_bins)
    return float(np.abs(excess).sum() / len(y))


def _column_labels(y: np.ndarray, p: np.ndarray, labels: ArrayLike | None) -> np.ndarray:
    """Return the label of each class, after checking that they are as many as the columns."""
    known = np.unique(y) if labels is None else np.asarray(labels)
    n_classes = 2 if p.ndim == 1 else p.shape[1]
    if known.shape != (n_classes,):
        source = "y_true holds" if labels is None else "labels has"
        raise ValueError(
            f"prob of shape {p.shape} needs {n_classes} labels; {source} {known.tolist()}. "
            "Give labels=estimator.classes_."
        )
    unknown = np.setdiff1d(y, known)
    if unknown.size:
        raise ValueError(f"y_true holds {unknown.tolist()}, not among labels={known.tolist()}.")
    return known
