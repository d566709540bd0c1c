"""
Many inducing points, of which a prediction uses few
====================================================

A sparse Gaussian process keeps what it has learned in the values u at M inducing points, and every
prediction uses all of them. In :class:`~skgp.SWSGPRegressor` a prediction uses the H that are
nearest. With H = M the two are the same ("SVGP"). Here are M = 128 points on a line with
H = 128 and H = 16, for one kernel and one noise variance, as in figure 2 of the paper.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import SWSGPRegressor
from skgp.datasets import make_smooth

X, y = make_smooth(3000, n_features=1, length_scale=0.1, noise=0.3, random_state=0)
X_test, y_test = X[500:], y[500:]
X, y = X[:500], y[:500]
kept = (X[:, 0] < 0.3) | (X[:, 0] > 0.45)  # no rows in between
X, y = X[kept], y[kept]
x_grid = np.linspace(-1.1, 1.1, 600)

# %%
# The kernel is learned once, from observations given their neighbours, before there is any
# posterior.
searched = SWSGPRegressor(1.0 * Matern(1.0, nu=2.5) + WhiteKernel(0.1), random_state=0).fit(X, y)
print(searched.kernel_)

# %%
# Four posteriors for it. With H = M and a full covariance S of u it is that of SVGP, in closed
# form. The default for H < M is a diagonal S, in closed form as well; a full one takes Algorithm 1,
# steps of Adam. The paper gives the divergence a weight of 1 where skgp has M / H = 8.
options = {
    "H = M = 128, full S (SVGP)": {"n_neighbors": 128, "covariance": "full"},
    "H = 16, full S": {"n_neighbors": 16, "covariance": "full", "max_iter": 100},
    "H = 16, diagonal S": {"n_neighbors": 16},
    "H = 16, diagonal S, KL weight 1": {"n_neighbors": 16, "kl_weight": 1.0},
}
models = {}
for name, chosen in options.items():
    start = time.perf_counter()
    models[name] = SWSGPRegressor(
        searched.kernel_, optimizer=None, n_inducing=128, random_state=0, **chosen
    ).fit(X, y)
    seconds = time.perf_counter() - start
    mean, var = models[name].latent_mean_and_variance(X_test)
    error = np.sqrt(np.mean((mean - y_test) ** 2))
    density = models[name].log_predictive_density(X_test, y_test).mean()
    print(
        f"{name:<32} {seconds:5.2f} s  RMSE {error:.4f}  {-density:.4f} nats per observation  "
        f"std of f {np.sqrt(np.median(var)):.3f}"
    )

# %%
# Means are alike; under the weight of the paper they follow the noise further. Bands of f are
# narrower where S is diagonal: its entries say how well each value of u is known given the others,
# which among neighbours is better than how well it is known. In intervals for y, which are mostly
# noise here, that hardly shows. Away from the observations all bands widen to those of the prior.
figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True, sharey=True, layout="constrained")
for axis, (name, model) in zip(axes.flat, models.items(), strict=True):
    mean, var = model.latent_mean_and_variance(x_grid[:, None])
    band = 1.96 * np.sqrt(var)
    axis.plot(X[:, 0], y, ".", color="0.7", ms=3)
    axis.fill_between(x_grid, mean - band, mean + band, alpha=0.4, label="95% of f")
    axis.plot(x_grid, mean, lw=1, label="mean of f")
    points = model.inducing_points_[:, 0]
    axis.plot(points, np.full_like(points, -3.3), "|", color="C3", ms=6, label="inducing points")
    axis.set(title=name, xlabel="x", ylabel="y")
    axis.label_outer()
axes[0, 0].legend(loc="upper right", fontsize=8)
plt.show()
