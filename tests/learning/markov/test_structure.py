"""Seasons by the periodogram, and defaults that forecast."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.inference.markov.series import make_series
from skgp.kernels import Cosine, LocalLinearTrend
from skgp.kernels.expression import summands
from skgp.learning.markov import objectives
from skgp.learning.markov.objectives import Component
from skgp.learning.markov.structure import Backgrounds, propose_seasons
from skgp.learning.markov.waves import Background, Waves, gains_of, lomb
from skgp.likelihoods import Gaussian


def seasons(t, y):
    z = (y - y.mean()) / (y.std() or 1.0)
    series = make_series(*map(torch.tensor, (t, z)))
    backgrounds = Backgrounds(None, len(t), Gaussian(0.1, bounds=(1e-10, 10.0)))
    if z.any():
        backgrounds.known = backgrounds.fitted(series)  # as a fit has it
    return list(propose_seasons(series, backgrounds))


def periods(t, y):
    return [season.period for season in seasons(t, y)]


def test_periods_of_a_regular_grid_are_found():
    t = np.arange(24.0 * 7 * 4)
    y = np.sin(2 * np.pi * t / 24) + 1.0 * ((t // 24) % 7 >= 5)
    found = periods(t, y + 0.3 * np.random.default_rng(0).standard_normal(len(t)))
    assert found == [24.0, 168.0]


def test_a_step_of_the_weekend_beside_a_day_is_a_week():
    """Each of its waves is small over a level that follows the step; together they stand out."""
    rng, t = np.random.default_rng(0), np.arange(8.0 * 7 * 3)
    profile = 0.8 * ((t // 8) % 7 < 5) + np.sin(2 * np.pi * t / 8)
    assert periods(t, profile + 0.3 * rng.standard_normal(len(t))) == [8.0, 56.0]


@pytest.mark.parametrize("n", [60, 400])  # by a matrix and by the filter
def test_gains_are_ratios_of_likelihoods(n):
    """By dense matrices: the likeliest scale of each background, less two for level and slope."""
    rng, f = np.random.default_rng(0), np.array([0.06, 0.21])
    t = np.sort(rng.uniform(0, 50, n))
    y = np.sin(2 * np.pi * 0.06 * t) + 0.01 * t + 0.4 * rng.standard_normal(n)
    kernels = 3.0 * Matern(2.0, nu=0.5), 0.1 * Matern(30.0, nu=0.5)
    series = make_series(torch.tensor(t), torch.tensor(y))
    backgrounds = [Background(Component(kernel).dynamics(), 0.5) for kernel in kernels]

    def log_likelihood(V, *columns):
        if columns:
            Phi = np.linalg.solve(np.linalg.cholesky(V), np.stack(columns, 1))
            z = np.linalg.solve(np.linalg.cholesky(V), y)
            q = ((z - Phi @ np.linalg.lstsq(Phi, z, rcond=None)[0]) ** 2).sum()
        else:
            q = y @ np.linalg.solve(V, y)
        return -0.5 * np.linalg.slogdet(V)[1] - 0.5 * (n - 4) * np.log(q)

    covariances = [kernel(t[:, None]) + 0.5 * np.eye(n) for kernel in kernels]
    without, expected = max(map(log_likelihood, covariances)), []
    for each in f:
        wave = np.cos(2 * np.pi * each * t), np.sin(2 * np.pi * each * t)
        expected.append(max(log_likelihood(V, *wave) for V in covariances) - without)
    found = gains_of(t - t[0], y, f, lambda t, y: (series, backgrounds))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_gains_of_waves_together_are_ratios_of_likelihoods():
    """By dense matrices; of each beside the other over the likelier background (Wald)."""
    rng, t, f, n = np.random.default_rng(0), np.arange(60.0), np.array([0.05, 0.11]), 60
    y = np.sin(2 * np.pi * 0.05 * t) + 0.5 * np.cos(2 * np.pi * 0.11 * t) + rng.standard_normal(n)
    kernels = 3.0 * Matern(2.0, nu=0.5), 0.1 * Matern(30.0, nu=0.5)
    series = make_series(torch.tensor(t), torch.tensor(y))
    backgrounds = [Background(Component(kernel).dynamics(), 0.5) for kernel in kernels]
    found, each = Waves(t, y, lambda t, y: (series, backgrounds)).gain_together(f)
    phase, values, walds = 2 * np.pi * np.outer(t, f), [], []
    Phi = np.hstack([np.cos(phase), np.sin(phase)])
    for kernel in kernels:
        V = kernel(t[:, None]) + 0.5 * np.eye(n)
        A, b = Phi.T @ np.linalg.solve(V, Phi), Phi.T @ np.linalg.solve(V, y)
        w, q = np.linalg.solve(A, b), y @ np.linalg.solve(V, y)
        likelihoods = [
            -0.5 * np.linalg.slogdet(V)[1] - 0.5 * (n - 4) * np.log(left) for left in (q, q - w @ b)
        ]
        values.append(likelihoods)
        pairs = [[0, 2], [1, 3]]
        C = np.linalg.inv(A)
        chi2 = [w[p] @ np.linalg.solve(C[np.ix_(p, p)], w[p]) for p in pairs]
        walds.append(0.5 * (n - 4) * np.array(chi2) / (q - w @ b))
    without, together = np.array(values).T
    assert found == pytest.approx(together.max() - without.max(), rel=1e-8)
    np.testing.assert_allclose(each, walds[together.argmax()], rtol=1e-6)


@pytest.mark.parametrize("times", ["regular", "irregular", "business days"])
def test_gains_of_a_grid_that_matter_are_exact(times):
    rng, t = np.random.default_rng(0), np.arange(300.0)
    if times == "irregular":
        t = np.sort(rng.uniform(0, 300, 300))
    if times == "business days":
        t = t[t % 7 < 5]
    y = np.sin(2 * np.pi * t / 7) + 0.5 * np.cos(2 * np.pi * t / 40) + rng.standard_normal(len(t))
    kernels = 3.0 * Matern(2.0, nu=0.5), 0.1 * Matern(30.0, nu=0.5)
    backgrounds = [Background(Component(kernel).dynamics(), 0.5) for kernel in kernels]
    series = make_series(torch.tensor(t), torch.tensor(y))
    given = t - t[0], y, lambda t, y: (series, backgrounds)
    f = np.arange(8, 600) / (4 * t[-1])
    found, exact = gains_of(given[0], y, f, given[2]), Waves(*given).gains(f)
    matter = (exact > 6) | (f * t[-1] <= 12)
    assert matter.sum() > 45
    np.testing.assert_allclose(found[matter], exact[matter], rtol=1e-9)
    assert np.abs(found - exact).max() < 1.5  # half the step's frequency has a cosine alone
    assert 0 < np.abs(found - exact).mean() < 0.05


@pytest.mark.parametrize("n", [60, 150])
@pytest.mark.parametrize("irregular", [False, True])
@pytest.mark.parametrize("cycles", [3, 4])
def test_a_season_that_a_trend_could_follow_is_found(n, irregular, cycles):
    """Where the search for the trend of a series has followed the waves, none is left."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        t = np.sort(rng.uniform(0, n, n)) if irregular else np.arange(float(n))
        phase = 2 * np.pi * cycles * (t - t[0]) / (t[-1] - t[0])
        y = np.sin(phase + rng.uniform(0, 6)) + 0.4 * rng.standard_normal(n)
        (found,) = periods(t, y)
        assert abs((t[-1] - t[0]) / found - cycles) < 0.25


def test_a_wave_of_a_series_that_wanders_is_no_season():
    """Over a stiff background it would stand out, were that not so much the less likely."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        assert periods(np.arange(80.0), np.cumsum(rng.standard_normal(80))) == []


@pytest.mark.parametrize("cells", [2000, 350])  # by Lomb and Scargle, and in cells
def test_a_period_of_irregular_times_is_found_to_a_part_of_the_resolution(cells, monkeypatch):
    monkeypatch.setattr("skgp.learning.markov.defaults.WAVE_ROWS", cells)
    rng = np.random.default_rng(1)
    t = np.sort(rng.uniform(0, 100, 400))
    y = 0.05 * t + np.cos(2 * np.pi * t / 3.7) + 0.5 * rng.standard_normal(400)
    (found,) = periods(t, y)
    assert abs(1 / found - 1 / 3.7) < 0.1 / 100


def test_harmonics_carry_their_variance():
    t = np.arange(600.0)
    y = np.cos(2 * np.pi * t / 12) + 0.5 * np.cos(6 * np.pi * t / 12)
    y += 0.1 * np.random.default_rng(2).standard_normal(600)
    (season,) = seasons(t, y)
    assert season.period == 12.0 and list(season.variances) == [1, 3]
    variances = np.array([*season.variances.values()]) * y.var()
    np.testing.assert_allclose(variances, [0.5, 0.125], rtol=0.05)


@pytest.mark.parametrize("step", [1 / 12, 1e-3, 1e-6])
def test_harmonics_at_the_nyquist_frequency_have_the_variance_of_their_cosine(step):
    """The sine is rounding at times that are no whole numbers, and would take weights of 1e9."""
    t = np.arange(120.0)
    y = np.cos(2 * np.pi * t / 12) + 0.5 * np.cos(np.pi * t)
    y += 0.1 * np.random.default_rng(2).standard_normal(120)
    (season,) = seasons(step * t, y)
    assert list(season.variances) == [1, 6]
    np.testing.assert_allclose([*season.variances.values()], [0.646, 0.171], rtol=0.01)


def test_small_harmonics_are_seen_beside_great_ones():
    rng, t = np.random.default_rng(0), np.arange(400.0)
    y = 10 * np.sin(2 * np.pi * t / 12) + 0.2 * np.cos(2 * np.pi * t / 4)
    y += np.cumsum(0.1 * rng.standard_normal(400)) + 0.2 * rng.standard_normal(400)
    (season,) = seasons(t, y)
    assert set(season.variances) == {1, 3}
    assert season.variances[3] * y.var() == pytest.approx(0.02, rel=0.3)


def test_a_day_that_differs_over_the_week_is_a_season_of_the_week():
    t = np.arange(24.0 * 7 * 4)
    y = (1 + ((t // 24) % 7 < 5)) * np.sin(2 * np.pi * t / 24)
    y += 0.3 * np.random.default_rng(5).standard_normal(len(t))
    day, week = seasons(t, y)
    assert (day.period, week.period) == (24.0, 168.0)
    assert {6, 8} <= set(week.variances)


def test_noise_and_slow_motion_have_no_period():
    proposals = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        t = np.sort(rng.uniform(0, 10, 150))
        C = Matern(1.0, nu=0.5 + seed % 3)(t[:, None]) + 0.05 * np.eye(150)
        proposals += bool(periods(t, np.linalg.cholesky(C) @ rng.standard_normal(150)))
        proposals += bool(periods(t, rng.standard_normal(150)))
    assert proposals <= 1  # of 40 series


@pytest.mark.parametrize("irregular", [False, True])
def test_the_periodogram_is_what_least_squares_explains(irregular):
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(0, 80, 80)) if irregular else np.arange(80.0)
    y, frequencies = rng.standard_normal(80), np.linspace(0.002, 0.5, 167)
    explained = []
    for f in frequencies:
        wave = np.stack([np.cos(2 * np.pi * f * t), np.sin(2 * np.pi * f * t)], 1)
        left = y - wave @ np.linalg.lstsq(wave, y, rcond=1e-9)[0]
        explained.append(0.5 * (y @ y - left @ left))
    np.testing.assert_allclose(lomb(t, y, frequencies), explained, rtol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_random_walk_is_forecast_as_one(seed):
    """From where a search of level and slope begins, the slope takes all at another maximum."""
    rng = np.random.default_rng(seed)
    t, y = np.arange(60.0), np.cumsum(rng.standard_normal(60))
    model = StateSpaceGPRegressor().fit(t[:, None], y)
    mean, std = model.predict(t[-1] + np.array([[1.0], [15.0]]), return_std=True)
    assert abs(mean[0] - y[-1]) < 1.0 and 0.8 < std[0] < 1.3
    assert 0.7 * 15**0.5 < std[1] < 2.5 * 15**0.5


def test_few_or_constant_values_have_no_period():
    t = np.arange(19.0)
    assert periods(t, np.sin(t)) == []
    assert periods(np.arange(100.0), np.ones(100)) == []


@pytest.mark.parametrize("cycles", [3.5, 4, 5])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_season_of_few_cycles_is_found(cycles, noise):
    t = np.arange(12 * cycles)
    y = np.sin(2 * np.pi * t / 12) + 0.02 * t
    assert periods(t, y + noise * np.random.default_rng(1).standard_normal(len(t))) == [12.0]


def test_a_short_series_has_its_season_and_one_that_wanders_none():
    """Of 30 times, too few for a trend: 4 weeks were forecast as 1.1 sd of noise."""
    rng, t, walks = np.random.default_rng(11), np.arange(42.0), 0
    for _ in range(5):
        f = 1.5 * np.sin(2 * np.pi * t / 7 + rng.uniform(0, 6))
        y = f + 0.4 * rng.standard_normal(42)
        mean, std = (
            StateSpaceGPRegressor().fit(t[:30, None], y[:30]).predict(t[30:, None], return_std=True)
        )
        assert np.sqrt(np.mean((mean - f[30:]) ** 2)) < 0.6 and std.max() < 1.2
        walk = StateSpaceGPRegressor().fit(t[:30, None], np.cumsum(rng.standard_normal(30)))
        walks += "Cosine" in str(walk.kernel_)
    assert walks == 0


@pytest.mark.parametrize(("noise", "most"), [(0.0, 1e-3), (0.05, 0.06)])
def test_a_season_that_grows_is_forecast_to_grow(noise, most):
    """Drift as of Matern 1/2 goes on at the last amplitude: errors of .64 and .08."""
    t = np.arange(160.0)
    f = np.sin(2 * np.pi * t / 12) * (1 + 0.003 * t) + 0.01 * t
    y = f + noise * np.random.default_rng(0).standard_normal(160)
    model = StateSpaceGPRegressor().fit(t[:128, None], y[:128])
    assert np.sqrt(np.mean((model.predict(t[128:, None]) - f[128:]) ** 2)) < most


@pytest.mark.parametrize("begins", [20, 30])
def test_a_season_that_begins_late_is_forecast(begins):
    """A trend that begins where it does hides it over all times."""
    t, rng = np.arange(72.0)[:, None], np.random.default_rng(2)
    y = np.where(t > begins, np.sin(2 * np.pi * t / 8), 0.0)[:, 0] + 0.3 * rng.standard_normal(72)
    fit = StateSpaceGPRegressor().fit(t[:60], y[:60])
    assert np.sqrt(np.mean((fit.predict(t[60:]) - y[60:]) ** 2)) < 0.5


def test_what_remains_beside_a_season_may_be_rougher_than_the_series():
    """The smooth kernel that was chosen without the wave has less evidence than the true one."""
    rng, t, f = np.random.default_rng(1), np.arange(200.0), np.zeros(200)
    for i in range(1, 200):
        f[i] = 0.8 * f[i - 1] + 0.3 * rng.standard_normal()
    y = 2 * np.sin(2 * np.pi * t / 8) + f
    y += 0.1 * rng.standard_normal(200)
    kernel = 0.25 * Matern(-1 / np.log(0.8), nu=0.5) + 2.0 * Cosine(8.0) + WhiteKernel(0.01)
    truth = GaussianProcessRegressor(kernel, optimizer=None).fit(t[:, None], y - y.mean())
    evidence = truth.log_marginal_likelihood_value_ + 200 * np.log(y.std())  # of y of unit variance
    assert StateSpaceGPRegressor().fit(t[:, None], y).log_marginal_likelihood_value_ > evidence


def test_seasons_are_sought_in_what_covariates_do_not_explain():
    rng, t = np.random.default_rng(6), np.arange(84.0)
    heat, season = rng.standard_normal(84), np.sin(2 * np.pi * t / 12)
    y = 5 * heat + season + 0.2 * rng.standard_normal(84)
    X = np.column_stack([t, heat])
    model = StateSpaceGPRegressor(time=0, covariates={1: "linear"}).fit(X[:60], y[:60])
    error = model.predict(X[60:]) - 5 * heat[60:] - season[60:]
    assert np.sqrt(np.mean(error**2)) < 0.3  # without the season 0.7


def test_a_random_walk_does_not_return_to_its_mean():
    rng, inside, errors = np.random.default_rng(7), [], []
    t = np.arange(100.0)
    for _ in range(6):
        y = np.cumsum(0.1 + 0.5 * rng.standard_normal(100)) + 0.2 * rng.standard_normal(100)
        mean, std = (
            StateSpaceGPRegressor().fit(t[:80, None], y[:80]).predict(t[80:, None], return_std=True)
        )
        inside.append(np.abs(y[80:] - mean) < 1.96 * std)
        errors.append(np.abs(mean[0] - y[79]))
    assert np.mean(inside) > 0.85
    assert max(errors) < 1.0


def test_default_forecasts_trend_and_season():
    rng, t = np.random.default_rng(3), np.arange(240.0)
    f = 0.02 * t + np.sin(2 * np.pi * t / 12)
    y = f + 0.2 * rng.standard_normal(240)
    model = StateSpaceGPRegressor().fit(t[:180, None], y[:180])
    mean, std = model.predict(t[180:, None], return_std=True)
    assert np.sqrt(np.mean((mean - f[180:]) ** 2)) < 0.25
    assert 0.88 < np.mean(np.abs(y[180:] - mean) < 1.96 * std) <= 1.0


def test_a_line_becomes_a_trend_and_a_stationary_process_does_not():
    rng, t = np.random.default_rng(4), np.linspace(0, 10, 120)
    line = 3 * t + 0.2 * rng.standard_normal(120)
    root = np.linalg.cholesky(Matern(0.4, nu=2.5)(t[:, None]) + 1e-9 * np.eye(120))
    wave = root @ rng.standard_normal(120) + 0.2 * rng.standard_normal(120)
    kinds = [
        any(type(part) is LocalLinearTrend for part in summands(each.kernel_))
        for each in (StateSpaceGPRegressor().fit(t[:, None], y) for y in (line, wave))
    ]
    assert kinds == [True, False]


def test_a_line_without_noise_is_forecast():
    """The filter loses the digits of the smooth process that it was, with a level beside it."""
    t = np.sort(np.random.default_rng(0).uniform(0, 10, 200))
    mean = StateSpaceGPRegressor().fit(t[:, None], 2 * t + 1).predict([[12.0]])
    assert mean[0] == pytest.approx(25.0, abs=1e-3)


def stationary(seed, n, scale):
    """A smooth process of unit variance and little noise."""
    rng, t = np.random.default_rng(seed), np.arange(float(n))
    root = np.linalg.cholesky(Matern(scale, nu=2.5)(t[:, None]) + 1e-9 * np.eye(n))
    return t, root @ rng.standard_normal(n) + 0.1 * rng.standard_normal(n)


def test_shares_of_structures_are_ratios_of_dense_evidences():
    """Of a trend and of a process above a level as wide, both less log(n) / 2 a hyper-parameter."""
    t, y = stationary(5, 60, 6.0)
    z, values = (y - y.mean()) / y.std(), []
    state = StateSpaceGPRegressor().fit(t[:, None], y)._states[0]
    for k in (0, -1):  # the mode of the likelier, and the other
        each = state.states[k]
        kernel = each.kernel + WhiteKernel(state.noise[k], "fixed")
        dense = GaussianProcessRegressor(kernel, optimizer=None).fit(t[:, None], z)
        value = dense.log_marginal_likelihood_value_ - 0.5 * math.log(60) * len(kernel.theta)
        trends = any(type(part) is LocalLinearTrend for part in summands(each.kernel))
        values.append(value + (0.5 * math.log(1e3) if trends else 0.0))
    share = 1 / (1 + math.exp(values[1] - values[0]))
    assert 0.5 < share < 0.9
    of_one = sum(state.weights[:-1]), state.weights[-1]
    np.testing.assert_allclose(of_one, [share, 1 - share], atol=0.01)


def test_few_cycles_of_a_stationary_process_are_not_forecast_along_a_slope():
    errors = []
    for seed in range(8):
        t, y = stationary(seed, 80, 6.0)
        model = StateSpaceGPRegressor().fit(t[:60, None], y[:60])
        errors.append(y[60:] - model.predict(t[60:, None]))
    assert np.sqrt(np.mean(np.square(errors))) < 1.2


def test_a_series_without_noise_needs_no_filter(monkeypatch):
    """Digits are lost where the variance exceeds that of a step ahead, not that of the noise."""
    monkeypatch.setattr(objectives, "evidence", None)  # of the filter, 100 times the time
    x = np.arange(60.0)
    y = np.sin(2 * np.pi * x / 12) + 0.05 * x
    fit = StateSpaceGPRegressor().fit(x[:, None], y)
    new = np.arange(60.0, 80.0)
    mean = fit.predict(new[:, None])
    np.testing.assert_allclose(mean, np.sin(2 * np.pi * new / 12) + 0.05 * new, atol=0.01)


def test_a_walk_has_no_season_beside_a_level_that_varies():
    """Waves of walks stand out over a varying slope; they do not over a varying level."""
    rng = np.random.default_rng([1, 150, 431])
    t, e = np.arange(200.0), rng.standard_normal(200)
    y = np.cumsum(0.1 + 0.5 * rng.standard_normal(200)) + 0.3 * e
    fit = StateSpaceGPRegressor().fit(t[:150, None], y[:150])
    assert "Cosine" not in str(fit.kernel_)


@pytest.mark.parametrize("period", [14.1, 28.3])
def test_the_period_of_a_wave_without_noise_is_not_rounded(period):
    """Of three and a half cycles, a step of a period between whole ones shows."""
    t = np.arange(round(4.7 * period))
    y = np.sin(2 * np.pi * t / period + 1.0)
    n = round(3.5 * period)
    fit = StateSpaceGPRegressor().fit(t[:n, None], y[:n])
    mean, std = fit.predict(t[n:, None], return_std=True)
    assert np.abs(mean - y[n:]).max() < 1e-3
    assert (np.abs(mean - y[n:]) < 1.96 * std).mean() > 0.85


@pytest.mark.parametrize("scale", [8.0, 10.0, 15.0])
def test_a_smooth_series_without_noise_is_forecast_as_one(scale):
    t = np.arange(150.0)
    y = np.sin(t / scale)
    model = StateSpaceGPRegressor().fit(t[:135, None], y[:135])
    mean, std = model.predict(t[135:, None], return_std=True)
    assert np.abs(mean - y[135:]).max() < 0.02
    assert (np.abs(mean - y[135:]) < 2 * std).all()


@pytest.mark.parametrize("n_far, stamp", [(1, "1970-01-01"), (4, "2099-12-31")])
def test_a_few_wrong_dates_hide_no_season(n_far, stamp):
    """They are told; the range with them has no resolution for a week."""
    rng, t = np.random.default_rng(0), np.arange(230)
    y = 0.02 * t + np.sin(2 * np.pi * t / 7) + 0.1 * rng.standard_normal(230)
    dates = np.datetime64("2020-01-01") + t
    new = dates[200:].copy()
    dates[50 : 50 + n_far] = np.datetime64(stamp)
    with pytest.warns(UserWarning, match=f"far from all others, {stamp}"):
        model = StateSpaceGPRegressor().fit(dates[:200], y[:200])
    assert np.sqrt(np.mean((model.predict(new) - y[200:]) ** 2)) < 0.2
