"""Gradients of kernel matrices, and covariances of many hyper-parameters at once."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, RationalQuadratic

from skgp.kernels import gram
from skgp.kernels.gradients import bilinear_gradient, weighted_gradient
from skgp.linalg.runtime import memory_limit
from tests.contracts.kernels import ARD, N_INPUTS, each_kernel

N, P, C = 37, 23, 3
SMALL = 8 * 8 * 11**2  # bytes: tiles of side 11, of which 37 and 23 are no multiples
CLOSED_FORMS = {
    "rbf": lambda: 1.7 * RBF(ARD),
    "isotropic": lambda: 1.7 * RBF(1.1),
    "matern12": lambda: 2.0 * Matern(ARD, nu=0.5),
    "matern32": lambda: 0.4 * (3.0 * Matern(ARD, nu=1.5)),
    "matern52": lambda: Matern(ARD, nu=2.5) * 0.7,
    "rational-quadratic": lambda: 1.3 * RationalQuadratic(1.2, 0.6),
    "fixed-alpha": lambda: RationalQuadratic(1.2, 0.6, alpha_bounds="fixed") + 2.0 * RBF(0.4),
    "fixed-length": lambda: 1.3 * Matern(ARD, "fixed", nu=1.5),
}


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def by_autograd(kernel, X, Z, W, theta=None):
    theta = torch.as_tensor(kernel.theta) if theta is None else theta.clone()
    if not len(theta):
        return theta
    theta.requires_grad_()
    form = (W * gram(kernel, X, Z, theta)).sum()
    return torch.autograd.grad(form, theta)[0]


@each_kernel()
def test_bilinear_gradient_equals_autograd(make_kernel):
    kernel, X = make_kernel(), normal(N, N_INPUTS) + 3.0
    U, V = normal(C, N, seed=1), normal(C, N, seed=2)
    expected = by_autograd(kernel, X, X.clone(), U.T @ V)
    for budget in (SMALL, 1e9):  # in tiles, and whole
        with memory_limit(budget):
            got = bilinear_gradient(kernel, X, U, V)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@each_kernel()
def test_weighted_gradient_equals_autograd(make_kernel):
    kernel, X, Z = make_kernel(), normal(N, N_INPUTS), normal(P, N_INPUTS, seed=3)
    W = normal(N, P, seed=1)
    expected = by_autograd(kernel, X, Z, W)
    for budget in (SMALL, 1e9):
        with memory_limit(budget):
            got = weighted_gradient(kernel, X, Z, W)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_bilinear_gradient_in_float32_is_within_its_rounding(name):
    kernel, X = CLOSED_FORMS[name](), normal(N, N_INPUTS)
    U, V = normal(C, N, seed=1), normal(C, N, seed=2)
    expected = bilinear_gradient(kernel, X, U, V)
    got = bilinear_gradient(kernel, X.float(), U.float(), V.float())
    assert got.dtype == torch.float64
    size = bilinear_gradient(kernel, X, U.abs(), V.abs()).abs() + 1.0
    assert bool(((got - expected).abs() < 1e-5 * size).all())


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_bilinear_gradient_with_repeated_rows_is_finite(name):
    """At distance 0 no length scale matters, though the slope of Matern 1/2 is infinite there."""
    kernel, X = CLOSED_FORMS[name](), normal(N, N_INPUTS)
    X[N // 2 :] = X[: N - N // 2].clone()
    U, V = normal(C, N, seed=1), normal(C, N, seed=2)
    expected = by_autograd(kernel, X, X.clone(), U.T @ V)
    torch.testing.assert_close(bilinear_gradient(kernel, X, U, V), expected, rtol=1e-9, atol=1e-9)


def test_gradients_of_a_kernel_without_free_hyperparameters_are_empty():
    kernel = ConstantKernel(2.0, "fixed") * RBF(1.0, "fixed")
    X, U = normal(N, N_INPUTS), normal(C, N)
    assert bilinear_gradient(kernel, X, U, U).shape == (0,)


def test_gradients_refuse_a_theta_of_another_size():
    X, U = normal(N, N_INPUTS), normal(C, N)
    with pytest.raises(ValueError, match="theta must have shape"):
        bilinear_gradient(RBF(1.0), X, U, U, torch.zeros(2))
