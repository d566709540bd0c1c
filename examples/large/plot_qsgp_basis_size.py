"""
How many random Fourier features?
=================================

``basis="fourier"`` replaces the kernel by ``n_basis`` random cosines and sines. The more of them,
the nearer the model is to the exact Gaussian process, and the longer a fit takes: with
``solver="cholesky"`` :math:`O(n m^2 + m^3)` time and :math:`O(m^2)` memory, whatever the number of
observations.

The data are one draw of a Gaussian process whose kernel is known, so that nothing but the number of
features differs between the fits.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor
from skgp.datasets import make_smooth

n_train = 1000
X, y = make_smooth(2 * n_train, n_features=2, length_scale=0.3, noise=0.1, random_state=0)
X_train, X_test, y_train, y_test = X[:n_train], X[n_train:], y[:n_train], y[n_train:]
kernel = 1.0 * RBF(0.3) + WhiteKernel(0.01)


# %%
# Root-mean-square error, and the mean negative log-density (nats per observation) of held-out
# observations.
def scores(mean: np.ndarray, std: np.ndarray) -> tuple[float, float]:
    """RMSE, and MNLP under independent normal laws."""
    z = (y_test - mean) / std
    mnlp = np.mean(0.5 * np.log(2 * np.pi * std**2) + 0.5 * z**2)
    return np.sqrt(np.mean((y_test - mean) ** 2)), mnlp


exact = GaussianProcessRegressor(kernel, optimizer=None).fit(X_train, y_train)
exact_rmse, exact_mnlp = scores(*exact.predict(X_test, return_std=True))

sizes = [16, 32, 64, 128, 256, 512, 1024]
rows = []
for n_basis in sizes:
    model = QSGPRegressor(
        kernel,
        basis="fourier",
        n_basis=n_basis,
        solver="cholesky",
        optimizer=None,
        normalize_y=False,
        random_state=0,
    )
    start = time.perf_counter()
    model.fit(X_train, y_train)
    seconds = time.perf_counter() - start
    rows.append((*scores(*model.predict(X_test, return_std=True)), seconds))

# %%
# Once the features resolve the kernel, more of them buy little.
names = ["RMSE", "MNLP, nats per observation", "seconds to fit"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
for axis, name, values in zip(axes, names, zip(*rows, strict=True), strict=True):
    axis.plot(sizes, values, "o-", label="QSGP")
    axis.set(xscale="log", xlabel="n_basis", title=name)
for axis, value in zip(axes, (exact_rmse, exact_mnlp), strict=False):
    axis.axhline(value, color="black", lw=1, label="exact GP")
axes[0].set_yscale("log")
axes[0].legend()
plt.show()
