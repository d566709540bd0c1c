"""The figures of ``ulisse.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from _s2vgp_study import Row, Study
from _ulisse_chains import running, running_r_hat
from _ulisse_problem import NAMES

Panels = Callable[..., tuple[Any, Any]]


def draw(figure: int, study: Study, path: Path) -> None:
    """Draw a study to a file, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("\nno figure: matplotlib is not installed (pip install skgp[plot])")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def panels(rows: int, columns: int, height: float = 3.4, width: float = 4.2) -> tuple[Any, Any]:
        size = (width * columns, height * rows)
        return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")

    drawn = _FIGURES[figure](study, panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    plt.close(drawn)
    print(f"\nfigure: {path}")


def _by_condition(axis: Any, rows: list[Row], name: str, key: str, **style: Any) -> None:
    """A curve for each solver against the condition number."""
    for number, solver in enumerate(dict.fromkeys(row[name] for row in rows)):
        mine = [row for row in rows if row[name] == solver]
        # Markers differ besides colours: there are as many solvers as ten.
        look = {"marker": "osv^D*<>"[number % 8], "markersize": 4, "linewidth": 0.8, **style}
        kappa = [float(row["kappa"]) for row in mine]
        axis.plot(kappa, [row[key] for row in mine], label=solver, **look)
    axis.set(xscale="log", xlabel="condition number")


def _legend(figure: Any, axis: Any) -> None:
    """Of all panels, below them."""
    handles = axis.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize="x-small")


def _systems(study: Study, panels: Panels) -> Any:
    figure, axes = panels(1, 3)
    titles = {
        "products": "products with K",
        "seconds": "processor seconds",
        "error": "norm of the error",
    }
    for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
        _by_condition(axis, study.curves["rows"], "solver", key)
        axis.set(yscale="log", title=title)
    _legend(figure, axes[0, 0])
    return figure


def _unbiased(study: Study, panels: Panels) -> Any:
    """Bias with its noise: points on the dotted line are as far off as chance explains."""
    figure, axes = panels(1, 3)
    rows = [row for row in study.curves["rows"] if row["solver"] != "CG"]
    for axis, key in zip(axes[0], ("products", "sd / length", "bias"), strict=True):
        _by_condition(axis, rows, "solver", key)
        axis.set(title=key)
    axes[0, 1].set_yscale("symlog", linthresh=1e-3)
    axes[0, 2].set_yscale("log")
    noise = [row for row in rows if row["solver"] == "adaptive, q 0.1"]
    _by_condition(axes[0, 2], noise, "solver", "noise of it", color="0.5", linestyle=":")
    axes[0, 2].set(title="bias; dotted: what chance makes of none")
    _legend(figure, axes[0, 0])
    return figure


def _gradients(study: Study, panels: Panels) -> Any:
    figure, axes = panels(1, 3)
    titles = {
        "log10 error^2": "log10 of the squared relative error",
        "products": "products with K",
        "seconds": "processor seconds",
    }
    for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
        _by_condition(axis, study.curves["rows"], "estimate", key)
        axis.set(title=title)
    for axis in axes[0, 1:]:
        axis.set(yscale="log")
    _legend(figure, axes[0, 0])
    return figure


def _chains(study: Study, panels: Panels) -> Any:
    """A row a sampler: first chain, running mean and two deviations; exact ones dashed; R-hat."""
    samplers = [name for name in study.curves if name != "exact"]
    exact = study.curves.get("exact")
    figure, axes = panels(len(samplers), len(NAMES) + 1, height=2.6, width=3.4)
    for line, name in zip(axes, samplers, strict=True):
        chains = study.curves[name]
        mean, std = running(chains[0])
        for j, (axis, label) in enumerate(zip(line, NAMES, strict=False)):
            axis.plot(chains[0, :, j], color="0.75", linewidth=0.5)
            for reach in (-2, 0, 2):
                axis.plot(mean[:, j] + reach * std[:, j], color="k", linewidth=1)
                if exact is not None:
                    axis.axhline(exact[0, j] + reach * exact[1, j], color="C3", linestyle="--")
            axis.set(title=f"{name}: log {label}", xlabel="draw")
        line[-1].plot(*running_r_hat(chains))
        line[-1].axhline(1.01, color="k", linestyle=":")
        line[-1].set(title="R-hat", xlabel="draws of each chain")
    return figure


_FIGURES: dict[int, Callable[[Study, Panels], Any]] = {
    2: _systems,
    3: _unbiased,
    4: _gradients,
    5: _chains,
    6: _chains,
}
