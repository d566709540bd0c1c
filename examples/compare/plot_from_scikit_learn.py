r"""
One import, and beyond a few thousand observations
==================================================

``skgp.GaussianProcessRegressor`` takes the place of scikit-learn's. On a hundred observations both
find the same hyper-parameters and predict the same. On a hundred thousand of the same function, for
which the matrices of an exact fit would take 560 GB, the same call goes on by another method and
says which. Of these the picture shows one in fifty.
"""

import matplotlib.pyplot as plt
import numpy as np
import sklearn.gaussian_process
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

import skgp

kernel = 1.0 * Matern(nu=1.5) + WhiteKernel(0.1)
x = np.linspace(0, 10, 400)[:, None]


def observations(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Times (n, 1) and noisy values (n,)."""
    rng = np.random.default_rng(0)
    times = rng.uniform(0, 10, (n, 1))
    return times, np.sin(times[:, 0] ** 1.5) + 0.3 * rng.standard_normal(n)


X, y = observations(100)
theirs = sklearn.gaussian_process.GaussianProcessRegressor(kernel).fit(X, y)
ours = skgp.GaussianProcessRegressor(kernel).fit(X, y)
print("scikit-learn:", theirs.kernel_, theirs.log_marginal_likelihood_value_)
print("skgp:        ", ours.kernel_, ours.log_marginal_likelihood_value_)
print("largest difference of the means:", abs(theirs.predict(x) - ours.predict(x)).max())

X_many, y_many = observations(100_000)
many = skgp.GaussianProcessRegressor(kernel).fit(X_many, y_many)
print(many.method_, "--", many.reason_)

figure, axes = plt.subplots(2, 1, figsize=(7, 5), sharex=True, sharey=True, layout="constrained")
for axis, model, shown, title in (
    (axes[0], ours, (X, y), "100 observations: exact"),
    (axes[1], many, (X_many[::50], y_many[::50]), f"100 000 observations: {many.method_}"),
):
    mean, var = model.latent_mean_and_variance(x)
    axis.plot(shown[0][:, 0], shown[1], ".", color="0.5", ms=3, alpha=0.6, label="observations")
    axis.fill_between(x[:, 0], mean - 2 * var**0.5, mean + 2 * var**0.5, alpha=0.3, lw=0)
    axis.plot(x[:, 0], mean, color="C0", label="mean of f, and two standard deviations")
    axis.plot(x[:, 0], np.sin(x[:, 0] ** 1.5), "k:", lw=1, label="f")
    axis.set_title(title, fontsize="medium")
    axis.set(ylim=(-2, 2), ylabel="y")
axes[0].legend(fontsize="small", ncols=3, loc="lower left")
axes[1].set_xlabel("x")
plt.show()
