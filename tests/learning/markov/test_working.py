"""Trends and seasons of counts, outliers and labels are found by working observations."""

import re

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from skgp.inference.markov.series import make_series
from skgp.inference.markov.states import SeriesState
from skgp.learning.markov.series_search import _working

T = np.arange(160.0)
WEEK = 0.8 * np.sin(2 * np.pi * T / 7)


def period_of(kernel):
    """The only one of a season."""
    (found,) = re.findall(r"Cosine\(period=([\d.]+)\)", str(kernel))
    return float(found)


def test_working_observations_are_the_tops_of_the_sites():
    beta, weight = torch.tensor([2.0, -3.0, 1.0, 4.0]), torch.tensor([1.0, 2.0, -0.5, 4.0])
    times = torch.arange(4.0)
    state = SeriesState(Matern(), times, beta, weight)
    working, noise = _working(make_series(times, beta), state)
    assert noise == 0.5  # that of the median weight
    torch.testing.assert_close(
        working.times, times[[0, 1, 3]].double()
    )  # a convex one says nothing
    torch.testing.assert_close(working.totals / working.counts, torch.tensor([2.0, -1.5, 1.0]))
    torch.testing.assert_close(noise / working.counts, torch.tensor([1.0, 0.5, 0.25]))


def test_counts_are_forecast_with_their_trend_and_season():
    log_rate = 0.5 + 0.01 * T + WEEK
    y = np.random.default_rng(0).poisson(np.exp(log_rate)).astype(float)
    model = StateSpaceGPRegressor(likelihood="poisson").fit(T[:120, None], y[:120])
    assert abs(period_of(model.kernel_) - 7) < 0.1 and "LocalLinearTrend" in str(model.kernel_)
    error = np.log(model.predict(T[120:, None])) - log_rate[120:]
    assert np.sqrt(np.mean(error**2)) < 0.35  # .8 of what is flat


@pytest.mark.slow
def test_outliers_hide_neither_trend_nor_season():
    rng = np.random.default_rng(1)
    f = 0.02 * T + WEEK
    y = (
        f
        + 0.1 * rng.standard_normal(160)
        + 6 * rng.standard_normal(160) * (rng.uniform(size=160) < 0.05)
    )
    model = StateSpaceGPRegressor(likelihood="student_t", degrees_of_freedom=3.0)
    model.fit(T[:60, None], y[:60])
    assert np.sqrt(np.mean((model.predict(T[60:90, None]) - f[60:90]) ** 2)) < 0.15


def test_labels_have_seasons_and_what_has_none_keeps_a_smooth_kernel():
    rng = np.random.default_rng(2)
    p = 1 / (1 + np.exp(-3 * WEEK))
    labels, coins = rng.uniform(size=160) < p, rng.uniform(size=160) < 0.5
    model = StateSpaceGPClassifier().fit(T[:, None], labels)
    assert abs(period_of(model.kernel_) - 7) < 0.1
    ahead = model.predict_proba(T[:14, None] + 161)[:, 1]
    assert np.corrcoef(ahead, p[:14])[0, 1] > 0.9
    for other in (coins, np.sin(T / 15) > 0):
        kernel = str(StateSpaceGPClassifier().fit(T[:, None], other).kernel_)
        assert "LocalLinearTrend" not in kernel and "Cosine" not in kernel


def test_a_season_that_separates_labels_keeps_its_amplitude():
    """The ELBO of 60 labels raised it to 9300, and log-losses between them to .33."""
    rng = np.random.default_rng(6)
    x = np.sort(rng.uniform(0, 10, 60))[:, None]
    period, phase = rng.uniform(2, 5), rng.uniform(0, 6)

    def labels(x):
        f = np.sin(2 * np.pi * x[:, 0] / period + phase)
        return f + 0.2 * rng.standard_normal(len(x)) > 0

    model = StateSpaceGPClassifier().fit(x, labels(x))
    assert "Cosine" in str(model.kernel_)
    between = rng.uniform(0, 10, (300, 1))
    assert -model.log_predictive_density(between, labels(between)).mean() < 0.2


def test_holidays_beside_counts_hide_no_season():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(3)
    holiday = rng.uniform(size=160) < 0.1
    y = rng.poisson(np.exp(1.0 + WEEK - 1.5 * holiday)).astype(float)
    X = pd.DataFrame({"t": pd.date_range("2024-01-01", periods=160), "holiday": holiday})
    model = StateSpaceGPRegressor(likelihood="poisson").fit(X, y)
    assert abs(period_of(model.kernel_) - 7) < 0.1
    parts = model.predict_components(X)
    assert np.corrcoef(parts[:, -1], holiday)[0, 1] < -0.99
