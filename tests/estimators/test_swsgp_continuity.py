"""Predictions change as their input does: across gaps, beyond the data, in draws."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import (
    GaussianProcessRegressor,
    SWSGPClassifier,
    SWSGPRegressor,
    VecchiaGPRegressor,
)
from tests.covering import slow_case


def with_gap(seed=0):
    """A sine at 400 inputs of [0, 10], none of them between 4 and 6."""
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(0, 4, 200), rng.uniform(6, 10, 200)])
    return x[:, None], np.sin(x) + 0.1 * rng.standard_normal(400)


def largest_step(fit, X):
    """Of the mean, and as a part of the standard deviation of f where there are no data."""
    mean, var = fit.latent_mean_and_variance(X)
    steps = np.abs(np.diff(mean))
    return steps.max(), steps / np.sqrt(var[1:])


@pytest.mark.slow
def test_mean_across_a_gap_has_no_steps():
    X, y = with_gap()
    fit = SWSGPRegressor(n_neighbors=32, random_state=0).fit(X, y)
    grid = np.linspace(3, 12, 4501)[:, None]
    largest, relative = largest_step(fit, grid)
    assert largest < 0.02 * np.std(np.sin(X))
    assert largest < 4e-3  # the sine itself changes by 2e-3
    inside = (grid[1:, 0] > 4.2) & (grid[1:, 0] < 5.8)
    assert relative[inside].max() < 0.15  # of so fine a grid; a step was more than 1
    far = fit.latent_mean_and_variance([[1e4]])
    assert far[0] == pytest.approx(y.mean(), abs=1e-6)


@pytest.mark.parametrize("end", [slow_case([3.0, 0.2]), [0.3, -0.4]], ids=["outside", "across"])
def test_mean_along_a_line_in_the_plane_has_no_steps(end):
    rng = np.random.default_rng(1)
    X = rng.uniform(-1, 1, (600, 2))
    X = X[(X**2).sum(1) > 0.3]  # a hole in the middle
    y = np.sin(3 * X[:, 0]) * np.cos(2 * X[:, 1]) + 0.1 * rng.standard_normal(len(X))
    kernel = 1.0 * RBF(0.7) + WhiteKernel(0.02)
    fit = SWSGPRegressor(kernel, n_neighbors=24, optimizer=None, random_state=0).fit(X, y)
    end = 0.5 * np.array(end) / np.linalg.norm(end)
    begin = 0.0 if end[1] < 0 else end / 0.5
    line = begin + np.linspace(-1, 1, 4001)[:, None] * end
    largest, _ = largest_step(fit, line)
    assert largest < 0.02 * y.std()
    assert largest < 30 * 0.5 / 2000  # slopes, that were up to a thousand


def test_draws_across_a_gap_have_no_steps():
    X, y = with_gap()
    kernel = 3.0 * RBF(2.0) + WhiteKernel(0.02)
    fit = SWSGPRegressor(kernel, n_neighbors=32, optimizer=None, random_state=0).fit(X, y)
    grid = np.linspace(4.5, 5.5, 401)[:, None]
    _, covariance = fit._latent_mean_and_covariance(grid)
    variance = np.diag(covariance)
    steps = variance[1:] + variance[:-1] - 2 * np.diag(covariance, 1)
    assert np.sqrt(steps.max()) < 0.1 * np.sqrt(variance.min())


def test_probabilities_across_a_gap_have_no_steps():
    X, y = with_gap()
    rng = np.random.default_rng(2)
    labels = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(400) > 0
    fit = SWSGPClassifier(3.0 * RBF(1.5), n_neighbors=32, optimizer=None, random_state=0).fit(
        X, labels
    )
    proba = fit.predict_proba(np.linspace(3.5, 6.5, 6001)[:, None])[:, 1]
    assert np.abs(np.diff(proba)).max() < 0.01


def test_fading_costs_no_accuracy_between_the_data():
    """Neighbours that fade predict a rough function as well as all of them in full."""
    rng = np.random.default_rng(3)
    X = rng.uniform(-1, 1, (1500, 6))
    y = np.sin(X @ rng.standard_normal(6)) + X[:, 0] * X[:, 1] + 0.05 * rng.standard_normal(1500)
    kernel = 1.0 * RBF(1.2) + WhiteKernel(0.003)
    options = {"n_inducing": 0, "optimizer": None, "random_state": 0}
    near = VecchiaGPRegressor(kernel, n_neighbors=16, **options).fit(X[:1000], y[:1000])
    fewer = VecchiaGPRegressor(kernel, n_neighbors=14, **options).fit(X[:1000], y[:1000])
    losses = [-fit.log_predictive_density(X[1000:], y[1000:]).mean() for fit in (near, fewer)]
    every = GaussianProcessRegressor(kernel, optimizer=None).fit(X[:1000], y[:1000])
    best = -every.log_predictive_density(X[1000:], y[1000:]).mean()
    assert best < losses[0] < losses[1]
