"""Default kernels: scaled to the columns, whatever the columns are."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import DLMGPRegressor, QSGPRegressor, SWSGPRegressor
from skgp.data import Data
from skgp.estimators._kernels import column_spreads, default_classification_kernels, default_kernels
from skgp.kernels import gram, split_noise
from skgp.learning.evidence import ExactEvidence


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


def test_an_outlier_does_not_make_a_column_constant():
    """The mean decided, which one row of 1e6 beside numbers of 1e-12 had to itself."""
    X = np.random.default_rng(0).uniform(-1, 1, (20, 2))
    tiny = np.ldexp(X, -40)
    tiny[-1] = 1e6
    ordinary = np.vstack([X[:-1], [[10.0, 10.0]]])
    np.testing.assert_allclose(
        column_spreads(tiny), np.ldexp(column_spreads(ordinary), -40), rtol=1e-6
    )


@pytest.mark.parametrize("d", [1, 6])
def test_all_estimators_of_gaussian_noise_choose_the_same_kernel(d):
    """Families, length scales and noise, of few and of many columns."""
    rng = np.random.default_rng(d)
    X = rng.normal(size=(70, d))
    y = np.sin(2 * X[:, 0]) + 0.3 * X.sum(1) + 0.1 * rng.normal(size=70)
    expected = QSGPRegressor(random_state=0).fit(X, y)
    for estimator in (DLMGPRegressor(random_state=0), SWSGPRegressor(random_state=0)):
        found = estimator.fit(X, y)
        assert repr(type(found.kernel_.k1.k2)) == repr(type(expected.kernel_.k1.k2))
        np.testing.assert_allclose(found.kernel_.theta, expected.kernel_.theta, atol=1e-3)


def test_few_observations_of_many_columns_are_predicted_without_overconfidence():
    """No worse than one length scale for all, where all columns matter alike (d = 30, n = 80)."""
    losses, covered = [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(580, 30)) * 10.0 ** (np.arange(30) % 3)
        scaled = X / X.std(0)
        y = np.sin(scaled.sum(1) / 30**0.5) + 0.2 * rng.normal(size=580)
        new = slice(80, None)
        ours = QSGPRegressor(random_state=0).fit(X[:80], y[:80])
        shared = GaussianProcessRegressor(
            1.0 * RBF() + WhiteKernel(), normalize_y=True, n_restarts_optimizer=2, random_state=0
        ).fit(scaled[:80], y[:80])
        mean, std = shared.predict(scaled[new], return_std=True)
        theirs = 0.5 * np.log(2 * np.pi * std**2) + 0.5 * ((y[new] - mean) / std) ** 2
        losses.append(-ours.log_predictive_density(X[new], y[new]).mean() - theirs.mean())
        low, high = ours.predict_interval(X[new])
        covered.append(np.mean((low < y[new]) & (y[new] < high)))
    assert np.mean(losses) < 0.05
    assert 0.88 < np.mean(covered) < 0.98


def test_exact_evidence_decides_of_hundreds_of_observations():
    """Its gradient vanishes at the kernel found."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(500, 1))
    y = np.sin(3 * X[:, 0]) + 0.3 * np.sin(9 * X[:, 0]) + 0.3 * rng.normal(size=500)
    kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
    found = QSGPRegressor(kernel, random_state=0).fit(X, y)
    data = Data(torch.tensor(X), torch.tensor((y - y.mean()) / y.std()))
    gradient = ExactEvidence(found.kernel_, data)(found.kernel_.theta).gradient
    assert np.abs(gradient).max() < 1.0  # nats for a factor of e
