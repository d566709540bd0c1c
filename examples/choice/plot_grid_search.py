"""
Searching M, H, beta and the kernel
===================================

Options are parameters of the estimator, and those of the kernel are reached by ``kernel__``:
``GridSearchCV`` sets them, and the log predictive density of held-out observations judges them. It
sees the standard deviations, which R2 does not.
"""

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel
from sklearn.model_selection import GridSearchCV

from skgp import DLMGPRegressor, QSGPRegressor, SWSGPRegressor
from skgp.datasets import make_smooth
from skgp.estimators import log_predictive_density_scorer

X, y = make_smooth(600, 2, length_scale=0.4, noise=0.2, random_state=0)


def search(model, grid):
    """The search, and its table: parameters, mean and standard error of the score."""
    found = GridSearchCV(model, grid, scoring=log_predictive_density_scorer, cv=3).fit(X, y)
    results = pd.DataFrame(found.cv_results_)
    table = pd.DataFrame(results["params"].tolist())
    table["nats"], table["error"] = results["mean_test_score"], results["std_test_score"] / 3**0.5
    return found, table


# %%
# The kernel: its family, and a hyper-parameter within it. ``optimizer=None`` keeps what is given.
kernel = 1.0 * RBF(0.4) + WhiteKernel(0.05)
family, families = search(
    QSGPRegressor(),
    {"kernel": [1.0 * Matern(0.4, nu=nu) + WhiteKernel(0.05) for nu in (0.5, 1.5)] + [kernel]},
)
scale, scales = search(
    QSGPRegressor(kernel, optimizer=None),
    {"kernel__k1__k2__length_scale": [0.1, 0.2, 0.4, 0.8, 1.6]},
)
print(families, scale.best_params_, sep="\n")

# %%
# M inducing points, of which each prediction uses H; the hyper-parameters are those found above.
known = family.best_estimator_.kernel_
inducing, sizes = search(
    SWSGPRegressor(known, optimizer=None, random_state=0),
    {"n_inducing": [50, 100, 200, 400], "n_neighbors": [4, 8, 16, 32]},
)
print(inducing.best_params_)

# %%
# The weight beta of the divergence from the prior, of a sparse process with few inducing points.
weight, weights = search(
    DLMGPRegressor(known, n_inducing=30, hyperparameters="fixed", max_iter=30, random_state=0),
    {"beta": [0.03, 0.1, 0.3, 1.0, 3.0]},
)
print(weight.best_params_)

# %%
# Standard errors of the three folds tell which differences are none.
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
for axis, table, name in (
    (axes[0], scales, "kernel__k1__k2__length_scale"),
    (axes[2], weights, "beta"),
):
    axis.errorbar(table[name], table["nats"], table["error"], fmt="o-", capsize=3)
    axis.set(xscale="log", xlabel=name.rpartition("__")[2], ylabel="log density (nats)")
for H, table in sizes.groupby("n_neighbors"):
    axes[1].errorbar(
        table["n_inducing"], table["nats"], table["error"], fmt="o-", capsize=3, label=f"H = {H}"
    )
axes[1].set(xlabel="M", ylabel="log density (nats)")
axes[1].legend()
for axis, model in zip(axes, ("QSGPRegressor", "SWSGPRegressor", "DLMGPRegressor"), strict=True):
    axis.set_title(model, fontsize="medium")
plt.show()
