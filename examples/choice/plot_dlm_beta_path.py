"""
How much regularisation: the path of beta
=========================================

All objectives of :class:`~skgp.DLMGPRegressor` but FITC are a loss plus ``beta`` times the
divergence of the posterior from the prior. The evidence lower bound (ELBO) has ``beta=1``, which is
Bayes' rule if the model is right. For a sparse model it need not be the best choice, and for the
other losses there is none such. ``beta="auto"`` tries 8, 4, ..., 0.015 and lets held-out
observations decide.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import DLMGPRegressor
from skgp.datasets import make_smooth

n_train = 800
X, y = make_smooth(n_train + 3000, n_features=3, length_scale=0.5, noise=0.1, random_state=0)
X_train, X_test, y_train, y_test = X[:n_train], X[n_train:], y[:n_train], y[n_train:]
kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)


def fit(objective: str, beta: float | str) -> tuple[DLMGPRegressor, float]:
    """A fit and its seconds."""
    start = time.perf_counter()
    model = DLMGPRegressor(kernel, objective=objective, beta=beta, n_inducing=30, random_state=0)
    return model.fit(X_train, y_train), time.perf_counter() - start


def scores(model: DLMGPRegressor) -> str:
    """Error and negative log-density of test points, in one line."""
    rmse = np.sqrt(np.mean((model.predict(X_test) - y_test) ** 2))
    nlpd = -model.log_predictive_density(X_test, y_test).mean()
    return f"RMSE {rmse:.3f}  NLPD {nlpd:6.3f}"


# %%
# From 1 down, then from 1 up, every fit of the path begins where the one before it ended, so that
# all of them cost no more than a few single ones. ``beta_path_`` has the loss of the held-out
# observations for each.
objectives = {"elbo": "ELBO", "log_loss": "log-loss", "square_loss": "square loss"}
paths = {}
for objective in objectives:
    single, seconds = fit(objective, beta=1.0)
    print(f"{objective:<12} beta {single.beta_:<6.3g} {scores(single)}  {seconds:5.1f} s")
    paths[objective], seconds = fit(objective, beta="auto")
    chosen = paths[objective]
    print(f"{'':<12} beta {chosen.beta_:<6.3g} {scores(chosen)}  {seconds:5.1f} s, all betas")

# %%
# The least loss decides (circles). Either way ends once the loss has risen twice in a row.
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), sharex=True, layout="constrained")
for axis, (objective, model) in zip(axes, paths.items(), strict=True):
    betas, losses = zip(*sorted(model.beta_path_.items()), strict=True)
    axis.plot(betas, losses, ".-")
    axis.plot(model.beta_, model.beta_path_[model.beta_], "o", color="C3", ms=10, fillstyle="none")
    axis.set(xscale="log", xlabel="beta", title=objectives[objective])
axes[0].set_ylabel("mean loss of held-out data")
axes[2].set_ylabel("half the mean squared error")
plt.show()
