"""VecchiaGPRegressor beside GPBoost (``gp_approx="vecchia"``, 20 neighbours, Matern 3/2).

Run with ``python -m tests.benchmarks.bench_vecchia SET [skgp or gpboost] [n_neighbors=..]``: errors
and negative log densities are of targets of standard deviation 1, seconds are of the processor, in
one thread.
"""

import sys

import numpy as np

from skgp import VecchiaGPRegressor
from tests.benchmarks.data import seconds_of, split_of


def load(name):
    """X, X_test, y and y_test of the first split; the targets in standard units."""
    X, X_test, y, y_test = split_of(name)
    mean, std = y.mean(), y.std()
    return X, X_test, (y - mean) / std, (y_test - mean) / std


def by_skgp(X, y, X_test, **options):
    """Mean and variance of y, what was learned, and seconds of fit and prediction."""
    model = VecchiaGPRegressor(random_state=0, n_jobs=1, **options)
    fit = seconds_of(lambda: model.fit(X, y))[1]
    (mean, std), predict = seconds_of(lambda: model.predict(X_test, return_std=True))
    return mean, std**2, model.kernel_, fit, predict


def by_gpboost(X, y, X_test):
    """The same; length scales of each column where they are not those of a map."""
    import gpboost

    scale = X.std(0) if X.shape[1] > 2 else np.ones(X.shape[1])
    scale[scale == 0] = 1.0
    model = gpboost.GPModel(
        gp_coords=X / scale,
        cov_function="matern_ard" if X.shape[1] > 2 else "matern",
        cov_fct_shape=1.5,
        gp_approx="vecchia",
        num_neighbors=20,
        seed=1,
        num_parallel_threads=1,
    )
    fit = seconds_of(lambda: model.fit(y=y))[1]
    x = X_test / scale
    found, predict = seconds_of(lambda: model.predict(gp_coords_pred=x, predict_var=True))
    return found["mu"], found["var"], model.get_cov_pars().to_dict("records"), fit, predict


def main(name, peer="skgp", *options):
    """Print one line."""
    X, X_test, y, y_test = load(name)
    run = {"skgp": by_skgp, "gpboost": by_gpboost}[peer]
    given = {key: int(value) for key, value in (option.split("=") for option in options)}
    mean, var, learned, fit, predict = run(X, y, X_test, **given)
    error = y_test - mean
    nlpd = 0.5 * (np.log(2 * np.pi * var) + error**2 / var).mean()
    covered = np.mean(np.abs(error) < 1.96 * np.sqrt(var))
    print(
        f"{name} {peer} {given or ''}: RMSE {np.sqrt((error**2).mean()):.4f}, NLPD {nlpd:.4f}, "
        f"coverage {covered:.1%}, fit {fit:.1f} s, {len(y_test)} predictions {predict:.1f} s"
    )
    print(f"    {learned}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
