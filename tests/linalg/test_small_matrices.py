"""Batches of small matrices against NumPy, one matrix at a time."""

import numpy as np
import pytest
import torch

from skgp.linalg.small_matrices import (
    inner,
    inverse_and_log_det,
    matmul,
    matvec,
    outer,
    square_root,
)

each_size = pytest.mark.parametrize("d", [1, 2, 3, 4, 6, 7, 12])


def draw(*shape):
    return torch.tensor(np.random.default_rng(3).normal(size=shape))


@each_size
@pytest.mark.parametrize("batch", [(5,), (2, 3)])
def test_products_equal_einsum(d, batch):
    A, B, v = draw(d, d, *batch), draw(d, 4, *batch), draw(d, *batch)
    expected = torch.einsum("ik...,kj...->ij...", A, B)
    torch.testing.assert_close(matmul(A, B), expected, rtol=1e-13, atol=1e-13)
    expected = torch.einsum("ik...,k...->i...", A, v)
    torch.testing.assert_close(matvec(A, v), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(inner(v, 2 * v), 2 * (v**2).sum(0))
    assert torch.equal(outer(v, B[0])[-1], v[-1] * B[0])


@each_size
def test_products_broadcast_over_the_batch(d):
    A, B = draw(d, d, 1), draw(d, d, 5)
    torch.testing.assert_close(matmul(A, B), matmul(A.expand(d, d, 5), B))


@each_size
def test_inverse_and_log_det_equal_numpy(d):
    root = draw(d, d, 5)
    A = torch.eye(d).double()[..., None] + matmul(matmul(root, root.transpose(0, 1)), root**0 / d)
    A = A * torch.linalg.det(A.movedim(-1, 0)).sign()
    if d % 2 == 0:
        A = matmul(A, A)  # a change of sign leaves an even determinant as it was
    inverse, log_det = inverse_and_log_det(A)
    for i in range(5):
        one = A[..., i].numpy()
        np.testing.assert_allclose(inverse[..., i], np.linalg.inv(one), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(log_det[i], np.linalg.slogdet(one)[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_log_det_is_nan_where_the_determinant_is_negative(d):
    A = torch.eye(d).double()[..., None].clone()
    A[0, 0] = -1.0
    assert inverse_and_log_det(A)[1].isnan().all()


@each_size
@pytest.mark.parametrize("rank", ["full", "deficient"])
def test_square_root_is_lower_triangular_and_squares_to_the_matrix(d, rank):
    # Columns of very different size, as the noise of a smooth process over a short gap has them.
    root = draw(d, d if rank == "full" else max(1, d // 2), 5)
    root = root * 10.0 ** -torch.arange(d).double()[:, None, None]
    A = matmul(root, root.transpose(0, 1))
    R = square_root(A)
    assert torch.equal(R, R.movedim(-1, 0).tril().movedim(0, -1))
    scale = A.diagonal().T.sqrt()
    error = (matmul(R, R.transpose(0, 1)) - A).abs() / outer(scale, scale)
    assert error.max() < 1e-13


def test_square_root_of_nothing_is_nothing():
    assert torch.equal(square_root(torch.zeros(3, 3, 2)), torch.zeros(3, 3, 2))
