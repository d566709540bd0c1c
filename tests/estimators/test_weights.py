"""Sample weights where noise is learned: their scale, and copies of rows, tell nothing of it."""

import numpy as np
import pytest
from sklearn.ensemble import BaggingRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import (
    BayesianGPRegressor,
    DLMGPRegressor,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPRegressor,
)

NOISE = 0.3
KERNEL = 1.0 * RBF(1.0) + WhiteKernel(0.05)
FITS = {
    "qsgp": QSGPRegressor(KERNEL),
    "qsgp default": QSGPRegressor(),
    "fourier": QSGPRegressor(KERNEL, basis="fourier", n_basis=60),
    "relevance": QSGPRegressor(KERNEL, basis="relevance"),
    "cg": QSGPRegressor(KERNEL, basis="inducing", n_basis=60, solver="cg"),
    "dlm": DLMGPRegressor(KERNEL, n_inducing=40),
    "student": DLMGPRegressor(KERNEL, n_inducing=40, likelihood="student_t"),
    "kriging": SWSGPRegressor(KERNEL, method="kriging"),
    "variational": SWSGPRegressor(KERNEL, n_inducing=40, n_neighbors=20),
    "series": StateSpaceGPRegressor(KERNEL),
    "inducing states": StateSpaceGPRegressor(KERNEL, n_inducing=40),
    "bayesian": BayesianGPRegressor(KERNEL, optimizer="map"),
}
each_fit = pytest.mark.parametrize("name", FITS)


def noisy_sine(n=100, seed=0):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(-3, 3, size=(n, 1)), axis=0)
    return X, np.sin(2 * X[:, 0]) + NOISE * rng.normal(size=n)


X_TEST = np.linspace(-2.8, 2.8, 50)[:, None]


def make(name):
    model = FITS[name]
    return model.set_params(random_state=0)


def assert_noise_is_found(model):
    """The standard deviation of an observation, and a mean nearer f than observations are."""
    mean, std = model.predict(X_TEST, return_std=True)
    assert np.sqrt(np.mean((mean - np.sin(2 * X_TEST[:, 0])) ** 2)) < 0.6 * NOISE
    assert 0.7 * NOISE < std.mean() < 1.5 * NOISE


@each_fit
def test_the_scale_of_weights_is_no_evidence_of_small_noise(name):
    X, y = noisy_sine()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, size=len(y))
    models = [make(name).fit(X, y, sample_weight=scale * weights) for scale in (1.0, 256.0)]
    few, many = [model.predict(X_TEST, return_std=True) for model in models]
    np.testing.assert_allclose(many, few, rtol=1e-6)
    assert_noise_is_found(models[1])


@each_fit
def test_rows_given_three_times_are_no_evidence_of_small_noise(name):
    X, y = noisy_sine()
    model = make(name).fit(np.tile(X, (3, 1)), np.tile(y, 3))
    assert_noise_is_found(model)


def test_bootstrapped_rows_keep_the_noise():
    X, y = noisy_sine()
    bags = BaggingRegressor(QSGPRegressor(KERNEL), n_estimators=3, random_state=0).fit(X, y)
    for model in bags.estimators_:
        assert 0.4 * NOISE**2 < model.noise_variance_ < 2.5 * NOISE**2


def test_fixed_noise_takes_weights_as_they_are():
    X, y = noisy_sine()
    fixed = 1.0 * RBF(1.0) + WhiteKernel(0.05, "fixed")
    weighted = QSGPRegressor(fixed, optimizer=None).fit(X, y, sample_weight=np.full(len(y), 2.0))
    finer = 1.0 * RBF(1.0) + WhiteKernel(0.025, "fixed")
    expected = QSGPRegressor(finer, optimizer=None).fit(X, y).predict(X_TEST)
    np.testing.assert_allclose(weighted.predict(X_TEST), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("weight", [None, 4.0])
@pytest.mark.parametrize("name", ["fourier", "inducing states"])
def test_rows_join_a_fit_from_blocks(name, weight):
    X, y = noisy_sine(2000)
    model = make(name).set_params(memory_budget=1e5)
    model.fit(X[:-5], y[:-5], sample_weight=None if weight is None else np.full(1995, weight))
    before = model.predict(X_TEST)
    model.partial_fit(X[-5:], y[-5:], sample_weight=None if weight is None else np.full(5, weight))
    assert 0 < np.abs(model.predict(X_TEST) - before).max() < NOISE
