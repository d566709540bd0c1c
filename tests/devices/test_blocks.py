"""Fits of rows in blocks on a device: those of the CPU."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp
from tests.covering import slow_case

KERNEL = RBF([1.0, 2.0])
POINTS = {"n_inducing": 24, "n_neighbors": 6}
CASES = [
    ("SWSGPRegressor", POINTS),
    ("SWSGPRegressor", {"n_inducing": 12, "n_neighbors": 12}),
    ("SWSGPRegressor", POINTS | {"solver": "adam", "max_iter": 3}),
    slow_case("SWSGPClassifier", POINTS),
    ("QSGPClassifier", {"solver": "sgd", "n_basis": 60, "max_iter": 6}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_blocks_are_read_to_the_device(name, settings, device, monkeypatch):
    monkeypatch.setattr("skgp.estimators.defaults.LEAST_BLOCK_ROWS", 64)
    monkeypatch.setattr("skgp.estimators.defaults.SUBSET_ROWS", 128)
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (200, 2))
    y = np.sin(2 * X).sum(1) + 0.3 * rng.standard_normal(200)
    kernel = KERNEL + WhiteKernel(0.1)
    if name.endswith("Classifier"):
        kernel, y = KERNEL, np.digitize(y, [-0.5, 0.5])

    def predicted(where):
        model = getattr(skgp, name)(kernel, random_state=0, optimizer=None, **settings)
        return model.set_params(memory_budget=1.3e5, device=where).fit(X, y).predict(X[::5])

    expected = predicted("cpu")
    with device.entered():
        found = predicted(device.name)
    assert np.abs(found - expected).mean() <= (0.1 if device.is_real else 1e-10)
