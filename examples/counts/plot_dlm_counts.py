r"""
Counts with more variance than Poisson's
========================================

Counts vary about their rate at least as a Poisson distribution does, and mostly more: what drives
them is not all in X. :class:`~skgp.DLMGPRegressor` with ``likelihood="poisson"`` has a rate exp(f),
and a variance of f makes predicted counts vary more. Under the evidence lower bound (ELBO) that
variance shrinks as observations come in. The log-loss keeps as much of it as the counts ask for.

Here the rate is smooth in x and multiplied by a random factor of mean 1: the counts are
negative-binomial, of variance :math:`\lambda + \lambda^2 / 2`.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import nbinom
from sklearn.gaussian_process.kernels import RBF

from skgp import DLMGPRegressor
from skgp.datasets import make_counts

n_train = 600
X, y = make_counts(n_train + 3000, mean=10.0, dispersion=2.0, length_scale=0.3, random_state=0)
X_train, X_test, y_train, y_test = X[:n_train], X[n_train:], y[:n_train], y[n_train:]
x_grid = np.linspace(-1, 1, 200)[:, None]

# %%
# Counts are not standardised, and the kernel has no ``WhiteKernel``: f is the logarithm of the rate
# less a constant. Means, quantiles and log-probabilities are those of the count.
models = {}
for objective in ("elbo", "log_loss"):
    model = DLMGPRegressor(
        1.0 * RBF(0.5), objective=objective, likelihood="poisson", n_inducing=20, random_state=0
    )
    models[objective] = model.fit(X_train, y_train)
    lower, upper = model.predict_interval(X_test, coverage=0.9)
    density = model.log_predictive_density(X_test, y_test).mean()
    inside = np.mean((lower <= y_test) & (y_test <= upper))
    print(f"{objective:<9} {-density:.3f} nats per count, {inside:.1%} in the 90% intervals")

figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for axis, (objective, model) in zip(axes, models.items(), strict=True):
    low, median, high = model.predict_quantiles(x_grid, [0.05, 0.5, 0.95]).T
    axis.fill_between(x_grid[:, 0], low, high, step="mid", alpha=0.25, label="5% to 95%")
    axis.step(x_grid[:, 0], median, where="mid", lw=1, label="median")
    axis.plot(x_grid, model.predict(x_grid), label="mean")
    axis.plot(X_train, y_train, "k.", ms=2)
    axis.set(title=f"objective={objective!r}", xlabel="x")
axes[0].set(ylabel="count", ylim=(-2, np.quantile(y_train, 0.998)))
axes[0].legend(loc="upper left", fontsize=8)

# %%
# The probability of every count at one x, beside that of the distribution that the counts are drawn
# from. Its mean there is taken from 200 000 counts of the generator, near x.
X_many, y_many = make_counts(200_000, mean=10.0, length_scale=0.3, random_state=0)
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for axis, x in zip(axes, (-0.7, 0.6), strict=True):
    rate = y_many[abs(X_many[:, 0] - x) < 0.01].mean()
    counts = np.arange(int(4 * rate))
    axis.bar(counts, nbinom.pmf(counts, 2, 2 / (2 + rate)), color="0.8", label="truth")
    rows = np.full((len(counts), 1), x)
    for objective, model in models.items():
        log_pmf = model.log_predictive_density(rows, counts)
        axis.plot(counts, np.exp(log_pmf), ".-", ms=4, label=objective)
    axis.set(xlabel="count", title=f"x = {x}, mean {rate:.1f}")
axes[0].set_ylabel("probability")
axes[0].legend()
plt.show()
