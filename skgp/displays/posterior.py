"""Displays of a posterior over hyper-parameters: the way of its chains, and its densities."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import gaussian_kde

from skgp.displays.common import in_first_column, panel_axes, require_matplotlib
from skgp.samplers import r_hat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(eq=False, repr=False)
class TraceDisplay:
    """Draws of the hyper-parameters in the order in which they were taken, a panel for each.

    Chains that have mixed look alike, have no trend and cannot be told apart: R-hat, in the titles,
    is then at most 1.01. Of importance sampling the points of one round follow those of another,
    their areas in proportion to their weights: no few of them should stand out in the last round.

    Make it with `from_estimator`; the constructor takes arrays ready to draw.

    Parameters
    ----------
    draws : sequence of ndarrays of shape (n_draws, p)
        One a chain; of positive values, in the units of the hyper-parameters.
    names : sequence of p str
        Labels of the vertical axes.
    weights : sequence of ndarrays of shape (n_draws,) or None, default=None
        Of importance sampling, whose rounds take the place of chains.
    r_hat : ndarray of shape (p,) or None, default=None

    Attributes
    ----------
    axes_ : ndarray of p matplotlib Axes
    figure_ : matplotlib Figure
    lines_ : list of p lists of matplotlib artists
        One a panel and chain: lines, or collections of points where there are weights.
    """

    draws: Sequence[np.ndarray]
    names: Sequence[str]
    _: KW_ONLY
    weights: Sequence[np.ndarray] | None = None
    r_hat: np.ndarray | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator,
        *,
        names: Sequence[str] | None = None,
        ax: "Axes | Sequence[Axes] | None" = None,
        **kwargs: Any,
    ) -> "TraceDisplay":
        """Take the samples of a fitted `BayesianGPRegressor` and draw them.

        Parameters
        ----------
        estimator : fitted BayesianGPRegressor
        names : sequence of str or None, default=None
            Entries of ``hyperparameter_names_`` to draw, in this order; None draws all.
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as panels; None makes a new figure.
        **kwargs
            Passed to `plot`.

        Returns
        -------
        TraceDisplay

        Raises
        ------
        ImportError, TypeError, ValueError
            Without matplotlib; where the estimator has no samples of hyper-parameters; where there
            is a single one, or a name is unknown.
        """
        require_matplotlib(cls.__name__)
        columns, labels = _columns(estimator, names)
        chain = estimator.sample_chains_
        groups = [np.flatnonzero(chain == number) for number in np.unique(chain)]
        u = estimator.posterior_samples_[:, columns]
        weights, mixing = None, None
        if estimator.sampler_ == "importance":
            weights = [estimator.sample_weights_[rows] for rows in groups]
        else:
            # Chains cut short by an interruption may differ in length.
            length = min(map(len, groups))
            cut = np.stack([u[rows[:length]] for rows in groups])
            mixing = np.array([r_hat(column) for column in cut.transpose(2, 0, 1)])
        draws = [np.exp(u[rows]) for rows in groups]
        display = cls(draws, labels, weights=weights, r_hat=mixing)
        return display.plot(ax=ax, **kwargs)

    def plot(
        self, ax: "Axes | Sequence[Axes] | None" = None, *, n_cols: int = 2, **kwargs: Any
    ) -> "TraceDisplay":
        """Draw on given axes or on a new figure.

        Parameters
        ----------
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as panels.
        n_cols : int, default=2
            Panels beside each other on a new figure.
        **kwargs
            Passed to ``ax.plot``, or to ``ax.scatter`` where there are weights.

        Returns
        -------
        TraceDisplay
            This object.
        """
        n, caller = len(self.names), type(self).__name__
        self.axes_ = panel_axes(n, ax, n_cols, caller=caller, sharex=True)
        self.figure_ = self.axes_[0].figure
        self.lines_ = []
        for panel, axis in enumerate(self.axes_):
            drawn = self._chains if self.weights is None else self._rounds
            self.lines_.append(drawn(panel, axis, kwargs))
            _logarithmic(axis, "y", *axis.dataLim.intervaly)
            axis.set(ylabel=self.names[panel])
            if ax is not None or panel + n_cols >= n:  # nothing is below it
                axis.set(xlabel="draw" if self.weights is None else "point, round after round")
                axis.tick_params(labelbottom=True)
            if self.r_hat is not None:
                axis.set_title(f"R-hat {self.r_hat[panel]:.3f}")
        return self

    def _chains(self, panel: int, axis: "Axes", kwargs: dict[str, Any]) -> list:
        """A line a chain."""
        style = {"linewidth": 0.6, "alpha": 0.8, **kwargs}
        return [axis.plot(chain[:, panel], **style)[0] for chain in self.draws]

    def _rounds(self, panel: int, axis: "Axes", kwargs: dict[str, Any]) -> list:
        """Points in a row; a point of mean weight has the area 4."""
        points, start = [], 0
        size = sum(map(len, self.draws))
        for values, weights in zip(self.draws, self.weights or [], strict=True):
            x = start + np.arange(len(values))
            style = {"alpha": 0.5, "linewidth": 0, **kwargs}
            points.append(axis.scatter(x, values[:, panel], s=4 * size * weights, **style))
            start += len(values)
        return points


@dataclass(eq=False, repr=False)
class PosteriorDisplay:
    """Posterior densities of the hyper-parameters, a panel for each, over those of their priors.

    A posterior that is no narrower than its prior says that the data tell nothing of this
    hyper-parameter. Densities are those of the logarithm: their area is one on the logarithmic axes
    that they are drawn on.

    Make it with `from_estimator`; the constructor takes arrays ready to draw.

    Parameters
    ----------
    x : sequence of p ndarrays of shape (g,)
        Values of each hyper-parameter, positive and increasing.
    density : sequence of p ndarrays of shape (g,)
        Posterior densities of the logarithm.
    names : sequence of p str
        Labels of the horizontal axes.
    prior_density : sequence of p ndarrays of shape (g,) or None, default=None
    mode : ndarray of shape (p,) or None, default=None
        The optimum of the joint posterior, which need not be at the top of these densities.

    Attributes
    ----------
    axes_ : ndarray of p matplotlib Axes
    figure_ : matplotlib Figure
    lines_, prior_lines_, mode_lines_ : lists of p matplotlib Line2D
        The latter two empty without priors and mode.
    """

    x: Sequence[np.ndarray]
    density: Sequence[np.ndarray]
    names: Sequence[str]
    _: KW_ONLY
    prior_density: Sequence[np.ndarray] | None = None
    mode: np.ndarray | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator,
        *,
        names: Sequence[str] | None = None,
        grid_resolution: int = 200,
        ax: "Axes | Sequence[Axes] | None" = None,
        **kwargs: Any,
    ) -> "PosteriorDisplay":
        """Smooth the samples of a fitted `BayesianGPRegressor` and draw.

        Densities are Gaussian kernel estimates with Scott's bandwidth for the effective number
        of samples, and so a little wider than the posterior.

        Parameters
        ----------
        estimator : fitted BayesianGPRegressor
        names : sequence of str or None, default=None
            Entries of ``hyperparameter_names_`` to draw, in this order; None draws all.
        grid_resolution : int, default=200
            Points of a density, over four standard deviations to both sides.
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as panels; None makes a new figure.
        **kwargs
            Passed to `plot`.

        Returns
        -------
        PosteriorDisplay

        Raises
        ------
        ImportError, TypeError, ValueError
            Without matplotlib; where the estimator has no samples of hyper-parameters; where there
            is a single one, or a name is unknown.
        """
        require_matplotlib(cls.__name__)
        columns, labels = _columns(estimator, names)
        u, weights = estimator.posterior_samples_[:, columns], estimator.sample_weights_
        mean = weights @ u
        reach = 4 * np.sqrt(weights @ (u - mean) ** 2)
        grids = np.linspace(mean - reach, mean + reach, grid_resolution)
        density = [gaussian_kde(u[:, j], weights=weights)(grid) for j, grid in enumerate(grids.T)]
        prior_density = None
        if estimator.priors_:
            prior_density = [
                np.exp(estimator.priors_[column].log_density(grid))
                for column, grid in zip(columns, grids.T, strict=True)
            ]
        display = cls(
            list(np.exp(grids.T)),
            density,
            labels,
            prior_density=prior_density,
            mode=np.exp(estimator.map_[columns]),
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self,
        ax: "Axes | Sequence[Axes] | None" = None,
        *,
        n_cols: int = 3,
        line_kwargs: dict[str, Any] | None = None,
        prior_kwargs: dict[str, Any] | None = None,
        mode_kwargs: dict[str, Any] | None = None,
    ) -> "PosteriorDisplay":
        """Draw on given axes or on a new figure.

        Parameters
        ----------
        ax : matplotlib Axes, sequence of them or None, default=None
            As many as panels.
        n_cols : int, default=3
            Panels beside each other on a new figure.
        line_kwargs, prior_kwargs, mode_kwargs : dict or None, default=None
            Passed to ``ax.plot`` (posterior and prior densities) and ``ax.axvline``.

        Returns
        -------
        PosteriorDisplay
            This object.
        """
        self.axes_ = panel_axes(len(self.names), ax, n_cols, caller=type(self).__name__)
        self.figure_ = self.axes_[0].figure
        self.lines_, self.prior_lines_, self.mode_lines_ = [], [], []
        prior_style = {"color": "0.4", "linestyle": "--", "label": "prior", **(prior_kwargs or {})}
        mode_style = {"color": "C3", "linewidth": 1, "label": "optimum", **(mode_kwargs or {})}
        for panel, axis in enumerate(self.axes_):
            x = self.x[panel]
            style = {"label": "posterior", **(line_kwargs or {})}
            (line,) = axis.plot(x, self.density[panel], **style)
            axis.fill_between(x, self.density[panel], alpha=0.25, color=line.get_color())
            self.lines_.append(line)
            if self.prior_density is not None:
                self.prior_lines_ += axis.plot(x, self.prior_density[panel], **prior_style)
            if self.mode is not None:
                self.mode_lines_.append(axis.axvline(self.mode[panel], **mode_style))
            _logarithmic(axis, "x", x[0], x[-1])
            axis.set(xlabel=self.names[panel], ylim=(0, None))
            if in_first_column(axis):
                axis.set(ylabel="density of the logarithm")
        self.axes_[0].legend(fontsize="small")
        return self


def _columns(estimator, names: Sequence[str] | None) -> tuple[list[int], list[str]]:
    """Columns of the samples to draw, and their names."""
    if not hasattr(estimator, "posterior_samples_"):
        raise TypeError(
            f"{type(estimator).__name__} has no posterior_samples_ to draw; a fitted "
            "BayesianGPRegressor has. In a Pipeline, give its last step."
        )
    known = list(estimator.hyperparameter_names_)
    if len(estimator.posterior_samples_) < 2 or not known:
        raise ValueError(
            f"the estimator has {len(estimator.posterior_samples_)} sample of {len(known)} "
            "hyper-parameters, which is no distribution to draw; fit it with optimizer='auto' and "
            "a kernel with a free hyper-parameter."
        )
    if names is None:
        return list(range(len(known))), known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"names holds {unknown[0]!r}; the hyper-parameters are {', '.join(known)}."
        )
    return [known.index(name) for name in names], list(names)


def _logarithmic(ax: "Axes", side: str, low: float, high: float) -> None:
    """Make the axis "x" or "y" logarithmic, with plain ticks where it spans little."""
    from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

    ax.set(**{f"{side}scale": "log"})
    if high < 30 * low:
        axis = getattr(ax, f"{side}axis")
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
        axis.set_minor_locator(NullLocator())
