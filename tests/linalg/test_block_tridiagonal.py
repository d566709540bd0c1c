"""Block-tridiagonal algebra against dense NumPy, its derivatives against finite differences."""

import numpy as np
import pytest
import torch

from skgp.linalg.block_tridiagonal import (
    BlockCholesky,
    BlockTridiagonal,
    reverse_band_inverse,
)
from skgp.linalg.exceptions import NotPositiveDefiniteError

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
SIZES = [(1, 1), (1, 3), (2, 2), (5, 1), (6, 2), (4, 3)]


def precision(m, d, seed=0):
    """A random positive definite block-tridiagonal matrix, well conditioned."""
    rng = np.random.default_rng(seed)
    L = np.tril(rng.normal(size=(m, d, d)), -1) + 2 * np.eye(d)
    lower = rng.normal(size=(m - 1, d, d)) / 2
    return BlockCholesky(torch.tensor(L), torch.tensor(lower)).product()


def band_of(dense, m, d):
    """The blocks of a dense matrix that a block-tridiagonal one would hold."""
    blocks = dense.reshape(m, d, m, d).transpose(0, 2, 1, 3)
    diagonal = [blocks[i, i] for i in range(m)]
    lower = [blocks[i + 1, i] for i in range(m - 1)]
    return np.stack(diagonal), np.array(lower).reshape(m - 1, d, d)


def naive_dense(Q):
    m, d, _ = Q.diagonal.shape
    out = np.zeros((m * d, m * d))
    for i in range(m):
        out[i * d : (i + 1) * d, i * d : (i + 1) * d] = Q.diagonal[i]
    for i in range(m - 1):
        out[(i + 1) * d : (i + 2) * d, i * d : (i + 1) * d] = Q.lower[i]
        out[i * d : (i + 1) * d, (i + 1) * d : (i + 2) * d] = Q.lower[i].T
    return out


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_dense_and_matvec_agree_with_numpy(m, d, rng):
    Q = precision(m, d)
    dense = naive_dense(Q)
    np.testing.assert_array_equal(Q.to_dense(), dense)
    v = rng.normal(size=(m, d))
    V = rng.normal(size=(m, d, 3))
    np.testing.assert_allclose(Q.matvec(torch.tensor(v)).reshape(-1), dense @ v.ravel(), **CLOSE)
    many = Q.matvec(torch.tensor(V)).reshape(-1, 3)
    np.testing.assert_allclose(many, dense @ V.reshape(-1, 3), **CLOSE)


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_factor_agrees_with_numpy(m, d, rng):
    Q = precision(m, d)
    dense, L = naive_dense(Q), Q.factor()
    chol = np.linalg.cholesky(dense)
    np.testing.assert_allclose(L.to_dense(), chol, **CLOSE)
    np.testing.assert_allclose(L.log_det(), np.linalg.slogdet(dense)[1], **CLOSE)
    np.testing.assert_allclose(L.product().to_dense(), dense, **CLOSE)
    for shape in [(m, d), (m, d, 4)]:
        v = rng.normal(size=shape)
        flat = v.reshape(m * d, -1)
        for solve, matrix in [
            (L.solve, dense),
            (L.solve_lower, chol),
            (L.solve_upper, chol.T),
        ]:
            got = solve(torch.tensor(v))
            assert got.shape == shape
            expected = np.linalg.solve(matrix, flat)
            np.testing.assert_allclose(got.reshape(m * d, -1), expected, **CLOSE)


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_inverse_band_is_that_of_the_dense_inverse(m, d):
    Q = precision(m, d)
    band = Q.factor().inverse_band()
    diagonal, lower = band_of(np.linalg.inv(naive_dense(Q)), m, d)
    np.testing.assert_allclose(band.diagonal, diagonal, **CLOSE)
    np.testing.assert_allclose(band.lower, lower, **CLOSE)


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_reverse_band_inverse_undoes_the_band_of_the_inverse(m, d):
    L = precision(m, d).factor()
    again = reverse_band_inverse(L.inverse_band())
    np.testing.assert_allclose(again.diagonal, L.diagonal, **CLOSE)
    np.testing.assert_allclose(again.lower, L.lower, **CLOSE)


def columnwise(C, r):
    """Adam et al. (2020), Algorithm 1, for a matrix of scalar bandwidth r, as corrected."""
    L = np.zeros_like(C)
    for i in range(len(C)):
        o = slice(i, i + r + 1)
        v = np.linalg.inv(C[o, o])[:, 0]
        L[o, i] = v / np.sqrt(v[0])
    return L


def columnwise_gradient(C, L_bar, r):
    """Algorithm 2 as corrected: the gradient with respect to all entries of the dense C."""
    C_bar = np.zeros_like(C)
    for i in range(len(C)):
        o = slice(i, i + r + 1)
        inverse = np.linalg.inv(C[o, o])
        v = inverse[:, 0]
        H = np.eye(len(v)) / np.sqrt(v[0])
        H[:, 0] -= v / (2 * v[0] ** 1.5)
        C_bar[o, o] -= inverse @ np.outer(H.T @ L_bar[o, i], inverse[0])
    return C_bar


@pytest.mark.parametrize(("m", "d"), [(5, 1), (4, 2), (3, 3)])
def test_blockwise_and_columnwise_algorithms_agree_in_value_and_gradient(m, d, rng):
    Q = precision(m, d)
    C = np.linalg.inv(naive_dense(Q))
    band = BlockTridiagonal(*(torch.tensor(t).requires_grad_() for t in band_of(C, m, d)))
    L = reverse_band_inverse(band)
    r = 2 * d - 1
    np.testing.assert_allclose(L.to_dense().detach(), columnwise(C, r), **CLOSE)
    weights = np.tril(rng.normal(size=C.shape))
    weights *= naive_dense(Q) != 0
    diagonal_bar, lower_bar = torch.autograd.grad(
        (L.to_dense() * torch.tensor(weights)).sum(), band
    )
    # The directional derivative along a symmetric change of the band, which a change of Q makes:
    # entries of C outside the band then change as they must for the columns to stay in it.
    bump = naive_dense(precision(m, d, seed=1)) * 1e-3
    dC = -C @ bump @ C
    dC_band = band_of(dC, m, d)
    slope = (diagonal_bar.numpy() * dC_band[0]).sum() + (lower_bar.numpy() * dC_band[1]).sum()
    expected = (columnwise_gradient(C, weights, r) * dC).sum()
    np.testing.assert_allclose(slope, expected, rtol=1e-9)


def _free(Q):
    """Leaves from which a symmetric matrix is made: gradcheck perturbs each alone."""
    return [t.clone().requires_grad_() for t in Q]


def _symmetric(diagonal, lower):
    return BlockTridiagonal((diagonal + diagonal.mT) / 2, lower)


@pytest.mark.parametrize(("m", "d"), [(1, 2), (3, 2)])
def test_derivatives_agree_with_finite_differences(m, d, rng):
    v = torch.tensor(rng.normal(size=(m, d)))

    def functions(*tensors):
        L = _symmetric(*tensors).factor()
        return *L, L.log_det(), L.solve(v), *L.inverse_band()

    def reverse(*tensors):
        return tuple(reverse_band_inverse(_symmetric(*tensors)))

    Q = precision(m, d)
    assert torch.autograd.gradcheck(functions, _free(Q))
    assert torch.autograd.gradcheck(reverse, _free(Q.factor().inverse_band()))


def test_a_stored_lower_block_has_twice_the_gradient_of_its_half():
    Q = precision(3, 2)
    diagonal, lower = _free(Q)
    log_det = BlockTridiagonal(diagonal, lower).factor().log_det()
    gradient = torch.autograd.grad(log_det, lower)[0]
    _, expected = band_of(np.linalg.inv(naive_dense(Q)), 3, 2)
    np.testing.assert_allclose(gradient, 2 * expected, **CLOSE)


def test_what_is_not_positive_definite_is_named():
    Q = precision(4, 2)
    Q.diagonal[2] = -torch.eye(2)
    with pytest.raises(NotPositiveDefiniteError, match="block 2"):
        Q.factor()
    band = BlockTridiagonal(torch.ones(3, 1, 1), torch.ones(2, 1, 1))
    with pytest.raises(NotPositiveDefiniteError, match="coincide"):
        reverse_band_inverse(band)
