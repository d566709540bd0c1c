"""SWSGPRegressor: the contracts, the parameters of its own, streams, awkward data."""

import pickle
import tracemalloc
import warnings

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import SWSGPClassifier, SWSGPRegressor, VecchiaGPClassifier, VecchiaGPRegressor
from skgp.datasets import make_counts
from skgp.estimators._reduction import Projection, principal_components
from tests.contracts.estimators import (
    CountRegressorPredictions,
    RegressorContract,
    rbf_kernel,
)
from tests.covering import slow_case
from tests.same import assert_same


class SWSGP:
    """What the contracts ask of every kind of fit."""

    offers_state = False
    params = {}

    def make(self, **params):
        return SWSGPRegressor(**{"random_state": 0, **self.params, **params})


class TestContract(SWSGP, RegressorContract):
    pass


class TestCountContract(SWSGP, CountRegressorPredictions):
    params = {"likelihood": "poisson"}


def kept(**params):
    """An estimator with hyper-parameters that suit `data` and are kept."""
    return SWSGPRegressor(
        **{"kernel": rbf_kernel(), "optimizer": None, "random_state": 0, **params}
    )


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (150, 2))
    return X, 30 + 4 * (np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(150))


@pytest.fixture(scope="module")
def counts():
    return make_counts(150, 2, mean=20.0, dispersion=50.0, length_scale=1.0, random_state=7)


@pytest.fixture(scope="module")
def X_new():
    return np.random.default_rng(1).uniform(-3, 3, (9, 2))


def density(fit, X, y):
    return fit.log_predictive_density(X, y).mean()


# ---- predictions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joint", "params"),
    [
        ("local", {"covariance": "full", "max_iter": 60}),
        ("union", {}),
    ],
    ids=str,
)
def test_joint_covariance_and_draws(joint, params, data, X_new):
    fit = kept(joint_prediction=joint, n_inducing=40, n_neighbors=10, **params).fit(*data)
    X = np.vstack([X_new, X_new[:2], fit.inducing_points_[:2]])
    mean, covariance = fit.predict(X, return_cov=True)
    std = fit.predict(X, return_std=True)[1]
    assert np.linalg.eigvalsh(covariance).min() > 0
    close = np.isclose(np.sqrt(np.diag(covariance)), std, rtol=1e-8)
    alone = np.isclose(mean, fit.predict(X), rtol=1e-8)
    # The paper's joint prediction of some rows is not what it predicts of each.
    assert (close.all() and alone.all()) == (joint == "local")
    draws = fit.sample_y(X, 1000)
    z = (draws.mean(1) - mean) / np.sqrt(np.diag(covariance) / 1000)
    assert np.abs(z).max() < 4


def test_many_rows_are_predicted_in_bounded_memory(data):
    """Beside what is returned; conditioned at once, 1e5 rows would take gigabytes."""
    fit = kept(n_neighbors=16).fit(*data)
    X = np.random.default_rng(2).uniform(-3, 3, (2000, 2))
    seen, original = [], fit._posterior.mean_and_variance
    object.__setattr__(
        fit._posterior, "mean_and_variance", lambda X: (seen.append(len(X)), original(X))[1]
    )
    n_rows = 2**28 // fit._bytes_per_row()
    assert fit._bytes_per_row() >= 8 * 16 * 16 and 1000 < n_rows < 100_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skgp.estimators._base.PREDICTION_MEMORY", 256 * fit._bytes_per_row())
        tracemalloc.start()
        fit.predict(X, return_std=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert max(seen) == 256 and sum(seen) == 2000 and peak < 2**20


# ---- parameters ----------------------------------------------------------------------------------


def test_fit_tells_of_itself(data):
    fit = SWSGPRegressor(n_inducing=40, n_neighbors=8, random_state=0).fit(*data)
    assert fit.kl_weight_ == 5.0 and fit.inducing_points_.shape == (40, 2)
    assert set(fit.history_) == {"hyperparameters", "prior", "solve", "polish"}
    noise = fit.kernel_.k2.noise_level * fit.y_scale_**2
    assert fit.noise_variance_ == pytest.approx(noise, rel=1e-12)
    assert fit.noise_variance_ == pytest.approx(0.64, rel=0.3)
    again = fit.set_params(likelihood="student_t").fit(*data)
    assert again.degrees_of_freedom_ > 2 and again.likelihood_scale_ > 0


def test_neighbours_are_no_more_than_there_are_points(data):
    X, y = data
    few = {"n_inducing": 20}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a default that nobody set
        fit = kept(**few).fit(X, y)
        assert fit.n_neighbors_ == fit.n_inducing_ == 20
        assert kept(n_neighbors=20, **few).fit(X, y).n_neighbors_ == 20
    with pytest.warns(UserWarning, match="n_neighbors=50 is more than the 20 points"):
        asked = kept(n_neighbors=50, **few).fit(X, y)
    np.testing.assert_allclose(asked.predict(X), fit.predict(X), rtol=1e-9)


def test_few_rows_in_batches_are_the_exact_gp_of_them_all(data, X_new):
    X, y = data
    first = SWSGPRegressor(rbf_kernel(), optimizer=None, normalize_y=False, random_state=0)
    whole = SWSGPRegressor(rbf_kernel(), optimizer=None, normalize_y=False, random_state=0)
    z = (y - y.mean()) / y.std()
    first.fit(X[:100], z[:100]).partial_fit(X[100:], z[100:])
    whole.fit(X, z)
    assert first.n_neighbors_ == first.n_inducing_  # rows that are known add none
    got, want = (fit.predict(X_new, return_std=True) for fit in (first, whole))
    # Offsets are the weighted means of either training set.
    np.testing.assert_allclose(got[0], want[0], atol=0.05)
    np.testing.assert_allclose(got[1], want[1], rtol=0.01)


def test_warm_start_goes_on_where_the_last_fit_ended(data):
    X, y = (part[:80] for part in data)
    options = dict(n_inducing=20, n_neighbors=6, solver="adam", max_iter=30, random_state=0)
    fit = SWSGPRegressor(rbf_kernel(), warm_start=True, **options).fit(X, y)
    first, kernel = fit.elbo_, fit.kernel_
    fit.set_params(max_iter=20).fit(X, y)
    cold = SWSGPRegressor(rbf_kernel(), **{**options, "max_iter": 20}).fit(X, y)
    assert fit.elbo_ > first - 1 and fit.elbo_ > cold.elbo_
    assert not fit.history_["hyperparameters"] and cold.history_["hyperparameters"]
    assert not np.allclose(kernel.theta, fit.kernel_.theta, atol=1e-12)


# ---- state ---------------------------------------------------------------------------------------


def test_warm_start_keeps_hyperparameters_and_noise(data, X_new):
    X, y = data
    for likelihood in ("gaussian", "student_t"):
        fit = SWSGPRegressor(likelihood=likelihood, warm_start=True, random_state=0).fit(X, y)
        theta, before = fit.kernel_.theta, fit.predict(X_new, return_std=True)
        fit.fit(X, y)
        after = fit.predict(X_new, return_std=True)
        np.testing.assert_allclose(after, before, rtol=1e-10 if likelihood == "gaussian" else 0.02)
        np.testing.assert_allclose(fit.kernel_.theta[:-1], theta[:-1], rtol=1e-12)


@pytest.fixture(scope="module")
def begun(data):
    X, y = data[0][:80], np.rint(data[1][:80])
    return (X, y), SWSGPRegressor(warm_start=True, random_state=0, n_neighbors=16).fit(X, y)


@pytest.mark.parametrize(
    "change",
    [
        {"likelihood": "poisson"},
        {"kernel": rbf_kernel(), "optimizer": None},
        {"kl_weight": 1.0},
        {},
    ],
    ids=str,
)
def test_warm_start_begins_anew_where_it_must(change, begun):
    (X, y), fit = begun
    again = pickle.loads(pickle.dumps(fit)).set_params(**change)
    if not change:
        X = np.column_stack([X, X[:, 0]])  # of other shapes
    again.fit(X, y)
    cold = SWSGPRegressor(random_state=0, n_neighbors=16, **change).fit(X, y)
    np.testing.assert_allclose(again.predict(X), cold.predict(X), rtol=1e-8)
    assert getattr(again, "kl_weight_", None) == getattr(cold, "kl_weight_", None)


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["gaussian", slow_case("student_t"), "poisson"])
def test_stream_comes_near_the_fit_of_all_rows(likelihood, data, counts):
    X, y = counts if likelihood == "poisson" else data
    kernel = 0.5 * RBF(1.0) if likelihood == "poisson" else rbf_kernel()
    options = dict(likelihood=likelihood, kernel=kernel, n_neighbors=16)
    stream = kept(**options)
    for rows in np.array_split(np.arange(150), 3):
        stream.partial_fit(X[rows], y[rows])
    whole, first = (kept(**options).fit(X[:n], y[:n]) for n in (150, 50))
    densities = [density(fit, X, y) for fit in (first, stream, whole)]
    assert densities[1] > 0.5 * (densities[0] + densities[2])
    assert first.n_inducing_ < stream.n_inducing_ <= 150
    assert len(pickle.dumps(stream)) < 60_000


@pytest.mark.parametrize(
    "params", [{"covariance": "full"}, {"inducing": "learned"}, {"solver": "adam"}], ids=str
)
def test_stream_says_what_it_cannot_go_on_from(params, data):
    X, y = data
    options = dict(n_inducing=10, n_neighbors=5, max_iter=5, random_state=0)
    fit = SWSGPRegressor(**options, **params).partial_fit(X[:60], y[:60])
    with pytest.raises(ValueError, match=r"partial_fit goes on from a diagonal.*Use covariance="):
        fit.partial_fit(X[60:], y[60:])


# ---- awkward data --------------------------------------------------------------------------------


def test_many_columns_are_reduced_to_principal_components():
    rng = np.random.default_rng(0)
    f = rng.standard_normal((200, 3))
    X = f @ rng.standard_normal((3, 80)) + 0.05 * rng.standard_normal((200, 80)) + 5
    y = np.sin(f[:, 0]) + f[:, 1]
    fit = SWSGPRegressor(n_neighbors=16, random_state=0).fit(X[:150], y[:150])
    assert fit.inducing_points_.shape[1] == 50 and fit.score(X[150:], y[150:]) > 0.8
    raw = SWSGPRegressor(projection=None, random_state=0, max_iter=1).fit(X[:30], y[:30])
    assert raw.inducing_points_.shape[1] == 80
    few = SWSGPRegressor(projection=3, n_neighbors=16, random_state=0).fit(X[:150], y[:150])
    assert few.inducing_points_.shape[1] == 3 and few.score(X[150:], y[150:]) > 0.9
    # A kernel that is given is one of the columns themselves.
    given = kept(kernel=RBF(10.0) + WhiteKernel(0.1)).fit(X[:150], y[:150])
    assert given.inducing_points_.shape[1] == 80
    # Fewer rows than components.
    assert np.isfinite(SWSGPRegressor(random_state=0).fit(X[:20], y[:20]).predict(X)).all()


def projected(X, y, **options):
    """Columns as they are and divided by their spread, and what is chosen of them."""
    std = X.std(0)
    plain, scaled = principal_components(X, 3), principal_components(X / std, 3)
    scaled = Projection(scaled.mean * std, scaled.directions / std[:, None])
    rng = np.random.RandomState(0)
    return plain, scaled, principal_components(X, 3, targets=y, random_state=rng, **options)


def test_columns_of_other_units_are_scaled_if_neighbours_predict_better_then():
    rng = np.random.default_rng(0)
    f = rng.standard_normal((300, 3))
    X = np.repeat(f, 4, axis=1) + 0.1 * rng.standard_normal((300, 12)) + 3
    y = np.sin(f[:, :2])
    units = X * np.where(np.arange(12) < 8, 1.0, 1e3)  # what y does not depend on has large numbers
    plain, scaled, found = projected(units, y)
    np.testing.assert_allclose(found(units), scaled(units), atol=1e-9)
    assert np.abs(found(units) - plain(units)).max() > 1
    # One unit, and columns that are little but noise: they would say as much as the others.
    noise = np.column_stack([X, 0.1 * rng.standard_normal((300, 30))])
    plain, _, found = projected(noise, y)
    assert_same(found.directions, plain.directions)
    # Copies of rows predict each other whatever the units.
    weights = rng.integers(1, 4, 300)
    few = projected(units, y, sample_weight=weights)[2]
    many = projected(np.repeat(units, weights, axis=0), np.repeat(y, weights, axis=0))[2]
    np.testing.assert_allclose(few(units), many(units), atol=1e-8)
    # A column that is constant has no spread.
    constant = np.column_stack([units, np.full(300, 7.0)])
    many = principal_components(constant, 3, targets=y, random_state=np.random.RandomState(0))
    np.testing.assert_allclose(many(constant), scaled(units), atol=1e-8)


# ---- few inducing points -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, slow_case({"solver": "adam"})], ids=str)
def test_few_inducing_points_have_the_noise_of_what_they_leave(params):
    """Of rough data, most of which sixteen points cannot follow."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (600, 3))
    y = np.sin(2 * X[:, 0]) * np.cos(2 * X[:, 1]) + X[:, 2] + 0.05 * rng.standard_normal(600)
    kernel = 1.0 * RBF([1.0, 1.0, 3.0]) + WhiteKernel(1e-3)
    fit = SWSGPRegressor(kernel, n_inducing=16, n_neighbors=8, random_state=0, **params)
    fit.fit(X[:200], y[:200])
    error = y[200:] - fit.predict(X[200:])
    std = fit.predict(X[200:], return_std=True)[1]
    assert 0.7 < np.sqrt(np.mean((error / std) ** 2)) < 1.4  # it was 2 to 6
    assert density(fit, X[200:], y[200:]) > -0.95


def _few_columns_matter(rng, X):
    return X, np.sin(2 * X[:, 0]) + X[:, 1]


def _rows_lie_near_a_plane(rng, X):
    Z = rng.standard_normal((len(X), 3))
    return Z @ rng.standard_normal((3, X.shape[1])) + 0.5 * X, np.sin(1.5 * Z[:, 0]) + Z[:, 1]


@pytest.mark.slow
@pytest.mark.parametrize("make", [_few_columns_matter, _rows_lie_near_a_plane])
def test_many_columns_are_projected_only_where_rows_held_out_gain(make):
    rng = np.random.default_rng(0)
    X, f = make(rng, rng.standard_normal((400, 60)))
    y = f + 0.1 * rng.standard_normal(400)
    auto, none = (
        SWSGPRegressor(projection=each, n_neighbors=8, random_state=0).fit(X[:120], y[:120])
        for each in ("auto", None)
    )
    losses = [-model.log_predictive_density(X[120:], y[120:]) for model in (auto, none)]
    worse = losses[0] - losses[1]
    assert worse.mean() < 2 * worse.std() / np.sqrt(len(worse)) + 0.01


def test_few_rows_of_many_columns_are_not_projected():
    """Two columns of a hundred matter; principal components do not show them."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 100))
    y = np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.standard_normal(200)
    auto, none = (
        SWSGPRegressor(projection=each, random_state=0).fit(X[:80], y[:80])
        for each in ("auto", None)
    )
    np.testing.assert_allclose(auto.predict(X[80:]), none.predict(X[80:]), rtol=1e-6)


# ---- deprecated ----------------------------------------------------------------------------------


def test_kriging_is_an_alias_of_the_vecchia_estimators(data, X_new):
    X, y = data[0][:60], data[1][:60]
    labels = y > np.median(y)
    alias = SWSGPRegressor(method="kriging", n_neighbors=8, random_state=0)
    with pytest.warns(FutureWarning, match="'kriging' is deprecated.*Use VecchiaGPRegressor"):
        alias.fit(X, y)
    model = VecchiaGPRegressor(n_neighbors=8, random_state=0).fit(X, y)
    for option in ("return_std", "return_cov"):
        found, expected = (each.predict(X_new, **{option: True}) for each in (alias, model))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert alias.kernel_ == model.kernel_ and alias.get_params()["method"] == "kriging"
    alias = SWSGPClassifier(method="kriging", likelihood="logit", random_state=0)
    with pytest.warns(FutureWarning, match="Use VecchiaGPClassifier"):
        alias.fit(X, labels)
    expected = VecchiaGPClassifier(random_state=0).fit(X, labels).predict_proba(X_new)
    np.testing.assert_array_equal(alias.predict_proba(X_new), expected)


@pytest.mark.parametrize("make", [SWSGPRegressor, SWSGPClassifier])
def test_kriging_takes_no_stream(make, data):
    with pytest.raises(ValueError, match="partial_fit needs method='variational', got 'kriging'"):
        make(method="kriging").partial_fit(data[0], data[1] > 0)


def test_counts_of_unlike_exposures_tell_the_rate(rng):
    """Numbers in the place of counts near 0 say little, by which no length scale was found."""
    X, exposure = rng.normal(size=(150, 2)), np.exp(1 + 2 * rng.normal(size=150))
    X_new = rng.normal(size=(200, 2))
    y = rng.poisson(exposure * 0.2 * np.exp(X[:, 0]))
    model = SWSGPRegressor(likelihood="poisson", random_state=0).fit(X, y, exposure=exposure)
    error = np.log(model.predict(X_new)) - np.log(0.2) - X_new[:, 0]
    assert np.sqrt(np.mean(error**2)) < 0.2
    assert len(model.history_["hyperparameters"]) > 1
