"""Peak memory of fits and predictions of all estimators beside their budget, at n = 1e5.

Run with ``pytest tests/benchmarks/bench_memory.py -m benchmark -s``, or one case with
``python -m tests.benchmarks.bench_memory QSGPRegressor 5e8 100000``. Every case has a process of
its own; the peak is of the resident memory, above what was resident when the fit or the prediction
began (imports and data; then also the model), as the Linux kernel counts it.
"""

import gc
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp

pytestmark = pytest.mark.benchmark
N, D = 100_000, 4
BUDGETS = [5e8, None]
#: What differs from the defaults: n^2 kernel values for each of some thousand products are beyond a
#: benchmark, so that the exact GPs keep the hyper-parameters that they are given.
SETTINGS = {
    "BayesianGPRegressor": {
        "kernel": 1.0 * RBF(np.ones(D)) + WhiteKernel(0.1),
        "optimizer": None,
    },
}
#: Beside the defaults, what other routes hold.
CASES = {
    **{name: {} for name in skgp.__all__ if name.endswith(("Regressor", "Classifier"))},
    **SETTINGS,
}
#: Resident memory that is no budget's: libraries and pools that the first large fit loads.
BESIDE = 1.5e8


def data(n):
    """Inputs (n, 4) and targets of some structure in every column, 10% of their variance noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (n, D))
    f = np.sin(2 * X[:, 0]) + X[:, 1] * np.cos(X[:, 2]) + 0.3 * X[:, 3]
    return X, f + 0.4 * rng.standard_normal(n)


def resident(name):
    """Bytes of VmRSS or VmHWM, the peak since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(name + ":")[1].split()[0])


def forget_peak():
    """Let the peak begin at what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measured(function):
    """Seconds of a call and its peak above what was resident before."""
    before, start = forget_peak(), time.perf_counter()
    function()
    return time.perf_counter() - start, resident("VmHWM") - before


def measure(name, budget, n):
    """Seconds and peaks, of a fit and of a prediction of all n rows."""
    estimator = getattr(skgp, name)
    X, y = data(n)
    if name.endswith("Classifier"):
        y = y > 0
    settings = {**CASES[name], "memory_budget": budget, "random_state": 0}
    warnings.simplefilter("ignore")
    few = slice(300)
    estimator(**settings).fit(X[few], y[few]).predict(X[few])  # loads what there is to load
    model = estimator(**settings)
    fit = measured(lambda: model.fit(X, y))
    method = model.predict_proba if name.endswith("Classifier") else model.predict
    options = {} if name.endswith("Classifier") else {"return_std": True}
    predict = measured(lambda: method(X, **options))
    return {"fit": fit, "predict": predict}


@pytest.mark.parametrize("budget", BUDGETS, ids=["5e8", "None"])
@pytest.mark.parametrize("name", CASES)
def test_bench_peak_of_fit_and_predict(name, budget):
    command = [sys.executable, "-m", "tests.benchmarks.bench_memory", name, str(budget), str(N)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    report(name, budget, N, found.items())
    for _, peak in found.values():
        assert budget is None or peak < budget + BESIDE


def report(name, budget, n, found):
    """Print a line of the table."""
    cells = [f"{call} {seconds:7.1f} s {peak / 1e6:7.0f} MB" for call, (seconds, peak) in found]
    print(f"{name:24s} n = {n}  budget {budget!s:>11s}  " + "   ".join(cells), file=sys.stderr)


if __name__ == "__main__":
    which, asked, size = sys.argv[1:4]
    outcome = measure(which, None if asked == "None" else float(asked), int(float(size)))
    report(which, asked, size, outcome.items())
    print(json.dumps(outcome))
