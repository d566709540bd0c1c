r"""
Joint predictions of several points
===================================

Predictions of a sparse-within-sparse GP are made one point at a time, each from its own
neighbours; they say nothing of two points jointly. ``predict(X, return_cov=True)`` and
``sample_y`` need more. By default two points covary as the errors of their predictions do
under the prior, plus what they share of the posterior: a covariance that is positive semi-definite
and agrees with the pointwise variances, and for two points is the same whatever
points come with them. ``joint_prediction="union"`` is that of the paper, section 4.5: all
points condition on the union of all neighbours. Both are compared with the exact Gaussian
process of the same kernel.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import SWSGPRegressor, VecchiaGPRegressor
from skgp.datasets import make_smooth

X, y = make_smooth(600, n_features=2, length_scale=0.4, noise=0.3, random_state=0)
x = np.linspace(-1.2, 1.2, 80)
line = np.column_stack([x, 0.3 * x])
kernel = 1.0 * Matern(0.5, nu=2.5) + WhiteKernel(0.09)

exact = GaussianProcessRegressor(kernel, optimizer=None).fit(X, y)
exact_mean, exact_cov = exact.predict(line, return_cov=True)


def fit(n_neighbors: int, joint_prediction: str = "local") -> SWSGPRegressor:
    """The kernel is in the units of y; by default every observation is an inducing point."""
    return SWSGPRegressor(
        kernel,
        optimizer=None,
        normalize_y=False,
        n_neighbors=n_neighbors,
        joint_prediction=joint_prediction,
        random_state=0,
    ).fit(X, y)


# %%
# Errors of mean and covariance, as root mean squares over the 80 points and all pairs of
# them, and what the mean variance of f is of that of the exact process. ``predict`` is about y: the
# noise, 0.09, is in the diagonals of both. The variational posterior has a diagonal S, whose
# entries say how well a value of u is known *given the others*: its variances and covariances of f
# are too small. A full S, of M squared numbers, has not that fault: see
# ``examples/large/plot_swsgp_regression.py``. Vecchia's approximation, from as many of the
# observations themselves, tends to the exact process as H grows.
variance = np.trace(exact_cov) / len(x) - 0.09
for H in (8, 16, 32, 64):
    vecchia = VecchiaGPRegressor(
        kernel, optimizer=None, normalize_y=False, n_neighbors=H // 2, n_inducing=0, random_state=0
    )
    models = {"local": fit(H), "union": fit(H, "union"), "Vecchia": vecchia.fit(X, y)}
    for name, model in models.items():
        mean, cov = model.predict(line, return_cov=True)
        off_mean = np.sqrt(np.mean((mean - exact_mean) ** 2))
        off_cov = np.sqrt(np.mean((cov - exact_cov) ** 2))
        ratio = (np.trace(cov) / len(x) - 0.09) / variance
        print(
            f"H = {H:2d}, {name:<7} mean {off_mean:.4f}  covariance {off_cov:.5f}  "
            f"variance of f x {ratio:.2f}"
        )

# %%
# The prediction of a point does not depend on the others under "local"; under "union" it does.
for joint in ("local", "union"):
    model = fit(16, joint)
    alone = model.predict(line[:1], return_cov=True)
    together = model.predict(line, return_cov=True)
    change = abs(alone[0][0] - together[0][0]), abs(alone[1][0, 0] - together[1][0, 0])
    print(f"{joint:<6} mean moves by {change[0]:.1e}, variance by {change[1]:.1e}")

# %%
# The covariances of f, and functions drawn from the joint distribution.
panels = {"exact": exact_cov - 0.09 * np.eye(len(line))}
for joint in ("local", "union"):
    cov = fit(16, joint).predict(line, return_cov=True)[1]
    panels[f"H = 16, {joint}"] = cov - 0.09 * np.eye(len(line))
figure, axes = plt.subplots(2, 3, figsize=(11, 6.6), layout="constrained")
rng = np.random.default_rng(0)
for (upper, lower), (name, cov) in zip(axes.T, panels.items(), strict=True):
    image = upper.imshow(cov, vmin=-0.05, vmax=0.3, extent=(x[0], x[-1], x[-1], x[0]))
    upper.set_title(name)
    values, vectors = np.linalg.eigh(cov)
    root = vectors * np.sqrt(values.clip(0))
    lower.plot(x, exact_mean[:, None] + root @ rng.normal(size=(len(x), 4)), lw=1)
    lower.set(xlabel="x", ylim=(-3, 3))
figure.colorbar(image, ax=axes[0], label="covariance of f")
plt.show()
