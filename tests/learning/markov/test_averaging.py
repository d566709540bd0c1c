"""Hyper-parameters that few rows leave open: Laplace's mixture beside the integral."""

import itertools
import pickle

import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.inference.gp_mixture import AveragedState
from skgp.inference.markov.series import make_series
from skgp.kernels import LocalLinearTrend
from skgp.kernels.series_parts import SeriesParts, has_waves, is_of_no_season
from skgp.learning.markov.averaging import Average, around, average
from skgp.learning.markov.objectives import GaussianEvidence, SharedEvidence
from skgp.learning.markov.search import maximise
from skgp.learning.markov.series_search import averaged_state
from skgp.learning.posterior.priors import default_priors
from skgp.likelihoods import Gaussian
from tests.covering import slow_case


def few_rows(seed, n, n_covariates):
    """Times and covariates, targets, and which rows are seen."""
    rng = np.random.default_rng([seed, n, n_covariates])
    t = np.sort(rng.uniform(0, 10, n + 40))
    Z, slopes = rng.standard_normal((n + 40, n_covariates)), rng.normal(size=n_covariates)
    root = np.linalg.cholesky(Matern(2.0, nu=1.5)(t[:, None]) + 1e-9 * np.eye(n + 40))
    y = Z @ slopes + root @ rng.standard_normal(n + 40)
    y += rng.choice([0.1, 0.3, 0.6]) * rng.standard_normal(n + 40)
    seen = np.zeros(n + 40, dtype=bool)
    seen[rng.permutation(n + 40)[:n]] = True
    return np.column_stack([t, Z]), y, seen


def integral(y, laws):
    """Mean and standard deviation of new targets, by covariances, noise and log prior densities."""
    n, total, first, second = len(y), 0.0, 0.0, 0.0
    for K, s2, log_prior in laws:
        C, k = K[:n, :n] + s2 * np.eye(n), K[n:, :n]
        a = np.linalg.solve(C, np.column_stack([y, k.T]))
        w = np.exp(log_prior - 0.5 * (y @ a[:, 0] + np.linalg.slogdet(C)[1]))
        m, u = k @ a[:, 0], K[n:, n:].diagonal() - (k * a[:, 1:].T).sum(1) + s2
        total, first, second = total + w, first + w * m, second + w * (u + m**2)
    return first / total, np.sqrt(second / total - (first / total) ** 2)


def predicted(points, series, likelihood, objective, new):
    """The same by a mixture."""
    state = averaged_state(points, series, likelihood, 0.0, objective.objectives[0], None)
    mean, var = (each.numpy() for each in state.moments(torch.tensor(new)))
    return mean, np.sqrt(var + np.dot(points.weights, points.noise))


def test_moments_are_near_those_of_the_integral():
    rng, new = np.random.default_rng(0), np.array([-1.0, 2.2, 6.0])
    x = np.sort(rng.uniform(0, 5, 9))
    y = np.sin(2 * x) + 0.3 * rng.standard_normal(9)
    y = (y - y.mean()) / y.std()
    kernel = ConstantKernel(1.0, (1e-6, 1e6)) * Matern(1.0, (1e-3, 1e3), nu=1.5)
    likelihood = Gaussian(0.1, bounds=(1e-8, 10.0))
    series = make_series(torch.tensor(x), torch.tensor(y))
    objective = SharedEvidence([GaussianEvidence(series)])
    found = maximise([kernel], objective, likelihood)
    points = average(found, [], objective, likelihood, series)
    mean, std = predicted(points, series, likelihood, objective, new)

    priors = default_priors(kernel, x[:, None], y)
    medians = np.array([priors[0].median, priors[1].median, 0.1 * y.var()])
    laws, times = [], np.append(x, new)[:, None]
    for z in itertools.product(np.linspace(-3.5, 3.5, 19), repeat=3):
        v, scale, s2 = medians * np.exp(1.5 * np.array(z))
        laws.append((v * Matern(scale, nu=1.5)(times), s2, -0.5 * np.dot(z, z)))
    expected, spread = integral(y, laws)
    np.testing.assert_allclose(std, spread, rtol=0.15)
    assert np.abs((mean - expected) / spread).max() < 0.25
    assert abs(sum(points.weights) - 1) < 1e-12


@pytest.mark.slow
def test_intervals_of_ten_rows_with_a_covariate_are_honest():
    inside, densities = [], []
    for seed in range(3):
        X, y, seen = few_rows(seed, 10, 1)
        model = StateSpaceGPRegressor(time=0).fit(X[seen], y[seen])
        mean, std = model.predict(X[~seen], return_std=True)
        z = (y[~seen] - mean) / std
        inside.append(np.mean(np.abs(z) < 1.96))
        densities.append(np.mean(0.5 * z**2 + np.log(std)))
        assert isinstance(model._states[0], AveragedState)
    assert np.mean(inside) > 0.8
    assert np.mean(densities) < 1.0


def walk(n):
    """Times, and a walk beneath noise, of which the first 60 are seen."""
    e, noise = np.random.default_rng(0).standard_normal((2, n))
    return np.arange(float(n))[:, None], np.cumsum(e) + noise, np.arange(n) < 60


def observations(model, X):
    """The normal laws (k, n) of y under each state of an averaged model."""
    state = model._states[0]
    rows = torch.tensor(X if state.terms is not None else X[:, 0])
    mean, var = (np.stack(v) for v in zip(*(s.moments(rows) for s in state.states), strict=True))
    std = np.sqrt(var + np.array(state.noise)[:, None])
    return scipy.stats.norm(model.y_mean_ + model.y_scale_ * mean, model.y_scale_ * std)


@pytest.mark.parametrize("data", [few_rows(3, 12, 2), slow_case(walk(80))])
def test_an_averaged_model_agrees_with_itself_and_goes_on(data):
    X, y, seen = data
    model = StateSpaceGPRegressor(time=0).fit(X[seen], y[seen])
    model._gross_error_rate = 0.0  # of which are tests of their own
    assert len(model._states[0].states) > 2
    mean, std = model.predict(X, return_std=True)
    _, covariance = model.predict(X, return_cov=True)
    np.testing.assert_allclose(covariance.diagonal(), std**2, rtol=1e-9)
    parts = model.predict_components(X)
    np.testing.assert_allclose(parts.sum(1) + model.intercept_, mean, atol=1e-9)
    alone = model.predict(X[:1], return_std=True)
    np.testing.assert_allclose(alone, [mean[:1], std[:1]], rtol=1e-9)
    law = observations(model, X)
    density = np.dot(model._states[0].weights, law.pdf(y))
    np.testing.assert_allclose(model.log_predictive_density(X, y), np.log(density), rtol=1e-9)
    quantiles, draws = model.predict_quantiles(X, [0.1, 0.5, 0.975]), model.sample_y(X, 2000)
    for p, q in zip([0.1, 0.5, 0.975], quantiles.T, strict=True):
        below = np.dot(model._states[0].weights, law.cdf(q))
        np.testing.assert_allclose(below, p, rtol=1e-9)
        z = ((draws <= q[:, None]).mean(1) - p) / np.sqrt(p * (1 - p) / draws.shape[1])
        assert np.abs(z).max() < 4
    again = pickle.loads(pickle.dumps(model)).predict(X, return_std=True)
    np.testing.assert_allclose(again, [mean, std], rtol=1e-12)
    draws = model.sample_f(X[-1:], 4000, random_state=0)
    f_mean, f_var = model.latent_mean_and_variance(X[-1:])
    assert abs(draws.mean() - f_mean[0]) < 4 * np.sqrt(f_var[0] / 4000)
    assert abs(draws.var() / f_var[0] - 1) < 0.15
    model.partial_fit(X[~seen][:5], y[~seen][:5])
    assert np.isfinite(model.predict(X, filtered=True)).all()


@pytest.mark.filterwarnings("ignore:The optimal value")
@pytest.mark.parametrize(("slope", "wave"), [(0.06, 0.0), (1.0, 3.0)])
def test_the_share_of_a_line_is_the_ratio_of_dense_evidences(slope, wave):
    n = 18 if wave else 20  # too few times for a season
    t = np.sort(np.random.default_rng(5).uniform(0, 19, 20)) if not wave else np.arange(18.0)
    y = slope * t + 0.5 * np.random.default_rng(1).standard_normal(n) + wave * np.sin(1.5 * t)
    z, span = (y - y.mean()) / y.std(), np.ptp(t)
    values = []
    for change in (1e-8, 12.0):
        fixed = {f"{name}_bounds": "fixed" for name in ("diffusion", "level", "slope")}
        line = LocalLinearTrend(1e-8 / span**3, 1e3, change / span**2, origin=t[0] - span, **fixed)
        start = 0.3 * Matern(1.0, (1e-4, 1e4), nu=1.5) + WhiteKernel(0.3, (1e-8, 10.0))
        dense = GaussianProcessRegressor(start + line, n_restarts_optimizer=5, random_state=0)
        values.append(dense.fit(t[:, None], z).log_marginal_likelihood_value_)
    share = 1 / (1 + np.exp(values[0] - values[1]))
    state = StateSpaceGPRegressor().fit(t[:, None], y)._states[0]
    parts = zip(state.states, state.weights, strict=True)
    above = [weight for each, weight in parts if "LocalLinearTrend" in str(each.kernel)]
    assert 0.1 < share < 0.9
    np.testing.assert_allclose(above, [share], atol=0.01)
    assert ("LocalLinearTrend" in str(state.kernel)) == (share > 0.5)  # that of the likelier


def test_components_of_covariates_stand_behind_those_of_the_series_with_a_line_or_without():
    rng = np.random.default_rng(1)
    X = np.column_stack([np.arange(20.0), rng.standard_normal(20)])
    y = 0.06 * X[:, 0] + 0.5 * rng.standard_normal(20) + X[:, 1]
    model = StateSpaceGPRegressor(time=0).fit(X, y)
    assert len({str(state.kernel) for state in model._states[0].states}) > 1
    moved = model.predict_components(X + [0, 1]) - model.predict_components(X)
    assert moved.shape[1] == len(model.component_names_) == 3
    np.testing.assert_allclose(moved[:, :2], 0, atol=1e-12)
    assert moved[:, 2].min() > 0.1


def test_a_season_of_two_structures_is_one_component():
    e, noise = np.random.default_rng(1).standard_normal((2, 60))
    t = np.arange(60.0)
    season = 1.5 * np.sin(2 * np.pi * t / 12)
    level = scipy.signal.lfilter([0.3], [1.0, -0.93], e)
    model = StateSpaceGPRegressor().fit(t[:, None], season + level + 0.3 * noise)
    shapes = {str(state.kernel).count("LocalLinearTrend") for state in model._states[0].states}
    assert shapes == {0, 1}
    ours = [has_waves(kernel) for kernel in model.component_kernels_]
    assert sum(ours) == 1
    parts = model.predict_components(t[:, None])
    assert np.sqrt(np.mean((parts[:, ours][:, 0] - season) ** 2)) < 0.2


def test_short_series_with_a_slope_are_forecast_along_it_and_others_are_not():
    inside, flat = [], []
    for seed in range(6):
        t, e = np.arange(26.0), np.random.default_rng(seed).standard_normal(26)
        for slope, found in ((0.12, inside), (0.0, flat)):
            y = slope * np.maximum(t - 10, 0) + 0.3 * e
            model = StateSpaceGPRegressor().fit(t[:20, None], y[:20])
            mean, std = model.predict(t[20:, None], return_std=True)
            found.append(np.abs(y[20:] - mean) / (std if slope else 0.3))
            parts = model.predict_components(t[:, None])
            assert parts.shape[1] == len(model.component_names_)
            np.testing.assert_allclose(
                parts.sum(1) + model.intercept_, model.predict(t[:, None]), atol=1e-9
            )
    assert np.mean(np.array(inside) < 1.96) > 0.75
    assert np.sqrt(np.mean(np.square(flat))) < 1.2


def test_forecasts_of_a_trend_spread_as_the_integral_over_its_variances():
    rng, t, new = np.random.default_rng(4), np.arange(40.0), np.array([44.0, 55.0])
    y = np.cumsum(np.cumsum(0.2 * rng.standard_normal(40)) + rng.standard_normal(40))
    y = y / y.std() + 0.1 * rng.standard_normal(40)
    fixed = {"level_bounds": "fixed", "slope_bounds": "fixed", "origin": -40.0}
    trend = LocalLinearTrend(1e-5, 1e3, 1.0, diffusion_bounds=(1e-9, 1.0), **fixed)
    walk = ConstantKernel(1.0, (1e-6, 1e6)) * Matern(1e3, "fixed", nu=0.5)
    likelihood = Gaussian(0.1, bounds=(1e-8, 10.0))
    series = make_series(torch.tensor(t), torch.tensor(y))
    objective = SharedEvidence([GaussianEvidence(series)])
    found = maximise([trend + walk], objective, likelihood)
    points = around(found, objective, likelihood)
    mean, std = predicted(points, series, likelihood, objective, new)
    alone = predicted(Average((found,), (1.0,)), series, likelihood, objective, new)[1]

    mode = np.append(found.components[0].theta, found.parameters)
    laws, times = [], np.append(t, new)[:, None]
    for z in itertools.product(np.arange(-7.0, 6.0), np.arange(-7.0, 6.0), np.arange(-3.0, 3.0)):
        theta, noise = np.split(mode + z, [-1])
        K = found.kernel.clone_with_theta(theta)(times)
        laws.append((K, np.exp(noise[0]), found.value - 0.05 * np.dot(z, z)))
    expected, spread = integral(y, laws)
    np.testing.assert_allclose(std, spread, rtol=0.05)
    assert np.abs((mean - expected) / spread).max() < 0.2
    assert (alone < 0.85 * spread).all()  # of the point where the search ended


def test_hyper_parameters_of_seasons_are_told_from_others():
    make = SeriesParts(start=0.0, span=50.0, gap=1.0, variance=1.0)
    kernel = make.trend() + make.season(12.0, {1: 1.0, 2: 0.1}) + make.wander() + make.short()
    np.testing.assert_array_equal(is_of_no_season(kernel), [True, *[False] * 3, *[True] * 3])


def autoregression(n):
    """Times, targets, where the search of a Matern 1/2 ended, and points about that."""
    e, noise = np.random.default_rng(1).standard_normal((2, n))
    y = scipy.signal.lfilter([1.0], [1.0, -0.9], e) + 1.5 * noise
    t, y = np.arange(float(n)), y / y.std()
    kernel = ConstantKernel(1.0, (1e-6, 1e6)) * Matern(2.0, (1e-2, 1e3), nu=0.5)
    likelihood = Gaussian(0.3, bounds=(1e-8, 10.0))
    objective = SharedEvidence([GaussianEvidence(make_series(torch.tensor(t), torch.tensor(y)))])
    found = maximise([kernel], objective, likelihood)
    return t, y, found, around(found, objective, likelihood)


def test_weights_of_many_rows_are_those_of_a_gaussian():
    *_, points = autoregression(400)
    # With the noise held it falls by twice as much on one axis.
    np.testing.assert_allclose(points.weights, [1 / 3, *[1 / 6] * 4], atol=0.01)


def test_points_of_more_rows_are_on_the_axes_of_the_hessian():
    t, y, found, points = autoregression(401)
    mode, *ends = [each.components[0].theta.numpy() for each in points.points]
    moves = (np.array(ends[:2]) - ends[2:]) / (2 * np.sqrt(3))  # of d + k = 3

    exact = GaussianProcessRegressor(found.kernel + WhiteKernel(1.0), optimizer=None).fit(
        t[:, None], y
    )
    place = np.append(mode, found.parameters)
    slopes = [
        [exact.log_marginal_likelihood(place + h * z, True)[1] for z in np.eye(3)]
        for h in (0.1, -0.1)
    ]
    precision = 0.1 * np.eye(3) - (np.array(slopes[0]) - slopes[1]) / 0.2
    expected = np.linalg.inv((precision + precision.T) / 2)[:2, :2]
    np.testing.assert_allclose(moves.T @ moves, expected, rtol=0.25)
    assert points.weights[0] == pytest.approx(1 / 3, abs=0.05)  # the mode's, were it a Gaussian


def test_forecasts_with_a_covariate_spread_as_without_it_where_it_says_nothing():
    """A wandering slope of 60 times: of the point where the search ended it is a tenth less."""
    rng, t = np.random.default_rng(2), np.arange(80.0)
    y = np.cumsum(np.cumsum(0.2 * rng.standard_normal(80))) + 0.3 * rng.standard_normal(80)
    X = np.column_stack([t, np.tile([0.0, 1.0], 40)])
    alone = StateSpaceGPRegressor(likelihood="gaussian").fit(t[:60, None], y[:60])
    beside = StateSpaceGPRegressor(time=0, likelihood="gaussian").fit(X[:60], y[:60])
    spread = alone.predict(t[60:, None], return_std=True)[1]
    np.testing.assert_allclose(beside.predict(X[60:], return_std=True)[1], spread, rtol=0.05)
