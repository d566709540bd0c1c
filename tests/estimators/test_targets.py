"""Several targets that share a kernel: those of as many fits at fixed hyper-parameters."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import BaseEstimator, clone
from sklearn.gaussian_process import GaussianProcessRegressor as ScikitLearn
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp import QSGPRegressor, SWSGPRegressor, VecchiaGPRegressor
from skgp.data import Data
from skgp.displays import CoverageDisplay, PredictiveBandDisplay
from skgp.estimators import log_predictive_density_scorer
from skgp.estimators._reduction import components_predict_better
from skgp.learning import vecchia
from skgp.learning.search import SearchSettings
from tests.covering import slow_case

KERNEL = 1.3 * RBF([1.0, 0.8]) + WhiteKernel(0.05)
T = 3
FOURIER = dict(basis="fourier", n_basis=60)
ROUTES = {
    "exact": QSGPRegressor(),
    "nearly exact": QSGPRegressor(Matern(nu=1.5) + WhiteKernel(1e-15)),
    "chevron": QSGPRegressor(covariance="chevron", n_dense_columns=5),
    "inducing": QSGPRegressor(n_basis=30),
    "fourier": QSGPRegressor(**FOURIER),
    "fourier, diagonal": QSGPRegressor(**FOURIER, covariance="diagonal"),
    "fourier, samples": QSGPRegressor(**FOURIER, covariance="samples"),
    "cg": QSGPRegressor(solver="cg", tol=1e-12),
    "cg of weights": QSGPRegressor(**FOURIER, solver="cg", tol=1e-12),
    "gauss-seidel": QSGPRegressor(**FOURIER, solver="gauss-seidel", tol=1e-12, max_iter=300),
    "neighbors": QSGPRegressor(basis="neighbors", n_basis=20),
    "vecchia": VecchiaGPRegressor(n_neighbors=8, n_inducing=0),
    "vecchia, inducing": VecchiaGPRegressor(n_neighbors=8, n_inducing=10),
}


@pytest.fixture(scope="module")
def data():
    """Some rows of equal inputs, and weights."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (70, 2))
    X[60:] = X[:10]
    f = np.c_[np.sin(2 * X[:, 0]), 5 * np.cos(X[:, 1]) - 30, X[:, 0] * X[:, 1]]
    return X, f + [0.2, 1.0, 0.2] * rng.standard_normal((70, T)), rng.uniform(0.5, 2, 70)


@pytest.fixture(scope="module")
def X_new():
    return np.random.default_rng(1).uniform(-2, 2, (6, 2))


def told(model, X, Y):
    """All that a fit says of a target that needs no random numbers, targets on axis 1."""
    mean, std, d_mean, d_std = model.predict(
        X, return_std=True, return_mean_grad=True, return_std_grad=True
    )
    covariance = model.predict(X, return_cov=True)[1]
    return {
        "mean": mean,
        "std": std,
        "mean_grad": d_mean,
        "std_grad": d_std,
        "covariance": np.moveaxis(covariance, 1, -1),
        "quantiles": model.predict_quantiles(X, [0.1, 0.7]),
        "quantile": model.predict_quantiles(X, 0.3),
        "lower": model.predict_interval(X)[0],
        "latent variance": model.latent_mean_and_variance(X)[1],
        "density": model.log_predictive_density(X, Y),
    }


@pytest.mark.parametrize("route", list(ROUTES))
def test_several_targets_are_as_many_fits(route, data, X_new):
    X, Y, weight = data
    model = clone(ROUTES[route]).set_params(optimizer=None, random_state=0)
    model.set_params(kernel=model.kernel or KERNEL)
    fits = [clone(model).fit(X, y, weight) for y in Y.T]
    model.fit(X, Y, weight)
    for name in ("y_mean_", "y_scale_"):
        np.testing.assert_allclose(getattr(model, name), [getattr(m, name) for m in fits])
    factor = getattr(model, "calibration_", 1.0)
    each = np.array([getattr(m, "calibration_", 1.0) for m in fits])
    assert factor == pytest.approx(each.mean())  # one for all targets
    if factor != 1.0:  # what else differs is the mean alone
        found = model.predict(X_new, return_std=True)
        np.testing.assert_allclose(found[0], np.c_[[m.predict(X_new) for m in fits]].T, rtol=1e-8)
        stds = np.c_[[m.predict(X_new, return_std=True)[1] for m in fits]].T
        np.testing.assert_allclose(found[1], stds * np.sqrt(factor / each), rtol=1e-8)
        return
    found = told(model, X_new, Y[:6])
    expected = [told(m, X_new, y[:6]) for m, y in zip(fits, Y.T, strict=True)]
    for name, value in found.items():
        one_by_one = np.stack([e[name] for e in expected], axis=1)
        np.testing.assert_allclose(value, one_by_one, rtol=1e-8, atol=1e-8, err_msg=name)
    if hasattr(model, "log_marginal_likelihood_value_"):
        total = sum(m.log_marginal_likelihood_value_ for m in fits)
        assert model.log_marginal_likelihood_value_ == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("route", ["exact", "inducing", "vecchia"])
def test_evidence_is_the_sum_of_those_of_dense_processes(route, data):
    X, Y, _ = data
    X, Y = X[:30], Y[:30]
    all_rows = {"inducing": {"n_basis": 30}, "vecchia": {"n_neighbors": 29}}.get(route, {})
    model = clone(ROUTES[route]).set_params(kernel=KERNEL, optimizer=None, **all_rows).fit(X, Y)
    Z = (Y - Y.mean(0)) / Y.std(0)
    total = stats.multivariate_normal(np.zeros(30), KERNEL(X)).logpdf(Z.T).sum()
    assert model.log_marginal_likelihood_value_ == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("make", [QSGPRegressor, VecchiaGPRegressor])
def test_hyperparameters_have_the_greatest_joint_evidence(make, data):
    X, Y, _ = data
    X, Y = X[:60], Y[:60]
    Z = (Y - Y.mean(0)) / Y.std(0)
    expected = ScikitLearn(KERNEL).fit(X, Z)
    model = make(KERNEL, random_state=0).fit(X, Y)
    assert expected.log_marginal_likelihood(model.kernel_.theta) > (
        expected.log_marginal_likelihood_value_ - 1e-3
    )
    np.testing.assert_allclose(model.kernel_.theta, expected.kernel_.theta, atol=0.05)
    noise = model.kernel_.k2.noise_level
    np.testing.assert_allclose(model.noise_variance_, noise * Y.var(0))


@pytest.mark.parametrize(
    ("model", "n"),
    [
        (QSGPRegressor(), 50),
        slow_case(VecchiaGPRegressor(n_neighbors=8, n_inducing=0, max_iter=4, batch_size=500), 300),
    ],
    ids=["qsgp", "vecchia"],
)
def test_default_kernels_are_learned_from_all_targets(model, n, monkeypatch):
    """A column that one target alone depends on is known to matter."""
    few = partial(SearchSettings, exact_rows=100)
    monkeypatch.setattr(vecchia, "SearchSettings", few)
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n + 100, 2))
    Y = np.stack([np.sin(2 * X[:, 0]), np.sin(2 * X[:, 1])], 1) + 0.1 * rng.normal(
        size=(n + 100, 2)
    )
    model = clone(model).set_params(random_state=0).fit(X[:n], Y[:n])
    assert (r2_score(Y[n:], model.predict(X[n:]), multioutput="raw_values") > 0.9).all()
    np.testing.assert_allclose(model.noise_variance_, 0.01, rtol=0.5)


@pytest.mark.parametrize("method", ["sample_y", "sample_f"])
def test_draws_have_the_moments_told(method, data, X_new):
    X, Y, _ = data
    model = QSGPRegressor(KERNEL, optimizer=None).fit(X, Y)
    n = 4000
    draws = getattr(model, method)(X_new, n, random_state=0)
    assert draws.shape == (6, T, n)
    told = model.predict if method == "sample_y" else model.latent_mean_and_covariance
    mean, covariance = told(X_new, return_cov=True) if method == "sample_y" else told(X_new)
    std = np.sqrt(np.einsum("iit->it", covariance))
    assert np.abs((draws.mean(2) - mean) / std * n**0.5).max() < 4
    z = (draws - mean[..., None]) / std[..., None]  # (6, t, n)
    found = np.einsum("isn,jtn->isjt", z, z) / n
    correlation = covariance / (std[:, None] * std)  # (6, 6, t)
    expected = np.einsum("ijs,st->isjt", correlation, np.eye(T))  # targets are independent
    assert np.abs((found - expected) * (n / (1 + expected**2)) ** 0.5).max() < 4


REFUSED = [
    (QSGPRegressor(basis="relevance"), "QSGPRegressor with basis='relevance' takes one target"),
    (QSGPRegressor(likelihood="laplace"), "with likelihood='laplace' takes one target"),
    (QSGPRegressor(solver="sgd"), "with solver='sgd' takes one target"),
    (SWSGPRegressor(), "SWSGPRegressor with method='variational' takes one target"),
    (VecchiaGPRegressor(likelihood="poisson"), "with likelihood='poisson' takes one target"),
    (VecchiaGPRegressor(likelihood="student_t"), "with likelihood='student_t' takes one target"),
]


@pytest.mark.parametrize("model, message", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_takes_one_target_says_so(model, message, data):
    X, Y, _ = data
    with pytest.raises(ValueError, match=message + r".*MultiOutputRegressor\("):
        model.fit(X, Y)
    assert not model.__sklearn_tags__().target_tags.multi_output


@pytest.mark.parametrize(
    "model",
    [QSGPRegressor(KERNEL, optimizer=None), SWSGPRegressor(KERNEL, optimizer=None)],
    ids=["qsgp", "swsgp"],
)
def test_partial_fit_takes_one_target(model, data):
    X, Y, _ = data
    with pytest.raises(ValueError, match="by partial_fit takes one target.*MultiOutputRegressor"):
        model.partial_fit(X, Y)
    model.partial_fit(X, Y[:, 0])
    with pytest.raises(ValueError, match="by partial_fit takes one target.*MultiOutputRegressor"):
        model.partial_fit(X, Y)


@pytest.mark.parametrize("gains", [[1.0, 0.5], [1.0, -3.0]])
def test_a_projection_is_judged_by_all_targets(gains, data):
    class Judged(BaseEstimator):
        def __init__(self, projection=None, warp_inputs="auto", random_state=None):
            self.projection, self.random_state = projection, random_state
            self.warp_inputs = warp_inputs

        def fit(self, X, y):
            assert self.warp_inputs is False  # the rows of a trial are warped as they are
            return self

        def log_predictive_density(self, X, y):
            return np.zeros_like(y) + (0.0 if self.projection is None else gains)

    given = Data(torch.from_numpy(data[0]), torch.from_numpy(data[1][:, :2]))
    assert components_predict_better(Judged(), given, 0) == (sum(gains) > 0)


def test_targets_scored_are_those_of_the_fit(data):
    X, Y, _ = data
    model = QSGPRegressor(KERNEL, optimizer=None).fit(X, Y)
    with pytest.raises(
        ValueError, match=r"must have the 3 targets of the fit; got the shape \(70,"
    ):
        model.log_predictive_density(X, Y[:, :2])
    assert model.score(X, Y) == pytest.approx(r2_score(Y, model.predict(X)))


def test_displays_draw_one_target(data):
    pytest.importorskip("matplotlib")
    X, Y, _ = data
    model = QSGPRegressor(KERNEL, optimizer=None).fit(X, Y)
    for display in (PredictiveBandDisplay, CoverageDisplay):
        with pytest.raises(ValueError, match="draws one target; the estimator was fitted to 3"):
            display.from_estimator(model, X, Y)


@pytest.mark.parametrize("make", [QSGPRegressor, VecchiaGPRegressor])
def test_a_constant_target_leaves_the_others_as_they_are(make, data, X_new):
    X, Y, _ = data
    Y = np.c_[np.full(70, 0.1), Y[:, 0]]
    model = make(KERNEL, random_state=0)
    expected = told(clone(model).fit(X, Y[:, 1]), X_new, Y[:6, 1])
    model.fit(X, Y)
    for name, value in told(model, X_new, Y[:6]).items():
        np.testing.assert_allclose(value[:, 1], expected[name], 1e-6, 1e-10, err_msg=name)
        assert np.isfinite(value).all()
    np.testing.assert_allclose(model.predict(X_new)[:, 0], 0.1, rtol=1e-12)
    assert model.sample_y(X_new, 4).shape == (6, 2, 4)
    constant = model.fit(X, np.tile([1.0, 1e9], (70, 1))).predict(X_new)
    np.testing.assert_allclose(constant, np.tile([1.0, 1e9], (6, 1)), rtol=1e-12)


def test_rows_of_dask_are_scored_target_by_target(data):
    da = pytest.importorskip("dask.array")
    X, Y, _ = data
    model = QSGPRegressor(KERNEL, optimizer=None).fit(X, Y)
    found = model.log_predictive_density(da.from_array(X, (30, 2)), da.from_array(Y, (30, T)))
    assert found.shape == Y.shape
    np.testing.assert_allclose(found.compute(), model.log_predictive_density(X, Y))


def test_joint_covariances_of_all_targets_have_to_fit(data):
    X, Y, _ = data
    one = QSGPRegressor(KERNEL, optimizer=None, memory_budget=60_000_000).fit(X, Y[:, 0])
    many = clone(one).fit(X, np.repeat(Y, 30, axis=1))
    rows = np.zeros((400, 2))
    assert one.predict(rows, return_cov=True)[1].shape == (400, 400)
    with pytest.raises(MemoryError, match="The joint covariance of 400 rows"):
        many.predict(rows, return_cov=True)


def test_composition(data, X_new):
    pandas = pytest.importorskip("pandas")
    X, Y, weight = data
    model = QSGPRegressor(KERNEL, optimizer=None)
    expected = clone(model).fit(X, Y).predict(X_new)
    frame = pandas.DataFrame(Y, columns=["a", "b", "c"])
    np.testing.assert_array_equal(clone(model).fit(X, frame).predict(X_new), expected)
    column = clone(model).fit(X, Y[:, :1])
    assert column.predict(X_new).shape == (6,) and isinstance(column.y_scale_, float)
    again = pickle.loads(pickle.dumps(clone(model).fit(X, Y)))
    np.testing.assert_array_equal(again.predict(X_new), expected)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), model),
        {"qsgpregressor__kernel__k1__k1__constant_value": [1e-6, 1.0]},
        scoring=log_predictive_density_scorer,
        cv=2,
    )
    search.fit(X, Y)
    assert search.best_params_["qsgpregressor__kernel__k1__k1__constant_value"] == 1.0
    assert search.predict(X_new).shape == (6, T)
    assert np.isfinite(log_predictive_density_scorer(search, X, Y, weight))
