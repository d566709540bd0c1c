"""Default fits without and with what the data may choose: powers of columns, noise that varies.

Run with ``python -m tests.benchmarks.bench_choices PARAMETER N SPLITS ESTIMATOR SET [SET ...]``,
PARAMETER being ``warp_inputs`` or ``heteroscedastic``, False and then "auto": fits to N training
rows at random of each of the first SPLITS splits, and up to 3000 test rows. A line a split says
error and mean negative log density, of numbers over the standard deviation of the training targets,
coverage of 95% intervals, and seconds of the processor; labels are those of the set, or a target
above its median ("house_8L>").
"""

import sys

import numpy as np

import skgp
from tests.benchmarks.data import seconds_of, split_of


def problem(name, n, split):
    """Training rows and targets, and test rows and targets."""
    X, X_test, y, y_test = split_of(name.rstrip(">"), split)
    rows = np.random.default_rng(split).permutation(len(X))
    if name.endswith(">"):
        y, y_test = (each > np.median(y[rows[:n]]) for each in (y, y_test))
    kept, test = rows[:n], np.random.default_rng(split).permutation(len(X_test))[:3000]
    return X[kept], y[kept], X_test[test], y_test[test]


def figures(model, X, y, scale):
    """Error, or share of wrong labels, mean negative log density, and of numbers the coverage."""
    found, density = model.predict(X), model.log_predictive_density(X, y)
    if hasattr(model, "classes_"):
        return np.mean(found != y), -density.mean()
    low, high = model.predict_interval(X, 0.95)
    error = np.sqrt(np.mean((found - y) ** 2)) / scale
    return error, -density.mean() - np.log(scale), np.mean((y >= low) & (y <= high))


def main(parameter, n, splits, estimator, *names):
    """Print a line a split."""
    for name in names:
        for split in range(int(splits)):
            X, y, X_test, y_test = problem(name, int(n), split)
            line = f"{name} {split} {estimator} {len(X)}:"
            for value in (False, "auto"):
                model = getattr(skgp, estimator)(random_state=0, **{parameter: value})
                _, seconds = seconds_of(lambda model=model: model.fit(X, y))  # noqa: B023
                found = figures(model, X_test, y_test, np.std(y))
                line += f" {value}" + "".join(f" {each:.3f}" for each in found)
                line += f" {seconds:.1f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
