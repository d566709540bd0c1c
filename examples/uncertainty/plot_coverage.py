"""
Do 95% intervals hold 95%?
==========================

An interval is right if it holds new observations as often as it says. Three noises, one model of
Gaussian noise and one of Student-t noise. Where the noise is what the model takes it for, coverage
is about as stated at every level; outliers make Gaussian intervals too wide at all but the highest.
"""

import matplotlib.pyplot as plt
import numpy as np

from skgp import DLMGPRegressor, QSGPRegressor
from skgp.displays import CoverageDisplay

rng = np.random.default_rng(0)
X = rng.uniform(-3, 3, (4000, 1))
f = np.sin(2 * X[:, 0])
noises = {
    "Gaussian noise": 0.3 * rng.standard_normal(len(X)),
    "Student-t noise, 2 degrees": 0.2 * rng.standard_t(2, len(X)),
    "noise that grows with x": 0.1 * (3.5 + X[:, 0]) * rng.standard_normal(len(X)),
}
models = {
    "Gaussian": QSGPRegressor(random_state=0),
    "Student-t": DLMGPRegressor(likelihood="student_t", n_inducing=20, random_state=0),
}

figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for axis, (noise, e) in zip(axes, noises.items(), strict=True):
    y = f + e
    for name, model in models.items():
        model.fit(X[:500], y[:500])
        CoverageDisplay.from_estimator(model, X[500:], y[500:], ax=axis, name=name)
        low, high = model.predict_interval(X[500:], 0.95)
        inside = np.mean((low <= y[500:]) & (y[500:] <= high))
        density = model.log_predictive_density(X[500:], y[500:]).mean()
        print(f"{noise:<28} {name:<10} inside 95%: {inside:.3f}, log density {density:.3f} nats")
    axis.set_title(noise, fontsize="medium")

# %%
# Noise that varies looks like heavy tails; an average over all x may hide intervals that are too
# wide where the noise is small and too narrow where it is large: coverage by groups of observations
# shows it. The Gaussian model learns a variance that depends on x (``heteroscedastic="auto"``).
for name, model in models.items():
    low, high = model.predict_interval(X[500:], 0.95)
    inside = (low <= y[500:]) & (y[500:] <= high)
    for left in (-3, -1, 1):
        group = (X[500:, 0] > left) & (X[500:, 0] < left + 2)
        print(f"{name}, x from {left} to {left + 2}: inside 95% {inside[group].mean():.3f}")
plt.show()
