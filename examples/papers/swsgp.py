"""Experiments of Tran, Milios, Michiardi and Filippone, "Sparse within sparse GPs", 2021.

    python examples/papers/swsgp.py --data-dir FOLDER
    python examples/papers/swsgp.py --data-dir FOLDER --quick
    python examples/papers/swsgp.py --data-dir FOLDER --study figure3 --data german spambase
    python examples/papers/swsgp.py --data-dir FOLDER --study large figure5 --repetitions 1

=========  =================================================================================
study
=========  =================================================================================
figure3    M = 32 ... 128 inducing points, H = 4, 8, 16 of them active: SWSGP-M-H, SVGP-M,
           SVGP-16, and SVGP trained with M points but predicted from the H nearest
table1     odd or even MNIST digits: times of an iteration and of a prediction, scores over time
large      up to 1e5 inducing points: protein, and flights_nyc13 as delayed (y > 0) or not
table3     SWSGP-64-H and local GPs: powerplant and kin40k (7000 training rows)
figure5    joint predictions of 2000 rows of powerplant, next to a full GP of the same kernel
=========  =================================================================================

Each fit runs in a process of its own and adds a row to ``FOLDER/swsgp.csv`` (``--out``); rows that
are there already are not computed again. Means over the repetitions are printed, written to
``FOLDER/STUDY.csv`` and drawn to ``FOLDER/STUDY.png`` if matplotlib is there. Losses are the RMSE
and the mean NLL (nats a row) for y standardised by its training part, in table 3 in y's units, or
the error rate. Seconds are the processor's, of all threads: set ``OMP_NUM_THREADS``.

``--data-dir`` holds one ``NAME.npz`` a data set with ``X`` (n, d), ``y`` (n,) and ``test_mask``
(n, splits), True for test rows; repetition r takes split r, modulo their number. The peers are
gpytorch's SVGP (``pip install skgp[bench]``), for as many seconds as ``--seconds`` says, gradient-
boosted trees and exact GPs of scikit-learn. The kernel is the paper's Matern-5/2 with a length
scale for each column, of MNIST with one; in the study of large M, and for the SWSGP "default" of
table 1, the estimator chooses.

What differs from the paper: hyper-parameters start from a leave-one-out likelihood and q(u) from
its closed form or natural gradients; Algorithm 1 moves all of them from there for 1500 steps
(figure 3, table 3, "adam" of table 1), where the paper takes 300000 from scratch. The divergence
weighs M / H (``--kl-weight 1`` is the paper's). Inducing points of MNIST stay where k-means puts
them: in 784 columns Adam moves them too far at a step. Times are of processors, not of a GPU. In
figure 5 all models share the full GP's hyper-parameters, so that only the approximation differs;
"local" is J, "union" the paper's SWSGP-U without its training on unions. kin40k stands in for kin,
flights of 2013 from New York for those of 2008, protein is the logarithm of its target.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Results, Row, data_path
from _swsgp_tasks import BATCHES, KINDS, LOSSES, NEIGHBORS, run

KEYS = ("study", "data", "method", "m", "h", "repetition", "limit", "params")
TIMES = ("fit_seconds", "iteration_ms", "row_ms", "peak_gb")
VALUES = ("n_train", "scale", "loss", "nll", *TIMES, "more")
DATA = {
    "figure3": ("powerplant", "protein", "spambase", "german"),
    "table1": ("mnist",),
    "large": ("protein", "flights_nyc13"),
    "table3": ("powerplant", "kin40k"),
    "figure5": ("powerplant",),
}
SECONDS = {"figure3": 30.0, "table1": 600.0, "large": 120.0}
QUICK = {"rows": 300, "repetitions": 1, "seconds": 1.5, "max_iter": 20}
QUICK_DATA = {"figure3": ("german",), "large": ("flights_nyc13",), "table3": ("powerplant",)}
TABLE3_ROWS = 7000
Cells = dict[tuple[str, str], list[dict[str, Any]]]


def main() -> int:
    """Compute the rows that are missing, print and draw them; 1 if some fit failed."""
    args = parse_arguments()
    jobs = list(all_jobs(args))
    results = Results(args.out / "swsgp.csv", KEYS, VALUES)
    failed = results.compute(jobs, run, args.data_dir)
    for study in args.study:
        rows = [row for job in jobs if job["study"] == study and (row := results.find(job))]
        if study == "figure5":
            table = joint_table(rows)
        else:
            table = means(gather(rows))
        print_table(study, table)
        write_table(table, args.out / f"{study}.csv")
        draw(study, table, rows, args.out / f"{study}.png")
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """What to fit, where the data are and where the rows go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of NAME.npz files")
    parser.add_argument("--study", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--data", nargs="+", choices=list(KINDS), metavar="NAME")
    parser.add_argument("--repetitions", type=int, help="(5)")
    parser.add_argument("--seconds", type=float, help="of a fit of SVGP (30, 600 or 120)")
    parser.add_argument("--kl-weight", type=float, help="of SWSGP (M / H)")
    parser.add_argument("--inducing", choices=["learned", "fixed"], default="learned")
    parser.add_argument("--quick", action="store_true", help="few rows, to try the script out")
    parser.add_argument("--out", type=Path, default=Path("results/swsgp"), help="(results/swsgp)")
    args = parser.parse_args()
    if args.repetitions is None:
        args.repetitions = QUICK["repetitions"] if args.quick else 5
    if args.seconds is None and args.quick:
        args.seconds = QUICK["seconds"]
    needed = {name for study in args.study for name in chosen_data(args, study)}
    absent = sorted(name for name in needed if not data_path(args.data_dir, name).exists())
    if absent:
        parser.error(f"--data-dir {args.data_dir} has no {', '.join(absent)}; give names it has")
    return args


# ---- what to fit ---------------------------------------------------------------------------


def chosen_data(args: argparse.Namespace, study: str) -> list[str]:
    """Data sets of a study that are asked for."""
    names = QUICK_DATA.get(study, DATA[study]) if args.quick else DATA[study]
    return [name for name in names if args.data is None or name in args.data]


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job a fit; a whole repetition before the next, so that an early stop leaves a table."""
    for repetition in range(args.repetitions):
        for study in args.study:
            for data in chosen_data(args, study):
                limit = TABLE3_ROWS if study == "table3" else 0  # 0: all rows
                for method, m, h, params in STUDIES[study](args, data):
                    yield {
                        "study": study,
                        "data": data,
                        "method": method,
                        "m": m,
                        "h": h,
                        "repetition": repetition,
                        "limit": QUICK["rows"] if args.quick else limit,
                        "params": json.dumps(params, sort_keys=True),
                    }


Fits = Iterator[tuple[str, int, int, dict[str, Any]]]


def swsgp_params(args: argparse.Namespace, **params: Any) -> dict[str, Any]:
    """Parameters of SWSGP that the command line asks for."""
    if args.kl_weight is not None:
        params["kl_weight"] = args.kl_weight
    return params


def algorithm_1(args: argparse.Namespace, **params: Any) -> dict[str, Any]:
    """Those of Algorithm 1; inducing points move unless `params` or the command line say no."""
    if args.quick:
        params["max_iter"] = QUICK["max_iter"]
    common = {"solver": "adam", "inducing": args.inducing, "init": "k-means"}
    return swsgp_params(args, **{**common, **params})


def svgp_params(args: argparse.Namespace, study: str) -> dict[str, Any]:
    return {"max_seconds": args.seconds or SECONDS[study]}


def figure3(args: argparse.Namespace, data: str) -> Fits:
    """Impact of M and H."""
    svgp = svgp_params(args, "figure3")
    if not args.quick:
        yield "svgp", 16, 0, svgp
    for m in (32,) if args.quick else (32, 64, 96, 128):
        yield "svgp", m, max(NEIGHBORS), svgp
        for h in NEIGHBORS[:1] if args.quick else NEIGHBORS:
            yield "swsgp", m, h, algorithm_1(args, covariance="full")


def table1(args: argparse.Namespace, data: str) -> Fits:
    """Running time."""
    m = 64 if args.quick else 1024
    yield "svgp", m, 0, {**svgp_params(args, "table1"), "batch_size": 64}
    yield "swsgp-adam", m, 4, algorithm_1(args, inducing="fixed", batch_size=64)
    if not args.quick:
        yield "swsgp", m, 4, swsgp_params(args)
    yield "swsgp", 0, 32, swsgp_params(args, default_kernel=True)


def large(args: argparse.Namespace, data: str) -> Fits:
    """Many inducing points; 0 of them stands for one a row, at most 1e5."""
    sizes = (3000, 10_000, 0) if data == "protein" else (1000, 10_000, 100_000)
    svgp = (128, 512) if data == "protein" else (200, 512)
    if args.quick:
        sizes, svgp = (100,), (32,)
    for m in svgp:
        yield "svgp", m, 0, svgp_params(args, "large")
    if data == "flights_nyc13":
        yield "trees", 0, 0, {"max_iter": QUICK["max_iter"] if args.quick else 1500}
    for m in sizes:
        yield "swsgp", m, 32, swsgp_params(args, default_kernel=True)


def table3(args: argparse.Namespace, data: str) -> Fits:
    """Local GPs."""
    local = {"n_experts": 4} if args.quick else {}
    for h in (8,) if args.quick else (4, 8):
        yield "swsgp", 64, h, algorithm_1(args, covariance="full")
    yield "inductive", 0, 0, local
    yield "transductive", 0, 0, local


def figure5(args: argparse.Namespace, data: str) -> Fits:
    """Joint predictions; one job a repetition, for all models are of its full GP's kernel."""
    n_rows, neighbors = (200, [16]) if args.quick else (2000, [4, 8, 16, 32, 64])
    yield "covariances", 512, 0, {"n_rows": n_rows, "neighbors": neighbors}


STUDIES = {
    "figure3": figure3,
    "table1": table1,
    "large": large,
    "table3": table3,
    "figure5": figure5,
}


# ---- tables --------------------------------------------------------------------------------


def name_of(row: Row) -> str:
    """As in the paper: SWSGP-M-H, SVGP-M."""
    sizes = {"swsgp": ("m", "h"), "swsgp-adam": ("m", "h"), "svgp": ("m",)}
    parts = [row["method"], *(str(row[key]) for key in sizes.get(row["method"], ()))]
    return "-".join("n" if part == "0" else part for part in parts)


def gather(rows: list[Row]) -> Cells:
    """Values of the repetitions by data set and model; SVGP from the H nearest is one more."""
    cells: Cells = {}
    for row in rows:
        values = {key: float(row[key]) for key in ("loss", "nll", *TIMES)}
        if row["study"] == "table3":  # in y's units, as in the paper
            values["loss"] *= float(row["scale"])
            values["nll"] += np.log(float(row["scale"]))
        cells.setdefault((row["data"], name_of(row)), []).append(values)
        nearest = json.loads(row["more"]).get("nearest", {}) if row["more"] else {}
        for h, scores in nearest.items():
            more = {**dict.fromkeys(TIMES, np.nan), **scores}
            cells.setdefault((row["data"], f"{name_of(row)}-{h}"), []).append(more)
    return cells


def means(cells: Cells) -> list[Row]:
    """One row a data set and model: means and standard errors of the losses, means of times."""
    table = []
    for (data, model), rows in cells.items():
        line: Row = {"data": data, "model": model, "repetitions": len(rows)}
        for key in ("loss", "nll"):
            values = np.array([row[key] for row in rows])
            line[key] = values.mean()
            spread = values.std(ddof=1) if len(values) > 1 else np.nan
            line[f"{key}_error"] = spread / np.sqrt(len(values))
        table.append(line | {key: np.mean([row[key] for row in rows]) for key in TIMES})
    return table


def joint_table(rows: list[Row]) -> list[Row]:
    """Figure 5: one row a model and batch size, means over the repetitions."""
    batches = [json.loads(row["more"]) for row in rows]
    table = []
    for size in BATCHES:
        for model in batches[0][str(size)] if batches else ():
            scores = [batch[str(size)][model] for batch in batches]
            line = {key: np.mean([score[key] for score in scores]) for key in scores[0]}
            table.append({"data": "powerplant", "model": model, "batch": size, **line})
    return table


def print_table(study: str, table: list[Row]) -> None:
    """Columns as they are in the table, a heading for each data set."""
    for data in dict.fromkeys(line["data"] for line in table):
        columns = [key for key in table[0] if key != "data"]
        print(f"\n{study}, {data}: loss is the {LOSSES[KINDS[data]]}, nll in nats a row")
        print(f"  {columns[0]:<18}" + "".join(f"{key:>15}" for key in columns[1:]))
        for line in table:
            if line["data"] == data:
                cells = "".join(f"{line[key]:>15.4g}" for key in columns[1:])
                print(f"  {line[columns[0]]:<18}{cells}")


def write_table(table: list[Row], path: Path) -> None:
    """The same for other programs."""
    if table:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)


# ---- figures -------------------------------------------------------------------------------


def draw(study: str, table: list[Row], rows: list[Row], path: Path) -> None:
    """The figure of a study, if it has one and matplotlib is there."""
    if study == "table3" or not table:
        return
    try:
        import matplotlib
    except ImportError:
        print("\nno figure: matplotlib is not installed (pip install skgp[plot])")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if study == "figure5":
        names = ["powerplant"]
        figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
        draw_joint(axes.ravel(), table)
    else:
        names = list(dict.fromkeys(line["data"] for line in table))
        shape = {"figsize": (4.2 * len(names), 6.5), "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(2, len(names), **shape)
        for data, pair in zip(names, axes.T, strict=True):
            lines = [line for line in table if line["data"] == data]
            for axis, key in zip(pair, ("loss", "nll"), strict=True):
                if study == "figure3":
                    draw_sweep(axis, lines, key)
                else:
                    traces = [row for row in rows if row["data"] == data and row["more"]]
                    draw_times(axis, lines, traces, key)
                axis.set_ylabel(LOSSES[KINDS[data]] if key == "loss" else "NLL, nats")
            pair[0].set_title(data)
    axes.ravel()[len(names) - 1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def draw_sweep(axis: Any, lines: list[Row], key: str) -> None:
    """Losses against M, a line for SVGP and one for each H."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        method, m, *h = line["model"].split("-")
        if line["model"] == "svgp-16":
            axis.axhline(line[key], color="C9", linestyle=":", label="SVGP-16")
            continue
        label = method.upper() + (f", H = {h[0]}" if h else "")
        curves.setdefault(label, []).append((int(m), line[key]))
    for label, points in sorted(curves.items()):
        style = "--" if label.startswith("SVGP,") else "-"
        axis.plot(*zip(*sorted(points), strict=True), style, marker="o", label=label)
    axis.set_xlabel("M")


def draw_times(axis: Any, lines: list[Row], traces: list[Row], key: str) -> None:
    """Losses against training time: the way of SVGP in the first repetition, ends of the rest."""
    for row in traces:
        trace = json.loads(row["more"])["trace"]
        if int(row["repetition"]) == 0 and trace:
            points = [(score["seconds"], score[key]) for score in trace]
            axis.plot(*zip(*points, strict=True), marker=".", label=name_of(row).upper())
    for line in lines:
        if not line["model"].startswith("svgp"):
            axis.plot(line["fit_seconds"], line[key], "*", ms=10, label=line["model"].upper())
    axis.set(xlabel="training time, s", xscale="log")


def draw_joint(axes: Any, table: list[Row]) -> None:
    """RMSE, both NLLs and the error of the covariance against the batch size."""
    titles = {
        "rmse": "RMSE",
        "nll": "NLL of rows, nats",
        "joint_nll": "NLL of batches, nats a row",
        "covariance_mse": "MSE of the covariance",
    }
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for model in dict.fromkeys(line["model"] for line in table):
            if key == "covariance_mse" and model == "full GP":
                continue  # 0
            points = [(line["batch"], line[key]) for line in table if line["model"] == model]
            style = "--" if model.startswith("union") else "-"
            axis.plot(*zip(*points, strict=True), style, marker=".", label=model)
        axis.set(xlabel="batch size", ylabel=title, xscale="log")
    axes[-1].set_yscale("log")


if __name__ == "__main__":
    sys.exit(main())
