"""Figure 3 of Evans and Nair, "Quadruply stochastic Gaussian processes", 2020, for more rows.

Relevance vectors of noisy values of the sinc function on [-10, 10] (noise .1). Each route is run on
each number of rows in a process of its own; the vectors kept, the root-mean-square error to the
true function, the log evidence, seconds and memory are added to a CSV file and printed beside the
paper's figure. Rows that the file already has are not computed again.

    python examples/papers/qsgp_relevance.py
    python examples/papers/qsgp_relevance.py --sizes 500 --seeds 5

==================  ===============================================================================
route
==================  ===============================================================================
estimator           ``QSGPRegressor(basis="relevance")``, hyper-parameters of the kernel included
sequential          `fit_relevance` (Tipping and Faul, 2003) with the kernel RBF(2)
stochastic          `fit_relevance_stochastic`, the paper's gradient on log s, and a last polish
stochastic-alone    the same without the polish
paper-sizes         the latter with the batches of the paper: 100 rows, 250 basis functions, a
                    control variate of rank 250
==================  ===============================================================================

Memory is the growth of the peak from before the fit. ``--limit-rows 1000`` tries the script out: no
size is larger.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Results, Row, peak_gigabytes

STOCHASTIC: dict[str, dict[str, Any]] = {
    "stochastic": {},
    "stochastic-alone": {"polish": False},
    "paper-sizes": {
        "polish": False,
        "batch_size": 100,
        "basis_batch_size": 250,
        "n_support": 250,
    },
}
ROUTES = ("estimator", "sequential", *STOCHASTIC)
LENGTH_SCALE = 2.0
KEYS = ("n", "route", "seed")
VALUES = ("n_vectors", "rmse", "noise_std", "log_evidence", "seconds", "memory_mb")


def main() -> int:
    """Compute the rows that are missing, print the table; 1 if some fit failed."""
    args = parse_arguments()
    jobs = list(all_jobs(args))
    results = Results(args.csv, KEYS, VALUES)
    failed = results.compute(jobs, run)
    print_table([row for job in jobs if (row := results.find(job))])
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """Sizes, routes and where the rows go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[500, 5000, 100_000])
    parser.add_argument(
        "--routes", nargs="+", default=["estimator", "sequential", "stochastic"], choices=ROUTES
    )
    parser.add_argument("--seeds", type=int, default=1, help="draws of the data (1)")
    parser.add_argument("--limit-rows", type=int, help="the largest size, to try the script out")
    parser.add_argument("--csv", type=Path, default=Path("results/qsgp_relevance.csv"))
    return parser.parse_args()


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job a size, route and draw of the data."""
    sizes = {n if args.limit_rows is None else min(n, args.limit_rows) for n in args.sizes}
    for n in sorted(sizes):
        for route in args.routes:
            for seed in range(args.seeds):
                yield {"n": n, "route": route, "seed": seed}


def run(job: Row) -> Row:
    """Fit and compare with the true function."""
    # Here, so that the parent process stays small.
    import torch

    from skgp.datasets import make_sinc

    X, y = make_sinc(job["n"], noise=0.1, random_state=job["seed"])
    grid = np.linspace(-10, 10, 2001)[:, None]
    with torch.inference_mode():
        torch.linalg.cholesky(torch.eye(64))  # its libraries are no memory of the fit
    before, start = peak_gigabytes(), time.perf_counter()
    fit = by_estimator if job["route"] == "estimator" else by_model
    mean, n_vectors, noise, evidence = fit(job["route"], X, y, grid, job["seed"])
    return {
        "n_vectors": n_vectors,
        "rmse": np.sqrt(np.mean((mean - np.sinc(grid[:, 0] / np.pi)) ** 2)),
        "noise_std": np.sqrt(noise),
        "log_evidence": evidence,
        "seconds": time.perf_counter() - start,
        "memory_mb": 1e3 * (peak_gigabytes() - before),
    }


def by_estimator(route: str, X: np.ndarray, y: np.ndarray, grid: np.ndarray, seed: int) -> tuple:
    """Mean on the grid, number of vectors, noise variance, log evidence (NaN)."""
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    from skgp import QSGPRegressor

    kernel = 1.0 * RBF(LENGTH_SCALE) + WhiteKernel(0.01)
    model = QSGPRegressor(kernel, basis="relevance", random_state=seed).fit(X, y)
    return model.predict(grid), model.n_relevance_vectors_, model.noise_variance_, np.nan


def by_model(route: str, X: np.ndarray, y: np.ndarray, grid: np.ndarray, seed: int) -> tuple:
    """The same of the functions behind the estimator, with a kernel that is given."""
    import torch
    from sklearn.gaussian_process.kernels import RBF

    from skgp.inference.relevance.evidence import choose_candidates, fit_relevance
    from skgp.inference.relevance.stochastic import fit_relevance_stochastic, polish
    from skgp.inference.stochastic.engine import SGDOptions

    centre = y.mean()
    arguments = RBF(LENGTH_SCALE), X, y - centre
    generator = torch.Generator().manual_seed(seed)
    candidates = choose_candidates(len(X), None, generator)
    if route == "sequential":
        fit = fit_relevance(*arguments, candidates=candidates)
    else:
        sizes = dict(STOCHASTIC[route])
        n_support, polished = sizes.pop("n_support", 500), sizes.pop("polish", True)
        options = SGDOptions(**{"basis_batch_size": 2000, "learning_rate": 0.3} | sizes)
        common = {"candidates": candidates, "n_support": n_support, "generator": generator}
        fit = fit_relevance_stochastic(*arguments, options, **common)
        if polished:
            fit = polish(fit, *arguments, learn_noise=True)
    mean = fit.posterior.mean(torch.tensor(grid)).numpy() + centre
    return mean, len(fit.indices), fit.noise_variance, fit.log_evidence


def print_table(rows: list[dict[str, str]]) -> None:
    """One line a fit, then the paper's figure."""
    print(
        f"\n{'rows':>8}  {'route':<18}{'vectors':>8}{'RMSE':>9}{'noise sd':>10}"
        f"{'log evidence':>14}{'time':>10}{'memory':>10}"
    )
    for row in rows:
        print(
            f"{row['n']:>8}  {row['route']:<18}{row['n_vectors']:>8}{float(row['rmse']):>9.4f}"
            f"{float(row['noise_std']):>10.4f}{float(row['log_evidence']):>14.1f}"
            f"{float(row['seconds']):>8.2f} s{float(row['memory_mb']):>7.0f} MB"
        )
    print(f"{500:>8}  {'paper, figure 3':<18}{13:>8}")


if __name__ == "__main__":
    sys.exit(main())
