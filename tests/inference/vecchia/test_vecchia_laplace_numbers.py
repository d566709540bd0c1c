"""Laplace's approximation of counts and heavy-tailed noise under a Vecchia prior: dense oracles."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.data import Data
from skgp.inference.defaults import LATENT_JITTER
from skgp.inference.vecchia import hessian as hessians
from skgp.inference.vecchia.hessian import DenseHessian, SparseHessian, probes
from skgp.inference.vecchia.laplace import evidence
from skgp.learning.vecchia import neighbors_of
from skgp.learning.vecchia_laplace import LatentEvidence
from skgp.likelihoods import Poisson, StudentT
from tests.covering import slow_case
from tests.reference import laplace_evidence as oracle

KERNEL = 1.5 * Matern([0.4, 0.7], nu=1.5)
OFFSET = {"poisson": 0.4, "softplus": 0.4, "student_t": 0.0}
LIKELIHOODS = {
    "poisson": Poisson(),
    "softplus": Poisson("softplus"),
    "student_t": StudentT(0.3, 3.0, scale_bounds=(0.01, 10.0), df_bounds=(1.0, 100.0)),
}
PLACE = torch.tensor([0.15, 4.0], dtype=torch.float64).log()  # of the free parameters of noise


def problem(name, n=40):
    """Observations of either kind, weighted, counts of unlike exposures; an outlier in ten."""
    rng = np.random.default_rng(0)
    X = rng.random((n, 2))
    f, weight = np.sin(6 * X[:, 0]) + X[:, 1], 1.0 + np.arange(n) % 2
    if name == "student_t":
        y, exposure = f + 0.2 * rng.standard_t(4, n) + 3.0 * (np.arange(n) % 10 == 0), None
    else:
        exposure = rng.choice([0.3, 1.0, 5.0], n)
        y = rng.poisson(exposure * np.exp(f)).astype(float)
    columns = X, y[:, None], weight, exposure
    X, y, weight, exposure = (None if c is None else torch.tensor(c) for c in columns)
    return Data(X, y, weight, None, None if exposure is None else exposure.log()[:, None])


def objective(name, H, m=0):
    data = problem(name)
    Z = data.X[:m] + 0.01
    index = neighbors_of(KERNEL, data.X, H, Z)
    offset = torch.tensor([OFFSET[name]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return LatentEvidence(KERNEL, data, index, Z, LIKELIHOODS[name], offset, generator)


def place(name, theta=KERNEL.theta):
    return np.append(theta, PLACE) if name == "student_t" else theta


def mode_of(of, at):
    return of.mode(of.conditionals(at[:3]), parameters=torch.tensor(at[3:]))


def dense(name, K, near):
    """Mode, covariance and evidence by the oracle, from a mode nearby."""
    data = problem(name)
    y, weight = data.y[:, 0].numpy(), data.weight.numpy()
    if name == "student_t":
        likelihood = oracle.student_t(y, *(PLACE.exp().numpy() ** [0.5, 1.0]))
    else:
        likelihood = oracle.poisson(y, data.offset[:, 0].numpy())
    C = K + LATENT_JITTER * np.eye(len(K))
    return oracle.laplace(C, likelihood, OFFSET[name], weight, near)


@pytest.mark.parametrize("name", ["poisson", "student_t"])
@pytest.mark.parametrize("iterative", [False, True])
def test_all_neighbors_are_the_dense_approximation(name, iterative, monkeypatch):
    if iterative:
        monkeypatch.setattr(hessians, "LATENT_DENSE", 0)
    of = objective(name, H=39)
    mode = mode_of(of, place(name))
    near = (mode.latent - OFFSET[name])[:, 0].numpy()
    f, C, value = dense(name, KERNEL(of.data.X.numpy()), near)
    np.testing.assert_allclose(near, f, atol=1e-6 if iterative else 1e-8)
    spread = DenseHessian(mode.root, mode.curvature).spread()[:, 0]
    at_points = mode.root.matmul(spread)
    np.testing.assert_allclose(at_points @ at_points.T, C, atol=1e-6 if iterative else 1e-8)
    if not iterative:
        found, _ = evidence(mode, probes(mode.root, 1, torch.Generator()))
        np.testing.assert_allclose(found, value, atol=1e-8)
    if name == "student_t":  # what the test is about
        assert mode.signed.min() < 0 and mode.curvature.min() == 0


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("m", [0, 6])
def test_gradient_is_that_of_the_value(name, m):
    of = objective(name, H=5, m=m)
    at = place(name)
    _, gradient = of(at)
    assert len(gradient) == len(at)
    for i, step in enumerate(1e-5 * np.eye(len(at))):
        ends = [of(at + s)[0] for s in (step, -step)]
        np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / 2e-5, atol=1e-7)


def test_conjugate_gradients_solve_with_curvatures_of_either_sign():
    of = objective("student_t", H=39)
    mode = mode_of(of, place("student_t"))
    B = torch.tensor(np.random.default_rng(1).standard_normal((40, 1)))
    kinds = DenseHessian, SparseHessian
    dense, sparse = (kind(mode.root, mode.curvature) for kind in kinds)
    (exact, _), (found, _) = (each.solve(B, 1e-10, mode.signed) for each in (dense, sparse))
    np.testing.assert_allclose(found, exact, atol=1e-8)
    assert (exact - dense.solve(B)[0]).abs().max() > 1e-3
    # Far from a mode the Hessian has a negative eigenvalue, and W takes its place.
    far = torch.where(mode.signed < 0, -1e3, mode.signed)
    for each in (dense, sparse):
        np.testing.assert_allclose(each.solve(B, 1e-10, far)[0], dense.solve(B)[0], atol=1e-8)


@pytest.mark.parametrize("iterative", [False, True])
def test_a_mode_is_found_where_most_observations_begin_far_off(iterative, monkeypatch):
    if iterative:
        monkeypatch.setattr(hessians, "LATENT_DENSE", 0)
    of = objective("student_t", H=8)
    at = np.append(KERNEL.theta + np.log([1.0, 3.0, 3.0]), np.log([0.05**2, 1.5]))
    mode = mode_of(of, at)
    assert (mode.signed < 0).double().mean() > 0.3
    slope = mode.root.rmatmul(mode.problem.slope(mode.latent))
    np.testing.assert_allclose(mode.weights, slope, atol=1e-5)
    assert mode.loss < 50  # 174 after steps that lead nowhere


@pytest.mark.parametrize(("name", "m"), [("poisson", 6), slow_case("student_t", 0)])
def test_probes_estimate_the_loss_and_its_gradient_without_bias(name, m, monkeypatch):
    at, found = place(name), []
    expected = objective(name, 4, m)(at)
    monkeypatch.setattr(hessians, "LATENT_DENSE", 0)
    of = objective(name, 4, m)
    for _ in range(16):
        of._probes = ()  # others
        found.append(np.append(*of(at)))
    error = np.mean(found, 0) - np.append(*expected)
    assert (np.abs(error) < 4 * np.std(found, 0, ddof=1) / 16**0.5 + 1e-5).all()
