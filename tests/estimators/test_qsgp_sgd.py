"""Stochastic gradients of `QSGPRegressor` beside the exact process."""

import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor


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
