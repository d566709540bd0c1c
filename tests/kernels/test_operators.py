"""Products with kernel matrices against the dense matrix."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.kernels import ActiveDims, gram, gram_tile, operators
from skgp.kernels.operators import KernelOperator, RowOperator, kernel_matmul
from skgp.linalg.runtime import memory_limit
from tests.contracts.kernels import ARD, KINDS, N_INPUTS, each_kernel
from tests.same import assert_same

N, COLUMNS = 37, 4
KERNEL = 1.7 * RBF(ARD) + 0.4 * Matern(ARD, nu=1.5)


def rounding(kernel):
    """Tolerance: entries from the expanded square, whose root is off by sqrt(eps) at distance 0."""
    return 1e-7 if "nu=0.5" in repr(kernel) else 1e-11


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


#: Panels of 5 rows, of which 37 is no multiple; of all rows; of more than there are.
TILES = [5, 37, 2048]


def set_tile(size, monkeypatch):
    monkeypatch.setattr(operators, "PANEL", size)
    monkeypatch.setattr(operators, "MIRRORED", size)
    return size


@pytest.fixture(params=TILES, ids=lambda tile: f"tile{tile}")
def tile(request, monkeypatch):
    return set_tile(request.param, monkeypatch)


def layouts(monkeypatch, make):
    """What is made with each tile, stored and recomputed."""
    for size, stored in itertools.product(TILES, (True, False)):
        set_tile(size, monkeypatch)
        with memory_limit(1e9 if stored else 0):
            operator = make()
        assert operator.stored is stored
        yield operator


@each_kernel(KINDS)
def test_kernel_operator_matmul_equals_dense(make_kernel, monkeypatch):
    kernel, X, V = make_kernel(), normal(N, N_INPUTS), normal(N, COLUMNS, seed=1)
    tol, expected = rounding(kernel), gram(kernel, X) @ V
    for operator in layouts(monkeypatch, lambda: KernelOperator(kernel, X, dtype=torch.float64)):
        assert operator.shape == (N, N)
        torch.testing.assert_close(operator.matmul(V), expected, rtol=tol, atol=tol)


@each_kernel(KINDS)
def test_kernel_operator_in_float32_is_within_its_rounding(make_kernel, monkeypatch):
    """Entries are rounded once and n products summed: (n + 1) eps |K| |V|, whatever the offset."""
    kernel, X, V = make_kernel(), normal(N, N_INPUTS) + 2.0, normal(N, COLUMNS, seed=1)
    K = gram(kernel, X)
    bound = (N + 1) * torch.finfo(torch.float32).eps * (K.abs() @ V.abs())
    for operator in layouts(monkeypatch, lambda: KernelOperator(kernel, X)):
        product = operator.matmul(V)
        assert product.dtype == torch.float32
        assert ((product.double() - K @ V).abs() <= bound).all()


def test_kernel_operator_keeps_distances_that_float32_would_lose():
    X, V = normal(N, 1) + 300.0, normal(N, 1, seed=1)
    kernel = RBF(0.01)
    product = KernelOperator(kernel, X).matmul(V).double()
    torch.testing.assert_close(product, gram(kernel, X) @ V, rtol=1e-5, atol=1e-6)


def test_kernel_operator_stores_the_upper_triangle_within_the_budget(tile):
    X = normal(N, N_INPUTS)
    needed = 4 * N * (N + tile) / 2
    with memory_limit(needed):
        assert KernelOperator(KERNEL, X).stored
        assert not KernelOperator(KERNEL, X, dtype=torch.float64).stored
    with memory_limit(needed - 1):
        assert not KernelOperator(KERNEL, X).stored
    panels = KernelOperator(KERNEL, X)._panels
    assert sum(panel.numel() for panel in panels) <= N * (N + tile) / 2
    assert sum(panel.numel() for panel in panels) >= N * (N + 1) / 2


def test_kernel_operator_recomputes_one_panel_at_a_time(monkeypatch, tile):
    sizes = []

    def recorded(kernel, X, Z):
        sizes.append(X.shape[0] * Z.shape[0])
        return gram_tile(kernel, X, Z)

    monkeypatch.setattr(operators, "gram_tile", recorded)
    with memory_limit(0):
        operator = KernelOperator(KERNEL, normal(N, N_INPUTS))
    assert not sizes
    operator.matmul(normal(N, 1))
    assert max(sizes) <= 2 * tile**2 and N * (N + 1) / 2 <= sum(sizes) <= N * (N + tile) / 2


@each_kernel(KINDS)
def test_kernel_matmul_equals_dense(make_kernel, dtype):
    kernel = make_kernel()
    X, Z, V = normal(23, N_INPUTS), normal(N, N_INPUTS, seed=1), normal(N, COLUMNS, seed=2)
    expected = gram(kernel, X, Z) @ V
    X, Z, V = (tensor.to(dtype) for tensor in (X, Z, V))
    for rows in (1, 5, 100):
        with memory_limit(8 * rows * N * dtype.itemsize):  # a tile may take an eighth
            product = kernel_matmul(kernel, X, Z, V)
        assert product.dtype == dtype
        tol = 1e-10 if dtype == torch.float64 else 1e-3
        torch.testing.assert_close(product.double(), expected, rtol=tol, atol=tol)


@each_kernel(KINDS)
def test_row_operator_equals_dense_at_each_theta(make_kernel, monkeypatch):
    kernel, X, V = make_kernel(), normal(N, N_INPUTS), normal(COLUMNS, N, seed=1)
    tol, index = rounding(kernel), torch.tensor([3, 0, 30])
    thetas = [torch.as_tensor(kernel.theta) + shift for shift in (0.4, 0.0)]
    grams = [gram(kernel, X, theta=theta) for theta in thetas]
    for operator in layouts(monkeypatch, lambda: RowOperator(kernel, X)):
        for theta, K in zip(thetas, grams, strict=True):
            operator.set_theta(theta)
            torch.testing.assert_close(operator.matmul(V), V @ K, rtol=tol, atol=tol)
            torch.testing.assert_close(operator.rows(index), K[index], rtol=tol, atol=tol)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "recomputed"])
def test_row_operator_in_float32_keeps_distances_exact_where_scales_are_short(stored, tile):
    """And only there: elsewhere distances are in float32, too."""
    X, V = 300.0 * normal(N, 1), normal(COLUMNS, N, seed=1).float()
    X[1] = X[0] + 0.005
    kernel = ActiveDims(RBF(1.0), [0])
    with memory_limit(1e9 if stored else 0):
        operator = RowOperator(kernel, X, dtype=torch.float32)
    for scale, dtype in ((0.01, torch.float64), (300.0, torch.float32)):
        theta = torch.tensor([math.log(scale)], dtype=torch.float64)
        operator.set_theta(theta)
        K = gram(kernel, X, theta=theta)
        product = operator.matmul(V)
        assert operator.inputs.dtype == dtype and product.dtype == operator.dtype == torch.float32
        torch.testing.assert_close(product.double(), V.double() @ K, rtol=1e-5, atol=1e-5)
        rows = operator.rows(torch.tensor([1])).double()
        torch.testing.assert_close(rows, K[1:2], rtol=1e-5, atol=1e-5)


def test_row_operator_pickles_without_its_matrix():
    X, V = normal(300, N_INPUTS), normal(COLUMNS, 300, seed=1)
    operator = RowOperator(KERNEL, X)
    with pytest.raises(RuntimeError, match="set_theta"):
        operator.matmul(V)
    operator.set_theta(torch.as_tensor(KERNEL.theta))
    pickled = pickle.dumps(operator)
    assert len(pickled) < 50_000
    again = pickle.loads(pickled)
    again.set_theta(torch.as_tensor(KERNEL.theta))
    assert_same(again.matmul(V), operator.matmul(V))
