r"""
Counts of unequal exposure
==========================

Accidents a road, calls an hour, cases a district: counts that come from more traffic, longer times
or more people are greater, and say more. With ``exposure=`` the model is
:math:`y \sim \mathrm{Poisson}(e\, \lambda(x))`, and its rate :math:`\lambda` is per unit of
exposure. Dividing counts by their exposures gives rates too, but one accident in a hundred cars and
a hundred in ten thousand are then the same evidence.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF

from skgp import DLMGPRegressor

rng = np.random.default_rng(0)
X = rng.uniform(-3, 3, (300, 1))
rate = np.exp(0.5 + np.sin(2 * X[:, 0]))
exposure = 10 ** rng.uniform(-1, 1.3, 300)
y = rng.poisson(exposure * rate)

grid = np.linspace(-3, 3, 200)[:, None]
truth = np.exp(0.5 + np.sin(2 * grid[:, 0]))
settings = {"kernel": 1.0 * RBF(1.0), "likelihood": "poisson", "n_inducing": 25, "random_state": 0}
model = DLMGPRegressor(**settings).fit(X, y, exposure=exposure)
rounded = DLMGPRegressor(**settings).fit(X, np.round(y / exposure))

# %%
# The rate per unit, and what is predicted for 10 units of exposure.
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
axes[0].scatter(X, y / exposure, s=3 * exposure, c="0.6", label="count / exposure")
axes[0].plot(grid, truth, "k--", label="truth")
axes[0].plot(grid, model.predict(grid), label="with exposure")
axes[0].plot(grid, rounded.predict(grid), label="divided and rounded")
axes[0].set(xlabel="x", ylabel="rate", ylim=(0, 12))
axes[0].legend()
low, high = model.predict_interval(grid, 0.9, exposure=10.0)
axes[1].fill_between(grid[:, 0], low, high, step="mid", alpha=0.3, label="90%")
axes[1].plot(grid, model.predict(grid, exposure=10.0), label="mean")
axes[1].set(xlabel="x", title="counts of exposure 10")
axes[1].legend()
for name, each in (("with exposure", model), ("divided and rounded", rounded)):
    error = np.sqrt(np.mean(np.log(each.predict(grid) / truth) ** 2))
    print(f"{name:<20} RMSE of the log-rate {error:.3f}")
plt.show()
