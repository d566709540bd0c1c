"""A warm start goes on from the last fit of the same model, and begins anew elsewhere."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from tests.contracts.catalogue import CHEAP, cheap, rows

pytestmark = pytest.mark.filterwarnings("ignore")
all_estimators = pytest.mark.parametrize(
    "make", [c for c in CHEAP if "warm_start" in c().get_params()], ids=lambda c: c.__name__
)
optimizers = pytest.mark.parametrize("optimizer", ["auto", None])


def one_kernel(make, length_scale):
    """A kernel that the estimator takes; state-space kernels have no length scale near 0."""
    noise = WhiteKernel(0.05) if hasattr(make, "predict_interval") else None
    kernel = 2.0 * RBF(length_scale, (1e-3, 1e3))
    return kernel if noise is None else kernel + noise


def assert_same(first, second, X):
    np.testing.assert_allclose(first.kernel_.theta, second.kernel_.theta, rtol=1e-6, atol=1e-8)
    found, expected = (e.latent_mean_and_variance(X) for e in (first, second))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@all_estimators
@optimizers
def test_warm_start_takes_a_changed_kernel(make, optimizer):
    X, y = rows(make)
    # Equal to three digits, as they print.
    kernels = one_kernel(make, 1.0), one_kernel(make, 1.0004 if optimizer is None else 0.5)
    warm = cheap(make, kernel=kernels[0], optimizer=optimizer, warm_start=True).fit(X, y)
    warm.set_params(kernel=kernels[1]).fit(X, y)
    assert_same(warm, cheap(make, kernel=kernels[1], optimizer=optimizer).fit(X, y), X)


@all_estimators
def test_warm_start_takes_another_number_of_columns(make):
    X, y = rows(make)
    warm = cheap(make, warm_start=True).fit(X, y)
    X = np.hstack([X, X[::-1] ** 2])
    assert_same(warm.fit(X, y), cheap(make).fit(X, y), X)


@all_estimators
def test_warm_start_takes_other_classes(make):
    X, y = rows(make)
    if hasattr(make, "predict_interval"):
        pytest.skip("a regressor has none")
    options = {"kernel": one_kernel(make, 1.0), "optimizer": None}
    warm = cheap(make, warm_start=True, **options).fit(X, y)
    y = np.where(X[:, 0] > 3, "c", y)
    cold = cheap(make, **options).fit(X, y)
    np.testing.assert_allclose(
        warm.fit(X, y).predict_proba(X), cold.predict_proba(X), rtol=1e-5, atol=1e-7
    )


@all_estimators
def test_warm_start_without_optimizer_keeps_what_was_learned(make):
    X, y = rows(make)
    kernel = one_kernel(make, 0.7)
    warm = cheap(make, kernel=kernel, warm_start=True).fit(X, y)
    theta = warm.kernel_.theta
    assert abs(theta - kernel.theta).max() > 0.01
    warm.set_params(optimizer=None).fit(X, y)
    np.testing.assert_allclose(warm.kernel_.theta, theta, rtol=1e-8, atol=1e-8)
    warm.set_params(warm_start=False).fit(X, y)
    np.testing.assert_allclose(warm.kernel_.theta, kernel.theta, rtol=1e-8, atol=1e-8)
