"""
How many inducing points, and how many neighbours
=================================================

:class:`~skgp.SWSGPRegressor` has M inducing points (``n_inducing``), H of which each observation
uses (``n_neighbors``). M decides how much of the function can be told apart, H how well an
observation makes use of it, and H alone what an observation costs: a factorisation of H x H,
whatever M.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import SWSGPRegressor
from skgp.datasets import make_smooth

n_train = 2000
X, y = make_smooth(n_train + 2000, n_features=3, length_scale=0.25, noise=0.2, random_state=0)
X_train, X_test, y_train, y_test = X[:n_train], X[n_train:], y[:n_train], y[n_train:]

# %%
# Hyper-parameters are learned from observations given the observations next to them. They have no
# need of M and H, so that one search does for all.
kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
start = time.perf_counter()
kernel = SWSGPRegressor(kernel, n_inducing=100, random_state=0).fit(X_train, y_train).kernel_
print(f"{kernel}: {time.perf_counter() - start:.1f} s")


def scores(n_inducing: int, n_neighbors: int, **options) -> tuple[float, float, float]:
    """Error, negative log density per observation, and the seconds of fit and prediction."""
    start = time.perf_counter()
    model = SWSGPRegressor(
        kernel,
        optimizer=None,
        n_inducing=n_inducing,
        n_neighbors=n_neighbors,
        random_state=0,
        **options,
    ).fit(X_train, y_train)
    rmse = np.sqrt(np.mean((model.predict(X_test) - y_test) ** 2))
    seconds = time.perf_counter() - start
    return float(rmse), float(-model.log_predictive_density(X_test, y_test).mean()), seconds


Ms, Hs = (100, 300, 800, n_train), (4, 8, 16, 32)
table = np.array([[scores(M, H) for H in Hs] for M in Ms])

# %%
# Both help, and each is worth little without the other: neighbours that are further off than the
# length scale have nothing to say. The noise has a standard deviation of 0.2 (dotted), below which
# no error can fall.
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
titles = ("RMSE", "nats per observation, lower is better", "seconds: fit and predictions")
for k, (axis, title) in enumerate(zip(axes, titles, strict=True)):
    for i, M in enumerate(Ms):
        axis.plot(Hs, table[i, :, k], ".-", label=f"M = {M}")
    axis.set(xscale="log", xticks=Hs, xlabel="H", title=title)
    axis.set_xticks(Hs, [str(H) for H in Hs])
    axis.minorticks_off()
axes[0].axhline(0.2, color="0.5", ls=":")
axes[2].set_ylim(bottom=0)
axes[0].legend()

# %%
# With a KL weight of 1, that of the paper, the inducing variables overfit: the more of them, the
# worse.
for name, options in {
    "variational": {},
    "variational, KL weight 1": {"kl_weight": 1.0},
}.items():
    for M in (300, n_train):
        rmse, nlpd, seconds = scores(M, 16, **options)
        print(f"{name:<25} M = {M:<5} RMSE {rmse:.3f}  NLPD {nlpd:6.3f}  {seconds:.2f} s")
plt.show()
