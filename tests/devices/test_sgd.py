"""Stochastic gradients on a device: equal to the CPU, transfers as the logarithm of iterations."""

import pytest

from tests.devices.common import PRETENDED, cases, check
from tests.golden.cases import GoldenCase

CASES = cases(
    """
[QSGPRegressor]
smooth2: basis=fourier n_basis=60 solver=sgd max_iter=20 batch_size=20 n_support=10
smooth2: basis=fourier n_basis=60 solver=sgd max_iter=20 covariance=chevron n_dense_columns=5
smooth2: basis=inducing n_basis=20 solver=sgd max_iter=20 batch_size=20
smooth2: basis=relevance solver=sgd n_basis=30 max_iter=20
[QSGPClassifier]
moons: solver=sgd n_basis=60 max_iter=20 batch_size=20
iris: solver=sgd n_basis=60 max_iter=20 bound=strict
moons: solver=sgd basis=inducing n_basis=20 max_iter=20 likelihood=probit
"""
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.estimator}-{case}")
def test_solver_is_that_of_the_cpu(case, device):
    check(case, device)


@pytest.mark.parametrize("name", ["QSGPRegressor-smooth2", "QSGPClassifier-moons"])
def test_transfers_grow_as_the_logarithm_of_the_iterations(name):
    estimator, problem = name.split("-")

    def crossings(max_iter: int) -> dict[str, int]:
        text = f"{problem}: basis=fourier n_basis=60 solver=sgd optimizer=None max_iter={max_iter}"
        case: GoldenCase = cases(f"[{estimator}]\n{text}\n")[0]
        return check(case, PRETENDED).fit

    few, many = crossings(8), crossings(64)
    assert many["operations"] > 4 * few["operations"]
    for count in ("to_device", "to_host", "synchronisations"):
        assert many[count] - few[count] <= 4 + 1  # looks: 16, 32, 64, and room for two
