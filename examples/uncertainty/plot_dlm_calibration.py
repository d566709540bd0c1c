"""
Where the variance goes: ELBO against log-loss
==============================================

Eight inducing points cannot follow a function that needs thirty. The evidence lower bound (ELBO)
takes what they miss for noise, of one size everywhere. The log-loss, which
:class:`~skgp.DLMGPRegressor` minimises by default, leaves the noise small and puts the error where
it is: into the variance of f, which differs from place to place.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import DLMGPRegressor
from skgp.displays import CoverageDisplay


def draw_rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a function that is lively left of 5 and calm right of it, with little noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 10, n)
    return x[:, None], function(x) + 0.05 * rng.normal(size=n)


def function(x: np.ndarray) -> np.ndarray:
    """The values without noise."""
    return np.where(x < 5, np.sin(6 * x), 0.5 * np.sin(x))


def fit(objective: str, n_inducing: int = 8) -> DLMGPRegressor:
    """One fit; the same kernel and seed whatever the objective."""
    kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
    model = DLMGPRegressor(kernel, objective=objective, n_inducing=n_inducing, random_state=0)
    return model.fit(X, y)


X, y = draw_rows(400, seed=0)
X_test, y_test = draw_rows(4000, seed=1)
x_grid = np.linspace(0, 10, 500)
titles = {"elbo": "ELBO", "log_loss": "log-loss"}
models = {objective: fit(objective) for objective in titles}

# %%
# Both give up the waves on the left. Only one of the two knows how well it does on the right.
figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for axis, (objective, title) in zip(axes, titles.items(), strict=True):
    model = models[objective]
    lower, upper = model.predict_interval(x_grid[:, None], coverage=0.95)
    axis.fill_between(x_grid, lower, upper, alpha=0.25, label="95% of new observations")
    axis.plot(x_grid, model.predict(x_grid[:, None]), label="mean")
    axis.plot(x_grid, function(x_grid), "k--", lw=1, label="function")
    axis.plot(X, y, "k.", ms=2)
    axis.plot(model.inducing_points_, np.full(model.n_inducing_, -2.1), "|", color="C3", ms=12)
    axis.set(
        title=f"{title}: noise of std {model.noise_variance_**0.5:.2f}", xlabel="x", ylabel="y"
    )
    axis.label_outer()
axes[0].legend(loc="upper right", fontsize=8)

# %%
# Over all observations even the intervals of the ELBO hold about as many as they should: too few on
# the left, all of them on the right. Coverage by region, and the log-density, tell.
left = X_test[:, 0] < 5
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for axis, (objective, title) in zip(axes, titles.items(), strict=True):
    model = models[objective]
    for rows, name in ((left, "x < 5"), (~left, "x > 5")):
        CoverageDisplay.from_estimator(model, X_test[rows], y_test[rows], ax=axis, name=name)
    axis.legend(axis.lines[1::2], ("x < 5", "x > 5"))
    density = model.log_predictive_density(X_test, y_test).mean()
    axis.set_title(f"{title}: {-density:.2f} nats per observation")

# %%
# With more inducing points there is less to be missed, and the objectives come together. The
# square loss (``objective="square_loss"``) looks at the mean alone: the smallest error where points
# are few, and a variance of one size.
sizes = (5, 8, 15, 30)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for objective in ("elbo", "log_loss", "square_loss"):
    rmse, nlpd = [], []
    for n_inducing in sizes:
        model = models.get(objective) if n_inducing == 8 else None
        model = model or fit(objective, n_inducing)
        rmse.append(np.sqrt(np.mean((model.predict(X_test) - y_test) ** 2)))
        nlpd.append(-model.log_predictive_density(X_test, y_test).mean())
    axes[0].plot(sizes, rmse, "o-", label=objective)
    axes[1].plot(sizes, nlpd, "o-", label=objective)
    print(f"{objective:>11}: RMSE", np.round(rmse, 3), "NLPD", np.round(nlpd, 2))
for axis, title in zip(axes, ("RMSE", "NLPD, nats per observation"), strict=True):
    axis.set(xticks=sizes, xlabel="inducing points", title=title)
axes[0].legend()
plt.show()
