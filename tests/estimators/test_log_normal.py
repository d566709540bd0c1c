"""Series modelled on the scale of log y: the choice, and the log-normal law of predictions."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from tests.covering import slow_case
from tests.same import assert_same

X = np.arange(72.0)[:, None]
AHEAD = np.array([[72.0], [75.5], [80.0], [20.5]])
KERNEL = 1.5 * Matern(12.0, nu=1.5) + WhiteKernel(0.1)


def growth(seed=0, n=72):
    """Growth, season and noise that are proportional to the level."""
    rng, t = np.random.default_rng(seed), np.arange(n)
    return 50 * np.exp(0.02 * t + 0.3 * np.sin(t * np.pi / 6) + 0.08 * rng.standard_normal(n))


def additive(seed=0, n=72):
    rng, t = np.random.default_rng(seed), np.arange(n)
    return 20 + 0.2 * t + 2 * np.sin(t * np.pi / 6) + rng.standard_normal(n)


@pytest.fixture(scope="module")
def series():
    return growth()


def test_forecasts_far_ahead_are_finite():
    model = StateSpaceGPRegressor().fit(X, growth())
    assert model.likelihood_ == "lognormal"
    far = np.array([[1e3], [1e6], [1e12]])
    assert np.isfinite(model.predict(far, return_std=True)).all()
    assert np.isfinite(model.predict_interval(far)).all()


# ---- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_series_proportional_to_their_level_are_modelled_by_logs(seed):
    y = growth(seed)
    chosen, asked = (
        StateSpaceGPRegressor(likelihood=name).fit(X[:60], y[:60]) for name in ("auto", "lognormal")
    )
    assert chosen.likelihood_ == "lognormal" == asked.likelihood_
    for found, expected in zip(
        chosen.predict(X[60:], return_std=True), asked.predict(X[60:], return_std=True), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    plain = StateSpaceGPRegressor(likelihood="gaussian").fit(X[:60], y[:60])
    gain = chosen.log_marginal_likelihood_value_ - plain.log_marginal_likelihood_value_
    gain -= 60 * np.log(chosen.y_scale_ / plain.y_scale_) + np.log(y[:60]).sum()
    assert gain > 3
    lower, upper = chosen.predict_interval(X[60:])
    assert ((lower < y[60:]) & (y[60:] < upper)).mean() > 0.8


OTHERS = {
    "additive": (additive(), {}),
    "kelvin": (270 + additive(1), {}),
    "tiny variation": (1 + 1e-6 * growth(1), {}),
    "zero": (np.append(growth(2)[:-1], 0.0), {}),
    "negative": (growth(3) - 60, {}),
    "kernel": (growth(4), {"kernel": KERNEL}),
    "gaussian": (growth(5), {"likelihood": "gaussian"}),
    "trend": (growth(6), {"trend": 1}),
    "inducing": (growth(7), {"n_inducing": 20}),
    "kept": (growth(8), {"optimizer": None}),
    "few": (growth(9)[:15], {}),
    "constant": (np.full(72, 7.0), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_series_are_modelled_as_they_are(name):
    y, params = OTHERS[name]
    model = StateSpaceGPRegressor(**params).fit(X[: len(y)], y)
    assert model.likelihood_ == "gaussian"
    assert_same(
        model.predict(AHEAD),
        clone(model).set_params(likelihood="gaussian").fit(X[: len(y)], y).predict(AHEAD),
    )


def test_a_stream_is_modelled_as_it_is():
    assert StateSpaceGPRegressor().partial_fit(X, growth()).likelihood_ == "gaussian"


def test_a_second_fit_chooses_anew():
    model = StateSpaceGPRegressor(warm_start=True).fit(X, growth())
    assert model.likelihood_ == "lognormal"
    assert model.fit(X, additive() - 25).likelihood_ == "gaussian"
    assert model.fit(X, growth(1)).likelihood_ == "lognormal"


def test_weights_take_part_in_the_choice():
    weight = np.linspace(0.5, 2, 72)
    weight[::10] = 0
    chosen, asked = (
        StateSpaceGPRegressor(likelihood=name).fit(X, growth(2), sample_weight=weight)
        for name in ("auto", "lognormal")
    )
    assert chosen.likelihood_ == "lognormal"
    np.testing.assert_allclose(chosen.predict(AHEAD), asked.predict(AHEAD), rtol=1e-6)


def test_units_of_y_have_no_say():
    y = growth(1)
    small, large = (StateSpaceGPRegressor().fit(X, unit * y) for unit in (1e-6, 1e6))
    assert small.likelihood_ == large.likelihood_ == "lognormal"
    np.testing.assert_allclose(1e12 * small.predict(AHEAD), large.predict(AHEAD), rtol=1e-5)


@pytest.mark.slow
def test_covariates_stand_beside_a_series_of_logs():
    rng, t = np.random.default_rng(0), np.arange(120.0)
    flag = (rng.uniform(size=120) < 0.2).astype(float)
    y = growth(0, 120) * np.exp(0.5 * flag)
    frame = pd.DataFrame({"t": t, "flag": flag})
    model = StateSpaceGPRegressor(time="t").fit(frame, y)
    assert model.likelihood_ == "lognormal"
    parts = pd.DataFrame(model.predict_components(frame), columns=model.component_names_)
    effect = parts["flag"][flag == 1].mean() - parts["flag"][flag == 0].mean()
    assert effect == pytest.approx(0.5, abs=0.1)  # a factor of exp(.5)


# ---- what else a fit has -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"n_inducing": 40}, slow_case({"n_inducing": 20, "batch_size": 24})]
)
def test_fits_are_those_of_log_y(series, params):
    options = {"max_iter": 3, "random_state": 0, **params}
    model = StateSpaceGPRegressor(likelihood="lognormal", **options).fit(X, series)
    of_logs = StateSpaceGPRegressor(likelihood="gaussian", **options).fit(X, np.log(series))
    expected = np.exp(of_logs.predict(AHEAD) + of_logs.noise_variance_ / 2)
    np.testing.assert_allclose(model.predict(AHEAD), expected, rtol=1e-7)
    assert model.noise_variance_ == pytest.approx(of_logs.noise_variance_)
    assert_same(model.predict_components(AHEAD), of_logs.predict_components(AHEAD))
    assert_same(model.sample_f(AHEAD, 3), of_logs.sample_f(AHEAD, 3))


def test_additive_models_are_products():
    rng = np.random.default_rng(0)
    columns = rng.uniform(-2, 2, (150, 2))
    y = np.exp(np.sin(columns[:, 0]) + columns[:, 1] + 0.1 * rng.standard_normal(150))
    model = StateSpaceGPRegressor(likelihood="lognormal").fit(columns[:120], y[:120])
    assert np.abs(np.log(model.predict(columns[120:]) / y[120:])).std() < 0.15


def test_later_observations_join(series):
    begun = StateSpaceGPRegressor(KERNEL, likelihood="lognormal", optimizer=None, normalize_y=False)
    whole = clone(begun).fit(X, series)
    begun.fit(X[:60], series[:60]).partial_fit(X[60:], series[60:])
    np.testing.assert_allclose(begun.predict(AHEAD), whole.predict(AHEAD), rtol=1e-7)
    past, std = whole.predict(X[60:61], return_std=True, filtered=True)
    before = clone(whole).fit(X[:60], series[:60]).predict(X[60:61], return_std=True)
    np.testing.assert_allclose((past, std), before, rtol=1e-7)


def test_targets_that_have_no_logarithm_are_refused(series):
    bad = np.append(series[:-2], [0.0, -1.0])
    with pytest.raises(ValueError, match="positive.*got 0.0 in row 70 .2 of 72.*'gaussian'"):
        StateSpaceGPRegressor(likelihood="lognormal").fit(X, bad)
    model = StateSpaceGPRegressor().fit(X[:70], series[:70])
    before = model.predict(AHEAD)
    with pytest.raises(ValueError, match="'auto' chose so.*Call fit with all"):
        model.partial_fit(X[70:], bad[70:])
    assert_same(model.predict(AHEAD), before)
    model.partial_fit(X[70:], series[70:])
