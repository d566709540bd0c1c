"""
A hundred thousand observations
===============================

Temperatures at a hundred thousand places of a map, with fine detail: the kernel matrix of an exact
Gaussian process would take 80 GB. ``GaussianProcessRegressor`` takes another method and says why.
What is lost by taking a part of the data instead, 2000 of them exactly, is seen beside.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import GaussianProcessRegressor

rng = np.random.default_rng(0)
waves = rng.normal(0, 40, (200, 2)), rng.uniform(0, 2 * np.pi, 200)


def f(X):
    """Two hundred waves of random directions: f (n,) at places X (n, 2)."""
    return np.cos(X @ waves[0].T + waves[1]).sum(1) / 10


X = rng.uniform(0, 1, (100_000, 2))
y = f(X) + 0.3 * rng.standard_normal(len(X))
side = np.linspace(0, 1, 100)
grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)

kernel = 1.0 * Matern(0.05, nu=2.5) + WhiteKernel(0.1)
figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
axes[0].imshow(f(grid).reshape(100, 100), origin="lower", vmin=-2.5, vmax=2.5)
axes[0].set_title("f", fontsize="medium")
for axis, n in ((axes[1], 100_000), (axes[2], 2000)):
    model = GaussianProcessRegressor(kernel, random_state=0)
    start = time.perf_counter()
    model.fit(X[:n], y[:n])
    fitted = time.perf_counter()
    mean, std = model.predict(grid, return_std=True)
    predicted = time.perf_counter()
    error = np.sqrt(np.mean((mean - f(grid)) ** 2))
    image = axis.imshow(mean.reshape(100, 100), origin="lower", vmin=-2.5, vmax=2.5)
    axis.set_title(f"{n} observations, {model.method_}: RMSE of f {error:.2f}", fontsize="medium")
    print(
        f"n = {n}, {model.method_}: RMSE of f {error:.3f}, fit {fitted - start:.0f} s, 10000 "
        f"predictions {predicted - fitted:.1f} s, {model.kernel_}"
    )
    print("   ", model.reason_)
for axis in axes:
    axis.set(xticks=[], yticks=[])
figure.colorbar(image, ax=axes, shrink=0.7, label="temperature")
plt.show()
