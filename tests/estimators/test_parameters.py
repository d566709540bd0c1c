"""A parameter that was set and has no effect is reported with what makes it so."""

import warnings

import numpy as np
import pytest

from skgp import (
    BayesianGPRegressor,
    DLMGPClassifier,
    DLMGPRegressor,
    QSGPClassifier,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPClassifier,
    SWSGPRegressor,
)
from tests.contracts.catalogue import CHEAP, cheap, rows

#: Estimator, parameters, those without effect, and what the message says of the others.
IDLE = [
    (DLMGPRegressor, {"objective": "elbo", "gradient": "bmc"}, "gradient", "objective='elbo'"),
    (DLMGPClassifier, {"objective": "elbo", "gradient": "ups"}, "gradient", "objective='elbo'"),
    (DLMGPRegressor, {"objective": "fitc", "beta": "auto"}, "beta", "objective='fitc'"),
    (DLMGPRegressor, {"n_gradient_samples": 3}, "n_gradient_samples", "gradient='auto'"),
    (
        DLMGPRegressor,
        {"hyperparameters": "fixed", "early_stopping": True},
        "early_stopping",
        "'joi",
    ),
    *(
        (make, {"method": "kriging", **option}, next(iter(option)), "method='kriging'")
        for make in (SWSGPRegressor, SWSGPClassifier)
        for option in [
            {"kl_weight": 2.0},
            {"covariance": "full"},
            {"inducing": "learned"},
            {"init": "greedy"},
            {"solver": "adam"},
            {"polish": True},
            {"batch_size": 10},
        ]
    ),
    (SWSGPRegressor, {"inducing": "learned", "optimizer": None}, "inducing", "optimizer=None"),
    (QSGPRegressor, {"solver": "cholesky", "batch_size": 9}, "batch_size", "solver='cholesky'"),
    (QSGPRegressor, {"n_support": 9}, "n_support", "solver='auto' chose 'cholesky'"),
    (QSGPRegressor, {"max_iter": 9}, "max_iter", "solver='auto' chose 'cholesky'"),
    (QSGPRegressor, {"feature_map": "iid"}, "feature_map", "basis='auto' chose 'inducing'"),
    (QSGPRegressor, {"validation_fraction": 0.2}, "validation_fraction", "early_stopping=True"),
    (QSGPClassifier, {"bound": "strict"}, "bound", "solver='auto' chose 'newton'"),
    (QSGPClassifier, {"n_dense_columns": 3}, "n_dense_columns", "covariance='chevron'"),
    (StateSpaceGPRegressor, {"posterior": "joint"}, "posterior", "n_features_in_=1"),
    (BayesianGPRegressor, {"optimizer": "map", "n_keep": 3}, "n_keep", "optimizer='map'"),
    (BayesianGPRegressor, {"n_probes": 3}, "n_probes", "solver='auto' chose 'cholesky'"),
]


def reports(make, params):
    """The warnings of a fit that tell of parameters without effect."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cheap(make, **params).fit(*rows(make))
    found = [w for w in caught if "no effect" in str(w.message)]
    assert all(w.category is UserWarning and w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("make", "params", "idle", "other"), IDLE, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_option_without_effect_is_reported_once(make, params, idle, other):
    (message,) = reports(make, params)
    assert f"{idle}={params[idle]!r}" in message and other in message
    assert f"Leave {idle} at the default" in message


@pytest.mark.parametrize("make", CHEAP, ids=lambda c: c.__name__)
def test_defaults_are_silent(make):
    assert reports(make, {}) == []


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (QSGPRegressor, {"solver": "sgd", "batch_size": 9, "max_iter": 4}),
        (QSGPRegressor, {"solver": "cg", "tol": 1e-3}),
        (QSGPRegressor, {"likelihood": "laplace", "max_iter": 9}),
        (QSGPRegressor, {"basis": "fourier", "n_basis": 20, "feature_map": "iid"}),
        (DLMGPRegressor, {"gradient": "bmc", "n_gradient_samples": 3}),
        (SWSGPRegressor, {"polish": False, "kl_weight": 2.0}),
        (BayesianGPRegressor, {"optimizer": None, "prior": None}),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_option_with_effect_is_silent(make, params):
    assert reports(make, params) == []


def test_fitc_with_beta_auto_is_one_fit():
    X, y = rows(DLMGPRegressor)
    with pytest.warns(UserWarning, match="beta='auto' has no effect with objective='fitc'"):
        auto = cheap(DLMGPRegressor, objective="fitc", beta="auto").fit(X, y)
    one = cheap(DLMGPRegressor, objective="fitc").fit(X, y)
    assert auto.beta_path_ == {} and auto.n_iter_ == one.n_iter_
    np.testing.assert_allclose(auto.predict(X), one.predict(X), rtol=1e-10)
