"""
Outliers: targets of which some are grossly wrong
=================================================

A tenth of the training targets is grossly wrong. Under Gaussian noise the squared error makes each
of them count; :class:`~skgp.QSGPRegressor` with ``likelihood="laplace"`` takes the absolute error
instead, so that an observation pulls no harder the further away it lies.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor
from skgp.datasets import make_sinc

X_grid = np.linspace(-10, 10, 400)[:, None]
truth = np.sinc(X_grid[:, 0] / np.pi)
X_test, y_test = make_sinc(n_samples=1000, noise=0.05, random_state=1)


def contaminated(share: float, n: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noisy values of the sinc function, a share of them lifted; and which."""
    X, y = make_sinc(n_samples=n, noise=0.05, random_state=0)
    rng = np.random.default_rng(0)
    wrong = rng.permutation(n) < share * n
    return X, y + wrong * rng.uniform(1, 3, n), wrong


kernel = 1.0 * RBF(2.0) + WhiteKernel(0.01)


def fit(likelihood: str, X: np.ndarray, y: np.ndarray) -> QSGPRegressor:
    """One regressor; the same kernel and seed whatever the likelihood."""
    return QSGPRegressor(kernel, likelihood=likelihood, random_state=0).fit(X, y)


# %%
# Every outlier lies above the curve. The Gaussian fit follows them, and takes what is left of them
# for noise; ``likelihood_scale_`` is the scale b of the Laplace noise, whose standard deviation is
# :math:`\sqrt{2} b`.
X, y, wrong = contaminated(0.1)
models = {name: fit(name, X, y) for name in ("gaussian", "laplace")}
print(f"Laplace scale {models['laplace'].likelihood_scale_:.3f}")

figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for axis, (name, model) in zip(axes, models.items(), strict=True):
    lower, upper = model.predict_interval(X_grid, coverage=0.95)
    axis.fill_between(X_grid[:, 0], lower, upper, alpha=0.25, label="95% of new observations")
    axis.plot(X_grid, model.predict(X_grid), label="mean")
    axis.plot(X_grid, truth, "k--", lw=1, label="sinc")
    axis.plot(X[~wrong], y[~wrong], "k.", ms=3)
    axis.plot(X[wrong], y[wrong], "rx", ms=5, label="wrong targets")
    axis.set(title=f"likelihood={name!r}", xlabel="x", ylabel="y")
    axis.label_outer()
axes[0].legend(loc="upper left", fontsize=8)

# %%
# The share of wrong targets, and the error on observations that have none. Without any, Gaussian
# noise is the truth and does slightly better. As the share grows the Laplace scale grows with it,
# and the intervals on clean observations become too wide: one scale has to serve right and wrong
# targets alike.
shares = (0.0, 0.05, 0.1, 0.2, 0.3)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name in ("gaussian", "laplace"):
    rmse, nlpd = [], []
    for share in shares:
        X, y, _ = contaminated(share)
        model = fit(name, X, y)
        rmse.append(np.sqrt(np.mean((model.predict(X_grid) - truth) ** 2)))
        nlpd.append(-model.log_predictive_density(X_test, y_test).mean())
    axes[0].plot(shares, rmse, "o-", label=name)
    axes[1].plot(shares, nlpd, "o-", label=name)
    print(f"{name:>9}: RMSE", np.round(rmse, 3), "NLPD", np.round(nlpd, 2))
for axis, title in zip(axes, ("RMSE to the sinc", "NLPD of clean targets, nats"), strict=True):
    axis.set(xlabel="share of wrong targets", title=title)
axes[0].legend()
plt.show()
