"""Randomly pivoted Cholesky and the Woodbury preconditioner against dense algebra."""

import pytest
import torch

from skgp.linalg.preconditioners import (
    LowRankPreconditioner,
    NystromPreconditioner,
    rp_cholesky,
    without_subnormals,
)
from skgp.linalg.runtime import memory_limit


def kernel_matrix(n=200, length_scale=0.3, seed=0):
    X = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.exp(-0.5 * (X[:, None] - X[None]).square().sum(-1) / length_scale**2)


def factorise(K, rank, **kwargs):
    generator = torch.Generator().manual_seed(3)
    return rp_cholesky(lambda index: K[:, index], K.diagonal(), rank, generator=generator, **kwargs)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_rp_cholesky_interpolates_its_pivots(block_size):
    K = kernel_matrix()
    low_rank = factorise(K, 40, block_size=block_size)
    F = low_rank.factor
    assert F.shape == (200, 40)
    assert len(set(low_rank.pivots.tolist())) == 40
    torch.testing.assert_close(F @ F[low_rank.pivots].T, K[:, low_rank.pivots], rtol=0, atol=1e-8)


def test_rp_cholesky_takes_as_many_columns_at_once_as_the_budget_holds():
    K, widths = kernel_matrix(), []

    def columns(index):
        widths.append(len(index))
        return K[:, index]

    with memory_limit(8 * 8 * 4 * len(K) * 5.5):  # an eighth is for a tile
        generator = torch.Generator().manual_seed(3)
        found = rp_cholesky(columns, K.diagonal(), 40, generator=generator)
    assert max(widths) == 5 and found.factor.shape == (200, 40)


def test_rp_cholesky_residual_is_psd_and_its_trace_is_reported():
    K = kernel_matrix()
    low_rank = factorise(K, 30)
    residual = K - low_rank.factor @ low_rank.factor.T
    assert float(torch.linalg.eigvalsh(residual).min()) > -1e-10
    assert low_rank.residual_trace == pytest.approx(float(residual.trace()), abs=1e-8)


def test_rp_cholesky_is_near_the_best_rank_r_approximation():
    K = kernel_matrix()
    eigenvalues = torch.linalg.eigvalsh(K)
    best_with_half_the_rank = float(eigenvalues[:-20].sum())
    assert factorise(K, 40).residual_trace < 2 * best_with_half_the_rank


def test_rp_cholesky_stops_at_the_tolerance():
    K = kernel_matrix(length_scale=1.0)
    low_rank = factorise(K, 200, tol=1e-6, block_size=8)
    assert low_rank.factor.shape[1] < 60
    assert low_rank.residual_trace <= 1e-6 * float(K.trace())


def test_rp_cholesky_duplicated_rows_end_at_the_rank():
    K = kernel_matrix(n=20).repeat(5, 5)
    low_rank = factorise(K, 100)
    assert low_rank.factor.shape[1] <= 20
    assert low_rank.residual_trace < 1e-6


def test_nystrom_preconditioner_equals_dense_inverse_and_log_det():
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    V = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    P = F @ F.T + 0.1 * torch.eye(50, dtype=torch.float64)
    preconditioner = NystromPreconditioner(F.clone(), 0.1)
    torch.testing.assert_close(preconditioner(V), torch.linalg.solve(P, V), rtol=1e-9, atol=1e-9)
    assert preconditioner.log_det == pytest.approx(float(torch.logdet(P)), abs=1e-9)


@pytest.mark.parametrize("rank", [0, 12])
def test_low_rank_preconditioner_equals_dense(rank, dtype):
    F = torch.randn(rank, 60, generator=torch.Generator().manual_seed(0), dtype=dtype)
    noise = torch.linspace(0.1, 0.9, 60, dtype=dtype)
    V = torch.randn(3, 60, generator=torch.Generator().manual_seed(1), dtype=dtype)
    dense = (F.T @ F).double() + noise.double().diag()
    inverse = torch.linalg.inv(dense)
    P = LowRankPreconditioner(F, noise)
    tol = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(P(V).double(), V.double() @ inverse, rtol=tol, atol=tol)
    torch.testing.assert_close(P.inverse_diag(), inverse.diagonal(), rtol=tol, atol=tol)
    left = torch.randn(3, rank, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    solved = P.solve_factor(left).double()
    torch.testing.assert_close(solved, left @ F.double() @ inverse, rtol=tol, atol=tol)
    explained = F.double() @ inverse @ F.double().T
    torch.testing.assert_close(P.explained(), explained, rtol=tol, atol=tol)
    assert P.log_det == pytest.approx(float(torch.linalg.slogdet(dense)[1]), rel=tol)


def test_low_rank_preconditioner_probes_have_its_covariance():
    F = torch.randn(5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.linspace(0.1, 0.9, 20, dtype=torch.float64)
    dense = F.T @ F + noise.diag()
    # Orthonormal noise in the place of random noise: its second moment is I exactly.
    e = torch.eye(25, dtype=torch.float64)
    z, v = LowRankPreconditioner(F, noise).probes(e[:, :5], e[:, 5:])
    torch.testing.assert_close(z.T @ z, dense)
    torch.testing.assert_close(v, z @ torch.linalg.inv(dense))


def test_low_rank_preconditioner_probes_do_not_cancel_in_float32():
    """A signal 1e7 times the noise: plain application of the inverse has no digit left."""
    generator = torch.Generator().manual_seed(0)
    F = 300 * torch.randn(5, 200, generator=generator)
    noise = torch.full((200,), 0.01)
    e1, e2 = torch.randn(4, 5, generator=generator), torch.randn(4, 200, generator=generator)
    P = LowRankPreconditioner(F, noise)
    z, v = P.probes(e1, e2)
    double = LowRankPreconditioner(F.double(), noise.double())
    _, expected = double.probes(e1.double(), e2.double())
    torch.testing.assert_close(v.double(), expected, rtol=1e-4, atol=1e-4)
    assert float((P(z).double() - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_subnormals_drops_what_no_sum_can_tell(dtype):
    A = torch.tensor([[2.0, -1e-10], [1e-44, -3e-200]], dtype=torch.float64)
    expected = torch.tensor([[2.0, -1e-10], [0.0, 0.0]], dtype=dtype)
    assert torch.equal(without_subnormals(A, dtype), expected)
    assert without_subnormals(A[:0], dtype).shape == (0, 2)


def test_low_rank_preconditioner_in_the_memory_of_its_factor_is_the_same():
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(5, 9000, generator=generator, dtype=torch.float64)  # more than a piece of both
    D = torch.rand(9000, generator=generator, dtype=torch.float64) + 0.1
    V = torch.randn(3, 9000, generator=generator, dtype=torch.float64)
    expected, memory = LowRankPreconditioner(F, D), F.clone()
    found = LowRankPreconditioner(memory, D, overwrite=True)
    assert found.Q.data_ptr() == memory.data_ptr()
    torch.testing.assert_close(found(V), expected(V), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found(V @ F.T @ F + V * D), V, rtol=1e-9, atol=1e-9)
