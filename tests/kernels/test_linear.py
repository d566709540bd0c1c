"""Linear kernels far from zero."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

from skgp.kernels import ActiveDims, gram, gram_diag, gram_tile
from skgp.kernels.linear import FarDotProduct, at_origin

RNG = np.random.default_rng(0)
U, U_TEST = RNG.standard_normal((40, 3)), RNG.standard_normal((6, 3))
NOISE = 0.05


def by_weights(sigma_0, c, U, y, U_test):
    """Posterior of f = b + w'(c + u), b ~ N(0, sigma_0^2), w ~ N(0, I), from least squares.

    Unknown are the level b + w'c and w: c enters once, and no digits are lost.
    """
    n, d = U.shape
    prior = np.column_stack([np.zeros(d), np.eye(d)])
    level = np.append(1.0, -c)[None] / sigma_0
    rows = np.column_stack([np.ones(n), U]) / np.sqrt(NOISE)
    R = np.linalg.qr(np.concatenate([rows, prior, level]), mode="r")
    beta = np.linalg.solve(R, np.linalg.solve(R.T, rows.T @ y / np.sqrt(NOISE)))
    test = np.column_stack([np.ones(len(U_test)), U_test])
    root = np.linalg.solve(R.T, test.T)
    return test @ beta, (root**2).sum(0)


def by_gram(kernel, X, y, X_test):
    K = gram(kernel, X).numpy() + NOISE * np.eye(len(X))
    cross = gram(kernel, X_test, X).numpy()
    mean = cross @ np.linalg.solve(K, y)
    return mean, gram_diag(kernel, X_test).numpy() - (cross * np.linalg.solve(K, cross.T).T).sum(1)


@pytest.mark.parametrize("offset", [2e3, 1e6, 1e8])
def test_posterior_is_that_of_the_weights(offset):
    c = offset * np.array([1.0, -0.4, 0.7])
    y = U @ [1.0, 0.5, 0.0] + 0.2 * RNG.standard_normal(40)
    X, X_test = (torch.from_numpy(A + c) for A in (U, U_TEST))
    kernel = at_origin(DotProduct(1.3), X.numpy())
    assert type(kernel) is FarDotProduct
    mean, variance = by_gram(kernel, X, y, X_test)
    # Of u as it comes back from x; the level is lowered by a thousandth of its weight in the data.
    moved = [A.numpy() - c for A in (X, X_test)]
    expected = by_weights(1.3, c, moved[0], y, moved[1])
    np.testing.assert_allclose(mean, expected[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(variance, expected[1], rtol=1e-3)


def test_values_are_those_of_the_dot_product_where_the_level_is_not_lowered():
    X, Z = U + 5.0, U_TEST + 5.0
    kernel = FarDotProduct(0.7, origin=np.full(3, 5.2), level=np.inf)
    theta = torch.tensor(kernel.theta + 0.3, requires_grad=True)
    moved = DotProduct(0.7).clone_with_theta(kernel.theta + 0.3)
    X, Z = torch.from_numpy(X), torch.from_numpy(Z)
    K = gram(kernel, X, Z, theta)
    torch.testing.assert_close(K.detach(), torch.from_numpy(moved(X.numpy(), Z.numpy())))
    torch.testing.assert_close(gram_tile(kernel, X, Z, theta.detach()), K.detach())
    torch.testing.assert_close(gram_diag(kernel, X), torch.from_numpy(DotProduct(0.7).diag(X)))
    (gradient,) = torch.autograd.grad(K.sum(), theta)
    assert float(gradient[0]) == pytest.approx(2 * moved.sigma_0**2 * K.numel())


def test_only_linear_summands_far_from_zero_are_replaced():
    far, white = U + 1e5, WhiteKernel(0.1)
    near = DotProduct() + 1.0 * RBF() + white
    assert at_origin(near, U + 10.0) is near
    power, product = DotProduct() ** 2 + white, RBF() * DotProduct() + white
    assert at_origin(power, far) is power and at_origin(product, far) is product
    kernel = 2.0 * RBF() + ConstantKernel(3.0) * ActiveDims(DotProduct(0.5), [1]) + white
    placed = at_origin(kernel, far)
    assert type(placed.k1.k2.k2.kernel) is FarDotProduct
    assert repr(placed) == repr(kernel)
    np.testing.assert_array_equal(placed.theta, kernel.theta)
    assert clone(placed) == placed and placed.clone_with_theta(placed.theta + 1.0).n_dims == 5
    np.testing.assert_allclose(placed(far), kernel(far))
