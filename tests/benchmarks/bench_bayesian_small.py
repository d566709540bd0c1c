"""BayesianGPRegressor on few points, whose posteriors are wide, skew and of several modes.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_bayesian_small.py -m benchmark -s``.
Seconds are the processor's. 60 sets of 10 and 16 points of a sine with a trend on [-4, 4], and
posteriors of c RBF(l) + noise by quadrature. About two minutes.
"""

import time
import warnings

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from skgp import BayesianGPRegressor
from tests.reference.hyperparameters import grid_posterior

pytestmark = pytest.mark.benchmark
KERNEL = ConstantKernel(1.0) * RBF(1.0) + WhiteKernel(0.1)
DATA = [(n, seed) for n in (10, 16) for seed in range(30)]


def sine_with_trend(n, seed):
    """Points (n, 1) on [-4, 4] and targets."""
    rng = np.random.default_rng(1000 * n + seed)
    X = rng.uniform(-4, 4, (n, 1))
    frequency, slope, noise = rng.uniform(0.8, 2.5), rng.normal(0, 0.4), rng.uniform(0.1, 0.5)
    return X, np.sin(frequency * X[:, 0]) + slope * X[:, 0] + noise * rng.standard_normal(n)


def fit(X, y, **params):
    """A fitted model, whether it warned, and the seconds."""
    model = BayesianGPRegressor(KERNEL, random_state=0, **params)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y)
    seconds = time.process_time() - start
    return model, any("may not stand for" in str(w.message) for w in caught), seconds


def sd_ratios(model, X, y):
    """Posterior standard deviations of the logarithms over those by quadrature, (3,)."""
    z = (y - model.y_mean_) / model.y_scale_
    w, u = model.sample_weights_, model.posterior_samples_
    sd = np.sqrt(w @ (u - w @ u) ** 2)
    return sd / grid_posterior(X, z, model.priors_).sd


@pytest.mark.parametrize("sampler", ["importance", "hmc"])
def test_no_spread_is_wrong_without_a_warning(sampler):
    ratios, warned, seconds = [], [], []
    sizes = {"hmc": DATA[::3]}.get(sampler, DATA)
    fit(*sine_with_trend(16, 0), sampler=sampler)  # what a process does once
    for n, seed in sizes:
        X, y = sine_with_trend(n, seed)
        model, warning, time_taken = fit(X, y, sampler=sampler)
        ratios.append(sd_ratios(model, X, y))
        warned.append(warning)
        seconds.append(time_taken)
    ratios, warned = np.array(ratios), np.array(warned)
    off = np.abs(ratios - 1).max(axis=1)
    silent = off[~warned]
    print(
        f"\n  {sampler}, {len(sizes)} sets: {warned.sum()} warned; ratio of posterior sd to "
        f"quadrature {ratios.min():.3f} to {ratios.max():.3f}; without a warning "
        f"{(silent > 0.15).sum()} off by more than 15%, {(silent > 0.1).sum()} by 10%, the worst "
        f"by {silent.max():.1%}; seconds in the median {np.median(seconds):.3f}, in all "
        f"{np.sum(seconds):.2f}"
    )
    assert (silent <= 0.15).all()


def test_seconds_of_hmc_against_importance_sampling():
    seconds = np.array(
        [
            [
                fit(*sine_with_trend(n, seed), sampler=sampler)[2]
                for sampler in ("importance", "hmc")
            ]
            for n, seed in DATA[::5]
        ]
    )
    ratio = seconds[:, 1] / seconds[:, 0]
    total = seconds.sum(axis=0)
    print(
        f"\n  HMC over importance sampling: {total[1]:.2f} s / {total[0]:.2f} s = "
        f"{total[1] / total[0]:.1f}; median ratio {np.median(ratio):.1f}, largest {ratio.max():.1f}"
    )
    assert np.median(ratio) <= 10 and total[1] <= 10 * total[0]


@pytest.mark.parametrize("n", [16, 60])
def test_seconds_against_scikit_learn(n):
    X, y = sine_with_trend(n, 0)
    models = {
        "scikit-learn": lambda: GaussianProcessRegressor(KERNEL, normalize_y=True),
        "this, the same kernel": lambda: BayesianGPRegressor(KERNEL, random_state=0),
        "this, default": lambda: BayesianGPRegressor(random_state=0),
        "this, optimum": lambda: BayesianGPRegressor(KERNEL, optimizer="map", random_state=0),
    }
    print()
    for name, make in models.items():
        times = []
        for _ in range(5):
            model, start = make(), time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit(X, y)
            times.append(time.process_time() - start)
        print(f"  n = {n}, {name}: {min(times):.4f} s")
