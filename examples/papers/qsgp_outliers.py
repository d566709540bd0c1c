"""Robust regression: Laplace against Gaussian noise with gross errors in the training targets.

Evans and Nair ("Quadruply stochastic Gaussian processes", 2020, section 3) name the Laplace
likelihood as the one for robust regression and print no table. Here a share of the training targets
is moved by 5 to 15 standard deviations up or down, the rows and the moves drawn from a seed, and
``QSGPRegressor`` is fitted with either likelihood; test targets are left as they are. RMSE, MNLP
(mean negative log predictive density, nats a row), the coverage of the 95% intervals, seconds and
peak memory are added to a CSV file and printed, in units of the standard deviation of the training
targets before the errors. Rows that the file already has are not computed again.

    python examples/papers/qsgp_outliers.py --data-dir FOLDER
    python examples/papers/qsgp_outliers.py --data-dir FOLDER --data pol --shares 0.1 0.2

FOLDER holds one ``NAME.npz`` a data set, as for ``qsgp.py``. ``--limit-rows 2000`` tries the script
out, on so many training rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Results, Row, data_path, peak_gigabytes, some_rows, split_masks

METHODS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "laplace": {"likelihood": "laplace"},
}
KEYS = ("data", "method", "share", "split", "seed", "limit_rows", "params")
VALUES = (
    "n_train",
    "solver",
    "basis",
    "n_basis",
    "rmse",
    "mnlp",
    "coverage_95",
    "noise_std",
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
    print_table([row for job in jobs if (row := results.find(job))])
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """What to fit, where the data are and where the rows go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of NAME.npz files")
    parser.add_argument("--data", nargs="+", default=["kin40k", "pol"], metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.05], help="(0 0.05)")
    parser.add_argument("--split", type=int, default=0, help="column of test_mask (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the errors and the fits (0)")
    parser.add_argument("--limit-rows", type=int, help="training rows, to try the script out")
    parser.add_argument("--csv", type=Path, default=Path("results/qsgp_outliers.csv"))
    args = parser.parse_args()
    absent = [name for name in args.data if not data_path(args.data_dir, name).is_file()]
    if absent:
        parser.error(f"--data-dir {args.data_dir} has no {', '.join(absent)}; give names it has")
    return args


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job a data set, share and method."""
    for data in args.data:
        for share in args.shares:
            for method in args.methods:
                yield {
                    "data": data,
                    "method": method,
                    "share": share,
                    "split": args.split,
                    "seed": args.seed,
                    "limit_rows": args.limit_rows,
                    "params": json.dumps(METHODS[method], sort_keys=True),
                }


def with_errors(y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Targets of which a share is moved by 5 to 15 standard deviations, up or down."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(y))[: round(share * len(y))]
    y = y.copy()
    y[rows] += y.std() * rng.choice([-1.0, 1.0], len(rows)) * rng.uniform(5, 15, len(rows))
    return y


def run(job: Row, folder: Path) -> Row:
    """Fit to targets with errors, score on targets without."""
    from skgp import QSGPRegressor  # here, so that the parent process stays small

    with np.load(data_path(folder, job["data"])) as arrays:
        test = split_masks(arrays["test_mask"])[:, job["split"]].astype(bool)
        X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    train = np.flatnonzero(~test)[some_rows(int((~test).sum()), job["limit_rows"])]
    scale = y[train].std()
    y_train = with_errors(y[train], job["share"], job["seed"])
    start = time.perf_counter()
    model = QSGPRegressor(random_state=job["seed"], **json.loads(job["params"]))
    model.fit(X[train], y_train)
    fitted = time.perf_counter()
    lower, upper = model.predict_interval(X[test], coverage=0.95)
    return {
        "n_train": len(train),
        "solver": model.solver_,
        "basis": model.basis_,
        "n_basis": model.n_basis_,
        "rmse": np.sqrt(np.mean((y[test] - model.predict(X[test])) ** 2)) / scale,
        "mnlp": -np.mean(model.log_predictive_density(X[test], y[test])) - np.log(scale),
        "coverage_95": np.mean((lower <= y[test]) & (y[test] <= upper)),
        "noise_std": np.sqrt(model.noise_variance_) / scale,
        "fit_seconds": fitted - start,
        "predict_seconds": time.perf_counter() - fitted,
        "peak_gb": peak_gigabytes(),
    }


def print_table(rows: list[dict[str, str]]) -> None:
    """One line a fit."""
    print(
        f"\n{'':<14}{'errors':>7}  {'likelihood':<12}{'RMSE':>8}{'MNLP':>9}{'in 95%':>8}"
        f"{'noise sd':>10}{'fit':>9}{'peak':>8}"
    )
    for row in rows:
        print(
            f"{row['data']:<14}{float(row['share']):>7.0%}  {row['method']:<12}"
            f"{float(row['rmse']):>8.4f}{float(row['mnlp']):>9.3f}"
            f"{float(row['coverage_95']):>8.1%}{float(row['noise_std']):>10.4f}"
            f"{float(row['fit_seconds']):>7.0f} s{float(row['peak_gb']):>5.1f} GB"
            f"  {row['n_train']} rows, {row['basis']} {row['n_basis']}, {row['solver']}"
        )


if __name__ == "__main__":
    sys.exit(main())
