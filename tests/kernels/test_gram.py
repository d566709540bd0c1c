"""The covariance reading against scikit-learn, naive loops and itself."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Kernel,
    Matern,
    StationaryKernelMixin,
    WhiteKernel,
)

from skgp.kernels import ActiveDims, Cosine, gram, gram_diag, register_kernel
from tests.contracts.kernels import ARD, N_INPUTS, each_kernel
from tests.reference.kernels import naive_gram


def inputs(n, seed=0, d=N_INPUTS):
    """Standard normal rows, the third a copy of the first."""
    X = np.random.default_rng(seed).standard_normal((n, d))
    if n > 2:
        X[2] = X[0]
    return X


def jacobian(kernel, X, theta, **options):
    """K and its derivatives, shapes (n, n) and (n, n, n_dims), one backward pass an entry."""
    theta = torch.tensor(theta, requires_grad=True)
    K = gram(kernel, torch.from_numpy(X), theta=theta, **options)
    rows = [torch.autograd.grad(k, theta, retain_graph=True)[0] for k in K.flatten()]
    return K.detach().numpy(), torch.stack(rows).reshape(*K.shape, -1).numpy()


@each_kernel()
def test_gram_equals_scikit_learn_in_value_and_gradient(make_kernel):
    kernel, X = make_kernel(), inputs(5)
    K, gradient = kernel(X, eval_gradient=True)
    ours, our_gradient = jacobian(kernel, X, kernel.theta)
    tolerance = 1e-13 * kernel.diag(X).max()
    np.testing.assert_allclose(ours, K, rtol=0, atol=tolerance)
    np.testing.assert_allclose(our_gradient, gradient, rtol=0, atol=tolerance)
    theta = kernel.theta + np.linspace(-0.3, 0.4, kernel.n_dims)
    K, gradient = kernel.clone_with_theta(theta)(X, eval_gradient=True)
    ours, our_gradient = jacobian(kernel, X, theta)
    np.testing.assert_allclose(ours, K, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(our_gradient, gradient, rtol=1e-12, atol=1e-12)


@each_kernel()
def test_gram_equals_naive_loops_far_from_the_origin(make_kernel):
    kernel = make_kernel()
    # Multiples of 2^-20 survive the shift unrounded: both grams are of the same points.
    X = np.round(inputs(8) * 2**20) / 2**20 + 100
    Z = np.round(inputs(5, seed=1) * 2**20) / 2**20 + 100
    K = gram(kernel, torch.from_numpy(X), torch.from_numpy(Z)).numpy()
    tolerance = 1e-13 * kernel.diag(X).max()
    np.testing.assert_allclose(K, naive_gram(kernel, X, Z), rtol=0, atol=tolerance)


@each_kernel()
def test_gram_of_a_batch_is_the_gram_of_each_member(make_kernel):
    kernel = make_kernel()
    X = torch.from_numpy(np.stack([inputs(4, seed=s) for s in range(6)]).reshape(2, 3, 4, -1))
    Z = torch.from_numpy(np.stack([inputs(5, seed=s) for s in range(10, 13)]))
    K = gram(kernel, X, Z)  # batches (2, 3) and (3,)
    assert K.shape == (2, 3, 4, 5)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(K[i, j], gram(kernel, X[i, j], Z[j]), rtol=0, atol=1e-13)
    torch.testing.assert_close(gram(kernel, X)[1, 2], gram(kernel, X[1, 2]), rtol=0, atol=1e-13)


@each_kernel()
def test_gram_diag_is_the_diagonal_of_gram(make_kernel):
    kernel = make_kernel()
    X = torch.from_numpy(np.stack([inputs(4, seed=s) for s in range(2)]))
    theta = torch.tensor(kernel.theta, requires_grad=True)
    diagonal = gram_diag(kernel, X, theta)
    expected = gram(kernel, X, theta=theta).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, expected, rtol=1e-12, atol=1e-12)
    weights = torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
    slopes = [
        # A stationary kernel's diagonal may not depend on theta at all; the 0 keeps the graph.
        torch.autograd.grad((weights * values).sum() + 0 * theta.sum(), theta)[0]
        for values in (diagonal, expected)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@each_kernel()
def test_gram_gradient_in_the_inputs_equals_differences(make_kernel):
    kernel = make_kernel()
    X, Z = (torch.from_numpy(inputs(n, seed=n)[:2]).requires_grad_() for n in (4, 5))
    for method in ("direct", "expand"):
        options = {"fast_mode": True}
        assert torch.autograd.gradcheck(
            lambda A, B, how=method: gram(kernel, A, B, method=how), (X, Z), **options
        )
        # The symmetric gram moves both of its arguments at once.
        assert torch.autograd.gradcheck(
            lambda A, how=method: gram(kernel, A, method=how), (X,), **options
        )


@each_kernel()
def test_gram_gradients_are_finite_for_duplicated_rows(make_kernel):
    kernel = make_kernel()
    X = torch.from_numpy(inputs(5)).requires_grad_()
    theta = torch.tensor(kernel.theta, requires_grad=True)
    for Z, method in itertools.product((None, X), ("direct", "expand")):
        K = gram(kernel, X, Z, theta, method=method)
        for slope in torch.autograd.grad(K.square().sum(), (X, theta)):
            assert torch.isfinite(slope).all()


def test_gram_gradient_is_summed_over_broadcast_batches():
    kernel = Matern(ARD, nu=2.5)
    X = torch.from_numpy(np.stack([inputs(3, seed=s)[:2] for s in range(3)])).requires_grad_()
    Z = torch.from_numpy(inputs(3, seed=9)[:2]).requires_grad_()
    assert torch.autograd.gradcheck(lambda A, B: gram(kernel, A, B), (X, Z))
    assert torch.autograd.gradcheck(lambda A, B: gram(kernel, A, B), (Z, X))


def test_gram_by_expansion_has_an_exact_diagonal():
    K = gram(1.5 * Matern(ARD, nu=0.5), torch.from_numpy(inputs(30)), method="expand")
    assert (K.diagonal() == 1.5).all()


def test_matern12_is_exact_between_equal_rows():
    kernel = ConstantKernel(2.0) * Matern(ARD, nu=0.5)
    X = torch.from_numpy(inputs(5) + 100)
    assert gram(kernel, X)[0, 2] == 2.0
    assert gram(kernel, X, X.clone())[0, 2] == 2.0


def test_matern12_gradient_keeps_its_digits_between_near_rows():
    X = inputs(6)
    X[3] = X[1] + 1e-9
    kernel = Matern(ARD, nu=0.5)
    gradient = kernel(X, eval_gradient=True)[1][1, 3]
    ours = jacobian(kernel, X, kernel.theta)[1][1, 3]
    np.testing.assert_allclose(ours, gradient, rtol=1e-5, atol=0)


@pytest.mark.parametrize("nu", [1.5, 2.5, np.inf])
def test_gram_second_derivatives_equal_differences(nu):
    kernel, X = 2.0 * Matern(ARD, nu=nu), torch.from_numpy(inputs(4))
    theta = torch.tensor(kernel.theta, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: gram(kernel, X, theta=t), (theta,), atol=1e-6)


@each_kernel()
def test_gram_by_expansion_is_close_to_direct(make_kernel):
    kernel, X, Z = make_kernel(), torch.from_numpy(inputs(9)), torch.from_numpy(inputs(7, seed=1))
    Z[0], Z[1] = X[3], X[4] + 1e-6  # the root of a squared distance of 0 has no digits of its own
    for other in (None, Z):
        expanded = gram(kernel, X, other, method="expand")
        torch.testing.assert_close(expanded, gram(kernel, X, other), rtol=0, atol=1e-10)


@each_kernel()
def test_gram_in_float32_is_close_to_float64(make_kernel):
    kernel, X = make_kernel(), torch.from_numpy(np.round(inputs(6) * 2**12) / 2**12)
    theta, exact = torch.tensor(kernel.theta), gram(kernel, X)
    scale = float(gram_diag(kernel, X).max())
    # An offset, after which the rows are exact, changes none but kernels that are not stationary.
    for offset in (0, 100) if kernel.is_stationary() else (0,):
        K = gram(kernel, X.float() + offset, theta=theta)
        assert K.dtype == torch.float32
        torch.testing.assert_close(
            K.double(), exact, rtol=0, atol=(3e-6 if offset else 2e-6) * scale
        )
    assert gram_diag(kernel, X.float()).dtype == torch.float32


def test_gram_of_a_constant_is_a_full_matrix():
    K = gram(ConstantKernel(2.5), torch.zeros(4, 2), torch.ones(3, 2))
    assert K.shape == (4, 3) and (K == 2.5).all()
    K[0, 0] = 0  # its own memory, not one expanded element
    assert K[1, 1] == 2.5


class Wendland(StationaryKernelMixin, Kernel):
    """A user's kernel: (1 - r / s)_+ on one column, s fixed by the user."""

    def __init__(self, support=2.0):
        self.support = support

    def __call__(self, X, Y=None, eval_gradient=False):
        Y = X if Y is None else Y
        K = np.clip(1 - np.abs(X - Y.T) / self.support, 0, None)
        return (K, np.empty((*K.shape, 0))) if eval_gradient else K

    def diag(self, X):
        return np.ones(len(X))


def test_registered_kernel_takes_part_in_expressions(monkeypatch):
    monkeypatch.setattr("skgp.kernels.expression._REGISTERED", {})
    X = inputs(5)
    kernel = 2.0 * ActiveDims(Wendland(1.5), [1]) + RBF(ARD)
    with pytest.raises(TypeError, match="Wendland.*register_kernel"):
        gram(kernel, torch.from_numpy(X))

    def wendland(kernel, params, X, Z):
        return (1 - (X - Z.mT).abs() / kernel.support).clamp_min(0)

    register_kernel(Wendland, wendland)
    np.testing.assert_allclose(gram(kernel, torch.from_numpy(X)), kernel(X), atol=1e-12)
    np.testing.assert_allclose(gram_diag(kernel, torch.from_numpy(X)), kernel.diag(X), atol=1e-12)


def test_gram_refuses_white_noise_and_says_what_to_do():
    X = torch.zeros(3, 1)
    for kernel in (RBF() + WhiteKernel(), 2.0 * WhiteKernel()):
        with pytest.raises(ValueError, match="WhiteKernel.*split_noise"):
            gram(kernel, X)
        with pytest.raises(ValueError, match="split_noise"):
            gram_diag(kernel, X)


@pytest.mark.parametrize(
    ("kernel", "X", "Z", "message"),
    [
        (RBF(), torch.zeros(3, 2), torch.zeros(3, 1), "columns"),
        (RBF(), torch.zeros(3, 2), torch.zeros(3, 2).double(), "dtype"),
        (RBF(), torch.zeros(3), None, "X must be"),
        (RBF(), torch.zeros(3, 2, dtype=torch.int64), None, "X must be a floating"),
        (RBF([1.0, 2.0]), torch.zeros(3, 3), None, "length_scale has 2 elements and X has 3"),
        (Cosine(), torch.zeros(3, 2), None, "ActiveDims"),
        (ActiveDims(RBF(), [2]), torch.zeros(3, 2), None, "at least 3 columns"),
    ],
)
def test_gram_refuses_inputs_that_do_not_fit(kernel, X, Z, message):
    with pytest.raises(ValueError, match=message):
        gram(kernel, X, Z)


def test_gram_refuses_unknown_method_and_wrong_theta():
    X = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="method.*'exact'"):
        gram(RBF(), X, method="exact")
    with pytest.raises(ValueError, match=r"theta must have shape \(2,\).*\(3,\)"):
        gram(DotProduct() + RBF(), X, theta=torch.zeros(3))
