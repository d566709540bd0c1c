"""QSGPRegressor's choice of a route, on spatial data with gaps and on sets whose matrix is kept.

The data are read from the folder of the environment variable ``SKGP_DATA_DIR``, of ``.npz``
files with X, y and test_mask (n, splits). Run with
``SKGP_DATA_DIR=... pytest tests/benchmarks/bench_planner.py -m benchmark -s``.
"""

import time

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF

from skgp import QSGPRegressor
from skgp.learning.plan import Plan
from skgp.learning.routes import resolve
from skgp.linalg.runtime import memory_limit
from tests.benchmarks.data import split_of

pytestmark = pytest.mark.benchmark
# Routes of satellite_temps beside the default; each has the default's kernel.
ROUTES = {
    "32 neighbours": dict(basis="neighbors", n_basis=32),
    "64 neighbours": dict(basis="neighbors", n_basis=64),
    "inducing, 1000": dict(basis="inducing", n_basis=1000),
    "fourier, 1024": dict(basis="fourier", n_basis=1024),
}


def figures(model, X, y, scale):
    """RMSE and negative log density in standard deviations of the targets, coverage of 95%."""
    start = time.process_time()
    mean, std = model.predict(X, return_std=True)
    seconds = time.process_time() - start
    nlpd = -model.log_predictive_density(X, y).mean() - np.log(scale)
    covered = np.mean(np.abs(y - mean) < 1.96 * std)
    return np.sqrt(np.mean((y - mean) ** 2)) / scale, nlpd, covered, seconds


def test_bench_satellite_temps():
    X, X_test, y, y_test = split_of("satellite_temps")
    some = np.random.default_rng(0).permutation(len(y_test))[:5000]
    X_test, y_test = X_test[some], y_test[some]
    start = time.process_time()
    chosen = QSGPRegressor(random_state=0).fit(X, y)
    print(f"\ndefault: {chosen.basis_}, {chosen.n_basis_}; {time.process_time() - start:.0f} s")
    print(chosen.reason_)
    results = {"default": figures(chosen, X_test, y_test, y.std())}
    for name, options in ROUTES.items():
        model = QSGPRegressor(chosen.kernel_, optimizer=None, random_state=0, **options)
        results[name] = figures(model.fit(X, y), X_test, y_test, y.std())
    for name, (rmse, nlpd, covered, seconds) in results.items():
        print(f"{name:16s} {rmse:.4f} {nlpd:.4f} {covered:.1%} {seconds:.1f} s")
    assert 0.9 < results["default"][2] < 0.98
    assert results["default"][0] < 1.02 * min(rmse for rmse, *_ in results.values())


@pytest.mark.parametrize("name", ["kin40k", "protein", "keggdirected", "pol"])
def test_bench_sets_whose_matrix_is_kept(name):
    X, _, y, _ = split_of(name)
    with memory_limit(8e9):
        plan = resolve(Plan(), len(y), 1.0 * RBF())
    print(f"\n{name}: {len(y)} rows, {plan}")
    assert (plan.basis, plan.n_basis) == ("inducing", len(y))
