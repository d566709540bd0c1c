"""The scaled distance of a kernel expression, where it has a single one."""

import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
)

from skgp.kernels import ActiveDims
from skgp.kernels.scales import inverse_length_scales


class Subclass(RBF):
    """May override anything."""


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (2.0 * RBF(0.5) + Matern(3.0) + ConstantKernel(0.1), [2.0, 2.0]),
        (RBF([1.0, 2.0]) * RationalQuadratic(1.0), None),
        (RBF([1.0, 2.0]) * RBF([2.0, 4.0]), [1.0, 0.5]),
        ((1.0 * RBF([1.0, 4.0])) ** 2, [1.0, 0.25]),
        (ActiveDims(RBF(1.0), [0, 1]), None),
        (RBF(1.0) * ExpSineSquared(), None),
        (RBF(1.0) ** -1, None),
        (2.0 * ConstantKernel(2.0), [0.0, 0.0]),
    ],
    ids=str,
)
def test_inverse_length_scales_are_those_of_the_only_distance(kernel, expected):
    found = inverse_length_scales(kernel, torch.zeros(1, 2, dtype=torch.float64))
    assert (None if found is None else found.tolist()) == expected


def test_inverse_length_scales_of_a_subclass_are_not_guessed():
    assert inverse_length_scales(Subclass(1.0), torch.zeros(1, 2)) is None
