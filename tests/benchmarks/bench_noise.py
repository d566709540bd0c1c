"""Default fits with constant noise and with noise that may depend on x, where that is chosen.

Run with ``python -m tests.benchmarks.bench_noise N SPLITS ESTIMATOR SET [SET ...]``: a line a
split, as of :mod:`tests.benchmarks.bench_warping`, with the coverage of 95% intervals. Errors are
those of constant noise, by construction.
"""

import sys
import time

import numpy as np

import skgp
from tests.benchmarks.bench_warping import losses, problem


def main(n, splits, estimator, *names):
    """Print a line a split."""
    for name in names:
        for split in range(int(splits)):
            X, y, X_test, y_test = problem(name, int(n), split)
            line = f"{name} {split} {estimator} {len(X)}:"
            for varies in (False, "auto"):
                start = time.perf_counter()
                model = getattr(skgp, estimator)(random_state=0, heteroscedastic=varies).fit(X, y)
                seconds = time.perf_counter() - start
                model.spread = np.std(y)
                error, density = losses(model, X_test, y_test)
                low, high = model.predict_interval(X_test, 0.95)
                covered = np.mean((y_test >= low) & (y_test <= high))
                constant = np.ptp(model.predict_noise_variance(X_test)) == 0
                line += f" {'constant' if constant else 'varying'} {error:.3f} {density:.3f}"
                line += f" {covered:.3f} {seconds:.1f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
