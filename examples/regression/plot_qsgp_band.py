"""
Error bars where there are no data
==================================

Twenty noisy values of the sinc function, an exact Gaussian process, and
:class:`~skgp.QSGPRegressor` in the inducing basis with one basis function a training point. This is
figure 2 of Evans and Nair, "Quadruply stochastic Gaussian processes", 2020.

All means are equal. Every basis function of ``basis="inducing"`` vanishes far from the data, and
so, without ``augment``, does the variance, whatever the covariance of the weights. Augmentation
adds a basis function at each test point, and the variance returns to that of the prior: by
proposition 4 of the paper for a diagonal covariance, and exactly for a full one.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor
from skgp.datasets import make_sinc

X, y = make_sinc(n_samples=20, noise=0.1, random_state=0)
X_grid = np.linspace(-20, 20, 400)[:, None]

# %%
# The exact process sets the hyper-parameters; the others keep them (``optimizer=None``).
#
# ``latent_mean_and_variance`` describes f; scikit-learn's ``predict`` describes y, so the noise is
# taken off its variance.
exact = GaussianProcessRegressor(1.0 * RBF(2.0) + WhiteKernel(0.01), random_state=0).fit(X, y)
kernel = exact.kernel_
noise = kernel.k2.noise_level
mean, std = exact.predict(X_grid, return_std=True)
exact_std = np.sqrt(std**2 - noise)


# %%
# A mean-field (diagonal) and a full covariance of the weights, each with and without augmentation.
def latent_band(covariance: str, augment: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of f on the grid."""
    model = QSGPRegressor(
        kernel,
        basis="inducing",
        covariance=covariance,
        augment=augment,
        optimizer=None,
        normalize_y=False,
        random_state=0,
    )
    mean, var = model.fit(X, y).latent_mean_and_variance(X_grid)
    return mean, np.sqrt(var)


figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for axis, covariance in zip(axes, ("diagonal", "full"), strict=True):
    axis.fill_between(
        X_grid[:, 0], mean - exact_std, mean + exact_std, alpha=0.25, label="exact GP"
    )
    axis.plot(X_grid, mean, color="C0")
    for augment, style in ((False, "--"), (True, "-")):
        qsgp_mean, qsgp_std = latent_band(covariance, augment)
        label = "QSGP, augmented" if augment else "QSGP, not augmented"
        axis.plot(X_grid, qsgp_mean + qsgp_std, style, color="C3", lw=1, label=label)
        axis.plot(X_grid, qsgp_mean - qsgp_std, style, color="C3", lw=1)
    axis.plot(X, y, "k.", ms=5)
    axis.set(title=f"{covariance} covariance", xlabel="x")
axes[0].set_ylabel("mean of f, one standard deviation about it")
axes[0].legend(loc="upper left")
plt.show()
