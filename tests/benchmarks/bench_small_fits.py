"""Seconds of fits of 60 points by default, beside scikit-learn's, with one thread and with two.

Run with ``pytest tests/benchmarks/bench_small_fits.py -m benchmark -s``. Seconds are of the
processor (`time.process_time`), the least of a few fits: other processes do not show in them, but
what a second thread waits at barriers does. Fits with one and with two threads alternate.
"""

import json
import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

pytestmark = pytest.mark.benchmark
N, ROUNDS, PAIRS = 60, 3, 2


def problems():
    """Estimators by name: ours, scikit-learn's, and their data."""
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    import skgp

    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 10, N))[:, None]
    X = rng.uniform(-2, 2, (N, 2))
    for name in skgp.__all__:
        if not name.endswith(("Regressor", "Classifier")):
            continue
        for Z in (x, X) if name.startswith("StateSpace") else (X,):
            f = np.sin(2 * Z[:, 0]) + (Z[:, -1] ** 2 if Z is X else 0)
            y = f + 0.2 * np.random.default_rng(1).standard_normal(N)
            kernel = 1.0 * RBF(np.ones(Z.shape[1]))
            if name.endswith("Classifier"):
                y, peer = y > np.median(y), GaussianProcessClassifier(kernel)
            else:
                peer = GaussianProcessRegressor(kernel + WhiteKernel(0.1), normalize_y=True)
            yield f"{name}, {Z.shape[1]} d", getattr(skgp, name)(), peer, Z, y
    grid = np.arange(float(N))[:, None]
    for kind, y in series():  # by default trends and seasons are searched for, too
        peer = GaussianProcessRegressor(1.0 * RBF() + WhiteKernel(0.1), normalize_y=True)
        counts = {"likelihood": "poisson"} if kind == "counts" else {}
        yield f"series, {kind}", skgp.StateSpaceGPRegressor(**counts), peer, grid, y
        ours = skgp.StateSpaceGPRegressor(peer.kernel if not counts else 1.0 * RBF(), **counts)
        yield f"series, {kind}, one kernel", ours, peer, grid, y
    covariates = np.column_stack([grid, rng.standard_normal(N), rng.integers(0, 2, N)])
    y = np.sin(grid[:, 0] / 8) + covariates[:, 1] ** 2 + covariates[:, 2]
    y += 0.3 * rng.standard_normal(N)
    peer = GaussianProcessRegressor(1.0 * RBF(np.ones(3)) + WhiteKernel(0.1), normalize_y=True)
    yield "series, covariates", skgp.StateSpaceGPRegressor(time=0), peer, covariates, y


def series():
    """Kinds of series on a grid, of which a default fit tries trends and seasons."""
    t, rng = np.arange(N), np.random.default_rng(2)
    season, trend = np.sin(2 * np.pi * t / 12), 0.05 * t
    for kind, f in (
        ("noise", 0 * t),
        ("walk", np.cumsum(rng.standard_normal(N))),
        ("season", season),
        ("trend", trend),
        ("season and trend", season + trend),
        ("step", 3.0 * (t > 30)),
    ):
        yield kind, f + 0.4 * rng.standard_normal(N)
    yield "growth", np.exp(0.02 * t + 0.2 * season + 0.05 * rng.standard_normal(N))
    yield "counts", rng.poisson(np.exp(1 + 0.8 * np.sin(t / 8)))


def seconds(estimator, X, y):
    """Of the processor, the least of some fits."""
    time.sleep(0.5)  # threads of the last fit spin for a while, on this clock too

    def once():
        start = time.process_time()
        estimator.fit(X, y)
        return time.process_time() - start

    return min(once() for _ in range(ROUNDS))


def measure():
    """Print the seconds of all fits in this process."""
    warnings.simplefilter("ignore")
    table = {
        name: (seconds(ours, X, y), seconds(peer, X, y)) for name, ours, peer, X, y in problems()
    }
    print(json.dumps(table))


def with_threads(n_threads):
    """Seconds of all fits in a process of its own."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(n_threads))
    command = [sys.executable, __file__]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def test_bench_small_fits():
    runs = {1: [], 2: []}
    for _ in range(PAIRS):
        for n_threads, tables in runs.items():
            tables.append(with_threads(n_threads))
    best = {
        n_threads: {name: np.min([table[name] for table in tables], 0) for name in tables[0]}
        for n_threads, tables in runs.items()
    }
    print(
        f"\n{'fit of 60 points':30s}{'ms':>7s}{'peer':>7s}{'ratio':>7s}{'two threads / one':>20s}"
    )
    for name, (ours, peer) in best[1].items():
        two = best[2][name][0]
        print(f"{name:30s}{1e3 * ours:7.1f}{1e3 * peer:7.1f}{ours / peer:7.1f}{two / ours:15.2f}")
    assert all(best[2][name][0] < 1.5 * best[1][name][0] + 0.01 for name in best[1])


if __name__ == "__main__":
    measure()
