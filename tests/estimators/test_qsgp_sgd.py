"""Stochastic gradients of QSGP beside the exact process; of kernels of any variance."""

import numpy as np
import pytest
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel
from sklearn.metrics import log_loss

from skgp import QSGPClassifier, QSGPRegressor
from tests.covering import slow_case


def test_sgd_of_a_series_in_order_converges():
    x = np.linspace(0, 10, 1200)[:, None]
    y = np.sin(x[:, 0]) + 0.5 * np.random.default_rng(0).standard_normal(len(x))
    kernel = 2.0 * RBF(2.0) + WhiteKernel(0.25)
    fit = QSGPRegressor(
        kernel,
        basis="fourier",
        n_basis=100,
        solver="sgd",
        optimizer=None,
        normalize_y=False,
        max_iter=100,
        random_state=0,
    ).fit(x, y)
    K = 2.0 * np.exp(-0.125 * (x - x.T) ** 2)
    exact = K @ np.linalg.solve(K + 0.25 * np.eye(len(x)), y)
    assert np.sqrt(np.mean((fit.predict(x) - exact) ** 2)) < 0.1


# ---- kernels of any variance ---------------------------------------------------------------------


STOCHASTIC = {"solver": "sgd", "basis": "inducing", "optimizer": None, "random_state": 0}


@pytest.mark.parametrize("variance", [1e5, slow_case(1e-3)])
def test_steps_of_regression_suit_any_variance(variance, rng):
    X = rng.uniform(-3, 3, (100, 1))
    f = np.sin(2 * X[:, 0])
    kernel = ConstantKernel(variance, "fixed") * RBF(0.7, "fixed") + WhiteKernel(0.01, "fixed")
    y = f + 0.1 * rng.standard_normal(100)
    exact = QSGPRegressor(kernel, optimizer=None).fit(X, y).predict(X)
    mean = QSGPRegressor(kernel, max_iter=120, **STOCHASTIC).fit(X, y).predict(X)
    assert np.sqrt(np.mean((mean - exact) ** 2)) < 0.12


@pytest.mark.parametrize("variance", [slow_case(1.0), 1e4])
def test_steps_of_classes_suit_any_variance(variance):
    X, y = make_moons(300, noise=0.25, random_state=0)
    kernel = ConstantKernel(variance, "fixed") * RBF(0.7, "fixed")
    model = QSGPClassifier(kernel, max_iter=100, **STOCHASTIC).fit(X[:100], y[:100])
    assert log_loss(y[100:], model.predict_proba(X[100:])) < 0.3


def test_steps_of_a_linear_kernel_of_large_inputs_are_finite(rng):
    X = rng.standard_normal((20, 2))
    y = X[:, 0] > 0
    model = QSGPClassifier(DotProduct() + RBF(), solver="sgd", random_state=0, max_iter=100)
    assert model.fit(1e12 * X, y).score(1e12 * X, y) == 1.0
