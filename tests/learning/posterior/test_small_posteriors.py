"""Posteriors of few points, wide, skew and of several modes, against quadrature."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior.exact import sample_exact
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import laplace_modes, without_felt_bounds
from skgp.priors import LogNormal
from tests.reference.hyperparameters import grid_posterior

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
        run = sample_exact(target, rng=np.random.default_rng(run_seed))
        right = np.abs(ratios(run, grid) - 1).max() < 0.15
        assert right or run.diagnostics["problems"]
        assert abs(run.diagnostics["log_evidence"] - grid.log_evidence) < 0.15


def test_hmc_agrees_with_quadrature_on_a_posterior_of_shoulders():
    target, grid = problem(10, 25)
    run = sample_exact(target, rng=np.random.default_rng(0), sampler="hmc")
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
        run = sample_exact(target, rng=np.random.default_rng(seed))
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
    grid = grid_posterior(X, y, priors, size=121)
    mean, sd = truncated(grid, ranges)
    target = posterior(bounded(ranges), X, y, priors)
    run = sample_exact(target, rng=np.random.default_rng(0), sampler=sampler)
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
    run = sample_exact(narrow, rng=np.random.default_rng(0))
    assert run.diagnostics["converged"] and np.allclose(run.u[:, 0], 0.0, atol=1.01 * width)
    fixed = posterior(bounded(("fixed", FREE, FREE)), X, y, priors[1:])
    other = sample_exact(fixed, rng=np.random.default_rng(0))
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
