"""Display of how a fit went: the objective of each stage, iteration by iteration."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from skgp.displays.common import panel_axes, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
