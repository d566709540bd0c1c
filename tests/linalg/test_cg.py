"""Conjugate gradients against direct solves, and what they do when they cannot converge."""

import pytest
import torch

from skgp.linalg.cg import block_cg
from skgp.linalg.exceptions import NumericalWarning
from skgp.linalg.preconditioners import NystromPreconditioner


def spd(n, condition, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return (Q * torch.logspace(0, -torch.tensor(condition).log10(), n).double()) @ Q.T


@pytest.fixture
def system():
    A = spd(60, 1e4)
    B = torch.randn(60, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return A, B


def test_block_cg_equals_direct_solve(system):
    A, B = system
    B[:, 1] = 0
    result = block_cg(lambda V: A @ V, B, tol=1e-12)
    torch.testing.assert_close(result.solution, torch.linalg.solve(A, B), rtol=1e-7, atol=1e-7)
    assert result.converged
    assert len(result.history) == result.n_iter
    true = torch.linalg.vector_norm(B - A @ result.solution, dim=0)
    true = true / torch.linalg.vector_norm(B, dim=0).clamp_min(1e-300)
    assert bool((result.solution[:, 1] == 0).all())
    torch.testing.assert_close(result.residual, true, rtol=1e-6, atol=1e-15)


def test_block_cg_columns_do_not_depend_on_each_other(system):
    A, B = system
    together = block_cg(lambda V: A @ V, B, tol=1e-10).solution[:, 2]
    alone = block_cg(lambda V: A @ V, B[:, 2:3], tol=1e-10).solution[:, 0]
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-8)


def test_block_cg_with_exact_preconditioner_takes_one_iteration(system):
    A, B = system
    inverse = torch.linalg.inv(A)
    assert block_cg(lambda V: A @ V, B, preconditioner=lambda V: inverse @ V, tol=1e-8).n_iter == 1


def test_block_cg_start_at_the_solution_takes_no_iteration(system):
    A, B = system
    result = block_cg(lambda V: A @ V, B, X0=torch.linalg.solve(A, B), tol=1e-8)
    assert result.n_iter == 0
    assert result.converged
    assert float(result.residual.max()) < 1e-8


def test_block_cg_callback_stops_and_keeps_the_best_iterate(system):
    A, B = system
    seen = []

    def stop_at_three(iteration, info):
        seen.append(info["residual"])
        return iteration == 3

    result = block_cg(lambda V: A @ V, B, tol=1e-12, callback=stop_at_three)
    assert result.n_iter == 3
    assert seen == result.history
    assert not result.converged
    exact = torch.linalg.solve(A, B)
    error = exact - result.solution
    assert bool(((error * (A @ error)).sum(0) < (exact * (A @ exact)).sum(0)).all())


def test_block_cg_max_iter_reports_the_residual_reached(system):
    A, B = system
    with pytest.warns(NumericalWarning, match="n_iter=4"):
        result = block_cg(lambda V: A @ V, B, tol=1e-12, max_iter=4)
    assert result.n_iter == 4
    assert not result.converged


def test_block_cg_warns_when_float32_products_are_too_inexact():
    A = spd(200, 1e9)
    B = torch.randn(200, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    A32 = A.float()
    with pytest.warns(NumericalWarning, match="float64"):
        result = block_cg(lambda V: A32 @ V.float(), B, tol=1e-6, max_iter=5000)
    assert not result.converged


def test_block_cg_indefinite_matrix_does_not_return_garbage():
    A = torch.diag(torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64))
    B = torch.ones(3, 1, dtype=torch.float64)
    result = block_cg(lambda V: A @ V, B, tol=1e-10, warn=False)
    assert bool(torch.isfinite(result.solution).all())
    assert float(result.residual.max()) <= 1.0


def test_nystrom_preconditioner_cuts_iterations():
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(300, 20, generator=generator, dtype=torch.float64) * 10
    noise = 1e-3
    A = F @ F.T + noise * torch.eye(300, dtype=torch.float64) * 1.5
    B = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    plain = block_cg(lambda V: A @ V, B, tol=1e-8, warn=False)
    preconditioned = block_cg(
        lambda V: A @ V, B, tol=1e-8, preconditioner=NystromPreconditioner(F.clone(), noise)
    )
    assert preconditioned.n_iter <= 4 < plain.n_iter
    expected = torch.linalg.solve(A, B)
    torch.testing.assert_close(preconditioned.solution, expected, rtol=1e-6, atol=1e-4)
