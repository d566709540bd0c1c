"""Observations with next to no noise: `skgp.inference.pathwise`, and who relies on it."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, WhiteKernel

from skgp import DLMGPRegressor, QSGPRegressor, SWSGPRegressor
from skgp.inference.pathwise import PivotCovariance, pivot_posterior

REGRESSORS = [DLMGPRegressor, QSGPRegressor, SWSGPRegressor]
KERNEL = 1.0 * RBF(1.0) + WhiteKernel(1e-10)
WEIGHT = 10.0 ** np.random.default_rng(0).integers(-8, 9, 20)


def _inputs_and_targets(scale):
    rng = np.random.default_rng(1)
    X = scale * rng.uniform(-2, 2, (20, 2))
    return X, np.where(rng.standard_normal(20) > 0, 1.0, -1.0)


@pytest.mark.parametrize("estimator", REGRESSORS)
def test_inputs_that_the_kernel_cannot_tell_apart_have_the_weighted_mean(estimator):
    X, y = _inputs_and_targets(1e-12)
    fit = estimator(KERNEL, optimizer=None, normalize_y=False).fit(X, y, WEIGHT)
    np.testing.assert_allclose(fit.predict(X), np.average(y, weights=WEIGHT), rtol=1e-5)
    np.testing.assert_allclose(fit.predict(X), np.array([fit.predict(x[None])[0] for x in X]))


@pytest.mark.parametrize("estimator", REGRESSORS)
def test_weights_of_sixteen_orders_leave_the_posterior_its_digits(estimator):
    X, y = _inputs_and_targets(1.0)
    rows = _inputs_and_targets(0.9)[0]
    K, k = RBF()(X), RBF()(rows, X)
    A = K + np.diag(1e-10 / WEIGHT)  # of a condition number of 1e8: nothing is lost
    fit = estimator(KERNEL, optimizer=None, normalize_y=False).fit(X, y, WEIGHT)
    mean, var = fit.latent_mean_and_variance(rows)
    np.testing.assert_allclose(mean, k @ np.linalg.solve(A, y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(var, 1 - (k * np.linalg.solve(A, k.T).T).sum(1), atol=1e-7)


def test_pivot_posterior_has_the_evidence_of_independent_noises():
    # All inputs one: f = b is a scalar, and y - b independent.
    X, y = _inputs_and_targets(1e-12)
    noise = 1e-10 / WEIGHT
    found = pivot_posterior(RBF(), *map(torch.tensor, (X, y, noise)))
    precision = 1 + (1 / noise).sum()
    mean = (y / noise).sum() / precision
    misfit = ((y - mean) ** 2 / noise).sum() + mean**2
    expected = -0.5 * (misfit + np.log(noise).sum() + np.log(precision) + 20 * np.log(2 * np.pi))
    np.testing.assert_allclose(found.evidence, expected, rtol=1e-9)
    np.testing.assert_allclose(found.mean, [mean], rtol=1e-9)
    np.testing.assert_allclose(found.root.square(), [[1 / precision]], rtol=1e-9)


def test_variance_of_a_row_does_not_depend_on_other_rows():
    # 1e8 periods away a last bit of the distance is 1e-8: that which is taken must be the same one.
    kernel, (X, rows) = ExpSineSquared(), torch.tensor(np.random.default_rng(0).random((2, 20, 1)))
    found = pivot_posterior(kernel, X, X[:, 0], torch.full((20,), 1e-3, dtype=torch.float64))
    covariance = PivotCovariance(found.factor, found.root, augment=True)
    rows += 1e8
    company = torch.cat([rows, torch.tensor([[0.0123]], dtype=torch.float64)])
    together = covariance.variance(kernel, company, found.Z)[:20]
    alone = covariance.variance(kernel, rows, found.Z)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-13)
