"""Figures 1 to 6 of Wei, Sheth and Khardon, "Direct loss minimization for sparse GPs", 2021.

Sparse GPs trained by the ELBO, by the ELBO with a tuned weight of its KL term, by FITC, and by the
loss they are judged by, with hyper-parameters of the ELBO ("fixed") or of their own ("joint"), are
fitted to random subsets of several sizes. Each fit runs in a process of its own and adds a row to
``FOLDER/dlm.csv``: the test NLL (nats a row) and the squared error, the error rate or the mean
relative error |y' - y| / max(1, y). Rows that are there already are not computed again: an
interrupted run goes on where it stopped. At the end the rows are printed, with marks for where DLM
wins, and drawn to ``FOLDER/dlm.png`` if matplotlib is there.

    python examples/papers/dlm.py --data-dir FOLDER
    python examples/papers/dlm.py --data-dir FOLDER --quick
    python examples/papers/dlm.py --data-dir FOLDER --data pol abalone --sizes 500 2000
    python examples/papers/dlm.py --data-dir FOLDER --figure gradients

==================  ===============================================================================
method
==================  ===============================================================================
elbo, beta-elbo     the bound with beta = 1, and with beta chosen on rows held out
fitc                FITC (regression)
fixed-dlm           log-loss DLM, beta chosen, hyper-parameters learned by the ELBO and kept
joint-dlm           log-loss DLM, beta chosen, hyper-parameters learned with it
square-dlm          square-loss DLM, beta chosen (regression)
==================  ===============================================================================

``--data-dir`` holds one ``NAME.npz`` a data set with ``X`` (n, d) and ``y`` (n,); twonorm, and
ringnorm where it has no file, come from their generators. Numbers of inducing points are those of
the paper's supplement, and so is the isotropic RBF kernel on standardised inputs (``--ard``: a
length scale for each column). Regression is scored with y standardised by its training part.

What differs from the paper: beta is chosen by ``beta="auto"``, where the paper tries n, n/2, ...,
0.01 on 8% or 10% of all rows beside the training rows. Here a tenth of the training rows is held
out, so that every method has the same rows in all; the path of halvings from 8 to 0.015 ends when
it has risen twice, and of the values within a standard error of the best the largest is taken.
Log-expectations are integrated (``gradient="auto"``), counts too, where the paper draws 10 samples;
the solver is the estimator's own, not Adam for up to 5000 steps; counts have a constant prior mean.
``sarcos_testpart`` is the official test file alone, and kin40k stands in for the song data.

A mark compares two methods over the repetitions, which differ in training and test rows: ``+`` or
``-`` where the mean of the paired differences is larger than its standard error, ``=`` elsewhere.
Two equal methods so earn a ``+`` about one time in five: single marks mean little, their sums more.

``--figure gradients`` measures the estimators of the gradient instead (supplement, figures 8 to
14): see ``_dlm_gradients.py``.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _dlm_tasks import (
    LOSSES,
    METHODS,
    REFERENCES,
    TASKS,
    draw_part,
    make_estimator,
    methods_for,
    needs_file,
    sizes_for,
    test_scores,
)
from _runs import Results, Row, data_path, peak_gigabytes

KEYS = ("data", "method", "size", "repetition", "kernel", "params")
VALUES = ("n_test", "nll", "loss", "beta", "n_iter", "fit_seconds", "peak_gb")
QUICK = {"data": ["sarcos_testpart", "banana", "abalone"], "sizes": [200, 500], "repetitions": 2}
Cells = dict[tuple[str, int, str], dict[int, dict[str, str]]]


def main() -> int:
    """Compute the rows that are missing, print and draw them; 1 if some fit failed."""
    args = parse_arguments()
    if args.figure == "gradients":
        import _dlm_gradients

        return _dlm_gradients.measure(args)
    jobs = list(all_jobs(args))
    results = Results(args.out / "dlm.csv", KEYS, VALUES)
    failed = results.compute(jobs, run, args.data_dir)
    cells = gather(jobs, results)
    print_tables(cells, args.ard)
    print_summary(cells)
    draw(cells, args.out / "dlm.png")
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """What to fit, where the data are and where the rows go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of NAME.npz files")
    parser.add_argument("--figure", choices=["losses", "gradients"], default="losses")
    parser.add_argument("--data", nargs="+", choices=list(TASKS), metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="N", help="training rows")
    parser.add_argument("--repetitions", type=int, help="(5)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--ard", action="store_true", help="a length scale for each column")
    parser.add_argument("--beta", type=float, default=0.1, help="of --figure gradients (0.1)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script out")
    parser.add_argument("--out", type=Path, default=Path("results/dlm"), help="(results/dlm)")
    args = parser.parse_args()
    defaults = {"data": list(TASKS), "sizes": None, "repetitions": 5}
    if args.figure == "gradients":
        defaults["data"] = ["abalone", "banana"]
    elif args.quick:
        defaults = QUICK
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    absent = [
        name
        for name in args.data
        if needs_file(name) and not data_path(args.data_dir, name).exists()
    ]
    if absent:
        parser.error(f"--data-dir {args.data_dir} has no {', '.join(absent)}; give names it has")
    return args


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job a fit; a whole repetition before the next, so that an early stop leaves a table."""
    sizes = {data: sizes_for(args.data_dir, data, args.sizes) for data in args.data}
    for repetition in range(args.repetitions):
        for data in args.data:
            for size in sizes[data]:
                for method in methods_for(data, args.methods):
                    yield {
                        "data": data,
                        "method": method,
                        "size": size,
                        "repetition": repetition,
                        "kernel": "ard" if args.ard else "isotropic",
                        "params": json.dumps(METHODS[method], sort_keys=True),
                    }


def run(job: Row, folder: Path) -> Row:
    """Fit to a random subset, score on the test rows."""
    data, kind = job["data"], TASKS[job["data"]].kind
    part = draw_part(folder, data, job["size"], job["repetition"])
    start = time.perf_counter()
    params = json.loads(job["params"])
    ard = job["kernel"] == "ard"
    model = make_estimator(data, part.X_train.shape[1], ard, job["repetition"], params)
    model.fit(part.X_train, part.y_train)
    seconds = time.perf_counter() - start
    return {
        "n_test": len(part.y_test),
        **test_scores(model, kind, part),
        "beta": getattr(model, "beta_", 1.0),
        "n_iter": model.n_iter_,
        "fit_seconds": seconds,
        "peak_gb": peak_gigabytes(),
    }


def gather(jobs: list[Row], results: Results) -> Cells:
    """Rows by data set, size and method, then by repetition."""
    cells: Cells = {}
    for job in jobs:
        if row := results.find(job):
            cell = (job["data"], job["size"], job["method"])
            cells.setdefault(cell, {})[job["repetition"]] = row
    return cells


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error; NaN for the latter of one value."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def mark(cells: Cells, cell: tuple[str, int, str], reference: str, column: str) -> str:
    """``+`` if the cell's method beats the reference, ``-``, ``=``; empty if not comparable."""
    ours, theirs = cells[cell], cells.get((cell[0], cell[1], reference), {})
    both = sorted(ours.keys() & theirs.keys())
    if len(both) < 2:
        return ""
    gains = np.array([float(theirs[r][column]) - float(ours[r][column]) for r in both])
    mean, error = mean_and_error(gains)
    return "=" if abs(mean) <= error else "+" if mean > 0 else "-"


def print_tables(cells: Cells, ard: bool) -> None:
    """One table a data set, one line a size and method."""
    for data in dict.fromkeys(data for data, _, _ in cells):
        kind, n_inducing = TASKS[data]
        units = ", y standardised" if kind == "regression" else ""
        print(
            f"\n{data}: {n_inducing} inducing points, {'ARD' if ard else 'isotropic'} RBF{units}; "
            f"marks against {', '.join(REFERENCES)}"
        )
        print(
            f"{'n':>7}  {'method':<11}{'NLL':>17}{'':>7}{LOSSES[kind]:>17}{'':>7}"
            f"{'beta':>9}{'fit':>9}  repetitions"
        )
        for cell in cells:
            if cell[0] == data:
                print(table_line(cells, cell))


def table_line(cells: Cells, cell: tuple[str, int, str]) -> str:
    """Mean and standard error of both losses, marks, the median of beta, seconds of a fit."""
    rows = list(cells[cell].values())
    text = f"{cell[1]:>7}  {cell[2]:<11}"
    for column in ("nll", "loss"):
        mean, error = mean_and_error(np.array([float(row[column]) for row in rows]))
        marks = ""
        if cell[2] not in REFERENCES:
            marks = " ".join(mark(cells, cell, name, column) for name in REFERENCES)
        text += f"{mean:>9.4f} ± {error:<6.4f}{marks:<6}"
    beta = np.median([float(row["beta"]) for row in rows])
    seconds = np.mean([float(row["fit_seconds"]) for row in rows])
    return f"{text}{beta:>9.3g}{seconds:>7.1f} s  {len(rows)}"


def print_summary(cells: Cells) -> None:
    """In how many cells each DLM beats each reference, and in how many it loses."""
    print("\nMarks over all data sets and sizes: wins / level / losses")
    for method in dict.fromkeys(name for _, _, name in cells if name not in REFERENCES):
        for column, title in (("nll", "NLL"), ("loss", "loss")):
            for reference in REFERENCES:
                marks = [
                    mark(cells, cell, reference, column) for cell in cells if cell[2] == method
                ]
                if any(marks):
                    counts = " / ".join(str(marks.count(sign)) for sign in "+=-")
                    print(f"  {title:<5}{method:<11} against {reference:<10} {counts}")


def draw(cells: Cells, path: Path) -> None:
    """Both losses against the number of training rows; a column of panels a data set."""
    try:
        import matplotlib
    except ImportError:
        print("\nno figure: matplotlib is not installed (pip install skgp[plot])")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(data for data, _, _ in cells))
    if not names:
        return
    shape = {"figsize": (3.2 * len(names), 5.6), "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(2, len(names), **shape)
    for data, pair in zip(names, axes.T, strict=True):
        titles = ("test NLL, nats", f"test {LOSSES[TASKS[data].kind]}")
        for axis, column, title in zip(pair, ("nll", "loss"), titles, strict=True):
            for index, method in enumerate(METHODS):
                curve = [
                    (size, *mean_and_error(np.array([float(r[column]) for r in rows.values()])))
                    for (name, size, other), rows in cells.items()
                    if (name, other) == (data, method)
                ]
                if curve:
                    sizes, means, errors = zip(*sorted(curve), strict=True)
                    style = {"color": f"C{index}", "capsize": 2, "marker": "o", "markersize": 3}
                    axis.errorbar(sizes, means, np.nan_to_num(errors), label=method, **style)
            axis.set(xscale="log", xlabel="training rows", ylabel=title)
        pair[0].set_title(data)
    axes[0, 0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\nfigure: {path}")


if __name__ == "__main__":
    sys.exit(main())
