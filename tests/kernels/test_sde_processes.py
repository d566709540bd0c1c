"""Transitions of the primitive processes against arithmetic of many digits."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special

from skgp.kernels.sde_processes import (
    INTEGRATED,
    LINE,
    MATERN12,
    MATERN32,
    MATERN52,
    ROTATION,
    Oscillator,
    lower_gamma,
)
from skgp.kernels.sde_rational import GAUSSIAN4, GAUSSIANS
from tests.covering import slow_case

PRIMITIVES = [MATERN12, MATERN32, MATERN52, ROTATION, GAUSSIAN4, *GAUSSIANS]
each_primitive = pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda p: p.name)
# What entries lose in rounding, by the number of states: 1e-13, but of many derivatives.
LOST = {10: 2e-13, 12: 1e-12, 14: 2e-11, 16: 3e-10}
# On both sides of every switch between formulas, in one batch.
R = [1e-12, 1e-6, 1e-3, 0.1, 0.5, 0.74, 0.76, 1.2, 1.3, 2.6, 9.0]


def transition(primitive, r):
    r = torch.tensor(r, dtype=torch.float64)
    shape = (primitive.n_states, primitive.n_states, len(r))
    F, Q = torch.full(shape, torch.nan).double(), torch.full(shape, torch.nan).double()
    primitive.fill(r, F, Q)
    return F.numpy(), Q.numpy()


def exact_transition(primitive, r):
    """F and Q of the feedback and noise as they are stored, by Van Loan's block exponential."""
    d = primitive.n_states
    A, L = primitive.feedback, primitive.noise
    if isinstance(A, torch.Tensor):
        A, L = mpmath.matrix(A.tolist()), mpmath.matrix(L.tolist())
    block = mpmath.zeros(2 * d)
    block[:d, :d], block[:d, d:], block[d:, d:] = -A, L * L.T, A.T
    # Integers are of one scale: those of few states, with gaps of any length, are of many.
    exponential = (mpmath.expm if d <= 3 else matrix_exponential)(block * mpmath.mpf(r))
    F = exponential[d:, d:].T
    return F, F * exponential[:d, d:]


def matrix_exponential(M):
    """In integers, which are faster than mpmath's: Taylor's series of M / 2^k, squared k times."""
    k = 8 + max(0, math.ceil(mpmath.log(mpmath.mnorm(M, 1), 2)))
    bits = mpmath.mp.prec + 64 + 2 * k
    A = np.array([[int(mpmath.ldexp(x, bits - k)) for x in row] for row in M.tolist()], object)
    term = total = np.diag(np.full(len(A), 1 << bits, object))
    for n in itertools.count(1):
        term = (term @ A >> bits) // n
        if abs(term).max() <= 1:
            break
        total = total + term
    for _ in range(k):
        total = total @ total >> bits
    return mpmath.matrix([[mpmath.ldexp(x, -bits) for x in row] for row in total.tolist()])


@pytest.mark.parametrize("step", [6, slow_case(1)])
@each_primitive
def test_transition_is_accurate_in_every_entry(primitive, step):
    # Of many states short gaps need hundreds of digits, and Q leaves the range of floats.
    d = primitive.n_states
    gaps = R if d <= 6 else R[2::step]
    F, Q = transition(primitive, gaps)
    for n, r in enumerate(gaps):
        # The least entry of Q is of the order r^(2d - 1).
        with mpmath.workdps(40 + math.ceil(-2 * d * min(math.log10(r), 0))):
            exact_F, exact_Q = exact_transition(primitive, r)
            for i in range(d):
                for j in range(d):
                    assert abs(F[i, j, n] - exact_F[i, j]) < 0.3 * LOST.get(d, 1e-13)
                    scale = mpmath.sqrt(exact_Q[i, i] * exact_Q[j, j])
                    assert abs(Q[i, j, n] - exact_Q[i, j]) <= LOST.get(d, 1e-13) * scale, (r, i, j)


@pytest.mark.parametrize("shape", [1e-3, 0.2, 1.0, 5.0, 100.0])
def test_oscillator_and_its_slopes_in_the_shape_are_accurate(shape):
    primitive, r = Oscillator(shape), [1e-6, 1e-3, 0.1, 0.4 / (1 + shape), 0.6 / (1 + shape), 2.0]
    F, Q = transition(primitive, r)
    dQ, dP, c = primitive.shape_slopes(torch.tensor(r, dtype=torch.float64))
    with mpmath.workdps(50):
        for n, each in enumerate(r):
            exact_F, exact_Q = exact_transition(primitive, each)
            (low, low_Q), (high, high_Q) = (
                exact_transition(Exact(shape * mpmath.exp(step)), each) for step in (-1e-12, 1e-12)
            )
            for i, j in np.ndindex(2, 2):
                scale = mpmath.sqrt(exact_Q[i, i] * exact_Q[j, j])
                assert abs(F[i, j, n] - exact_F[i, j]) < 1e-14
                assert abs(Q[i, j, n] - exact_Q[i, j]) <= 1e-12 * scale
                assert abs(float(dQ[i, j, n]) - (high_Q - low_Q)[i, j] / 2e-12) <= 1e-9 * scale
                assert abs(c * each * F[i, j, n] - (high - low)[i, j] / 2e-12) < 1e-9
    np.testing.assert_allclose(dP, shape * np.array([[0, 1], [1, 4 * shape]]))


class Exact:
    """Feedback and noise of an oscillator in many digits."""

    n_states = 2

    def __init__(self, rho):
        self.feedback = mpmath.matrix([[-rho, 1], [-1, -rho]])
        self.noise = mpmath.matrix([0, mpmath.sqrt(4 * rho * (1 + rho**2))])


@pytest.mark.parametrize("primitive", [LINE, INTEGRATED], ids=lambda p: p.name)
def test_transitions_of_trends(primitive):
    r = [0.0, 1e-6, 0.3, 50.0]
    F, Q = transition(primitive, r)
    for n, each in enumerate(r):
        with mpmath.workdps(60):
            exact_F, exact_Q = exact_transition(primitive, each)
        for i, j in np.ndindex(2, 2):
            assert abs(F[i, j, n] - exact_F[i, j]) <= 1e-14 * (1 + each)
            assert abs(Q[i, j, n] - exact_Q[i, j]) <= 1e-12 * (1e-40 + exact_Q[i, j])


@each_primitive
def test_a_batch_on_both_sides_of_a_switch_equals_its_members(primitive):
    r, rounding = [0.3, 1.0, 3.0], LOST.get(primitive.n_states, 1e-12)
    together, alone = transition(primitive, r), [transition(primitive, [one]) for one in r]
    for which in range(2):
        expected = np.concatenate([pair[which] for pair in alone], -1)
        np.testing.assert_allclose(together[which], expected, rtol=1e-12, atol=rounding)


@each_primitive
def test_transition_at_huge_gaps(primitive):
    far = [1e2, 300.0, min(primitive.horizon, 1e4)]
    F, Q = transition(primitive, far)
    if primitive is ROTATION:
        assert (Q == 0).all()
        return np.testing.assert_allclose(F[0, 0], np.cos(far), rtol=0, atol=1e-12)
    assert (F[..., -1] == 0).all() and np.abs(F).max() < 1e-30
    np.testing.assert_allclose(
        Q, np.repeat(primitive.stationary.numpy()[..., None], 3, 2), atol=1e-30
    )


@each_primitive
def test_lyapunov_equation_and_variance(primitive):
    A, P, L, H = (
        t.numpy()
        for t in (primitive.feedback, primitive.stationary, primitive.noise, primitive.observation)
    )
    lost = 10 * LOST.get(len(A), 1e-14)
    np.testing.assert_allclose(A @ P + P @ A.T + np.outer(L, L), 0 * A, atol=lost)
    assert abs(H @ P @ H - 1) < 1e-12


@pytest.mark.parametrize("primitive", [GAUSSIAN4, *GAUSSIANS], ids=lambda p: p.name)
def test_rational_processes_keep_their_stated_error(primitive):
    r = np.linspace(0, 40, 20_001)
    error = np.abs(primitive.correlation(r)[0] - np.exp(-(r**2) / 2)).max()
    assert 0.97 * primitive.error < error <= primitive.error


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("span", [(1e-8, 1e-2), (1e-3, 40.0), (10.0, 300.0)])
def test_lower_gamma_keeps_all_digits(k, span):
    x = torch.logspace(*np.log10(span), 200, dtype=torch.float64)
    np.testing.assert_allclose(
        lower_gamma(k, x, torch.exp(-x)), special.gammainc(k, x.numpy()), rtol=3e-14
    )


def test_nothing_to_do_for_no_gaps():
    for primitive in PRIMITIVES:
        F, Q = transition(primitive, [])
        assert F.shape == Q.shape == (primitive.n_states, primitive.n_states, 0)
