"""Feature maps and one iteration of each weight-space solver, against n and m.

Run with ``pytest tests/benchmarks/bench_weights.py -m benchmark``.
"""

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gram import StreamingGram, log_marginal_likelihood
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.inference.weights.solvers import gauss_seidel, weights_cg
from skgp.kernels.spectral import FourierFeatures

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.filterwarnings("ignore::skgp.linalg.NumericalWarning"),
]
D, NOISE, N_SAMPLES = 8, 0.01, 8


def inputs(n):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, D, generator=generator)
    y = torch.sin(X[:, 0]) + 0.1 * torch.randn(n, generator=generator)
    return X, y


def fourier(m, **options):
    return FourierFeatures(RBF(2.0), m, D, seed=0, **options)


def run_few(benchmark, function):
    """Time a call that takes seconds: one to warm up, three that count."""
    return benchmark.pedantic(function, rounds=3, iterations=1, warmup_rounds=1)


@pytest.mark.parametrize("kind", ["orthogonal", "iid", "hadamard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_bench_feature_map(benchmark, kind, dtype):
    X = inputs(10_000)[0].to(dtype)
    basis = fourier(2000, kind=kind)
    run_few(benchmark, lambda: basis.features(X, 0))


@pytest.mark.parametrize("n", [5000, 20_000])
@pytest.mark.parametrize("m", [1000, 4000])
def test_bench_streaming_gram_update(benchmark, n, m):
    X, y = inputs(n)
    basis = fourier(m)
    run_few(benchmark, lambda: StreamingGram(basis, dtype=torch.float32).update(X, y))


@pytest.mark.parametrize("m", [1000, 4000])
def test_bench_evidence_evaluation(benchmark, m):
    statistics = StreamingGram(fourier(m), dtype=torch.float32).update(*inputs(5000))
    run_few(benchmark, lambda: log_marginal_likelihood(statistics, NOISE))


@pytest.mark.parametrize("n", [5000, 20_000])
@pytest.mark.parametrize("m", [4000, 16_000])
def test_bench_gauss_seidel_block(benchmark, n, m):
    """One block of 2000 weights: independent of m."""
    X, y = inputs(n)
    design = StreamedDesign(fourier(m), X, dtype=torch.float32)
    targets = y[:, None].expand(-1, 1 + N_SAMPLES).contiguous()
    run_few(
        benchmark,
        lambda: gauss_seidel(design, targets, NOISE, callback=lambda iteration, info: True),
    )


@pytest.mark.parametrize("n", [5000, 20_000])
@pytest.mark.parametrize("m", [4000, 16_000])
@pytest.mark.parametrize("kept", [True, False], ids=["features kept", "regenerated"])
def test_bench_cg_product(benchmark, n, m, kept):
    """What an iteration of `weights_cg` is made of."""
    design = StreamedDesign(fourier(m), inputs(n)[0], dtype=torch.float32, keep=kept)
    V = torch.ones(m, 1 + N_SAMPLES, dtype=torch.float64)
    run_few(benchmark, lambda: design.gram_matmul(V))


@pytest.mark.parametrize("rank", [100, 400])
def test_bench_cg_set_up_and_iteration(benchmark, rank):
    X, y = inputs(5000)
    design = StreamedDesign(fourier(4000), X, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    run_few(
        benchmark,
        lambda: weights_cg(
            design,
            y[:, None],
            NOISE,
            n_precondition_rows=rank,
            max_iter=1,
            generator=generator,
        ),
    )


@pytest.mark.parametrize("n", [1, 1000])
@pytest.mark.parametrize("m", [4000, 16_000])
def test_bench_predict_mean_and_variance(benchmark, n, m):
    weights = torch.ones(m, dtype=torch.float64)
    root = torch.ones(m, N_SAMPLES, dtype=torch.float64)
    posterior = LinearWeightsPosterior(fourier(m), weights, root, weights[:0])
    X = inputs(n)[0]
    run_few(benchmark, lambda: posterior.mean_and_variance(X))
