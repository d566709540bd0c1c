"""Stochastic gradients on a device: equal to the CPU, transfers as the logarithm of iterations."""

import pytest

from tests.devices.common import cases, check, fit_counts

CASES = cases(
    """
[QSGPRegressor]
smooth2: basis=fourier n_basis=40 solver=sgd max_iter=12 n_support=10 covariance=chevron
smooth2: basis=inducing n_basis=20 solver=sgd max_iter=12 batch_size=20 kernel=rbf
smooth2: basis=relevance solver=sgd n_basis=30 max_iter=8 optimizer=None
[QSGPClassifier]
iris: solver=sgd n_basis=40 max_iter=12 bound=strict kernel=rbf
moons: solver=sgd basis=inducing n_basis=20 max_iter=12 batch_size=20 likelihood=probit kernel=rbf
"""
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.estimator}-{case}")
def test_solver_is_that_of_the_cpu(case, device):
    check(case, device, crossed=(2, 1))


@pytest.mark.parametrize("name", ["QSGPRegressor-smooth2", "QSGPClassifier-moons"])
def test_transfers_grow_as_the_logarithm_of_the_iterations(name):
    estimator, problem = name.split("-")
    text = f"[{estimator}]\n{problem}: basis=fourier n_basis=60 solver=sgd optimizer=None"
    few, many = (fit_counts(cases(text)[0], max_iter=steps) for steps in (8, 64))
    assert many["operations"] > 4 * few["operations"]
    for count in ("to_device", "to_host", "synchronisations"):
        assert many[count] - few[count] <= 4 + 1  # looks: 16, 32, 64, and room for two
