"""
Have the samples settled? Traces and diagnostics
================================================

Samples stand for a posterior once chains have forgotten where they began, or once importance
weights are even enough. Here are samplers of :class:`~skgp.BayesianGPRegressor` on 80 observations,
and what R-hat, effective sample sizes and Pareto k say of them.
"""

import warnings

import matplotlib.pyplot as plt
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import BayesianGPRegressor
from skgp.datasets import make_smooth
from skgp.displays import PosteriorDisplay, TraceDisplay

X, y = make_smooth(80, n_features=2, length_scale=0.6, noise=0.3, random_state=0)
kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1)


def fit(**params) -> BayesianGPRegressor:
    """One fit, of which warnings are printed."""
    model = BayesianGPRegressor(kernel, random_state=0, **params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(X, y)
    for warning in caught:
        print("warning:", warning.message)
    return model


# %%
# Importance sampling, the default: points of two or three rounds, each from a law fitted to those
# before, their areas in proportion to their weights. No few of them stand out, and Pareto k, the
# tail of the weights, is below 0.7.
model = fit()
print(model.summary())
print("Pareto k:", round(model.diagnostics_["pareto_k"], 2))
TraceDisplay.from_estimator(model)

# %%
# Hamiltonian Monte Carlo: four chains that look alike and go nowhere, R-hat near 1. A length scale
# that strays far now and then has the largest; above 1.01 a warning asks for more draws.
model = fit(sampler="hmc", n_samples=400, min_ess=200)
print(model.summary())
TraceDisplay.from_estimator(model)

# %%
# The same posterior: curves of one width, and optima near the middle.
names = model.hyperparameter_names_
display = PosteriorDisplay.from_estimator(model, names=names[1:])

# %%
# Stochastic gradient Langevin dynamics as it was published for Gaussian processes. Its steps fall,
# and the chains stay near where they are: they differ from each other by more than they move,
# R-hat is far from 1, and a warning says so.
model = fit(sampler="sgld", schedule="paper", n_samples=150, n_warmup=50)
print(model.summary())
TraceDisplay.from_estimator(model)
plt.show()
