"""
Forecasting a series whose season grows with its level
======================================================

Passengers, sales and prices grow by factors: the season and the noise are shares of the level. A
model of y has one size of both, too large at the start and too small at the end.
:class:`~skgp.StateSpaceGPRegressor` without a kernel then describes log y, by the evidence, and
its predictions are log-normal.
"""

import matplotlib.pyplot as plt
import numpy as np

from skgp import StateSpaceGPRegressor
from skgp.displays import PredictiveBandDisplay

rng = np.random.default_rng(0)
month = np.arange(144)
season = 0.2 * np.sin(2 * np.pi * month / 12) + 0.1 * np.cos(4 * np.pi * month / 12)
growth = 0.015 * month + np.cumsum(0.01 * rng.standard_normal(144))
passengers = 100 * np.exp(growth + season + 0.04 * rng.standard_normal(144))
X, known = month[:, None], month < 108

# %%
# The default beside a model of y, three years ahead.
models = [StateSpaceGPRegressor(), StateSpaceGPRegressor(likelihood="gaussian")]
figure, axes = plt.subplots(2, 1, figsize=(10, 7), sharex=True, layout="constrained")
for model, axis in zip(models, axes, strict=True):
    model.fit(X[known], passengers[known])
    lower, upper = model.predict_interval(X[~known])
    inside = np.mean((lower < passengers[~known]) & (passengers[~known] < upper))
    density = model.log_predictive_density(X[~known], passengers[~known]).mean()
    print(f"{model.likelihood_:10s}{inside:5.0%} in the 95% intervals, {-density:.2f} nats a month")
    PredictiveBandDisplay.from_estimator(
        model, X, np.where(known, passengers, np.nan), grid_resolution=600, ax=axis
    )
    axis.plot(month[~known], passengers[~known], ".", color="C3", label="what came")
    axis.set(title=model.likelihood_, xlabel="", ylabel="passengers")
    axis.legend()
axes[-1].set_xlabel("month")

# %%
# Components are those of log y: their exponentials are factors of y. Trends stand first, seasons
# after them.
model = models[0]
for kernel in model.component_kernels_:
    print(kernel)
parts, stds = model.predict_components(X[-12:], return_std=True)
waves = ["Cosine" in str(kernel) for kernel in model.component_kernels_]
factor = np.exp(parts[:, waves].sum(1))
print("passengers of a month beside the trend:", factor.round(2))

# %%
# ``predict`` is the median. Totals have means and intervals of draws, which are joint.
year = model.sample_y(X[-12:], n_samples=2000, random_state=0).sum(0)
low, middle, high = np.quantile(year, [0.025, 0.5, 0.975])
print(f"last year: {year.mean():.0f} on average, 95% between {low:.0f} and {high:.0f}")
print(f"their median {middle:.0f}, the sum of the medians {model.predict(X[-12:]).sum():.0f}")
plt.show()
