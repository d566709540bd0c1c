"""
Probability, latent variance and decision regions
=================================================

:class:`~skgp.QSGPClassifier` on two data sets of two columns: the probability that it predicts, the
variance of the latent function behind it, and what it makes of several classes.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from sklearn.datasets import make_moons

from skgp import QSGPClassifier
from skgp.likelihoods import Bernoulli

X, y = make_moons(300, noise=0.25, random_state=0)
X_test, y_test = make_moons(5000, noise=0.25, random_state=1)
side = 80


def grid(X: np.ndarray, margin: float) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """Points of a square grid around the rows, and its extent for ``imshow``."""
    low, high = X.min(0) - margin, X.max(0) + margin
    axes = [np.linspace(low[j], high[j], side) for j in range(2)]
    points = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    return points, (low[0], high[0], low[1], high[1])


# %%
# Up to 2000 observations the model is the Laplace approximation of the full Gaussian process: one
# basis function per observation.
model = QSGPClassifier(random_state=0).fit(X, y)
print(f"{model.kernel_}; {model.n_basis_} basis functions, {model.covariance_} covariance")
points, extent = grid(X, margin=1.5)
mean, var = model.latent_mean_and_variance(points)

# %%
# A probability can be taken at the mean of the latent function, :math:`g(m)`, or averaged over its
# posterior, :math:`\int g(f) N(f; m, v) \, df` ("moderated"), which draws it towards one half where
# the variance is large. Both find the same class likelier. Laplace's approximation overstates the
# variance where f is large, so ``predict_proba`` averages over :math:`N(m, \kappa v)` with
# :math:`\kappa` in ``moderation_``: chosen on held-out observations, or small where there are few.
likelihood = Bernoulli("logit")
at_mean, averaged = (
    likelihood.prob(torch.tensor(mean), torch.tensor(factor * var)).numpy() for factor in (0, 1)
)
figure, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
panels = [
    (f"predict_proba: factor {model.moderation_:.3g}", model.predict_proba(points)[:, 1]),
    ("at the mean of f: factor 0", at_mean),
    ("over the whole posterior of f: factor 1", averaged),
    ("posterior variance of f", var),
]
for axis, (title, values) in zip(axes.flat, panels, strict=True):
    variance = values is var
    image = axis.imshow(
        values.reshape(side, side),
        extent=extent,
        origin="lower",
        aspect="auto",
        cmap="viridis" if variance else "RdBu_r",
        vmin=0,
        vmax=None if variance else 1,
    )
    figure.colorbar(image, ax=axis)
    axis.contour(mean.reshape(side, side), [0], extent=extent, colors="black", linewidths=1)
    axis.scatter(*X.T, c=y, cmap="RdBu_r", s=8, edgecolors="white", linewidths=0.3)
    axis.set_title(title)

# %%
# On observations that it has not seen:
density = model.log_predictive_density(X_test, y_test).mean()
print(f"accuracy {model.score(X_test, y_test):.3f}, mean log-probability {density:.4f} nats")

# %%
# Several classes: each is set against all others, over the same basis functions, and the
# probabilities are divided by their sum. Three arms of a spiral:
rng = np.random.default_rng(0)
labels = np.repeat(["first", "second", "third"], 120)
radius = rng.uniform(0.3, 3, len(labels))
angle = 1.2 * radius + 2 * np.pi / 3 * np.repeat([0, 1, 2], 120)
arms = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
arms += 0.15 * rng.normal(size=arms.shape)

model = QSGPClassifier(random_state=0).fit(arms, labels)
points, extent = grid(arms, margin=1.0)
proba = model.predict_proba(points)
winner = proba.argmax(1).reshape(side, side)
colours = ListedColormap(["#4477aa", "#ee6677", "#228833"])

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
# Strong where the model is sure, pale where it is not.
left.imshow(
    winner,
    extent=extent,
    origin="lower",
    aspect="auto",
    cmap=colours,
    interpolation="nearest",
    alpha=np.clip(1.5 * proba.max(1).reshape(side, side) - 0.5, 0, 1),
)
left.set_title("likeliest class, the paler the less likely")
log_proba = model.predict_log_proba(points)
entropy = -(proba * log_proba).sum(1).reshape(side, side)
image = right.imshow(entropy, extent=extent, origin="lower", aspect="auto", cmap="magma", vmin=0)
figure.colorbar(image, ax=right)
right.set_title("entropy of the prediction, nats")
for axis in (left, right):
    codes = np.searchsorted(model.classes_, labels)
    axis.scatter(*arms.T, c=codes, cmap=colours, s=10, edgecolors="white", linewidths=0.4)
plt.show()
