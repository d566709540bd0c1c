"""Milliseconds an iteration of the solver of Theorem 3, against m from 1e5 to 1e7 and n to 6e4.

Run with ``pytest tests/benchmarks/bench_theorem3.py -m benchmark -s``. The paper's sizes: 784
inputs, 20000 basis functions and 100 rows an iteration, float32. One thread; sizes take turns, and
the best round of each counts, because a neighbour on the machine slows some sizes and not others.

With so many inputs most of an iteration goes to the frequencies of the sampled blocks, whatever the
rows: `test_bench_kinds_of_frequencies` and `test_bench_rows` show how much.
"""

import time

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.stochastic.basis import FourierBasis
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.likelihood import LikelihoodSolver
from skgp.inference.stochastic.state import LikelihoodState
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Bernoulli

pytestmark = pytest.mark.benchmark
D, N, ROUNDS, ITERATIONS = 784, 60_000, 5, 4
SIZES = (10**5, 10**6, 10**7)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows():
    """X (60000, 784) as bytes, the way images come, and y in {-1, 1}."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 256, size=(N, D), dtype=np.uint8)
    return X, np.where(X[:, 0] > 127, 1.0, -1.0)


def fourier(m, kind="iid"):
    return FourierBasis(FourierFeatures(RBF(2000.0), m, D, seed=0, kind=kind), dtype=torch.float32)


def iteration_ms(X, y, basis, *, batch_size=100, n_support=0):
    """Least time between the callbacks of neighbouring iterations; the first warms up."""
    stamps, likelihood = [], Bernoulli("logit")
    generator = torch.Generator().manual_seed(0)
    state = LikelihoodState.start(X, y, basis, likelihood, n_support=n_support, generator=generator)
    options = SGDOptions(batch_size, 20_000, max_iter=ITERATIONS + 1)
    solver = LikelihoodSolver(X, y, basis, state, options, generator, likelihood)
    solver.run(lambda iteration, info: stamps.append(time.perf_counter()))
    return 1000 * float(np.min(np.diff(stamps)))


def best_times(title, run, sizes, rounds=ROUNDS):
    """Time every size in turn, several times over; print and return the best of each."""
    times = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            times[size].append(run(size))
    best = {size: min(values) for size, values in times.items()}
    cells = ", ".join(f"{size}: {ms:.0f}" for size, ms in best.items())
    ratio = max(best.values()) / min(best.values())
    print(f"\n{title} (ms an iteration) {cells}; largest / smallest {ratio:.2f}")
    return best


NYSTROM = dict(n_support=200)


@pytest.mark.parametrize("options", [{}, NYSTROM], ids=["adagrad", "nystrom"])
def test_bench_iteration_is_flat_in_m(rows, options):
    best = best_times(
        f"against m, {options or 'adagrad'}",
        lambda m: iteration_ms(*rows, fourier(m), **options),
        SIZES,
    )
    assert max(best.values()) / min(best.values()) < 1.3


def test_bench_iteration_is_flat_in_n(rows):
    X, y = rows
    basis = fourier(10**6)
    best = best_times(
        "against n", lambda n: iteration_ms(X[:n], y[:n], basis), (600, 6_000, 60_000)
    )
    assert max(best.values()) / min(best.values()) < 1.3


def test_bench_kinds_of_frequencies(rows):
    best_times(
        "kinds of frequencies",
        lambda kind: iteration_ms(*rows, fourier(10**6, kind)),
        ("iid", "hadamard", "orthogonal"),
        rounds=2,
    )


def test_bench_rows(rows):
    basis = fourier(10**6)
    best_times(
        "against the rows of an iteration",
        lambda batch_size: iteration_ms(*rows, basis, batch_size=batch_size),
        (100, 200, 400, 800),
        rounds=2,
    )
