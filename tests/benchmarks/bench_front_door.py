"""GaussianProcessRegressor beside scikit-learn's: seconds of a fit and of predictions, and optima.

Run with ``pytest tests/benchmarks/bench_front_door.py -m benchmark -s``, or as a program with sizes
as arguments. Seconds are of the processor (`time.process_time`), medians of fits that alternate. Of
3000 rows, where scikit-learn's search takes ten minutes, both take a few iterations of one and the
same optimiser. The whole takes about twenty minutes of one processor.
"""

import sys
import time
import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor as Original
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import GaussianProcessRegressor

pytestmark = pytest.mark.benchmark
D, N_NEW, NOISE = 4, 1000, 0.1
#: Repetitions by size; beyond the last, scikit-learn's is left out.
SIZES = {50: 7, 200: 5, 1000: 3, 3000: 1}
#: Rows from which the search is cut short, and its iterations.
LONG, ITERATIONS = 3000, 3
LARGE = (10_000, 100_000)
KERNELS = {
    "RBF, a scale a column": 1.0 * RBF(np.ones(D)) + WhiteKernel(0.1),
    "Matern 3/2": 1.0 * Matern(nu=1.5) + WhiteKernel(0.1),
}


def data(n):
    """X (n, 4), y (n,), and new rows."""
    rng = np.random.default_rng(0)
    X, X_new = rng.uniform(-2, 2, (n, D)), rng.uniform(-2, 2, (N_NEW, D))
    return X, data_mean(X) + NOISE * rng.standard_normal(n), X_new


def few_iterations(objective, theta, bounds):
    """What both classes take for an optimizer: some iterations of L-BFGS-B."""
    options = {"maxiter": ITERATIONS}
    found = minimize(objective, theta, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return found.x, found.fun


def seconds(model, X, y, X_new):
    """Of the fit, of means, and of standard deviations with them."""
    clock = [time.process_time()]
    for step in (
        lambda: model.fit(X, y),
        lambda: model.predict(X_new),
        lambda: model.predict(X_new, return_std=True),
    ):
        step()
        clock.append(time.process_time())
    return np.diff(clock)


def compare(n, kernel, rounds):
    """Median seconds of scikit-learn's and ours (3,), and how much greater our optimum is."""
    X, y, X_new = data(n)
    optimizer = few_iterations if n >= LONG else "fmin_l_bfgs_b"
    theirs = Original(kernel, optimizer=optimizer)
    ours = GaussianProcessRegressor(kernel, optimizer=optimizer, method="exact")
    times = np.array([[seconds(m, X, y, X_new) for m in (theirs, ours)] for _ in range(rounds)])
    at = [theirs.log_marginal_likelihood(m.kernel_.theta) for m in (theirs, ours)]
    return *np.median(times, axis=0), at[1] - at[0]


def show(sizes):
    """Print a line a size and kernel."""
    warnings.simplefilter("ignore")
    for n in sizes:
        for name, kernel in KERNELS.items():
            if n in SIZES:
                theirs, ours, gained = compare(n, kernel, SIZES[n])
                print(
                    f"{n} rows, {name}: fit, mean, mean and std in ms: scikit-learn "
                    f"{1e3 * theirs.round(5)}, skgp {1e3 * ours.round(5)}, ratios "
                    f"{(ours / theirs).round(2)}, of all {ours.sum() / theirs.sum():.2f}; "
                    f"optimum {gained:+.1e} nats",
                    flush=True,
                )
                yield ours, theirs, gained
            else:
                print(f"{n} rows, {name}:", alone(n, kernel), flush=True)


def alone(n, kernel):
    """What ours takes and predicts where scikit-learn's cannot; the density at the true f."""
    X, y, X_new = data(n)
    model = GaussianProcessRegressor(kernel, random_state=0)
    taken, f = seconds(model, X, y, X_new).round(2), data_mean(X_new)
    y_new = f + NOISE * np.random.default_rng(1).standard_normal(N_NEW)
    error, (low, high) = model.predict(X_new) - f, model.predict_interval(X_new)
    nlpd = -model.log_predictive_density(X_new, y_new).mean()
    return (
        f"{model.method_}, {taken} s, RMSE of f {np.sqrt(np.mean(error**2)):.4f}, NLPD {nlpd:.3f} "
        f"(at the true f {-norm.logpdf(y_new, f, NOISE).mean():.3f}), coverage of 95% intervals "
        f"{np.mean((low <= y_new) & (y_new <= high)):.3f}"
    )


def data_mean(X):
    """What `data` adds noise to."""
    return np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]


def test_bench_front_door():
    for ours, theirs, gained in show([*SIZES, *LARGE]):
        assert gained > -1e-3 and ours.sum() < 0.8 * theirs.sum()


if __name__ == "__main__":
    list(show(map(int, sys.argv[1:])))
