"""Vecchia priors against dense joint covariances built point after point."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ExpSineSquared, Matern

from skgp.inference.vecchia import neighbors
from skgp.inference.vecchia.conditionals import (
    Conditionals,
    VecchiaRoot,
    global_features,
    inducing_factor,
)
from skgp.inference.vecchia.neighbors import earlier_neighbors, maximin_order
from tests.reference import vecchia

SCALE = np.array([0.4, 0.7])
KERNEL = 1.3 * Matern(SCALE, nu=1.5)
N = 60


def points(n=N, d=2, seed=0):
    return np.random.default_rng(seed).random((n, d))


def features(X, Z):
    X, Z = torch.tensor(X), torch.tensor(Z)
    return global_features(KERNEL, X, Z, inducing_factor(KERNEL, Z))


def root_and_covariance(H, m):
    """A root of the prior covariance of N points, and that covariance."""
    X = points()
    Z = None if m is None else points(m, seed=1)
    noise = np.full(N, 1e-4 * 1.3)
    sets = vecchia.neighbors(KERNEL, X, H, SCALE, Z, noise)
    Q, R = vecchia.parts(KERNEL, X, Z)
    Z = None if Z is None else torch.tensor(Z)
    phi = None if Z is None else features(X, Z.numpy())
    index = earlier_neighbors(KERNEL, torch.tensor(X), H, phi, noise=torch.tensor(noise))
    own = torch.arange(N)[:, None]
    group = torch.cat([index, own], 1)
    found = Conditionals(KERNEL, torch.tensor(X), group, torch.tensor(noise), Z)
    return VecchiaRoot(found), vecchia.covariance(Q, R + np.diag(noise), sets)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("H", "m"), [(0, None), (1, None), (6, None), (N - 1, None), (5, 8)])
def test_neighbors_are_the_earlier_points_that_tell_most(H, m, noise):
    X = points()
    Z = None if m is None else points(m, seed=1)
    noise = noise * np.random.default_rng(2).random(N)
    sets = vecchia.neighbors(KERNEL, X, H, SCALE, Z, noise)
    phi = None if Z is None else features(X, Z)
    index = earlier_neighbors(KERNEL, torch.tensor(X), H, phi, noise=torch.tensor(noise)).numpy()
    assert index.shape == (N, H)
    for i, expected in enumerate(sets):
        assert set(index[i]) == set(expected) | (set() if len(expected) == H else {i})


@pytest.mark.parametrize("m", [0, 30])
def test_covariances_of_many_columns_by_products_choose_the_same_neighbors(m, monkeypatch):
    X = torch.tensor(points(300, 24))
    kernel = Matern(np.linspace(1.0, 3.0, 24), nu=1.5)
    Z = torch.tensor(points(m, 24, seed=1))
    phi = global_features(kernel, X, Z, inducing_factor(kernel, Z)) if m else None
    found = []
    for columns, method in ((20, "expand"), (24, "direct")):
        methods, gram = set(), neighbors.gram

        def heard(*given, method="direct", gram=gram, methods=methods):
            methods.add(method)
            return gram(*given, method=method)

        monkeypatch.setattr(neighbors.defaults, "PRODUCT_COLUMNS", columns)
        with monkeypatch.context() as patch:
            patch.setattr(neighbors, "gram", heard)
            found.append(earlier_neighbors(kernel, X, 8, phi))
        assert method in methods and ("expand" in methods) == (method == "expand")
    assert bool((found[0] == found[1]).all())


def test_neighbors_of_many_points_are_found_in_prefixes():
    X = points(400)
    index = earlier_neighbors(KERNEL, torch.tensor(X), 7).numpy()
    expected = vecchia.neighbors(KERNEL, X, 7, SCALE)
    assert all(set(index[i]) == set(expected[i]) for i in range(7, 400))
    # Sorted inputs, none beyond a point before it, and a Markov process: what lies beyond the
    # nearest tells nothing.
    line = torch.linspace(0, 1, 600, dtype=torch.float64)[:, None]
    index = earlier_neighbors(1.0 * Matern(0.1, nu=0.5), line, 3)
    assert torch.equal(index[3:, 0], torch.arange(2, 599))
    assert ((torch.arange(3, 600)[:, None] - index[3:]) <= 9).all()


def test_correlations_of_candidates_are_taken_in_tiles(monkeypatch):
    X, Z, limit, sizes = points(), points(20, seed=1), 2000, []
    expected = earlier_neighbors(KERNEL, torch.tensor(X), 6, features(X, Z))
    kernel_of = neighbors.gram

    def watched(kernel, A, *rest):
        sizes.append((len(A), 8 * A[..., 0].numel() * len(Z)))
        return kernel_of(kernel, A, *rest)

    monkeypatch.setattr(neighbors.defaults, "NEIGHBOR_TILE", limit)
    monkeypatch.setattr(neighbors, "gram", watched)
    found = earlier_neighbors(KERNEL, torch.tensor(X), 6, features(X, Z))
    assert torch.equal(found, expected)
    assert sizes and all(size <= 8 * limit or n == 1 for n, size in sizes)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_maximin_orders_spread_every_prefix(d):
    X = torch.tensor(points(600, d))
    order = maximin_order(X)
    assert torch.equal(order.sort().values, torch.arange(600))
    for size in (20, 75, 300):
        spread, at_random = (
            torch.nn.functional.pdist(rows[:size]).sort().values[: size // 4].mean()
            for rows in (X[order], X)
        )
        assert spread > 1.5 * at_random
    copies = maximin_order(X[:60].repeat(10, 1))
    assert torch.equal(copies.sort().values, torch.arange(600))


@pytest.mark.parametrize(("H", "m"), [(0, 8), (1, None), (6, None), (6, 8), (N - 1, 8)])
def test_products_are_those_of_the_dense_covariance(H, m):
    root, C = root_and_covariance(H, m)
    np.testing.assert_allclose(squared(root), C, atol=1e-10)
    np.testing.assert_allclose(root.matrix, root.rmatmul(torch.eye(N).double()).T, atol=1e-12)


def squared(root):
    """The covariance R R' of a root."""
    return root.matmul(root.rmatmul(torch.eye(root.n_rows, dtype=torch.float64))).numpy()


def test_replicates_and_noises_of_each_row():
    X = np.repeat(points(20), 3, axis=0)
    noise = np.random.default_rng(3).random(N) + 0.1
    index = earlier_neighbors(KERNEL, torch.tensor(X), 5)
    group = torch.cat([index, torch.arange(N)[:, None]], 1)
    root = VecchiaRoot(Conditionals(KERNEL, torch.tensor(X), group, torch.tensor(noise)))
    sets = [[j for j in row if j != i] for i, row in enumerate(index.tolist())]
    Q, R = vecchia.parts(KERNEL, X)
    C = vecchia.covariance(Q, R + np.diag(noise), sets)
    np.testing.assert_allclose(squared(root), C, atol=1e-12)


def test_features_of_a_row_do_not_depend_on_other_rows():
    # 1e8 periods away a last bit of the distance is 1e-8: that which is taken must be the same one.
    kernel = ExpSineSquared()
    Z = torch.tensor(points(20, 1))
    L = inducing_factor(kernel, Z)
    rows = 1e8 + torch.tensor(points(20, 1, seed=1))
    company = torch.cat([rows, torch.tensor([[0.0123]], dtype=torch.float64)])
    together = global_features(kernel, company, Z, L)[:20]
    torch.testing.assert_close(global_features(kernel, rows, Z, L), together, rtol=0, atol=1e-13)
