"""
Positive targets whose noise grows with their level
===================================================

Rents differ by factors: what a flat costs is its level, give or take a fifth. One standard
deviation for all is then too large for the cheap and too small for the dear, and its intervals
reach below 0. Without a kernel of one's own regressors compare both scales by predictions left out
and describe log y where that predicts better.
"""

import matplotlib.pyplot as plt
import numpy as np

from skgp import QSGPRegressor
from skgp.displays import PredictiveBandDisplay

rng = np.random.default_rng(0)
area = rng.uniform(20, 160, 900)[:, None]  # in square metres
typical = 250 + 9 * area[:, 0] + 300 * (area[:, 0] > 90) * (area[:, 0] - 90) / 30
rent = typical * np.exp(0.25 * rng.standard_normal(900))
known = np.arange(900) < 300

# %%
# The default beside a model of y.
figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
for asked, axis in zip(("auto", "gaussian"), axes, strict=True):
    model = QSGPRegressor(likelihood=asked, random_state=0).fit(area[known], rent[known])
    density = model.log_predictive_density(area[~known], rent[~known]).mean()
    print(f"{model.likelihood_:10s}{-density:.2f} nats a flat")
    for name, some in (("small", area[:, 0] < 50), ("large", area[:, 0] > 130)):
        lower, upper = model.predict_interval(area[~known & some])
        inside = np.mean((lower < rent[~known & some]) & (rent[~known & some] < upper))
        print(f"    {inside:4.0%} of the {name} ones within 95% intervals")
    PredictiveBandDisplay.from_estimator(model, area[known], rent[known], ax=axis)
    axis.set(title=model.likelihood_, xlabel="area", ylabel="rent")

# %%
# Everything that is predicted is about y: means, quantiles, draws. f is that of log y.
model = QSGPRegressor(random_state=0).fit(area[known], rent[known])
flat = np.array([[75.0]])
mean, std = model.predict(flat, return_std=True)
print(f"a mean of {mean[0]:.0f}, a median of {model.predict_quantiles(flat, 0.5)[0]:.0f}")
print(f"noise of a factor {np.exp(model.noise_variance_**0.5):.2f} up or down")
plt.show()
