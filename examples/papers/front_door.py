"""What `GaussianProcessRegressor()` does, by default, of sets that scikit-learn's cannot fit.

``python examples/papers/front_door.py --data-dir FOLDER SET [SET ...]`` fits the first split of
each set (an .npz of X, y and test_mask) and prints the method, RMSE in units of the targets'
standard deviation, minus the mean log predictive density of standardised targets, the coverage of
95% intervals and seconds, those of the processors too: on a busy machine they are fewer.
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np

from skgp import GaussianProcessRegressor

#: Observations of the test set, at random, of more.
MOST_TESTED = 10_000


def evaluate(path, **options):
    """One line of the table; `options` are those of the estimator."""
    data = np.load(path)
    test = data["test_mask"][:, 0]
    tested = np.flatnonzero(test)
    if len(tested) > MOST_TESTED:
        tested = np.random.default_rng(0).choice(tested, MOST_TESTED, replace=False)
    X, y = data["X"].astype(float), data["y"].astype(float)
    y = (y - y[~test].mean()) / y[~test].std()
    start, processor = time.perf_counter(), time.process_time()
    model = GaussianProcessRegressor(random_state=0, **options)
    model.fit(X[~test], y[~test])
    fitted, processor = time.perf_counter(), time.process_time() - processor
    mean = model.predict(X[tested])
    predicted = time.perf_counter()
    density = model.log_predictive_density(X[tested], y[tested])
    low, high = model.predict_interval(X[tested])
    why = model.reason_, getattr(getattr(model, "estimator_", None), "reason_", "")
    return (
        f"{path.stem}: {(~test).sum()} rows, {model.method_} ({'; '.join(filter(None, why))}); "
        f"RMSE {np.sqrt(np.mean((mean - y[tested]) ** 2)):.3f}, NLPD {-density.mean():.3f}, "
        f"coverage {np.mean((low <= y[tested]) & (y[tested] <= high)):.3f}, "
        f"fit {fitted - start:.0f} s ({processor:.0f} s of processors), "
        f"predict {predicted - fitted:.1f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--memory-budget", type=float, default=None)
    parser.add_argument("--verbose", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.sets:
        path = options.data_dir / f"{name}.npz"
        common = {"memory_budget": options.memory_budget, "verbose": options.verbose}
        print(evaluate(path, **common), flush=True)
