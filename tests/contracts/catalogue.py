"""One cheap instance of every estimator, for properties that all of them share."""

import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

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
    VecchiaGPClassifier,
    VecchiaGPRegressor,
)

#: Settings under which a fit of 30 rows takes milliseconds, by class.
CHEAP = {
    QSGPRegressor: {},
    QSGPClassifier: {},
    # A kernel, for by default four are compared.
    DLMGPRegressor: {"kernel": RBF() + WhiteKernel(0.1), "n_inducing": 10, "max_iter": 5},
    DLMGPClassifier: {"n_inducing": 10, "max_iter": 5},
    SWSGPRegressor: {"n_inducing": 12, "n_neighbors": 6},
    SWSGPClassifier: {"n_inducing": 12, "n_neighbors": 6},
    StateSpaceGPRegressor: {"max_iter": 3},
    StateSpaceGPClassifier: {"max_iter": 3},
    BayesianGPRegressor: {"optimizer": "map"},
    VecchiaGPRegressor: {"n_neighbors": 6, "n_inducing": 5},
    VecchiaGPClassifier: {"n_neighbors": 6, "n_inducing": 5},
}


def cheap(estimator_class, **params):
    """Return an unfitted estimator; `params` go before the cheap settings."""
    return estimator_class(**{"random_state": 0, **CHEAP.get(estimator_class, {}), **params})


def streaming(estimator_class):
    """The same, whose stream has few features."""
    few = {"n_basis": 64} if "n_basis" in estimator_class().get_params() else {}
    return cheap(estimator_class, **few)


def rows(estimator_class, n=20, *, seed=0, scale=1.0):
    """Return X (n, 1) and y (n,): `scale` times numbers, or labels "a" and "b"."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 5, (n, 1))
    y = np.sin(2 * X[:, 0]) + 0.2 * rng.standard_normal(n)
    return X, (
        scale * y if hasattr(estimator_class, "predict_interval") else np.where(y > 0, "a", "b")
    )
