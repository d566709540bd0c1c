"""
A boundary of coarse and fine detail: inducing points, neighbours, and both
===========================================================================

The boundary has a wave that twenty inducing points follow, and a ripple that they cannot.
:class:`~skgp.VecchiaGPClassifier` gives every observation a value of its own, tied to inducing
points and to its neighbours; Laplace's log evidence compares the three.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import Matern

from skgp import VecchiaGPClassifier

rng = np.random.default_rng(0)
X = rng.uniform(0, 6, (2000, 2))
boundary = 3 + np.sin(X[:, 0]) + 0.3 * np.sin(9 * X[:, 0])
y = (X[:, 1] + 0.1 * rng.standard_normal(len(X)) > boundary).astype(int)
kernel = 30.0 * Matern([0.7, 1.5], nu=1.5)

models = {
    "20 inducing points": VecchiaGPClassifier(kernel, n_neighbors=0, n_inducing=20, optimizer=None),
    "20 neighbours": VecchiaGPClassifier(kernel, n_neighbors=20, n_inducing=0, optimizer=None),
    "both": VecchiaGPClassifier(kernel, n_neighbors=20, n_inducing=20, optimizer=None),
}
grid = np.stack(np.meshgrid(np.linspace(0, 6, 90), np.linspace(1, 5, 60)), -1)

figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
for ax, (name, model) in zip(axes, models.items(), strict=True):
    model.set_params(random_state=0).fit(X, y)
    proba = model.predict_proba(grid.reshape(-1, 2))[:, 1].reshape(grid.shape[:2])
    shown = ax.pcolormesh(grid[..., 0], grid[..., 1], proba, cmap="RdBu", vmin=0, vmax=1)
    ax.plot(grid[0, :, 0], 3 + np.sin(grid[0, :, 0]) + 0.3 * np.sin(9 * grid[0, :, 0]), "k", lw=0.8)
    ax.set_title(f"{name}\nlog evidence {model.log_marginal_likelihood_value_:.0f}")
figure.colorbar(shown, ax=axes, label="probability of the upper class")
plt.show()
