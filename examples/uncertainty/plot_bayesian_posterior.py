"""
The posterior of the hyper-parameters, and what it does to predictions
======================================================================

Twelve noisy observations do not say how long the length scale is or how large the noise.
:class:`~skgp.BayesianGPRegressor` samples what they may be and averages its predictions over the
samples. A single optimum, which other Gaussian processes plug in, is one story among several.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import BayesianGPRegressor
from skgp.displays import PosteriorDisplay

rng = np.random.default_rng(4)
x = np.sort(rng.uniform(0, 10, 12))
y = np.sin(x) + 0.3 * rng.normal(size=12)
grid = np.linspace(-2, 12, 300)[:, None]

model = BayesianGPRegressor(1.0 * RBF(1.0) + WhiteKernel(0.1), random_state=0).fit(x[:, None], y)
print(model.summary())
print("effective number of samples:", round(model.diagnostics_["ess"]), end=", ")
print("Pareto k:", round(model.diagnostics_["pareto_k"], 2))

# %%
# The posterior of each hyper-parameter, in units of standardised targets, over its prior. It
# spreads over a factor of ten or more.
display = PosteriorDisplay.from_estimator(model)
display.figure_.set_size_inches(11, 3)

# %%
# Hyper-parameters depend on each other: long length scales go with large noise. Each point is a
# sample, its area in proportion to its weight.
theta = np.exp(model.posterior_samples_)
figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
area = 10 * len(theta) * model.sample_weights_
axis.scatter(theta[:, 1], theta[:, 2], s=area, alpha=0.3, linewidth=0)
axis.plot(*np.exp(model.map_[1:]), "*", color="C3", ms=12, label="optimum")
axis.set(xscale="log", yscale="log", xlabel="length scale", ylabel="noise variance")
axis.legend()

# %%
# Left: the means of some samples, each a Gaussian process of its own; those with short length
# scales follow every observation, those with long ones and much noise hardly any. Right: their
# mixture, and the optimum plugged in (``model.plug_in()``), which tells one of the stories and has
# the narrower intervals.
optimum = model.plug_in()
figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
chosen = rng.choice(len(theta), 12, p=model.sample_weights_)
for u in model.posterior_samples_[chosen]:
    kernel = model.kernel_.clone_with_theta(u)
    one = BayesianGPRegressor(kernel, optimizer=None).fit(x[:, None], y)
    axes[0].plot(grid, one.predict(grid), color="C0", alpha=0.5, linewidth=0.8)
axes[0].set(title="means under twelve samples", ylabel="y")
for each, colour, name in ((model, "C0", "mixture"), (optimum, "C3", "optimum")):
    lower, upper = each.predict_interval(grid, coverage=0.95)
    axes[1].plot(grid, each.predict(grid), color=colour, label=f"{name}: mean and 95% of y")
    axes[1].plot(grid, lower, "--", color=colour, linewidth=0.8)
    axes[1].plot(grid, upper, "--", color=colour, linewidth=0.8)
for axis in axes:
    axis.plot(grid, np.sin(grid), "k:", linewidth=1, label="without noise")
    axis.plot(x, y, "k.")
    axis.set_xlabel("x")
axes[1].legend(fontsize=8)
plt.show()
