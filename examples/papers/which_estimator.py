"""Seconds of every estimator, by default, at a few sizes: the table of "Which estimator".

``python examples/papers/which_estimator.py [--sizes 100 1000 10000] [--only NAME ...]`` prints a
line for each estimator, number of columns d and of training points n: seconds of a processor to fit
and to predict 1000 others with standard deviations (classes: probabilities), and what these are
worth: RMSE over the standard deviation of y, or the share of wrong classes, and minus the mean log
predictive density. BayesianGPRegressor stops at 1000. The kernel is the default but for
GaussianProcess*, whose default is scikit-learn's: without noise, and fixed for classes.
"""

import argparse
import time
import warnings

import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp
from skgp.datasets import make_smooth

N_TEST = 1000
LARGEST = {"BayesianGPRegressor": 1000}
KERNELS = {
    "GaussianProcessRegressor": 1.0 * RBF() + WhiteKernel(0.1),
    "GaussianProcessClassifier": 1.0 * RBF(),
}


def problem(n, d, *, classes):
    """A smooth function of d columns with noise, and its sign for classes; n + 1000 points."""
    X, y = make_smooth(n + N_TEST, d, length_scale=0.5 * d**0.5, noise=0.3, random_state=0)
    return X, (y > np.median(y)).astype(int) if classes else y


def line(name, n, d):
    """Fit, predict, and say what it took."""
    classes = name.endswith("Classifier")
    X, y = problem(n, d, classes=classes)
    model = getattr(skgp, name)(KERNELS.get(name))
    if "random_state" in model.get_params():
        model.set_params(random_state=0)
    start = time.process_time()
    model.fit(X[:n], y[:n])
    fitted = time.process_time()
    if classes:
        wrong = np.mean(model.classes_[model.predict_proba(X[n:]).argmax(1)] != y[n:])
    else:
        mean, _ = model.predict(X[n:], return_std=True)
        wrong = np.sqrt(np.mean((mean - y[n:]) ** 2)) / y[n:].std()
    predicted = time.process_time()
    density = model.log_predictive_density(X[n:], y[n:]).mean()
    return (
        f"{name:<26} d={d} n={n:<7} fit {fitted - start:7.2f} s, predict {predicted - fitted:6.2f} "
        f"s, error {wrong:.3f}, NLPD {-density:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--columns", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    estimators = [name for name in skgp.__all__ if name.endswith(("Regressor", "Classifier"))]
    for name in options.only or estimators:
        for d in options.columns:
            for n in options.sizes:
                if n <= LARGEST.get(name, n):
                    print(line(name, n, d), flush=True)
