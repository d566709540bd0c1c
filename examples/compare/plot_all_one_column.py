"""
All regressors on one column
============================

Two hundred noisy values of a smooth function with a gap, fitted by every regressor of skgp. With so
few all of them are exact, but for the hyper-parameters: those of the greatest marginal likelihood,
and of BayesianGPRegressor an average over what they may be.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(0, 4, 120), rng.uniform(6, 10, 80)])[:, None]


def f(x):
    return np.sin(x) + 0.5 * np.sin(3 * x)


y = f(x[:, 0]) + 0.2 * rng.standard_normal(len(x))
grid = np.linspace(-1, 11, 400)[:, None]
inside = (grid[:, 0] > 0) & (grid[:, 0] < 10)

models = {
    "GaussianProcessRegressor": skgp.GaussianProcessRegressor(1.0 * RBF() + WhiteKernel(0.1)),
    "QSGPRegressor": skgp.QSGPRegressor(random_state=0),
    "DLMGPRegressor": skgp.DLMGPRegressor(random_state=0),
    "SWSGPRegressor": skgp.SWSGPRegressor(random_state=0),
    "VecchiaGPRegressor": skgp.VecchiaGPRegressor(random_state=0),
    "StateSpaceGPRegressor": skgp.StateSpaceGPRegressor(),
    "BayesianGPRegressor": skgp.BayesianGPRegressor(1.0 * RBF() + WhiteKernel(0.1), random_state=0),
}

figure, axes = plt.subplots(4, 2, figsize=(9, 10), sharex=True, sharey=True, layout="constrained")
for axis, (name, model) in zip(axes.ravel(), models.items(), strict=False):
    start = time.perf_counter()
    model.fit(x, y)
    seconds = time.perf_counter() - start
    mean, var = model.latent_mean_and_variance(grid)
    error = np.sqrt(np.mean((mean - f(grid[:, 0]))[inside] ** 2))
    axis.fill_between(grid[:, 0], mean - 2 * var**0.5, mean + 2 * var**0.5, alpha=0.3, lw=0)
    axis.plot(grid, mean, label="mean of f, and two standard deviations")
    axis.plot(grid, f(grid), "k:", lw=1, label="f")
    axis.plot(x, y, ".", color="0.5", ms=2)
    axis.set_title(name, fontsize="medium")
    print(f"{name:<26} RMSE of f {error:.3f}, {seconds:.2f} s, {model.kernel_}")
axes[0, 0].set_ylim(-3, 3)
figure.supxlabel("x"), figure.supylabel("y")
axes[-1, -1].axis("off")
axes[-1, -1].legend(*axes[0, 0].get_legend_handles_labels(), loc="center")
plt.show()
