"""Minibatches of the state-space estimators."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import Matern

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor

SIGNAL = 1.0 * Matern(1.0, nu=1.5)


@pytest.fixture
def series(rng):
    x = rng.uniform(0, 10, 400)[:, None]
    return x, np.sin(2 * x[:, 0])


def test_minibatches_learn_what_all_rows_teach(series, rng):
    x, f = series
    y = f + 0.2 * rng.standard_normal(400)
    options = {"kernel": SIGNAL, "n_inducing": 25, "random_state": 0}
    model = StateSpaceGPRegressor(batch_size=50, max_iter=40, **options).fit(x, y)
    whole = StateSpaceGPRegressor(**options).fit(x, y)
    assert model.n_iter_ == 40
    assert model.log_marginal_likelihood_value_ > whole.log_marginal_likelihood_value_ - 3
    assert np.sqrt(np.mean((model.predict(x) - f) ** 2)) < 0.07


def test_minibatches_of_classes(series, rng):
    x, f = (column[:120] for column in series)
    labels = np.digitize(f + 0.1 * rng.standard_normal(120), [-0.5, 0.5])
    options = {"n_inducing": 20, "batch_size": 30, "max_iter": 10, "random_state": 0}
    kernel = 4.0 * Matern(1.0, "fixed", nu=1.5)
    model = StateSpaceGPClassifier(kernel, **options).fit(x, labels)
    assert model.score(x, labels) > 0.85


def test_minibatches_need_inducing_states(series):
    with pytest.raises(ValueError, match=r"batch_size=50 is for inducing states, and n_inducing=N"):
        StateSpaceGPRegressor(batch_size=50).fit(*series)
    X = np.column_stack([series[0], series[0] ** 2])
    with pytest.warns(UserWarning, match="batch_size"):
        StateSpaceGPRegressor(n_inducing=8, batch_size=50, max_iter=2).fit(X, series[1])
