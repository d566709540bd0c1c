"""VecchiaGPRegressor: exact limits, weights, orders, model selection and joint draws."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, WhiteKernel

from skgp import VecchiaGPClassifier, VecchiaGPRegressor
from skgp.learning.search import SearchSettings
from tests.contracts.estimators import RegressorContract

KERNEL = 1.3 * Matern([0.4, 0.7], nu=1.5) + WhiteKernel(0.05)
FIXED = {"optimizer": None, "random_state": 0}


class TestContract(RegressorContract):
    offers_state = False

    def make(self, **params):
        params.pop("dtype", None)  # float64 is all there is
        return VecchiaGPRegressor(**{"random_state": 0, **params})


def problem(n=60, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 2))
    return X, np.sin(5 * X[:, 0]) + X[:, 1] + 0.2 * rng.standard_normal(n)


@pytest.mark.parametrize("sizes", [{"n_neighbors": 59}, {"n_neighbors": 1000, "n_inducing": 5}])
def test_all_neighbors_are_the_exact_process(sizes):
    X, y = problem()
    model = VecchiaGPRegressor(KERNEL, normalize_y=False, **sizes, **FIXED).fit(X, y)
    exact = GaussianProcessRegressor(KERNEL, optimizer=None).fit(X, y)
    assert model.n_neighbors_ == 59
    assert model.log_marginal_likelihood_value_ == pytest.approx(
        exact.log_marginal_likelihood_value_, abs=1e-8
    )
    x = np.vstack([X[:4], X[:4] + 0.05, [[3.0, 0.0], [1e6, 1e6]]])
    mean, covariance = exact.predict(x, return_cov=True)
    found = model.latent_mean_and_covariance(x)
    np.testing.assert_allclose(found[0], mean, atol=1e-8)
    noise = 0.05 * np.eye(len(x))  # of an observation, in both
    np.testing.assert_allclose(found[1] + noise, covariance, atol=1e-8)
    np.testing.assert_allclose(model.predict(x, return_std=True)[1] ** 2, np.diag(covariance))


@pytest.mark.parametrize("weight", [1e-12, 1e-5])
def test_rows_of_tiny_weight_do_not_crowd_out_others(weight):
    X, y = problem(500)
    weights = np.where(np.arange(500) < 50, 1.0, weight)
    kernel = KERNEL.k1 + WhiteKernel(0.05, "fixed")
    model = VecchiaGPRegressor(kernel, n_neighbors=10, normalize_y=False, **FIXED)
    model.fit(X, y, sample_weight=weights)
    exact = GaussianProcessRegressor(KERNEL.k1, alpha=0.05 / weights, optimizer=None).fit(X, y)
    x = np.random.default_rng(1).random((50, 2))
    mean, std = exact.predict(x, return_std=True)
    found = model.latent_mean_and_covariance(x)
    assert np.abs(found[0] - mean).max() < 0.1
    np.testing.assert_allclose(np.diag(found[1]) ** 0.5, std, rtol=0.1)
    np.testing.assert_allclose(model.predict(x[:1]), model.predict(x)[:1], atol=1e-10)


def test_two_rows_of_large_weight_at_nearly_one_place():
    X, y = problem(100)
    X[1] = X[0] + 1e-10
    weights = np.where(np.arange(100) < 2, 1.0, 1e-9)
    kernel = DotProduct() + RBF(0.4) + WhiteKernel(0.05, "fixed")  # near is what correlates
    model = VecchiaGPRegressor(kernel, n_neighbors=5, normalize_y=False, **FIXED)
    mean = model.fit(X, y, sample_weight=weights).predict(X)
    exact = GaussianProcessRegressor(DotProduct() + RBF(0.4), alpha=0.05 / weights, optimizer=None)
    np.testing.assert_allclose(mean, exact.fit(X, y).predict(X), atol=1e-4)


def test_orders_differ_and_agree_for_many_neighbors():
    X, y = problem(150)
    values = {}
    for ordering in ("maximin", "random"):
        for H in (3, 149):
            model = VecchiaGPRegressor(
                KERNEL, n_neighbors=H, n_inducing=0, ordering=ordering, **FIXED
            )
            values[ordering, H] = model.fit(X, y).log_marginal_likelihood_value_
            assert model.ordering_ == ordering
    assert values["maximin", 149] == pytest.approx(values["random", 149], abs=1e-7)
    assert abs(values["maximin", 3] - values["random", 3]) > 1e-3
    assert VecchiaGPRegressor(KERNEL, **FIXED).fit(X, y).ordering_ == "maximin"
    wide = np.random.default_rng(0).random((50, 6))
    wide = VecchiaGPRegressor(RBF() + WhiteKernel(), **FIXED).fit(wide, wide[:, 0])
    assert wide.ordering_ == "random"


def test_a_seed_decides_the_fit():
    X, y = problem(100)
    model = VecchiaGPRegressor(
        KERNEL, n_neighbors=3, ordering="random", optimizer=None, random_state=3
    )
    first, again = (clone(model).fit(X, y).predict(X, return_std=True) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    values = [
        clone(model).set_params(random_state=seed).fit(X, y).log_marginal_likelihood_value_
        for seed in (3, 4)
    ]
    assert values[0] != values[1]


@pytest.mark.parametrize("make", [VecchiaGPRegressor, VecchiaGPClassifier])
def test_neither_neighbors_nor_inducing_points_are_refused(make):
    with pytest.raises(ValueError, match="n_neighbors=0 needs inducing points.*n_inducing=0"):
        make(n_neighbors=0, n_inducing=0).fit(*problem(10))


def test_observations_decide_on_inducing_points(rng, monkeypatch):
    """Smooth functions gain by them, rough ones do not."""
    monkeypatch.setattr(SearchSettings, "exact_rows", 1400)  # 2500 outside of this test
    X = rng.uniform(0, 1, (1500, 2))
    f = np.sin(6 * X[:, 0]) * np.cos(5 * X[:, 1])
    y = f + 0.3 * rng.standard_normal(len(X))
    kernel = RBF(0.25) + WhiteKernel(0.1)
    errors = {}
    for n_inducing in (None, 0):
        model = VecchiaGPRegressor(kernel, n_inducing=n_inducing, optimizer=None, random_state=0)
        found = model.fit(X, y).predict(X[:500])
        errors[n_inducing] = np.sqrt(np.mean((found - f[:500]) ** 2))
        assert bool(model.n_inducing_) == (n_inducing is None)
    assert errors[None] < 0.9 * errors[0]
    rough = Matern(length_scale=0.02, nu=0.5) + WhiteKernel(0.01)
    y = rng.standard_normal(len(X))
    assert VecchiaGPRegressor(rough, optimizer=None, random_state=0).fit(X, y).n_inducing_ == 0


def test_kernels_that_tell_no_two_inputs_apart_predict_the_mean():
    """A fit whose inducing points are all of the inputs was followed by predictions that raised."""
    X, y = problem(20)
    for kernel in (1.0 * RBF() + DotProduct(), DotProduct()):
        model = VecchiaGPRegressor(kernel + WhiteKernel(0.1), **FIXED).fit(1e-12 * X, y)
        exact = GaussianProcessRegressor(kernel + WhiteKernel(0.1), **FIXED, normalize_y=True)
        for found, expected in zip(
            model.predict(1e-12 * X, return_std=True),
            exact.fit(1e-12 * X, y).predict(1e-12 * X, return_std=True),
            strict=True,
        ):
            np.testing.assert_allclose(found, expected, atol=1e-6)
