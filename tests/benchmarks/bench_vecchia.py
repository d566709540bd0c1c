"""VecchiaGPRegressor beside GPBoost, Matern 3/2, by Vecchia and full-scale approximations.

Run with ``python -m tests.benchmarks.bench_vecchia SET [METHOD ...] [n_neighbors=..]``: METHODs are
"skgp", "vecchia" (GPBoost's, 20 neighbours) and "full_scale_vecchia" (GPBoost's, 500 inducing
points and its default of 30 neighbours), all three unless some are named; options are of skgp.
SET is a name of `split_of`, or "generated" for a million places and 20,000 to predict.
Errors and negative log densities are of targets of standard deviation 1, seconds are of the
processor, in one thread. Each is fitted in a process of its own, which ends after `MOST_SECONDS`
seconds of the processor.
"""

import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy as np

from skgp import VecchiaGPRegressor
from tests.benchmarks.data import seconds_of, split_of

GPBOOST = {
    "vecchia": {"num_neighbors": 20},
    "full_scale_vecchia": {"num_ind_points": 500},
}
MOST_SECONDS = 480


def generated(n=1_000_000, n_test=20_000, n_waves=2000, length_scale=0.1, noise=0.1):
    """X, X_test, y and y_test in the unit square: a draw of Matern 3/2 by waves, with noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (n + n_test, 2))
    w = rng.standard_normal((2, n_waves)) / length_scale
    w /= np.sqrt(rng.chisquare(3, n_waves) / 3)  # the spectrum is a Student-t density
    phase = rng.uniform(0, 2 * np.pi, n_waves)
    tiles = np.array_split(X, len(X) // 20_000)
    f = np.concatenate([np.cos(tile @ w + phase).sum(1) for tile in tiles]) * (2 / n_waves) ** 0.5
    y = f + noise * rng.standard_normal(len(X))
    return X[:n], X[n:], y[:n], y[n:]


def load(name):
    """X, X_test, y and y_test of the first split; the targets in standard units."""
    X, X_test, y, y_test = generated() if name == "generated" else split_of(name)
    mean, std = y.mean(), y.std()
    return X, X_test, (y - mean) / std, (y_test - mean) / std


def by_skgp(X, y, X_test, **options):
    """Mean and variance of y, what was learned, and seconds of fit and prediction."""
    model = VecchiaGPRegressor(random_state=0, n_jobs=1, **options)
    fit = seconds_of(lambda: model.fit(X, y))[1]
    (mean, std), predict = seconds_of(lambda: model.predict(X_test, return_std=True))
    learned = f"{model.kernel_}, {model.n_inducing_} inducing points"
    return mean, std**2, learned, fit, predict


def by_gpboost(X, y, X_test, method):
    """The same; length scales of each column where they are not those of a map."""
    import gpboost

    scale = X.std(0) if X.shape[1] > 2 else np.ones(X.shape[1])
    scale[scale == 0] = 1.0
    model = gpboost.GPModel(
        gp_coords=X / scale,
        cov_function="matern_ard" if X.shape[1] > 2 else "matern",
        cov_fct_shape=1.5,
        gp_approx=method,
        seed=1,
        num_parallel_threads=1,
        **GPBOOST[method],
    )
    fit = seconds_of(lambda: model.fit(y=y))[1]
    x = X_test / scale
    found, predict = seconds_of(lambda: model.predict(gp_coords_pred=x, predict_var=True))
    return found["mu"], found["var"], model.get_cov_pars().to_dict("records"), fit, predict


def run(name, method, given):
    """Print the lines of one method."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    X, X_test, y, y_test = load(name)
    if method == "skgp":
        found = by_skgp(X, y, X_test, **given)
    else:
        found = by_gpboost(X, y, X_test, method)
    mean, var, learned, fit, predict = found
    error = y_test - mean
    nlpd = 0.5 * (np.log(2 * np.pi * var) + error**2 / var).mean()
    covered = np.mean(np.abs(error) < 1.96 * np.sqrt(var))
    print(
        f"{name} {method} {given or ''}: RMSE {np.sqrt((error**2).mean()):.4f}, NLPD {nlpd:.4f}, "
        f"coverage {covered:.1%}, fit {fit:.1f} s, {len(y_test)} predictions {predict:.1f} s\n"
        f"    {learned}; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB",
        flush=True,
    )


def main(name, *arguments):
    """The methods named, one after another."""
    options = [option.split("=") for option in arguments if "=" in option]
    given = {key: int(value) for key, value in options}
    for method in [each for each in arguments if "=" not in each] or ["skgp", *GPBOOST]:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                pool.submit(run, name, method, given if method == "skgp" else {}).result()
            except BrokenProcessPool:
                print(f"{name} {method}: ended at {MOST_SECONDS} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
