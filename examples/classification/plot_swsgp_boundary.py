"""
A decision boundary, and the neighbours of one point
====================================================

:class:`~skgp.SWSGPClassifier` on two crescents. Each observation, in training and in prediction,
sees nothing of the posterior but the H inducing points nearest to it, in the metric of the kernel.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_moons

from skgp import SWSGPClassifier
from skgp.inference.neighbors.search import NeighborSearch

X, y = make_moons(600, noise=0.25, random_state=0)
X_test, y_test = make_moons(5000, noise=0.25, random_state=1)

# The first learns the kernel, and the others take it over.
first = SWSGPClassifier(n_inducing=60, n_neighbors=8, random_state=0).fit(X, y)
fixed = {"kernel": first.kernel_, "optimizer": None, "random_state": 0}
models = {
    "M = 60, H = 60": SWSGPClassifier(n_inducing=60, n_neighbors=60, **fixed).fit(X, y),
    "M = 60, H = 8": first,
    "M = 600, H = 32": SWSGPClassifier(n_neighbors=32, **fixed).fit(X, y),
}
for name, model in models.items():
    density = model.log_predictive_density(X_test, y_test).mean()
    print(f"{name:<22} accuracy {model.score(X_test, y_test):.3f}, {-density:.4f} nats per label")

# %%
# Where the neighbours of two observations differ, so do their conditionals: f is continuous, and
# steep if H is small. Of the third each observation is an inducing point.
side = 120
low, high = X.min(0) - 0.5, X.max(0) + 0.5
grid = np.stack(np.meshgrid(*(np.linspace(low[j], high[j], side) for j in range(2))), axis=-1)
extent = (low[0], high[0], low[1], high[1])
row = np.array([[0.6, 0.2]])

figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), sharey=True, layout="constrained")
for axis, (name, model) in zip(axes, models.items(), strict=True):
    proba = model.predict_proba(grid.reshape(-1, 2))[:, 1].reshape(side, side)
    image = axis.imshow(
        proba, extent=extent, origin="lower", aspect="auto", cmap="RdBu_r", vmin=0, vmax=1
    )
    axis.contour(proba, [0.5], extent=extent, colors="black", linewidths=1)
    axis.scatter(*X.T, c=y, cmap="RdBu_r", s=5, edgecolors="white", linewidths=0.2)
    Z = model.inducing_points_
    if len(Z) < len(X):
        axis.plot(*Z.T, "o", ms=4, mfc="none", mec="black", mew=0.7)
    # What the model itself searches: nearest under the kernel that was learned.
    active = NeighborSearch(model.kernel_, torch.from_numpy(Z)).query(
        torch.from_numpy(row), model.n_neighbors_
    )
    for z in Z[active[0].numpy()]:
        axis.plot(*np.stack([row[0], z]).T, color="gold", lw=0.8)
    axis.plot(*row.T, "*", ms=11, color="gold", mec="black", mew=0.6)
    axis.set_title(name)
figure.colorbar(image, ax=axes, label="probability of class 1")
plt.show()
