"""The figures of ``s2vgp.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _s2vgp_study import Study

Panels = Callable[..., tuple[Any, Any]]


def draw(name: str, study: Study, path: Path) -> None:
    """Draw a study to a file, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("\nno figure: matplotlib is not installed (pip install skgp[plot])")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def panels(rows: int, columns: int, height: float = 2.4, width: float = 4.5) -> tuple[Any, Any]:
        size = (width * columns, height * rows)
        return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")

    figure = _FIGURES[name](study.curves, panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"\nfigure: {path}")


def _band(axis: Any, x: np.ndarray, mean: np.ndarray, std: np.ndarray, **style: Any) -> None:
    """Mean and two standard deviations to both sides."""
    (line,) = axis.plot(x, mean, **style)
    axis.fill_between(
        x, mean - 2 * std, mean + 2 * std, color=line.get_color(), alpha=0.2, linewidth=0
    )


def _solar(curves: dict[str, Any], panels: Panels) -> Any:
    """One panel a model."""
    figure, axes = panels(len(curves["fits"]), 1, width=9)
    x, y, test = curves["x"], curves["y"], curves["test"]
    for axis, (name, (mean, var)) in zip(axes[:, 0], curves["fits"].items(), strict=True):
        _band(axis, curves["grid"], mean, np.sqrt(var), color="C0")
        axis.plot(x[~test], y[~test], "k.", markersize=2)
        axis.plot(x[test], y[test], "C3.", markersize=2)
        if name != "exact":
            axis.plot(curves["knots"], np.full(len(curves["knots"]), -3.0), "k|", markersize=5)
        axis.set(title=name, ylim=(-3.2, 3.2), ylabel="irradiance")
    axes[-1, 0].set_xlabel("year")
    return figure


def _speech(curves: dict[str, Any], panels: Panels) -> Any:
    """Divergence by inducing times and by seconds; the fit around the gap."""
    figure, axes = panels(1, 3, height=3.6)
    names = [name for name in curves if name.startswith("KL ")]
    for colour, name in enumerate(names):
        for kind, line in (("S2VGP", "-"), ("SVGP", "--")):
            rows = [row for row in curves[name] if row["model"].startswith(f"{kind}-")]
            sizes = [int(row["model"].split("-")[1]) for row in rows]
            KL = [row["KL"] for row in rows]
            label = f"{kind}, {name[3:]} harmonics"
            style = {"color": f"C{colour}", "linestyle": line, "marker": ".", "label": label}
            axes[0, 0].loglog(sizes, KL, **style)
            axes[0, 1].loglog([row["seconds"] for row in rows], KL, **style)
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set(xlabel="inducing times", ylabel="KL, nats")
    axes[0, 1].set(xlabel="seconds")
    axes[0, 0].legend(fontsize="x-small")
    mean, var = curves["fit"]
    x, y, hidden = curves["x"], curves["y"], curves["hidden"]
    _band(axes[0, 2], 1e3 * x, mean, np.sqrt(var), color="C0", linewidth=0.8)
    axes[0, 2].plot(1e3 * x[~hidden], y[~hidden], "k.", markersize=1.5)
    for knot in curves["knots"]:
        axes[0, 2].axvline(1e3 * knot, color="C3", linewidth=0.2)
    middle = 1e3 * x[len(x) // 2]
    axes[0, 2].set(xlim=(middle - 30, middle + 50), xlabel="ms")
    return figure


def _delays(curves: dict[str, Any], panels: Panels) -> Any:
    """What each column adds."""
    effects = curves["effects"]
    figure, axes = panels(2, (len(effects) + 1) // 2, width=3)
    for number, (axis, effect) in enumerate(zip(axes.ravel(), effects, strict=False)):
        _band(axis, *effect)
        axis.set(xlabel=f"column {number}")
    return figure


def _warping(curves: dict[str, Any], panels: Panels) -> Any:
    """The warps, and both series with what was removed of them."""
    data, model = curves["shown"]
    figure, axes = panels(1, 3, height=3.0)
    grid = np.linspace(0, 1, 401)
    for k, warp in enumerate(model.warps()):
        axes[0, 0].plot(grid, warp, label=f"a_{k + 1}")
        axes[0, 0].plot(grid, grid ** (k + 1), "k:", linewidth=0.8)
        mean, var = model.predict(k, grid)
        axis, removed = axes[0, k + 1], data.removed[k]
        _band(axis, grid, mean, np.sqrt(var), color=f"C{k}")
        axis.plot(data.x[k][~removed], data.y[k][~removed], "k.", markersize=1)
        axis.plot(data.x[k][removed], data.y[k][removed], "C3.", markersize=2)
        axis.set(title=f"series {k + 1}", xlabel="x")
    axes[0, 0].set(title="warps; dotted: true", xlabel="x")
    axes[0, 0].legend()
    return figure


def _optimisers(curves: dict[str, Any], panels: Panels) -> Any:
    """Nats below the best bound; a thin line a data set."""
    figure, axes = panels(1, len(curves), height=3.2)
    for axis, (noise, traces) in zip(axes[0], curves.items(), strict=True):
        for colour, (name, gaps) in enumerate(traces.items()):
            for number, gap in enumerate(gaps):
                label = None if number else name
                axis.semilogy(gap + 1e-6, color=f"C{colour}", linewidth=0.7, label=label)
        axis.set(title=f"{noise} noise", xlabel="iteration", ylabel="nats below the best")
    axes[0, 0].legend()
    return figure


def _classification(curves: dict[str, Any], panels: Panels) -> Any:
    """Labels, the latent function and the truth."""
    figure, axes = panels(1, 1, height=3.2, width=8)
    axis, (mean, var) = axes[0, 0], curves["latent"]
    shown = np.random.default_rng(0).normal(4.0 * (2 * curves["y"] - 1), 0.1)
    axis.plot(curves["x"], shown, ".", color="0.6", markersize=1)
    _band(axis, curves["grid"], mean, np.sqrt(var), color="C3", label="f")
    axis.plot(curves["grid"], curves["truth"], "C0", linewidth=0.8, label="truth")
    axis.set(xlabel="x")
    axis.legend()
    return figure


_FIGURES: dict[str, Callable[[dict[str, Any], Panels], Any]] = {
    "solar": _solar,
    "speech": _speech,
    "delays": _delays,
    "warping": _warping,
    "optimisers": _optimisers,
    "classification": _classification,
}
