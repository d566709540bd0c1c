"""QSGPRegressor and QSGPClassifier on a device: equal to the CPU, few transfers."""

import pytest

from tests.devices.common import cases, check

CASES = cases(
    """
[QSGPRegressor]
smooth4: basis=fourier n_basis=40 feature_map=hadamard
smooth2: basis=fourier n_basis=40 kernel=rational
"""
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.estimator}-{case}")
def test_routes_are_those_of_the_cpu(case, device):
    check(case, device)
