"""Samples of the posterior against a grid over two hyper-parameters, and between samplers."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior import exact
from skgp.learning.posterior.exact import sample_exact
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.priors import default_priors
from skgp.learning.posterior.samples import iterations_between_calls
from skgp.samplers import hamiltonian_monte_carlo


def make_posterior(kernel, n=25, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, size=(n, 1))
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.standard_normal(n)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    return LogPosterior(kernel, data, default_priors(kernel, X, y))


@cache
def two_parameters():
    """Length scale and noise; the posterior is skew with so few rows."""
    return make_posterior(RBF(1.0) + WhiteKernel(0.1))


@cache
def grid_moments():
    """Mean, variances and log evidence by the trapezoidal rule, exact to 1e-4."""
    target = two_parameters()
    axes = np.linspace(-2.5, 3.5, 40), np.linspace(-5.0, 1.5, 40)
    u = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    values = np.array([target.log_density(each) for each in u])
    weights = np.exp(values - values.max())
    cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
    log_evidence = values.max() + math.log(weights.sum() * cell)
    weights /= weights.sum()
    mean = weights @ u
    return mean, weights @ (u - mean) ** 2, log_evidence


@cache
def samples(sampler):
    """One run, which several tests look at."""
    rng = np.random.default_rng(2)
    return sample_exact(two_parameters(), rng=rng, sampler=sampler, n_warmup=25, n_samples=100)


def test_importance_sampling_agrees_with_the_grid():
    mean, var, log_evidence = grid_moments()
    runs = [
        sample_exact(two_parameters(), rng=child) for child in np.random.default_rng(1).spawn(4)
    ]
    for run in runs:
        assert run.diagnostics["converged"] and not run.diagnostics["problems"]
        assert run.diagnostics["ess"] >= 400 and run.diagnostics["pareto_k"] < 0.7
        assert run.weights.sum() == pytest.approx(1.0)
    means = np.array([run.mean() for run in runs])
    variances = np.array([np.diag(run.covariance()) for run in runs])
    evidences = np.array([[run.diagnostics["log_evidence"]] for run in runs])
    for found, expected in ((means, mean), (variances, var), (evidences, log_evidence)):
        error = found.std(axis=0, ddof=1) / math.sqrt(len(runs))
        assert np.all(np.abs(found.mean(axis=0) - expected) / error < 7)  # t with 3 degrees
    assert np.all(np.abs(means - mean) < 0.1 * np.sqrt(var))


def test_hmc_agrees_with_the_grid():
    mean, var, _ = grid_moments()
    run = samples("hmc")
    assert set(run.chain) == set(range(8)) and run.weights.sum() == pytest.approx(1.0)
    assert np.all(run.diagnostics["r_hat"] < 1.06)
    assert np.all(run.diagnostics["ess_tail"] > 30)
    z = (run.mean() - mean) / np.sqrt(var / run.diagnostics["ess_bulk"])
    assert np.all(np.abs(z) < 4)
    np.testing.assert_allclose(np.diag(run.covariance()), var, rtol=0.5)


def test_mode_and_density_of_the_samples_are_the_posteriors():
    target = two_parameters()
    run = sample_exact(target, rng=np.random.default_rng(3), n_samples=64, target_ess=10)
    values = [target.log_density(u) for u in run.u[:5]]
    np.testing.assert_allclose(run.log_posterior[:5], values, rtol=1e-12)
    assert target.log_density(run.map_) > run.log_posterior.max() - 1e-3
    assert run.diagnostics["n_likelihoods"] == len(run.u) == 64


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["importance", "hmc"])
def test_sample_exact_runs_in_processes(sampler):
    def run(n_jobs):
        return sample_exact(
            two_parameters(), rng=np.random.default_rng(4), sampler=sampler, n_samples=32,
            n_warmup=10, n_jobs=n_jobs,
        )  # fmt: skip

    np.testing.assert_allclose(run(None).u, run(2).u, rtol=1e-8)


def test_calls_are_more_frequent_the_more_rows():
    every = [iterations_between_calls(n) for n in (10, 1000, 2000, 5000, 10**6)]
    assert every == [25, 25, 6, 1, 1]


def test_sample_exact_numbers_its_iterations_through_and_stops_on_the_mode():
    def run(last):
        seen = []

        def callback(iteration, info):
            seen.append(iteration)
            assert math.isfinite(info["loss"])
            return iteration == last

        return sample_exact(two_parameters(), rng=np.random.default_rng(6), callback=callback), seen

    _, seen = run(None)
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 4
    stopped, seen = run(3)
    assert stopped.u.shape == (1, 2) and stopped.weights.tolist() == [1.0] and seen == [1, 2, 3]
    assert "stopped" in stopped.diagnostics["problems"][0]


def test_a_chain_that_diverges_is_reported_and_left_out(monkeypatch):
    def one_astray(*args, **kwargs):
        found = hamiltonian_monte_carlo(*args, **kwargs)
        return replace(found, n_divergent=np.array([0, 6, 0, 1]))

    monkeypatch.setattr(exact, "hamiltonian_monte_carlo", one_astray)
    run = sample_exact(
        two_parameters(), rng=np.random.default_rng(9), sampler="hmc", n_warmup=5, n_samples=20
    )
    assert run.chain.tolist() == [0] * 20 + [2] * 20 + [3] * 20
    assert run.u.shape == (60, 2) and run.weights.sum() == pytest.approx(1.0)
    assert any("chains [1, 3] diverged (left out: [1])" in p for p in run.diagnostics["problems"])
