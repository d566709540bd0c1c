"""Seconds of a prediction of one row, beside scikit-learn's exact GP of the same training rows.

::

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_one_row

Optimisers that ask a model for one input at a time wait for what a call costs whatever its rows:
checks of inputs, threads, memory. A line an estimator: microseconds of the mean, of mean and
standard deviation, and of these with their gradients; the first decile of `REPEATS` calls, which
other processes leave alone. scikit-learn's has no gradients: in their place 2 d + 1 calls for the
mean and the standard deviation, as central differences would take.
"""

import time
import warnings

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor as Original
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import (
    BayesianGPRegressor,
    DLMGPRegressor,
    GaussianProcessRegressor,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPRegressor,
)

REPEATS = 400
ROWS = 200
ESTIMATORS = (
    GaussianProcessRegressor,
    QSGPRegressor,
    DLMGPRegressor,
    SWSGPRegressor,
    StateSpaceGPRegressor,
    BayesianGPRegressor,
)


def microseconds(call) -> float:
    """Time of a call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.quantile(times, 0.1))


def measure(model, n_columns: int) -> list[float]:
    """Of the mean, of both, and of both with gradients."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 4, (ROWS, n_columns))
    y = np.sin(2 * X).sum(1) + 0.1 * rng.standard_normal(ROWS)
    model.fit(X, y)
    row, given = rng.uniform(0, 4, (1, n_columns)), {"return_std": True}
    calls = [{}, given]
    if not isinstance(model, Original):
        calls.append({**given, "return_mean_grad": True, "return_std_grad": True})
    found = [microseconds(lambda kwargs=kwargs: model.predict(row, **kwargs)) for kwargs in calls]
    return found if len(found) == 3 else [*found, (2 * n_columns + 1) * found[1]]


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print(f"{'microseconds':28}{'mean':>8}{'and std':>9}{'and gradients':>15}{'of sklearn':>12}")
    for n_columns in (1, 2):
        kernel = 1.0 * RBF([1.0] * n_columns) + WhiteKernel(0.01)
        reference = measure(Original(kernel, optimizer=None), n_columns)
        lines = {"scikit-learn": reference}
        for cls in ESTIMATORS:
            if n_columns == 1 or cls is not StateSpaceGPRegressor:
                lines[cls.__name__] = measure(cls(kernel, optimizer=None), n_columns)
        for name, found in lines.items():
            ratios = " ".join(f"{a / b:.1f}" for a, b in zip(found[:2], reference[:2], strict=True))
            print(
                f"{name + f', d = {n_columns}':28}{found[0]:8.0f}{found[1]:9.0f}{found[2]:15.0f}"
                f"{ratios:>12}"
            )


if __name__ == "__main__":
    main()
