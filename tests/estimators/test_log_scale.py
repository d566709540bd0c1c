"""Regressors of log y: the choice, and predictions that are log-normal."""

from functools import cache

import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

import skgp
from skgp import (
    DLMGPRegressor,
    GaussianProcessRegressor,
    QSGPRegressor,
    SWSGPRegressor,
    VecchiaGPRegressor,
)
from tests.reference.gaussian import process
from tests.same import assert_same

NAMES = ["QSGPRegressor", "SWSGPRegressor", "VecchiaGPRegressor", "DLMGPRegressor"]
SERIES = "StateSpaceGPRegressor"
ALL = [*NAMES, SERIES]
KERNEL = 1.5 * RBF([1.0, 2.0]) + WhiteKernel(0.2)
OF_TIME = 1.5 * Matern(1.0, nu=1.5) + WhiteKernel(0.2)
#: On, between and far off the observations.
NEW = np.array([[0.1, 0.2], [-0.5, 0.7], [9.0, -9.0]])


def inputs(seed=0, n=150):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return rng, X, np.sin(2 * X[:, 0]) + 0.3 * X[:, 1]


def multiplicative(seed=0, n=150, noise=0.3):
    rng, X, f = inputs(seed, n)
    return X, 40 * np.exp(0.9 * f + noise * rng.standard_normal(n))


def additive(seed=0, n=150, noise=0.3):
    rng, X, f = inputs(seed, n)
    return X, 2.5 + f + noise * rng.standard_normal(n)


def make(name, kernel=KERNEL, **params):
    exact = {}
    if name == "DLMGPRegressor":
        exact = {"n_inducing": 150, "objective": "elbo"}
        params |= {"n_inducing": 15, "max_iter": 10} if kernel is None else {}
    if kernel is not None:
        params = {"optimizer": None, **params}
    return getattr(skgp, name)(kernel, random_state=0, **{**exact, **params})


@cache
def fitted(name):
    """A model of log y with hyper-parameters that are kept, and inputs on and off the data."""
    (X, y), new = multiplicative(), NEW
    if name == SERIES:
        X, new = X[:, :1], NEW[:, :1]
        model = skgp.StateSpaceGPRegressor(OF_TIME, likelihood="lognormal", optimizer=None)
    else:
        model = make(name, likelihood="lognormal")
    return model.fit(X, y), X, y, new


def law(model, X, y, new):
    """Mean and covariance of log y, from the dense formulas, noise included."""
    u = np.log(y)
    mean, covariance = process(model.kernel.k1, X, (u - u.mean()) / u.std(), 0.2, new)
    return u.mean() + u.std() * mean, u.var() * (covariance + 0.2 * np.eye(len(new)))


@pytest.mark.parametrize("name", ALL)
def test_predictions_are_log_normal(name):
    model, *_, new = problem = fitted(name)
    mean, covariance = law(*problem)
    std = np.sqrt(covariance.diagonal())
    dists = [stats.lognorm(s, scale=np.exp(m)) for m, s in zip(mean, std, strict=True)]
    tol = {"rtol": 1e-5 if name == "DLMGPRegressor" else 1e-6}
    found, spread = model.predict(new, return_std=True)
    noise = 0.2 * np.log(multiplicative()[1]).var()
    np.testing.assert_allclose(found, np.exp(mean + noise / 2), **tol)
    np.testing.assert_allclose(spread, [dist.std() for dist in dists], **tol)
    np.testing.assert_allclose(model.predict(new), found, rtol=1e-12)
    joint_mean, joint = model.predict(new, return_cov=True)
    np.testing.assert_allclose(joint_mean, found, rtol=1e-10)
    expected = np.outer(*2 * [[dist.mean() for dist in dists]]) * np.expm1(covariance)
    np.testing.assert_allclose(joint, expected, **tol, atol=1e-9 * expected.max())
    levels = [0.025, 0.3, 0.975]
    quantiles = model.predict_quantiles(new, levels)
    np.testing.assert_allclose(quantiles, [dist.ppf(levels) for dist in dists], **tol)
    y = np.array([30.0, 60.0, 10.0])
    expected = [dist.logpdf(each) for dist, each in zip(dists, y, strict=True)]
    np.testing.assert_allclose(model.log_predictive_density(new, y), expected, rtol=1e-4)
    assert model.log_predictive_density(new[:2], [0.0, -3.0]).tolist() == [-np.inf, -np.inf]
    assert model.noise_variance_ == pytest.approx(noise)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_predictions(name):
    model, *_, new = fitted(name)
    asked = {"return_std": True, "return_mean_grad": True, "return_std_grad": True}
    mean, std, *slopes = model.predict(new[:2], **asked)
    assert_same((mean, std), model.predict(new[:2], return_std=True))
    for j, step in enumerate(1e-4 * np.eye(new.shape[1])):
        ends = [model.predict(new[:2] + s * step, return_std=True) for s in (1, -1)]
        for slope, high, low in zip(slopes, *ends, strict=True):
            np.testing.assert_allclose(slope[:, j], (high - low) / 2e-4, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["QSGPRegressor", SERIES])
def test_draws_have_the_law_of_predictions(name):
    model, *_, new = fitted(name)
    draws = model.sample_y(new[:2], 5000, random_state=1)
    covariance = model.predict(new[:2], return_cov=True)[1]
    f, var = model.latent_mean_and_variance(new[:2])
    mean = np.exp(f + 0.5 * (var + model.noise_variance_))
    error = draws.std(1) / len(draws[0]) ** 0.5
    assert (np.abs(draws.mean(1) - mean) < 4 * error).all()
    rows = draws - mean[:, None]
    products = rows[:, None] * rows
    error = products.std(2) / len(draws[0]) ** 0.5
    assert (np.abs(products.mean(2) - covariance) < 4 * error).all()


@pytest.mark.parametrize(("seed", "name"), list(enumerate(NAMES)))
def test_the_data_choose(seed, name):
    n = 80
    X, y = multiplicative(seed, n)
    model = make(name, kernel=None).fit(X, y)
    assert model.likelihood_ == "lognormal"
    assert_same(model.predict(NEW), make(name, None, likelihood="lognormal").fit(X, y).predict(NEW))
    assert model.fit(X, y - y.mean()).likelihood_ == "gaussian"  # chooses anew
    assert model.fit(*additive(seed, n)).likelihood_ == "gaussian"
    gaussian = clone(model).set_params(likelihood="gaussian").fit(*additive(seed, n))
    assert_same(model.predict(NEW), gaussian.predict(NEW))


def test_units_of_y_have_no_say():
    X, y = multiplicative(n=80)
    model = QSGPRegressor().fit(X, y)
    other = QSGPRegressor().fit(X, 1e9 * y)
    assert other.likelihood_ == "lognormal"
    np.testing.assert_allclose(other.predict(NEW), 1e9 * model.predict(NEW), rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [{"kernel": KERNEL}, {"optimizer": None}, {"likelihood": "gaussian"}],
    ids=["kernel", "optimizer", "likelihood"],
)
def test_what_is_given_is_kept(change):
    X, y = multiplicative()
    assert QSGPRegressor(**change).fit(X, y).likelihood_ == "gaussian"


def test_some_targets_are_never_logs():
    X, y = multiplicative(n=80)
    assert VecchiaGPRegressor().fit(X, np.c_[y, y[::-1]]).likelihood_ == "gaussian"
    assert QSGPRegressor().fit(X[:40], y[:40]).likelihood_ == "gaussian"  # too few
    assert DLMGPRegressor(objective="square_loss").fit(X, y).likelihood_ == "gaussian"
    front = GaussianProcessRegressor(method="qsgp").fit(X, y)
    assert front.estimator_.likelihood_ == "gaussian"


@pytest.mark.parametrize("name", NAMES)
def test_targets_without_a_logarithm_are_refused(name):
    X, y = multiplicative()
    y[7] = 0.0
    with pytest.raises(ValueError, match="y must be positive.*got 0.0 in row 7"):
        make(name, likelihood="lognormal").fit(X, y)
    with pytest.raises(ValueError, match="takes one target|lognormal"):
        make(name, likelihood="lognormal").fit(X, np.c_[y, y] + 1)


def test_square_loss_is_that_of_y():
    with pytest.raises(ValueError, match="objective='square_loss' needs likelihood='gaussian'"):
        DLMGPRegressor(objective="square_loss", likelihood="lognormal").fit(*multiplicative())


@pytest.mark.parametrize(
    "model",
    [
        QSGPRegressor(KERNEL, basis="fourier", n_basis=60, likelihood="lognormal"),
        SWSGPRegressor(KERNEL, n_inducing=60, n_neighbors=10, likelihood="lognormal"),
        DLMGPRegressor(KERNEL, n_inducing=20, optimizer=None, likelihood="lognormal"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_later_observations_are_those_of_log_y(model):
    X, y = multiplicative()
    of_y, of_logs = (clone(model).set_params(random_state=0) for _ in range(2))
    of_logs.set_params(likelihood="gaussian")
    for rows in (slice(0, 100), slice(100, 150)):
        of_y.partial_fit(X[rows], y[rows])
        of_logs.partial_fit(X[rows], np.log(y[rows]))
    assert_same(of_y.latent_mean_and_variance(NEW), of_logs.latent_mean_and_variance(NEW))
    with pytest.raises(ValueError, match="must be positive"):
        of_y.partial_fit(X[:1], [-1.0])


def test_memory_maps_beyond_the_budget_are_loaded():
    X, y = multiplicative(n=400)
    params = {"basis": "fourier", "n_basis": 30, "random_state": 0, "likelihood": "lognormal"}
    params["optimizer"] = None
    small = QSGPRegressor(KERNEL, **params, memory_budget=9e4).fit(X, y)
    np.testing.assert_allclose(
        small.predict(NEW), QSGPRegressor(KERNEL, **params).fit(X, y).predict(NEW), rtol=1e-6
    )


def test_components_of_many_columns_predict_log_y(rng):
    X = rng.standard_normal((90, 55))
    y = np.exp(X[:, 0] + 0.3 * rng.standard_normal(90))
    of_y, of_logs = (SWSGPRegressor(n_neighbors=12, optimizer=None) for _ in range(2))
    of_y.set_params(likelihood="lognormal").fit(X, y)
    of_logs.set_params(likelihood="gaussian").fit(X, np.log(y))
    assert_same(of_y.latent_mean_and_variance(X), of_logs.latent_mean_and_variance(X))


def test_weights_take_part_in_the_choice():
    """Of observations of which those of either kind have the weight."""
    X, y = multiplicative(n=48)
    _, other = additive(n=48)
    both, targets = np.vstack([X, X + 20]), np.r_[y, 20 * (other - other.min() + 0.1)]
    heavy = np.r_[np.ones(48), np.full(48, 1e-3)]
    assert QSGPRegressor().fit(both, targets, heavy).likelihood_ == "lognormal"
    assert QSGPRegressor().fit(both, targets, heavy[::-1]).likelihood_ == "gaussian"


@pytest.mark.parametrize("weight", [1e-3, 1 / 3, 10.0])
def test_only_ratios_of_weights_take_part_in_the_choice(weight):
    X, y = multiplicative(n=80)
    assert QSGPRegressor().fit(X, y, np.full(80, weight)).likelihood_ == "lognormal"


@pytest.mark.parametrize(("n", "chosen"), [(80, "lognormal"), (30, "gaussian")])
def test_copies_are_one_observation_of_the_choice(n, chosen):
    """Of some dozen observations none is made, however often these are given."""
    X, y = multiplicative(n=n, noise=0.8)
    several = np.tile(X, (4, 1)), np.tile(y, 4)
    assert QSGPRegressor().fit(*several).likelihood_ == chosen
    assert QSGPRegressor().fit(X, y, np.full(n, 4.0)).likelihood_ == chosen


def test_order_has_no_say_of_which_observations_choose(monkeypatch):
    """Of more than the few hundred by which the choice is made."""
    rng, X, f = inputs(3, 900)
    y, seen, order = 5 + f + 0.3 * rng.standard_normal(900), [], rng.permutation(900)

    def stop(_, data):
        seen.append(data.y)
        raise InterruptedError

    monkeypatch.setattr("skgp.estimators._target_scale.logs_predict_better", stop)
    for rows in (np.arange(900), order):
        with pytest.raises(InterruptedError):
            QSGPRegressor().fit(X[rows], y[rows])
    assert len(seen[0]) == 500 and (seen[0] == seen[1]).all()
