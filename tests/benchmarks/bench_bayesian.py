"""One stochastic gradient of the log posterior against gpytorch's by conjugate gradients.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_bayesian.py -m benchmark -s``. Seconds
are the processor's, the least of a few repeats, so that a neighbour does not count.
Data of house_8L are read from the folder ``SKGP_DATA_DIR``, by default ``../shared/data`` beside
the repository (``house_8L.npz``: X, y); its test is skipped where they are absent.

Both sides work in float32 on one problem: ARD RBF with noise, hyper-parameters fixed, relative
residuals of 0.01, the same number of probes. gpytorch gets its default preconditioner (rank 15) and
one of the rank of ours. Its kernel matrix is dense as ours is; its noise has the same distribution
without a preconditioner alone, so that the standard deviation of the trace is printed as well.
"""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.stochastic_gradient import StochasticGradient
from skgp.priors import LogNormal
from tests.benchmarks.data import arrays_of, seconds_of

pytestmark = pytest.mark.benchmark

D, TOL, N_PROBES = 8, 0.01, 4
AMPLITUDE, LENGTH_SCALE, NOISE = 1.0, 3.0, 0.05


def problem(n):
    """Standard normal inputs and a smooth function of them, with noise."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, D))
    y = np.sin(X[:, 0]) + 0.5 * np.cos(X[:, 1] * X[:, 2]) + NOISE**0.5 * rng.normal(size=n)
    return X, (y - y.mean()) / y.std()


def least_seconds(function, repeats):
    return min(seconds_of(function)[1] for _ in range(repeats))


def our_field(X, y, rank, **kwargs):
    kernel = AMPLITUDE * RBF([LENGTH_SCALE] * X.shape[1]) + WhiteKernel(NOISE)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    posterior = LogPosterior(kernel, data, [LogNormal(1.0)] * kernel.n_dims)
    field = StochasticGradient(posterior, rank=rank, n_probes=N_PROBES, **kwargs)
    return field, kernel.theta


def our_gradient(X, y, rank):
    """Seconds, of one gradient and of the choice of pivots; iterations; noise; the mean."""
    field, u = our_field(X, y, rank, stop=TOL)
    generator = torch.Generator().manual_seed(0)
    pivots = least_seconds(lambda: field.choose_pivots(u, generator), 1)
    estimates = []

    def one():
        estimates.append(field.estimate(u, field.draw_probes(generator), generator))

    seconds = least_seconds(one, 6)
    gradients = np.array([e.gradient for e in estimates])
    n_iter = np.mean([e.n_iter for e in estimates])
    return seconds, pivots, n_iter, gradients.std(0)


def gpytorch_gradient(X, y, rank):
    """Seconds and noise of gpytorch's gradient, by log hyper-parameters."""
    gpytorch = pytest.importorskip("gpytorch", reason="pip install skgp[bench]")
    X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(X, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1])
            )

        def forward(self, rows):
            mean, covariance = self.mean_module(rows), self.covar_module(rows)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    model = Model()
    model.covar_module.outputscale = AMPLITUDE
    model.covar_module.base_kernel.lengthscale = LENGTH_SCALE
    model.likelihood.noise = NOISE
    model.train()
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    settings, gradients = gpytorch.settings, []

    def one():
        model.zero_grad()
        (likelihood(model(X), y) * len(y)).backward()
        raw = model.covar_module.base_kernel.raw_lengthscale
        # d lengthscale / d raw = sigmoid(raw): to the logarithm's derivative.
        gradients.append((raw.grad / raw.sigmoid() * LENGTH_SCALE).detach().numpy().ravel())

    with (
        settings.max_cholesky_size(0),
        settings.cg_tolerance(TOL),
        settings.num_trace_samples(N_PROBES),
        settings.max_preconditioner_size(rank),
        settings.max_cg_iterations(1000),
    ):
        seconds = least_seconds(one, 3)
    return seconds, np.std(gradients, axis=0)


def test_gradient_is_four_times_faster_than_gpytorch():
    X, y = problem(5000)
    print()
    ours = our_gradient(X, y, 300)
    print(
        f"  skgp, rank 300: {ours[0]:.2f} s a gradient ({ours[2]:.1f} products; pivots once "
        f"{ours[1]:.2f} s), noise sd of the length scales {ours[3][1:-1].mean():.2f}"
    )
    peers = []
    for rank in (15, 300):
        seconds, noise = gpytorch_gradient(X, y, rank)
        peers.append(seconds)
        print(f"  gpytorch, rank {rank}: {seconds:.2f} s a gradient, noise sd {noise.mean():.2f}")
    assert min(peers) >= 4 * ours[0]


def test_gradient_of_house_8l():
    """Seconds a gradient and products at n = 20 thousand; less than 6 GB by construction."""
    arrays = arrays_of("house_8L")
    X, y = arrays["X"].astype(float), arrays["y"].astype(float)
    rows = np.random.default_rng(0).permutation(len(X))[:20_500]
    X, y = X[rows], np.log(y[rows] + 1)
    X, y = (X - X.mean(0)) / (X.std(0) + 1e-12), (y - y.mean()) / y.std()
    field, u = our_field(X, y, 300)
    generator = torch.Generator().manual_seed(0)
    pivots = least_seconds(lambda: field.choose_pivots(u, generator), 1)
    at, seconds = seconds_of(lambda: field.estimate(u, field.draw_probes(generator), generator))
    print(
        f"\n  house_8L, n = {len(field.posterior.data.y)}: {seconds:.1f} s a gradient, "
        f"{at.n_iter} products, stored {field.operator.stored}; pivots once {pivots:.1f} s"
    )
    assert at.converged
