"""
An hourly load with temperature, holidays and gaps
==================================================

A load that follows the hour of the day, the weather, holidays and a slow drift. Time is a column
of dates, and what it does is a sum of kernels, in which :class:`~skgp.StateSpaceGPRegressor` is
exact; temperature and holidays are covariates beside it: a smooth function of the one, a step for
the other. All is learned at once, and predicted apart.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.gaussian_process.kernels import ExpSineSquared, Matern, WhiteKernel

from skgp import StateSpaceGPRegressor

rng = np.random.default_rng(0)
when = pd.date_range("2023-01-02", periods=24 * 7 * 16, freq="h")
hours = np.arange(len(when))
weather = np.convolve(rng.standard_normal(len(when) + 239), np.exp(-np.arange(240) / 40), "valid")
X = pd.DataFrame(
    {
        "when": when,
        "temperature": 8 + 0.004 * hours + 4 * np.sin(2 * np.pi * (hours - 9) / 24) + weather,
        "holiday": np.isin(when.day_of_year, [6, 47, 48, 97, 100]),
    }
)
truth = {
    "day": 3 * np.sin(2 * np.pi * (hours - 7) / 24) + 1.5 * np.sin(4 * np.pi * (hours - 8) / 24),
    "drift": 2 * np.sin(2 * np.pi * hours / (24 * 60)),
    "temperature": 0.05 * np.maximum(16 - X["temperature"], 0) ** 1.7,
    "holiday": -4.0 * X["holiday"],
}
y = 40 + sum(truth.values()) + 0.8 * rng.standard_normal(len(when))

# %%
# Two weeks are to be forecast, and of three days the meter was off: their targets are NaN. Kernels
# are in days. The period of a day is known, the rest is learned, with and without the covariates.
future = when >= when[-1] - pd.Timedelta("14D")
off = (when >= "2023-03-01") & (when < "2023-03-04")
observed = y.where(~(future | off))

day = ExpSineSquared(1.0, 1.0, periodicity_bounds="fixed")
drift = Matern(20.0, (0.1, 200.0), nu=1.5)
kernel = day + drift + WhiteKernel(0.1)
for columns in (["when"], ["when", "temperature", "holiday"]):
    model = StateSpaceGPRegressor(kernel).set_output(transform="pandas")
    model.fit(X[columns], observed)
    density = model.log_predictive_density(X.loc[future, columns], y[future]).mean()
    lower, upper = model.predict_interval(X.loc[future, columns])
    inside = ((lower < y[future]) & (y[future] < upper)).mean()
    score = model.score(X.loc[future, columns], y[future])
    print(f"{', '.join(columns)}: R^2 {score:.2f}, {density:.2f} nats, {inside:.0%} inside")

# %%
# The forecast knows the weather of those days; one of tomorrow takes the forecast of the weather.
# Predictions have the index of their inputs.
shown = slice(-24 * 24, None)
mean, std = model.predict(X[shown], return_std=True)
figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
axis.fill_between(when[shown], mean - 1.96 * std, mean + 1.96 * std, color="C0", alpha=0.25)
axis.plot(when[shown], mean, color="C0", label="mean and 95%")
axis.plot(when[shown], observed[shown], ".", color="black", ms=2, label="observed")
axis.plot(when[future], y[future], ".", color="C3", ms=2, label="what came")
axis.set_ylabel("load")
axis.legend(ncols=3)

# %%
# Each part with its band, beside the truth. Levels of parts are known up to a constant, which the
# truth's mean over the training points takes out here.
parts, stds = model.predict_components(X, return_std=True)
parts.columns = stds.columns = list(truth)
figure, axes = plt.subplots(4, 1, figsize=(10, 9), layout="constrained")
for axis, (name, values) in zip(axes, truth.items(), strict=True):
    by_time = name in ("day", "drift")
    place = hours / 24 if by_time else X[name]
    rows = np.argsort(place)[: 24 * 7 if name == "day" else None]
    part, spread = parts[name].to_numpy()[rows], 1.96 * stds[name].to_numpy()[rows]
    expected = (np.asarray(values) - np.mean(values) + parts[name].mean())[rows]
    place = np.asarray(place)[rows]
    axis.fill_between(place, part - spread, part + spread, color="C0", alpha=0.25)
    axis.plot(place, part, color="C0", label="mean and 95%")
    axis.plot(place, expected, color="C3", ls="--", label="truth")
    axis.set(title=name, xlabel="days" if by_time else name, ylabel="load")
    print(f"{name}: correlation with the truth {np.corrcoef(parts[name], values)[0, 1]:.3f}")
axes[0].legend(fontsize="small")

# %%
# One step ahead, from the past alone: standardised residuals of a model that holds are white and
# of variance 1.
past, spread = model.predict(X, return_std=True, filtered=True)
z = ((observed - past) / spread).iloc[24 * 7 :].dropna()
print(f"one step ahead: sd {z.std():.2f}, lag-1 correlation {z.autocorr():.2f}")
plt.show()
