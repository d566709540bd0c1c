"""Counts of any size by default: searches and posteriors begin at the values they stand for."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF

from skgp import DLMGPRegressor, SWSGPRegressor
from skgp.likelihoods import Poisson
from skgp.linalg import NumericalWarning
from tests.covering import slow_case


def problem(rate, n_columns, n=150, seed=0):
    """Inputs, rates, and counts of these at the first n inputs."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (2 * n, n_columns))
    rate = rate * np.exp(np.sin(2 * X[:, 0]) + 0.5 * X[:, -1])
    return X, rate, rng.poisson(rate[:n]).astype(float)


@pytest.mark.parametrize(
    ("make", "link", "rate", "error"),
    [
        (DLMGPRegressor, "exp", 1e5, 0.02),
        slow_case(DLMGPRegressor, "softplus", 1e5, 0.1),
        slow_case(SWSGPRegressor, "exp", 1e5, 0.02),
        (SWSGPRegressor, "softplus", 1e3, 0.1),
    ],
)
def test_large_counts_are_predicted_as_smooth_functions_are(make, link, rate, error):
    X, rate, y = problem(rate, 2)
    model = make(likelihood="poisson", link=link, random_state=0).fit(X[:150], y)
    assert np.sqrt(np.mean((model.predict(X[150:]) / rate[150:] - 1) ** 2)) < error


class FromThePrior(Poisson):
    """Counts whose steps begin at the prior."""

    has_link = False

    def at(self, offset):
        return self


def test_a_posterior_that_the_steps_did_not_reach_is_told():
    X, _, y = problem(1e6, 1)
    model = SWSGPRegressor(150.0 * RBF(1.0), likelihood=FromThePrior(), optimizer=None)
    with pytest.warns(NumericalWarning, match="natural-gradient steps ended short.*Raise max_iter"):
        model.fit(X[:150], y)
