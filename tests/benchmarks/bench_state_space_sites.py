"""Variational inference of long series of labels, for fixed hyper-parameters.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_state_space_sites.py -m benchmark -s``.

The data are those of the state-space demo of GPML in spirit, as in appendix D of the S2VGP paper: a
wave that bends, x uniform, labels drawn by the logistic function; a Matern-3/2 kernel of variance 4
and length scale 1.5. The dense reference repeats conjugate-computation steps with Cholesky factors
of n x n matrices until its sites settle, for about a minute at n = 5000.
"""

import time

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.series import make_series
from skgp.kernels.sde import state_space
from skgp.likelihoods import Bernoulli, Poisson, StudentT

pytestmark = pytest.mark.benchmark
KERNEL = 4.0 * Matern(1.5, nu=1.5)
LOGIT = Bernoulli()
N_TEST = 2000
N_DENSE_STEPS = 6


def labels(n, span, seed):
    """Times (n,) and labels (n,) on [0, span]."""
    generator = torch.Generator().manual_seed(seed)
    x = span * torch.rand(n, generator=generator, dtype=torch.float64)
    probability = torch.sigmoid(latent(x))
    draws = torch.rand(n, generator=generator, dtype=torch.float64)
    return x, torch.where(draws < probability, 1.0, -1.0).to(x)


def latent(x):
    return 2 * torch.sin(x) + torch.cos(0.37 * x)


def dynamics():
    form = state_space(KERNEL)
    return form.at()


def gram(x, z):
    return torch.from_numpy(KERNEL(x[:, None].numpy(), z[:, None].numpy()))


def dense_sites(x, y):
    """Sites of the dense variational GP, and what its predictions need."""
    K = gram(x, x)
    slope, curvature = LOGIT.expected_derivatives(y, torch.zeros_like(y), torch.zeros_like(y))
    beta, weight = slope, -curvature
    for _ in range(N_DENSE_STEPS):
        mean, var = dense_moments(x, beta, weight, K, K, K.diagonal())
        slope, curvature = LOGIT.expected_derivatives(y, mean, var)
        beta, weight = slope - curvature * mean, -curvature
    return K, beta, weight


def dense_moments(x, beta, weight, K, cross, prior_var):
    """Moments of f where its covariance with the rows is ``cross`` (k, n)."""
    root = weight.sqrt()
    B = root[:, None] * K * root
    B.diagonal().add_(1.0)
    L = torch.linalg.cholesky(B)
    shift = K @ beta
    alpha = beta - root * torch.cholesky_solve((root * shift)[:, None], L)[:, 0]
    V = torch.linalg.solve_triangular(L, (cross * root).T, upper=False)
    return cross @ alpha, prior_var - V.square().sum(0)


def nlpd(y, mean, var):
    return -float(LOGIT.log_predictive(y, mean, var.clamp_min(0)).mean())


def timed(fit):
    begin = time.perf_counter()
    found = fit()
    return found, time.perf_counter() - begin


def test_bench_appendix_d():
    """N = 5000: at most half a second, and the test NLPD of the dense GP to within .002."""
    n, span = 5000, 30.0
    x, y = labels(n, span, seed=0)
    x_test, y_test = labels(N_TEST, span, seed=1)
    fit_sites(dynamics(), make_series(x[:100], y[:100]), LOGIT)  # warm up

    def fit():
        series = make_series(x, y)
        sites = fit_sites(dynamics(), series, LOGIT)
        smoothed = Posterior(dynamics(), series.times, sites.beta, sites.weight)
        return sites, smoothed.marginals(x_test)

    (sites, moments), seconds = timed(fit)
    (K, beta, weight), dense_seconds = timed(lambda: dense_sites(x, y))
    prior_var = torch.full_like(x_test, float(KERNEL.diag(np.zeros((1, 1)))[0]))
    dense = dense_moments(x, beta, weight, K, gram(x_test, x), prior_var)
    ours, theirs = nlpd(y_test, *moments), nlpd(y_test, *dense)
    print(
        f"\nappendix D, {n=}: {seconds:.3f} s, {sites.n_iter} sweeps, NLPD {ours:.5f}; "
        f"dense {dense_seconds:.0f} s, NLPD {theirs:.5f}"
    )
    assert sites.converged
    assert abs(ours - theirs) < 0.002
    assert seconds < 0.5


@pytest.mark.parametrize("n", [100_000, 1_000_000])
@pytest.mark.parametrize("name", ["logit", "probit", "poisson", "student_t"])
def test_bench_sites(name, n):
    """One hundred rows a unit of time; for labels by the logit, at most 15 s at n = 1e6."""
    x, y = labels(n, n / 100, seed=0)
    generator = torch.Generator().manual_seed(2)
    likelihood = {
        "logit": LOGIT,
        "probit": Bernoulli("probit"),
        "poisson": Poisson(),
        "student_t": StudentT(0.3, 4.0),
    }[name]
    if name == "poisson":
        y = torch.poisson(latent(x).exp(), generator=generator)
    elif name == "student_t":
        y = likelihood.sample(latent(x), generator)
    found, seconds = timed(lambda: fit_sites(dynamics(), make_series(x, y), likelihood))
    print(
        f"\n{name} {n=}: {seconds:.2f} s, {found.n_iter} sweeps, {seconds / found.n_iter:.3f} each"
    )
    assert found.converged
    assert name != "logit" or seconds < 15
