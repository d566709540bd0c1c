"""Conjugate gradients against direct solves, and ULISSE against its own variance formula."""

import numpy as np
import pytest
import torch

from skgp.linalg import NumericalWarning
from skgp.linalg.cg import block_cg
from skgp.linalg.preconditioners import NystromPreconditioner
from skgp.linalg.ulisse import ulisse
from tests.covering import slow
from tests.same import assert_same

N, N_DRAWS, STOP = 14, 400, 0.3


def spd(n=N, condition=60.0, seed=0):
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return (Q * np.geomspace(1, 1 / condition, n)) @ Q.T


@pytest.fixture
def system():
    A = torch.tensor(spd(60, 1e4))
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


def test_block_cg_ends_by_the_norm_that_is_asked_for(system):
    A, B = torch.tensor(spd(60, 10.0)), system[1]

    def norm(V):
        return (V * torch.arange(60)[:, None]).norm(dim=0, keepdim=True)

    found = block_cg(lambda V: A @ V, B, tol=1e-3, norm=norm)
    expected = (norm(B - A @ found.solution) / norm(B))[0]
    torch.testing.assert_close(found.residual, expected, rtol=1e-9, atol=0)
    assert 1e-4 < found.residual.max() <= 1e-3
    assert found.history[-1] == pytest.approx(float(expected.max()), rel=1e-6)


def test_block_cg_with_a_splitting_takes_the_same_steps(system):
    A, B = system
    P = A.diagonal().diag() + 0.3 * torch.outer(A[0], A[0])
    options = {"preconditioner": lambda V: torch.linalg.solve(P, V), "tol": 1e-10}
    found = block_cg(lambda V: A @ V, B, **options)
    split = block_cg(lambda V: A @ V, B, splitting=lambda V: (A - P) @ V, **options)
    assert split.converged and 10 < split.n_iter <= found.n_iter + 2
    np.testing.assert_allclose(split.history[:10], found.history[:10], rtol=1e-8)
    np.testing.assert_allclose(split.solution, found.solution, rtol=1e-6, atol=1e-7)
    for one, other in zip(split.coefficients[:10], found.coefficients[:10], strict=True):
        np.testing.assert_allclose(torch.cat(one), torch.cat(other), rtol=1e-6)


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
    A = torch.tensor(spd(200, 1e9))
    B = torch.randn(200, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    A32 = A.float()
    with pytest.warns(NumericalWarning, match="float64"):
        result = block_cg(lambda V: A32 @ V.float(), B, tol=1e-6, max_iter=1000)
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


# ---- ULISSE


@pytest.fixture
def rows():
    """A, its Jacobi-like preconditioner and three right-hand sides in rows."""
    A = spd()
    P = np.diag(np.linspace(0.5, 2.0, N))
    B = np.random.default_rng(1).normal(size=(3, N)) * [[1.0], [5.0], [0.1]]
    return A, np.linalg.inv(P), B


def run(A, P_inv, B, generator=None, **kwargs):
    A, P_inv, B = (torch.as_tensor(M) for M in (A, P_inv, B))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return ulisse(
        lambda V: V @ A, B, preconditioner=lambda V: V @ P_inv, generator=generator, **kwargs
    )


def naive_increments(A, P_inv, b, stop, tol=1e-10):
    """Increments of one row up to `stop` as one, then one by one; sizes by which they survive."""
    x, r = np.zeros_like(b), b.copy()
    d, rz, alpha = P_inv @ r, r @ P_inv @ r, 1.0
    increments, predicted, sure = [], [], None
    while np.linalg.norm(r) > tol * np.linalg.norm(b):
        predicted.append(np.sqrt(alpha * rz))
        alpha = rz / (d @ A @ d)
        increments.append(alpha * d)
        x, r = x + alpha * d, r - alpha * A @ d
        rz_new = r @ P_inv @ r
        d, rz = P_inv @ r + rz_new / rz * d, rz_new
        if sure is None and np.linalg.norm(r) <= stop * np.linalg.norm(b):
            sure = len(increments)
            last = increments[-1]
            scale = min(np.sqrt(last @ A @ last), stop * np.sqrt(x @ b))
    sizes = np.minimum(1.0, np.array(predicted[sure:]) / scale)
    return sum(increments[:sure]), np.array(increments[sure:]), np.minimum.accumulate(sizes)


def survival_of(roulette, sizes):
    j = np.arange(1, len(sizes) + 1)
    return sizes if roulette == "adaptive" else np.exp(-roulette * j * (j + 1) / 2)


def draws(rows, n_draws=N_DRAWS, seed=7, **kwargs):
    """Solutions (n_draws, k, n) and second ones (n_draws, 1, n)."""
    generator = torch.Generator().manual_seed(seed)
    results = [run(*rows, generator, stop=STOP, n_paired=1, **kwargs) for _ in range(n_draws)]
    return (
        np.array([r.solution.numpy() for r in results]),
        np.array([r.second.numpy() for r in results]),
    )


def z_scores(samples, expected):
    return (samples.mean(0) - expected) / (samples.std(0) / np.sqrt(len(samples)))


def rms_z(samples, expected):
    return np.sqrt(np.mean(z_scores(samples, expected) ** 2))


@pytest.mark.parametrize("start", [False, True])
def test_ulisse_without_coins_equals_the_direct_solve(rows, start):
    A, _, B = rows
    B[2] = 0  # which stays at zero
    start = torch.as_tensor(np.vstack([B[:1], np.zeros((2, N))])) if start else None
    result = run(*rows, start=start, stop=0.0, n_paired=2, tol=1e-12)
    expected = np.linalg.solve(A, B.T).T
    np.testing.assert_allclose(result.solution, expected, rtol=1e-8, atol=1e-8)
    assert_same(result.second, result.solution[:2])
    assert_same(result.iterate, result.solution)
    assert result.converged and result.truncated == (False, False) and result.survival == []
    assert result.n_iter == result.n_sure
    assert (result.residual <= 1e-12).all()


def test_ulisse_is_unbiased(rows):
    """Root mean square z over 8 systems: the coordinates of one system move together."""
    A, P_inv, _ = rows
    firsts, seconds = [], []
    for seed in range(8):
        B = np.random.default_rng(seed).normal(size=(2, N))
        expected = np.linalg.solve(A, B.T).T
        first, second = draws((A, P_inv, B), 80, seed=seed)
        firsts.append(rms_z(first, expected))
        seconds.append(rms_z(second[:, 0], expected[0]))
    assert 0.5 < np.sqrt(np.mean(np.square(firsts))) < 1.5
    assert 0.5 < np.sqrt(np.mean(np.square(seconds))) < 1.5


def test_ulisse_pair_is_independent(rows):
    """The product of two draws has the product's expectation, the square of one has not."""
    A, _, B = rows
    exact = np.linalg.solve(A, B[0]) @ B[0]
    first, second = draws(rows)
    products = np.einsum("si,ij,sj->s", first[:, 0], A, second[:, 0])
    squares = np.einsum("si,ij,sj->s", first[:, 0], A, first[:, 0])
    assert abs(z_scores(products, exact)) < 4
    assert z_scores(squares, exact) > 5


@pytest.mark.parametrize("roulette", slow(["adaptive", 0.05], but=["adaptive"]))
def test_ulisse_variance_equals_the_formula(rows, roulette):
    r"""Mean square error in the norm of A: sum of a_j^2 (1 / q_j - 1)."""
    A, P_inv, B = rows
    b = B[1]
    _, increments, sizes = naive_increments(A, P_inv, b, STOP)
    q = survival_of(roulette, sizes)
    energies = np.einsum("ji,ik,jk->j", increments, A, increments)
    expected = np.sum(energies * (1 / q - 1))
    samples, _ = draws((A, P_inv, b[None]), roulette=roulette)
    error = samples[:, 0] - np.linalg.solve(A, b)
    squares = np.einsum("si,ij,sj->s", error, A, error)
    assert abs(z_scores(squares, expected)) < 4
    assert np.abs(z_scores(samples[:, 0], np.linalg.solve(A, b))).max() < 4


@pytest.mark.parametrize("roulette", ["adaptive", 0.3])
def test_ulisse_draws_are_the_weighted_increments(rows, roulette):
    A, P_inv, B = rows
    sure, increments, sizes = naive_increments(A, P_inv, B[0], STOP)
    q = survival_of(roulette, sizes)
    lengths = set()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        result = run(A, P_inv, B[:1], generator, stop=STOP, roulette=roulette)
        j = len(result.survival)
        np.testing.assert_allclose(result.survival, q[:j], rtol=1e-6)
        expected = sure + (increments[:j] / q[:j, None]).sum(0)
        np.testing.assert_allclose(result.solution[0], expected, rtol=1e-6, atol=1e-8)
        plain = sure + increments[:j].sum(0)
        np.testing.assert_allclose(result.iterate[0], plain, rtol=1e-6, atol=1e-8)
        assert result.truncated == (j < len(increments), False)
        assert result.n_iter == result.n_sure + j
        lengths.add(j)
    assert len(lengths) > 2


def test_ulisse_rows_left_when_the_second_goes_on_keep_their_iterate(rows):
    A, _, B = rows
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        result = run(*rows, generator, stop=STOP, n_paired=1)
        residual = np.linalg.norm(B - result.iterate.numpy() @ A, axis=1)
        residual /= np.linalg.norm(B, axis=1)
        np.testing.assert_allclose(result.residual, residual, rtol=1e-6)
        assert result.iterate.shape == (3, N) and result.second.shape == (1, N)
        assert (residual <= STOP * 1.5).all()


def test_ulisse_start_within_the_stop_still_moves(rows):
    A, _, B = rows
    exact = torch.as_tensor(np.linalg.solve(A, B.T).T)
    near = exact + 1e-3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    assert run(*rows, start=near, stop=STOP).n_iter >= 1
    result = run(*rows, start=exact, stop=STOP)
    assert result.n_iter <= 1
    torch.testing.assert_close(result.solution, exact)


def test_ulisse_first_increment_that_raises_the_residual_is_followed_by_others():
    A = spd()
    b = np.linalg.eigh(A)[1][:, [0, -1]] @ [1.0, 0.3]  # one step overshoots along the second axis
    result = run(A, np.eye(N), b[None], stop=1.0)
    with pytest.warns(NumericalWarning, match="max_iter=1"):
        after_one = run(A, np.eye(N), b[None], stop=1.0, max_iter=1)
    assert not after_one.converged and float(after_one.residual) > 1
    assert result.converged and float(result.residual) < 1


def test_ulisse_in_float32(rows):
    A, P_inv, B = (M.astype(np.float32) for M in rows)
    result = run(A, P_inv, B, stop=0.0)
    assert result.solution.dtype == torch.float32 and result.converged
    np.testing.assert_allclose(result.solution, np.linalg.solve(A, B.T).T, rtol=0.02, atol=0.02)


def test_ulisse_max_iter_warns(rows):
    with pytest.warns(NumericalWarning, match="max_iter=3"):
        assert not run(*rows, stop=1e-3, max_iter=3).converged


def test_ulisse_indefinite_matrix_warns_and_stays_finite():
    A, B = np.diag([1.0, 2.0, -3.0]), np.ones((1, 3))
    with pytest.warns(NumericalWarning, match="not positive definite"):
        result = run(A, np.eye(3), B, stop=0.0)
    assert not result.converged and bool(torch.isfinite(result.solution).all())


@pytest.mark.parametrize("bad", ["russian", -0.1])
def test_ulisse_bad_parameters(rows, bad):
    with pytest.raises(ValueError, match="roulette"):
        run(*rows, roulette=bad)
