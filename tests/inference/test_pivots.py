"""Greedy choice of rows against the pivoted Cholesky decomposition of a dense matrix."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
)

from skgp.inference.pathwise import greedy_variance
from skgp.linalg import NotPositiveDefiniteError

KERNELS = [1.7 * RBF([0.5, 0.8]), Matern(0.7, nu=1.5), DotProduct(0.3) * RBF(1.0)]


@pytest.fixture
def X(rng):
    return torch.tensor(rng.uniform(-2, 2, (200, 2)))


def pivots(K, n_points):
    """Row by row the greatest diagonal of the Schur complement."""
    K, chosen = K.copy(), []
    for _ in range(n_points):
        pivot = int(np.argmax(np.diag(K)))
        K -= np.outer(K[:, pivot], K[pivot]) / K[pivot, pivot]
        chosen.append(pivot)
    return chosen


def unexplained(kernel, X, rows):
    """Trace of the covariance that the rows leave."""
    K = kernel(X.numpy())
    cross, left = K[:, rows], K[np.ix_(rows, rows)]
    return np.trace(K) - np.sum(cross * np.linalg.solve(left, cross.T).T)


@pytest.mark.parametrize("n_rows", [200, 40], ids=["few of many", "most"])
@pytest.mark.parametrize("kernel", KERNELS, ids=["rbf", "matern", "product"])
def test_greedy_variance_pivots_as_the_dense_cholesky_decomposition(X, kernel, n_rows):
    found = greedy_variance(kernel, X[:n_rows], 25)
    assert found.tolist() == pivots(kernel(X[:n_rows].numpy()), 25)
    assert found.dtype == torch.int64


@pytest.mark.parametrize("n_points", [200, 250])
def test_greedy_variance_takes_each_row_at_most_once(X, n_points):
    found = greedy_variance(RBF(1.0), X, n_points)
    assert len(found) <= 200 and len(found.unique()) == len(found)
    assert len(greedy_variance(Matern(0.1, nu=0.5), X, n_points)) == 200


def test_greedy_variance_of_a_constant_kernel_is_one_row(X):
    assert greedy_variance(ConstantKernel(3.0), X, 10).tolist() == [0]


def test_greedy_variance_passes_over_rows_without_variance():
    X = torch.tensor([[0.0], [2.0], [0.0], [-1.0]], dtype=torch.float64)
    assert greedy_variance(DotProduct(0.0), X, 3).tolist() == [1]


@pytest.mark.parametrize("n_rows", [200, 60], ids=["few of many", "most"])
def test_greedy_variance_works_in_either_precision(X, dtype, n_rows):
    """Ties may be broken otherwise: what is left counts."""
    X, kernel = X[:n_rows], Matern(0.5, nu=1.5)
    found = greedy_variance(kernel, X.to(dtype), 40)
    assert found.dtype == torch.int64 and len(found.unique()) == 40
    expected = unexplained(kernel, X, pivots(kernel(X.numpy()), 40))
    assert unexplained(kernel, X, found.numpy()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("n_points", [60, 200])
def test_greedy_variance_of_a_kernel_that_is_no_covariance_is_refused(X, n_points):
    with pytest.raises(NotPositiveDefiniteError, match="is indefinite.*ActiveDims"):
        greedy_variance(ExpSineSquared(1.0, 3.0), X, n_points)


@pytest.mark.parametrize("kernel", [RBF(1e3), Matern(1e4, nu=2.5), DotProduct(1.0)])
@pytest.mark.filterwarnings("error")
def test_greedy_variance_takes_no_rounding_for_an_indefinite_kernel(X, kernel):
    far = torch.cat([X, 1e3 + X, 1e6 + X])
    assert len(greedy_variance(kernel, far, len(far))) < 300
