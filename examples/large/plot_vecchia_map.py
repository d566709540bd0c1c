r"""
A map with gaps and its uncertainty
===================================

Measurements at ten thousand places, none of them under clouds. Vecchia's approximation has a joint
likelihood, from which ``VecchiaGPRegressor`` learns ranges that reach across the gaps, and it
predicts any places jointly: a mean, its uncertainty, and draws of the whole map.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import VecchiaGPRegressor

rng = np.random.default_rng(0)
waves = rng.normal(0, 9, (300, 2)) / rng.gamma(2, 0.5, (300, 1)), rng.uniform(0, 2 * np.pi, 300)


def f(X):
    """Waves of many lengths, of random directions: f (n,) at places X (n, 2)."""
    size = 1 / (1 + (waves[0] ** 2).sum(1) / 40)
    return np.cos(X @ waves[0].T + waves[1]) @ size / np.sqrt((size**2).sum() / 2)


X = rng.uniform(0, 1, (14_000, 2))
clouds = [(0.3, 0.35, 0.13), (0.7, 0.6, 0.17), (0.25, 0.8, 0.08)]
clear = np.all([((X - c[:2]) ** 2).sum(1) > c[2] ** 2 for c in clouds], axis=0)
X = X[clear][:10_000]
y = f(X) + 0.1 * rng.standard_normal(len(X))

kernel = 1.0 * Matern([0.1, 0.1], nu=1.5) + WhiteKernel(0.01)
model = VecchiaGPRegressor(kernel, random_state=0).fit(X, y)
print(model.kernel_)

# %%
# The map
# -------
#
# The standard deviation grows into the gaps, up to that of the process far from any data.

side = np.linspace(0, 1, 60)
grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
mean, var = model.latent_mean_and_variance(grid)
some = grid.reshape(60, 60, 2)[::3, ::3].reshape(-1, 2)
draw = model.sample_f(some, random_state=0)[:, 0]

figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
panels = {
    "f": f(grid),
    "mean": mean,
    "standard deviation": np.sqrt(var),
    "a draw": draw,
}
for axis, (title, values) in zip(axes, panels.items(), strict=True):
    size = int(np.sqrt(len(values)))
    limits = {} if title == "standard deviation" else {"vmin": -3, "vmax": 3}
    image = axis.imshow(values.reshape(size, size), origin="lower", extent=(0, 1, 0, 1), **limits)
    axis.set(title=title, xticks=[], yticks=[])
    for x1, x2, radius in clouds:
        axis.add_patch(plt.Circle((x1, x2), radius, fill=False, color="w", lw=0.8))
    if title in ("standard deviation", "a draw"):
        figure.colorbar(image, ax=axis, shrink=0.7)  # one for f, the mean and the draw

# %%
# Under the clouds, where nothing was measured, f is missed by several times as much, and the
# intervals are wider: those of 95% hold some nine in ten values of f there.

hidden = np.any([((grid - c[:2]) ** 2).sum(1) < c[2] ** 2 for c in clouds], axis=0)
z = (f(grid) - mean) / np.sqrt(var)
for name, places in (("clear", ~hidden), ("clouds", hidden)):
    error = np.sqrt(np.mean((f(grid) - mean)[places] ** 2))
    print(f"{name}: RMSE of f {error:.3f}, in 95% intervals {np.mean(abs(z[places]) < 1.96):.1%}")

# %%
# Neighbours and inducing points
# ------------------------------
#
# The likelihood compares approximations, too: with the same kernel, the greater one is nearer to
# that of the exact process.

for n_neighbors, n_inducing in ((5, 0), (10, 0), (20, 0), (40, 0), (20, 100)):
    fit = VecchiaGPRegressor(
        model.kernel_,
        n_neighbors=n_neighbors,
        n_inducing=n_inducing,
        optimizer=None,
        random_state=0,
    ).fit(X, y)
    print(f"H = {n_neighbors}, m = {n_inducing}: {fit.log_marginal_likelihood_value_:.1f} nats")
plt.show()
