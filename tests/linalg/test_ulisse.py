"""ULISSE against direct solves, its own variance formula and a NumPy version of the iteration."""

import numpy as np
import pytest
import torch

from skgp.linalg.exceptions import NumericalWarning
from skgp.linalg.ulisse import ulisse
from tests.same import assert_same

N, N_DRAWS, STOP = 14, 700, 0.3


def spd(n=N, condition=60.0, seed=0):
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return (Q * np.geomspace(1, 1 / condition, n)) @ Q.T


@pytest.fixture
def system():
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


def survival_of(roulette, sizes, beta):
    j = np.arange(1, len(sizes) + 1)
    return sizes if roulette == "adaptive" else np.exp(-beta * j * (j + 1) / 2)


def draws(system, n_draws=N_DRAWS, seed=7, **kwargs):
    """Solutions (n_draws, k, n) and second ones (n_draws, 1, n)."""
    generator = torch.Generator().manual_seed(seed)
    results = [run(*system, generator, stop=STOP, n_paired=1, **kwargs) for _ in range(n_draws)]
    return (
        np.array([r.solution.numpy() for r in results]),
        np.array([r.second.numpy() for r in results]),
    )


def z_scores(samples, expected):
    return (samples.mean(0) - expected) / (samples.std(0) / np.sqrt(len(samples)))


def rms_z(samples, expected):
    return np.sqrt(np.mean(z_scores(samples, expected) ** 2))


@pytest.mark.parametrize("start", [False, True])
def test_ulisse_without_coins_equals_the_direct_solve(system, start):
    A, _, B = system
    B[2] = 0  # which stays at zero
    start = torch.as_tensor(np.vstack([B[:1], np.zeros((2, N))])) if start else None
    result = run(*system, start=start, stop=0.0, n_paired=2, tol=1e-12)
    expected = np.linalg.solve(A, B.T).T
    np.testing.assert_allclose(result.solution, expected, rtol=1e-8, atol=1e-8)
    assert_same(result.second, result.solution[:2])
    assert_same(result.iterate, result.solution)
    assert result.converged and result.truncated == (False, False) and result.survival == []
    assert result.n_iter == result.n_sure
    assert (result.residual <= 1e-12).all()


def test_ulisse_is_unbiased(system):
    """Root mean square z over 8 systems: the coordinates of one system move together."""
    A, P_inv, _ = system
    firsts, seconds = [], []
    for seed in range(8):
        B = np.random.default_rng(seed).normal(size=(2, N))
        expected = np.linalg.solve(A, B.T).T
        first, second = draws((A, P_inv, B), 150, seed=seed)
        firsts.append(rms_z(first, expected))
        seconds.append(rms_z(second[:, 0], expected[0]))
    assert 0.5 < np.sqrt(np.mean(np.square(firsts))) < 1.5
    assert 0.5 < np.sqrt(np.mean(np.square(seconds))) < 1.5


def test_ulisse_pair_is_independent(system):
    """The product of two draws has the product's expectation, the square of one has not."""
    A, _, B = system
    exact = np.linalg.solve(A, B[0]) @ B[0]
    first, second = draws(system)
    products = np.einsum("si,ij,sj->s", first[:, 0], A, second[:, 0])
    squares = np.einsum("si,ij,sj->s", first[:, 0], A, first[:, 0])
    assert abs(z_scores(products, exact)) < 4
    assert z_scores(squares, exact) > 5


@pytest.mark.parametrize("roulette, beta", [("adaptive", 0.0), ("paper", 0.05)])
def test_ulisse_variance_equals_the_formula(system, roulette, beta):
    r"""Mean square error in the norm of A: sum of a_j^2 (1 / q_j - 1)."""
    A, P_inv, B = system
    b = B[1]
    _, increments, sizes = naive_increments(A, P_inv, b, STOP)
    q = survival_of(roulette, sizes, beta)
    energies = np.einsum("ji,ik,jk->j", increments, A, increments)
    expected = np.sum(energies * (1 / q - 1))
    samples, _ = draws((A, P_inv, b[None]), roulette=roulette, beta=beta)
    error = samples[:, 0] - np.linalg.solve(A, b)
    squares = np.einsum("si,ij,sj->s", error, A, error)
    assert abs(z_scores(squares, expected)) < 4
    assert np.abs(z_scores(samples[:, 0], np.linalg.solve(A, b))).max() < 4


@pytest.mark.parametrize("roulette, beta", [("adaptive", 0.0), ("paper", 0.3)])
def test_ulisse_draws_are_the_weighted_increments(system, roulette, beta):
    A, P_inv, B = system
    sure, increments, sizes = naive_increments(A, P_inv, B[0], STOP)
    q = survival_of(roulette, sizes, beta)
    lengths = set()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        result = run(A, P_inv, B[:1], generator, stop=STOP, roulette=roulette, beta=beta)
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


def test_ulisse_rows_left_when_the_second_goes_on_keep_their_iterate(system):
    A, _, B = system
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        result = run(*system, generator, stop=STOP, n_paired=1)
        residual = np.linalg.norm(B - result.iterate.numpy() @ A, axis=1)
        residual /= np.linalg.norm(B, axis=1)
        np.testing.assert_allclose(result.residual, residual, rtol=1e-6)
        assert result.iterate.shape == (3, N) and result.second.shape == (1, N)
        assert (residual <= STOP * 1.5).all()


def test_ulisse_start_within_the_stop_still_moves(system):
    A, _, B = system
    exact = torch.as_tensor(np.linalg.solve(A, B.T).T)
    near = exact + 1e-3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    assert run(*system, start=near, stop=STOP).n_iter >= 1
    result = run(*system, start=exact, stop=STOP)
    assert result.n_iter <= 1
    torch.testing.assert_close(result.solution, exact)


def test_ulisse_first_increment_that_raises_the_residual_is_followed_by_others():
    A = spd()
    b = np.linalg.eigh(A)[1][:, [0, -1]] @ [1.0, 0.3]  # one step overshoots along the second axis
    result = run(A, np.eye(N), b[None], stop=1.0, warn=False)
    after_one = run(A, np.eye(N), b[None], stop=1.0, max_iter=1, warn=False)
    assert not after_one.converged and float(after_one.residual) > 1
    assert result.converged and float(result.residual) < 1


def test_ulisse_in_float32(system):
    A, P_inv, B = (M.astype(np.float32) for M in system)
    result = run(A, P_inv, B, stop=0.0)
    assert result.solution.dtype == torch.float32 and result.converged
    np.testing.assert_allclose(result.solution, np.linalg.solve(A, B.T).T, rtol=0.02, atol=0.02)


def test_ulisse_max_iter_warns(system):
    with pytest.warns(NumericalWarning, match="max_iter=3"):
        assert not run(*system, stop=1e-3, max_iter=3).converged
    assert not run(*system, stop=1e-3, max_iter=3, warn=False).converged


def test_ulisse_indefinite_matrix_warns_and_stays_finite():
    A, B = np.diag([1.0, 2.0, -3.0]), np.ones((1, 3))
    with pytest.warns(NumericalWarning, match="not positive definite"):
        result = run(A, np.eye(3), B, stop=0.0)
    assert not result.converged and bool(torch.isfinite(result.solution).all())


@pytest.mark.parametrize("bad", [{"roulette": "russian"}, {"beta": -0.1}])
def test_ulisse_bad_parameters(system, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        run(*system, **bad)
