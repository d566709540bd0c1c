"""The scorer of log densities: whatever wraps an estimator, and what it refuses."""

import pickle

import numpy as np
import pytest
from joblib import parallel_config
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from skgp import DLMGPClassifier, DLMGPRegressor
from skgp.estimators import log_predictive_density_scorer

QUICK = dict(n_inducing=8, optimizer=None, random_state=0)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (120, 1))
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.standard_normal(120)


@pytest.fixture(scope="module")
def plain(data):
    return DLMGPRegressor(**QUICK).fit(*data).log_predictive_density(*data)


def search_of(estimator, **options):
    name = "beta" if isinstance(estimator, DLMGPRegressor) else "dlmgpregressor__beta"
    scoring = log_predictive_density_scorer
    return GridSearchCV(estimator, {name: [1.0]}, scoring=scoring, cv=2, **options)


def scaled(estimator):
    return make_pipeline(StandardScaler(), estimator)


WRAPPERS = {
    "bare": lambda inner: inner,
    "pipeline": scaled,
    "pipeline of one step": make_pipeline,
    "pipeline in a pipeline": lambda inner: make_pipeline(MinMaxScaler(), scaled(inner)),
    "search": search_of,
    "search over a pipeline": lambda inner: search_of(scaled(inner)),
    "search at the end of a pipeline": lambda inner: scaled(search_of(inner)),
    "pipeline that passes through": lambda inner: make_pipeline("passthrough", inner),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_score_is_that_of_the_estimator_inside(wrap, data, plain):
    """The default kernel is indifferent to the units of X."""
    X, y = data
    wrapped = wrap(DLMGPRegressor(**QUICK)).fit(X, y)
    weights = np.linspace(0, 1, 120)
    for weight in (None, weights):
        found = log_predictive_density_scorer(wrapped, X, y, sample_weight=weight)
        assert isinstance(found, float)
        assert found == pytest.approx(np.average(plain, weights=weight), abs=1e-3)


def test_score_of_rows_not_seen_transforms_them_as_the_training_rows(data):
    X, y = data
    pipeline = scaled(DLMGPRegressor(**QUICK)).fit(X[:60], y[:60])
    by_hand = pipeline[-1].log_predictive_density(pipeline[0].transform(X[60:]), y[60:])
    found = log_predictive_density_scorer(pipeline, X[60:], y[60:])
    assert found == pytest.approx(by_hand.mean(), rel=1e-12)


def test_score_of_a_classifier_is_minus_the_log_loss(data):
    X, y = data
    pipeline = scaled(DLMGPClassifier(**QUICK))
    scores = [
        cross_val_score(pipeline, X, y > 0, scoring=scoring, cv=2)
        for scoring in (log_predictive_density_scorer, "neg_log_loss")
    ]
    np.testing.assert_allclose(*scores, rtol=1e-10)


def test_grid_search_over_beta_and_points_runs_in_parallel(data):
    """Far too much regularisation, or far too few points, is what it turns down.

    By threads, which begin at once; processes need pickles besides.
    """
    kernel = RBF() + WhiteKernel(0.1)
    pipeline = scaled(DLMGPRegressor(kernel, max_iter=10, random_state=0))
    grid = {"dlmgpregressor__beta": [100.0, 1.0], "dlmgpregressor__n_inducing": [2, 10]}
    search = GridSearchCV(pipeline, grid, scoring=log_predictive_density_scorer, cv=2, n_jobs=2)
    search = pickle.loads(pickle.dumps(search))
    with parallel_config("threading"):
        search.fit(*data)
    assert search.best_params_ == {"dlmgpregressor__beta": 1.0, "dlmgpregressor__n_inducing": 10}
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert log_predictive_density_scorer(search, *data) > search.best_score_


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (LogisticRegression, "LogisticRegression"),
        (lambda: scaled(LogisticRegression()), "LogisticRegression"),
        (lambda: search_of(DLMGPRegressor(**QUICK), refit=False), "GridSearchCV"),
        (lambda: make_pipeline(StandardScaler(), "passthrough"), "str"),
    ],
)
def test_what_has_no_density_is_named(make, name, data):
    X, y = data
    estimator = make().fit(X, y if "Grid" in name else y > 0)
    with pytest.raises(TypeError, match=f"needs an estimator with.*got {name}.*neg_log_loss"):
        log_predictive_density_scorer(estimator, X, y)
