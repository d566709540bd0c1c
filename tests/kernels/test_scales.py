"""Amplitude, length scales and distance of kernel expressions; spread of inputs."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
)

from skgp.kernels import ActiveDims
from skgp.kernels.scales import (
    amplitude_range,
    inverse_length_scales,
    length_scales,
    scale_amplitude,
)

C = ConstantKernel
SCALABLE = [
    C(2.0) * RBF(0.7),
    RBF(0.7) * C(2.0),
    C(2.0) * RBF(0.7) + Matern(1.0) * C(0.5),
    C(2.0) * (RBF(0.7) + Matern(1.0)),
    C(3.0, "fixed") * (C(2.0) * RBF(0.7)),
    C(3.0) + C(2.0) * RBF(0.7),
]
FIXED = [
    RBF(0.7),
    C(2.0, "fixed") * RBF(0.7),
    C(2.0) * RBF(0.7) + Matern(1.0),
    (C(2.0) * RBF(0.7)) ** 2,
]


@pytest.mark.parametrize("kernel", SCALABLE)
@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_scaled_kernel_is_the_kernel_times_the_factor(kernel, factor):
    X = np.random.default_rng(0).normal(size=(5, 2))
    before = kernel.theta.copy()
    scaled = scale_amplitude(kernel, factor)
    np.testing.assert_allclose(scaled(X), factor * kernel(X), rtol=1e-12)
    assert [h.name for h in scaled.hyperparameters] == [h.name for h in kernel.hyperparameters]
    np.testing.assert_array_equal(kernel.theta, before)


@pytest.mark.parametrize("kernel", FIXED)
def test_kernel_without_a_free_factor_keeps_its_amplitude(kernel):
    assert amplitude_range(kernel) == (1.0, 1.0)
    assert scale_amplitude(kernel, 1.0) is kernel
    with pytest.raises(ValueError, match="factor=2.0 takes .* out of the bounds"):
        scale_amplitude(kernel, 2.0)


def test_range_is_that_of_the_bounds():
    kernel = C(2.0, (1.0, 10.0)) * RBF() + C(4.0, (0.1, 8.0)) * RBF()
    assert amplitude_range(kernel) == (0.5, 2.0)
    with pytest.raises(ValueError, match="may lie between 0.5 and 2"):
        scale_amplitude(kernel, 3.0)


@pytest.fixture
def X(rng):
    return torch.tensor(rng.standard_normal((2000, 2)))


@pytest.mark.parametrize(
    ("kernel", "scale"),
    [(RationalQuadratic(0.8, alpha=50.0), 0.8), (Matern(0.8, nu=2.5), 0.8 * (3 / 5) ** 0.5)],
)
def test_length_scales_of_smooth_kernels_are_their_curvature(X, kernel, scale):
    """k = 1 - r^2 / (2 l^2) near 0."""
    np.testing.assert_allclose(length_scales(kernel, X), scale, rtol=0.05)


def test_length_scales_do_not_depend_on_units_or_origin(X):
    scale = length_scales(Matern([0.5, 2.0], nu=1.5), X)
    moved = length_scales(Matern([500.0, 2.0], nu=1.5), X * torch.tensor([1000.0, 1.0]) + 1e3)
    np.testing.assert_allclose(moved, scale.numpy() * [1000.0, 1.0], rtol=1e-6)


def test_length_scales_of_a_linear_kernel_are_finite_at_the_origin(X):
    rows = X.clone()
    rows[0] = 0.0
    scale = length_scales(DotProduct(0.0), rows)
    assert scale.isfinite().all() and (scale > 0).all()


def test_length_scales_of_ignored_columns_are_great(X):
    scale = length_scales(ActiveDims(RBF(0.5), [1]), X)
    np.testing.assert_allclose(scale, [0.5e6, 0.5], rtol=1e-9)
    constant = torch.full((len(X),), 0.1, dtype=torch.float64)  # its spread is rounding
    scale = length_scales(RBF([0.5, 1e-3]), torch.stack([X[:, 0], constant], dim=1))
    assert scale[0] == pytest.approx(0.5) and scale[1] > 0


def test_length_scales_of_a_constant_kernel_are_one(X):
    np.testing.assert_array_equal(length_scales(ConstantKernel(2.0), X), [1.0, 1.0])


def test_length_scales_of_one_row_are_those_of_the_kernel(X):
    np.testing.assert_allclose(length_scales(RBF([0.5, 20.0]), X[:1]), [0.5, 20.0], rtol=1e-9)


def test_length_scales_are_not_differentiable_and_leave_the_rows_alone(X):
    rows = X.clone().requires_grad_()
    assert not length_scales(RBF(0.5), rows).requires_grad
    assert torch.equal(rows, X)


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
