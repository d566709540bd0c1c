"""Densities under Vecchia approximations, and their gradients, against dense ones."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.vecchia.conditionals import Conditionals
from skgp.inference.vecchia.neighbors import earlier_neighbors
from skgp.inference.vecchia.posterior import sums
from tests.reference import vecchia

KERNEL = 1.3 * Matern([0.4, 0.7], nu=1.5) + 0.5 * RBF(0.6)
N = 50
# Neighbours, inducing points, and whether that is the exact process.
SIZES = [(N - 1, 0, True), (N - 1, 7, True), (0, N, True), (6, 0, False), (6, 8, False)]


def problem(seed=0):
    """X (n, 2), Y (n, 2) and noise variances (n,)."""
    rng = np.random.default_rng(seed)
    return rng.random((N, 2)), rng.normal(size=(N, 2)), 0.05 + 0.2 * rng.random(N)


def inducing(X, m):
    return X if m == N else np.random.default_rng(1).random((m, 2))


def neighbor_sets(X, Z, H):
    """As a tensor (n, H), and as lists."""
    X = torch.tensor(X)
    begin = Conditionals(KERNEL, X, torch.zeros(0, 1), X[:, 0], torch.tensor(Z))
    index = earlier_neighbors(KERNEL, X, H, begin.features if len(Z) else None)
    return index, [[j for j in row if j != i] for i, row in enumerate(index.tolist())]


def conditionals(theta, X, noise, index, Z, rows=slice(None)):
    group = torch.cat([index, torch.arange(len(X))[:, None]], 1)[rows]
    arrays = torch.tensor(X), group, torch.tensor(noise), torch.tensor(Z)
    return Conditionals(KERNEL, *arrays, theta=torch.tensor(theta))


def dense_density(theta, X, Y, noise, sets, Z):
    """By a covariance built point after point."""
    Q, R = vecchia.parts(KERNEL.clone_with_theta(theta), X, Z if len(Z) else None)
    return vecchia.log_density(vecchia.covariance(Q, R + np.diag(noise), sets), Y)


@pytest.mark.parametrize(("H", "m", "exact"), SIZES)
def test_density_is_that_of_the_dense_covariance(H, m, exact):
    X, Y, noise = problem()
    Z = inducing(X, m)
    index, sets = neighbor_sets(X, Z, H)
    found = sums(conditionals(KERNEL.theta, X, noise, index, Z), torch.tensor(Y)).log_density()
    np.testing.assert_allclose(found, dense_density(KERNEL.theta, X, Y, noise, sets, Z), rtol=1e-8)
    K = KERNEL(X) + np.diag(noise)
    assert np.isclose(found, vecchia.log_density(K, Y), rtol=1e-8) == exact


@pytest.mark.parametrize(("H", "m", "exact"), SIZES)
def test_gradient_is_that_of_the_dense_density(H, m, exact):
    X, Y, noise = problem()
    Z = inducing(X, m)
    index, sets = neighbor_sets(X, Z, H)
    here = conditionals(KERNEL.theta, X, noise, index, Z)
    of_theta, of_noise = here.gradient(sums(here, torch.tensor(Y)).cotangents(torch.tensor(Y)))

    def slope(function, size):
        steps = 1e-5 * np.eye(size)
        return np.array([(function(step) - function(-step)) / 2e-5 for step in steps])

    def density(theta, noise):
        return dense_density(theta, X, Y, noise, sets, Z)

    expected = slope(lambda step: density(KERNEL.theta + step, noise), len(KERNEL.theta))
    np.testing.assert_allclose(of_theta, expected, atol=2e-6)
    expected = slope(lambda step: density(KERNEL.theta, noise + step), N)
    np.testing.assert_allclose(of_noise, expected, atol=2e-5)


@pytest.mark.parametrize("m", [0, 8])
def test_rows_estimate_the_sums_of_all(m):
    X, Y, noise = problem()
    Z, Y = inducing(X, m), torch.tensor(Y)
    index, _ = neighbor_sets(X, Z, 5)
    halves = [
        sums(conditionals(KERNEL.theta, X, noise, index, Z, rows), Y, n=N)
        for rows in (slice(0, N, 2), slice(1, N, 2))
    ]
    whole = sums(conditionals(KERNEL.theta, X, noise, index, Z), Y)
    for name in ("log_variance", "square", "cross", "precision"):
        mean = sum(getattr(half, name) for half in halves) / 2
        torch.testing.assert_close(mean, getattr(whole, name))
    if not m:  # no inducing points: the density is a sum over the rows
        mean = sum(half.log_density() for half in halves) / 2
        torch.testing.assert_close(mean, whole.log_density())
