"""Inducing points: centres of clusters in the metric of the kernel, or rows."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.data import Data
from skgp.estimators._reduction import (
    INITIALISERS,
    class_centres,
    cluster_centres,
    distinct_rows,
    inducing_points,
    principal_components,
    warn_of_few_rows,
)
from skgp.inference.pathwise import greedy_variance


@pytest.fixture
def X(rng):
    return rng.standard_normal((2000, 2))


def data_of(*arrays):
    """Rows and their weights; the targets do not matter."""
    X, *weight = map(torch.from_numpy, arrays)
    return Data(X, X[:, 0], *weight)


def centres(X, n_points, kernel, *weight):
    data = data_of(X, *weight)
    return cluster_centres(data, n_points, kernel, random_state=np.random.RandomState(0))


def unexplained(kernel, X, Z):
    """Mean prior variance that the points leave."""
    K = kernel(X, Z)
    explained = np.einsum("ij,ji->i", K, np.linalg.solve(kernel(Z) + 1e-9 * np.eye(len(Z)), K.T))
    return float(np.mean(kernel.diag(X) - explained))


# ---- centres ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_points", [1, 7, 50])
def test_cluster_centres_are_distinct_points_among_the_rows(X, n_points):
    before = X.copy()
    Z = centres(X, n_points, RBF(0.5))
    assert Z.shape == (n_points, 2) and Z.dtype == np.float64
    assert len(distinct_rows(Z)) == n_points
    assert (Z.min(0) >= X.min(0)).all() and (Z.max(0) <= X.max(0)).all()
    np.testing.assert_array_equal(X, before)


def test_cluster_centres_explain_more_than_rows_at_random(X):
    for scale in (0.3, 0.6):
        chance = [
            unexplained(RBF(scale), X, X[np.random.default_rng(s).permutation(2000)[:40]])
            for s in range(5)
        ]
        assert unexplained(RBF(scale), X, centres(X, 40, RBF(scale))) < 0.9 * min(chance)


def test_cluster_centres_are_in_the_metric_of_the_kernel(X):
    """They differ in the column in which the kernel varies, and average over the other."""
    for column in (0, 1):
        scales = np.array([30.0, 30.0])
        scales[column] = 0.3
        spread = centres(X, 30, RBF(scales)).std(axis=0)
        assert spread[column] > 0.8 and spread[1 - column] < 0.4


def test_cluster_centres_do_not_depend_on_units_or_origin(X):
    """float32 inside, whose digits an origin far away would take."""
    Z = centres(X, 40, RBF([0.5, 0.5]))
    for factor, shift in ((1000.0, 0.0), (1.0, 1e6)):
        moved = centres(factor * X + shift, 40, RBF([0.5 * factor] * 2))
        np.testing.assert_allclose((moved - shift) / factor, Z, atol=1e-4)


def test_cluster_centres_of_few_distinct_rows_are_those_rows(X):
    rows = np.repeat(X[:10], 30, axis=0)
    for n_points in (10, 11, 300):
        np.testing.assert_array_equal(centres(rows, n_points, RBF()), X[:10])
    assert len(centres(rows, 9, RBF())) <= 9


def test_cluster_centres_lean_to_rows_of_weight(X):
    weight = np.where(X[:, 0] > 0, 1.0, 1e-6)
    Z = centres(X, 40, RBF(0.5), weight)
    even = centres(X, 40, RBF(0.5))
    assert (Z[:, 0] > 0).mean() > (even[:, 0] > 0).mean() + 0.1


def test_cluster_centres_of_a_read_only_array_with_a_constant_column(X):
    rows = np.column_stack([X, np.full(2000, 3.0)])
    rows.flags.writeable = False
    Z = centres(rows, 20, RBF(0.5))
    assert len(Z) == 20
    np.testing.assert_allclose(Z[:, 2], 3.0, rtol=1e-12)


# ---- distinct rows ------------------------------------------------------------------------------


def test_distinct_rows_are_the_first_of_each():
    X = np.array([[1.0, 2.0], [0.0, 3.0], [1.0, 2.0], [-0.0, 3.0], [2.0, 1.0]])
    assert distinct_rows(X).tolist() == [0, 1, 4]
    assert distinct_rows(np.asfortranarray(X)).tolist() == [0, 1, 4]
    assert distinct_rows(X[::-1]).tolist() == [0, 1, 2]
    assert distinct_rows(X[:, ::-1]).tolist() == [0, 1, 4]
    assert distinct_rows(X[:0]).tolist() == []


# ---- ways of choosing ---------------------------------------------------------------------------


def points(X, n_points, kernel, seed=0, **options):
    random_state = np.random.RandomState(seed)
    return inducing_points(data_of(X), n_points, kernel, random_state=random_state, **options)


def are_rows(Z, X):
    return all((z == X).all(axis=1).any() for z in Z)


@pytest.mark.parametrize("init", INITIALISERS)
def test_inducing_points_are_as_many_as_asked_and_distinct(X, init):
    before = X.copy()
    Z = points(X, 30, RBF(0.5), init=init)
    assert Z.shape == (30, 2) and Z.dtype == np.float64 and len(distinct_rows(Z)) == 30
    assert are_rows(Z, X) == (init != "k-means")
    np.testing.assert_array_equal(Z, points(X, 30, RBF(0.5), init=init))
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("init", INITIALISERS)
def test_inducing_points_of_few_distinct_rows_are_those_rows(X, init):
    rows = np.repeat(X[:10], 30, axis=0)
    for n_points in (10, 11, 300):
        np.testing.assert_array_equal(points(rows, n_points, RBF(), init=init), X[:10])
    Z = points(rows, 9, RBF(), init=init)
    assert len(distinct_rows(Z)) == len(Z) <= 9


def test_inducing_points_at_random_depend_on_the_seed(X):
    first, second = (points(X, 20, RBF(), seed, init="random") for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_inducing_points_chosen_greedily_are_the_pivots(X):
    kernel = RBF([0.5, 2.0])
    chosen = greedy_variance(kernel, torch.tensor(X), 40).numpy()
    np.testing.assert_array_equal(points(X, 40, kernel, init="greedy"), X[chosen])


def test_inducing_points_chosen_greedily_leave_less_than_rows_at_random(X):
    greedy, chance = (points(X, 60, RBF(1.0), init=init) for init in ("greedy", "random"))
    assert unexplained(RBF(1.0), X, greedy) < 0.5 * unexplained(RBF(1.0), X, chance)


def test_warn_of_few_rows_names_the_numbers_and_the_remedy():
    with pytest.warns(UserWarning, match=r"n_inducing=9 is more than the 7 .* Give n_inducing=7"):
        warn_of_few_rows(9, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_few_rows(7, 7)


def test_clusters_are_of_each_class_by_itself():
    """Interleaved classes: a centre of both would lie between them."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.r_[np.zeros(300, int), np.ones(99, int), 3])
    X = np.column_stack([np.arange(400.0), labels])
    Z = class_centres(data_of(X), labels, 40, RBF(50.0), random_state=np.random.RandomState(0))
    classes, sizes = np.unique(Z[:, 1], return_counts=True)
    np.testing.assert_array_equal(classes, [0, 1, 3])  # of class 2 there are no rows
    np.testing.assert_array_equal(sizes, [30, 10, 1])
    # All rows, and each of them once, where they are no more.
    twice = np.tile(np.arange(20), 2)
    options = {"random_state": np.random.RandomState(0)}
    Z = class_centres(data_of(X[twice]), labels[twice], 20, RBF(), **options)
    np.testing.assert_array_equal(Z, X[:20])


def test_clusters_follow_the_weights_of_the_classes():
    X = np.random.default_rng(0).standard_normal((200, 2))
    labels = np.repeat([0, 1], 100)
    X[100:, 0] += 100
    data = data_of(X, 1.0 + 2 * labels)
    Z = class_centres(data, labels, 40, RBF(), random_state=np.random.RandomState(0))
    assert (Z[:, 0] > 50).sum() == 30 and len(Z) == 40


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("p", [1, 2])
def test_a_projected_row_does_not_depend_on_the_rows_beside_it(d, p):
    # Of inputs of 1e12 the last bits are 1e-4, which short length scales would magnify.
    X = 1e12 * np.random.default_rng(0).standard_normal((150, d))
    projection = principal_components(X, p)
    together = projection(X)
    np.testing.assert_allclose(together, (X - X.mean(0)) @ projection.directions, rtol=1e-9, atol=1)
    np.testing.assert_array_equal(np.vstack([projection(row[None]) for row in X]), together)
    np.testing.assert_array_equal(projection(X[100:]), together[100:])
