"""Kernel matrices and products with them, against n, the kernel and the precision.

Run with ``make bench PYTEST_ARGS="-k kernels"``.
"""

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.kernels import gram, gram_tile
from skgp.kernels.operators import KernelOperator, kernel_matmul
from skgp.linalg.runtime import memory_limit

pytestmark = pytest.mark.benchmark
D, COLUMNS = 8, 33
KERNELS = {
    "rbf": 1.3 * RBF([1.0] * D),
    "matern32": 1.3 * Matern([1.0] * D, nu=1.5),
    "sum": 1.3 * RBF([1.0] * D) + 0.5 * Matern(2.0, nu=0.5),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def run_few(benchmark, function):
    """Time a call that takes seconds: one to warm up, three that count."""
    return benchmark.pedantic(function, rounds=3, iterations=1, warmup_rounds=1)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_bench_gram_tile(benchmark, name, dtype):
    X = normal(4000, D, dtype=dtype)
    out = torch.empty(len(X), len(X), dtype=dtype)
    run_few(benchmark, lambda: gram_tile(KERNELS[name], X, X, out=out))


@each_kernel
@pytest.mark.parametrize("method", ["direct", "expand"])
def test_bench_gram_with_gradient(benchmark, name, method):
    """One evaluation of the marginal likelihood's matrix and its derivatives."""
    X = normal(1000, D)
    theta = torch.tensor(KERNELS[name].theta, requires_grad=True)

    def forward_and_backward():
        gram(KERNELS[name], X, theta=theta, method=method).sum().backward()

    run_few(benchmark, forward_and_backward)


@pytest.mark.parametrize("n", [4000, 8000, 16_000])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "recomputed"])
@each_kernel
def test_bench_operator_product(benchmark, name, stored, n):
    """What an iteration of conjugate gradients with 32 draws is made of."""
    with memory_limit(8e9 if stored else 0):
        operator = KernelOperator(KERNELS[name], normal(n, D))
    V = normal(n, COLUMNS, dtype=torch.float32)
    run_few(benchmark, lambda: operator.matmul(V))


@pytest.mark.parametrize("n", [4000, 16_000])
def test_bench_operator_set_up(benchmark, n):
    X = normal(n, D)
    run_few(benchmark, lambda: KernelOperator(KERNELS["rbf"], X))


@pytest.mark.parametrize("p", [1, 1000])
@pytest.mark.parametrize("n", [4000, 16_000])
def test_bench_prediction_product(benchmark, n, p):
    X, Z, V = normal(p, D), normal(n, D), normal(n, COLUMNS)
    run_few(benchmark, lambda: kernel_matmul(KERNELS["matern32"], X, Z, V))
