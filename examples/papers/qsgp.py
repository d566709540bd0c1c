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
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Results, Row, data_path, peak_gigabytes, split_masks

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

KEYS = ("data", "method", "split", "params")
VALUES = (
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
    results = Results(args.csv, KEYS, VALUES)
    failed = results.compute(jobs, run, args.data_dir)
    print_tables([row for job in jobs if (row := results.find(job))], args.units)
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


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job a data set, method and split, in the order of the table."""
    for data in args.data:
        with np.load(data_path(args.data_dir, data)) as arrays:
            n_splits = split_masks(arrays["test_mask"]).shape[1]
        for method in args.methods:
            params = dict(METHODS[method])
            if args.max_iter is not None and params.get("solver") == "sgd":
                params["max_iter"] = args.max_iter
            for split in range(min(args.splits, n_splits)):
                yield {
                    "data": data,
                    "method": method,
                    "split": split,
                    "params": json.dumps(params, sort_keys=True),
                }


def run(job: Row, folder: Path) -> Row:
    """Fit, predict and score; the values of the row of the CSV file."""
    # Here and not above: on Linux a child's peak starts at its parent's, which so stays small.
    from skgp import QSGPRegressor

    with np.load(data_path(folder, job["data"])) as arrays:
        test = split_masks(arrays["test_mask"])[:, job["split"]].astype(bool)
        X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    start = time.perf_counter()
    model = QSGPRegressor(random_state=job["split"], **json.loads(job["params"])).fit(
        X[~test], y[~test]
    )
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
    return dict(zip(VALUES, results, strict=True))


def print_tables(rows: list[dict[str, str]], units: str) -> None:
    """As the paper: mean and deviation of the RMSE over splits, MNLP of the first split."""
    for data in dict.fromkeys(row["data"] for row in rows):
        print(f"\n{data}, y {units}")
        print(f"  {'':<30}{'RMSE':>16}{'MNLP':>9}{'in 95%':>8}{'fit':>9}{'peak':>8}  splits")
        of_data = [row for row in rows if row["data"] == data]
        for method in dict.fromkeys(row["method"] for row in of_data):
            of_method = [row for row in of_data if row["method"] == method]
            print(f"  {method:<30}{table_line(of_method, units)}")
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
