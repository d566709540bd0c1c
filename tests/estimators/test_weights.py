"""Sample weights are copies of rows; where noise is learned, their scale tells nothing of it."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import BaggingRegressor
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import (
    BayesianGPRegressor,
    DLMGPClassifier,
    DLMGPRegressor,
    QSGPClassifier,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPRegressor,
    VecchiaGPRegressor,
)
from tests.covering import covering, slow

NOISE = 0.3
KERNEL = 1.0 * RBF(1.0) + WhiteKernel(0.05)
FITS = {
    "qsgp": QSGPRegressor(KERNEL),
    "qsgp default": QSGPRegressor(),
    "fourier": QSGPRegressor(KERNEL, basis="fourier", n_basis=60),
    "relevance": QSGPRegressor(KERNEL, basis="relevance"),
    "cg": QSGPRegressor(KERNEL, basis="inducing", n_basis=60, solver="cg"),
    "dlm": DLMGPRegressor(KERNEL, n_inducing=20),
    "student": DLMGPRegressor(KERNEL, n_inducing=20, max_iter=30, likelihood="student_t"),
    "variational": SWSGPRegressor(KERNEL, n_inducing=40, n_neighbors=20),
    "series": StateSpaceGPRegressor(KERNEL),
    "inducing states": StateSpaceGPRegressor(KERNEL, n_inducing=40),
    "bayesian": BayesianGPRegressor(KERNEL, optimizer="map"),
    "vecchia": VecchiaGPRegressor(KERNEL),
}
#: By every route that takes weights; of hyper-parameters that are kept where nothing is said.
REPEATED = {
    "qsgp": (QSGPRegressor, {"basis": "inducing", "solver": "cholesky"}),
    "cg": (QSGPRegressor, {"solver": "cg", "covariance": "diagonal", "tol": 1e-12}),
    "fourier": (QSGPRegressor, {"basis": "fourier", "n_basis": 30, "solver": "cholesky"}),
    "relevance": (QSGPRegressor, {"basis": "relevance"}),
    "laplace": (QSGPRegressor, {"likelihood": "laplace"}),
    "laplace, learned": (QSGPRegressor, {"likelihood": "laplace", "optimizer": "auto"}),
    "laplace, fourier": (
        QSGPRegressor,
        {"likelihood": "laplace", "basis": "fourier", "n_basis": 30, "optimizer": "auto"},
    ),
    **{
        f"dlm, {'-'.join(options.values())}": (
            DLMGPRegressor,
            {"n_inducing": 12, "max_iter": 4, "optimizer": "auto", **options},
        )
        for options in (
            {"objective": "log_loss"},
            {"objective": "elbo"},
            {"objective": "square_loss"},
            {"objective": "fitc"},
            {"objective": "log_loss", "likelihood": "student_t"},
            {"objective": "log_loss", "likelihood": "poisson"},
            {"objective": "elbo", "likelihood": "poisson", "link": "softplus"},
        )
    },
    **{
        f"swsgp, {options['likelihood']}-{options.get('covariance')}": (
            SWSGPRegressor,
            {"n_neighbors": 8, "tol": 1e-12, "max_iter": 100, **options},
        )
        for options in (
            {"likelihood": "gaussian"},
            {"likelihood": "student_t", "n_inducing": 25},
            {"likelihood": "poisson"},
            {"likelihood": "student_t", "covariance": "full", "n_inducing": 8},
        )
    },
    **{
        f"series, {likelihood}-{n_inducing}": (
            StateSpaceGPRegressor,
            {"likelihood": likelihood, "n_inducing": n_inducing},
        )
        for likelihood in ("gaussian", "student_t", "poisson")
        for n_inducing in (None, 30)
    },
    **{
        f"vecchia, {likelihood}": (
            VecchiaGPRegressor,
            {"likelihood": likelihood, "n_neighbors": 8, "optimizer": "auto", "max_iter": 3},
        )
        for likelihood in ("gaussian", "student_t", "poisson")
    },
}


def noisy_sine(n=70, seed=0):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(-3, 3, size=(n, 1)), axis=0)
    return X, np.sin(2 * X[:, 0]) + NOISE * rng.normal(size=n)


X_TEST = np.linspace(-2.8, 2.8, 50)[:, None]


def make(name):
    return clone(FITS[name]).set_params(random_state=0)


def assert_noise_is_found(model):
    """The standard deviation of an observation, and a mean nearer f than observations are."""
    mean, std = model.predict(X_TEST, return_std=True)
    assert np.sqrt(np.mean((mean - np.sin(2 * X_TEST[:, 0])) ** 2)) < 0.6 * NOISE
    assert 0.7 * NOISE < std.mean() < 1.5 * NOISE


@pytest.mark.parametrize("route", REPEATED)
def test_sample_weight_is_repeated_rows(route):
    make, params = REPEATED[route]
    rng = np.random.default_rng(0)
    d = 1 if make is StateSpaceGPRegressor else 2
    X, weights = rng.uniform(-2, 2, (60, d)), rng.integers(0, 4, 60)  # 0 leaves the row out
    f = np.sin(2 * X[:, 0]) + 0.5 * X[:, -1]
    y = 30 + 4 * (f + 0.2 * rng.standard_normal(60))
    kernel = Matern(1.0, nu=1.5) + WhiteKernel(0.05)
    if params.get("likelihood") == "poisson":
        y, kernel = rng.poisson(np.exp(1 + f)), kernel.k1
    options = {"kernel": kernel, "optimizer": None, **params}
    if make is not StateSpaceGPRegressor:
        options["random_state"] = 0
    weighted, repeated = make(**options), make(**options)
    weighted.fit(X, y, weights)
    repeated.fit(X.repeat(weights, axis=0), y.repeat(weights))
    X_new = rng.uniform(-3, 3, (9, d))
    found, expected = (model.predict(X_new, return_std=True) for model in (weighted, repeated))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name in ("log_marginal_likelihood_value_", "elbo_", "loss_"):
        found, expected = (getattr(model, name, None) for model in (weighted, repeated))
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    "name", slow(FITS, but=set(FITS) - {"relevance", "inducing states", "student"})
)
def test_the_scale_of_weights_is_no_evidence_of_small_noise(name):
    X, y = noisy_sine()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, size=len(y))
    models = [make(name).fit(X, y, sample_weight=scale * weights) for scale in (1.0, 256.0)]
    few, many = [model.predict(X_TEST, return_std=True) for model in models]
    np.testing.assert_allclose(many, few, rtol=1e-6)
    assert_noise_is_found(models[1])


@pytest.mark.parametrize("name", slow(FITS, but=["qsgp default", "variational", "series"]))
def test_rows_given_three_times_are_no_evidence_of_small_noise(name):
    X, y = noisy_sine()
    model = make(name).fit(np.tile(X, (3, 1)), np.tile(y, 3))
    assert_noise_is_found(model)


@pytest.mark.parametrize("times", [1, 3])
def test_kernels_of_a_series_are_those_that_its_distinct_observations_tell(times):
    """Heavy tails in few observations, whose copies would tell a kernel of two length scales."""
    rng = np.random.default_rng(8)
    x, weight = np.sort(rng.uniform(0, 10, (40, 1)), axis=0), rng.integers(1, 4, 40)
    y = np.sin(x[:, 0]) + 0.4 * rng.standard_t(3, 40)
    rows = np.repeat(np.tile(np.arange(40), times), np.tile(weight, times))
    weighted = StateSpaceGPRegressor().fit(x, y, weight)
    repeated = StateSpaceGPRegressor().fit(x[rows], y[rows])
    found, expected = (m.predict(x, return_std=True) for m in (repeated, weighted))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [QSGPRegressor, StateSpaceGPRegressor, BayesianGPRegressor])
def test_one_row_of_great_weight_leaves_the_others_their_say(make):
    """Scales that are those of one row alone would leave noise, within bounds, for the others."""
    X, y = noisy_sine()
    weight = np.ones(len(y))
    weight[7] = 1e6
    f = np.sin(2 * X_TEST[:, 0])
    with pytest.warns(UserWarning, match=r"a mean of 1.43e\+04 and a median of 1: predictions"):
        model = make().fit(X, y, sample_weight=weight)
    assert np.sqrt(np.mean((model.predict(X_TEST) - f) ** 2)) < 0.6 * NOISE


@pytest.mark.parametrize("make", [QSGPClassifier, DLMGPClassifier])
def test_one_label_of_great_weight_leaves_the_others_their_say(make):
    """A base rate, or a kernel, that is that of one row alone would leave the others to chance."""
    rng = np.random.default_rng(0)
    X, weight = rng.standard_normal((320, 2)), np.ones(120)
    f = 2 * X[:, 0] - X[:, 1]
    y, weight[7] = f + rng.logistic(size=320) > 0, 1e6
    model = make(random_state=0).fit(X[:120], y[:120], sample_weight=weight)
    assert np.mean(model.predict(X[120:]) == (f[120:] > 0)) > 0.8  # .51 by chance


def test_bootstrapped_rows_keep_the_noise():
    X, y = noisy_sine()
    bags = BaggingRegressor(QSGPRegressor(KERNEL), n_estimators=3, random_state=0).fit(X, y)
    for model in bags.estimators_:
        assert 0.4 * NOISE**2 < model.noise_variance_ < 2.5 * NOISE**2


def test_fixed_noise_takes_weights_as_they_are():
    X, y = noisy_sine()
    fixed = 1.0 * RBF(1.0) + WhiteKernel(0.05, "fixed")
    weighted = QSGPRegressor(fixed, optimizer=None).fit(X, y, sample_weight=np.full(len(y), 2.0))
    finer = 1.0 * RBF(1.0) + WhiteKernel(0.025, "fixed")
    expected = QSGPRegressor(finer, optimizer=None).fit(X, y).predict(X_TEST)
    np.testing.assert_allclose(weighted.predict(X_TEST), expected, rtol=1e-8, atol=1e-10)


@covering(name=["fourier", "inducing states"], weight=[None, 4.0])
def test_rows_join_a_fit_from_blocks(name, weight, monkeypatch):
    monkeypatch.setattr("skgp.estimators.defaults.LEAST_BLOCK_ROWS", 128)
    X, y = noisy_sine(400)
    model = make(name).set_params(memory_budget=1e5)
    model.fit(X[:-5], y[:-5], sample_weight=None if weight is None else np.full(395, weight))
    before = model.predict(X_TEST)
    model.partial_fit(X[-5:], y[-5:], sample_weight=None if weight is None else np.full(5, weight))
    assert 0 < np.abs(model.predict(X_TEST) - before).max() < NOISE
