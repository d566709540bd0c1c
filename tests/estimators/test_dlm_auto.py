"""DLM with ``n_inducing="auto"``: the exact process of few points, more points where they pay."""

import warnings

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import DLMGPClassifier, DLMGPRegressor
from skgp.learning import defaults

KERNEL = 1.3 * Matern(0.8, nu=2.5) + WhiteKernel(0.05)


def wave(n=60, *, seed=0, frequency=2.0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (n, 1))
    return X, np.sin(frequency * X[:, 0]) + 0.2 * rng.standard_normal(n)


@pytest.mark.parametrize("objective", ["log_loss", "elbo", "fitc"])
def test_few_points_are_the_dense_gp(objective):
    X, y = wave()
    X_new = np.linspace(-5, 5, 40)[:, None]
    options = {"optimizer": None, "normalize_y": False}
    model = DLMGPRegressor(KERNEL, objective=objective, **options).fit(X, y)
    dense = GaussianProcessRegressor(KERNEL, optimizer=None).fit(X, y)
    assert model.n_inducing_ == len(X)
    mean, std = model.predict(X_new, return_std=True)
    expected, expected_std = dense.predict(X_new, return_std=True)
    np.testing.assert_allclose(mean, expected, atol=1e-5)
    np.testing.assert_allclose(std, expected_std, rtol=1e-5)
    assert model.elbo_ == pytest.approx(dense.log_marginal_likelihood_value_, abs=1e-4)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_few_points_learn_hyper_parameters_of_the_greatest_evidence():
    X, y = wave()
    model = DLMGPRegressor(KERNEL, normalize_y=False, random_state=0).fit(X, y)
    dense = GaussianProcessRegressor(KERNEL).fit(X, y)
    assert model.elbo_ == pytest.approx(dense.log_marginal_likelihood_value_, abs=0.05)


def test_few_points_have_no_floor_of_the_noise():
    X, _ = wave(80)
    model = DLMGPRegressor(RBF() + WhiteKernel(1e-2, (1e-5, 1.0))).fit(X, np.sin(X[:, 0]))
    assert model.kernel_.k2.noise_level < 5e-5


@pytest.mark.parametrize("make", [DLMGPRegressor, DLMGPClassifier])
def test_defaults_warn_of_no_number_that_nobody_gave(make):
    X, y = wave(30)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(max_iter=5).fit(X, y if make is DLMGPRegressor else y > 0)
        DLMGPRegressor(likelihood="poisson", max_iter=5).fit(X, np.rint(np.exp(y)))


def test_equal_inputs_share_an_inducing_point():
    X, y = wave(20)
    repeated, targets = np.repeat(X, 3, axis=0), np.repeat(y, 3) + np.tile([0, 0.1, -0.1], 20)
    options = {"optimizer": None, "normalize_y": False}
    model = DLMGPRegressor(KERNEL, **options).fit(repeated, targets)
    dense = GaussianProcessRegressor(KERNEL, optimizer=None).fit(repeated, targets)
    assert model.n_inducing_ == 20
    np.testing.assert_allclose(model.predict(X), dense.predict(X), atol=1e-5)


def test_rows_added_to_an_exact_fit_count_as_in_one_batch():
    X, y = wave(90)
    options = {"optimizer": None, "normalize_y": False}
    whole, parts = (DLMGPRegressor(KERNEL, **options).fit(X[:30], y[:30]) for _ in range(2))
    whole.partial_fit(X[30:], y[30:])
    parts.partial_fit(X[30:60], y[30:60]).partial_fit(X[60:], y[60:])
    np.testing.assert_allclose(parts.predict(X), whole.predict(X), atol=1e-6)
    dense = GaussianProcessRegressor(KERNEL, optimizer=None).fit(X, y)
    assert np.abs(whole.predict(X) - dense.predict(X)).max() < 0.05


def test_many_points_are_sparse(monkeypatch):
    monkeypatch.setattr(defaults, "EXACT_ROWS", 100)
    monkeypatch.setattr(defaults, "AUTO_INDUCING", 12)
    monkeypatch.setattr(defaults, "AUTO_SIZES", (24, 48))
    model = DLMGPRegressor(max_iter=5, random_state=0).fit(*wave(200))
    assert model.n_inducing_ in (12, 24, 48) and model.validation_loss_ is not None


def test_beta_auto_of_few_points_is_still_chosen():
    X, y = wave(120)
    model = DLMGPRegressor(beta="auto", max_iter=5, random_state=0).fit(X, y)
    assert 1.0 in model.beta_path_ and model.n_inducing_ <= 120
