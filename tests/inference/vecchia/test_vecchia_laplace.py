"""Laplace's approximation under a Vecchia prior against dense NumPy, and its probes by z-tests."""

import weakref

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.defaults import LATENT_JITTER
from skgp.inference.vecchia import hessian as hessians
from skgp.inference.vecchia.conditionals import Conditionals, VecchiaRoot
from skgp.inference.vecchia.hessian import (
    DenseHessian,
    InducingHessian,
    SparseHessian,
    probes,
)
from skgp.inference.vecchia.laplace import evidence, find_mode
from skgp.inference.vecchia.neighbors import earlier_neighbors
from skgp.likelihoods import Bernoulli
from tests.reference import vecchia
from tests.reference.laplace_evidence import laplace, logit

KERNEL = 4.0 * Matern([0.4, 0.7], nu=1.5)
OFFSET = torch.tensor([0.3, -0.4], dtype=torch.float64)
SIZES = [(4, 0), (4, 6), (0, 6), (39, 0), (39, 5)]


def problem(n=40, seed=0):
    """X (n, 2), labels (n, 2) and weights (n,)."""
    rng = np.random.default_rng(seed)
    X, noise = rng.random((n, 2)), rng.normal(size=(n, 2))
    f = np.stack([np.sin(6 * X[:, 0]), np.cos(5 * X[:, 1])], 1)
    return X, np.where(f + 0.5 * noise > 0, 1.0, -1.0), 1.0 + np.arange(n) % 2


def conditionals(H, m, theta=KERNEL.theta):
    """At theta, with the neighbours that the kernel sees; and their sets."""
    X = torch.tensor(problem()[0])
    noise, Z = torch.full((len(X),), LATENT_JITTER, dtype=torch.float64), X[:m] + 0.01
    begin = Conditionals(KERNEL, X, torch.zeros(0, 1), noise, Z)
    index = earlier_neighbors(KERNEL, X, H, begin.features if m else None)
    group = torch.cat([index, torch.arange(len(X))[:, None]], 1)
    sets = [[j for j in row if j != i] for i, row in enumerate(index.tolist())]
    found = Conditionals(KERNEL, X, group, noise, Z, torch.tensor(theta))
    return found, sets, Z.numpy() if m else None


def mode_of(of, start=None):
    y, weight = map(torch.tensor, problem()[1:])
    return find_mode(VecchiaRoot(of), y, Bernoulli(), OFFSET, weight, start=start)


def dense(H, m):
    """Modes, posterior covariances and evidences of both columns, by the oracle."""
    X, y, weight = problem()
    _, sets, Z = conditionals(H, m)
    Q, R = vecchia.parts(KERNEL, X, Z)
    C = vecchia.covariance(Q, R + LATENT_JITTER * np.eye(len(X)), sets)
    found = [laplace(C, logit(y[:, j]), float(OFFSET[j]), weight) for j in range(2)]
    return tuple(np.stack(each, -1) for each in zip(*found, strict=True))


def log_evidence(theta, H, m):
    mode = mode_of(conditionals(H, m, theta)[0])
    return float(evidence(mode, probes(mode.root, 1, torch.Generator()))[0].sum())


@pytest.fixture
def iterative(monkeypatch):
    monkeypatch.setattr(hessians, "LATENT_DENSE", 0)


@pytest.mark.parametrize(("H", "m"), SIZES)
def test_mode_covariance_and_evidence_are_those_of_the_dense_prior(H, m):
    f, C, value = dense(H, m)
    mode = mode_of(conditionals(H, m)[0])
    np.testing.assert_allclose(mode.latent - OFFSET, f, atol=1e-8)
    spread = mode.hessian.spread()
    at_points = mode.root.matmul(spread.reshape(len(spread), -1)).reshape(40, 2, -1)
    found = torch.einsum("ick,jck->ijc", at_points, at_points)
    np.testing.assert_allclose(found, C, atol=1e-8)
    values, _ = evidence(mode, probes(mode.root, 1, torch.Generator()))
    np.testing.assert_allclose(values, value, atol=1e-8)


@pytest.mark.parametrize(("H", "m"), SIZES)
def test_gradient_is_that_of_the_evidence(H, m):
    of = conditionals(H, m)[0]
    mode = mode_of(of)
    _, terms = evidence(mode, probes(mode.root, 1, torch.Generator()))
    gradient, _ = of.gradient(terms.cotangents)
    for i, step in enumerate(1e-5 * np.eye(3)):
        ends = [log_evidence(KERNEL.theta + s, H, m) for s in (step, -step)]
        np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / 2e-5, atol=2e-6)


@pytest.mark.parametrize(("H", "m"), SIZES)
def test_conjugate_gradients_find_the_same_mode(H, m, iterative):
    of = conditionals(H, m)[0]
    mode = mode_of(of)
    np.testing.assert_allclose(mode.latent - OFFSET, dense(H, m)[0], atol=1e-6)


@pytest.mark.parametrize(("H", "m"), SIZES)
def test_a_mode_of_other_hyper_parameters_is_a_start_close_by(H, m, iterative):
    """What is smooth under one prior is far from likely under a smoother one."""
    rough = mode_of(conditionals(H, m, KERNEL.theta - [0.0, 1.0, 1.0])[0])
    of = conditionals(H, m)[0]
    near, far = mode_of(of, start=rough.latent), mode_of(of)
    np.testing.assert_allclose(near.latent, far.latent, atol=1e-6)
    assert near.n_iter < far.n_iter


@pytest.mark.parametrize(("H", "m"), [(4, 0), (4, 6), (0, 6)])
def test_probes_estimate_evidence_and_gradient_without_bias(H, m, monkeypatch):
    of = conditionals(H, m)[0]
    exact = mode_of(of)
    value, terms = evidence(exact, probes(exact.root, 1, torch.Generator()))
    expected = [*value.tolist(), *of.gradient(terms.cotangents)[0].tolist()]
    monkeypatch.setattr(hessians, "LATENT_DENSE", 0)
    mode, generator, found = mode_of(of), torch.Generator().manual_seed(0), []
    for _ in range(16):
        value, terms = evidence(mode, probes(mode.root, 20, generator))
        found.append([*value.tolist(), *of.gradient(terms.cotangents)[0].tolist()])
    error = np.mean(found, 0) - expected
    spread = np.std(found, 0, ddof=1) / 16**0.5
    # With no neighbours the preconditioner is the Hessian, and its determinant exact.
    assert (np.abs(error) < 4 * spread + 1e-4).all()


@pytest.mark.parametrize(("H", "m"), [(4, 0), (4, 6)])
def test_draws_have_the_posterior_covariance(H, m, iterative):
    n_draws, C = 4000, dense(H, m)[1]
    mode = mode_of(conditionals(H, m)[0])
    spread = mode.hessian.spread(probes(mode.root, n_draws, torch.Generator().manual_seed(1)))
    at_points = mode.root.matmul(spread.reshape(len(spread), -1)).reshape(40, 2, -1)
    found = torch.einsum("ick,jck->ijc", at_points, at_points).numpy()
    var = np.einsum("iic->ic", C)
    scale = np.sqrt((var[:, None] * var[None] + C**2) / n_draws)
    assert np.abs((found - C) / scale).max() < 4.5  # of 3200


@pytest.mark.parametrize("signed", [False, True])
def test_a_system_of_the_points_solves_and_has_the_determinant(signed, rng):
    root = VecchiaRoot(conditionals(4, 6)[0])
    W = torch.tensor(rng.exponential(size=(40, 2)))
    W[3] = 0.0
    other = torch.where(W > 3, -0.01, W) if signed else None
    B = torch.tensor(rng.standard_normal((46, 4)))
    B[:, 1] = 0.0
    dense, by_points = (kind(root, W) for kind in (DenseHessian, InducingHessian))
    expected = dense.solve(B, signed=other)[0]
    np.testing.assert_allclose(by_points.solve(B, 1e-11, other)[0], expected, atol=1e-8)
    numbers = probes(root, 1500, torch.Generator().manual_seed(0))
    parts = zip(*(each.split(50, 1) for each in numbers), strict=True)
    error = torch.stack([by_points.log_det(part) for part in parts]) - dense.log_det()
    assert (error.mean(0).abs() < 4 * error.std(0) / 30**0.5).all()
    assert (error.std(0) < 1).all()  # 1.5 by the other preconditioner


def test_a_system_of_the_points_takes_few_iterations(rng):
    """Of observations that tell much, by most of which the coordinates are coupled."""
    root = VecchiaRoot(conditionals(4, 12)[0])
    W, B = torch.full((40, 1), 1e3).double(), torch.tensor(rng.standard_normal((52, 1)))
    counts = [kind(root, W).solve(B, 1e-6)[1] for kind in (SparseHessian, InducingHessian)]
    assert counts[1] < 0.6 * counts[0]


@pytest.mark.filterwarnings("error")
def test_a_system_far_from_regular_is_solved_by_its_own_products():
    """Where rounding in FITC's inverse, by Woodbury's formula, is beyond the tolerance."""
    random = np.random.default_rng(0)
    root = VecchiaRoot(conditionals(4, 12, KERNEL.theta + np.array([8.0, 1.0, 1.0]))[0])
    W = torch.tensor(random.exponential(size=(40, 1)))
    B = torch.tensor(random.standard_normal((52, 2)))
    found = InducingHessian(root, W).solve(B, 1e-8)[0]
    H = torch.eye(52, dtype=torch.float64) + root.matrix.mT @ (W * root.matrix)
    assert float((B - H @ found).norm() / B.norm()) < 1e-7


def test_a_root_keeps_no_tile(monkeypatch):
    monkeypatch.setattr("skgp.inference.vecchia.conditionals.CACHED_NUMBERS", 500)
    found, left = conditionals(4, 6)[0], []

    class Watched:
        group, features = found.group, found.features
        kernel, X, theta, noise = found.kernel, found.X, found.theta, found.noise

        def __iter__(self):
            tiles = []
            for tile in found:
                tiles.append(weakref.ref(tile))
                yield tile
                del tile
                left.append(sum(each() is not None for each in tiles))

    VecchiaRoot(Watched())
    assert len(left) > 3 and max(left) <= 1
