"""Densities and quantiles allow for gross errors where the model is the estimator's own choice."""

from functools import cache

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp

REGRESSORS = [
    skgp.QSGPRegressor,
    skgp.VecchiaGPRegressor,
    skgp.SWSGPRegressor,
    skgp.DLMGPRegressor,
    skgp.StateSpaceGPRegressor,
    skgp.BayesianGPRegressor,
]
N = 40


def problem(n=N, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 6, (n, 1))
    return X, 1e3 + 30 * np.sin(X[:, 0]) + 2 * rng.standard_normal(n)


@cache
def fitted(regressor):
    """By default, to the problem above; not to be changed."""
    return regressor().set_params(random_state=0).fit(*problem())


@pytest.mark.parametrize("regressor", REGRESSORS)
def test_density_and_quantiles_are_of_a_mixture(regressor):
    y, model = problem()[1], fitted(regressor)
    rows, rate = np.linspace(-1, 7, 7)[:, None], 0.5 / (N + 1)
    mean, std = model.predict(rows, return_std=True)
    wide = np.sqrt(std**2 + y.var())
    for z in (8.0, 40.0):  # what is left of the tails there is that of gross errors
        found = model.log_predictive_density(rows, mean + z * wide)
        np.testing.assert_allclose(found, np.log(rate) + norm.logpdf(z * wide, scale=wide))
    lower, upper = model.predict_interval(rows, 0.9)
    below = (1 - rate) * norm.cdf((lower - mean) / std) + rate * norm.cdf((lower - mean) / wide)
    np.testing.assert_allclose(below, 0.05, atol=0.005)  # the rest is a mixture, too, for some
    np.testing.assert_allclose(lower + upper, 2 * mean, rtol=1e-3)


@pytest.mark.parametrize("regressor", REGRESSORS)
def test_means_deviations_and_draws_are_without(regressor):
    X, model = problem()[0], fitted(regressor)
    mean, std = model.predict(X[:5], return_std=True)
    _, var = model.latent_mean_and_variance(X[:5])
    np.testing.assert_allclose(std**2, var + model.noise_variance_, rtol=1e-6)
    draws = model.sample_y(X[:5], 4000, random_state=0)
    np.testing.assert_allclose(draws.std(axis=1), std, rtol=0.06)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=5 * std.max() / 4000**0.5)


GIVEN = [
    {"kernel": RBF() + WhiteKernel(0.1)},
    {"optimizer": None},
    {"normalize_y": False},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("regressor", REGRESSORS)
def test_a_model_that_is_given_is_normal(regressor, given):
    X, y = problem()
    model = regressor(**given).set_params(random_state=0).fit(X, y)
    mean, std = model.predict(X[:5], return_std=True)
    assert (model.log_predictive_density(X[:5], mean + 100 * std) < -1000).all()


def test_streams_and_several_targets_are_normal():
    X, y = problem()
    model = skgp.QSGPRegressor(random_state=0).fit(X, np.column_stack([y, y]))
    mean, std = model.predict(X[:5], return_std=True)
    assert (model.log_predictive_density(X[:5], mean + 100 * std) < -4000).all()
    model = skgp.SWSGPRegressor(random_state=0).partial_fit(X, y)
    mean, std = model.predict(X[:5], return_std=True)
    assert (model.log_predictive_density(X[:5], mean + 100 * std) < -4000).all()


def test_one_gross_error_costs_little():
    X, y = problem(101)
    y[100] += 100
    model = skgp.QSGPRegressor(random_state=0).fit(X[:100], y[:100])
    loss = -model.log_predictive_density(X[100:], y[100:]) - np.log(y[:100].std())
    assert loss < 30  # that of a normal distribution: 50^2 / 2


def test_copies_are_no_more_observations():
    X, y = problem()
    once, twice = (
        skgp.VecchiaGPRegressor(random_state=0).fit(np.repeat(X, k, 0), np.repeat(y, k))
        for k in (1, 2)
    )
    far = 1e4 * np.ones(5)
    densities = [model.log_predictive_density(X[:5], far) for model in (once, twice)]
    np.testing.assert_allclose(*densities, rtol=1e-6)


def test_targets_that_were_positive_may_be_none():
    """Where log y is the choice of "auto"; to ask for it says that they are."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 6, (80, 1))
    y = np.exp(np.sin(X[:, 0]) + 0.8 * rng.standard_normal(80))
    model = skgp.QSGPRegressor(random_state=0, heteroscedastic=False).fit(X, y)
    assert model.likelihood_ == "lognormal"
    rate = 0.5 / 81
    found = model.log_predictive_density(X[:3], np.array([0.0, -1.0, -2.0]))
    others = norm(y.mean(), y.std())
    np.testing.assert_allclose(found, np.log(rate) + others.logpdf([0.0, -1.0, -2.0]))
    below = rate * others.cdf(0)
    level = [below / 2, 2 * below, 0.5]
    low, some, middle = model.predict_quantiles(X[:1], level)[0]
    assert low == pytest.approx(others.ppf(below / 2 / rate)) and low < 0 < some < middle
    grid = np.exp(np.linspace(-12, np.log(middle), 4001))
    density = np.exp(model.log_predictive_density(np.repeat(X[:1], 4001, 0), grid))
    assert below + np.trapezoid(density, grid) == pytest.approx(0.5, abs=2e-4)
    asked = skgp.QSGPRegressor(likelihood="lognormal", random_state=0).fit(X, y)
    assert asked.log_predictive_density(X[:1], [0.0]) == -np.inf


def test_equal_targets_that_are_asked_to_be_log_normal_have_densities():
    X = np.linspace(0, 1, 20)[:, None]
    model = skgp.QSGPRegressor(likelihood="lognormal", random_state=0).fit(X, np.full(20, 3.0))
    density = model.log_predictive_density(X[:2], [3.0, -1.0])
    assert density[0] > 0 and density[1] == -np.inf
    np.testing.assert_allclose(model.predict_interval(X), 3.0, rtol=1e-2)
