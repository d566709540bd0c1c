"""Samples of the posterior against grids and quadrature, and between samplers."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import laplace_modes, without_felt_bounds
from skgp.learning.posterior.priors import default_priors
from skgp.learning.posterior.samples import iterations_between_calls
from skgp.learning.posterior.sampling import draws_of_many, sample_by_density
from skgp.priors import LogNormal
from skgp.samplers import hamiltonian_monte_carlo
from tests.reference.hyperparameters import grid_posterior


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
    return sample_by_density(two_parameters(), rng=rng, sampler=sampler, n_warmup=25, n_samples=100)


def test_importance_sampling_agrees_with_the_grid():
    mean, var, log_evidence = grid_moments()
    runs = [
        sample_by_density(two_parameters(), rng=child)
        for child in np.random.default_rng(1).spawn(4)
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
    run = sample_by_density(target, rng=np.random.default_rng(3), n_samples=64, target_ess=10)
    values = [target.log_density(u) for u in run.u[:5]]
    np.testing.assert_allclose(run.log_posterior[:5], values, rtol=1e-12)
    assert target.log_density(run.map_) > run.log_posterior.max() - 1e-3
    assert run.diagnostics["n_likelihoods"] == len(run.u) == 64


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["importance", "hmc"])
def test_sample_by_density_runs_in_processes(sampler):
    def run(n_jobs):
        return sample_by_density(
            two_parameters(), rng=np.random.default_rng(4), sampler=sampler, n_samples=32,
            n_warmup=10, n_jobs=n_jobs,
        )  # fmt: skip

    np.testing.assert_allclose(run(None).u, run(2).u, rtol=1e-8)


@pytest.mark.slow
def test_workers_are_sent_the_data_once_between_two_callbacks(monkeypatch):
    """What a task takes along is made by the main process alone: with 36,000 rows 10 MB."""
    target, sent = two_parameters(), []
    modes = laplace_modes(target, rng=np.random.default_rng(0))
    state = LogPosterior.__getstate__
    monkeypatch.setattr(LogPosterior, "__getstate__", lambda self: sent.append(1) or state(self))
    settings = {"rng": np.random.default_rng(0), "modes": modes, "n_samples": 64}
    sample_by_density(target, n_jobs=2, **settings)
    few = len(sent)
    monkeypatch.setattr(tuned, "FEW_ROWS", 10)  # evaluated one by one
    sample_by_density(target, n_jobs=2, **settings)
    assert few <= 1 and len(sent) - few <= 2


def test_calls_are_more_frequent_the_more_rows():
    every = [iterations_between_calls(n) for n in (10, 1000, 2000, 5000, 10**6)]
    assert every == [25, 25, 6, 1, 1]


def test_sample_by_density_numbers_its_iterations_through_and_stops_on_the_mode():
    def run(last):
        seen = []

        def callback(iteration, info):
            seen.append(iteration)
            assert math.isfinite(info["loss"])
            return iteration == last

        return sample_by_density(
            two_parameters(), rng=np.random.default_rng(6), callback=callback
        ), seen

    _, seen = run(None)
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 4
    stopped, seen = run(3)
    assert stopped.u.shape == (1, 2) and stopped.weights.tolist() == [1.0] and seen == [1, 2, 3]
    assert "stopped" in stopped.diagnostics["problems"][0]


def test_a_chain_that_diverges_is_reported_and_left_out(monkeypatch):
    def one_astray(*args, **kwargs):
        found = hamiltonian_monte_carlo(*args, **kwargs)
        return replace(found, n_divergent=np.array([0, 6, 0, 1]))

    monkeypatch.setattr("skgp.learning.posterior.sampling.hamiltonian_monte_carlo", one_astray)
    run = sample_by_density(
        two_parameters(), rng=np.random.default_rng(9), sampler="hmc", n_warmup=5, n_samples=20
    )
    assert run.chain.tolist() == [0] * 20 + [2] * 20 + [3] * 20
    assert run.u.shape == (60, 2) and run.weights.sum() == pytest.approx(1.0)
    assert any("chains [1, 3] diverged (left out: [1])" in p for p in run.diagnostics["problems"])


KERNEL = ConstantKernel(1.0) * RBF(1.0) + WhiteKernel(0.1)
FREE = (1e-7, 1e7)


def sine_with_trend(n, seed):
    """Points (n, 1) on [-4, 4] and standardised targets."""
    rng = np.random.default_rng(1000 * n + seed)
    X = rng.uniform(-4, 4, (n, 1))
    frequency, slope, noise = rng.uniform(0.8, 2.5), rng.normal(0, 0.4), rng.uniform(0.1, 0.5)
    y = np.sin(frequency * X[:, 0]) + slope * X[:, 0] + noise * rng.standard_normal(n)
    return X, (y - y.mean()) / y.std()


def posterior(kernel, X, y, priors):
    data = merge_replicates(X, y, None, torch.device("cpu"))
    return LogPosterior(kernel, data, priors)


def wide_priors(X):
    return LogNormal(1.0, 1.5), LogNormal(float(X.std()), 1.5), LogNormal(0.1, 1.5)


def problem(n, seed):
    X, y = sine_with_trend(n, seed)
    priors = wide_priors(X)
    return posterior(KERNEL, X, y, priors), grid_posterior(X, y, priors, size=61)


def ratios(run, grid):
    return np.sqrt(run.covariance().diagonal()) / grid.sd


# Of the 60 sets of tests/benchmarks/bench_bayesian_small.py those that are hardest for proposals
# from one mode: shoulders of short length scales and little noise.
HARD = [(10, 0), (10, 7), (10, 10), (10, 25), (10, 20), (16, 8)]


@pytest.mark.parametrize(("n", "seed"), HARD)
def test_no_spread_is_wrong_without_a_problem(n, seed):
    target, grid = problem(n, seed)
    for run_seed in (0, 1):
        run = sample_by_density(target, rng=np.random.default_rng(run_seed))
        right = np.abs(ratios(run, grid) - 1).max() < 0.15
        assert right or run.diagnostics["problems"]
        assert abs(run.diagnostics["log_evidence"] - grid.log_evidence) < 0.15


def test_hmc_agrees_with_quadrature_on_a_posterior_of_shoulders():
    target, grid = problem(10, 25)
    run = sample_by_density(target, rng=np.random.default_rng(0), sampler="hmc")
    assert np.abs(ratios(run, grid) - 1).max() < 0.2 or run.diagnostics["problems"]
    error = grid.sd / np.sqrt(run.diagnostics["ess"])
    assert (np.abs(run.mean() - grid.mean) < 5 * error).all()
    assert min(run.diagnostics["ess_tail"].min(), 2 * run.diagnostics["ess_spread"]) >= 400


def two_modes():
    """Data on two frequencies: a short length scale with little noise, a long one with much."""
    X = np.linspace(0, 1, 14)[:, None]
    y = np.sin(2 * np.pi * X[:, 0]) + 0.75 * np.cos(40 * X[:, 0])
    y = (y - y.mean()) / y.std()
    priors = LogNormal(1.0, 0.7), LogNormal(0.2, 1.0), LogNormal(0.1, 1.5)
    return X, y, priors


def test_all_modes_are_found_and_weighed():
    X, y, priors = two_modes()
    target, grid = posterior(KERNEL, X, y, priors), grid_posterior(X, y, priors, size=61)
    modes = laplace_modes(target, rng=np.random.default_rng(0))
    assert len(modes) >= 2
    for mode in modes:
        gradient = target.log_density_and_gradient(mode.u)[1]
        assert np.sqrt(gradient @ mode.covariance @ gradient) < 1e-2
    margin, axis = grid.weights.sum(axis=(0, 2)), grid.axes[1]
    valley = 0.5 * (modes[0].u[1] + modes[1].u[1])
    expected = margin[axis > valley].sum()
    assert 0.02 < expected < 0.98
    for seed in range(3):
        run = sample_by_density(target, rng=np.random.default_rng(seed))
        found = run.weights[run.u[:, 1] > valley].sum()
        assert found == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 400))
        np.testing.assert_allclose(ratios(run, grid), 1.0, atol=0.15)
    assert run.diagnostics["n_modes"] == len(modes)


# ------------------------------------------------------------------------------------- bounds


def bounded(ranges):
    """The kernel with bounds (low, high) of its three hyper-parameters."""
    a, b, c = ranges
    return ConstantKernel(1.0, a) * RBF(1.0, b) + WhiteKernel(0.1, c)


def truncated(grid, ranges):
    """Moments of the grid within bounds."""
    inside = np.ones_like(grid.weights)
    for j, (axis, (low, high)) in enumerate(zip(grid.axes, np.log(ranges), strict=True)):
        shape = [-1 if i == j else 1 for i in range(3)]
        inside = inside * ((axis >= low) & (axis <= high)).reshape(shape)
    w = grid.weights * inside / (grid.weights * inside).sum()
    u = np.stack(np.meshgrid(*grid.axes, indexing="ij"), -1)
    mean = np.tensordot(w, u, 3)
    return mean, np.sqrt(np.tensordot(w, (u - mean) ** 2, 3))


@pytest.mark.parametrize("sampler", ["importance", "hmc"])
def test_bounds_cut_the_posterior_off(sampler):
    X, y = sine_with_trend(16, 0)
    priors, ranges = wide_priors(X), ((0.5, 2.0), FREE, (0.05, 0.1))
    grid = grid_posterior(X, y, priors, size=91)
    mean, sd = truncated(grid, ranges)
    target = posterior(bounded(ranges), X, y, priors)
    run = sample_by_density(target, rng=np.random.default_rng(0), sampler=sampler)
    assert run.diagnostics["converged"]
    assert ((run.u >= target.bounds[:, 0]) & (run.u <= target.bounds[:, 1])).all()
    # The grid has some ten points in the narrowest range.
    np.testing.assert_allclose(np.sqrt(run.covariance().diagonal()), sd, rtol=0.2)
    assert (np.abs(run.mean() - mean) < 0.25 * sd).all()
    values = [target.log_density(u) for u in run.u[:5]]
    np.testing.assert_allclose(run.log_posterior[:5], values, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("width", [0.0, 1e-12, 1e-3])
def test_bounds_without_room_are_constants(width):
    X, y = sine_with_trend(16, 0)
    priors = wide_priors(X)
    narrow = posterior(bounded(((1.0, 1.0 + width), FREE, FREE)), X, y, priors)
    run = sample_by_density(narrow, rng=np.random.default_rng(0))
    assert run.diagnostics["converged"] and np.allclose(run.u[:, 0], 0.0, atol=1.01 * width)
    fixed = posterior(bounded(("fixed", FREE, FREE)), X, y, priors[1:])
    other = sample_by_density(fixed, rng=np.random.default_rng(0))
    sd = np.sqrt(other.covariance().diagonal())
    assert (np.abs(run.mean()[1:] - other.mean()) < 0.25 * sd).all()


def test_free_posterior_has_the_gradient_of_its_density():
    X, y = sine_with_trend(16, 0)
    target = posterior(bounded(((0.5, 2.0), FREE, (0.1, 0.1))), X, y, wide_priors(X))
    free, _ = without_felt_bounds(target, laplace_modes(target, rng=np.random.default_rng(0)))
    assert free.bounds[0, 1] == math.inf and math.isfinite(free.bounds[1, 1])
    x = np.array([[0.3, 0.1, -0.7], [-1.2, 0.5, 0.2]])
    h = 1e-5 * np.eye(3)
    _, gradient = free.log_densities_and_gradients(x)
    for j in range(3):
        slope = (free.log_densities(x + h[j]) - free.log_densities(x - h[j])) / 2e-5
        np.testing.assert_allclose(gradient[:, j], slope, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(free.to_u(free.to_x(free.to_u(x))), free.to_u(x), atol=1e-12)


def test_chains_follow_points_that_are_worth_too_few(monkeypatch):
    """Where the sampler and the number of points are left open."""
    monkeypatch.setattr(tuned, "MOST_POINTS", 64)

    def found(sampler, **settings):
        settings = {
            "rng": np.random.default_rng(0),
            "sampler": sampler,
            "target_ess": 150,
        } | settings
        return sample_by_density(two_parameters(), **settings)

    points, chains = found("importance"), found("auto")
    assert points.diagnostics["sampler"] == "importance" and points.diagnostics["ess"] < 75
    assert chains.diagnostics["sampler"] == "hmc" and chains.diagnostics["ess"] > 150
    assert chains.diagnostics["n_likelihoods"] == 64  # they begin with the points
    exact = np.sqrt(grid_moments()[1])
    np.testing.assert_allclose((chains.mean() - grid_moments()[0]) / exact, 0, atol=0.25)
    assert found("auto", n_samples=64).diagnostics["sampler"] == "importance"
    assert found("auto", target_ess=20).diagnostics["sampler"] == "importance"
    monkeypatch.setattr(tuned, "LARGE", 10)
    assert found("auto").diagnostics["sampler"] == "importance"


@pytest.mark.parametrize("n, n_draws", [(100, 400), (500, 400), (1000, 200)])
def test_chains_of_more_observations_are_shorter(n, n_draws):
    assert draws_of_many(n) == n_draws


def test_points_of_little_worth_leave_the_metric_to_the_mode(monkeypatch):
    """Of many hyper-parameters they are worth a few: a covariance of these is noise."""
    seen = []

    def recorded(*args, **settings):
        seen.append((args[2], settings["jumps"]))
        return hamiltonian_monte_carlo(*args, **settings)

    monkeypatch.setattr("skgp.learning.posterior.sampling.hamiltonian_monte_carlo", recorded)
    for worth in (0.0, math.inf):
        monkeypatch.setattr(tuned, "PILOT_WORTH", worth)
        rng = np.random.default_rng(0)
        sample_by_density(two_parameters(), rng=rng, sampler="hmc", n_warmup=4, n_samples=25)
    mode = laplace_modes(two_parameters(), rng=np.random.default_rng(0))[0]
    assert seen[0][1] is not None and seen[1][1] is None
    np.testing.assert_allclose(seen[1][0], mode.spread, rtol=1e-3)
