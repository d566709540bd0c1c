"""Default fits with the columns as they are and with powers of them, where these are chosen.

Run with ``python -m tests.benchmarks.bench_warping N SPLITS ESTIMATOR SET [SET ...]``: fits to N
training rows at random of each of the first SPLITS splits, and up to 3000 test rows. Errors are
relative to the standard deviation of the training targets; labels are those of the set, or a target
above its median ("house_8L>").
"""

import sys

import numpy as np

import skgp
from tests.benchmarks.data import split_of


def problem(name, n, split):
    """Training rows and targets, and test rows and targets."""
    X, X_test, y, y_test = split_of(name.rstrip(">"), split)
    rows = np.random.default_rng(split).permutation(len(X))
    if name.endswith(">"):
        y, y_test = (each > np.median(y[rows[:n]]) for each in (y, y_test))
    kept, test = rows[:n], np.random.default_rng(split).permutation(len(X_test))[:3000]
    return X[kept], y[kept], X_test[test], y_test[test]


def losses(model, X, y):
    """Error, or share of wrong labels, and mean negative log density of observations."""
    found, density = model.predict(X), model.log_predictive_density(X, y)
    if hasattr(model, "classes_"):
        return np.mean(found != y), -density.mean()
    scale = model.spread
    return np.sqrt(np.mean((found - y) ** 2)) / scale, -density.mean() - np.log(scale)


def main(n, splits, estimator, *names):
    """Print a line a split."""
    for name in names:
        for split in range(int(splits)):
            X, y, X_test, y_test = problem(name, int(n), split)
            line = f"{name} {split} {estimator} {len(X)}:"
            for warp in (False, "auto"):
                model = getattr(skgp, estimator)(random_state=0, warp_inputs=warp).fit(X, y)
                model.spread = np.std(y)
                if warp and model.input_powers_ is None:
                    line += " as they are"
                    break
                error, density = losses(model, X_test, y_test)
                line += f" {'powers' if warp else 'columns'} {error:.3f} {density:.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
