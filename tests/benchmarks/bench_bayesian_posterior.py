"""The posterior by stochastic gradients against a long exact run, on concrete; and on house_8L.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_bayesian_posterior.py -m benchmark -s``.
Seconds are the processor's. Data are read from the folder ``SKGP_DATA_DIR``, by default
``../shared/data`` beside the repository (``concrete.npz``: X, y, test_mask; ``house_8L.npz``: X,
y); tests are skipped where they are absent. The reference, importance sampling of the exact
density, takes some minutes for each kernel; moments are stored in the folder
``SKGP_REFERENCE_DIR`` where that is set.

Training rows of the first split, standardised; log-normal default priors; float32; everything from
the set-up on by :func:`~skgp.models.bayesian.sample_stochastic` with its defaults.
"""

import os
import resource
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import laplace_modes
from skgp.learning.posterior.priors import default_priors
from skgp.models.bayesian import sample_stochastic
from skgp.samplers import Rounds, Run, adaptive_importance_sampling
from tests.benchmarks.data import arrays_of

pytestmark = pytest.mark.benchmark

SEEDS = range(3)
REFERENCE_ESS = 20_000


@cache
def posterior(ard):
    concrete = arrays_of("concrete")
    train = ~concrete["test_mask"][:, 0]
    return posterior_of(concrete["X"][train].astype(float), concrete["y"][train], ard)


def posterior_of(X, y, ard):
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    kernel = 1.0 * RBF([1.0] * X.shape[1] if ard else 1.0) + WhiteKernel(0.1)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    return LogPosterior(kernel, data, default_priors(kernel, X, y))


@cache
def reference(ard):
    """Mean and standard deviations (p,), good to 0.01 of the latter."""
    folder = os.environ.get("SKGP_REFERENCE_DIR")
    path = Path(folder or ".") / f"concrete_{'ard' if ard else 'iso'}.npz"
    if folder and path.is_file():
        with np.load(path) as stored:
            return stored["mean"], stored["sd"]
    target, rng = posterior(ard), np.random.default_rng(0)
    start = laplace_modes(target, rng=rng)[0]
    found = adaptive_importance_sampling(
        target.log_density,
        start.u,
        start.covariance,
        rng=rng,
        rounds=Rounds(target_ess=REFERENCE_ESS, n_points=1024, max_rounds=60),
    )
    mean, sd = found.mean, np.sqrt(np.diag(found.covariance))
    print(f"\n  reference: ESS {found.ess:.0f}, Pareto k {found.pareto_k:.2f}")
    if folder:
        np.savez(path, mean=mean, sd=sd)
    return mean, sd


def errors(samples, weights, ard):
    """Largest error of a mean, in standard deviations, and of a standard deviation, relative."""
    mean, sd = reference(ard)
    found = weights @ samples.u
    spread = np.sqrt(weights @ (samples.u - found) ** 2)
    return float(np.abs((found - mean) / sd).max()), float(np.abs(spread / sd - 1).max())


def run(ard, seed, **kwargs):
    """Samples of a seed, their errors, printed; weighted, and as if all draws were equal."""
    torch.set_num_threads(1)
    start = time.process_time()
    samples = sample_stochastic(posterior(ard), rng=np.random.default_rng(seed), **kwargs)
    seconds = time.process_time() - start
    d, size = samples.diagnostics, len(samples.u)
    assert size > 1, d["problems"]
    of_mean, of_sd = errors(samples, samples.weights, ard)
    plain = errors(samples, np.full(size, 1 / size), ard)
    print(
        f"\n  seed {seed}: mean {of_mean:.3f} sd, sd {of_sd:.1%} (equal weights {plain[0]:.3f}, "
        f"{plain[1]:.1%}); {d['n_gradients']} gradients, {seconds:.0f} s, ESS {d['ess']:.0f}, "
        f"R-hat {np.max(d['r_hat']):.3f}, {d['ess'] / d['n_gradients']:.3f} ESS a gradient; "
        f"rank {d['rank']}, {d['n_iter_cg']:.1f} products, noise {d['noise_ratio']:.3f}, bank of "
        f"{d['n_entries']}, acceptance {np.mean(d['acceptance']):.2f}; {d['problems'] or 'mixed'}",
        flush=True,
    )
    return samples, of_mean, of_sd


@pytest.mark.parametrize("seed", SEEDS)
def test_isotropic_posterior(seed):
    samples, of_mean, of_sd = run(False, seed)
    d = samples.diagnostics
    assert of_mean < 0.05 and of_sd < 0.05 and d["n_gradients"] <= 4000 and d["ess"] >= 400


@pytest.mark.parametrize("seed", SEEDS)
def test_ard_posterior(seed):
    _, of_mean, of_sd = run(True, seed)
    assert of_mean < 0.12 and of_sd < 0.12


@pytest.mark.parametrize("ard", [False, True])
def test_mala_posterior(ard):
    _, of_mean, of_sd = run(ard, 0, sampler="mala")
    assert of_mean < 0.12 and of_sd < 0.12


def test_papers_sgld_does_not_mix():
    """9000 iterations of four chains: what the paper's schedule gives for comparison."""
    samples, *_ = run(False, 0, sampler="sgld", schedule="paper", run=Run(n_draws=2250))
    assert not samples.diagnostics["converged"]


def test_house_8l():
    """Seconds a gradient and effective samples an hour at n = 20 thousand, and a factorisation's.

    Few draws: their autocorrelation is that of the step, of which concrete tells more.
    """
    house = arrays_of("house_8L")
    rows = np.random.default_rng(0).permutation(len(house["X"]))[:20_500]
    target = posterior_of(house["X"][rows].astype(float), np.log1p(house["y"][rows]), False)
    start, told = time.process_time(), []

    def callback(_, info):
        told.append((time.process_time() - start, info))

    samples = sample_stochastic(
        target, rng=np.random.default_rng(0), run=Run(n_warmup=5, n_draws=25, callback=callback)
    )
    d, total = samples.diagnostics, time.process_time() - start
    print(
        f"\n  {d['problems'] or 'mixed'}\n  {total:.0f} s and {d['n_gradients']} gradients in all"
    )
    for name, key in (("search and curvature", "rank"), ("bank", "n_at_anchor"), ("chains", "ess")):
        print(f"  {name}: until {max(s for s, info in told if key in info):.0f} s")
    size = len(samples.u)
    assert size > 1
    seconds = [s for s, info in told if "ess" in info]  # of each iteration of the four chains
    each = (seconds[-1] - seconds[0]) / (4 * (len(seconds) - 1))
    rate = d["ess"] / size
    print(
        f"  {each:.1f} s a draw, {d['n_iter_cg']:.1f} products, rank {d['rank']}, bank of "
        f"{d['n_entries']}; ESS {d['ess']:.0f} of {size} draws: {3600 / each * rate:.0f} an hour; "
        f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB"
    )
    start = time.process_time()
    target.log_density(samples.mean())
    print(f"  an exact log-density: {time.process_time() - start:.0f} s")
