"""
Columns with long tails
=======================

Concentrations of two substances spread over four orders of magnitude. An effect depends on their
ratios, not on their differences: a length scale that tells small ones apart knows nothing of
large ones. Without a kernel of one's own the estimators compare the columns with powers of them,
and take these where they predict better.
"""

import matplotlib.pyplot as plt
import numpy as np

from skgp import QSGPRegressor

rng = np.random.default_rng(0)
logs = rng.normal(0.0, 2.0, (800, 2))
concentration = np.exp(logs)
effect = np.sin(logs[:, 0]) + 0.3 * logs[:, 1] + 0.1 * rng.standard_normal(800)
known = np.arange(800) < 300

# %%
# The columns as they are, and the default.
figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
for warp, axis in zip((False, "auto"), axes, strict=True):
    model = QSGPRegressor(warp_inputs=warp, random_state=0)
    model.fit(concentration[known], effect[known])
    error = np.sqrt(np.mean((model.predict(concentration[~known]) - effect[~known]) ** 2))
    density = model.log_predictive_density(concentration[~known], effect[~known]).mean()
    print(f"warp_inputs={warp}: error {error:.2f}, {-density:.2f} nats an observation")
    line = np.column_stack([np.geomspace(0.003, 300, 400), np.ones(400)])
    mean, std = model.predict(line, return_std=True)
    axis.fill_between(line[:, 0], mean - 2 * std, mean + 2 * std, alpha=0.3)
    axis.plot(line[:, 0], mean, label="mean, and two standard deviations")
    axis.plot(line[:, 0], np.sin(np.log(line[:, 0])), "k:", label="f")
    axis.set(xscale="log", xlabel="first concentration, the second 1")
    axis.set_title("columns" if model.input_powers_ is None else "powers of the columns")
axes[0].set_ylabel("effect")
axes[0].legend()

# %%
# Both columns have one tail, to the right: above their medians the kernel sees their logarithms,
# and its length scales are in units of these.
print(model.input_powers_)
print(model.kernel_)
plt.show()
