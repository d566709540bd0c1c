"""
Forecasting a series by its parts
=================================

A weekly series like that of carbon dioxide on Mauna Loa: a trend, a yearly cycle whose shape drifts
slowly, an oscillation of some years that comes and goes, and gaps. Each is a kernel; their sum is
a linear stochastic differential equation, in which :class:`~skgp.StateSpaceGPRegressor` computes
the exact posterior at a cost that grows with the number of weeks, not with its cube.

``python examples/series/plot_state_space_co2.py FOLDER`` takes ``FOLDER/co2.npz``, with years
``X`` (n, 1) and ppm ``y`` (n,), in place of the series made up here.
"""

import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.signal import lfilter
from sklearn.gaussian_process.kernels import ExpSineSquared, Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.displays import AdditiveEffectsDisplay, PredictiveBandDisplay
from skgp.kernels import Cosine, state_space


def make_series(random_state: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weekly values of 44 years in ppm; NaN where the instrument was off."""
    rng = np.random.default_rng(random_state)
    t = 1958 + np.arange(44 * 52) / 52
    # A damped oscillation of 3.6 years, driven by noise.
    damping, turn = np.exp(-1 / 52 / 4), 2 * np.pi / 52 / 3.6
    swing = lfilter([1], [1, -2 * damping * np.cos(turn), damping**2], rng.normal(size=len(t)))
    y = 315 + 0.75 * (t - 1958) + 0.012 * (t - 1958) ** 2
    walk = np.cumsum(rng.normal(size=(2, len(t))), axis=1) / len(t) ** 0.5  # the cycle drifts
    y += (2.8 + 0.5 * walk[0]) * np.sin(2 * np.pi * t)
    y -= (0.8 + 0.3 * walk[1]) * np.cos(4 * np.pi * t)
    y += 0.5 * swing / swing.std() + 0.3 * rng.normal(size=len(t))
    for start, weeks in ((310, 12), (900, 40), (1300, 5), (1310, 8)):
        y[start : start + weeks] = np.nan
    return t[:, None], y


if len(sys.argv) > 1:
    with np.load(Path(sys.argv[1]) / "co2.npz") as stored:
        X, y = stored["X"], stored["y"]
else:
    X, y = make_series()
future = X[:, 0] > X[-1, 0] - 5
hidden = np.where(future, np.nan, y)

# %%
# Targets that are NaN are left out, whether an instrument was off or the future is to come. The
# kernel is in the units of X, years, and of the standardised target. The yearly period is known;
# that of the oscillation is learned.
trend = 10.0 * Matern(60.0, (20.0, 1e3), nu=2.5)
year = ExpSineSquared(1.5, 1.0, periodicity_bounds="fixed")
seasonal = 0.1 * year * Matern(100.0, (10.0, 1e5), nu=0.5)
oscillation = 0.01 * Cosine(3.0, (1.5, 8.0)) * Matern(3.0, (0.5, 50.0), nu=0.5)
kernel = trend + seasonal + oscillation + WhiteKernel(0.01, (1e-6, 1.0))

start = time.perf_counter()
model = StateSpaceGPRegressor(kernel).fit(X, hidden)
print(f"{np.isfinite(hidden).sum()} weeks, fitted in {time.perf_counter() - start:.1f} s")
for part in model.component_kernels_:
    print(f"{state_space(part).n_states:3d} states  {part}")

# %%
# The forecast, five years ahead.
ahead = future & np.isfinite(y)
mean, std = model.predict(X[ahead], return_std=True)
error = mean - y[ahead]
inside = np.mean(np.abs(error) < 1.96 * std)
density = model.log_predictive_density(X[ahead], y[ahead]).mean()
print(f"RMSE {np.sqrt(np.mean(error**2)):.2f} ppm, {-density:.2f} nats a week, ", end="")
print(f"{inside:.0%} in the 95% intervals, whose half widths are {1.96 * std[[0, -1]].round(2)}")

figure, axes = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
PredictiveBandDisplay.from_estimator(
    model, X, hidden, grid_resolution=2000, ax=axes[0], points_kwargs={"s": 1}
)
recent = X[:, 0] > X[-1, 0] - 9
PredictiveBandDisplay.from_estimator(
    model, X[recent], hidden[recent], grid_resolution=600, ax=axes[1], points_kwargs={"s": 4}
)
axes[1].plot(X[ahead], y[ahead], ".", color="C3", ms=3, label="what came")
axes[1].legend()
for axis in axes:
    axis.set(xlabel="year", ylabel="ppm")

# %%
# What each summand of the kernel adds, in ppm: components and ``intercept_`` sum to the mean. A
# level may move from the trend to the cycle and back without changing the sum. Their bands say so;
# that of the sum, above, is narrow.
parts = model.predict_components(X)
print("largest rest:", np.abs(parts.sum(axis=1) + model.intercept_ - model.predict(X)).max())
figure, axes = plt.subplots(3, 1, figsize=(10, 7), sharex=True, layout="constrained")
AdditiveEffectsDisplay.from_estimator(
    model, X[recent], grid_resolution=600, target_name="ppm", ax=axes
)
for axis, name in zip(axes, ("trend", "seasonal", "oscillation"), strict=True):
    axis.set(xlabel="", title=name)
axes[-1].set_xlabel("year")
plt.show()
