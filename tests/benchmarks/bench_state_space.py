"""State-space GPs at a million points, next to celerite2 (C++) and a loop over the data in NumPy.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_state_space.py -m benchmark -s``; the
ratios are printed after each test. celerite2 is compared where it is installed (extra ``bench``).
Times are the least of a few rounds, of processor time, which a busy machine changes less; the
peak memory is that of the whole process.
"""

import math
import resource
import time

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ExpSineSquared, Matern

from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.smoother import evidence
from skgp.kernels import SHO
from skgp.kernels.sde import state_space
from tests.reference.state_space import kalman_loop, smoother_loop

pytestmark = pytest.mark.benchmark
N, VARIANCE, LENGTH_SCALE, NOISE = 10**6, 1.3, 2.0, 0.09
LOOP = 5000  # points of the NumPy loop, whose time is scaled up


def series(n):
    """Irregular times, ten a unit, and noisy values."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, n / 10, n))
    return x, np.sin(x) + NOISE**0.5 * rng.standard_normal(n)


def sites(x, y):
    """Gaps, beta and weight of Gaussian noise."""
    x, y = torch.tensor(x), torch.tensor(y)
    return x.diff(prepend=x[:1]), y / NOISE, torch.full_like(y, 1 / NOISE)


def dynamics_of(kernel):
    form = state_space(kernel)
    return form.at()


def seconds(function, rounds=5):
    """Least processor time of some rounds."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return min(taken)


def loop_seconds(dynamics, gaps, beta, weight):
    """Times of a Kalman filter, and with a smoother, in NumPy; the transitions are not counted."""
    F, Q = (np.moveaxis(t.numpy(), -1, 0) for t in dynamics.transition(gaps[:LOOP]))
    P0, H = dynamics.stationary.numpy(), dynamics.observation.numpy()
    first = (beta[:LOOP].numpy(), weight[:LOOP].numpy())
    _, *states = kalman_loop(F, Q, P0, H, *first)
    forwards = seconds(lambda: kalman_loop(F, Q, P0, H, *first), rounds=2)
    back = seconds(lambda: smoother_loop(F, H, *states), rounds=2)
    return forwards * len(gaps) / LOOP, (forwards + back) * len(gaps) / LOOP


def celerite_seconds(x, y):
    """Time and value of celerite2's log-likelihood, or NaNs."""
    celerite2 = pytest.importorskip("celerite2", reason="install the extra `bench`")
    process = celerite2.GaussianProcess(
        celerite2.terms.Matern32Term(sigma=VARIANCE**0.5, rho=LENGTH_SCALE)
    )

    def log_likelihood():
        process.compute(x, yerr=np.full(len(x), NOISE**0.5))
        return process.log_likelihood(y)

    return seconds(log_likelihood), log_likelihood()


@pytest.fixture
def one_thread():
    """Torch on one thread, as the others are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak_gigabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def test_bench_million_points_against_celerite2_and_a_loop(one_thread):
    x, y = series(N)
    dynamics, data = dynamics_of(VARIANCE * Matern(LENGTH_SCALE, nu=1.5)), sites(x, y)
    peer, peer_value = celerite_seconds(x, y)
    full = seconds(lambda: evidence(dynamics, *data))
    loop, loop_both = loop_seconds(dynamics, *data)
    value = evidence(dynamics, *data).log_normalizer
    value -= 0.5 * (N * math.log(2 * math.pi * NOISE) + float(y @ y) / NOISE)
    print(f"\nN = {N}, Matern-3/2, one thread; peak memory {peak_gigabytes():.2f} GB")
    print(f"celerite2 log-likelihood        {peer:7.3f} s   value {peer_value:.3f}")
    print(
        f"with gradient and all marginals {full:7.3f} s   value {value:.3f}   x {full / peer:.2f}"
    )
    print(f"NumPy loop, log-likelihood      {loop:7.1f} s")
    print(f"NumPy loop, marginals           {loop_both:7.1f} s   {loop_both / full:.0f} times ours")
    assert full < 4 * peer and 50 * full < loop_both
    assert peak_gigabytes() < 3


def celerite_terms(name):
    """The kernels of the test below as celerite2 has them."""
    terms = pytest.importorskip("celerite2", reason="install the extra `bench`").terms
    if name == "oscillators":
        each = (terms.SHOTerm(sigma=1.0, rho=rho, tau=10.0) for rho in (1.0, 3.0, 7.0))
        return terms.TermSum(*each)
    waves = (terms.ComplexTerm(a=0.1, b=0.0, c=0.05, d=2 * math.pi * j / 3) for j in range(1, 9))
    return terms.TermSum(terms.RealTerm(a=0.1, c=0.05), *waves)


@pytest.mark.parametrize("n", [10_000, 100_000])
@pytest.mark.parametrize("name", ["oscillators", "quasi-periodic"])
def test_bench_sums_of_complex_exponentials_against_celerite2(one_thread, name, n):
    """The likelihood alone there, with its gradient here; J = d in either."""
    kernel = {
        "oscillators": SHO(1.0, 10.0) + SHO(3.0, 10.0) + SHO(7.0, 10.0),
        "quasi-periodic": Matern(20.0, nu=0.5) * ExpSineSquared(1.2, 3.0),
    }[name]
    x, y = series(n)
    celerite2, dynamics, data = pytest.importorskip("celerite2"), dynamics_of(kernel), sites(x, y)
    process = celerite2.GaussianProcess(celerite_terms(name))

    def log_likelihood():
        process.compute(x, yerr=np.full(n, NOISE**0.5))
        return process.log_likelihood(y)

    peer = seconds(log_likelihood)
    ours = seconds(lambda: evidence(dynamics, *data).parameter_gradient)
    print(f"\n{name}, d = {dynamics.n_states}, n = {n}: celerite2 {peer:.4f} s, ours {ours:.3f} s")
    print(f"x {ours / peer:.1f}; peak memory {peak_gigabytes():.2f} GB")


@pytest.mark.parametrize("n", [1000, 10_000, 100_000])
@pytest.mark.parametrize("name", ["matern32", "matern52", "sum", "quasi-periodic"])
def test_bench_evidence_by_size_and_state_dimension(one_thread, name, n):
    kernel = {
        "matern32": Matern(2.0, nu=1.5),
        "matern52": Matern(2.0, nu=2.5),
        "sum": Matern(2.0, nu=1.5) + Matern(20.0, nu=2.5),
        "quasi-periodic": Matern(20.0, nu=1.5) * ExpSineSquared(1.5, 3.0) + Matern(9.0, nu=2.5),
    }[name]
    dynamics, data = dynamics_of(kernel), sites(*series(n))
    taken = seconds(lambda: evidence(dynamics, *data).parameter_gradient, rounds=2)
    print(f"\n{name}, d = {dynamics.n_states}, n = {n}: {taken:.4f} s")


def test_bench_posterior(one_thread):
    x, y = series(N)
    gaps, beta, weight = sites(x, y)
    dynamics = dynamics_of(VARIANCE * Matern(LENGTH_SCALE, nu=1.5))
    times, new = torch.tensor(x), torch.linspace(-1, N / 10, 10_000, dtype=torch.float64)
    print(f"\ncondition {seconds(lambda: Posterior(dynamics, times, beta, weight), 2):.3f} s")
    found = Posterior(dynamics, times, beta, weight)
    print(f"marginals at 10^4 times {seconds(lambda: found.marginals(new), 2):.4f} s")
    generator = torch.Generator().manual_seed(0)
    print(f"10 joint samples there {seconds(lambda: found.sample(new, 10, generator), 1):.3f} s")
    covariance = seconds(lambda: found.covariance(new[:1000]), 1)
    print(f"joint covariance at 1000 of them {covariance:.3f} s")
