"""Large tiles in place against the accurate covariance."""

from importlib import import_module

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Kernel,
    Matern,
)

from skgp.kernels import ActiveDims, gram, gram_tile, register_kernel
from skgp.kernels.expression import bind
from skgp.kernels.gram import largest_square
from tests.contracts.kernels import ARD, N_INPUTS, each_kernel


def inputs(n, seed, offset=0.0):
    X = np.random.default_rng(seed).standard_normal((n, N_INPUTS))
    return torch.from_numpy(X + offset)


def test_largest_square_is_that_of_the_shortest_scale():
    X = torch.tensor([[1.0, 0.0], [5.0, 0.0], [3.0, 3.0]])  # from (1, 0): 0, (4, 0), (2, 3)

    def square(kernel):
        return largest_square(bind(kernel, None, dtype=X.dtype, device=X.device), X)

    assert square(RBF(0.1)) == pytest.approx(1600)
    assert square(2.0 * RBF(1.0) + Matern([0.1, 1.0])) == pytest.approx(1600)
    assert square(ActiveDims(RBF(0.1), [1]) * RBF(1.0)) == pytest.approx(900)
    assert square(ExpSineSquared(10.0, 0.5)) == pytest.approx(64)
    assert square(DotProduct() + ConstantKernel(3.0)) == 0


@each_kernel()
def test_gram_tile_equals_gram(make_kernel, monkeypatch):
    kernel, X, Z = make_kernel(), inputs(7, 0), inputs(150, 1)
    Z[0], Z[149] = X[3], X[4] + 1e-6  # the root of a squared distance of 0 has no digits of its own
    theta = torch.tensor(kernel.theta + 0.1)
    expected = gram(kernel, X, Z, theta)
    for piece in (2**18, 64):  # columns at least: the smaller piece splits 150 of them in three
        monkeypatch.setattr(import_module("skgp.kernels.gram"), "PIECE", piece)
        torch.testing.assert_close(gram_tile(kernel, X, Z, theta), expected, rtol=1e-12, atol=1e-12)
        single = gram_tile(kernel, X.float(), Z.float(), theta).double()
        torch.testing.assert_close(single, expected, rtol=1e-5, atol=1e-5)


@each_kernel()
def test_gram_tile_writes_to_nothing_that_it_was_given(make_kernel):
    kernel, X, Z = make_kernel(), inputs(6, 0), inputs(9, 1)
    copies = X.clone(), Z.clone()
    values = kernel.theta.copy()
    torch.testing.assert_close(gram_tile(kernel, X, Z), gram(kernel, X, Z), rtol=1e-12, atol=1e-12)
    assert torch.equal(X, copies[0]) and torch.equal(Z, copies[1])
    assert (kernel.theta == values).all()
    # A second call finds the same values: nothing that it owns was written to.
    torch.testing.assert_close(gram_tile(kernel, X, Z), gram(kernel, X, Z), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_gram_tile_never_exceeds_the_variance(offset):
    X = inputs(40, 0, offset).float()
    for kernel in (1.7 * RBF(ARD), 1.7 * RBF(ARD) * RBF(0.3), 1.7 * Matern(ARD, nu=0.5)):
        K = gram_tile(kernel, X, X)
        assert K.max() <= 1.7 * (1 + 1e-6)
        torch.testing.assert_close(K, gram(kernel, X, X), rtol=0, atol=5e-3)


@each_kernel()
def test_gram_tile_does_not_suffer_from_an_offset(make_kernel):
    kernel, X = make_kernel(), inputs(9, 0, 100.0).float()
    scale = float(kernel.diag(X.numpy()).max())
    # A root of a squared distance wrong by 4e-6 is wrong by 2e-3 near 0.
    torch.testing.assert_close(
        gram_tile(kernel, X, X.clone()), gram(kernel, X), rtol=0, atol=5e-3 * scale
    )


def test_gram_tile_multiplies_constants_once():
    X, Z = inputs(5, 0), inputs(6, 1)
    for kernel in (
        ConstantKernel(2.0) * ConstantKernel(3.0),
        ConstantKernel(2.0) + ConstantKernel(3.0),
        ConstantKernel(2.0) * RBF(ARD) * ConstantKernel(3.0) * RBF(1.5) * Matern(nu=1.5),
        ConstantKernel(2.0) * Matern(nu=0.5) * ConstantKernel(3.0),
        (ConstantKernel(2.0) + ConstantKernel(1.0)) * RBF(),
        ConstantKernel(2.0) + RBF(),
        (ConstantKernel(2.0) + ConstantKernel(1.0)) * (ConstantKernel(2.0) + Matern(nu=2.5)),
    ):
        torch.testing.assert_close(gram_tile(kernel, X, Z), gram(kernel, X, Z))


class Stored(Kernel):
    """A user's kernel; its covariance in torch below returns a tensor of its own."""

    def __init__(self, value=1.0):
        self.value = value

    def is_stationary(self):
        return True

    def __call__(self, X, Y=None, eval_gradient=False):
        raise NotImplementedError

    diag = __call__


def test_gram_tile_does_not_write_to_what_a_users_function_returns(monkeypatch):
    monkeypatch.setattr("skgp.kernels.expression._REGISTERED", {})
    stored, X = torch.full((3, 4), 0.5), torch.zeros(7, 1)
    register_kernel(Stored, lambda kernel, params, X, Z: stored)
    K = gram_tile(Stored() * 2.0 + ConstantKernel(1.0), X[:3], X[:4])
    assert (K == 2.0).all() and (stored == 0.5).all()


def test_gram_tile_records_no_gradient():
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert not gram_tile(RBF(), inputs(3, 0), inputs(4, 1), theta).requires_grad


def test_gram_tile_refuses_kernels_of_other_columns():
    X = inputs(3, 0)
    with pytest.raises(ValueError, match="length_scale has 2"):
        gram_tile(RBF([1.0, 2.0]), X, X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [RBF(1e-2), *(Matern(1e-2, nu=nu) for nu in (0.5, 1.5, 2.5))])
def test_far_rows_leave_no_subnormal_numbers(kernel, dtype):
    """Products of these are slow on a processor."""
    X = torch.linspace(0, 1, 400, dtype=dtype)[:, None]
    K = gram_tile(3.0 * kernel, X, X)
    small = torch.finfo(dtype).eps ** 3
    assert bool(((K == 0) | (K > small)).all())
    assert bool((K == 0).any()) and bool((K.diagonal() > 2.9).all())
    exact = torch.tensor((3.0 * kernel)(X.double().numpy()))
    assert float(exact[K == 0].max()) < 1e4 * torch.finfo(dtype).eps ** 2
