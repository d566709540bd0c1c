"""Rows that come later, against the posterior of all rows."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.inducing import fit_inducing
from skgp.inference.markov.knots import PairSites
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.kernels.sde import state_space
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT

KERNEL = 1.5 * Matern(0.8, nu=1.5)
NEW = torch.linspace(-2.0, 9.0, 23, dtype=torch.float64)


def rows(name, n=30):
    """Times in no order that repeat, and targets."""
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(n, generator=generator, dtype=torch.float64)
    x[n // 2 :: 4] = x[1 : n // 2 : 4][: len(x[n // 2 :: 4])]
    f = torch.sin(2 * x)
    if name in ("logit", "probit"):
        return x, torch.where(f > 0, 1.0, -1.0).double()
    if name == "poisson":
        return x, torch.poisson(f.exp(), generator=generator)
    return x, f + 0.3 * torch.randn(n, generator=generator).double()


LIKELIHOODS = {
    "gaussian": Gaussian(0.2),
    "logit": Bernoulli(),
    "poisson": Poisson(),
    "student_t": StudentT(0.4, 4.0),
}


def nothing_at(time, offset=0.0):
    empty = torch.zeros(1, dtype=torch.float64)
    return SeriesState(KERNEL, torch.tensor([time], dtype=torch.float64), empty, empty, offset)


def assert_alike(found, expected, **tolerance):
    for a, b in zip(found.moments(NEW), expected.moments(NEW), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("offset", [0.0, 0.7])
def test_gaussian_batches_in_any_order_are_all_rows_at_once(offset):
    x, y = rows("gaussian")
    weight = torch.linspace(0.5, 2.0, len(x), dtype=torch.float64)
    state = nothing_at(2.0, offset)
    for part in torch.arange(len(x)).split(7):
        state = state.with_rows(
            make_series(x[part], y[part], weight[part]), LIKELIHOODS["gaussian"]
        )
    series = make_series(x, y - offset, weight)
    whole = SeriesState(KERNEL, series.times, *series.gaussian_sites(0.2), offset)
    assert_alike(state, whole, rtol=1e-10, atol=1e-12)
    assert len(state.times) == len(series.times) + 1


@pytest.mark.parametrize("name", ["logit", "poisson", "student_t"])
def test_one_batch_is_the_fit_of_its_rows(name):
    x, y = rows(name)
    state = nothing_at(2.0, 0.3).with_rows(make_series(x, y), LIKELIHOODS[name])
    series = make_series(x, y)
    sites = fit_sites(state_space(KERNEL).at(), series, LIKELIHOODS[name], offset=0.3, tol=1e-13)
    whole = SeriesState(KERNEL, series.times, sites.beta, sites.weight, 0.3)
    assert_alike(state, whole, atol=1e-4)


@pytest.mark.parametrize("name", ["logit", "poisson", "student_t"])
def test_sites_of_new_rows_are_the_best_given_those_of_old(name):
    """At the optimum each site is what its rows ask for; those of old are as they were."""
    x, y = rows(name)
    first = make_series(x[:15], y[:15])
    likelihood, dynamics = LIKELIHOODS[name], state_space(KERNEL).at()
    sites = fit_sites(dynamics, first, likelihood)
    old = SeriesState(KERNEL, first.times, sites.beta, sites.weight)
    state = old.with_rows(make_series(x[15:], y[15:]), likelihood)
    mean, var = (part[_places(state, x[15:])] for part in state.moments(state.times))
    slope, curvature = likelihood.expected_derivatives(y[15:], mean, var)
    beta, weight = torch.zeros_like(state.beta), torch.zeros_like(state.beta)
    beta.index_add_(0, _places(state, x[15:]), slope - curvature * mean)
    weight.index_add_(0, _places(state, x[15:]), -curvature)
    beta.index_add_(0, _places(state, first.times), sites.beta)
    weight.index_add_(0, _places(state, first.times), sites.weight)
    np.testing.assert_allclose(state.beta, beta, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(state.weight, weight, rtol=1e-3, atol=1e-3)


def _places(state, x):
    return torch.searchsorted(state.times, x)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_knots_take_batches_as_the_fit_of_all_rows(name):
    x, y = rows(name, 60)
    knots, dynamics = torch.linspace(0, 6, 40, dtype=torch.float64), state_space(KERNEL).at()
    state = InducingState(KERNEL, knots, PairSites.zeros(2, 40))
    for part in torch.arange(60).split(15):
        state = state.with_rows(make_series(x[part], y[part]), LIKELIHOODS[name])
    whole = fit_inducing(dynamics, knots, make_series(x, y), LIKELIHOODS[name])
    expected = InducingState(KERNEL, knots, whole.posterior.sites)
    exact = name == "gaussian"
    assert_alike(state, expected, rtol=1e-9 if exact else 0.2, atol=1e-9 if exact else 0.15)
    assert state.knots is knots or torch.equal(state.knots, knots)


def test_knots_follow_the_times_and_the_posterior_stays():
    x = torch.linspace(0, 3, 40, dtype=torch.float64)
    y, likelihood = torch.sin(2 * x), LIKELIHOODS["gaussian"]
    knots = torch.linspace(0, 3, 31, dtype=torch.float64)
    state = InducingState(KERNEL, knots, PairSites.zeros(2, 31))
    state = state.with_rows(make_series(x, y), likelihood)
    # Rows that say nothing: the knots grow both ways, all else stays.
    far = torch.tensor([-1.02, -0.5, -0.01, 1.0, 3.04, 3.5, 5.02, 5.05], dtype=torch.float64)
    silent = Series(far, None, torch.zeros(8).double(), torch.full((8,), 1e-300).double())
    grown = state.with_rows(silent, likelihood)
    np.testing.assert_allclose(grown.knots[:2], [-1.02, -0.5])
    np.testing.assert_allclose(grown.knots[-2:], [3.5, 5.05])
    assert torch.equal(grown.knots[2:-2], knots)
    assert_alike(grown, state, rtol=1e-9, atol=1e-11)


def test_stream_in_time_comes_near_the_exact_posterior():
    x = torch.linspace(0, 6, 200, dtype=torch.float64)
    y, likelihood = torch.sin(2 * x), LIKELIHOODS["gaussian"]
    state = InducingState(KERNEL, x[:40:2], PairSites.zeros(2, 20))
    for part in torch.arange(200).split(40):
        state = state.with_rows(make_series(x[part], y[part]), likelihood)
    series = make_series(x, y)
    exact = SeriesState(KERNEL, series.times, *series.gaussian_sites(0.2))
    assert_alike(state, exact, atol=1e-3)
    assert 90 <= len(state.knots) <= 105


def test_one_knot_is_followed_by_others_at_a_tenth_of_the_length_scale():
    state = InducingState(KERNEL, NEW[:1], PairSites.zeros(2, 1))
    x = NEW[0] + torch.linspace(0, 2, 300, dtype=torch.float64)
    grown = state.with_rows(make_series(x, torch.sin(x)), LIKELIHOODS["gaussian"])
    assert 30 < len(grown.knots) < 60
