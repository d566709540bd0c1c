"""The posterior of the hyper-parameters by Vecchia's likelihood: house_8L and kin40k, whole.

Run as ``OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_bayesian_vecchia DATA [LONGER [JOBS]]``,
or with ``pytest tests/benchmarks/bench_bayesian_vecchia.py -m benchmark -s``. Data are in
``SKGP_DATA_DIR``, by default ``../shared/data`` beside the repository. Training rows of the first
split, inputs standardised (of house_8L log(1 + y)), Matern 3/2 with one length scale a column and
default priors. Seconds are the processor's, of one process, and of sampling the clock's, too:

1. the target (neighbours, mode, curvature) and samples to an effective number of 400,
2. the same density sampled to `LONGER` times as many with other random numbers: how far, in its
   standard deviations, the means and, relatively, the standard deviations of the first are off,
3. predictions of test rows: mixture, its optimum alone, and `VecchiaGPRegressor` as it comes.
"""

import sys
import time

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import VecchiaGPRegressor
from skgp.data import merge_replicates
from skgp.inference.gp_mixture import mixture_log_density, mixture_quantiles
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import approximate
from skgp.learning.posterior.priors import default_priors
from skgp.learning.posterior.samples import resolve_plan
from skgp.learning.posterior.sampling import sample_by_density
from skgp.models.bayesian import predictive_mixture
from tests.benchmarks.data import arrays_of

pytestmark = pytest.mark.benchmark

LEVELS = np.array([0.025, 0.975])


def rows(name):
    """Training and test rows, standardised."""
    arrays = arrays_of(name)
    test = arrays["test_mask"][:, 0]
    X, y = arrays["X"].astype(float), arrays["y"].astype(float)
    y = np.log1p(y) if name == "house_8L" else y
    X = (X - X[~test].mean(0)) / X[~test].std(0)
    y = (y - y[~test].mean()) / y[~test].std()
    return X[~test], y[~test], X[test], y[test]


class Clock:
    """Seconds of the processor since the last question."""

    def __init__(self):
        self.start = time.process_time()

    def __call__(self):
        before, self.start = self.start, time.process_time()
        return self.start - before


def moments(samples):
    return samples.mean(), np.sqrt(samples.covariance().diagonal())


def tell(what, y, mean, log_density, bounds, seconds):
    inside = np.mean((y >= bounds[:, 0]) & (y <= bounds[:, 1]))
    print(
        f"  {what}: RMSE {np.sqrt(np.mean((mean - y) ** 2)):.4f}, NLPD {-log_density.mean():.4f}, "
        f"95% intervals hold {inside:.1%}; {seconds:.0f} s",
        flush=True,
    )


def tell_mixture(what, state, X, y, clock):
    mean, var = state.component_moments(X)
    var = var + state.noise[:, None]
    density = mixture_log_density(state.weights, mean, var, y)
    bounds = mixture_quantiles(state.weights, mean, var, LEVELS)
    tell(f"{what}, {state.n_samples} samples", y, state.weights @ mean, density, bounds, clock())


def run(name, longer=4, n_jobs=1):
    torch.set_num_threads(1)
    X, y, X_test, y_test = rows(name)
    kernel = 1.0 * Matern([2.0] * X.shape[1], nu=1.5) + WhiteKernel(0.1)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    print(f"\n{name}: {len(X)} rows, {len(data)} distinct", flush=True)
    clock = Clock()
    exact = LogPosterior(kernel, data, default_priors(kernel, X, y))
    target, modes = approximate(exact, rng=np.random.default_rng(0))
    print(
        f"  mode and curvature: {clock():.0f} s, {modes[0].n_gradients} gradients, "
        f"{len(target.evidence.Z)} inducing points",
        flush=True,
    )
    began, options = time.perf_counter(), {"modes": modes, "n_jobs": n_jobs}
    samples = sample_by_density(target, rng=np.random.default_rng(1), **options)
    d, wall = samples.diagnostics, time.perf_counter() - began
    print(
        f"  {d['n_likelihoods']} densities: {clock():.0f} s, {wall:.0f} s of the clock with "
        f"{n_jobs} jobs, ESS {d['ess']:.0f}, of spreads "
        f"{d['ess_spread']:.0f}, Pareto k {d['pareto_k']:.2f}, {d['problems'] or 'converged'}",
        flush=True,
    )
    plan, rng = resolve_plan("vecchia", "auto", len(data)), np.random.default_rng(2)
    state = predictive_mixture(
        kernel, data, samples, "auto", plan, rng, evidence=target.evidence, double=True, rank="auto"
    )
    print(f"  {state._Z.shape[0]} inducing points: {clock():.0f} s", flush=True)
    tell_mixture("mixture", state, X_test, y_test, clock)
    tell_mixture("optimum", state.at(kernel, samples.map_), X_test, y_test, clock)
    if not longer:
        return
    mean, sd = moments(samples)
    clock()
    found = sample_by_density(
        target, rng=np.random.default_rng(3), target_ess=400 * longer, **options
    )
    long_mean, long_sd = moments(found)
    print(
        f"  {found.diagnostics['n_likelihoods']} densities more: {clock():.0f} s, "
        f"ESS {found.diagnostics['ess']:.0f}; means off by "
        f"{np.abs((mean - long_mean) / long_sd).max():.3f} sd, standard deviations by "
        f"{np.abs(sd / long_sd - 1).max():.1%}",
        flush=True,
    )


def run_point_estimate(name):
    torch.set_num_threads(1)
    X, y, X_test, y_test = rows(name)
    clock = Clock()
    model = VecchiaGPRegressor(random_state=0).fit(X, y)
    print(f"\n{name}: {model.kernel_}, {model.n_inducing_} inducing points", flush=True)
    density = model.log_predictive_density(X_test, y_test)
    bounds = model.predict_quantiles(X_test, LEVELS)
    tell("VecchiaGPRegressor", y_test, model.predict(X_test), density, bounds, clock())


@pytest.mark.parametrize("name", ["house_8L", "kin40k"])
def test_posterior_of_all_rows(name):
    run(name)
    run_point_estimate(name)


if __name__ == "__main__":
    if sys.argv[2:] == ["point"]:
        run_point_estimate(sys.argv[1])
    else:
        run(sys.argv[1], *map(int, sys.argv[2:]))
