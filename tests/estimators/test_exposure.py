"""Counts with exposures: y ~ Poisson(exposure * rate), at fit and at prediction."""

import numpy as np
import pytest
import sklearn
from scipy import stats
from sklearn.gaussian_process.kernels import Matern
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp import (
    BayesianGPRegressor,
    DLMGPRegressor,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPRegressor,
    VecchiaGPRegressor,
)
from skgp.kernels import ActiveDims
from tests.covering import covering, slow

KERNEL = 0.5 * Matern(0.8, nu=2.5)


def dlm(**params):
    fixed = {"likelihood": "poisson", "kernel": KERNEL, "random_state": 0}
    return DLMGPRegressor(**{**fixed, **params})


def series(**params):
    fixed = {"likelihood": "poisson", "kernel": KERNEL, "optimizer": None}
    return StateSpaceGPRegressor(**{**fixed, **params})


def swsgp(**params):
    fixed = {"likelihood": "poisson", "kernel": KERNEL, "random_state": 0}
    return SWSGPRegressor(**{**fixed, **params})


def vecchia(**params):
    fixed = {"likelihood": "poisson", "kernel": KERNEL, "random_state": 0}
    return VecchiaGPRegressor(**{**fixed, **params})


ESTIMATORS = {"dlm": dlm, "series": series, "swsgp": swsgp, "vecchia": vecchia}


def rates(x):
    return np.exp(0.5 + np.sin(2 * x))


def problem(n=80, *, seed=0):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(-3, 3, n))[:, None]
    exposure = rng.choice([0.2, 1.0, 20.0], n)
    return X, rng.poisson(exposure * rates(X[:, 0])).astype(float), exposure


@pytest.fixture(params=ESTIMATORS)
def make(request):
    return ESTIMATORS[request.param]


def optimal_posterior(K, y, exposure, prior_mean):
    """Mean and covariance of q(f) of greatest ELBO, the rate exp(f): dense, by scipy."""
    m, S, inverse = np.zeros(len(y)), K, np.linalg.inv(K)
    for _ in range(200):  # fixed point of the sites, with the curvature of the expected log-lik
        rate = exposure * np.exp(prior_mean + m + 0.5 * np.diag(S))
        S_new = np.linalg.inv(inverse + np.diag(rate))
        step = S_new @ ((y - rate) - inverse @ m)
        m, S = m + 0.5 * step, S + 0.5 * (S_new - S)
    return prior_mean + m, S


EXACT = {
    "dlm": lambda **params: dlm(
        objective="elbo", n_inducing=40, inducing="fixed", tol=1e-12, max_iter=500, **params
    ),
    "series": series,
    "inducing series": lambda **params: series(n_inducing=80, **params),
    "additive": series,
}


@pytest.mark.parametrize("name", EXACT)
def test_posterior_is_that_of_a_dense_poisson_process_with_offset(name):
    X, y, exposure = problem(40)
    kernel = KERNEL
    if name == "additive":  # of a second column that has no part
        X = np.column_stack([X, np.arange(40) % 2])
        kernel = ActiveDims(KERNEL, [0])
    K = KERNEL(X[:, :1]) + 1e-8 * np.eye(40)
    prior_mean = np.log(y.sum() / exposure.sum())
    if name.endswith("series"):  # whose expected rate a priori is that of all events
        prior_mean -= K[0, 0] / 2
    mean, covariance = optimal_posterior(K, y, exposure, prior_mean)
    model = EXACT[name](kernel=kernel, optimizer=None).fit(X, y, exposure=exposure)
    found, var = model.latent_mean_and_variance(X)
    np.testing.assert_allclose(found, mean, atol=5e-3)
    np.testing.assert_allclose(var, np.diag(covariance), rtol=3e-2)


def test_missing_counts_of_a_series_take_their_exposures_with_them():
    X, y, exposure = problem(60)
    missing = y.copy()
    missing[::4] = np.nan
    options = {"kernel": KERNEL, "optimizer": None}
    kept = np.isfinite(missing)
    found = series(**options).fit(X, missing, exposure=exposure)
    expected = series(**options).fit(X[kept], y[kept], exposure=exposure[kept])
    np.testing.assert_allclose(found.predict(X), expected.predict(X), rtol=1e-8)


@covering(make=ESTIMATORS.values(), link=["exp", "softplus"])
def test_rates_are_recovered_whatever_the_exposures(make, link):
    X, y, exposure = problem(100)
    model = make(link=link, max_iter=10).fit(X, y, exposure=exposure)
    grid = np.linspace(-2.5, 2.5, 30)
    error = np.log(model.predict(grid[:, None]) / rates(grid))
    assert np.sqrt(np.mean(error**2)) < 0.2  # of counts that pass for those of exposure 1 over 1


def test_a_common_exposure_shifts_the_log_rate(make):
    X, y, _ = problem()
    plain, shifted = (make(kernel=KERNEL, optimizer=None) for _ in range(2))
    plain.fit(X, y)
    shifted.fit(X, y, exposure=10.0)
    mean, var = plain.latent_mean_and_variance(X)
    found, found_var = shifted.latent_mean_and_variance(X)
    np.testing.assert_allclose(found, mean - np.log(10.0), atol=1e-4)
    np.testing.assert_allclose(found_var, var, rtol=1e-3)
    np.testing.assert_allclose(shifted.predict(X, exposure=10.0), plain.predict(X), rtol=1e-4)


@covering(make=ESTIMATORS.values(), link=["exp", "softplus"])
def test_predictions_at_exposures_agree_with_simulation(make, link):
    X, y, exposure = problem()
    model = make(link=link, optimizer=None).fit(X, y, exposure=exposure)
    X_new, new = X[::20], np.array([0.1, 3.0, 50.0, 1000.0])
    mean, var = model.latent_mean_and_variance(X_new)
    rng = np.random.default_rng(0)
    f = mean + np.sqrt(var) * rng.standard_normal((50_000, 4))
    rate = new * (np.exp(f) if link == "exp" else np.logaddexp(0, f))
    draws = rng.poisson(rate)
    found, std = model.predict(X_new, return_std=True, exposure=new)
    error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(found - draws.mean(0)) < 4 * error).all()
    np.testing.assert_allclose(std, draws.std(0), rtol=0.03)
    np.testing.assert_allclose(model.predict(X_new, return_cov=True, exposure=new)[0], found)
    covariance = model.predict(X_new, return_cov=True, exposure=new)[1]
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std, rtol=1e-8)
    unit = model.predict(X_new, return_cov=True)[1]
    off = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(covariance[off], (unit * np.outer(new, new))[off], rtol=1e-6)
    levels = [0.05, 0.5, 0.9]
    quantiles = model.predict_quantiles(X_new, levels, exposure=new)
    for j, level in enumerate(levels):
        below = (draws < quantiles[:, j]).mean(0), (draws <= quantiles[:, j]).mean(0)
        assert (below[0] < level + 0.01).all() and (below[1] > level - 0.01).all()
    lower, upper = model.predict_interval(X_new, 0.9, exposure=new)
    assert (lower <= quantiles[:, 1]).all() and (quantiles[:, 1] <= upper).all()
    counts = quantiles[:, 1]
    density = np.log(stats.poisson.pmf(counts, rate).mean(0))
    found = model.log_predictive_density(X_new, counts, exposure=new)
    np.testing.assert_allclose(found, density, atol=0.05)
    samples = model.sample_y(X_new, 4000, random_state=0, exposure=new)
    error = draws.std(0) / np.sqrt(4000)
    assert (np.abs(samples.mean(1) - draws.mean(0)) < 4 * error).all()


def test_weights_and_exposures_of_dropped_rows_go_together(make):
    X, y, exposure = problem()
    weight = np.ones(len(y))
    weight[::3] = 0.0
    wrong = np.where(weight == 0, np.nan, exposure)
    options = {"kernel": KERNEL, "optimizer": None}
    kept = make(**options).fit(X[weight > 0], y[weight > 0], exposure=exposure[weight > 0])
    found = make(**options).fit(X, y, sample_weight=weight, exposure=wrong)
    np.testing.assert_allclose(found.predict(X), kept.predict(X), rtol=1e-5)


def test_exposures_may_be_a_column_beside_weights(make):
    X, y, exposure = problem(30)
    weight = np.arange(30) % 3.0
    model = make().fit(X, y, sample_weight=weight, exposure=exposure[:, None])
    expected = make().fit(X, y, sample_weight=weight, exposure=exposure)
    np.testing.assert_allclose(model.predict(X), expected.predict(X), rtol=1e-9)
    with pytest.raises(ValueError, match="one for each of the 30 rows"):
        make().fit(X, y, sample_weight=weight, exposure=exposure[:29])


@pytest.mark.parametrize("make", [dlm, series, swsgp])
def test_streams_take_exposures(make):
    X, y, exposure = problem(200)
    order = np.random.default_rng(0).permutation(200)
    parts = order[:150], order[150:]
    model = make(max_iter=20)
    for rows in parts:
        rows = np.sort(rows)
        model.partial_fit(X[rows], y[rows], exposure=exposure[rows])
    grid = np.linspace(-2.5, 2.5, 30)
    assert np.abs(np.log(model.predict(grid[:, None]) / rates(grid))).mean() < 0.2


@pytest.mark.parametrize("make", [series, *slow([dlm, swsgp, vecchia])])
def test_metadata_routing_reaches_pipelines_and_searches(make):
    X, y, exposure = problem()
    with sklearn.config_context(enable_metadata_routing=True):
        model = make(kernel=KERNEL, optimizer=None, max_iter=5)
        for method in ("fit", "predict", "score"):
            getattr(model, f"set_{method}_request")(exposure=True)
        pipeline = make_pipeline(StandardScaler(), model)
        pipeline.fit(X, y, exposure=exposure)
        scaled = pipeline[:-1].transform(X)
        np.testing.assert_allclose(
            pipeline.predict(X, exposure=exposure), pipeline[-1].predict(scaled, exposure=exposure)
        )
        assert pipeline.score(X, y, exposure=exposure) > pipeline[-1].score(scaled, y)
        params = {"exposure": exposure}
        order = np.random.default_rng(0).permutation(len(y))
        scores = cross_val_score(
            pipeline, X[order], y[order], cv=2, params={"exposure": exposure[order]}
        )
        assert np.isfinite(scores).all()
        grid = {model.__class__.__name__.lower() + "__kernel": [KERNEL]}
        assert GridSearchCV(pipeline, grid, cv=2).fit(X, y, **params).best_score_ is not None


def test_bad_exposures_are_named(make):
    X, y, _ = problem()
    fitted = make(optimizer=None).fit(X, y)
    for exposure, message in (
        (0.0, "positive and finite.*0.0 in row 0"),
        (-1.0, "positive and finite"),
        (np.inf, "positive and finite"),
        (np.nan, "positive and finite"),
        ([1.0, 2.0], "one for each of the 80 rows"),
        ("hours", "exposure holds text, such as 'hours'; give numbers"),
    ):
        for method in (lambda **e: make().fit(X, y, **e), lambda **e: fitted.predict(X, **e)):
            with pytest.raises(ValueError, match=message):
                method(exposure=exposure)


def test_exposures_need_counts(make):
    X, y, exposure = problem(30)
    with pytest.raises(ValueError, match="needs likelihood='poisson'"):
        make(likelihood="gaussian").fit(X, y, exposure=exposure)


def test_regressors_without_counts_name_those_that_have_them():
    X, y, exposure = problem(30)
    for other in (QSGPRegressor(optimizer=None), BayesianGPRegressor(optimizer=None)):
        with pytest.raises(ValueError, match="DLMGPRegressor"):
            other.fit(X, y, exposure=exposure)
        with pytest.raises(ValueError, match="DLMGPRegressor"):
            other.fit(X, y).predict(X, exposure=exposure)


def test_sampled_gradients_refuse_exposures():
    X, y, exposure = problem(30)
    with pytest.raises(ValueError, match="gradient='bmc' does not take exposure"):
        dlm(gradient="bmc").fit(X, y, exposure=exposure)


def test_an_elbo_without_digits_is_not_the_best_of_a_search():
    """A search of an additive model came by variances of 1e4, at which rounding made it 1e127."""
    rng = np.random.default_rng(7)
    X, exposure = rng.standard_normal((750, 3)), np.exp(2 * rng.standard_normal(750))
    log_rate = np.sin(1.5 * X[:, 0]) + 0.5 * X[:, 1] + 0.5
    y = rng.poisson((exposure * np.exp(log_rate))[:150])
    model = StateSpaceGPRegressor(likelihood="poisson").fit(X[:150], y, exposure=exposure[:150])
    assert np.sqrt(np.mean((np.log(model.predict(X[150:])) - log_rate[150:]) ** 2)) < 0.4


def test_one_count_of_another_size_leaves_the_rates_of_others():
    """Of one count of 1e5 beside some of 3 the rates predicted were 0."""
    rng = np.random.default_rng(1)
    X, y = rng.uniform(size=(80, 2)), rng.poisson(3.0, 80)
    y[3] = 10**5
    rates = StateSpaceGPRegressor(likelihood="poisson").fit(X, y).predict(X)
    assert rates[3] == pytest.approx(1e5, rel=0.01)
    assert 2 < np.median(rates) < 4 and np.delete(rates, 3).max() < 15
