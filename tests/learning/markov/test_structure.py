"""Seasons by the periodogram, and defaults that forecast."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from skgp import StateSpaceGPRegressor
from skgp.inference.markov.series import make_series
from skgp.kernels import LocalLinearTrend
from skgp.kernels.expression import summands
from skgp.learning.defaults import LOMB_ROWS
from skgp.learning.markov.seasons import propose_seasons
from skgp.learning.markov.structure import parts_of


def periods(t, y):
    return [season.period for season in propose_seasons(make_series(*map(torch.tensor, (t, y))))]


def test_periods_of_a_regular_grid_are_found():
    t = np.arange(24.0 * 7 * 6)
    y = np.sin(2 * np.pi * t / 24) + 1.0 * ((t // 24) % 7 >= 5)
    found = periods(t, y + 0.3 * np.random.default_rng(0).standard_normal(len(t)))
    assert found == [24.0, 168.0]


@pytest.mark.parametrize("n", [300, LOMB_ROWS + 500])  # by Lomb and Scargle, and in cells
def test_a_period_of_irregular_times_is_found_to_a_part_of_the_resolution(n):
    rng = np.random.default_rng(1)
    t = np.sort(rng.uniform(0, 100, n))
    y = 0.05 * t + np.cos(2 * np.pi * t / 3.7) + 0.5 * rng.standard_normal(n)
    (found,) = periods(t, y)
    assert abs(1 / found - 1 / 3.7) < 0.1 / 100


def test_harmonics_carry_their_variance():
    t = np.arange(600.0)
    y = np.cos(2 * np.pi * t / 12) + 0.5 * np.cos(6 * np.pi * t / 12)
    y += 0.1 * np.random.default_rng(2).standard_normal(600)
    (season,) = propose_seasons(make_series(torch.tensor(t), torch.tensor(y)))
    assert season.period == 12.0 and list(season.variances) == [1, 3]
    np.testing.assert_allclose([*season.variances.values()], [0.5, 0.125], rtol=0.05)


def test_a_day_that_differs_over_the_week_is_a_season_of_the_week():
    t = np.arange(24.0 * 7 * 8)
    y = (1 + ((t // 24) % 7 < 5)) * np.sin(2 * np.pi * t / 24)
    y += 0.3 * np.random.default_rng(5).standard_normal(len(t))
    day, week = propose_seasons(make_series(torch.tensor(t), torch.tensor(y)))
    assert (day.period, week.period) == (24.0, 168.0)
    assert {6, 8} <= set(week.variances)


def test_noise_and_slow_motion_have_no_period():
    proposals = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        t = np.sort(rng.uniform(0, 10, 150))
        C = Matern(1.0, nu=0.5 + seed % 3)(t[:, None]) + 0.05 * np.eye(150)
        proposals += len(periods(t, np.linalg.cholesky(C) @ rng.standard_normal(150)))
        proposals += len(periods(t, rng.standard_normal(150)))
    assert proposals <= 2  # of 80 series


def test_few_or_constant_values_have_no_period():
    t = np.arange(30.0)
    assert periods(t, np.sin(t)) == []
    assert periods(np.arange(100.0), np.ones(100)) == []


def test_a_trend_moves_as_the_smooth_kernel_does_locally():
    series = make_series(torch.arange(50.0), torch.arange(50.0) ** 0.5)
    long = ConstantKernel(30.0) * Matern(400.0, nu=1.5)
    trend, t = parts_of(series).trend(long), np.array([[10.0], [10.5], [11.0]])
    second = np.array([1.0, -2.0, 1.0])  # differences, blind to level and slope
    expected = second @ long(t) @ second
    assert abs(second @ trend(t) @ second / expected - 1) < 0.01


def test_default_forecasts_trend_and_season():
    rng, t = np.random.default_rng(3), np.arange(240.0)
    f = 0.02 * t + np.sin(2 * np.pi * t / 12)
    y = f + 0.2 * rng.standard_normal(240)
    model = StateSpaceGPRegressor().fit(t[:180, None], y[:180])
    mean, std = model.predict(t[180:, None], return_std=True)
    assert np.sqrt(np.mean((mean - f[180:]) ** 2)) < 0.25
    assert 0.88 < np.mean(np.abs(y[180:] - mean) < 1.96 * std) <= 1.0


def test_a_long_length_scale_becomes_a_trend_and_a_short_one_does_not():
    rng, t = np.random.default_rng(4), np.linspace(0, 10, 120)
    line = 3 * t + 0.2 * rng.standard_normal(120)
    wave = np.sin(3 * t) + 0.2 * rng.standard_normal(120)
    kinds = [
        any(type(part) is LocalLinearTrend for part in summands(each.kernel_))
        for each in (StateSpaceGPRegressor().fit(t[:, None], y) for y in (line, wave))
    ]
    assert kinds == [True, False]
