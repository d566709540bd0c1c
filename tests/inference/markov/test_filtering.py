"""Predictions from the past alone, and states that observations at the end join."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov import states as states_module
from skgp.inference.markov.regression import RegressionState, make_regression_series
from skgp.inference.markov.series import make_series
from skgp.inference.markov.states import SeriesState
from skgp.inference.markov.terms import Linear, Polynomial, Terms
from skgp.likelihoods import Gaussian
from tests.covering import covering

KERNEL = 1.3 * Matern(0.7, nu=1.5) + 0.4 * Matern(3.0, nu=0.5)
NOISE = 0.2


def problem(n=150, seed=0):
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(0.2, n)
    gaps[[3, 4, n // 2]] = 0.0
    t = torch.tensor(np.cumsum(gaps))
    X = torch.stack([t, torch.tensor(rng.normal(size=n))], 1)
    y = t.sin() + 0.7 * X[:, 1] + 0.4 * torch.tensor(rng.normal(size=n))
    return X, y


def made(with_terms, X, y, first=None):
    """The state of some rows; `first` are those that features are about."""
    if not with_terms:
        series = make_series(X[:, 0], y)
        beta, weight = series.gaussian_sites(NOISE)
        return SeriesState(KERNEL, series.times, beta - 0.3 * weight, weight, 0.3), series
    about = X if first is None else first
    parts = (
        Polynomial.over(about[:, 0], 1, 10.0, place=0),
        Linear.of(about[:, 1], "x", 1, 10.0),
    )
    terms = Terms(parts, 0)
    series = make_regression_series(X[:, 0], y, terms.features(X))
    weight = torch.full_like(y, 1 / NOISE)
    beta = weight * (series.y - 0.3)
    state = RegressionState(
        KERNEL, series.times, beta, weight, 0.3, terms=terms, features=series.features
    )
    return state, series


def inputs(with_terms, X):
    return X if with_terms else X[:, 0].contiguous()


@covering(with_terms=[False, True], tile=[None, 1])
def test_past_moments_are_those_of_the_rows_before(monkeypatch, with_terms, tile):
    X, y = problem(60)
    if tile:
        monkeypatch.setattr("skgp.inference.markov.states.tile_rows", lambda size: 7)
    state, _ = made(with_terms, X, y)
    asked = torch.cat([X, X + torch.tensor([0.01, 0.5])])[torch.randperm(120)]
    mean, var = state.past_moments(inputs(with_terms, asked))
    for i in range(0, 120, 5):
        before = X[:, 0] < asked[i, 0]
        if not before.any():
            continue
        part, _ = made(with_terms, X[before], y[before], first=X)
        expected = part.moments(inputs(with_terms, asked[i : i + 1]))
        torch.testing.assert_close(mean[i], expected[0][0], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(var[i], expected[1][0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("with_terms", [False, True])
def test_rows_at_the_end_join_without_a_run_over_all(monkeypatch, with_terms):
    X, y = problem()
    whole, _ = made(with_terms, X, y, first=X[:100])
    state, _ = made(with_terms, X[:100], y[:100])
    likelihood = Gaussian(NOISE)
    state.end  # made once  # noqa: B018

    def refuse(self):
        raise AssertionError("the series was run through again")

    with monkeypatch.context() as patch:
        for kind in (states_module.SeriesState, RegressionState):
            patch.setattr(kind, "posterior", property(refuse))
        for rows in (slice(100, 101), slice(101, 140), slice(140, 150)):
            series = (
                make_regression_series(X[rows, 0], y[rows], state.terms.features(X[rows]))
                if with_terms
                else make_series(X[rows, 0], y[rows])
            )
            state = state.with_rows(series, likelihood)
        ahead = X[-20:].clone()
        ahead[:, 0] += ahead[-1, 0] - ahead[0, 0]
        found = state.moments(inputs(with_terms, ahead))
    for one, other in zip(found, whole.moments(inputs(with_terms, ahead)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    for one, other in zip(  # within the data all of them count
        state.moments(inputs(with_terms, X)), whole.moments(inputs(with_terms, X)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_rows_before_the_end_are_not_taken_for_the_end():
    X, y = problem()
    whole, _ = made(False, X, y)
    state, _ = made(False, X[40:], y[40:])
    state = state.with_rows(make_series(X[:40, 0], y[:40]), Gaussian(NOISE))
    ahead = X[-1:, 0] + 0.3
    for one, other in zip(state.moments(ahead), whole.moments(ahead), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
