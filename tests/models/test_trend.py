"""Local linear trends in state space: equal to the dense Gaussian process."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.data import Data
from skgp.inference.markov.series import make_series
from skgp.inference.markov.smoother import evidence
from skgp.kernels import SHO, Cosine, LocalLinearTrend, state_space
from skgp.likelihoods import Gaussian
from skgp.models.state_space import fit_additive, fit_series
from tests.reference.gaussian import condition, log_density, process
from tests.reference.state_space import assert_draws, by_finite_differences

NOISE = 0.04
KERNELS = {
    "trend": LocalLinearTrend(0.3, 0.7, 0.2, origin=-1.0),
    "and-season": 0.6 * LocalLinearTrend(0.1, 2.0, 0.4) + 0.5 * SHO(2.0, 6.0) + Matern(nu=0.5),
}
each_kernel = pytest.mark.parametrize("kernel", list(KERNELS.values()), ids=list(KERNELS))


def covariance(kernel, x, z):
    """The kernels above written anew: double loop over the formula of an integral."""

    def wander(u, v):  # of min(s, u) min(s, v) ... : int_0^min (u - s)(v - s) ds
        m = min(u, v)
        return u * v * m - (u + v) * m**2 / 2 + m**3 / 3

    def trend(q, level, slope, origin):
        return np.array(
            [
                [
                    level + slope * (a - origin) * (b - origin) + q * wander(a - origin, b - origin)
                    for b in z
                ]
                for a in x
            ]
        )

    if kernel is KERNELS["trend"]:
        return trend(0.3, 0.7, 0.2, -1.0)
    t = np.abs(x[:, None] - z)
    b = 2 * np.pi / 2.0
    sho = np.exp(-t / 6.0) * (np.cos(b * t) + np.sin(b * t) / (b * 6.0))
    return 0.6 * trend(0.1, 2.0, 0.4, 0.0) + 0.5 * sho + np.exp(-t)


def data(n=70):
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(0.2, 9.0, n))
    return x, 0.5 * x + np.sin(3 * x) + 0.2 * rng.standard_normal(n)


def fitted(kernel, x, y):
    series, likelihood = make_series(torch.tensor(x), torch.tensor(y)), Gaussian(NOISE)
    return fit_series([kernel], [series], likelihood, offsets=[0.0], learn=False)


def assert_moments(state, new, mean, joint, **tol):
    """Those of f by itself, and of all jointly."""
    for found, expected in (
        (state.covariance(torch.tensor(new)), (mean, joint)),
        (state.moments(torch.tensor(new)), (mean, joint.diagonal())),
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, **tol)


@each_kernel
@pytest.mark.parametrize("n", [5, 70, 400])
def test_evidence_equals_the_dense_one(kernel, n):
    x, y = data(n)
    expected = log_density(covariance(kernel, x, x) + NOISE * np.eye(n), y)
    assert abs(fitted(kernel, x, y).value - expected) < 1e-8 * n


@each_kernel
def test_predictions_equal_the_dense_ones(kernel):
    x, y = data()
    new = np.array([0.05, 0.2, 1.1, 4.0, 8.9, 9.5, 15.0])
    state = fitted(kernel, x, y).states[0]
    C, k = covariance(kernel, x, x) + NOISE * np.eye(len(x)), covariance(kernel, new, x)
    mean, joint = condition(C, k, covariance(kernel, new, new), y)
    assert_moments(state, new, mean, joint, atol=1e-8)
    draws = state.samples(torch.tensor(new), 4000, torch.Generator().manual_seed(0))
    assert_draws(draws, mean, joint)


BEFORE = {
    "trend": LocalLinearTrend(0.3, 0.7, 0.2, origin=-1.0),
    "and-others": LocalLinearTrend(0.1, 2.0, 0.4)
    + 0.5 * SHO(2.0, 6.0)
    + 0.3 * Matern(nu=2.5) * Cosine(3.0)
    + 0.2 * RBF(2.0),
}


@pytest.mark.parametrize("kernel", list(BEFORE.values()), ids=list(BEFORE))
def test_predictions_before_the_origin_equal_the_dense_ones(kernel):
    x, y = data()
    new = np.array([-2.0, 0.3, -7.5, 5.0, -1.1, 12.0, -2.0])
    state = fitted(kernel, x, y).states[0]
    mean, joint = process(kernel, x[:, None], y, NOISE, new[:, None])
    # RBF: 9e-6 of its variance
    assert_moments(state, new, mean, joint, atol=5e-5 if kernel is BEFORE["and-others"] else 1e-8)
    prior_mean, prior_var = state.past_moments(torch.tensor([-2.0, -7.5], dtype=torch.float64))
    np.testing.assert_allclose(prior_mean, 0.0, atol=1e-12)
    np.testing.assert_allclose(prior_var, kernel.diag(np.array([[-2.0], [-7.5]])), atol=1e-4)
    draws = state.samples(torch.tensor(new), 8000, torch.Generator().manual_seed(0))
    assert_draws(draws, mean, joint)
    found = state.moments(torch.tensor(new))[0]
    parts = state.components(torch.tensor(new))
    np.testing.assert_allclose(parts[0].sum(1), found, atol=1e-8)


def test_predictions_before_the_origin_with_a_covariate_equal_the_dense_ones():
    rng, x = np.random.default_rng(0), np.arange(30.0)
    z = rng.standard_normal(33)
    y = 0.1 * x + 2 * z[:30] + 0.1 * rng.standard_normal(30)
    trend = LocalLinearTrend(0.01, 1.0, 0.1, origin=-1.0)
    kernel = trend + WhiteKernel(NOISE)
    options = {"time": 0, "covariates": {1: "linear"}, "optimizer": None, "normalize_y": False}
    X = np.column_stack([x, z[:30]])
    model = StateSpaceGPRegressor(kernel, **options).fit(X, y)
    new = np.column_stack([[-4.0, 5.5, -9.0], z[30:]])
    term = model._terms.parts[0]
    slope = float(term.log_scales(term.theta).exp()[0]) ** 2
    features = [model._terms.features(torch.tensor(rows)).numpy()[:, 0] for rows in (X, new)]

    def K(a, fa, b, fb):
        return trend(a[:, :1], b[:, :1]) + slope * np.outer(fa, fb)

    known, unknown = (X, features[0]), (new, features[1])
    C, offset = K(*known, *known) + NOISE * np.eye(30), model.intercept_
    f, expected = condition(C, K(*unknown, *known), K(*unknown, *unknown), y - offset)
    mean, std = model.predict(new, return_std=True)
    np.testing.assert_allclose(mean, offset + f, atol=1e-8)
    np.testing.assert_allclose(std**2, expected.diagonal() + NOISE, atol=1e-8)
    _, joint = model.predict(new, return_cov=True)
    np.testing.assert_allclose(joint, expected + NOISE * np.eye(3), atol=1e-8)


def test_a_default_trend_predicts_before_as_it_does_after():
    rng, t = np.random.default_rng(7), np.arange(80.0)
    y = np.cumsum(0.1 + 0.5 * rng.standard_normal(80)) + 0.2 * rng.standard_normal(80)
    ahead = np.array([5.0, 40.0, 79.0, 120.0, 200.0])
    model = StateSpaceGPRegressor().fit(t[:, None], y)
    mirrored = StateSpaceGPRegressor().fit(-t[::-1, None], y[::-1])
    assert any(type(part) is LocalLinearTrend for part in model.component_kernels_)
    forecast = model.predict(79.0 + ahead[:, None], return_std=True)
    back = mirrored.predict(-79.0 - ahead[:, None], return_std=True)
    assert np.abs((back[0] - forecast[0]) / forecast[1]).max() < 0.2
    np.testing.assert_allclose(back[1], forecast[1], rtol=0.2)


@each_kernel
@pytest.mark.parametrize("n", [6, 300])
def test_gradient_of_the_evidence_equals_finite_differences(kernel, n):
    x, y = (torch.tensor(each) for each in data(n))
    form, beta, weight = state_space(kernel), y / NOISE, torch.full_like(y, 1 / NOISE)

    def value(parameters):
        dynamics = form.at(parameters)
        found = evidence(dynamics, dynamics.gaps(x), beta, weight, y)
        return torch.tensor(found.log_normalizer, dtype=torch.float64)

    at = form.parameters().detach()
    dynamics = form.at(at)
    found = evidence(dynamics, dynamics.gaps(x), beta, weight, y).parameter_gradient
    expected = by_finite_differences(value, at)
    assert (found - expected).abs().max() < 1e-6 * (1 + expected.abs().max())


def test_forecasts_go_on_along_the_slope():
    x = np.arange(100.0)
    y = 3.0 + 0.5 * x + 0.01 * np.random.default_rng(0).standard_normal(100)
    kernel = LocalLinearTrend(1e-6, 10.0, 1.0, diffusion_bounds=(1e-12, 1.0))
    model = StateSpaceGPRegressor(kernel).fit(x[:, None], y)
    mean, std = model.predict([[150.0]], return_std=True)
    assert abs(mean[0] - 78.0) < 0.1 and std[0] < 1.0


def test_what_does_not_take_trends_says_so():
    x, y = (torch.tensor(each) for each in data(20))
    trend, series = LocalLinearTrend(origin=5.0), make_series(x, y)
    with pytest.raises(ValueError, match="before the kernel's origin=5"):
        fit_series([trend], [series], Gaussian(NOISE), offsets=[0.0], learn=False)
    with pytest.raises(ValueError, match="a model with inducing states needs a stationary"):
        options = {"offsets": [0.0], "n_inducing": 5, "learn": False}
        fit_series([trend], [series], Gaussian(NOISE), **options)
    with pytest.raises(ValueError, match="an additive model needs a stationary"):
        fit_additive([trend], Data(x[:, None], y), Gaussian(NOISE), offset=0.0)
    with pytest.raises(ValueError, match="additive models do not take"):
        fit_additive([SHO()], Data(x[:, None], y), Gaussian(NOISE), offset=0.0)
    with pytest.raises(ValueError, match="add the trend"):
        state_space(trend * Matern())
    with pytest.raises(ValueError, match="give all one origin"):
        state_space(trend + LocalLinearTrend(origin=1.0))


@pytest.mark.parametrize("unit", [2.0**40, 8e11, 1e13, 1e-13])
def test_trends_do_not_heed_the_unit_of_time(unit):
    """Such as nanoseconds, in which a slope is a trillionth of what it is in days."""
    t, ahead = np.arange(60.0), np.array([0, 10.5, 59, 60, -3, -30, -55, -100])
    y = np.cumsum(np.random.default_rng(1).standard_normal(60))

    def predictions(unit):
        trend = LocalLinearTrend(4e-6 / unit**3, 1e3, 0.287 / unit**2, origin=-59 * unit)
        kernel = trend + 130.0 * Matern(1180 * unit, nu=0.5) + WhiteKernel(0.003)
        model = StateSpaceGPRegressor(kernel, optimizer=None).fit(unit * t[:, None], y)
        return model.predict(unit * ahead[:, None], return_std=True)

    for found, expected in zip(predictions(unit), predictions(1.0), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)
