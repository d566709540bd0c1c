"""Kriging against dense GPs on each row's neighbours, and its link against known parameters."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.neighbors.posterior import KrigingModel, is_shared, merge_rows
from tests.reference import neighborhood
from tests.same import assert_same

KERNEL = 1.5 * Matern([0.8, 1.3], nu=2.5)
NOISE = 0.05
H = 12


def problem(n=150, c=2, *, seed=0, d=2):
    rng = np.random.default_rng(seed)
    X, T = rng.normal(size=(n, d)), rng.normal(size=(n, c))
    return torch.from_numpy(X), torch.from_numpy(T)


def model(X, T, weight=None, *, kernel=KERNEL, n_neighbors=H):
    offset = torch.linspace(0.5, 1.5, T.shape[1], dtype=torch.float64)
    return KrigingModel(kernel, NOISE, X, T, weight, offset, n_neighbors)


def left_out(m, rows, values):
    """Rows predicted where one observation of each is taken away."""
    ones = torch.ones(len(rows), dtype=torch.float64)
    weight = ones if m.weight is None else m.weight[rows]
    return m.leave_out(rows, ones, values, m.others(rows, is_shared(weight, ones)))


def dense_kriging(m, x, own=None):
    """Kriging at x by a loop over the rows; `own` is left out."""
    X, T, offset = m.X.numpy(), m.targets.numpy(), m.offset.numpy()
    noise = m.noise / (np.ones(len(X)) if m.weight is None else m.weight.numpy())
    scale = m.kernel.k2.length_scale
    a, var = neighborhood.weights(m.kernel, X, noise, x, m.n_neighbors, scale, out=own)
    return offset + a @ (T - offset), var


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [2, 14])
def test_mean_and_variance_are_those_of_neighbours_that_fade_and_a_few_more(weighted, d):
    X, T = problem(d=d)
    weight = torch.linspace(0.2, 3.0, len(X), dtype=torch.float64) if weighted else None
    m = model(X, T, weight, kernel=1.5 * RBF(np.linspace(0.8, 3.0, d)))
    x = problem(40, seed=1, d=d)[0]
    mean, var = m.mean_and_variance(x)
    for i, row in enumerate(x.numpy()):
        expected, expected_var = dense_kriging(m, row)
        np.testing.assert_allclose(mean[i], expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(var[i], expected_var, rtol=0, atol=1e-10)
    assert_same(m.mean(x), mean)


def test_leave_out_conditions_a_row_on_the_others_alone():
    X, T = problem()
    X = torch.cat([X, X[:20]])  # duplicates: the twin stays, by its index, and the row itself goes
    T = torch.cat([T, T[:20] + 1])
    m = model(X, T)
    rows = torch.arange(0, len(X), 7)
    mean, var = left_out(m, rows, T[rows])
    for i, row in enumerate(rows.tolist()):
        expected, expected_var = dense_kriging(m, X[row].numpy(), own=row)
        np.testing.assert_allclose(mean[i], expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(var[i], expected_var, rtol=0, atol=1e-10)


def test_leave_out_of_a_merged_row_is_that_of_one_of_its_copies():
    X, T = problem(60)
    copies = torch.cat([X, X[:10], X[:10]])
    targets = torch.cat([T, T[:10] + 1, T[:10] - 2])
    every = model(copies, targets, n_neighbors=len(copies))
    merged = model(*merge_rows(copies, targets), n_neighbors=len(copies))
    rows = torch.arange(30)
    expected = left_out(every, rows, T[rows])
    for got, want in zip(left_out(merged, rows, T[rows]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_merge_rows_keeps_the_dense_posterior():
    X, T = problem(40)
    X = torch.cat([X, X[:15]])
    T = torch.cat([T, T[:15] * 2])
    weight = torch.linspace(0.5, 2.0, len(X), dtype=torch.float64)
    x = problem(5, seed=1)[0]
    merged = model(*merge_rows(X, T, weight), n_neighbors=100)
    assert len(merged.X) == 40
    whole = model(X, T, weight, n_neighbors=100)
    for got, want in zip(merged.mean_and_variance(x), whole.mean_and_variance(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert merge_rows(X[:40], T[:40])[2] is None
