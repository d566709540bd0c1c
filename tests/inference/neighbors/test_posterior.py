"""Predictions against the dense oracle: eq. 13 row by row, J and the paper's union jointly."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.defaults import SHARED_JITTER
from skgp.inference.neighbors import posterior as module
from skgp.inference.neighbors.posterior import KrigingModel, SWSGPPosterior, SWSGPState
from tests.reference import swsgp as dense
from tests.same import assert_same

M, H, C = 14, 5, 2
kinds = pytest.mark.parametrize("kind", ["diagonal", "full"])
EPS = 1e-10


def posterior_of(problem, kind, dtype=torch.float64, method="auto"):
    """A posterior of no particular optimum, and S (c, M, M) of it."""
    mean, S = dense.random_posterior(len(problem.Z), len(problem.offset), seed=1)
    var, root = None, None
    if kind == "diagonal":
        var = np.diagonal(S, axis1=1, axis2=2).T.copy()
        S = dense.diagonal(var)
    else:
        root = np.linalg.cholesky(S)
    parts = problem.offset[:0], problem.Z, mean, var, root, problem.offset
    tensors = (None if part is None else torch.tensor(part, dtype=dtype) for part in parts)
    return SWSGPPosterior(SWSGPState(problem.kernel, *tensors), H, method), mean, S


def problem_of(name="rbf", n=25, seed=0, **options):
    """Rows, whose active sets are found by sorting under the kernel's length scales."""
    problem = dense.make_problem(
        name, n=n, n_inducing=M, n_neighbors=H, n_latent=C, seed=seed, **options
    )
    return near(problem)


def near(problem):
    scale = getattr(problem.kernel, "k2", problem.kernel)
    scale = np.asarray(scale.get_params().get("length_scale", 1.0))
    return replace(problem, active=dense.nearest(problem.X / scale, problem.Z / scale, H))


def awkward(seed):
    """Rows and inducing points of which some are equal, and some rows equal to inducing points."""
    problem, rng = problem_of(seed=seed), np.random.default_rng(seed)
    Z = np.concatenate([problem.Z[:10], problem.Z[:4]])
    X = np.concatenate([problem.X[:8], problem.X[:5], Z[rng.integers(0, M, 6)]])
    problem = replace(problem, X=X, Z=Z, Y=np.zeros((len(X), C)))
    return near(replace(problem, kernel=1.3 * RBF(rng.uniform(0.2, 4.0))))


# ---- one row at a time ---------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("name", ["rbf", "matern"])
def test_mean_and_variance_are_eq_13_with_neighbours_that_fade(name, kind):
    problem = problem_of(name)
    found, mean, S = posterior_of(problem, kind)
    expected = dense.moments(problem, mean, S, dense.predictors)
    X = torch.tensor(problem.X)
    for got, want in zip(found.mean_and_variance(X), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=EPS)
    np.testing.assert_allclose(found.mean(X), expected[0], rtol=0, atol=EPS)


@kinds
def test_a_batch_is_its_rows_in_tiles_of_any_size(kind, monkeypatch):
    problem = problem_of()
    found, _, _ = posterior_of(problem, kind)
    X = torch.tensor(problem.X)
    whole = found.mean_and_variance(X)
    rows = zip(*(found.mean_and_variance(x[None]) for x in X), strict=True)
    seen = []
    find = found.neighborhood.find
    monkeypatch.setattr(found.neighborhood, "find", lambda X: (seen.append(len(X)), find(X))[1])
    monkeypatch.setattr(module, "NEIGHBOR_TILE", 4 * H * (H + 2))
    tiles = found.mean_and_variance(X)
    assert seen == [4] * 6 + [1]
    for part, row, tile in zip(whole, rows, tiles, strict=True):
        torch.testing.assert_close(torch.cat(row), part, rtol=0, atol=EPS)
        torch.testing.assert_close(tile, part, rtol=0, atol=EPS)


@kinds
def test_float32_predicts_nearly_the_same(kind):
    problem = problem_of()
    found = posterior_of(problem, kind, torch.float32)[0]
    expected = posterior_of(problem, kind)[0].mean_and_variance(torch.tensor(problem.X))
    X = torch.tensor(problem.X, dtype=torch.float32)
    for got, want in zip(found.mean_and_variance(X), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
    mean, covariance = found.mean_and_covariance(X)
    assert mean.dtype == covariance.dtype == torch.float32


def test_fewer_points_than_neighbours_are_all_used(monkeypatch):
    monkeypatch.setattr(dense, "JITTER", SHARED_JITTER)
    problem = problem_of()
    found, mean, S = posterior_of(problem, "full")
    found = replace(found, n_neighbors=100)
    everything = np.tile(np.arange(M), (len(problem.X), 1))
    expected = dense.moments(replace(problem, active=everything), mean, S)
    for got, want in zip(found.mean_and_variance(torch.tensor(problem.X)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-7)


@kinds
def test_pickle_holds_the_state_and_no_search(kind):
    problem = problem_of()
    found, _, _ = posterior_of(problem, kind)
    X = torch.tensor(problem.X)
    before, expected = pickle.dumps(found), found.mean_and_variance(X)
    after = pickle.dumps(found)  # the neighbourhood was built in between
    assert len(after) == len(before) < len(pickle.dumps(found.state)) + 300
    again = pickle.loads(after)
    assert "neighborhood" not in vars(again) and again.neighbors == "auto"
    for got, want in zip(again.mean_and_variance(X), expected, strict=True):
        assert_same(got, want)


# ---- jointly -------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("name", ["rbf", "matern"])
def test_joint_covariance_is_that_of_the_oracle(name, kind):
    problem = problem_of(name)
    found, mean, S = posterior_of(problem, kind)
    got_mean, covariance = found.mean_and_covariance(torch.tensor(problem.X))
    assert covariance.shape == (C, 25, 25)
    expected = dense.moments(problem, mean, S, dense.predictors)[0]
    np.testing.assert_allclose(got_mean, expected, rtol=0, atol=EPS)
    for J, S_l in zip(covariance, S, strict=True):
        expected = dense.joint_covariance(problem, S_l)
        np.testing.assert_allclose(J, expected, rtol=0, atol=EPS)


@kinds
@pytest.mark.parametrize("seed", range(4))
def test_joint_covariance_is_positive_semidefinite_with_duplicates(seed, kind):
    found = posterior_of(problem := awkward(seed), kind)[0]
    _, covariance = found.mean_and_covariance(torch.tensor(problem.X))
    assert_same(covariance, covariance.mT)
    assert float(torch.linalg.eigvalsh(covariance).min()) > -1e-10
    # Rows that are equal are one: all of their variance is shared.
    np.testing.assert_allclose(covariance[:, 0], covariance[:, 8], rtol=0, atol=EPS)


@kinds
def test_joint_covariance_does_not_depend_on_the_company(kind):
    found = posterior_of(problem := awkward(0), kind)[0]
    X = torch.tensor(problem.X)
    _, whole = found.mean_and_covariance(X)
    for rows in ([0, 1], [2, 17, 9], [5]):
        _, some = found.mean_and_covariance(X[rows])
        torch.testing.assert_close(some, whole[:, rows][:, :, rows], rtol=0, atol=EPS)


@kinds
@pytest.mark.parametrize("name", ["rbf", "matern"])
def test_union_is_the_joint_prediction_of_the_paper(name, kind):
    problem = problem_of(name)
    found, mean, S = posterior_of(problem, kind)
    got_mean, covariance = found.mean_and_covariance(torch.tensor(problem.X), union=True)
    for l in range(C):
        want_mean, want = dense.union_prediction(problem, mean[:, l], S[l])
        got = got_mean[:, l] - problem.offset[l]
        np.testing.assert_allclose(got, want_mean, rtol=0, atol=1e-8)
        np.testing.assert_allclose(covariance[l], want, rtol=0, atol=1e-8)
    # One row alone is conditioned on its own active points, all of them in full.
    one = replace(problem, X=problem.X[:1], active=problem.active[:1])
    alone = found.mean_and_covariance(torch.tensor(one.X), union=True)[1][:, 0]
    np.testing.assert_allclose(alone.T, dense.moments(one, mean, S)[1], rtol=0, atol=1e-9)


# ---- kriging -------------------------------------------------------------------------------------


def krige(weighted, seed=0):
    rng = np.random.default_rng(seed)
    X, T = torch.tensor(rng.normal(size=(60, 2))), torch.tensor(rng.normal(size=(60, C)))
    weight = torch.tensor(rng.uniform(0.3, 3.0, 60)) if weighted else None
    offset = torch.tensor([0.5, -1.0], dtype=torch.float64)
    return KrigingModel(1.5 * RBF([0.6, 0.9]), 0.05, X, T, weight, offset, H)


@pytest.mark.parametrize("weighted", [False, True])
def test_joint_kriging_has_the_moments_of_each_row(weighted):
    model = krige(weighted)
    rng = np.random.default_rng(1)
    X = torch.cat([torch.tensor(rng.normal(size=(20, 2))), model.X[:5], model.X[:3]])
    mean, var = model.mean_and_variance(X)
    joint_mean, covariance = model.mean_and_covariance(X)
    assert covariance.shape == (1, 28, 28)
    torch.testing.assert_close(joint_mean, mean, rtol=0, atol=EPS)
    torch.testing.assert_close(covariance[0].diagonal(), var, rtol=0, atol=EPS)
    assert float(torch.linalg.eigvalsh(covariance[0]).min()) > -1e-10
    some = model.mean_and_covariance(X[[3, 21, 27]])[1][0]
    expected = covariance[0][[3, 21, 27]][:, [3, 21, 27]]
    torch.testing.assert_close(some, expected, rtol=0, atol=EPS)


@pytest.mark.parametrize("weighted", [False, True])
def test_union_kriging_is_a_gp_on_the_union(weighted):
    model = krige(weighted)
    X = np.random.default_rng(1).normal(size=(9, 2))
    active = dense.nearest(X / [0.6, 0.9], model.X.numpy() / [0.6, 0.9], H)
    union = np.unique(active)
    points, T = model.X.numpy()[union], model.targets.numpy()[union]
    noise = 0.05 / (np.ones(60) if model.weight is None else model.weight.numpy())[union]
    K, k = model.kernel(points) + np.diag(noise), model.kernel(points, X)
    offset = model.offset.numpy()
    mean, covariance = model.mean_and_covariance(torch.tensor(X), union=True)
    expected = offset + k.T @ np.linalg.solve(K, T - offset)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-9)
    expected = model.kernel(X) - k.T @ np.linalg.solve(K, k)
    np.testing.assert_allclose(covariance[0], expected, rtol=0, atol=1e-9)
