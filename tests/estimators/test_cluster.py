"""Fits on a cluster of four processes: equal models, and of one worker the less."""

import os
import signal

import dask
import numpy as np
import pytest
from joblib import parallel_config
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.model_selection import GridSearchCV

from skgp import QSGPRegressor, StateSpaceGPRegressor, SWSGPClassifier, SWSGPRegressor

pytestmark = pytest.mark.slow
da = pytest.importorskip("dask.array", reason="pip install skgp[distributed]")
distributed = pytest.importorskip("distributed", reason="pip install skgp[distributed]")
KERNEL = RBF(1.0) + WhiteKernel(0.1)


@pytest.fixture(scope="module")
def client():
    settings = {"n_workers": 4, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        client.wait_for_workers(4)
        yield client


def rows(d, n=20_000, size=1000):
    X = da.random.default_rng(0).uniform(-2, 2, (n, d), chunks=(size, d))
    return X, da.sin(2 * X).sum(1) + da.random.default_rng(1).normal(0, 0.3, n, chunks=size)


MODELS = [
    (QSGPRegressor(KERNEL, basis="fourier", n_basis=100, optimizer=None, random_state=0), 3),
    (StateSpaceGPRegressor(KERNEL, n_inducing=50, optimizer=None, random_state=0), 1),
    (SWSGPRegressor(KERNEL, n_inducing=100, n_neighbors=10, optimizer=None, random_state=0), 3),
]


@pytest.mark.parametrize(("model", "d"), MODELS)
def test_four_workers_give_the_model_of_one_process(client, model, d):
    X, y = rows(d)
    with dask.config.set(scheduler="synchronous"):
        alone = model.fit(X, y).predict(X, return_std=True)
        alone = [part.compute() for part in alone]
    with client.as_current():
        found = [part.compute() for part in model.fit(X, y).predict(X, return_std=True)]
    np.testing.assert_allclose(found, alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n_neighbors", [10, 30])  # of 30 inducing points
def test_four_workers_give_the_classifier_of_one_process(client, n_neighbors):
    X, y = rows(2)
    labels = da.where(y > 1, "high", da.where(y > -1, "middle", "low"))
    settings = {"n_inducing": 30, "n_neighbors": n_neighbors, "optimizer": None, "random_state": 0}
    model = SWSGPClassifier(RBF(1.0), class_weight="balanced", **settings)
    with dask.config.set(scheduler="synchronous"):
        alone = model.fit(X, labels).predict_proba(X).compute()
    with client.as_current():
        found = model.fit(X, labels).predict_proba(X).compute()
    np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12)


def test_a_worker_killed_in_the_middle_changes_nothing(client, tmp_path):
    model, d = MODELS[0]
    X, y = rows(d)
    killed = tmp_path / "killed"

    def slowly(block):
        """Blocks of the fit kill the first worker that sees the tenth of them, once."""
        if block[0, 0] == tenth and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return block

    tenth = float(X[9000, 0].compute(scheduler="synchronous"))
    with dask.config.set(scheduler="synchronous"):
        expected = model.fit(X, y).predict(X).compute()
    dangerous = X.map_blocks(slowly, dtype=X.dtype, meta=np.empty((0, d)))
    with client.as_current():
        found = model.fit(dangerous, y).predict(X).compute()
    assert killed.exists()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_grid_search_is_spread_over_the_workers(client):
    X, y = (column.compute(scheduler="synchronous") for column in rows(2, 2000))
    grid = {"n_basis": [10, 100]}
    expected = GridSearchCV(MODELS[0][0], grid, cv=3).fit(X, y)
    with client.as_current(), parallel_config("dask"):
        found = GridSearchCV(MODELS[0][0], grid, cv=3, n_jobs=4).fit(X, y)
    assert found.best_params_ == expected.best_params_ == {"n_basis": 100}
    scores = (search.cv_results_["mean_test_score"] for search in (found, expected))
    np.testing.assert_allclose(*scores, rtol=1e-9)
