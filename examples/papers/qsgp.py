"""Tables 2 and 3 of Evans and Nair, "Quadruply stochastic Gaussian processes", arXiv:2006.03015.

Every method is fitted to every published split of every data set, each fit in a process of its
own, and adds a row to a CSV file: RMSE and MNLP (mean negative log predictive density, nats a row)
in the units of y and with y standardised by its training part, the coverage of the 95% intervals,
seconds, peak memory. Rows that the file already has are not computed again: an interrupted run goes
on where it stopped. At the end the rows are printed beside the figures of the paper.

    python examples/papers/qsgp.py --data-dir FOLDER
    python examples/papers/qsgp.py --data-dir FOLDER --data pol wine --methods default --splits 1

Figure 1 of the paper is ``qsgp_figure1.py``, figure 2 ``examples/regression/plot_qsgp_band.py``.

The folder holds one ``NAME.npz`` a data set with the arrays ``X`` (n, d), ``y`` (n,) and the
boolean ``test_mask`` (n,) or (n, splits), true for the test rows. The names are those of the
repository treforevans/uci_datasets, which publishes ten splits of each set: the paper's "kegg" is
``keggdirected``, its "keggu" ``keggundirected``, its "ctslice" ``slice``.

The paper trains for 1e5 iterations of stochastic gradients, up to five hours on a GPU:
``--max-iter 100000`` asks the ``sgd`` methods for as many. It does not say in which units its
figures are; ``--units`` prints either.
"""

import argparse
import csv
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Section I.1 and I.2 of the paper for the sgd methods.
FOURIER_SGD = {
    "basis": "fourier",
    "solver": "sgd",
    "n_basis": 100_000,
    "basis_batch_size": 10_000,
    "batch_size": 500,
    "n_support": 500,
    "learning_rate": 0.1,
}
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "fourier-cholesky": {"basis": "fourier", "solver": "cholesky", "n_basis": 4096},
    "fourier-gauss-seidel": {"basis": "fourier", "solver": "gauss-seidel", "n_basis": 100_000},
    "fourier-sgd": {**FOURIER_SGD, "covariance": "diagonal"},  # QSGP-0 of table 2
    "fourier-sgd-100": {**FOURIER_SGD, "covariance": "chevron", "n_dense_columns": 100},  # QSGP-100
    "inducing-cg": {"basis": "inducing", "solver": "cg"},
    "inducing-sgd": {  # QSGP-0 of table 3
        "basis": "inducing",
        "solver": "sgd",
        "covariance": "diagonal",
        "basis_batch_size": 3000,
        "batch_size": 3000,
        "n_support": 200,
    },
}
DEFAULT_DATA = ["kin40k", "protein", "keggdirected"]

# (table, model): RMSE, MNLP of the first split, hours of training a split.
PAPER: dict[str, dict[str, tuple[str, str, str]]] = {
    "kin40k": {
        "table 2, QSGP-0": ("0.174 ± 0.004", "0.135", ""),
        "table 2, QSGP-100": ("0.175 ± 0.004", "0.139", ""),
        "table 2, SVGP": ("0.247 ± 0.004", "0.055", ""),
        "table 3, QSGP-0": ("0.154 ± 0.007", "-0.348", "1.40 h"),
        "table 3, SVGP": ("0.171 ± 0.003", "-0.089", ""),
        "table 3, Yang et al.": ("0.28 ± 0.01", "", ""),
    },
    "protein": {
        "table 2, QSGP-0": ("0.602 ± 0.007", "1.34", ""),
        "table 2, QSGP-100": ("0.602 ± 0.007", "1.34", ""),
        "table 2, SVGP": ("0.542 ± 0.006", "1.06", ""),
        "table 3, QSGP-0": ("0.598 ± 0.007", "1.157", "2.13 h"),
        "table 3, SVGP": ("0.598 ± 0.007", "1.159", ""),
        "table 3, Yang et al.": ("0.53 ± 0.01", "", ""),
    },
    "keggdirected": {
        "table 2, QSGP-0": ("0.135 ± 0.004", "-0.821", ""),
        "table 2, QSGP-100": ("0.135 ± 0.004", "-0.794", ""),
        "table 2, SVGP": ("0.124 ± 0.005", "-0.953", ""),
        "table 3, QSGP-0": ("0.124 ± 0.005", "-0.554", "1.70 h"),
        "table 3, SVGP": ("0.124 ± 0.004", "-0.883", ""),
        "table 3, Yang et al.": ("0.12 ± 0.01", "", ""),
    },
    "slice": {
        "table 2, QSGP-0": ("2.484 ± 0.107", "0.377", ""),
        "table 2, QSGP-100": ("2.488 ± 0.107", "-0.541", ""),
        "table 2, SVGP": ("4.746 ± 0.087", "1.08", ""),
        "table 3, QSGP-0": ("2.574 ± 0.263", "0.149", "5.18 h"),
        "table 3, SVGP": ("2.938 ± 0.098", "-0.440", ""),
        "table 3, Yang et al.": ("4.00 ± 0.12", "", ""),
    },
    "keggundirected": {
        "table 2, QSGP-0": ("0.120 ± 0.004", "0.783", ""),
        "table 2, QSGP-100": ("0.120 ± 0.004", "-0.268", ""),
        "table 2, SVGP": ("0.120 ± 0.003", "36.1", ""),
        "table 3, QSGP-0": ("0.123 ± 0.004", "0.848", "1.46 h"),
        "table 3, SVGP": ("0.118 ± 0.004", "64.014", ""),
        "table 3, Yang et al.": ("0.12 ± 0.00", "", ""),
    },
    "song": {
        "table 2, QSGP-0": ("0.492 ± 0.002", "1.26", ""),
        "table 2, QSGP-100": ("0.492 ± 0.002", "1.26", ""),
        "table 2, SVGP": ("0.488 ± 0.002", "1.26", ""),
        "table 3, QSGP-0": ("0.491 ± 0.002", "1.374", "3.84 h"),
        "table 3, SVGP": ("0.491 ± 0.002", "1.321", ""),
        "table 3, Yang et al.": ("0.49 ± 0.00", "", ""),
    },
}


class Job(NamedTuple):
    """One fit; as strings these fields are also its key in the CSV file."""

    data: str
    method: str
    split: int
    params: str  # JSON of the constructor's arguments


RESULTS = (
    "n_train",
    "n_features",
    "solver",
    "basis",
    "rmse",
    "mnlp",
    "rmse_standardised",
    "mnlp_standardised",
    "coverage_95",
    "fit_seconds",
    "predict_seconds",
    "peak_gb",
)


def main() -> int:
    """Compute the rows that are missing, print the table; 1 if some fit failed."""
    args = parse_arguments()
    jobs = list(all_jobs(args))
    done = read_rows(args.csv)
    failed = 0
    for job in jobs:
        if key(job) not in done:
            print(f"{job.data} split {job.split} {job.method} ...", flush=True)
            try:
                row = in_fresh_process(job, args.data_dir)
            except Exception as error:  # the other fits are worth their rows whatever this one did
                failed += 1
                print(f"  failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            append_row(args.csv, row)
            done[key(job)] = {name: str(value) for name, value in row.items()}
            rmse, mnlp = row["rmse_standardised"], row["mnlp_standardised"]
            print(f"  RMSE {rmse:.4f}, MNLP {mnlp:.3f}, {row['fit_seconds']:.1f} s", flush=True)
    print_tables(jobs, done, args.units)
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """What to fit, where the data are and where the rows go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of NAME.npz files")
    parser.add_argument("--data", nargs="+", default=DEFAULT_DATA, metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--splits", type=int, default=5, help="the first so many splits (5)")
    parser.add_argument("--max-iter", type=int, help="iterations of the sgd methods")
    parser.add_argument("--csv", type=Path, default=Path("results/qsgp.csv"))
    parser.add_argument("--units", choices=["standardised", "raw"], default="standardised")
    args = parser.parse_args()
    absent = [name for name in args.data if not data_path(args.data_dir, name).is_file()]
    if absent:
        parser.error(f"--data-dir {args.data_dir} has no {', '.join(absent)}; give names it has")
    return args


def all_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """One job a data set, method and split, in the order of the table."""
    for data in args.data:
        with np.load(data_path(args.data_dir, data)) as arrays:
            n_splits = split_masks(arrays["test_mask"]).shape[1]
        for method in args.methods:
            params = dict(METHODS[method])
            if args.max_iter is not None and params.get("solver") == "sgd":
                params["max_iter"] = args.max_iter
            for split in range(min(args.splits, n_splits)):
                yield Job(data, method, split, json.dumps(params, sort_keys=True))


def data_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.npz"


def split_masks(test_mask: np.ndarray) -> np.ndarray:
    """Test rows of every split, (n, splits)."""
    return test_mask.reshape(len(test_mask), -1)


def in_fresh_process(job: Job, folder: Path) -> dict[str, Any]:
    """Run one fit in a new interpreter: its peak memory is then its own, and freed at the end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(run, job, folder).result()


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Fit, predict and score; the row of the CSV file."""
    # Here and not above: on Linux a child's peak starts at its parent's, which so stays small.
    from skgp import QSGPRegressor

    with np.load(data_path(folder, job.data)) as arrays:
        test = split_masks(arrays["test_mask"])[:, job.split].astype(bool)
        X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    start = time.perf_counter()
    model = QSGPRegressor(random_state=job.split, **json.loads(job.params)).fit(X[~test], y[~test])
    fitted = time.perf_counter()
    rmse = np.sqrt(np.mean((y[test] - model.predict(X[test])) ** 2))
    mnlp = -np.mean(model.log_predictive_density(X[test], y[test]))
    lower, upper = model.predict_interval(X[test], coverage=0.95)
    scale = y[~test].std()
    results = (
        int((~test).sum()),
        X.shape[1],
        model.solver_,
        model.basis_,
        rmse,
        mnlp,
        rmse / scale,
        mnlp - np.log(scale),  # p(y) = p(z) / scale for z = (y - mean) / scale
        np.mean((lower <= y[test]) & (y[test] <= upper)),
        fitted - start,
        time.perf_counter() - fitted,
        peak_gigabytes(),
    )
    return {**job._asdict(), **dict(zip(RESULTS, results, strict=True))}


def peak_gigabytes() -> float:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e9 / 1024)  # macOS counts bytes


def key(row: Job | dict[str, str]) -> tuple[str, ...]:
    """What tells one fit from another."""
    fields = row._asdict() if isinstance(row, Job) else row
    return tuple(str(fields[name]) for name in Job._fields)


def read_rows(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows that are there already, by their keys."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {key(row): row for row in csv.DictReader(file)}


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one row, and the header to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*Job._fields, *RESULTS])
        if new:
            writer.writeheader()
        writer.writerow(row)


def print_tables(jobs: list[Job], done: dict[tuple[str, ...], dict[str, str]], units: str) -> None:
    """As the paper: mean and deviation of the RMSE over splits, MNLP of the first split."""
    for data in dict.fromkeys(job.data for job in jobs):
        print(f"\n{data}, y {units}")
        print(f"  {'':<30}{'RMSE':>16}{'MNLP':>9}{'in 95%':>8}{'fit':>9}{'peak':>8}  splits")
        for method in dict.fromkeys(job.method for job in jobs):
            wanted = [key(job) for job in jobs if (job.data, job.method) == (data, method)]
            rows = [done[fit] for fit in wanted if fit in done]
            if rows:
                print(f"  {method:<30}{table_line(rows, units)}")
        for model, (rmse, mnlp, hours) in PAPER.get(data, {}).items():
            print(f"  {'paper, ' + model:<30}{rmse:>16}{mnlp:>9}{'':>8}{hours:>9}")


def table_line(rows: list[dict[str, str]], units: str) -> str:
    """One method on one data set."""
    suffix = "_standardised" if units == "standardised" else ""

    def column(name: str) -> np.ndarray:
        return np.array([float(row[name]) for row in rows])

    rmse = column("rmse" + suffix)
    spread = f" ± {rmse.std(ddof=1):.3f}" if len(rmse) > 1 else ""
    first = [row for row in rows if row["split"] == "0"]
    mnlp = f"{float(first[0]['mnlp' + suffix]):.3f}" if first else ""
    return (
        f"{rmse.mean():.3f}{spread}".rjust(16)
        + f"{mnlp:>9}{column('coverage_95').mean():>8.1%}"
        + f"{column('fit_seconds').mean():>7.0f} s{column('peak_gb').max():>5.1f} GB"
        + f"  {len(rows)}  {rows[0]['basis']}, {rows[0]['solver']}"
    )


if __name__ == "__main__":
    sys.exit(main())
