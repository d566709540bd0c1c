"""Joint errors of predictions from different neighbours, against dense algebra."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, DotProduct

from skgp.inference.neighbors import joint as module
from skgp.inference.neighbors.joint import joint_errors, quadratic_form, sparse_rows

KERNEL = 1.4 * RBF([0.7, 1.1]) + DotProduct(0.5)


@pytest.fixture
def rows(rng):
    """X (12, 2), points (9, 2), positions and weights (12, 4) of no particular estimator."""
    position = np.array([rng.permutation(9)[:4] for _ in range(12)])
    arrays = rng.normal(size=(12, 2)), rng.normal(size=(9, 2)), position, rng.normal(size=(12, 4))
    return tuple(map(torch.tensor, arrays))


def to_dense(position, weights, m):
    A = np.zeros((len(position), m))
    for i, (columns, values) in enumerate(zip(position, weights, strict=True)):
        A[i, columns] = values
    return A


def test_sparse_rows_puts_weights_in_their_columns(rows, dtype):
    _, _, position, weights = rows
    A = sparse_rows(position, weights.to(dtype), 9)
    assert A.shape == (12, 9) and A.dtype == dtype
    expected = to_dense(position.numpy(), weights.to(dtype).numpy(), 9)
    np.testing.assert_array_equal(A.to_dense(), expected)


def test_quadratic_form_is_that_of_a_diagonal(rows, rng):
    _, _, position, weights = rows
    A, v = to_dense(position.numpy(), weights.numpy(), 9), rng.uniform(size=9)
    found = quadratic_form(sparse_rows(position, weights, 9), torch.tensor(v))
    np.testing.assert_allclose(found, A @ np.diag(v) @ A.T, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tile", [1, 4, 2048])
def test_joint_errors_are_the_covariance_of_what_is_left(rows, rng, tile, monkeypatch):
    """Cov(f - A v) for Cov(v) = K + diag: positive semi-definite whatever A is."""
    monkeypatch.setattr(module, "_TILE", tile)
    X, points, position, weights = rows
    A, v = to_dense(position.numpy(), weights.numpy(), 9), rng.uniform(size=9)
    both = KERNEL(np.concatenate([X, points]))
    both[12:, 12:] += np.diag(v)
    left = np.hstack([np.eye(12), -A])
    found = joint_errors(KERNEL, X, points, sparse_rows(position, weights, 9), torch.tensor(v))
    np.testing.assert_allclose(found, left @ both @ left.T, rtol=0, atol=1e-11)
    torch.testing.assert_close(found, found.T, rtol=0, atol=0)
    assert float(torch.linalg.eigvalsh(found).min()) > 0
