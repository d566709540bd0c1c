"""What the active inducing points say of each row, against a dense computation on them."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, DotProduct

from skgp.inference.defaults import LOCAL_JITTER
from skgp.inference.neighbors.conditionals import (
    Tiles,
    joint_errors,
    local_conditionals,
    prior_variance,
    sparse_rows,
)
from tests.reference import swsgp as dense

# Of variances that differ from point to point.
LINEAR = 0.5 * DotProduct(0.8) + 0.3 * RBF(0.9)


def problem_of(kernel="rbf", **options):
    problem = dense.make_problem("rbf" if kernel == "linear" else kernel, **options)
    return LINEAR if kernel == "linear" else problem.kernel, *problem.tensors[:4]


@pytest.mark.parametrize("n_neighbors", [1, 4, 12])
@pytest.mark.parametrize("name", ["rbf", "matern", "sum", "linear"])
def test_conditionals_equal_a_dense_computation_on_the_neighbours(name, n_neighbors):
    kernel, X, Y, Z, active = problem_of(name, n_neighbors=n_neighbors)
    found = local_conditionals(kernel, X, Z, active)
    for n in range(len(X)):
        points = Z[active[n]].numpy()
        K = dense.inducing_gram(kernel, points)
        weights, variance = dense.conditional(kernel, X[n].numpy(), points)
        np.testing.assert_allclose(found.weights[n], weights, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(found.variance[n], variance, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(found.precision[n], np.linalg.inv(K), rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found.log_det[n], np.linalg.slogdet(K)[1], rtol=1e-10)
    assert len(found) == len(X) and torch.equal(found.active, active)


def test_conditionals_of_float32_are_near_those_of_float64():
    kernel, X, Y, Z, active = problem_of("matern", n_neighbors=8)
    exact = local_conditionals(kernel, X, Z, active)
    found = local_conditionals(kernel, X.float(), Z.float(), active)
    assert found.weights.dtype == torch.float32
    torch.testing.assert_close(found.weights.double(), exact.weights, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.variance.double(), exact.variance, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_conditionals_survive_duplicates_and_rows_that_are_inducing_points(dtype):
    kernel, X, Y, Z, active = problem_of(n_neighbors=6)
    Z = torch.cat([Z, Z]).to(dtype)
    active = torch.cat([active[:, :3], active[:, :3] + 12], dim=1)
    X = Z[active[:, 0]]
    found = local_conditionals(kernel, X, Z, active)
    assert (found.variance >= 0).all() and (found.variance < 2 * LOCAL_JITTER).all()
    # u has noise of its own, so that two points at one place share the row between them.
    torch.testing.assert_close(found.weights[:, 0], found.weights[:, 3], rtol=0, atol=2e-2)


def test_variance_of_u_does_not_depend_on_the_company():
    kernel, X, Y, Z, active = problem_of("linear", n_neighbors=5)
    found = local_conditionals(kernel, X, Z, active)
    covariance = torch.linalg.inv(found.precision)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variance, prior_variance(kernel, Z)[active], rtol=1e-7, atol=0)
    expected = (1 + LOCAL_JITTER) * torch.tensor(kernel.diag(Z.numpy()))
    torch.testing.assert_close(prior_variance(kernel, Z), expected)


def test_variance_is_not_negative_for_rounding():
    Z = torch.linspace(0, 1, 10)[:, None].repeat(1, 2).repeat_interleave(512, dim=0)
    active = torch.arange(len(Z)).reshape(10, 512)
    found = local_conditionals(100.0 * RBF(0.5), Z[::512], Z, active)
    assert (found.variance >= 0).all()


def test_tiles_are_the_rows_in_order(monkeypatch):
    kernel, X, Y, Z, active = problem_of()
    whole = local_conditionals(kernel, X, Z, active)
    monkeypatch.setattr("skgp.inference.defaults.CACHED_NUMBERS", 7 * active.shape[1] ** 2)
    parts = list(Tiles(kernel, X, Z, active))
    assert len(parts) == 6
    assert torch.equal(torch.cat([torch.arange(40)[rows] for rows, _ in parts]), torch.arange(40))
    for name in ("active", "weights", "precision", "variance", "log_det"):
        joined = torch.cat([getattr(local, name) for _, local in parts])
        torch.testing.assert_close(joined, getattr(whole, name))


# ---- jointly -------------------------------------------------------------------------------------

KERNEL = 1.4 * RBF([0.7, 1.1]) + DotProduct(0.5)


@pytest.fixture
def rows(rng):
    """X (12, 2), points (9, 2), positions and weights (12, 4) of no particular estimator."""
    position = np.array([rng.permutation(9)[:4] for _ in range(12)])
    arrays = rng.normal(size=(12, 2)), rng.normal(size=(9, 2)), position, rng.normal(size=(12, 4))
    return tuple(map(torch.tensor, arrays))


def to_dense(position, weights, m):
    A = np.zeros((len(position), m))
    for i, (columns, values) in enumerate(zip(position, weights, strict=True)):
        A[i, columns] = values
    return A


@pytest.mark.parametrize("tile", [1, 4, 2048])
def test_joint_errors_are_the_covariance_of_what_is_left(rows, rng, tile, monkeypatch):
    """Cov(f - A v) for Cov(v) = K + diag: positive semi-definite whatever A is."""
    monkeypatch.setattr("skgp.inference.defaults.UNION_POINTS", tile)
    X, points, position, weights = rows
    A, v = to_dense(position.numpy(), weights.numpy(), 9), rng.uniform(size=9)
    both = KERNEL(np.concatenate([X, points]))
    both[12:, 12:] += np.diag(v)
    left = np.hstack([np.eye(12), -A])
    found = joint_errors(KERNEL, X, points, sparse_rows(position, weights, 9), torch.tensor(v))
    np.testing.assert_allclose(found, left @ both @ left.T, rtol=0, atol=1e-11)
    torch.testing.assert_close(found, found.T, rtol=0, atol=0)
    assert float(torch.linalg.eigvalsh(found).min()) > 0
