"""VecchiaGPRegressor and VecchiaGPClassifier on a device: equal to the CPU."""

import pytest

from tests.devices.common import cases, check

CASES = cases(
    """
[VecchiaGPRegressor]
smooth2: kernel=matern32 n_neighbors=5
weighted: optimizer=None n_neighbors=5 n_inducing=8
smooth4: optimizer=None ordering=maximin n_inducing=8
"""
)


NUMBERS = cases(
    """
[VecchiaGPRegressor]
exposed: likelihood=poisson kernel=matern32 n_neighbors=5 n_inducing=8 max_iter=2
heavy tails: likelihood=student_t optimizer=None n_neighbors=5 n_inducing=0
"""
)


LABELS = cases(
    """
[VecchiaGPClassifier]
moons: kernel=matern32 n_neighbors=5 n_inducing=0
iris: optimizer=None n_neighbors=5 n_inducing=8
"""
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_routes_are_those_of_the_cpu(case, device):
    check(case, device, crossed=(3, 1))  # rows; factors that the first prediction makes


@pytest.mark.parametrize("case", NUMBERS, ids=str)
def test_numbers_are_those_of_the_cpu(case, device):
    # as of labels, with offsets; parameters of the noise
    check(case, device, crossed=(8, 5))


@pytest.mark.parametrize("case", LABELS, ids=str)
def test_labels_are_those_of_the_cpu(case, device):
    # rows; factors of the first prediction, whose triangular systems are solved on the host
    check(case, device, crossed=(8, 5))
