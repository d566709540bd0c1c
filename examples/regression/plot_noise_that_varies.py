"""
Noise that varies
=================

An instrument is precise at rest and less so the faster it turns. One variance of noise for all
speeds makes the intervals too wide at rest and too narrow at speed. With ``kernel=None`` the
regressors learn how the variances of noise and function depend on the columns, and use it where
held-out observations are predicted better.
"""

import matplotlib.pyplot as plt
import numpy as np

from skgp import QSGPRegressor

rng = np.random.default_rng(0)
speed = rng.uniform(0, 10, (600, 1))
signal = np.sin(speed[:, 0]) + 0.2 * speed[:, 0]
noise_std = 0.03 * np.exp(0.3 * speed[:, 0])
reading = signal + noise_std * rng.standard_normal(600)
known = np.arange(600) < 200

# %%
# One variance for all, and the default: densities of new readings, and the share of them that lie
# in intervals of 95%, of the slow half and of the fast one.
line = np.linspace(0, 10, 300)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
for heteroscedastic, axis in zip((False, "auto"), axes, strict=True):
    model = QSGPRegressor(heteroscedastic=heteroscedastic, random_state=0)
    model.fit(speed[known], reading[known])
    density = model.log_predictive_density(speed[~known], reading[~known]).mean()
    low, high = model.predict_interval(speed[~known], 0.95)
    within = (reading[~known] > low) & (reading[~known] < high)
    slow = speed[~known, 0] < 5
    print(f"heteroscedastic={heteroscedastic}: {-density:.2f} nats an observation,", end=" ")
    print(f"coverage {within[slow].mean():.2f} slow, {within[~slow].mean():.2f} fast")
    mean, (low, high) = model.predict(line), model.predict_interval(line, 0.95)
    axis.fill_between(line[:, 0], low, high, alpha=0.3, label="95% of readings")
    axis.plot(line[:, 0], mean, label="mean")
    axis.plot(speed[known], reading[known], "k.", markersize=3)
    axis.set(xlabel="speed", title=f"heteroscedastic={heteroscedastic}")
axes[0].set_ylabel("reading")
axes[0].legend()

# %%
# The standard deviation of the noise that was learned, and the one that generated the readings.
learned = np.sqrt(model.predict_noise_variance([[1.0], [5.0], [9.0]]))
print(learned.round(3), (0.03 * np.exp(0.3 * np.array([1.0, 5.0, 9.0]))).round(3))

# %%
# A function that is flat here and rough there: the uncertainty of f varies, too. Away from all
# observations it returns to that of constant variance.
grid = np.linspace(5, 10, 2001)
walk = np.cumsum(0.05 * rng.standard_normal(2001))
place = rng.uniform(0, 10, (450, 1))
height = np.interp(place[:, 0], grid, walk, left=0.0)
line = np.linspace(-1, 10, 500)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
for heteroscedastic, axis in zip((False, "auto"), axes, strict=True):
    model = QSGPRegressor(heteroscedastic=heteroscedastic, random_state=0)
    model.fit(place[:150], height[:150])
    density = model.log_predictive_density(place[150:], height[150:]).mean()
    print(f"heteroscedastic={heteroscedastic}: {-density:.2f} nats an observation")
    low, high = model.predict_interval(line, 0.95)
    axis.fill_between(line[:, 0], low, high, alpha=0.3, label="95% of heights")
    axis.plot(line[:, 0], model.predict(line), label="mean")
    axis.plot(place[:150], height[:150], "k.", markersize=3)
    axis.set(xlabel="place", title=f"heteroscedastic={heteroscedastic}")
axes[0].set_ylabel("height")
axes[0].legend(loc="lower left")
plt.show()
