"""Milliseconds an iteration of the stochastic solvers, against n and m from 1e4 to 1e7.

Run with ``pytest tests/benchmarks/bench_sgd_cost.py -m benchmark -s``. The rows lie in a memory map
in pytest's temporary folder (360 MB for n = 1e7). One thread: with more, a neighbour on the machine
slows some sizes and not others; sizes take turns, and the best round of each counts. Predictions,
which cost O(m) a row, are timed for 1000 rows.

``-k theorem3``: labels at the paper's sizes, 784 inputs, 20000 basis functions and 100 rows an
iteration. With so many inputs most of it goes to the frequencies of the sampled blocks, whatever
the rows: `test_bench_theorem3_kinds_of_frequencies` and `test_bench_theorem3_rows` show how much.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.stochastic.basis import FourierBasis, InducingBasis, SpectralColumns
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.gaussian import SGDSolver
from skgp.inference.stochastic.likelihood import LikelihoodSolver
from skgp.inference.stochastic.state import LikelihoodState, SGDState
from skgp.inference.weights.posterior import LinearWeightsPosterior, WeightGaussian
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Bernoulli

pytestmark = pytest.mark.benchmark
D, NOISE, ROUNDS, ITERATIONS = 8, 0.01, 12, 6
SIZES = (10**4, 10**5, 10**6, 10**7)
PIXELS, LABELLED, BATCH = 784, (600, 6_000, 60_000), SGDOptions(100, 20_000, max_iter=5)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Memory-mapped X (1e7, 8) and y (1e7,) in float32."""
    folder = tmp_path_factory.mktemp("rows")
    n, step = max(SIZES), 10**6
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (n, D))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (n,))
    rng = np.random.default_rng(0)
    for start in range(0, n, step):
        X[start : start + step] = rng.standard_normal((step, D), dtype=np.float32)
        y[start : start + step] = np.sin(X[start : start + step, 0])
    yield X, y
    for file in folder.iterdir():
        file.unlink()


def fourier(m, kind="orthogonal"):
    return FourierBasis(FourierFeatures(RBF(2.0), m, D, seed=0, kind=kind), dtype=torch.float32)


def fit(X, y, basis, callback=None, *, optimizer=None, n_support=500, n_dense=0, **options):
    generator = torch.Generator().manual_seed(0)
    structure = dict(n_dense=n_dense, n_support=n_support, optimizer=optimizer)
    state = SGDState.start(X, y, basis, NOISE, generator=generator, **structure)
    options = SGDOptions(**{"max_iter": ITERATIONS + 2, **options})
    SGDSolver(X, y, basis, state, options, generator).run(callback)


def iteration_ms(X, y, basis, **options):
    """Median time between the callbacks of neighbouring iterations."""
    stamps = []
    fit(X, y, basis, lambda iteration, info: stamps.append(time.perf_counter()), **options)
    return 1000 * float(np.median(np.diff(stamps)[1:]))


def flatness(title, run, sizes=SIZES, rounds=ROUNDS):
    """Time every size in turn, several times over; print the best of each and return max / min."""
    times = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            times[size].append(run(size))
    best = {size: min(values) for size, values in times.items()}
    ratio = max(best.values()) / min(best.values())
    cells = ", ".join(f"{size}: {ms:.1f}" for size, ms in best.items())
    print(f"\n{title} (ms an iteration) {cells}; largest / smallest {ratio:.2f}")
    return ratio


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("optimizer", ["adagrad", "nystrom"])
def test_bench_iteration_is_flat_in_m(rows, optimizer, learns):
    X, y = (a[:100_000] for a in rows)
    options = dict(optimizer=optimizer, learn_hyperparameters=learns)
    title = f"against m, {optimizer}{', empirical Bayes' if learns else ''}"
    assert flatness(title, lambda m: iteration_ms(X, y, fourier(m), **options)) < 1.3


@pytest.mark.parametrize("m", SIZES[:3])
def test_bench_prediction_of_1000_rows(benchmark, rows, m):
    X = torch.as_tensor(rows[0][:1000])
    q = WeightGaussian.diagonal(torch.zeros(m), torch.ones(m))
    posterior = LinearWeightsPosterior.from_gaussian(SpectralColumns(fourier(m).fourier), q)
    benchmark.pedantic(lambda: posterior.mean_and_variance(X.double()), rounds=1, iterations=1)


@pytest.mark.parametrize("optimizer", ["adagrad", "nystrom"])
def test_bench_iteration_is_flat_in_n(rows, optimizer):
    basis = fourier(100_000)
    ratio = flatness(
        f"against n, {optimizer}",
        lambda n: iteration_ms(rows[0][:n], rows[1][:n], basis, optimizer=optimizer),
    )
    assert ratio < 1.3


def test_bench_iteration_with_inducing_points_is_flat_in_n_and_m(rows):
    X, y = rows

    def run(n):
        basis = InducingBasis(RBF(2.0), X[:n], dtype=torch.float32)
        sizes = dict(batch_size=1000, basis_batch_size=1000, n_support=200)
        return iteration_ms(X[:n], y[:n], basis, **sizes)

    assert flatness("against n = m, inducing points", run) < 1.3


@pytest.mark.parametrize("k", [0, 10, 100])
def test_bench_iteration_against_dense_columns(benchmark, rows, k):
    X, y = (a[:100_000] for a in rows)
    benchmark.pedantic(
        lambda: fit(X, y, fourier(100_000), n_dense=k, max_iter=5), rounds=2, iterations=1
    )


# ---- Theorem 3 -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images():
    """X (60000, 784) as bytes, the way images come, and y in {-1, 1}."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 256, size=(LABELLED[-1], PIXELS), dtype=np.uint8)
    return X, np.where(X[:, 0] > 127, 1.0, -1.0)


def of_pixels(m, kind="iid"):
    features = FourierFeatures(RBF(2000.0), m, PIXELS, seed=0, kind=kind)
    return FourierBasis(features, dtype=torch.float32)


def labels_ms(X, y, basis, *, options=BATCH, n_support=0):
    """Least time between the callbacks of neighbouring iterations; the first warms up."""
    stamps, likelihood = [], Bernoulli("logit")
    generator = torch.Generator().manual_seed(0)
    state = LikelihoodState.start(X, y, basis, likelihood, n_support=n_support, generator=generator)
    solver = LikelihoodSolver(X, y, basis, state, options, generator, likelihood)
    solver.run(lambda iteration, info: stamps.append(time.perf_counter()))
    return 1000 * float(np.min(np.diff(stamps)))


@pytest.mark.parametrize("n_support", [0, 200], ids=["adagrad", "nystrom"])
def test_bench_theorem3_is_flat_in_m(images, n_support):
    run = lambda m: labels_ms(*images, of_pixels(m), n_support=n_support)  # noqa: E731
    assert flatness(f"labels, against m, {n_support} support", run, SIZES[1:], 5) < 1.3


def test_bench_theorem3_is_flat_in_n(images):
    (X, y), basis = images, of_pixels(10**6)
    run = lambda n: labels_ms(X[:n], y[:n], basis)  # noqa: E731
    assert flatness("labels, against n", run, LABELLED, 5) < 1.3


def test_bench_theorem3_kinds_of_frequencies(images):
    run = lambda kind: labels_ms(*images, of_pixels(10**6, kind))  # noqa: E731
    flatness("kinds of frequencies", run, ("iid", "hadamard", "orthogonal"), 2)


def test_bench_theorem3_rows(images):
    basis = of_pixels(10**6)
    run = lambda n: labels_ms(*images, basis, options=replace(BATCH, batch_size=n))  # noqa: E731
    flatness("against the rows of an iteration", run, (100, 200, 400, 800), 2)
