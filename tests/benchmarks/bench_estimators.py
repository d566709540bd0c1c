"""Seconds of tiny fits: grid searches and scikit-learn's checks make hundreds of them.

Run with ``pytest tests/benchmarks/bench_estimators.py -m benchmark -s``.
"""

import time

import numpy as np
import pytest

from skgp import QSGPRegressor

pytestmark = pytest.mark.benchmark
ROUNDS = 5
FITS = {
    "defaults": {},
    "optimizer=None": {"optimizer": None},
    "fourier, cholesky": {"basis": "fourier", "solver": "cholesky", "n_basis": 256},
    "cg": {"solver": "cg"},
    "gauss-seidel": {"solver": "gauss-seidel"},
}


@pytest.mark.parametrize("name", FITS)
def test_bench_tiny_fit(name):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (40, 2))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(40)

    def seconds():
        start = time.perf_counter()
        QSGPRegressor(random_state=0, **FITS[name]).fit(X, y)
        return time.perf_counter() - start

    best = min(seconds() for _ in range(ROUNDS))
    print(f"\nQSGPRegressor, {name}, 40 rows: {1000 * best:.1f} ms")
    if name == "defaults":
        assert best < 0.1
