"""Targets without noise: how it is said, and that it is believed."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import make_friedman1
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp
from skgp.data import Data
from skgp.estimators import _swsgp
from skgp.inference.defaults import LOCAL_JITTER
from skgp.learning.local import defaults, hyperparameters
from skgp.likelihoods import Gaussian
from skgp.models import swsgp

X = np.linspace(0, 10, 30)[:, None]
Y = np.sin(X[:, 0])
X_TEST = np.linspace(0.2, 9.8, 25)[:, None]
NOISE_FREE = 1.0 * RBF(1.0) + WhiteKernel(1e-10, "fixed")
regressors = pytest.mark.parametrize(
    "name",
    [
        "QSGPRegressor",
        "DLMGPRegressor",
        "SWSGPRegressor",
        "StateSpaceGPRegressor",
        "BayesianGPRegressor",
    ],
)


def fit(name, kernel):
    """A fit and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = getattr(skgp, name)(kernel, random_state=0).fit(X, Y)
    return model, [str(warning.message) for warning in caught]


@regressors
def test_fixed_noise_of_nearly_nothing_interpolates(name):
    model, messages = fit(name, NOISE_FREE)
    mean, std = model.predict(X, return_std=True)
    assert np.abs(mean - Y).max() < 1e-4
    # SWSGP adds 1e-8 of the prior variance, 36 here, to its inducing variables.
    assert std.max() < (1e-3 if name == "SWSGPRegressor" else 1e-4)
    error = np.abs(model.predict(X_TEST) - np.sin(X_TEST[:, 0])).max()
    assert error < 5e-4
    assert not messages


def test_the_evidence_of_noise_free_targets_is_that_of_scikit_learn():
    model, _ = fit("QSGPRegressor", NOISE_FREE)
    oracle = GaussianProcessRegressor(NOISE_FREE, normalize_y=True).fit(X, Y)
    # Searches end where digits do.
    lengths = [k.kernel_.k1.k2.length_scale for k in (model, oracle)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


@regressors
def test_no_warning_names_noise_that_nobody_wrote(name):
    model, messages = fit(name, 1.0 * RBF(1.0))
    assert not [message for message in messages if "noise_level" in message]
    assert model.predict(X, return_std=True)[1].max() < 0.01


@regressors
def test_a_bound_of_noise_that_the_user_wrote_is_named(name):
    _, messages = fit(name, 1.0 * RBF(1.0) + WhiteKernel(1e-2, (1e-4, 1.0)))
    assert [message for message in messages if "noise_level" in message]


def branin(X):
    a, b = 15 * X[:, 0] - 5, 15 * X[:, 1]
    wave = 10 * (1 - 1 / (8 * np.pi)) * np.cos(a)
    return (b - 5.1 / (4 * np.pi**2) * a**2 + 5 / np.pi * a - 6) ** 2 + wave + 10


@pytest.mark.parametrize(
    "name", ["QSGPRegressor", "DLMGPRegressor", "SWSGPRegressor", "VecchiaGPRegressor"]
)
def test_defaults_learn_a_simulation_of_few_runs_to_a_hundredth(name):
    rng = np.random.default_rng(0)
    rows, X_test = rng.random((40, 2)), rng.random((500, 2))
    model = getattr(skgp, name)(random_state=0).fit(rows, branin(rows))
    y_test = branin(X_test)
    mean, std = model.predict(X_test, return_std=True)
    assert np.sqrt(np.mean((mean - y_test) ** 2)) < 0.01 * y_test.std()
    assert 0.9 < np.mean(np.abs(mean - y_test) < 1.96 * std)
    at_data, spread = model.predict(rows, return_std=True)
    np.testing.assert_allclose(at_data, branin(rows), atol=1e-3 * y_test.std())
    assert spread.max() < 1e-3 * y_test.std()


@pytest.mark.slow
def test_neighbours_of_noise_free_rows_are_learned_with_their_jitter(monkeypatch):
    """Under 1e-4 of the variance as noise at each point a large amplitude is a large error."""
    short = {**defaults.SEARCH, "exact_rows": 100, "subset_size": 100, "n_steps": 40}
    monkeypatch.setattr("skgp.learning.local.defaults.SEARCH", short)
    monkeypatch.setattr(_swsgp, "SWSGP_EXACT_ROWS", 100)
    rows = np.random.default_rng(0).uniform(-2, 2, (700, 2))
    y = np.sin(3 * rows[:, 0]) + 0.5 * rows[:, 1] ** 2
    model = skgp.SWSGPRegressor(random_state=0).fit(rows[:300], y[:300])
    error = model.predict(rows[300:]) - y[300:]
    assert np.sqrt(np.mean(error**2)) < 0.03


@pytest.mark.parametrize(("n", "level"), [(100, 1e-8), (600, 3e-6 * 34)])
def test_neighbours_are_not_bound_to_values_that_they_cannot_follow(n, level, monkeypatch):
    """With less noise than the jitter leaves open, intervals of 95% held 58%."""
    kernel = 34.0 * RBF([1.1, 1.1, 1.3, 16.0, 20.0]) + WhiteKernel(1e-8, (1e-8, 1.0))
    X, y = make_friedman1(1000, 5, noise=0, random_state=0)
    data = Data(torch.tensor(X[:n]), torch.tensor(y[:n]))
    monkeypatch.setattr("skgp.learning.local.defaults.SEARCH", {"exact_rows": 100})
    found = hyperparameters.HyperparameterFit(kernel)
    monkeypatch.setattr(hyperparameters, "fit_hyperparameters", lambda *_, **__: found)
    told = {"generator": torch.Generator(), "jitter": LOCAL_JITTER}
    found = hyperparameters.search_hyperparameters([kernel], data, Gaussian(1.0), **told)
    assert found.kernel.k2.noise_level == pytest.approx(level)
    if n == 600:
        options = {"n_neighbors": 16, "covariance": "diagonal", "optimizer": None}
        model = skgp.SWSGPRegressor(found.kernel, **options).fit(X[:n], y[:n])
        mean, std = model.predict(X[n:], return_std=True)
        assert np.mean(np.abs(mean - y[n:]) < 1.96 * std) > 0.9


def test_means_of_many_noise_free_rows_are_solved_for_beyond_the_noise(monkeypatch):
    monkeypatch.setattr(swsgp.defaults, "SMALL", 100)
    rows = np.random.default_rng(0).uniform(-2, 2, (900, 2))
    y = np.sin(3 * rows[:, 0]) + rows[:, 1] ** 2
    kernel = 1.0 * RBF([0.6, 1.2]) + WhiteKernel(1e-8)
    model = skgp.SWSGPRegressor(kernel, n_neighbors=8, optimizer=None).fit(rows[:600], y[:600])
    few = model.predict(rows[600:])
    monkeypatch.undo()
    exact = model.fit(rows[:600], y[:600]).predict(rows[600:])
    assert np.abs(few - exact).max() < 0.02  # of .2 by which eight neighbours miss


def test_draws_of_several_columns_are_the_targets():
    """Their covariance, a difference of matrices of 1e5, had no factor: draws were refused."""
    rng = np.random.default_rng(0)
    inputs, y = rng.uniform(-1, 1, (6, 2)), rng.standard_normal(6)
    kernel = 1e5 * RBF(1.0) + WhiteKernel(1e-10)
    model = skgp.StateSpaceGPRegressor(kernel, optimizer=None).fit(inputs, y)
    np.testing.assert_allclose(model.sample_y(inputs, 5), np.tile(y[:, None], 5), atol=1e-3)
