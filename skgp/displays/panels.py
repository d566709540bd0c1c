"""Axes of displays that have a panel for each of several quantities."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from skgp.displays.prediction import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def panel_axes(
    n: int, ax: "Axes | Sequence[Axes] | None", n_cols: int, *, caller: str, **kwargs: Any
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


def in_first_column(axis: "Axes") -> bool:
    """Whether nothing is to the left of it on its figure."""
    return axis.get_subplotspec() is None or axis.get_subplotspec().is_first_col()
