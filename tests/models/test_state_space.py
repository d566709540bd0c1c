"""Fits of series: posteriors against scikit-learn's dense GP, what is chosen, what stops them."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from skgp.inference.markov.series import make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models.state_space import fit_series
from tests.reference.state_space import assert_draws
from tests.same import assert_same

NOISE = Gaussian(0.1, bounds=(1e-6, 10.0))
NEW = torch.linspace(-3, 14, 9, dtype=torch.float64)


def matern(nu=1.5, length_scale=1.0):
    return ConstantKernel(1.0, (1e-3, 1e3)) * Matern(length_scale, (1e-2, 1e2), nu=nu)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 50)
    x[:5] = x[5:10]
    return torch.from_numpy(x), torch.from_numpy(np.sin(x) + 0.2 * rng.standard_normal(50))


def fit(x, y, family=NOISE, kernels=None, offsets=(0.0,), **options):
    return fit_series(
        kernels or [matern()], [make_series(x, y)], family, offsets=offsets, **options
    )


def test_posterior_is_that_of_the_dense_gp(data):
    x, y = data
    found = fit(x, y, learn=False)
    (state,) = found.states
    dense = GaussianProcessRegressor(matern() + WhiteKernel(0.1), optimizer=None)
    dense.fit(x[:, None], y)
    mean, covariance = dense.predict(NEW[:, None], return_cov=True)
    covariance = covariance - 0.1 * np.eye(9)
    np.testing.assert_allclose(state.moments(NEW)[0], mean, atol=1e-10)
    np.testing.assert_allclose(state.moments(NEW)[1], np.diag(covariance), atol=1e-10)
    np.testing.assert_allclose(state.covariance(NEW)[1], covariance, atol=1e-10)
    assert found.value == pytest.approx(dense.log_marginal_likelihood_value_, abs=1e-7)
    assert found.n_iter == 0 and found.history == []


def test_without_learning_the_first_kernel_is_taken_as_it_is(data):
    kernels = [matern(0.5, 3.0), matern()]
    found = fit(*data, kernels=kernels, learn=False)
    assert found.states[0].kernel == kernels[0]


def test_draws_have_the_moments_of_the_posterior(data):
    (state,) = fit(*data, learn=False).states
    draws = state.samples(NEW, 4000, torch.Generator().manual_seed(0))
    assert_draws(draws, *state.covariance(NEW))


@pytest.mark.parametrize("n_inducing", [None, 20])
def test_components_sum_to_the_mean(data, n_inducing):
    kernel = matern() + matern(0.5, 8.0)
    (state,) = fit(*data, kernels=[kernel], learn=False, n_inducing=n_inducing).states
    mean, var = state.components(NEW)
    np.testing.assert_allclose(mean.sum(1), state.moments(NEW)[0], atol=1e-12)
    assert mean.shape == var.shape == (9, 2) and bool((var > 0).all())


@pytest.mark.parametrize("n_inducing", [None, 20, "auto"])
def test_states_pickle_small_and_predict_the_same(data, n_inducing):
    (state,) = fit(*data, n_inducing=n_inducing, max_iter=3).states
    assert isinstance(state, SeriesState if n_inducing is None else InducingState)
    expected = state.moments(NEW)
    text = pickle.dumps(state)
    assert len(text) < (3 * 8 * 50 + 2000 if n_inducing is None else 20 * 8 * 50 + 3000)
    for a, b in zip(pickle.loads(text).moments(NEW), expected, strict=True):
        assert_same(a, b)


def test_inducing_states_at_all_times_are_exact(data):
    x, y = data
    exact, sparse = (fit(x, y, n_inducing=n, learn=False) for n in (None, 45))
    assert sparse.value == pytest.approx(exact.value, abs=1e-7)
    for a, b in zip(sparse.states[0].moments(NEW), exact.states[0].moments(NEW), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_inducing_states_that_move_raise_the_bound(data):
    still, moved = (fit(*data, n_inducing=6, learn_inducing=moves) for moves in (False, True))
    assert moved.value > still.value + 0.5
    assert bool((moved.states[0].knots.diff() > 0).all())


@pytest.mark.parametrize("name", ["poisson", "student_t", "logit"])
def test_other_likelihoods_know_their_offset(data, name):
    x, f = data
    y = torch.poisson(20 * f.exp(), generator=torch.Generator().manual_seed(0))
    family = Poisson()
    if name == "student_t":
        y, family = f + 5, StudentT(0.05**0.5, 4.0)
    if name == "logit":
        y, family = torch.where(f > -1, 1.0, -1.0).double(), Bernoulli()
    offset = {"poisson": 3.0, "student_t": 5.0, "logit": 2.0}[name]
    found = fit(x, y, family, offsets=[offset], max_iter=10)
    mean, var = found.states[0].moments(torch.tensor([1e4]).double())
    value = family.predictive_moments(mean, var)[0].item() if name != "student_t" else mean.item()
    there = {"poisson": np.exp(3.0), "student_t": 5.0, "logit": np.tanh(2.0 / 2)}[name]
    assert value == pytest.approx(there, rel=1e-6)  # E[y] a priori
    assert found.value > fit(x, y, family, offsets=[0.0], learn=False).value


def test_processes_share_kernel_and_have_posteriors_of_their_own(data):
    x, y = data
    series = [make_series(x, sign * y + 1) for sign in (1, -1)]
    found = fit_series([matern()], series, NOISE, offsets=[0.0, 0.0], max_iter=3)
    first, second = found.states
    assert first.kernel == second.kernel
    assert float((first.moments(NEW)[0] - second.moments(NEW)[0]).abs().max()) > 0.5
