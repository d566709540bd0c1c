"""A series with covariates and a trend: exact in time, against dense Gaussians and known truths."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, DotProduct, ExpSineSquared, Matern, WhiteKernel

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from skgp.kernels import ActiveDims, LocalLinearTrend, split_noise
from tests.covering import slow_case
from tests.reference.series_regression import dense_regression
from tests.reference.state_space import assert_draws

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

KERNEL = 0.7 * Matern(2.0, nu=1.5) + 0.3 * Matern(0.2, nu=0.5) + WhiteKernel(0.1)


def frame(n=120, seed=0):
    rng = np.random.default_rng(seed)
    when = np.datetime64("2024-01-01") + rng.permutation(6 * np.arange(n)).astype("m8[h]")
    return pd.DataFrame(
        {
            "heat": rng.normal(15, 6, n),
            "when": when.astype("M8[us]"),
            "holiday": rng.random(n) < 0.2,
            "site": rng.choice(["a", "b", "c"], n),
        }
    )


def target(X, seed=1):
    rng = np.random.default_rng(seed)
    days = (X["when"] - X["when"].min()) / pd.Timedelta("1D")
    site = X["site"].map({"a": 0.0, "b": 0.6, "c": -0.5})
    y = 5 + np.sin(days) + 0.02 * (X["heat"] - 18) ** 2 - 1.5 * X["holiday"] + site
    return (y + 0.2 * rng.standard_normal(len(X))).to_numpy()


def dense(model, X, y, X_new):
    """The joint Gaussian that the fitted model says it is, by its terms and its kernel."""
    rows, new = (model._validated(each, reset=False) for each in (X, X_new))
    tensors = [model._inputs(each) for each in (rows, new)]
    Phi, Phi_new = (model._terms.features(each).numpy() for each in tensors)
    scales = np.exp(np.concatenate([each.numpy() for each in model._terms.log_scales()]))
    kernel = split_noise(model.kernel_)[0]
    t, t_new = rows[:, [model._place]], new[:, [model._place]]
    noise = np.full(len(y), model._noise_variance)
    z = (y - model.y_mean_) / model.y_scale_
    grams = kernel(t_new), kernel(t_new, t)
    return dense_regression(kernel(t), Phi, z, noise, scales, *grams, Phi_new)


@pytest.mark.parametrize("optimizer", [None, "auto"])
@pytest.mark.parametrize("trend", [None, 1])
def test_posterior_is_that_of_the_joint_gaussian(optimizer, trend):
    X, X_new = frame(), frame(30, seed=5)
    y = target(X)
    covariates = {"heat": "smooth", "site": "categorical"}
    model = StateSpaceGPRegressor(
        KERNEL, covariates=covariates, trend=trend, optimizer=optimizer, max_iter=3
    ).fit(X, y)
    expected = dense(model, X, y, X_new)
    scale, shift = model.y_scale_, model.y_mean_
    value = model.log_marginal_likelihood_value_
    np.testing.assert_allclose(value, expected.log_evidence, rtol=1e-9, atol=1e-7)
    mean, var = model.latent_mean_and_variance(X_new)
    np.testing.assert_allclose(mean, shift + scale * expected.mean, atol=1e-8)
    np.testing.assert_allclose(var, scale**2 * np.diag(expected.cov), rtol=1e-7)
    _, joint = model.latent_mean_and_covariance(X_new)
    np.testing.assert_allclose(joint, scale**2 * expected.cov, atol=1e-8)
    parts, std = model.predict_components(X_new, return_std=True)
    names = ["trend"] * (trend is not None) + ["heat", "holiday", "site"]
    assert model.component_names_[2:] == names
    np.testing.assert_allclose(parts.sum(1) + model.intercept_, mean, atol=1e-9)
    start = 0
    for j, part in enumerate(model._terms.parts):
        new = model._inputs(model._validated(X_new, reset=False))
        Phi = part.features(new[:, part.place]).numpy()
        place = slice(start, start + Phi.shape[1])
        start = place.stop
        of_term = Phi @ expected.mean_beta[place]
        np.testing.assert_allclose(parts[:, 2 + j], scale * of_term, atol=1e-8)
        spread = np.sqrt(np.diag(Phi @ expected.cov_beta[place, place] @ Phi.T))
        np.testing.assert_allclose(std[:, 2 + j], scale * spread, rtol=1e-6, atol=1e-9)


def test_summands_of_the_kernel_have_the_uncertainty_of_the_coefficients():
    X = frame()
    y = target(X)
    model = StateSpaceGPRegressor(2.0 * Matern(3.0) + WhiteKernel(0.1), optimizer=None).fit(X, y)
    expected = dense(model, X, y, X)
    mean, std = model.predict_components(X, return_std=True)
    np.testing.assert_allclose(mean[:, 0], model.y_scale_ * expected.mean_f, atol=1e-8)
    spread = model.y_scale_ * np.sqrt(np.diag(expected.cov_f))
    np.testing.assert_allclose(std[:, 0], spread, rtol=1e-6)


def test_draws_have_the_joint_law():
    X, X_new = frame(60), frame(6, seed=5)
    y = target(X)
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, y)
    mean, covariance = model.latent_mean_and_covariance(X_new)
    draws = model.sample_f(X_new, 4000, random_state=0)
    assert_draws(draws, mean, covariance)


@pytest.mark.slow
def test_a_covariate_helps_and_components_are_the_truth():
    # The example of a review: one more column took R^2 from .83 to .12.
    rng = np.random.default_rng(0)
    n = 24 * 28
    when = np.datetime64("2024-03-01") + np.arange(n).astype("m8[h]")
    hour, heat = np.arange(n), np.cumsum(rng.standard_normal(n))
    day = np.sin(2 * np.pi * hour / 24)
    slow, effect = np.sin(2 * np.pi * hour / (24 * 23)), np.tanh(heat / heat.std())
    y = day + 0.7 * slow + 0.8 * effect + 0.3 * rng.standard_normal(n)
    X = pd.DataFrame({"when": when, "heat": heat})
    kernel = (
        Matern(8.0, nu=1.5)
        + ExpSineSquared(1.5, 1.0, periodicity_bounds="fixed")
        + WhiteKernel(0.1)
    )
    test = rng.random(n) < 0.25
    alone = StateSpaceGPRegressor(kernel).fit(X.loc[~test, ["when"]], y[~test])
    model = StateSpaceGPRegressor(kernel).fit(X[~test], y[~test])
    score = model.score(X[test], y[test])
    assert score > alone.score(X.loc[test, ["when"]], y[test])
    assert score > 0.85
    parts = model.predict_components(X)
    for part, truth in zip(parts.T, (slow, day, effect), strict=True):
        assert np.corrcoef(part, truth)[0, 1] > 0.95


@pytest.mark.parametrize("convert", [pl.from_pandas, lambda X: X.to_numpy(dtype=object)])
def test_tables_of_any_kind_are_one_model(convert):
    X = frame()
    X["site"] = X["site"].astype(object)
    y = target(X)
    table = convert(X[["heat", "when", "holiday"]])
    expected = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X[["heat", "when", "holiday"]], y)
    found = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(table, y)
    assert found.time_origin_ == expected.time_origin_
    np.testing.assert_allclose(
        found.predict(table), expected.predict(X[["heat", "when", "holiday"]]), rtol=1e-12
    )


def test_numbers_need_a_name_for_time():
    X = frame()
    days = (X["when"] - X["when"].min()) / pd.Timedelta("1D")
    numbers = np.column_stack([X["heat"], days, X["holiday"]])
    y = target(X)
    expected = StateSpaceGPRegressor(KERNEL, optimizer=None)
    expected = expected.fit(X[["heat", "when", "holiday"]], y).predict(
        X[["heat", "when", "holiday"]]
    )
    for time in (1, -2):
        model = StateSpaceGPRegressor(KERNEL, time=time, optimizer=None).fit(numbers, y)
        np.testing.assert_allclose(model.predict(numbers), expected, rtol=1e-9)
    additive = StateSpaceGPRegressor(Matern(2.0), optimizer=None).fit(numbers, y)
    assert len(additive.component_kernels_) == 3


def test_kernels_name_covariates_and_lines():
    X = frame()[["when", "heat"]]
    y = target(frame())
    line = KERNEL + DotProduct() + ActiveDims(DotProduct(), [1])
    found = StateSpaceGPRegressor(line, optimizer=None).fit(X, y)
    same = StateSpaceGPRegressor(
        KERNEL, trend=1, covariates={"heat": "linear"}, optimizer=None
    ).fit(X, y)
    np.testing.assert_allclose(found.predict(X), same.predict(X), rtol=1e-12)
    assert found.component_names_ == same.component_names_
    smooth = ActiveDims(KERNEL, [0]) + ActiveDims(RBF(), [1])
    found = StateSpaceGPRegressor(smooth, optimizer=None).fit(X, y)
    assert found.component_names_[-1] == "heat"
    with pytest.raises(ValueError, match="sees the columns"):
        StateSpaceGPRegressor(KERNEL + ActiveDims(RBF(), [0, 1])).fit(X, y)
    with pytest.raises(ValueError, match="no part of time"):
        StateSpaceGPRegressor(ActiveDims(RBF(), [1])).fit(X, y)


@pytest.mark.parametrize(
    ("parameters", "columns", "message"),
    [
        ({"time": "hour"}, ["when", "heat"], "time='hour' is no column.*'heat'"),
        ({"covariates": {"cold": "linear"}}, ["when", "heat"], "'cold', no column"),
        ({"covariates": {"heat": "cubic"}}, ["when", "heat"], "must be of the kinds 'linear'"),
        ({"covariates": {"heat": "linear"}}, ["heat", "holiday"], "beside one of times"),
        ({"trend": 1}, ["heat", "holiday"], "trend=1 is of times"),
        ({"trend": 1, "n_inducing": 20}, ["when"], "n_inducing=20 has no covariates"),
        ({"n_inducing": 20}, ["when", "heat"], "n_inducing=20 has no covariates"),
    ],
)
def test_what_has_no_meaning_is_refused(parameters, columns, message):
    X = frame()
    with pytest.raises(ValueError, match=message):
        StateSpaceGPRegressor(KERNEL, **parameters).fit(X[columns], target(X))


def test_new_levels_have_the_prior_of_levels():
    X = frame()
    y = target(X)
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, y)
    new = X.iloc[:3].assign(site="elsewhere")
    mean, std = model.predict_components(new, return_std=True)
    # Against the mean of the levels, of which the process takes up any shift.
    shares = X["site"].value_counts(normalize=True)
    prior = model.y_scale_ * np.sqrt(0.1 * (1 + (shares**2).sum()))
    np.testing.assert_allclose(std[:, -1], prior, rtol=0.02)
    assert (std[:, -1] > model.predict_components(X.iloc[:3], return_std=True)[1][:, -1]).all()


def test_rows_that_come_later_join():
    X = frame()
    y = target(X)
    first = X.index < 80
    model = StateSpaceGPRegressor(KERNEL, optimizer=None, normalize_y=False).fit(X[first], y[first])
    later = clone(model).fit(X[first], y[first]).partial_fit(X[~first], y[~first])
    columns = model._terms
    together = dense(later, X, y, X)
    np.testing.assert_allclose(later.predict(X), together.mean, rtol=1e-8)
    assert [part.name for part in columns.parts] == ["heat", "holiday", "site"]


def test_missing_targets_are_left_out():
    X = frame()
    y = target(X)
    shared = {"covariates": {"heat": "linear", "site": "linear"}, "optimizer": None}
    numbers = X.assign(site=X["site"].map({"a": 0.0, "b": 1.0, "c": 2.0}))
    model = StateSpaceGPRegressor(KERNEL, normalize_y=False, **shared)
    gaps = np.where(np.arange(len(y)) % 5, y, np.nan)
    found = clone(model).fit(numbers, gaps).predict(numbers)
    kept = ~np.isnan(gaps)
    np.testing.assert_array_equal(found, clone(model).fit(numbers[kept], y[kept]).predict(numbers))


@pytest.mark.parametrize("likelihood", ["gaussian", slow_case("poisson"), "labels"])
def test_weights_are_repeated_rows(likelihood):
    X, rng = frame(60), np.random.default_rng(2)
    rate = np.exp(0.3 * target(X) - 1.5)
    y = target(X) if likelihood == "gaussian" else rng.poisson(rate) > 1
    y = rng.poisson(rate) if likelihood == "poisson" else y
    weight = rng.integers(1, 4, len(X))
    rows = rng.permutation(np.repeat(np.arange(len(X)), weight))
    if likelihood == "labels":
        model, method = StateSpaceGPClassifier(time="when"), "predict_proba"
    else:
        model = StateSpaceGPRegressor(KERNEL if likelihood == "gaussian" else KERNEL.k1)
        model.set_params(time="when", likelihood=likelihood)
        method = "predict"
    weighted = clone(model).fit(X, y, sample_weight=weight)
    repeated = clone(model).fit(X.iloc[rows], y[rows])
    new = frame(30, seed=3)
    found, expected = (getattr(each, method)(new) for each in (weighted, repeated))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_a_fitted_model_is_pickled_and_warm_started():
    X = frame()
    y = target(X)
    model = StateSpaceGPRegressor(KERNEL, max_iter=2, warm_start=True).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    value = model.log_marginal_likelihood_value_
    assert model.fit(X, y).log_marginal_likelihood_value_ >= value - 1e-6


def test_a_trend_goes_on_and_the_process_alone_returns():
    t = np.linspace(0, 4, 200)[:, None]
    rng = np.random.default_rng(0)
    y = 3 + 2 * t[:, 0] + 0.3 * np.sin(9 * t[:, 0]) + 0.1 * rng.standard_normal(200)
    kernel = Matern(0.3, (0.1, 1.0), nu=1.5) + WhiteKernel(0.1)
    ahead = np.linspace(5, 7, 20)[:, None]
    truth = 3 + 2 * ahead[:, 0]
    without = StateSpaceGPRegressor(kernel).fit(t, y)
    model = StateSpaceGPRegressor(kernel, trend=1).fit(t, y)
    assert np.abs(without.predict(ahead) - truth).max() > 3
    mean, std = model.predict(ahead, return_std=True)
    assert np.abs(mean - truth).max() < 0.4
    assert (np.abs(mean - truth) < 3 * std).all()


def test_counts_and_classes_have_covariates():
    X = frame(200)
    rng = np.random.default_rng(3)
    days = (X["when"] - X["when"].min()) / pd.Timedelta("1D")
    rate = np.exp(1.0 + 0.5 * np.sin(days / 4) + 0.8 * X["holiday"])
    counts = rng.poisson(rate)
    kernel = 0.5 * Matern(5.0, nu=1.5)
    columns = ["when", "holiday"]
    model = StateSpaceGPRegressor(kernel, likelihood="poisson", max_iter=5).fit(X[columns], counts)
    parts, std = model.predict_components(X[columns], return_std=True)
    effect = parts[X["holiday"], 1][0] - parts[~X["holiday"], 1][0]
    assert abs(effect - 0.8) < 0.25
    alone = StateSpaceGPRegressor(kernel, likelihood="poisson", max_iter=5)
    alone.fit(X[["when"]], counts)
    assert model.log_marginal_likelihood_value_ > alone.log_marginal_likelihood_value_ + 5
    labels = np.where(rng.random(200) < 1 / (1 + np.exp(-3 * (X["holiday"] - 0.5))), "yes", "no")
    classifier = StateSpaceGPClassifier(kernel, max_iter=5).fit(X[columns], labels)
    proba = classifier.predict_proba(X[columns])[:, 1]
    assert proba[X["holiday"]].min() > proba[~X["holiday"]].max()


@pytest.mark.parametrize("columns", [["when"], ["when", "heat", "site"]])
def test_filtered_predictions_are_of_models_of_the_past(columns):
    X = frame().sort_values("when", ignore_index=True)
    y = target(X)
    model = StateSpaceGPRegressor(KERNEL, optimizer=None, normalize_y=False).fit(X[columns], y)
    mean, std = model.predict(X[columns], return_std=True, filtered=True)
    assert mean[0] == pytest.approx(model.predict(X[columns], filtered=True)[0])
    for n in (20, 77):
        past = clone(model).fit(X[columns][:n], y[:n])
        if len(columns) == 1:
            expected = past.predict(X[columns][n : n + 1], return_std=True)
            np.testing.assert_allclose((mean[n], std[n]), np.ravel(expected), rtol=1e-7)
    # One step ahead: standardised residuals are white, with variance 1 if the model holds.
    z = ((y - mean) / std)[30:]
    smoothed = ((y - model.predict(X[columns])) / std)[30:]
    assert z.std() > smoothed.std()
    later = clone(model).fit(X[columns][:100], y[:100])
    for i in range(100, 120):
        later.partial_fit(X[columns][i : i + 1], y[i : i + 1])
    ahead = X[columns].assign(when=X["when"] + pd.Timedelta("40D"))
    if len(columns) == 1:
        np.testing.assert_allclose(
            later.predict(ahead, return_std=True), model.predict(ahead, return_std=True), rtol=1e-8
        )


def test_what_has_no_filter_says_so():
    X = frame()
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, target(X))
    with pytest.raises(ValueError, match="filtered=True has the mean"):
        model.predict(X, return_cov=True, filtered=True)
    counts = StateSpaceGPRegressor(Matern(2.0), optimizer=None, likelihood="poisson")
    with pytest.raises(ValueError, match="filtered=True has the mean"):
        counts.fit(X[["when"]], np.ones(len(X))).predict(X[["when"]], filtered=True)


def test_kinds_follow_what_columns_hold():
    X = frame()
    rng = np.random.default_rng(0)
    X["code"] = rng.choice(["1", "2", "3"], len(X))
    X["grade"] = pd.Categorical(rng.integers(0, 3, len(X)))
    X["dose"] = rng.integers(0, 2, len(X))
    model = StateSpaceGPRegressor(KERNEL, optimizer=None, covariates={"dose": "linear"})
    kinds = model.fit(X, target(X)).covariate_kinds_
    assert kinds == {
        "heat": "smooth",
        "holiday": "flag",
        "site": "categorical",
        "code": "categorical",
        "grade": "categorical",
        "dose": "linear",
    }
    for name in "abcd":
        X[name] = rng.normal(size=len(X))
    kinds = model.fit(X, target(X)).covariate_kinds_  # too many to be smooth
    assert {kinds[name] for name in ("heat", *"abcd")} == {"linear"}
    assert model.set_params(covariates="auto").fit(X[["when"]], target(X)).covariate_kinds_ == {}


def test_counts_with_covariates_cannot_go_on():
    X = frame()[["when", "holiday"]]
    model = StateSpaceGPRegressor(Matern(2.0), likelihood="poisson", optimizer=None)
    model.fit(X, np.arange(len(X)) % 3)
    with pytest.raises(ValueError, match="partial_fit with covariates.*Call fit"):
        model.partial_fit(X, np.arange(len(X)) % 3)


def test_a_missing_covariate_is_refused():
    X = frame()[["when", "heat"]]
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, target(frame()))
    X.loc[3, "heat"] = np.nan
    with pytest.raises(ValueError, match="NaN.*first in row 3 .*Drop or correct"):
        model.predict(X)
    with pytest.raises(ValueError, match="2 features"):
        model.predict(X[["when"]].to_numpy())


def test_a_missing_label_beside_covariates_is_refused_by_its_row():
    labels = np.where(np.arange(len(frame())) % 3, "up", "down").astype(object)
    labels[3] = None
    with pytest.raises(ValueError, match="y contains NaN; first in row 3 .*without a label"):
        StateSpaceGPClassifier(KERNEL, optimizer=None).fit(frame(), labels)


def test_a_stream_with_dates_and_covariates_goes_through_skops():
    skops = pytest.importorskip("skops.io")
    X = frame()
    y = target(X)
    model = StateSpaceGPRegressor(KERNEL, optimizer=None, trend=1).fit(X, y)
    later = X.assign(when=X["when"] + pd.Timedelta("40D"))
    model.partial_fit(later, y)
    data = skops.dumps(model)
    types = skops.get_untrusted_types(data=data)
    assert all(name.startswith(("skgp.", "sklearn.gaussian_process.")) for name in types)
    again = skops.loads(data, trusted=types)
    np.testing.assert_array_equal(again.predict(later), model.predict(later))


def test_levels_of_text_are_not_cut_short():
    X = frame()[["when"]].assign(code=np.where(np.arange(120) % 2, "10", "20"))
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, target(frame()))
    rows = X.iloc[[0, 1, 2]]
    expected = model.predict(rows.assign(code=["20", "10", "new"]))
    np.testing.assert_array_equal(model.predict(rows.assign(code=[20, 10, 100])), expected)
    assert model.predict(rows.assign(code=[20, 10, 10.5]))[2] == expected[2]


@pytest.mark.parametrize("mixed", [["1", 1.0, 2, "a"], [1.0, "1", np.float32(2), "a"]])
def test_a_number_and_its_text_are_one_level(mixed):
    x, y = np.arange(20.0), np.arange(20.0)
    X = pd.DataFrame({"t": x, "g": pd.Series(mixed * 5, dtype=object)})
    model = StateSpaceGPRegressor(KERNEL, time="t", optimizer=None).fit(X, y)
    assert model._table.levels[1].tolist() == ["1", "2", "a"]
    numbers, text = (X[:5].assign(g=level) for level in (1.0, "1"))  # a column of floats, of text
    np.testing.assert_array_equal(model.predict(numbers), model.predict(text))


def test_a_missing_number_is_no_level():
    X = frame()[["when"]].assign(code=np.arange(120) % 3.0)
    model = StateSpaceGPRegressor(KERNEL, covariates={"code": "categorical"}, optimizer=None)
    model.fit(X, target(frame()))
    X.loc[3, "code"] = np.nan
    for call in (lambda: model.predict(X), lambda: model.fit(X, target(frame()))):
        with pytest.raises(ValueError, match="NaN"):
            call()


@pytest.mark.parametrize("kind", ["linear", "flag", "smooth"])
def test_a_constant_column_adds_nothing_and_its_effect_is_as_wide_as_the_prior(kind):
    X = frame()[["when"]].assign(a=3.7)  # its standard deviation in floats is 4e-16
    model = StateSpaceGPRegressor(KERNEL, covariates={"a": kind}, optimizer=None)
    model.fit(X, target(frame()))
    alone = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X[["when"]], target(frame()))
    np.testing.assert_allclose(model.predict(X), alone.predict(X[["when"]]), rtol=1e-9)
    assert model.predict(X.assign(a=4.7), return_std=True)[1].max() < 1e4


def test_columns_that_fit_cannot_read_are_named():
    X, y = frame(), target(frame())
    later = X[["when"]].assign(due=X["when"] + pd.Timedelta("1D"))
    with pytest.raises(ValueError, match="holds dates in the column 'due', which is not time"):
        StateSpaceGPRegressor(KERNEL, time="when").fit(later, y)
    model = StateSpaceGPRegressor(KERNEL, optimizer=None)
    with pytest.raises(ValueError, match="text in the column 'site'.*categorical"):
        clone(model).set_params(covariates={"site": "linear"}).fit(X, y)
    text = X[["heat"]].assign(when=X["when"].astype(str))
    with pytest.raises(ValueError, match="text in the column 'when'.*to_datetime"):
        clone(model).set_params(time="when").fit(text, y)
    model.fit(X[["when", "heat"]], y)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X[["heat", "when"]])


@pytest.mark.parametrize(
    "part",
    [DotProduct() * RBF(), DotProduct() ** 2, 2.0 * (DotProduct() + RBF())],
    ids=["product", "power", "sum"],
)
@pytest.mark.parametrize("column", [0, 1])
def test_only_a_dot_product_by_itself_is_a_line(part, column):
    X, y = frame()[["when", "heat"]], target(frame())
    with pytest.raises(ValueError, match="has no state-space form.*straight line"):
        StateSpaceGPRegressor(KERNEL + ActiveDims(part, [column]), optimizer=None).fit(X, y)
    line = ActiveDims(2.0 * DotProduct() * 3.0, [1]) + 2.0 * ActiveDims(DotProduct(), [0])
    model = StateSpaceGPRegressor(KERNEL + line, optimizer=None).fit(X, y)
    assert model.component_names_[2:] == ["trend", "heat"]


@pytest.mark.parametrize("columns", [["when"], ["when", "heat"]])
def test_rows_before_the_origin_of_a_trend_leave_the_model_as_it_was(columns):
    X, y = frame()[columns], target(frame())
    model = StateSpaceGPRegressor(LocalLinearTrend() + WhiteKernel(0.1), optimizer=None)
    expected = model.fit(X, y).predict(X)
    early = X[:1].assign(when=X["when"].min() - pd.Timedelta("2D"))
    with pytest.raises(ValueError, match="before the kernel's origin=0"):
        model.partial_fit(early, y[:1])
    np.testing.assert_array_equal(model.predict(X), expected)


def test_a_trend_far_away_has_finite_quantiles(rng):
    x = rng.standard_normal((20, 1))
    model = StateSpaceGPRegressor(trend=2, max_iter=4).fit(x, np.sin(x[:, 0]))
    lower, middle, upper = model.predict_quantiles([[1e300]], [0.025, 0.5, 0.975])[0]
    assert -np.inf < lower < middle < upper < np.inf


@pytest.mark.parametrize("value", [None, np.nan, pd.NA, "nan"])
@pytest.mark.parametrize("convert", ["object", "category", "array"])
def test_missing_text_is_refused_as_missing_numbers_are(value, convert):
    X, y = frame()[["when", "site"]], target(frame())
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, y)
    gone = X.assign(site=[*X["site"][:7], value, *X["site"][8:]])
    table = gone.to_numpy(dtype=object) if convert == "array" else gone.astype({"site": convert})
    with pytest.raises(ValueError, match=r"no value in the column ('site'|1), row 7 \(1 of 120"):
        clone(model).fit(table, y)
    if convert != "array":
        with pytest.raises(ValueError, match="no value in the column 'site'.*fillna"):
            model.predict(table)
    named = X.assign(site=X["site"].where(X.index != 7, "None"))  # a level as any other
    assert list(clone(model).fit(named, y)._table.levels[1]) == ["None", "a", "b", "c"]


def test_columns_of_one_name_are_refused():
    X, y = frame()[["when", "heat", "holiday"]], target(frame())
    X.columns = ["when", "heat", "heat"]
    for columns in (X, X[["heat"]]):
        with pytest.raises(ValueError, match="several columns of the name 'heat'.*duplicated"):
            StateSpaceGPRegressor(KERNEL, optimizer=None).fit(columns, y)


def test_unlike_new_levels_are_independent_draws_of_the_distribution_of_levels():
    X, y = frame(), target(frame())
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, y)
    new = X.iloc[[0, 1, 2, 3, 4]].assign(site=["d", "e", "d", "a", "f"])
    mean, covariance = model.latent_mean_and_covariance(new)
    expected_mean, var = model.latent_mean_and_variance(new)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-9)
    np.testing.assert_allclose(np.diag(covariance), var, rtol=1e-9)
    # The rows at their own level less the effects of levels, which are independent of new ones.
    alike = model.latent_mean_and_covariance(new.assign(site=["d"] * 3 + ["a", "d"]))[1]
    site = np.array(new["site"])
    same = (site[:, None] == site) | (site == "a") | (site == "a")[:, None]
    variance = 0.1 * model.y_scale_**2  # of the levels
    np.testing.assert_allclose(covariance, alike - variance * ~same, atol=1e-9)
    assert_draws(model.sample_f(new, 5000, random_state=0), mean, covariance)


def test_new_levels_do_not_join_by_partial_fit():
    X, y = frame(), target(frame())
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, y)
    expected = model.predict(X)
    with pytest.raises(ValueError, match="levels in the column 'site' that fit had not, in 1 of 3"):
        model.partial_fit(X[:3].assign(site=["a", "elsewhere", "b"]), y[:3])
    np.testing.assert_array_equal(model.predict(X), expected)


@pytest.mark.parametrize("n_days", [1, 2, 4])
def test_sites_seen_on_few_days_differ_as_their_means_do(n_days):
    """The median gap between rows is 0, and of one day there is none."""
    rng, copies = np.random.default_rng(n_days), 4 // n_days
    site = np.tile(np.repeat(np.arange(8), copies), n_days)
    day = np.repeat(np.arange(n_days), 8 * copies)
    X = pd.DataFrame({"day": day, "site": [f"site {each}" for each in site]})
    y = 0.5 * day + rng.standard_normal(8)[site] + 0.02 * rng.standard_normal(32)
    model = StateSpaceGPRegressor(time="day").fit(X, y)
    effects = model.predict_components(X[: 8 * copies : copies])[:, -1]
    means = np.array([y[site == each].mean() for each in range(8)])
    np.testing.assert_allclose(effects - effects.mean(), means - means.mean(), atol=0.01)
