"""VecchiaGPRegressor of counts and heavy-tailed noise beside DLMGPRegressor.

::

    python -m tests.benchmarks.bench_vecchia_likelihoods counts 300 2000
    python -m tests.benchmarks.bench_vecchia_likelihoods exposed 300 2000
    python -m tests.benchmarks.bench_vecchia_likelihoods outliers 300 2000
    python -m tests.benchmarks.bench_vecchia_likelihoods columns 2000

Generated numbers in raw units: mean negative log density of 2000 held-out rows, in nats in the
units of y, error of the mean of f, coverage of 90% intervals, and processor seconds of a fit and
of the predictions. "counts" have two columns, "exposed" such with exposures of .2, 1 and 10,
"outliers" noise of standard deviation 6 of which 5% is 15 times as large, "student" t noise of 3
degrees of freedom, "columns" counts of eight columns, three of them without effect.
"""

import sys
import time

import numpy as np
import torch

from skgp import DLMGPRegressor, SWSGPRegressor, VecchiaGPRegressor

N_NEW, N_SEEDS = 2000, 3


def problem(kind, n, seed):
    """X (n, d), y (n,), exposures (n,) or None, and f (n,) on the scale of the likelihood's."""
    rng = np.random.default_rng(seed)
    n = n + N_NEW
    if kind == "columns":
        X = rng.random((n, 8))
        f = np.sin(4 * X[:, 0] * X[:, 1]) + np.cos(3 * X[:, 2]) + X[:, 3] ** 2 - X[:, 4]
    else:
        X = rng.random((n, 2))
        f = np.sin(6 * X[:, 0]) + np.cos(5 * X[:, 1] + 3 * X[:, 0])
        X = X * [1.0, 100.0]
    if kind in ("outliers", "student"):
        noise = 0.2 * rng.standard_normal(n)
        if kind == "student":
            noise = 0.2 * rng.standard_t(3, n)
        else:
            noise += np.where(rng.random(n) < 0.05, rng.normal(0, 3, n), 0.0)
        return X, 5 + 30 * (f + noise), None, 5 + 30 * f
    exposure = rng.choice([0.2, 1.0, 10.0], n) if kind == "exposed" else None
    rate = np.exp(0.5 + f) * (1.0 if exposure is None else exposure)
    return X, rng.poisson(rate).astype(float), exposure, 0.5 + f


def measured(make, kind, n, seed):
    """NLPD, error of f, coverage, seconds of fit and prediction."""
    X, y, exposure, f = problem(kind, n, seed)
    seen, new = (
        {} if exposure is None else {"exposure": exposure[rows]}
        for rows in (slice(None, n), slice(n, None))
    )
    model = make(kind)
    begin = time.process_time()
    model.fit(X[:n], y[:n], **seen)
    fitted = time.process_time()
    density = model.log_predictive_density(X[n:], y[n:], **new)
    predicted = time.process_time()
    lower, upper = model.predict_interval(X[n:], 0.9, **new)
    error = model.latent_mean_and_variance(X[n:])[0] - f[n:]
    inside = (lower <= y[n:]) & (y[n:] <= upper)
    seconds = fitted - begin, predicted - fitted
    return -density.mean(), np.sqrt(np.mean(error**2)), inside.mean(), *seconds


def likelihood(kind):
    return "student_t" if kind in ("outliers", "student") else "poisson"


MODELS = {
    "Vecchia": lambda kind: VecchiaGPRegressor(likelihood=likelihood(kind), random_state=0),
    "Vecchia, m = 0": lambda kind: VecchiaGPRegressor(
        likelihood=likelihood(kind), n_inducing=0, random_state=0
    ),
    "Vecchia, m = 400": lambda kind: VecchiaGPRegressor(
        likelihood=likelihood(kind), n_inducing=400, random_state=0
    ),
    "DLM": lambda kind: DLMGPRegressor(likelihood=likelihood(kind), random_state=0),
    "SWSGP": lambda kind: SWSGPRegressor(likelihood=likelihood(kind), random_state=0),
}


def main(kind, *sizes, names=("Vecchia", "DLM", "SWSGP")):
    torch.set_num_threads(1)
    for n in map(int, sizes):
        for name in names:
            found = [measured(MODELS[name], kind, n, seed) for seed in range(N_SEEDS)]
            nlpd = " ".join(f"{row[0]:.3f}" for row in found)
            rest = "  ".join(f"{value:.3f}" for value in np.mean(found, 0))
            print(f"{kind} n={n} {name}: {nlpd}; means {rest}", flush=True)


if __name__ == "__main__":
    chosen = [argument for argument in sys.argv[2:] if argument.isdigit()]
    given = [argument for argument in sys.argv[2:] if not argument.isdigit()]
    main(sys.argv[1], *chosen, **({"names": given} if given else {}))
