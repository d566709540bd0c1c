"""
Averaging or optimising: where it matters
=========================================

Does a prediction gain from averaging over the hyper-parameters? With few observations, clearly;
with many the posterior is narrow and its optimum as good. Here are functions of three columns,
drawn from a Gaussian process, with 10 to 160 observations each. Their hyper-parameters are averaged
over, or set to the optimum of the same posterior, or to the optimum of the evidence alone, as is
customary.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import BayesianGPRegressor
from skgp.datasets import make_smooth

# With ten observations the optimum of the evidence lies at the bounds now and then, which
# scikit-learn warns of.
warnings.simplefilter("ignore", ConvergenceWarning)
SIZES, N_FUNCTIONS, N_TEST = (10, 20, 40, 80, 160), 6, 500
METHODS = ("average over the posterior", "its optimum", "optimum of the evidence")


def scores(n: int, seed: int) -> list[tuple[float, float]]:
    """NLPD, and coverage of 95% intervals, of each method on held-out data."""
    X, y = make_smooth(n + N_TEST, n_features=3, length_scale=0.7, noise=0.3, random_state=seed)
    X_test, y_test = X[n:], y[n:]
    kernel = 1.0 * RBF([1.0] * 3) + WhiteKernel(0.1)
    model = BayesianGPRegressor(kernel, min_ess=200, random_state=0).fit(X[:n], y[:n])
    found = []
    for each in (model, model.plug_in()):
        lower, upper = each.predict_interval(X_test, coverage=0.95)
        density = each.log_predictive_density(X_test, y_test).mean()
        found.append((-density, np.mean((lower <= y_test) & (y_test <= upper))))
    evidence = GaussianProcessRegressor(kernel, normalize_y=True).fit(X[:n], y[:n])
    mean, std = evidence.predict(X_test, return_std=True)
    z = (y_test - mean) / std
    found.append((np.mean(0.5 * z**2 + np.log(std * np.sqrt(2 * np.pi))), np.mean(abs(z) < 1.96)))
    return found


results = np.array(
    [[scores(n, seed) for seed in range(N_FUNCTIONS)] for n in SIZES]
)  # (sizes, functions, methods, 2)

# %%
# Coverage says why: with ten observations the optimum takes the pattern that it sees for the truth,
# and intervals that should hold 95% of the observations hold far fewer. Those of the average are
# wide enough.
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for axis, values, title in zip(
    axes,
    np.moveaxis(results, -1, 0),
    ("NLPD of held-out data, nats", "coverage of 95% intervals"),
    strict=True,
):
    for number, method in enumerate(METHODS):
        mean = values[:, :, number].mean(1)
        error = values[:, :, number].std(1) / np.sqrt(N_FUNCTIONS)
        axis.errorbar(SIZES, mean, error, marker=".", capsize=2, label=method)
        print(f"{title:<30} {method:<28}", np.round(mean, 3))
    axis.set(title=title, xlabel="observations", xscale="log", xticks=SIZES)
    axis.set_xticklabels(SIZES)
    axis.minorticks_off()
axes[1].axhline(0.95, color="k", linestyle=":")
axes[0].legend(fontsize=8)
plt.show()
