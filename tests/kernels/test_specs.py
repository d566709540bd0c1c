"""Kernels that scikit-learn lacks."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    WhiteKernel,
)

from skgp.kernels import ActiveDims, Cosine, gram, gram_diag, gram_tile
from skgp.kernels.scales import FarDotProduct, at_origin
from tests.reference.kernels import naive_gram

SPECS = [
    ActiveDims(2.0 * RBF([0.7, 1.5]), [2, 0]),
    ActiveDims(Matern(0.9, nu=0.5) + DotProduct(0.4), (1,)),
    ActiveDims(ConstantKernel(0.5, "fixed") * ExpSineSquared(0.8, 2.0), 1),
    ActiveDims(ActiveDims(RBF(), [1]), np.array([0, 2])),
    ActiveDims(Cosine(1.3), [0]),
    1.5 * ActiveDims(Cosine(2.1, "fixed"), [2]) * RBF() + ActiveDims(RBF(), [1]) ** 2,
]
each_spec = pytest.mark.parametrize("kernel", SPECS, ids=repr)


@pytest.fixture
def X():
    return np.random.default_rng(0).standard_normal((5, 3))


@each_spec
def test_spec_equals_naive_loops(kernel, X):
    Z = X[:2] + 0.3
    np.testing.assert_allclose(kernel(X), naive_gram(kernel, X), atol=1e-12)
    np.testing.assert_allclose(kernel(X, Z), naive_gram(kernel, X, Z), atol=1e-12)
    np.testing.assert_allclose(kernel.diag(X), np.diag(kernel(X)), atol=1e-12)


@each_spec
def test_spec_gradient_equals_differences(kernel, X):
    K, gradient = kernel(X, eval_gradient=True)
    assert gradient.shape == (5, 5, kernel.n_dims)
    np.testing.assert_array_equal(K, kernel(X))
    step = 1e-6
    for i in range(kernel.n_dims):
        shift = step * np.eye(kernel.n_dims)[i]
        high, low = (kernel.clone_with_theta(kernel.theta + s)(X) for s in (shift, -shift))
        np.testing.assert_allclose(gradient[..., i], (high - low) / (2 * step), atol=1e-8)


@each_spec
def test_spec_is_cloned_pickled_and_compared(kernel):
    for copy in (clone(kernel), pickle.loads(pickle.dumps(kernel))):
        assert copy == kernel and copy is not kernel
        assert repr(copy) == repr(kernel)
    if kernel.n_dims:
        other = kernel.clone_with_theta(kernel.theta + 0.5)
        assert other != kernel
        np.testing.assert_allclose(other.theta, kernel.theta + 0.5)
    assert kernel.bounds.reshape(-1, 2).shape == (kernel.n_dims, 2)


def test_active_dims_parameters_are_those_of_the_kernel_within():
    kernel = ActiveDims(2.0 * RBF([1.0, 3.0], (0.1, 9.0)), [0, 2])
    names = [h.name for h in kernel.hyperparameters]
    assert names == ["kernel__k1__constant_value", "kernel__k2__length_scale"]
    assert [h.n_elements for h in kernel.hyperparameters] == [1, 2]
    np.testing.assert_allclose(np.exp(kernel.theta), [2, 1, 3])
    np.testing.assert_allclose(np.exp(kernel.bounds[1:]), [[0.1, 9.0]] * 2)
    kernel.set_params(kernel__k2__length_scale=[4.0, 5.0], dims=[1, 2])
    assert kernel.get_params()["kernel__k2__length_scale"] == [4.0, 5.0]
    np.testing.assert_allclose(np.exp(kernel.theta), [2, 4, 5])
    assert set(kernel.get_params(deep=False)) == {"kernel", "dims"}
    assert repr(kernel) == "ActiveDims(1.41**2 * RBF(length_scale=[4, 5]), dims=[1, 2])"
    fixed = ActiveDims(RBF(1.0, "fixed"), [0])
    assert fixed.hyperparameters[0].fixed and fixed.n_dims == 0


def test_active_dims_differ_by_kernel_and_columns():
    kernel = ActiveDims(RBF(), [0, 1])
    assert kernel == ActiveDims(RBF(), (0, 1))
    assert kernel != ActiveDims(RBF(), [1, 0])
    assert kernel != ActiveDims(RBF(2.0), [0, 1])
    assert kernel != RBF()


@pytest.mark.parametrize("dims", [[], [0, 0], [-1], [0.5], [[0, 1]], "ab", None])
def test_active_dims_refuses_bad_columns(dims):
    with pytest.raises(ValueError, match="dims must be"):
        ActiveDims(RBF(), dims)


def test_active_dims_refuses_what_is_no_kernel_and_narrow_inputs(X):
    with pytest.raises(TypeError, match="kernel must be"):
        ActiveDims("rbf", [0])
    with pytest.raises(ValueError, match="at least 4 columns, X has 3"):
        ActiveDims(RBF(), [0, 3])(X)


def test_cosine_refuses_several_columns_and_a_gradient_between_two_sets(X):
    with pytest.raises(ValueError, match=r"one column, X has 3.*ActiveDims\(Cosine"):
        Cosine()(X)
    with pytest.raises(ValueError, match="Y is None"):
        Cosine()(X[:, :1], X[:, :1], eval_gradient=True)
    assert Cosine().is_stationary()
    assert [h.name for h in Cosine().hyperparameters] == ["period"]


def regression_data():
    rng = np.random.default_rng(1)
    X = rng.uniform(-3, 3, (60, 3))
    y = np.sin(2 * np.pi * X[:, 0] / 1.5) + X[:, 1] ** 2 / 3 + 0.05 * rng.standard_normal(60)
    return X, y


def test_specs_are_optimised_by_scikit_learn():
    X, y = regression_data()
    kernel = (
        ActiveDims(Cosine(1.47, (1.4, 1.6)), [0])
        + ActiveDims(2.0 * RBF(2.0, (0.5, 10.0)), [1])
        + WhiteKernel(0.01)
    )
    model = GaussianProcessRegressor(kernel).fit(X, y)
    assert model.kernel_.k1.k1.kernel.period == pytest.approx(1.5, abs=0.01)
    assert model.score(*regression_data()) > 0.99
    assert kernel.k1.k1.kernel.period == 1.47
    # At the start, where the noise is not so small that differences of the likelihood drown.
    theta = kernel.theta
    _, gradient = model.log_marginal_likelihood(theta, eval_gradient=True)
    value, step = model.log_marginal_likelihood, 1e-5
    differences = [
        (value(theta + shift) - value(theta - shift)) / (2 * step)
        for shift in step * np.eye(len(theta))
    ]
    np.testing.assert_allclose(gradient, differences, rtol=1e-5)


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
