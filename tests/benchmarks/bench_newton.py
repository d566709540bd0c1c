"""Newton's method for classifiers in weight space: steps, passes and time against n, m and c.

Run with ``pytest tests/benchmarks/bench_newton.py -m benchmark``; the Newton steps and the passes
over the features are in the column ``extra_info`` of ``--benchmark-json``, and printed with ``-s``.
"""

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.laplace import laplace_covariance
from skgp.inference.newton import fit_newton, newton_problem
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.posterior import ClassifierPosterior
from skgp.kernels.spectral import FourierFeatures
from skgp.likelihoods import Bernoulli

pytestmark = pytest.mark.benchmark
D, PRIOR_VARIANCE = 8, 30.0


def problem(n, m, c):
    """A float32 design whose features are kept, and c one-vs-rest columns."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, D, generator=generator)
    scores = torch.sin(2 * X @ torch.randn(D, c, generator=generator))
    scores += 0.5 * torch.randn(n, c, generator=generator)
    if c > 1:
        scores -= scores.max(1, keepdim=True).values
    Y = torch.where(scores >= 0, 1.0, -1.0).double()
    basis = FourierFeatures(RBF(2.0), m, D, seed=0)
    design = StreamedDesign(basis, X, dtype=torch.float32)
    for block in range(basis.n_blocks):
        design.features(block)
    return design, Y


def fit(design, Y, solver):
    generator = torch.Generator().manual_seed(0)
    data = newton_problem(design, Y, Bernoulli(), prior_variance=PRIOR_VARIANCE)
    return fit_newton(data, solver=solver, generator=generator)


@pytest.mark.parametrize("solver", ["exact", "cg"])
@pytest.mark.parametrize("c", [1, 10])
@pytest.mark.parametrize("m", [500, 2000])
@pytest.mark.parametrize("n", [4000, 16_000])
def test_bench_newton_fit(benchmark, n, m, c, solver):
    if solver == "exact" and n * m**2 * c > 1e11:
        pytest.skip("the exact route would take minutes")
    design, Y = problem(n, m, c)
    result = benchmark.pedantic(lambda: fit(design, Y, solver), rounds=1, warmup_rounds=0)
    counts = {
        "n_iter": result.n_iter,
        "n_products": result.n_products,
        "gradient_norm": float(result.gradient_norm.max()),
    }
    benchmark.extra_info.update(counts)
    print(f"\n{n=} {m=} {c=} {solver}: {counts}")


@pytest.mark.parametrize("c", [1, 10])
@pytest.mark.parametrize("n", [4000, 16_000])
def test_bench_newton_product(benchmark, n, c):
    """One conjugate gradient: the product with every column's own Hessian."""
    design, Y = problem(n, 2000, c)
    V = torch.ones(2000, c, dtype=torch.float64)
    curvature = torch.full_like(Y, 0.25)
    benchmark.pedantic(
        lambda: design.curvature_matmul(V, curvature), rounds=5, iterations=1, warmup_rounds=1
    )


@pytest.mark.parametrize("kind", ["diagonal", "chevron", "full"])
def test_bench_laplace_covariance(benchmark, kind):
    design, Y = problem(4000, 1000, 3)
    curvature = newton_problem(design, Y, Bernoulli()).curvature(torch.zeros_like(Y))
    benchmark.pedantic(
        lambda: laplace_covariance(design, curvature, kind=kind), rounds=2, warmup_rounds=1
    )


@pytest.mark.parametrize("kind", ["diagonal", "chevron", "full"])
def test_bench_predict_mean_and_variance(benchmark, kind):
    design, Y = problem(4000, 1000, 3)
    curvature = torch.full_like(Y, 0.25)
    weights = torch.ones(1000, 3, dtype=torch.float64)
    covariance = laplace_covariance(design, curvature, kind=kind)
    posterior = ClassifierPosterior(design.basis, weights, torch.zeros(3), covariance)
    X = torch.randn(1000, D, generator=torch.Generator().manual_seed(1))
    benchmark.pedantic(lambda: posterior.mean_and_variance(X), rounds=3, warmup_rounds=1)
