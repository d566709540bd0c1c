"""Noise with heavy tails, and counts, of few rows: as likely as the posterior of all rows allows.

New observations of a function of one or three columns; the bounds stand between what was seen with
all rows as inducing points under the evidence lower bound, and what was seen without.
"""

import numpy as np
import pytest
import torch
from scipy.stats import gamma
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import DLMGPRegressor, StateSpaceGPRegressor, SWSGPRegressor, VecchiaGPRegressor
from skgp.likelihoods import StudentT
from tests.covering import slow_case


def draws(n, d, kernel, noise, seed):
    """Rows to learn from and 300 new ones, of a GP seen with some noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n + 300, d))
    f = np.linalg.cholesky(kernel(X) + 1e-9 * np.eye(len(X))) @ rng.standard_normal(len(X))
    y = noise(rng, f)
    return X[:n], y[:n], X[n:], y[n:]


def outliers(rng, f):
    return f + 0.2 * rng.standard_t(3, len(f))


def counts(rng, f):
    return rng.poisson(np.exp(f + 1.0))


def loss(model, data):
    """Nats a new observation."""
    X, y, X_new, y_new = data
    return -model.fit(X, y).log_predictive_density(X_new, y_new).mean()


@pytest.mark.parametrize(
    "estimator", [DLMGPRegressor, SWSGPRegressor, slow_case(VecchiaGPRegressor)]
)
@pytest.mark.parametrize(("seed", "bound"), [slow_case(0, 0.33), (1, 0.22), slow_case(2, 0.34)])
def test_outliers_of_few_rows(estimator, seed, bound):
    data = draws(100, 3, RBF(3**0.5), outliers, seed)
    assert loss(estimator(likelihood="student_t", random_state=0), data) < bound


@pytest.mark.parametrize(
    "estimator", [DLMGPRegressor, SWSGPRegressor, StateSpaceGPRegressor, VecchiaGPRegressor]
)
def test_tails_are_heavy_where_few_rows_show_none(estimator):
    """The likelihood of these 40 is greatest for normal noise, their errors are of t."""
    data = draws(40, 1, RBF(1.0), outliers, seed=3)
    model = estimator(likelihood="student_t", random_state=0)
    assert loss(model, data) < 0.95  # 1.1 to 1.5 without a prior
    assert 3 < model.degrees_of_freedom_ < 15


def test_repeated_inputs_show_which_columns_matter():
    """One of three left out is known from the two of its input, whatever the length scales."""
    rng = np.random.default_rng(2)
    X, X_new = rng.standard_normal((50, 3)).repeat(3, axis=0), rng.standard_normal((500, 3))
    y = np.sin(1.5 * X[:, 0]) + 0.3 * rng.standard_normal(150)
    model = DLMGPRegressor(likelihood="student_t", random_state=0).fit(X, y)
    assert np.sqrt(np.mean((model.predict(X_new) - np.sin(1.5 * X_new[:, 0])) ** 2)) < 0.2


@pytest.mark.parametrize("estimator", [DLMGPRegressor, SWSGPRegressor])
def test_gross_outliers_do_not_set_the_scale_of_y(estimator):
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 10, (120, 1))
    y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(120)
    y[:6] = 1e6
    model = estimator(likelihood="student_t", random_state=0).fit(X, y)
    assert (model.y_mean_, model.y_scale_) == pytest.approx((y[6:].mean(), y[6:].std()))
    assert 0.05 < model.likelihood_scale_ < 0.2  # of DLM 2e3 by the standard deviation of y
    assert np.abs(model.predict(X[6:]) - np.sin(X[6:, 0])).max() < 0.15


def test_prior_of_degrees_of_freedom_is_a_gamma_law_of_mode_4():
    degrees = np.array([2.5, 4.0, 9.0, 80.0])
    learned = StudentT(0.3, df_bounds=(2.0, 200.0))
    values = [float(learned.log_prior(torch.tensor([0.7, np.log(nu)]))) for nu in degrees]
    expected = gamma(2.0, scale=4.0).logpdf(degrees)
    np.testing.assert_allclose(np.diff(values), np.diff(expected), rtol=1e-5)
    assert float(StudentT(0.3, 9.0).log_prior(torch.tensor([0.7, 2.0]))) == 0


def test_degrees_of_freedom_given_have_no_prior():
    X, y, *_ = draws(40, 1, RBF(1.0), outliers, seed=3)
    model = SWSGPRegressor(likelihood="student_t", degrees_of_freedom=50.0, random_state=0)
    assert model.fit(X, y).degrees_of_freedom_ == pytest.approx(50.0)


@pytest.mark.parametrize("kernel", [RBF(3**0.5), Matern(1.5 * 3**0.5, nu=1.5)])
def test_counts_of_few_rows_use_all_of_them(kernel):
    data = draws(60, 3, kernel, counts, seed=0)
    model = SWSGPRegressor(likelihood="poisson", random_state=0)
    assert loss(model, data) < 1.4  # 1.55 with 32 neighbours
    assert model.n_neighbors_ == 60


def test_what_is_asked_for_is_minimised():
    """The evidence lower bound takes the place of the default alone."""
    X, y, *_ = draws(60, 1, RBF(1.0), outliers, seed=0)
    default, *others = (
        DLMGPRegressor(likelihood="student_t", random_state=0, max_iter=15, **asked).fit(X, y)
        for asked in ({}, {"beta": 0.1}, {"objective": "elbo", "beta": 0.1}, {"gradient": "bmc"})
    )
    assert [model.beta_ for model in others] == [0.1, 0.1, 1.0]
    std, *found = (model.predict(X, return_std=True)[1] for model in (default, *others))
    assert (np.abs(np.array(found) - std).max(1) > 1e-3).all()


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        (DLMGPRegressor, {}),
        (DLMGPRegressor, {"n_inducing": 15}),
        (DLMGPRegressor, {"n_inducing": 15, "batch_size": 30}),
        (VecchiaGPRegressor, {}),
        (SWSGPRegressor, {}),
        (SWSGPRegressor, {"n_inducing": 40, "n_neighbors": 10}),
        (SWSGPRegressor, {"solver": "adam", "n_inducing": 20, "n_neighbors": 10}),
        (SWSGPRegressor, {"solver": "adam", "n_inducing": 20, "batch_size": 30}),
    ],
)
def test_prior_of_a_likelihood_enters_every_search(estimator, options, monkeypatch):
    """A prior that knows the degrees of freedom is believed."""

    def certain(likelihood, parameters):
        return -1e5 * (parameters[1] - np.log(12.0)) ** 2

    monkeypatch.setattr(StudentT, "log_prior", certain)
    X, y, *_ = draws(40, 1, RBF(1.0), outliers, seed=0)
    settings = {"likelihood": "student_t", "random_state": 0, "max_iter": 30, **options}
    model = estimator(RBF(1.0) + WhiteKernel(0.1), **settings).fit(X, y)
    assert model.degrees_of_freedom_ == pytest.approx(12.0, rel=0.01)
