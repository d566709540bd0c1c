"""Gradients of kernel matrices, and covariances of many hyper-parameters at once."""

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

from skgp.kernels import ActiveDims, gram
from skgp.kernels.gradients import bilinear_gradient, weighted_gradient
from skgp.kernels.pairwise import PairwiseKernel
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


@pytest.mark.parametrize("budget", [SMALL, 1e9], ids=["tiles", "whole"])
@each_kernel()
def test_bilinear_gradient_equals_autograd(make_kernel, budget):
    kernel, X = make_kernel(), normal(N, N_INPUTS) + 3.0
    U, V = normal(C, N, seed=1), normal(C, N, seed=2)
    expected = by_autograd(kernel, X, X.clone(), U.T @ V)
    got = bilinear_gradient(kernel, X, U, V, memory_budget=budget)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("budget", [SMALL, 1e9], ids=["tiles", "whole"])
@each_kernel()
def test_weighted_gradient_equals_autograd(make_kernel, budget):
    kernel, X, Z = make_kernel(), normal(N, N_INPUTS), normal(P, N_INPUTS, seed=3)
    W = normal(N, P, seed=1)
    got = weighted_gradient(kernel, X, Z, W, memory_budget=budget)
    torch.testing.assert_close(got, by_autograd(kernel, X, Z, W), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_bilinear_gradient_closed_forms_at_another_theta(name, monkeypatch):
    """Without a graph: these expressions never reach autograd."""
    kernel, X = CLOSED_FORMS[name](), normal(N, N_INPUTS)
    U, V = normal(C, N, seed=1), normal(C, N, seed=2)
    theta = torch.as_tensor(kernel.theta) + 0.3
    expected = by_autograd(kernel, X, X.clone(), U.T @ V, theta)
    monkeypatch.setattr("skgp.kernels.gradients.gram", None)
    got = bilinear_gradient(kernel, X, U, V, theta)
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


KERNELS = {
    "rbf": 2.0 * RBF(0.7),
    "ard": ConstantKernel(2.0, "fixed") * RBF([0.7, 1.3]),
    "matern12": 0.5 * Matern(0.7, nu=0.5) + ConstantKernel(0.3),
    "matern32": Matern([0.7, 2.0], nu=1.5) * RBF(1.5, "fixed"),
    "matern52": 1.5 * (Matern(0.9, nu=2.5) + 0.4 * RBF(2.0)),
    "columns": ActiveDims(RBF(0.8), [1]) * ActiveDims(Matern([0.9], nu=1.5), [0]) + RBF([1.0, 2.0]),
    "autograd": RationalQuadratic(0.8, 1.4) + DotProduct(0.5) + ActiveDims(ExpSineSquared(), 0),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture
def X(rng):
    return torch.tensor(rng.standard_normal((9, 2)))


def batch(kernel, rng, size=4):
    return torch.tensor(kernel.theta + 0.4 * rng.standard_normal((size, kernel.n_dims)))


@each_kernel
def test_pairwise_values_are_those_of_each_theta(name, X, rng):
    kernel = KERNELS[name]
    theta = batch(kernel, rng)
    K, _ = PairwiseKernel(kernel, X)(theta)
    expected = torch.stack([gram(kernel, X, X, each) for each in theta])
    torch.testing.assert_close(K, expected, rtol=1e-9, atol=1e-12)


@each_kernel
def test_pairwise_pullback_equals_autograd(name, X, rng):
    kernel = KERNELS[name]
    theta = batch(kernel, rng)
    W = torch.tensor(rng.standard_normal((len(theta), 9, 9)))
    W = W + W.mT
    _, pull = PairwiseKernel(kernel, X)(theta)
    leaf = theta.clone().requires_grad_()
    total = sum((w * gram(kernel, X, None, each)).sum() for w, each in zip(W, leaf, strict=True))
    (expected,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(pull(W), expected, rtol=1e-7, atol=1e-8)


def test_pairwise_rows_at_the_end_of_the_range_are_infinitely_far():
    X = torch.tensor([[0.0, 1.0], [1e300, 1.0], [0.5, -1e200]], dtype=torch.float64)
    kernel = 2.0 * Matern([1.0, 1.0], nu=1.5)
    K, pull = PairwiseKernel(kernel, X)(torch.tensor(kernel.theta)[None])
    np.testing.assert_allclose(K[0].numpy(), 2 * np.eye(3))
    assert pull(torch.ones_like(K)).isfinite().all()
