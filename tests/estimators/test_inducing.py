"""Inducing points: centres of clusters in the metric of the kernel."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    RationalQuadratic,
)

from skgp.estimators import _inducing as module
from skgp.estimators._inducing import cluster_centres, distinct_rows, length_scales
from skgp.kernels import ActiveDims


@pytest.fixture
def X(rng):
    return rng.standard_normal((2000, 2))


def centres(X, n_points, kernel, **options):
    return cluster_centres(X, n_points, kernel, random_state=np.random.RandomState(0), **options)


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
    Z = centres(X, 40, RBF(0.5), sample_weight=weight)
    even = centres(X, 40, RBF(0.5))
    assert (Z[:, 0] > 0).mean() > (even[:, 0] > 0).mean() + 0.1


def test_cluster_centres_are_reproducible(X):
    assert np.array_equal(centres(X, 20, RBF(0.5)), centres(X, 20, RBF(0.5)))


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


def test_distinct_rows_equal_those_of_numpy(rng):
    X = rng.integers(0, 4, size=(500, 3)).astype(float)
    expected = np.sort(np.unique(X, axis=0, return_index=True)[1])
    np.testing.assert_array_equal(distinct_rows(X), expected)


# ---- length scales ------------------------------------------------------------------------------


@pytest.mark.parametrize("amplitude", [1.0, 7.0])
def test_length_scales_of_an_rbf_are_its_own(X, amplitude):
    kernel = ConstantKernel(amplitude) * RBF([0.5, 20.0])
    np.testing.assert_allclose(length_scales(kernel, X), [0.5, 20.0], rtol=1e-9)


@pytest.mark.parametrize(
    ("kernel", "scale"),
    [(RationalQuadratic(0.8, alpha=50.0), 0.8), (Matern(0.8, nu=2.5), 0.8 * (3 / 5) ** 0.5)],
)
def test_length_scales_of_smooth_kernels_are_their_curvature(X, kernel, scale):
    """k = 1 - r^2 / (2 l^2) near 0."""
    np.testing.assert_allclose(length_scales(kernel, X), scale, rtol=0.05)


def test_length_scales_of_a_linear_kernel_are_finite_at_the_origin(X):
    rows = X.copy()
    rows[0] = 0.0
    scale = length_scales(DotProduct(0.0), rows)
    assert np.isfinite(scale).all() and (scale > 0).all()


def test_length_scales_of_ignored_columns_are_great(X):
    scale = length_scales(ActiveDims(RBF(0.5), [1]), X)
    np.testing.assert_allclose(scale, [0.5e6, 0.5], rtol=1e-9)
    rows = np.column_stack([X[:, 0], np.full(len(X), 0.1)])  # its spread is rounding
    scale = length_scales(RBF([0.5, 1e-3]), rows)
    assert scale[0] == pytest.approx(0.5) and scale[1] > 0


def test_length_scales_of_a_constant_kernel_are_one(X):
    np.testing.assert_array_equal(length_scales(ConstantKernel(2.0), X), [1.0, 1.0])


def test_length_scales_look_at_few_rows(X, monkeypatch):
    shapes = []
    before = module.gram

    def watched(kernel, rows, moved):
        shapes.append(tuple(moved.shape))
        return before(kernel, rows, moved)

    monkeypatch.setattr(module, "gram", watched)
    length_scales(RBF(0.5), X)
    assert shapes == [(16, 2, 2)]
