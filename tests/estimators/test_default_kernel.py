"""Default kernels: scaled to the columns, whatever the columns are."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.estimators._default_kernel import (
    column_spreads,
    default_classification_kernels,
    default_kernels,
)
from skgp.kernels import gram, split_noise


def columns(n=300, d=3, seed=0):
    """Normal columns with spreads 1, 10, 100, 1, ..."""
    return np.random.default_rng(seed).normal(size=(n, d)) * 10.0 ** (np.arange(d) % 3)


def shapes(kernels):
    return [(type(kernel.k2), getattr(kernel.k2, "nu", np.inf)) for kernel in kernels]


def test_default_classification_kernels_have_no_noise_and_one_length_scale_a_column():
    X = columns()
    kernels = default_classification_kernels(X)
    assert shapes(kernels) == [(RBF, np.inf), (Matern, 2.5), (Matern, 1.5)]
    for kernel in kernels:
        assert split_noise(kernel)[1] is None
        np.testing.assert_allclose(kernel.k2.length_scale, np.sqrt(3) * column_spreads(X))
        np.testing.assert_allclose(np.ptp(kernel.bounds[1:], axis=1), np.log(1e8))


def test_default_classification_kernels_of_few_rows_are_one():
    assert shapes(default_classification_kernels(columns(n=50))) == [(Matern, 2.5)]


def test_default_classification_kernels_of_many_columns_offer_one_length_scale_for_all():
    X = columns(d=60)
    kernels = default_classification_kernels(X)
    shared = [kernel for kernel in kernels if np.ndim(kernel.k2.length_scale) == 0]
    assert shapes(shared) == [(RBF, np.inf), (Matern, 1.5)]
    for kernel in shared:
        np.testing.assert_allclose(kernel.k2.length_scale, np.sqrt(X.var(axis=0).sum()))
        assert kernel.n_dims == 2
    assert len(kernels) == 5


@pytest.mark.parametrize("d", [3, 60])
def test_default_classification_kernels_count_a_row_of_weight_two_twice(d):
    X = columns(d=d)
    weight = np.where(np.arange(300) < 100, 2.0, 1.0)
    weighted = default_classification_kernels(X, weight)
    written_out = default_classification_kernels(np.concatenate([X, X[:100]]))
    for a, b in zip(weighted, written_out, strict=True):
        np.testing.assert_allclose(a.theta, b.theta, rtol=1e-10)


@pytest.mark.parametrize("function", [default_kernels, default_classification_kernels])
@pytest.mark.parametrize("d", [2, 60])
@pytest.mark.parametrize("n", [1, 300])
def test_default_kernels_are_usable_for_constant_columns_and_outliers(function, d, n):
    X = columns(n, d)
    X[:, 0] = 1e5
    X[0, 1] = 1e12
    X[:, d // 2] = np.arange(n) == 0
    for kernel in function(X):
        signal, _ = split_noise(clone(kernel))
        K = gram(signal, torch.tensor(X))
        assert K.isfinite().all()
        assert (kernel.bounds[:, 0] < kernel.theta).all()
        assert (kernel.theta < kernel.bounds[:, 1]).all()
        # Typical rows are about one length scale apart, not infinitely many.
        assert n == 1 or K[1:, 1:].min() > 1e-3 * K.max()


@pytest.mark.parametrize("d", [3, 60])
def test_default_classification_kernels_of_equal_rows_have_length_scales_of_order_one(d):
    for kernel in default_classification_kernels(np.full((300, d), 7.0)):
        scales = np.atleast_1d(kernel.k2.length_scale)
        assert ((scales >= 1) & (scales <= np.sqrt(d))).all()
