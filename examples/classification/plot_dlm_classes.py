"""
A boundary that few inducing points can barely follow
=====================================================

A chess board on the left that thirty inducing points can barely follow, and a simple border on the
right. :class:`~skgp.DLMGPClassifier`, which averages probabilities over the latent function before
it takes their logarithm, against the evidence lower bound (ELBO), which
takes logarithms first.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.calibration import CalibrationDisplay
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF

from skgp import DLMGPClassifier
from skgp.displays import expected_calibration_error


def draw_rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniform points; two of a hundred labels are wrong."""
    rng = np.random.default_rng(seed)
    X = rng.uniform([0, 0], [4, 2], (n, 2))
    board = np.floor(X / 0.5).sum(1) % 2
    border = X[:, 1] > 1 + 0.4 * np.sin(3 * X[:, 0])
    label = np.where(X[:, 0] < 2, board, border).astype(int)
    return X, label ^ (rng.uniform(size=n) < 0.02)


def fit(objective: str, n_inducing: int) -> DLMGPClassifier:
    """One fit; the same kernel and seed whatever the objective."""
    model = DLMGPClassifier(
        1.0 * RBF(1.0), objective=objective, n_inducing=n_inducing, random_state=0
    )
    return model.fit(X, y)


X, y = draw_rows(600, seed=0)
X_test, y_test = draw_rows(5000, seed=1)
titles = {"elbo": "ELBO", "log_loss": "log-loss"}
sizes = (30, 60)
models = {(objective, m): fit(objective, m) for objective in titles for m in sizes}

# %%
# Variance that the inducing points leave unexplained counts against the ELBO at every observation,
# so that it settles for a small amplitude and long length scales. The log-loss can afford a large
# variance: it makes probabilities vague where no inducing point (white) is near, and lets the
# others be sure.
side = 90
axes_of_grid = np.linspace(0, 4, 2 * side), np.linspace(0, 2, side)
points = np.stack(np.meshgrid(*axes_of_grid), axis=-1).reshape(-1, 2)
figure, axes = plt.subplots(3, 1, figsize=(6.5, 8.5), layout="constrained")
style = {"extent": (0, 4, 0, 2), "origin": "lower", "aspect": "auto", "vmin": 0, "vmax": 1}
axes[0].scatter(*X.T, c=y, cmap="RdBu_r", s=8)
axes[0].set(xlim=(0, 4), ylim=(0, 2), title="training points")
for axis, (objective, title) in zip(axes[1:], titles.items(), strict=True):
    model = models[objective, 30]
    proba = model.predict_proba(points)[:, 1].reshape(side, 2 * side)
    image = axis.imshow(proba, cmap="RdBu_r", **style)
    axis.scatter(*model.inducing_points_.T, c="white", edgecolors="black", s=25)
    axis.set(xlim=(0, 4), ylim=(0, 2), title=f"{title}: {model.kernel_}")
figure.colorbar(image, ax=axes[1:], label="probability of class 1")

# %%
# Log-loss, which is what ``objective="log_loss"`` is after, and calibration on held-out
# observations. With sixty points, which follow the board, the ELBO is ahead.
print(f"{'':<18}{'accuracy':>9}{'log-loss':>10}{'ECE':>8}")
for (objective, n_inducing), model in models.items():
    loss = -model.log_predictive_density(X_test, y_test).mean()
    ece = expected_calibration_error(y_test, model.predict_proba(X_test)[:, 1])
    scores = f"{model.score(X_test, y_test):9.3f}{loss:10.3f}{ece:8.3f}"
    print(f"{objective:<9} M = {n_inducing:<5}{scores}")

figure, axis = plt.subplots(figsize=(5, 4.5), layout="constrained")
for objective, title in titles.items():
    CalibrationDisplay.from_estimator(
        models[objective, 30], X_test, y_test, n_bins=10, name=title, ax=axis
    )
axis.set(title="reliability with 30 inducing points")

# %%
# Where the inducing points suffice the log-loss of probabilities has nothing to gain, either: two
# moons, twenty points.
X, y = make_moons(500, noise=0.3, random_state=0)
X_moons, y_moons = make_moons(5000, noise=0.3, random_state=1)
for objective in titles:
    loss = -fit(objective, 20).log_predictive_density(X_moons, y_moons).mean()
    print(f"moons, {objective:<9} log-loss {loss:.3f}")
plt.show()
