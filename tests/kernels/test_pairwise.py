"""Covariances at many thetas and their pullback, against each theta and autograd."""

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

from skgp.kernels import ActiveDims, gram, pairwise
from skgp.kernels.pairwise import PairwiseKernel, profile_of_few, values_of_few

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


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, np.inf])
def test_exponentials_of_both_libraries_are_equal(nu, monkeypatch):
    s = np.linspace(0, 30, 100)
    found = []
    for most in (0, 1000):  # torch's, NumPy's
        monkeypatch.setattr(pairwise, "EXPONENTIALS", most)
        found.append([*profile_of_few(nu, s), values_of_few(nu, s.copy())])
    np.testing.assert_allclose(*found, rtol=1e-14)
    np.testing.assert_allclose(found[0][0], found[0][2], rtol=1e-14)
