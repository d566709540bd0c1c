"""The log posterior against a dense NumPy oracle, finite differences and autograd."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.data import merge_replicates
from skgp.kernels import ActiveDims, split_noise
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior import modes
from skgp.learning.posterior.log_posterior import FreePosterior, LogPosterior
from skgp.learning.posterior.modes import find_mode, hessian_by_differences, laplace_modes
from skgp.learning.posterior.priors import default_priors
from skgp.priors import Gamma, HalfNormal, LogNormal
from tests.covering import covering
from tests.reference.kernels import naive_gram

KERNELS = {
    "isotropic": lambda: 1.5 * RBF(0.8) + WhiteKernel(0.1),
    "ard": lambda: 1.5 * RBF([0.8, 1.7]) + WhiteKernel(0.1),
    "matern": lambda: 4.0 * Matern([1.1, 0.6], nu=1.5) + WhiteKernel(0.3),
    "rough": lambda: WhiteKernel(0.3) + Matern(0.7, nu=0.5),
    "fixed noise": lambda: 1.5 * RBF(0.8) + WhiteKernel(0.2, "fixed"),
    "fixed amplitude": lambda: ConstantKernel(3.0, "fixed") * RBF([1.0, 0.4]) + WhiteKernel(0.1),
    "sum": lambda: 2.0 * RBF(0.9) + WhiteKernel(0.2) + 0.5 * RationalQuadratic(2.0, 1.2),
    "columns": lambda: (
        ActiveDims(RBF(0.9), 0) * ActiveDims(ExpSineSquared(0.9, 3.0), 1)
        + DotProduct(0.6) ** 2
        + WhiteKernel(0.2)
    ),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)
FAMILIES = (LogNormal(0.8), Gamma(2.0, 1.5), HalfNormal(1.2))


def rows(n=30, repeats=False, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    if repeats:
        X[n // 2 :] = X[: n - n // 2]
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=n)


def posterior(kernel, X, y, priors=None):
    if priors is None:
        priors = [FAMILIES[j % 3] for j in range(kernel.n_dims)]
    return LogPosterior(kernel, merge_replicates(X, y, None, torch.device("cpu")), priors)


def naive_log_posterior(kernel, X, y, priors, u):
    at = kernel.clone_with_theta(u)
    signal, white = split_noise(at)
    A = naive_gram(signal, X) + white.noise_level * np.eye(len(y))
    prior = sum(float(p.log_density(np.float64(v))) for p, v in zip(priors, u, strict=True))
    return multivariate_normal(np.zeros(len(y)), A).logpdf(y) + prior


@covering(name=KERNELS, repeats=[True, False])
def test_log_density_equals_the_oracle_of_few_rows_of_many_and_in_batches(
    name, repeats, monkeypatch
):
    kernel, (X, y) = KERNELS[name](), rows(repeats=repeats)
    target = posterior(kernel, X, y)
    u = kernel.theta + 0.5 * np.random.default_rng(0).standard_normal((5, kernel.n_dims))
    expected = [naive_log_posterior(kernel, X, y, target.priors, each) for each in u]
    u[2, 0], expected[2] = 100.0, -math.inf  # out of the bounds
    values, gradients = target.log_densities_and_gradients(u)
    assert target.batched
    monkeypatch.setattr(tuned, "BATCH", 2 * len(target.data.y) ** 2)
    for found in (values, target.log_densities(u), [target.log_density(each) for each in u]):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    monkeypatch.setattr(tuned, "FEW_ROWS", 0)
    assert not target.batched
    value, gradient = target.log_density_and_gradient(u[1])
    assert value == pytest.approx(expected[1], rel=1e-9)
    assert target.log_density(u[1]) == pytest.approx(expected[1], rel=1e-9)
    np.testing.assert_allclose(gradient, gradients[1], rtol=1e-10, atol=1e-10)


@each_kernel
@pytest.mark.parametrize("repeats", [False, True])
def test_log_density_gradient_equals_finite_differences(name, repeats):
    kernel, (X, y) = KERNELS[name](), rows(repeats=repeats)
    target = posterior(kernel, X, y)
    u, h = kernel.theta - 0.2, 1e-5
    _, gradient = target.log_density_and_gradient(u)
    steps = h * np.eye(target.n_dims)
    expected = [(target.log_density(u + s) - target.log_density(u - s)) / (2 * h) for s in steps]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


def test_log_density_vanishes_outside_the_bounds():
    kernel = 1.0 * RBF(1.0, (0.5, 2.0)) + WhiteKernel(0.1)
    target = posterior(kernel, *rows())
    inside, outside = np.log([1.0, 1.99, 0.1]), np.log([1.0, 2.01, 0.1])
    assert math.isfinite(target.log_density(inside))
    assert target.log_density(outside) == -math.inf
    value, gradient = target.log_density_and_gradient(outside)
    assert value == -math.inf and not gradient.any()
    np.testing.assert_array_equal(
        np.isfinite(target.log_prior(np.stack([inside, outside]))), [True, False]
    )


def test_log_density_vanishes_where_nothing_can_be_factored():
    X, y = rows()
    X[0] = np.nan
    target = posterior(KERNELS["ard"](), X, y)
    assert target.log_density(target.medians) == -math.inf
    assert target.log_density_and_gradient(target.medians)[0] == -math.inf
    assert target.log_densities(target.medians[None]).tolist() == [-math.inf]
    with pytest.raises(ValueError, match="vanishes at every start"):
        find_mode(target, [target.medians])


@pytest.mark.parametrize(
    ("kernel", "priors", "message"),
    [
        (1.0 * RBF(1.0), FAMILIES[:2], "has no noise"),
        (RBF(1.0, "fixed") + WhiteKernel(0.1, "fixed"), [], "no free hyper-parameter"),
        (1.0 * RBF(1.0) + WhiteKernel(0.1), FAMILIES[:2], "priors has 2 entries"),
    ],
)
def test_log_posterior_refuses_what_does_not_fit(kernel, priors, message):
    with pytest.raises(ValueError, match=message):
        posterior(kernel, *rows(), priors=priors)


def test_find_mode_ends_where_the_gradient_vanishes():
    target = posterior(KERNELS["ard"](), *rows(60))
    mode = find_mode(target, [target.medians, target.medians - 1], tol=1e-12)
    value, gradient = target.log_density_and_gradient(mode.u)
    assert mode.converged and mode.log_density == pytest.approx(value)
    assert np.abs(gradient).max() < 1e-3


def test_find_mode_stays_inside_the_bounds():
    kernel = 1.0 * RBF(0.1, (0.05, 0.2)) + WhiteKernel(0.1)
    target = posterior(kernel, *rows(40), priors=[LogNormal(1.0)] * 3)
    mode = find_mode(target, [target.medians])
    assert mode.u[1] == pytest.approx(math.log(0.2), abs=1e-6)
    assert math.isfinite(mode.log_density)


def test_hessian_by_differences_of_a_gaussian_is_its_precision(rng):
    root = rng.standard_normal((3, 3))

    class Quadratic:
        precision = root @ root.T + np.eye(3)
        bounds = np.array([[-9.0, 9.0], [-9.0, 0.5], [0.5, 9.0]])

        def log_densities_and_gradients(self, u):
            return -0.5 * ((u @ self.precision) * u).sum(1), -u @ self.precision

    hessian = hessian_by_differences(Quadratic(), np.full(3, 0.5))  # at two of the bounds
    np.testing.assert_allclose(-hessian, Quadratic.precision, rtol=1e-10)


def test_laplace_modes_polish_the_mode_of_a_subset(rng):
    X, y = rows(400, seed=3)
    target = posterior(KERNELS["isotropic"](), X, y)
    found = laplace_modes(target, rng=rng)[0]
    direct = find_mode(target, [target.medians], tol=1e-12)
    assert found.log_density == pytest.approx(direct.log_density, abs=1e-3)
    np.testing.assert_allclose(found.u, direct.u, atol=0.02)
    hessian = hessian_by_differences(target, found.u)
    np.testing.assert_allclose(found.covariance, np.linalg.inv(-hessian), rtol=1e-10)
    assert found.n_gradients < 40


def test_random_starts_and_coordinates_without_bounds_have_the_covariance_of_the_priors(
    rng, monkeypatch
):
    X, y = rows(20)
    kernel = 1.0 * RBF([1.0, 1.0], (0.5, 2.0)) + WhiteKernel(0.1)
    target = posterior(kernel, X, y, default_priors(kernel, X, y))
    C, starts = target.prior_covariance, []
    assert C[1, 2] > 0.5
    monkeypatch.setattr(tuned, "MORE_STARTS", 4000)
    monkeypatch.setattr(modes, "search_modes", lambda at, given, **_: starts.extend(given))
    monkeypatch.setattr(modes, "with_curvature", lambda at, ends: ends)
    laplace_modes(target, rng=rng)
    drawn = np.array(starts[2:]) - target.medians
    error = np.sqrt((np.outer(C.diagonal(), C.diagonal()) + C**2) / 4000)
    assert np.abs((drawn.T @ drawn / 4000 - C) / error).max() < 4
    free = FreePosterior(target, np.array([False, False, True, False]))
    expected = C.copy()
    expected[2], expected[:, 2] = np.eye(4)[2], np.eye(4)[2]  # standard normal, and independent
    np.testing.assert_array_equal(free.prior_covariance, expected)


def test_laplace_modes_bound_the_width_where_there_is_no_curvature(rng):
    """A column that explains nothing, under a nearly flat prior."""
    X, y = rows(20)
    kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1)
    priors = [LogNormal(1.0, 1.5), LogNormal(1.0), LogNormal(1e4, 50.0), LogNormal(0.1)]
    found = laplace_modes(posterior(kernel, X, y, priors), rng=rng)[0]
    assert np.linalg.eigvalsh(found.covariance)[-1] <= 10 * (1 + 1e-9)


def test_log_posterior_pickles_small():
    target = posterior(KERNELS["ard"](), *rows())
    copy = pickle.loads(pickle.dumps(target))
    assert copy.log_density(target.medians) == target.log_density(target.medians)
    assert len(pickle.dumps(target)) < 10_000
