"""Steps of the level: where they are looked for, and what predictions are with one."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp import StateSpaceGPRegressor
from skgp.inference.markov.series import make_series
from skgp.learning.markov.objectives import Component
from skgp.learning.markov.search import Search
from skgp.learning.markov.steps import likeliest_step


def series_with_steps(at, n=264, seed=0, noise=0.3):
    rng, t = np.random.default_rng(seed), np.arange(float(n))
    level = sum(size * (t >= place) for place, size in at)
    return t, level + np.sin(2 * np.pi * t / 12) + noise * rng.standard_normal(n)


def covariance_of_noisy(kernel, t, noise):
    return kernel(t[:, None]) + noise * np.eye(len(t))


@pytest.mark.parametrize("n", [60, 900])  # by a matrix and by the filter
def test_gain_of_a_step_is_that_of_least_squares(n):
    rng, kernel, noise = np.random.default_rng(0), 2.0 * Matern(20.0, nu=0.5), 0.2
    t = np.sort(rng.uniform(0, n, n))
    y = rng.standard_normal(n) + 3.0 * (t > 0.7 * n)
    found = Search([Component(kernel)], torch.tensor([math.log(noise)]).double(), 0.0)
    at, gain = likeliest_step(found, make_series(torch.tensor(t), torch.tensor(y)))
    P = np.linalg.inv(covariance_of_noisy(kernel, t, noise))
    steps = (t[:, None] >= t[5 : n - 4]).astype(float)
    gains = 0.5 * (steps.T @ P @ y) ** 2 / np.einsum("ik,ij,jk->k", steps, P, steps)
    assert at == t[5 + gains.argmax()]
    np.testing.assert_allclose(gain, gains.max(), rtol=1e-6)


def test_forecasts_after_steps_do_not_wander():
    """By a process that had to follow the steps, the error was .42 and standard deviations .9."""
    errors, widths = [], []
    for seed in range(2):
        t, y = series_with_steps([(80, 3.0), (170 + seed, -2.5)], seed=seed)
        model = StateSpaceGPRegressor().fit(t[:240, None], y[:240])
        mean = model.predict(t[240:, None])
        lower, upper = model.predict_quantiles(t[240:, None], [0.25, 0.75]).T
        errors.append(mean - y[240:])
        widths.append(upper - lower)
        assert model.component_names_[-2:] == ["step at 80", f"step at {170 + seed}"]
    assert np.sqrt(np.mean(np.square(errors))) < 0.36  # of noise of .3
    assert 0.35 < np.mean(widths) < 0.6  # 1.35 standard deviations of the noise are .40


@pytest.fixture(scope="module")
def stepped():
    t, y = series_with_steps([(150, 4.0)])
    return StateSpaceGPRegressor().fit(t[:, None], y), t, y


def test_predictions_with_a_step_are_those_of_dense_matrices(stepped):
    model, t, y = stepped
    x = np.array([3.0, 100.2, 149.9, 150.0, 263.0, 280.0, -5.0])
    z, state = (y - model.y_mean_) / model.y_scale_, model._states[0]
    means, variances = [], []
    for each, noise in zip(state.states, state.noise, strict=True):
        (step,) = each.terms.parts
        old, new = (step.wide * ((a >= 150.0) - float(step.centre)) for a in (t, x))
        K = each.kernel(t[:, None]) + np.outer(old, old) + noise * np.eye(len(t))
        across = each.kernel(x[:, None], t[:, None]) + np.outer(new, old)
        prior = each.kernel.diag(x[:, None]) + new**2
        means.append(across @ np.linalg.solve(K, z))
        variances.append(prior - np.sum(across.T * np.linalg.solve(K, across.T), 0) + noise)
    weights, means = np.array(state.weights), np.array(means)
    mean = weights @ means
    std = np.sqrt(weights @ (np.array(variances) + (means - mean) ** 2))
    found, found_std = model.predict(x[:, None], return_std=True)
    np.testing.assert_allclose(found, model.y_mean_ + model.y_scale_ * mean, atol=1e-5)
    np.testing.assert_allclose(found_std, model.y_scale_ * std, rtol=1e-5)
    parts = model.predict_components(x[:, None])
    np.testing.assert_allclose(parts.sum(1) + model.intercept_, found, atol=1e-8)


def test_a_step_may_be_followed_by_another(stepped):
    """The process that had to follow it has a share of .1: tails are wide, the middle is not."""
    model, t, _ = stepped
    lower, median, upper = model.predict_quantiles([[t[-1] + 20]], [0.005, 0.5, 0.995])[0]
    assert upper - median > 4 * model.noise_variance_**0.5
    assert median - lower > 4 * model.noise_variance_**0.5


def test_a_warm_start_keeps_steps(stepped):
    _, t, y = stepped
    model = StateSpaceGPRegressor(warm_start=True).fit(t[:, None], y)
    noise = model.noise_variance_
    model.fit(t[:, None], y)
    assert model.component_names_[-1] == "step at 150"
    assert model.noise_variance_ < 1.2 * noise


def test_weights_are_repeated_observations_beside_a_step(stepped):
    _, t, y = stepped
    weight = np.where(np.arange(len(t)) % 50 == 10, 3, 1)
    rows = np.repeat(np.arange(len(t)), weight)
    weighted = StateSpaceGPRegressor().fit(t[:, None], y, sample_weight=weight)
    repeated = StateSpaceGPRegressor().fit(t[rows, None], y[rows])
    assert weighted.component_names_[-1] == "step at 150"
    np.testing.assert_allclose(*(m.predict(t[:, None]) for m in (weighted, repeated)), atol=1e-7)


@pytest.mark.parametrize("kind", ["walk", "slope", "waves"])
def test_what_wanders_has_no_steps(kind):
    rng, t = np.random.default_rng(1), np.arange(200.0)
    f = {
        "walk": np.cumsum(rng.standard_normal(200)),
        "slope": 0.1 * np.maximum(t - 120, 0),
        "waves": 3 * np.sin(t / 5),
    }[kind]
    model = StateSpaceGPRegressor().fit(t[:, None], f + 0.3 * rng.standard_normal(200))
    assert not any(name.startswith("step") for name in model.component_names_)


def test_covariates_of_equal_times_have_steps_between_times():
    rng = np.random.default_rng(0)
    t, shop = np.repeat(np.arange(60.0), 3), np.tile([0.0, 1.0, 0.5], 60)
    y = 2.0 * shop + 3.0 * (t >= 40) + 0.2 * rng.standard_normal(180)
    model = StateSpaceGPRegressor(time=0).fit(np.column_stack([t, shop]), y)
    assert model.component_names_[-1] == "step at 40"
    mean = model.predict([[62.0, 1.0], [20.5, 0.0]])
    np.testing.assert_allclose(mean, [5.0, 0.0], atol=0.2)
