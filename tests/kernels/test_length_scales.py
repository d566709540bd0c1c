"""Length scales of expressions: those of their parts where these have some, else their likeness."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    RationalQuadratic,
)

import skgp.kernels.scales as module
from skgp.kernels import ActiveDims
from skgp.kernels.scales import length_scales


@pytest.fixture
def X(rng):
    return torch.tensor(rng.standard_normal((2000, 2)))


@pytest.mark.parametrize("amplitude", [1.0, 7.0])
def test_length_scales_of_an_rbf_are_its_own(X, amplitude):
    kernel = ConstantKernel(amplitude) * RBF([0.5, 20.0])
    found = length_scales(kernel, X)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.float64
    np.testing.assert_allclose(found, [0.5, 20.0], rtol=1e-9)


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


def test_length_scales_look_at_few_rows(X, monkeypatch):
    shapes = []
    before = module.gram

    def watched(kernel, rows, moved):
        shapes.append(tuple(moved.shape))
        return before(kernel, rows, moved)

    monkeypatch.setattr(module, "gram", watched)
    length_scales(RBF(0.5), X)
    assert shapes == [(16, 2, 2)]


def test_length_scales_are_not_differentiable_and_leave_the_rows_alone(X):
    rows = X.clone().requires_grad_()
    assert not length_scales(RBF(0.5), rows).requires_grad
    assert torch.equal(rows, X)
