r"""
The rate of events that have dates
==================================

Explosions in British coal mines, 191 between 1851 and 1962, are the standard example of a point
process whose rate changes: many in the 1800s, few later. Counts in narrow bins have Poisson
distributions of rate :math:`e^{f(t)}`; with a Gaussian process f this is a log-Gaussian Cox
process, and :class:`~skgp.StateSpaceGPRegressor` takes one site a bin, however many there are. Here
events are drawn from a rate of that kind, so that what is found can be compared with it.

``python examples/counts/plot_state_space_counts.py FOLDER`` takes ``FOLDER/coal.npz``,
with the dates ``events`` in years, in their place.
"""

import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from skgp import StateSpaceGPRegressor

FIRST, LAST = 1851.0, 1963.0


def rate(t: np.ndarray) -> np.ndarray:
    """Events a year: a fall about 1890, and swings."""
    return np.exp(0.35 - 0.65 * np.tanh((t - 1890) / 6) + 0.35 * np.sin((t - FIRST) / 7))


def draw_events(random_state: int = 0) -> np.ndarray:
    """Dates of an inhomogeneous Poisson process, by thinning one of constant rate."""
    rng = np.random.default_rng(random_state)
    most = rate(np.linspace(FIRST, LAST, 10_000)).max()
    dates = rng.uniform(FIRST, LAST, rng.poisson(most * (LAST - FIRST)))
    return np.sort(dates[rng.uniform(size=len(dates)) < rate(dates) / most])


real = len(sys.argv) > 1
if real:
    with np.load(Path(sys.argv[1]) / "coal.npz") as stored:
        events = stored["events"]
else:
    events = draw_events()

# %%
# Bins of a fortnight, nearly all of them empty, which is no trouble: nor would finer ones be.
n_bins = 26 * int(LAST - FIRST)
counts, edges = np.histogram(events, bins=n_bins, range=(FIRST, LAST))
width = edges[1] - edges[0]
X = (edges[:-1, None] + edges[1:, None]) / 2
kernel = ConstantKernel(0.5, (1e-3, 10.0)) * Matern(10.0, (1.0, 100.0), nu=2.5)
start = time.perf_counter()
model = StateSpaceGPRegressor(kernel, likelihood="poisson").fit(X, counts)
seconds = time.perf_counter() - start
print(f"{len(events)} events in {n_bins} bins, {seconds:.1f} s: {model.kernel_}")

# %%
# The prediction for a bin is its mean count; over the width of the bin it is the rate. Quantiles of
# f, the logarithm, become quantiles of the rate.
years = np.linspace(FIRST, LAST, 500)[:, None]
f, var = model.latent_mean_and_variance(years)
low, high = (np.exp(f + z * np.sqrt(var)) / width for z in (-1.96, 1.96))
expected = model.predict(X).sum()
print(f"events predicted, summed over the bins: {expected:.1f}")
if not real:
    truth = rate(years[:, 0])
    off = np.sqrt(np.mean((f - np.log(width) - np.log(truth)) ** 2))
    inside = np.mean((low < truth) & (truth < high))
    print(f"log rate: root mean square error {off:.2f}; truth in the 95% band {inside:.0%}")

figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
axis.fill_between(years[:, 0], low, high, alpha=0.3, label="95% of the rate")
axis.plot(years, model.predict(years) / width, label="mean of the rate")
if not real:
    axis.plot(years, rate(years), "k--", lw=1, label="truth")
axis.plot(events, np.zeros_like(events), "|", color="C3", ms=12, label="events")
axis.set(xlabel="year", ylabel="events a year")
axis.legend()

# %%
# The same by 40 inducing states: the fitted model is then a few matrices, not a site a bin.
sparse = StateSpaceGPRegressor(model.kernel_, likelihood="poisson", optimizer=None, n_inducing=40)
sparse.fit(X, counts)
apart = np.abs(sparse.latent_mean_and_variance(years)[0] - f).max()
lost = model.log_marginal_likelihood_value_ - sparse.log_marginal_likelihood_value_
print(f"40 inducing states: bound {lost:.2g} nats lower, log rate moved by at most {apart:.1e}")
plt.show()
