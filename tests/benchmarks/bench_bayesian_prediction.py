"""BayesianGPRegressor from `fit` to prediction: accuracy of its samples, and what they gain.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_bayesian_prediction.py -m benchmark -s``.
Seconds are the processor's. Data are read from the folder ``SKGP_DATA_DIR``, by default
``../shared/data`` beside the repository (``concrete.npz``, ``yacht.npz``, ``airfoil.npz``: X, y and
the published splits ``test_mask``); tests are skipped where they are absent. All of it takes about
half an hour; ``-k concrete`` selects a part.
"""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.preprocessing import scale

from skgp import BayesianGPRegressor
from tests.benchmarks.data import seconds_of, split_of

pytestmark = pytest.mark.benchmark

N_SPLITS = 10


def timed_fit(model, X, y):
    return seconds_of(lambda: model.fit(X, y))[1]


def rbf(n_length_scales):
    return ConstantKernel(1.0) * RBF(np.ones(n_length_scales)) + WhiteKernel(0.1)


@pytest.mark.parametrize(("n_length_scales", "most"), [(1, 0.05), (8, 0.10)])
def test_concrete_from_fit_against_a_long_run(n_length_scales, most):
    X, _, y, _ = split_of("concrete", 0)
    X = scale(X)  # one length scale for all columns asks for it
    model = BayesianGPRegressor(rbf(n_length_scales), random_state=0)
    seconds = timed_fit(model, X, y)
    long = clone(model).set_params(random_state=1, n_samples=30_000, min_ess=6000, n_keep=1)
    timed_fit(long, X, y)
    w, u = long.sample_weights_, long.posterior_samples_
    mean = w @ u
    sd = np.sqrt(w @ (u - mean) ** 2)
    found, weights = model.posterior_samples_, model.sample_weights_
    centre = weights @ found
    of_mean = np.abs(centre - mean) / sd
    of_sd = np.abs(np.sqrt(weights @ (found - centre) ** 2) / sd - 1)
    d = model.diagnostics_
    print(
        f"\n  concrete, n = {len(y)}, {n_length_scales} length scales: {seconds:.1f} s, ESS "
        f"{d['ess']:.0f}, Pareto k {d['pareto_k']:.2f}, {d['n_likelihoods']} likelihoods; mean "
        f"within {of_mean.max():.3f} sd, sd within {of_sd.max():.1%} of a run of ESS "
        f"{long.diagnostics_['ess']:.0f}"
    )
    assert d["ess"] >= 400 and d["pareto_k"] < 0.7
    assert of_mean.max() < most
    assert seconds < 30


def test_64_samples_predict_as_1000_do():
    X, X_test, y, _ = split_of("concrete", 0)
    few = BayesianGPRegressor(random_state=0)
    seconds = timed_fit(few, X, y)
    # The same samples: what is kept comes last from the random state.
    many = clone(few).set_params(n_keep=1000)
    timed_fit(many, X, y)
    mean, sd = many.predict(X_test, return_std=True)
    found = few.predict(X_test, return_std=True)
    of_mean = np.sqrt(np.mean(((found[0] - mean) / sd) ** 2))
    of_sd = np.sqrt(np.mean((found[1] / sd - 1) ** 2))
    print(
        f"\n  concrete, {few.kernel_}, fit {seconds:.1f} s: {few.n_kept_} samples against "
        f"{many.n_kept_} different ones of 1000: mean within {of_mean:.4f} sd (rms; most "
        f"{np.abs((found[0] - mean) / sd).max():.3f}), sd within {of_sd:.4f} (rms)"
    )
    assert of_mean < 0.03 and of_sd < 0.03


@pytest.mark.parametrize("name", ["yacht", "concrete", "airfoil"])
def test_mixture_against_the_optimum(name):
    rows = []
    for split in range(N_SPLITS):
        X, X_test, y, y_test = split_of(name, split)
        model = BayesianGPRegressor(random_state=0)
        seconds = timed_fit(model, X, y)
        plug_in = model.plug_in()
        density = [-m.log_predictive_density(X_test, y_test).mean() for m in (model, plug_in)]
        inside = []
        for m in (model, plug_in):
            lower, upper = m.predict_interval(X_test)
            inside.append(((y_test > lower) & (y_test < upper)).mean())
        error = np.sqrt(np.mean((model.predict(X_test) - y_test) ** 2)) / y_test.std()
        rows.append([*density, *inside, error, seconds, model.diagnostics_["converged"]])
    rows = np.array(rows, dtype=float)
    gain = rows[:, 1] - rows[:, 0]
    print(
        f"\n  {name}, {N_SPLITS} splits: NLPD {rows[:, 0].mean():.4f} mixture, "
        f"{rows[:, 1].mean():.4f} plug-in, gain {gain.mean():.4f} +- "
        f"{gain.std(ddof=1) / np.sqrt(N_SPLITS):.4f} nats, better on {(gain > 0).sum()}; 95% "
        f"intervals hold {rows[:, 2].mean():.1%} and {rows[:, 3].mean():.1%}; error "
        f"{rows[:, 4].mean():.4f} sd; {rows[:, 5].mean():.1f} s a fit, {int(rows[:, 6].sum())} "
        "converged"
    )
    assert gain.mean() > -0.01


def test_tiny_fit():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (40, 2))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(40)
    seconds = min(timed_fit(BayesianGPRegressor(random_state=0), X, y) for _ in range(5))
    print(f"\n  40 rows of 2 columns: {seconds:.3f} s")
    assert seconds < 0.2
