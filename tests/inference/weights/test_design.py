"""Streamed products against the dense design matrix."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights import design as design_module
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign, row_chunks
from skgp.kernels.spectral import FourierFeatures
from skgp.linalg.runtime import memory_limit
from tests.reference.weights import dense_features

N, M = 37, 26
BASIS = FourierFeatures(RBF(1.5), M, 3, seed=1, block_size=5)
WIDTH = BASIS.block_features


class CountingBasis:
    """A basis that counts the rows of features that it is asked for."""

    def __init__(self, basis):
        self.basis, self.rows = basis, 0

    def __getattr__(self, name):
        return getattr(self.basis, name)

    def features(self, X, block):
        self.rows += len(X)
        return self.basis.features(X, block)


@pytest.fixture
def X(rng):
    return torch.from_numpy(rng.standard_normal((N, 3)))


@pytest.fixture
def weight(rng):
    return torch.from_numpy(rng.uniform(0.5, 2.0, N))


@pytest.fixture(params=[1, 500], ids=["row tiles", "small tiles"])
def tile_bytes(request, monkeypatch):
    """Bytes of a tile, so that small problems are cut as large ones are."""
    monkeypatch.setattr(design_module, "TILE_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("budget", [0, 8 * N * WIDTH * 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_streamed_products_equal_dense_ones(X, weight, rng, tile_bytes, budget, weighted):
    Phi = dense_features(BASIS, X)
    if weighted:
        Phi = Phi * np.sqrt(weight.numpy())[:, None]
    with memory_limit(2 * budget):  # half of which is for features
        design = StreamedDesign(BASIS, X, sample_weight=weight if weighted else None)
    V, R = rng.standard_normal((M, 4)), rng.standard_normal((N, 4))
    V_torch, R_torch = torch.from_numpy(V), torch.from_numpy(R)
    for _ in range(2):  # the second time from the features kept
        np.testing.assert_allclose(design.matmul(V_torch).numpy(), Phi @ V, atol=1e-13)
        np.testing.assert_allclose(design.rmatmul(R_torch).numpy(), Phi.T @ R, atol=1e-13)
        np.testing.assert_allclose(
            design.gram_matmul(V_torch).numpy(), Phi.T @ (Phi @ V), atol=1e-12
        )


@pytest.mark.parametrize("budget", [0, 8 * N * WIDTH * 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_streamed_curvatures_equal_dense_ones(X, weight, rng, tile_bytes, budget, weighted):
    """One Hessian a column: products, matrices of all rows and of some, diagonals."""
    Phi = dense_features(BASIS, X)
    if weighted:
        Phi = Phi * np.sqrt(weight.numpy())[:, None]
    with memory_limit(2 * budget):  # half of which is for features
        design = StreamedDesign(BASIS, X, sample_weight=weight if weighted else None)
    assert design.is_weighted == weighted
    V, C = rng.standard_normal((M, 3)), rng.uniform(0, 2, (N, 3))
    V_torch, C_torch = torch.from_numpy(V), torch.from_numpy(C)
    product, image = design.curvature_matmul(V_torch, C_torch)
    np.testing.assert_allclose(product.numpy(), Phi.T @ (C * (Phi @ V)), atol=1e-12)
    np.testing.assert_allclose(image.numpy(), Phi @ V, atol=1e-13)
    index = np.array([30, 2, 2, 7])
    gram, part = (
        design.curvature_gram(C_torch),
        design.curvature_gram(C_torch[index], torch.from_numpy(index)),
    )
    diagonal = design.curvature_diagonal(C_torch)
    for j in range(3):
        H = Phi.T @ np.diag(C[:, j]) @ Phi
        np.testing.assert_allclose(gram[j].numpy(), H, atol=1e-12)
        np.testing.assert_allclose(diagonal[:, j].numpy(), np.diag(H), atol=1e-12)
        H = Phi[index].T @ np.diag(C[index, j]) @ Phi[index]
        np.testing.assert_allclose(part[j].numpy(), H, atol=1e-12)


def test_design_curvature_gram_fills_both_triangles(rng):
    """With more columns than a tile of the Gram matrix holds."""
    basis = FourierFeatures(RBF(1.5), 600, 3, seed=1, block_size=200)
    X, C = (
        torch.from_numpy(rng.standard_normal((9, 3))),
        torch.from_numpy(rng.uniform(0, 1, (9, 1))),
    )
    Phi = dense_features(basis, X)
    gram = StreamedDesign(basis, X).curvature_gram(C)[0]
    np.testing.assert_allclose(gram.numpy(), Phi.T @ (C.numpy() * Phi), atol=1e-13)


def test_design_keeps_as_many_blocks_as_the_budget_allows(X):
    basis = CountingBasis(BASIS)
    with memory_limit(2 * 8 * N * WIDTH * 2):
        design = StreamedDesign(basis, X)
    V = torch.ones(M, 1, dtype=torch.float64)
    design.matmul(V)
    first, basis.rows = basis.rows, 0
    design.matmul(V)
    assert first == N * BASIS.n_blocks
    assert basis.rows == N * (BASIS.n_blocks - 2)
    design, basis.rows = StreamedDesign(basis, X, keep=False), 0
    design.matmul(V), design.matmul(V)
    assert basis.rows == 2 * N * BASIS.n_blocks


def test_design_float32_sums_in_float64(X):
    design = StreamedDesign(BASIS, X, dtype=torch.float32)
    V = torch.ones(M, 2, dtype=torch.float64)
    assert design.features(0).dtype == torch.float32
    exact = dense_features(BASIS, X) @ np.ones((M, 2))
    out = design.matmul(V)
    assert out.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), exact, atol=1e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_design_refuses_a_weight_that_is_not_positive(X, weight, bad):
    weight[3] = bad
    with pytest.raises(ValueError, match="sample_weight must be positive"):
        StreamedDesign(BASIS, X, sample_weight=weight)


def test_row_chunks_cover_the_rows_within_the_budget():
    chunks = list(row_chunks(10, row_bytes=100, cap=350))
    assert chunks == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert list(row_chunks(3, row_bytes=100, cap=1, max_rows=9))[0] == slice(0, 1)
    assert list(row_chunks(4, row_bytes=1, cap=100, max_rows=3)) == [slice(0, 3), slice(3, 4)]


@pytest.mark.parametrize("weighted", [False, True])
def test_products_with_inducing_points_that_are_not_kept_take_covariances_alone(
    X, weight, rng, tile_bytes, weighted
):
    r"""``Phi = k(X, Z) L^-T`` by NumPy; whitened features, n m^2 flops, are made for none of it."""
    kernel, Z = 2.0 * RBF(1.5), X[::4]
    L = np.linalg.cholesky(kernel(Z.numpy()))
    Phi = np.linalg.solve(L, kernel(X.numpy(), Z.numpy()).T).T
    if weighted:
        Phi = Phi * np.sqrt(weight.numpy())[:, None]
    basis = CountingBasis(WhitenedInducingBasis(kernel, Z))
    with memory_limit(8 * Phi.size):  # half of it is for features
        design = StreamedDesign(basis, X, sample_weight=weight if weighted else None)
    V, R = rng.standard_normal((Phi.shape[1], 3)), rng.standard_normal((N, 3))
    C = rng.uniform(0, 2, (N, 3))
    np.testing.assert_allclose(design.matmul(torch.from_numpy(V)), Phi @ V, atol=1e-11)
    np.testing.assert_allclose(design.rmatmul(torch.from_numpy(R)), Phi.T @ R, atol=1e-11)
    product, image = design.curvature_matmul(torch.from_numpy(V), torch.from_numpy(C))
    np.testing.assert_allclose(product, Phi.T @ (C * (Phi @ V)), atol=1e-11)
    np.testing.assert_allclose(image, Phi @ V, atol=1e-11)
    assert basis.rows == 0
