"""Every estimator by default beside its peers, on real sets: the page "Comparisons".

``python examples/papers/benchmark.py --data-dir FOLDER --csv FILE [--sets NAME ...] [--methods
NAME ...] [--splits 3]`` fits what the file does not have yet, each in a process of one thread, and
appends a row: RMSE over the standard deviation of the training targets or the share of wrong
classes, mean NLPD (of targets over that deviation), coverage of 95% intervals, seconds of a
processor to fit and to predict, and peak memory beyond imports and data. ``--tables`` prints the
file as the tables of that page, in reStructuredText.

FOLDER holds one NAME.npz of X, y and test_mask a set. Sets of more than 10000 rows have one split,
and at most 10000 test rows, drawn at random. A fit that spends more than ``--limit`` processor
seconds is stopped, and its row says so. gpytorch comes with ``pip install skgp[bench]``; GPBoost
(`pip install gpboost`) is looked up where it is installed.
"""

import argparse
import os
import resource
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from _benchmark_peers import CLASSIFIERS, MOST_ROWS, REGRESSORS
from _runs import Results, Row, some_rows
from threadpoolctl import threadpool_limits

REGRESSION_SETS = (
    *("yacht", "motorcycle", "concrete", "airfoil", "wine", "gas", "skillcraft", "sml", "abalone"),
    *("sarcos_testpart", "pumadyn32nm", "powerplant", "naval", "pol", "california", "house_8L"),
    *("kin40k", "protein", "keggdirected", "satellite_temps"),
)
CLASS_SETS = ("german", "thyroid", "spambase", "banana", "ringnorm")
FEW_ROWS, MOST_TESTED = 10_000, 10_000
KEYS = ("set", "method", "split")
VALUES = ("rows", "error", "nlpd", "coverage", "fit_seconds", "predict_seconds", "megabytes")
COLUMNS = {"error": ".3f", "nlpd": ".3f", "coverage": ".2f", "fit_seconds": ".0f"}


def main() -> int:
    """Fit what is missing, or print the tables; 1 where a fit failed."""
    args = parse_arguments()
    results = Results(args.csv, KEYS, VALUES)
    if args.tables:
        print_tables(results)
        return 0
    jobs = list(all_jobs(args))
    return int(results.compute(jobs, run, args.data_dir, args.limit, failure=stopped) > 0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", default=[*REGRESSION_SETS, *CLASS_SETS])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--limit", type=int, default=900, help="processor seconds of a fit")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if not args.tables and args.data_dir is None:
        parser.error("--data-dir is needed to fit")
    return args


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """Set by set: every method and split that the rules above allow."""
    for name in args.sets:
        methods = CLASSIFIERS if name in CLASS_SETS else REGRESSORS
        with np.load(args.data_dir / f"{name}.npz") as data:
            n, n_splits = data["test_mask"].shape
        n_splits = min(args.splits, n_splits) if n <= FEW_ROWS else 1
        for method in args.methods or methods:
            if method in methods and n <= MOST_ROWS.get(method, n):
                for split in range(n_splits):
                    yield {"set": name, "method": method, "split": split}


def run(job: Row, folder: Path, limit: int) -> Row:
    """Fit and score one model, in this process."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    X, y, test = load(folder / f"{job['set']}.npz", int(job["split"]))
    models = CLASSIFIERS if job["set"] in CLASS_SETS else REGRESSORS
    model = models[job["method"]]()
    tested = np.flatnonzero(test)[some_rows(int(test.sum()), MOST_TESTED)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with threadpool_limits(1):
        model.fit(X[~test], y[~test])
        fitted = time.process_time()
        scores = model.score(X[tested], y[tested])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scores = {"coverage": "", **scores}
    rounded = {k: f"{v:.4g}" if v != "" else v for k, v in scores.items()}
    memory = {"fit_seconds": f"{fitted - start:.3g}", "megabytes": round((peak - before) / 1024)}
    return {"rows": int((~test).sum()), **rounded, **memory}


def load(path: Path, split: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X in float64, y, and which rows are tested."""
    with np.load(path) as data:
        X, y, test = data["X"].astype(float), data["y"], data["test_mask"][:, split]
    return X, y.astype(int) if y.dtype == np.uint8 else y.astype(float), test


def stopped(error: Exception) -> Row | None:
    """The row of a fit that its limit of processor seconds ended; None for another failure."""
    if isinstance(error, BrokenProcessPool):
        return dict.fromkeys(VALUES, "") | {"fit_seconds": "stopped"}
    return None


# ---- tables ------------------------------------------------------------------------------------


def print_tables(results: Results) -> None:
    """One table a kind of figure: a row for each set, a column for each method."""
    for title, models, names in (
        ("Regression", REGRESSORS, REGRESSION_SETS),
        ("Classification", CLASSIFIERS, CLASS_SETS),
    ):
        means = {
            (name, method): mean_of(results, name, method) for name in names for method in models
        }
        if not any(means.values()):
            continue
        print(title + "\n" + "-" * len(title) + "\n")
        for column, form in COLUMNS.items():
            if column == "coverage" and models is CLASSIFIERS:
                continue
            print_table(HEADINGS[title, column], column, form, list(models), names, means)


HEADINGS = {
    ("Regression", "error"): "RMSE over the standard deviation of the training targets",
    ("Regression", "nlpd"): "NLPD of standardised targets, nats per observation",
    ("Regression", "coverage"): "Coverage of 95% intervals",
    ("Regression", "fit_seconds"): "Processor seconds of a fit, one thread",
    ("Classification", "error"): "Share of wrong classes",
    ("Classification", "nlpd"): "NLPD, nats per observation",
    ("Classification", "fit_seconds"): "Processor seconds of a fit, one thread",
}


def mean_of(results: Results, name: str, method: str) -> dict[str, float] | str | None:
    """Means over splits; "stopped" where a fit was; None where there is none."""
    rows = [row for (a, b, _), row in results.rows.items() if (a, b) == (name, method)]
    if any(row["fit_seconds"] == "stopped" for row in rows):
        return "stopped"
    values: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for column in ("rows", *COLUMNS):
            if row[column] != "":
                values[column].append(float(row[column]))
    return {column: float(np.mean(found)) for column, found in values.items()} or None


def print_table(
    heading: str,
    column: str,
    form: str,
    methods: list[str],
    names: tuple[str, ...],
    means: dict[tuple[str, str], Any],
) -> None:
    """A list-table, a row for each method; the best of a set in bold, of errors and NLPD alone."""
    found = {name: [means[name, method] for method in methods] for name in names}
    known = {name: [each for each in row if isinstance(each, dict)] for name, row in found.items()}
    names = tuple(name for name in names if known[name])
    best = {name: format(min(each[column] for each in known[name]), form) for name in names}
    print(f".. list-table:: {heading}\n   :header-rows: 1\n   :stub-columns: 1\n")
    print("   * - ")
    for name in names:
        print(f"     - {name}, {known[name][0]['rows']:.0f}")
    for k, method in enumerate(methods):
        if not any(found[name][k] for name in names):
            continue
        print(f"   * - {method}")
        for name in names:
            text = cell(found[name][k], column, form)
            bold = text == best[name] and column in ("error", "nlpd")
            print(f"     - {f'**{text}**' if bold else text}")
    print()


def cell(found: dict[str, float] | str | None, column: str, form: str) -> str:
    """What a table says of one fit."""
    if isinstance(found, str):
        return found
    return "" if found is None else format(found[column], form)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that fit
    raise SystemExit(main())
