"""Where else the search of one kernel of a series starts."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern, WhiteKernel

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from skgp.inference.markov.series import make_series
from skgp.learning.markov import series_search
from skgp.learning.markov.series_search import likeliest_starts
from skgp.likelihoods import Gaussian

NOISE = 0.3


def noisy_sine(n_rows, span=6.0, speed=2.0):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-span / 2, span / 2, n_rows))
    f = np.sin(speed * x)
    return x[:, None], f + NOISE * rng.standard_normal(n_rows), f


@pytest.mark.parametrize(
    "n_rows, span, speed, kernel",
    [
        (60, 6.0, 2.0, 1.0 * RBF(2.0)),
        (120, 6.0, 2.0, 1.0 * RBF(30.0)),
        (2000, 60.0, 20.0, 1.0 * Matern(300.0, nu=1.5)),  # seen in a stretch of rows alone
    ],
    ids=["few", "smooth", "quick"],
)
def test_the_answer_does_not_depend_on_the_start(n_rows, span, speed, kernel):
    X, y, f = noisy_sine(n_rows, span, speed)
    found = StateSpaceGPRegressor(kernel + WhiteKernel(0.05)).fit(X, y)
    assert np.sqrt(np.mean((found.predict(X) - f) ** 2)) < NOISE


def test_starts_keep_fixed_noise_and_have_none_without_length_scales():
    X, y, _ = noisy_sine(50)
    series = make_series(torch.tensor(X[:, 0]), torch.tensor(y))
    ((kernel, parameters),) = likeliest_starts(RBF(9.0), series, Gaussian(0.09))
    assert kernel.length_scale < 2.0
    assert float(parameters[0]) == pytest.approx(np.log(0.09))
    free = Gaussian(0.09, bounds=(1e-4, 1.0))
    ((_, parameters),) = likeliest_starts(RBF(9.0), series, free)
    assert np.log(1e-4) <= float(parameters[0]) <= 0.0
    fixed = ExpSineSquared(1.0, 3.0, length_scale_bounds="fixed")
    assert not list(likeliest_starts(fixed, series, free))


@pytest.mark.parametrize(
    "kernel, is_scored",
    [
        (1.0 * Matern(1.0, nu=1.5), True),
        (1.0 * RBF(20.0) + 1.0 * Matern(1.0, nu=1.5) + 1.0 * Matern(0.1, nu=0.5), False),
    ],
    ids=["one", "sum"],
)
def test_a_kernel_given_reaches_the_evidence_of_a_climb_by_lbfgs(kernel, is_scored, monkeypatch):
    """Scoring from far ends 40 nats below, of a season by a sum."""
    rng, x = np.random.default_rng(0), np.arange(120) / 12.0
    y = np.sin(2 * np.pi * x) + 0.1 * x**1.5 + 0.1 * rng.standard_normal(120)
    model, scored = StateSpaceGPRegressor(kernel, likelihood="gaussian"), []
    settle = series_search.settle
    monkeypatch.setattr(
        series_search, "settle", lambda *a, **b: scored.append(1) or settle(*a, **b)
    )
    found = model.fit(x[:, None], y).log_marginal_likelihood_value_
    assert bool(scored) == is_scored
    monkeypatch.setattr(series_search, "settle", lambda *a, **b: None)
    assert found > model.fit(x[:, None], y).log_marginal_likelihood_value_ - 0.01


def test_labels_find_another_start_than_their_kernel():
    """The ELBO of a short search tells: no start has one that says so by itself."""
    rng, x = np.random.default_rng(2), np.linspace(0, 20, 150)
    labels = rng.random(150) < 1 / (1 + np.exp(-6 * np.sin(4 * x)))
    near, far = (
        StateSpaceGPClassifier(1.0 * Matern(scale, nu=0.5)).fit(x[:, None], labels).elbo_
        for scale in (0.4, 400.0)
    )
    assert far > near - 0.1
