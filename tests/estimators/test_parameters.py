"""Parameters that cannot be had together are refused; one without effect is reported."""

import warnings

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel

from skgp import (
    BayesianGPRegressor,
    DLMGPClassifier,
    DLMGPRegressor,
    QSGPClassifier,
    QSGPRegressor,
    StateSpaceGPClassifier,
    StateSpaceGPRegressor,
    SWSGPClassifier,
    SWSGPRegressor,
)
from tests.contracts.catalogue import CHEAP, cheap, rows

RELEVANCE, LAPLACE = {"basis": "relevance"}, {"likelihood": "laplace"}
FEW_NEIGHBORS = {"kernel": ConstantKernel(2.0), "n_neighbors": 8}
COUNTS, STUDENT_T = {"likelihood": "poisson"}, {"likelihood": "student_t"}
#: Estimator, parameters, and the message. What no value of a parameter by itself may be is
#: scikit-learn's to check: `tests.estimators.test_sklearn`.
REFUSED = [
    (QSGPRegressor, {"n_jobs": 0}, "n_jobs == 0"),
    (QSGPRegressor, {"kernel": WhiteKernel()}, "noise alone; add a signal"),
    (
        QSGPRegressor,
        {"solver": "cg", "covariance": "full"},
        "covariance='full' cannot be had from solver='cg'.* solver='cholesky'",
    ),
    (
        QSGPRegressor,
        {"solver": "sgd", "covariance": "samples"},
        "covariance='samples' cannot be had from solver='sgd'.* 'diagonal', 'chevron'",
    ),
    (
        QSGPRegressor,
        {"solver": "gauss-seidel", "basis": "inducing", "n_basis": 60},
        "solver='gauss-seidel' does not serve .* n_basis below",
    ),
    (
        QSGPRegressor,
        {"solver": "sgd", "early_stopping": True, "validation_fraction": 0.999},
        "validation_fraction=0.999 of 60 rows .* Lower it",
    ),
    (QSGPRegressor, RELEVANCE | {"solver": "cholesky"}, "'cholesky' cannot .*'relevance'.*='sgd'"),
    (QSGPRegressor, RELEVANCE | {"covariance": "diagonal"}, "cannot be had .*covariance='full'"),
    (QSGPRegressor, RELEVANCE | LAPLACE, "'laplace' cannot be had with basis='relevance'"),
    (QSGPRegressor, LAPLACE | {"solver": "sgd"}, "'sgd' cannot .*'laplace'.*='cholesky'"),
    (QSGPRegressor, LAPLACE | {"solver": "cg"}, "'cg' cannot be had with likelihood='laplace'"),
    (QSGPRegressor, LAPLACE | {"covariance": "samples"}, "cannot be had .* covariance='full'"),
    (
        QSGPRegressor,
        LAPLACE | {"kernel": DotProduct() + WhiteKernel(), "basis": "fourier"},
        'DotProduct.* basis "inducing"',
    ),
    (QSGPClassifier, {"kernel": DotProduct(), "basis": "fourier"}, "spectral density"),
    (
        QSGPClassifier,
        {"solver": "sgd", "covariance": "full"},
        "covariance='full' cannot be had from|partial_fit needs solver='newton'",
    ),
    (
        QSGPClassifier,
        {"solver": "sgd", "class_weight": "balanced"},
        "class_weight are not supported|partial_fit needs solver='newton'",
    ),
    (QSGPClassifier, RELEVANCE | {"solver": "sgd"}, "basis='relevance'"),
    (QSGPClassifier, RELEVANCE | {"covariance": "diagonal"}, "basis='relevance'"),
    (DLMGPRegressor, {"degrees_of_freedom": 3.0}, "degrees_of_freedom=3.0"),
    (DLMGPRegressor, COUNTS | {"degrees_of_freedom": 4.0}, "=4.0 .*'student_t'.*'poisson'"),
    (DLMGPRegressor, {"link": "softplus"}, "link='softplus' is that of .*poisson.*Leave"),
    (DLMGPRegressor, STUDENT_T | {"link": "softplus"}, "link='softplus'.*'student_t'"),
    (DLMGPRegressor, STUDENT_T | {"objective": "fitc"}, "objective='fitc' needs"),
    (DLMGPRegressor, COUNTS | {"objective": "square_loss"}, "needs .*'poisson'.*'log_loss' or"),
    (DLMGPClassifier, {"objective": "square_loss"}, "='square_loss' needs Gaussian.*'log_loss'"),
    (DLMGPClassifier, {"objective": "fitc"}, "='fitc' needs Gaussian noise.*DLMGPRegressor"),
    *(
        (make, {"projection": 3}, "=3 is more than the 2 columns of X; give 2")
        for make in (SWSGPRegressor, SWSGPClassifier)
    ),
    *(
        (make, FEW_NEIGHBORS, "same correlation.*add a part")
        for make in (SWSGPRegressor, SWSGPClassifier)
    ),
    (SWSGPRegressor, COUNTS | {"method": "kriging"}, "method='kriging' needs.*'poisson'"),
    *(
        (make, {"inducing": "learned"}, "inducing='learned' moves .* states.*Give n_inducing")
        for make in (StateSpaceGPRegressor, StateSpaceGPClassifier)
    ),
    (StateSpaceGPClassifier, {"kernel": DotProduct()}, "DotProduct.*Matern"),
    (
        StateSpaceGPRegressor,
        {"kernel": DotProduct() + WhiteKernel()},
        "DotProduct.*Matern.*ExpSineSquared",
    ),
    (StateSpaceGPRegressor, {"kernel": Matern(nu=0.7)}, "nu=0.7.*0.5, 1.5, 2.5"),
    (StateSpaceGPRegressor, {"dtype": "float32"}, 'is not for state-space.*Use dtype="float64"'),
    (StateSpaceGPRegressor, {"link": "softplus"}, "link='softplus' is that of.*'auto'.*Leave"),
    (StateSpaceGPRegressor, {"degrees_of_freedom": 3.0}, "=3.0 are those of.*'auto'"),
]


@pytest.mark.parametrize(("make", "params", "message"), REFUSED)
def test_parameters_that_cannot_be_are_named(make, params, message):
    X, y = rows(make, 60)
    if not make.__name__.startswith("StateSpace"):
        X = np.hstack([X, X[::-1] ** 2])
    y = np.rint(np.abs(y)) if params.get("likelihood") == "poisson" else y
    for method in ("fit", "partial_fit") if make.__name__.endswith("Classifier") else ("fit",):
        with pytest.raises(ValueError, match=message):
            getattr(make(**params), method)(X, y)


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
