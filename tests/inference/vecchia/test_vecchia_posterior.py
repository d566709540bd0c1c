"""Predictions of Vecchia approximations against dense joint laws."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.vecchia.conditionals import Conditionals
from skgp.inference.vecchia.neighbors import earlier_neighbors
from skgp.inference.vecchia.posterior import VecchiaPosterior, sums
from tests.reference import vecchia

KERNEL = 1.3 * Matern([0.4, 0.7], nu=1.5)
N, H = 40, 6


def problem(seed=0):
    """X (n, 2), Y (n, 2) and noise variances (n,)."""
    rng = np.random.default_rng(seed)
    return rng.random((N, 2)), rng.normal(size=(N, 2)), 0.05 + 0.2 * rng.random(N)


def inputs():
    """Some on the data, between them, and far off."""
    X = problem()[0]
    between = np.random.default_rng(2).random((5, 2))
    return np.vstack([X[:3], between, between[:1] + [[3.0, 0.0]], [[1e3, -1e3]]])


def fitted(m, n_neighbors, n_predictive):
    """A posterior, its conditionals, the sets of neighbours, and Z."""
    X, Y, noise = problem()
    Z = X if m == N else np.random.default_rng(1).random((m, 2))
    X, Y, noise, points = map(torch.tensor, (X, Y, noise, Z))
    begin = Conditionals(KERNEL, X, torch.zeros(0, 1), noise, points)
    index = earlier_neighbors(KERNEL, X, n_neighbors, begin.features if m else None)
    group = torch.cat([index, torch.arange(N)[:, None]], 1)
    conditionals = Conditionals(KERNEL, X, group, noise, points)
    found = sums(conditionals, Y)
    known = found.mean, found.root
    posterior = VecchiaPosterior(KERNEL, X, Y, noise, points, *known, n_predictive)
    sets = [[j for j in row if j != i] for i, row in enumerate(index.tolist())]
    return posterior, conditionals, sets, Z if m else None


class WholeNeighbors:
    """The nearest of all points, none of which fades."""

    def __init__(self, posterior, size):
        self.X, self.size = posterior.X / torch.tensor(KERNEL.k2.length_scale), size

    def find(self, X):
        scaled = X / torch.tensor(KERNEL.k2.length_scale)
        found = torch.cdist(scaled, self.X).argsort(dim=1, stable=True)[:, : self.size]
        return found, torch.ones(found.shape, dtype=torch.float64)


def exact(x):
    X, Y, noise = problem()
    A = KERNEL(X) + np.diag(noise)
    cross = KERNEL(x, X)
    return cross @ np.linalg.solve(A, Y), KERNEL(x) - cross @ np.linalg.solve(A, cross.T)


@pytest.mark.parametrize(("m", "n_neighbors"), [(0, N - 1), (7, N - 1), (N, 0)])
def test_limits_are_the_exact_process(m, n_neighbors):
    posterior = fitted(m, n_neighbors, N)[0]
    x = inputs()
    mean, covariance = exact(x)
    found = posterior.mean_and_variance(torch.tensor(x))
    np.testing.assert_allclose(found[0], mean, atol=1e-8)
    np.testing.assert_allclose(found[1], covariance.diagonal(), atol=1e-8)
    np.testing.assert_allclose(posterior.mean(torch.tensor(x)), mean, atol=1e-8)
    found = posterior.mean_and_covariance(torch.tensor(x))
    np.testing.assert_allclose(found[0], mean, atol=1e-8)
    np.testing.assert_allclose(found[1], covariance, atol=1e-8)


@pytest.mark.parametrize("m", [0, 7])
def test_prediction_is_that_of_the_dense_joint(m):
    posterior, _, sets, Z = fitted(m, H, H)
    posterior.__dict__["neighborhood"] = WholeNeighbors(posterior, H)
    x = inputs()
    near, _ = posterior.neighborhood.find(torch.tensor(x))
    mean, var = posterior.mean_and_variance(torch.tensor(x))
    for i in range(len(x)):
        expected = vecchia.predict(KERNEL, *problem(), sets, x[i], near[i].numpy(), Z)
        np.testing.assert_allclose(mean[i], expected[0], atol=1e-8)
        np.testing.assert_allclose(var[i], expected[1], atol=1e-8)


@pytest.mark.parametrize("m", [0, 7])
def test_joint_covariance_is_that_of_the_errors(m):
    posterior, _, _, Z = fitted(m, H, H)
    posterior.__dict__["neighborhood"] = WholeNeighbors(posterior, H)
    (X, _, noise), x = problem(), inputs()
    n = len(x)
    near, _ = posterior.neighborhood.find(torch.tensor(x))
    R = vecchia.parts(KERNEL, np.vstack([X, x]), Z)[1]
    S = R[:N, :N] + np.diag(noise)
    contrast = np.zeros((n, N + n))  # f - a'y
    contrast[:, N:] = np.eye(n)
    for i in range(n):
        at = near[i].numpy()
        contrast[i, at] = -np.linalg.solve(S[np.ix_(at, at)], R[at, N + i])
    R[:N, :N] = S
    expected = contrast @ R @ contrast.T
    if m:
        cross = KERNEL(np.vstack([X, x]), Z)
        E = contrast @ cross @ np.linalg.inv(np.linalg.cholesky(KERNEL(Z))).T
        root = posterior.root.numpy()
        expected += E @ np.linalg.solve(root @ root.T, E.T)
    mean, covariance = posterior.mean_and_covariance(torch.tensor(x))
    np.testing.assert_allclose(covariance, expected, atol=1e-8)
    alone = posterior.mean_and_variance(torch.tensor(x))
    np.testing.assert_allclose(mean, alone[0], atol=1e-12)
    np.testing.assert_allclose(covariance.diagonal(), alone[1], atol=1e-10)


def test_joint_covariance_is_the_same_whatever_rows_come_along():
    posterior, x = fitted(7, H, 2 * H)[0], torch.tensor(inputs())
    covariance = posterior.mean_and_covariance(x)[1]
    some = torch.tensor([1, 4, 8])
    torch.testing.assert_close(posterior.mean_and_covariance(x[some])[1], covariance[some][:, some])
    assert torch.linalg.eigvalsh(covariance).min() > -1e-12


@pytest.mark.parametrize("m", [0, 7])
def test_predictions_are_continuous_and_differentiable(m):
    posterior = fitted(m, H, 2 * H)[0]

    def line(begin, end, n):
        return torch.linspace(begin, end, n, dtype=torch.float64)[:, None] * torch.tensor(
            [1.0, 0.6]
        )

    coarse = posterior.mean_and_variance(line(0, 1, 4001))
    for function, values in enumerate(coarse):
        steps = values.reshape(4001, -1).diff(dim=0).abs().amax(1)
        at = int(steps.argmax())
        assert steps[at] < 0.02 * values.std()
        fine = posterior.mean_and_variance(line(at / 4000, (at + 1) / 4000, 101))[function]
        assert fine.reshape(101, -1).diff(dim=0).abs().max() < 0.1 * steps[at]
    x = line(0.1, 0.425, 2).requires_grad_()
    mean, var = posterior.mean_and_variance(x)
    for values, function in ((mean[:, 0], 0), (var, 1)):
        slope = torch.autograd.grad(values.sum(), x, retain_graph=True)[0]
        for j in range(2):
            step = 1e-6 * torch.eye(2, dtype=torch.float64)[j]
            ends = [posterior.mean_and_variance(x.detach() + s)[function] for s in (step, -step)]
            difference = (ends[0] - ends[1]) / 2e-6
            expected = difference[:, 0] if difference.ndim > 1 else difference
            torch.testing.assert_close(slope[:, j], expected, rtol=1e-4, atol=1e-6)


def test_smooth_kernels_with_points_at_inducing_points():
    X = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]
    kernel, noise = 1.0 * RBF(0.5), torch.full((30,), 1e-6, dtype=torch.float64)
    index = earlier_neighbors(kernel, X, 4)
    group = torch.cat([index, torch.arange(30)[:, None]], 1)
    found = sums(Conditionals(kernel, X, group, noise, X), X.sin())
    posterior = VecchiaPosterior(kernel, X, X.sin(), noise, X, found.mean, found.root, 8)
    mean, var = posterior.mean_and_variance(X + 0.01)
    torch.testing.assert_close(mean, (X + 0.01).sin(), rtol=0, atol=1e-3)
    assert (var >= 0).all() and var.max() < 1e-4
