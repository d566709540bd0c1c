"""1e7 rows of a memory map: seconds and peak memory of fit and predict, beyond the page cache.

Run with ``python tests/benchmarks/bench_large_n.py --rows 1e7 --budget 1e9``; with ``--fixed`` the
hyper-parameters are given and not learned from 60000 rows.
The files, X (n, 4) and y (n,) in float64, 400 MB, are written to ``--folder`` once and stay there.
Each case runs in a process of its own, in one thread, whose anonymous memory (``RssAnon``) is
sampled every 20 ms; "beyond" is its peak less what there was after the imports. "rss" is the most
resident memory, mapped pages of the files included, which the system drops when it wants them.
Without a budget, rows of 1e6 are held in memory: the other way to read ``ROW_COPIES``.
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

pytestmark = pytest.mark.benchmark

CASES = {
    "fourier": ("QSGPRegressor", {"basis": "fourier", "n_basis": 128, "solver": "cholesky"}),
    "sgd": ("QSGPRegressor", {"basis": "fourier", "n_basis": 500, "solver": "sgd"}),
    "inducing": ("QSGPRegressor", {"basis": "inducing", "n_basis": 128}),
    "series": ("StateSpaceGPRegressor", {"n_inducing": 1000}),
    "swsgp": ("SWSGPRegressor", {"n_inducing": 1000, "n_neighbors": 16, "polish": False}),
    "swsgp-adam": ("SWSGPRegressor", {"n_inducing": 1000, "n_neighbors": 16, "solver": "adam"}),
    "swsgp-labels": ("SWSGPClassifier", {"n_inducing": 1000, "n_neighbors": 16}),
    "swsgp-labels-adam": (
        "SWSGPClassifier",
        {"n_inducing": 1000, "n_neighbors": 16, "solver": "adam"},
    ),
    "newton-labels": ("QSGPClassifier", {"basis": "fourier", "n_basis": 256}),
    "sgd-labels": ("QSGPClassifier", {"basis": "fourier", "n_basis": 500, "solver": "sgd"}),
}


def files(folder, n, d):
    """Memory maps of X (n, d) and y (n,); of one column, X are rising times."""
    names = [Path(folder) / f"skgp_{kind}_{n}_{d}.npy" for kind in "Xy"]
    if not all(name.exists() for name in names):
        rng, step = np.random.default_rng(0), 10**6
        X = np.lib.format.open_memmap(names[0], "w+", np.float64, (n, d))
        y = np.lib.format.open_memmap(names[1], "w+", np.float64, (n,))
        for start in range(0, n, step):
            rows = slice(start, min(n, start + step))
            X[rows] = rng.uniform(-2, 2, X[rows].shape)
            if d == 1:
                X[rows, 0] = np.arange(rows.start, rows.stop) * (100 / n)
            y[rows] = np.sin(2 * X[rows]).sum(1) + 0.3 * rng.standard_normal(len(X[rows]))
    return [np.load(name, mmap_mode="r") for name in names]


class Peak:
    """Most of a field of /proc/self/status since it was made, in MB."""

    def __init__(self, field):
        self.field, self.most, self.done = field, 0.0, threading.Event()
        self.first = self.now()
        threading.Thread(target=self.watch, daemon=True).start()

    def now(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(li.split()[1]) / 1e3 for li in lines if li.startswith(self.field))

    def watch(self):
        while not self.done.wait(0.02):
            self.most = max(self.most, self.now())

    def __str__(self):
        self.done.set()
        return f"{self.most - self.first:5.0f} MB beyond {self.first:.0f}"


def one(case, n, budget, folder, learns=True, new=None):
    """Print seconds and memory of a case; `new` rows are predicted, or all."""
    import skgp

    name, settings = CASES[case]
    labels = name.endswith("Classifier")
    kernel = None if learns else RBF(1.0) if labels else RBF(1.0) + WhiteKernel(0.05)
    settings = settings | {"kernel": kernel, "optimizer": "auto" if learns else None}
    model = getattr(skgp, name)(random_state=0, **settings)
    X, y = files(folder, n, 1 if case == "series" else 4)
    if labels:
        y = np.greater(y, 0, out=np.empty(n, dtype=np.int8))
    model.set_params(memory_budget=budget, device="cpu")
    print(f"{name}, {settings}, n = {n:.0e}, memory_budget={budget}")

    def spread(X):
        return model.predict_proba(X) if labels else model.predict(X, return_std=True)

    def error(found, f):
        if labels:
            return f"classes other than the sign of f {np.mean(found != (f > 0)):.4f}"
        return f"rms error of f {np.mean((found - f) ** 2) ** 0.5:.4f}"

    for step, run in (
        ("fit", lambda: model.fit(X, y)),
        ("predict", lambda: model.predict(X if new is None else X[:new])),
        ("proba" if labels else "predict, std", lambda: spread(X[: n // 10])),
    ):
        anonymous, resident, start = Peak("RssAnon"), Peak("VmHWM"), time.perf_counter()
        found = run()
        print(
            f"    {step:12} {time.perf_counter() - start:7.1f} s   {anonymous} (anonymous), "
            f"{resident.now():.0f} MB rss",
            flush=True,
        )
        if step == "predict":
            f = np.sin(2 * X[: len(found) : 97]).sum(1)
            print(f"    {error(found[::97], f)}; {model.kernel_}", flush=True)


@pytest.mark.parametrize("case", CASES)
def test_bench_rows_of_a_memory_map(case, tmp_path):
    one(case, 10**5, 1e7, tmp_path, learns=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--fixed", action="store_true", help="hyper-parameters are not learned")
    parser.add_argument("--new", type=float, help="rows to predict, all by default")
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    asked = parser.parse_args()
    if len(asked.cases) == 1:
        rows, new = int(asked.rows), asked.new and int(asked.new)
        one(asked.cases[0], rows, asked.budget or None, asked.folder, not asked.fixed, new)
    else:
        for case in asked.cases:
            rest = ["--rows", str(asked.rows), "--budget", str(asked.budget)]
            rest += ["--folder", asked.folder] + ["--fixed"] * asked.fixed
            rest += ["--new", str(asked.new)] if asked.new else []
            command = [sys.executable, __file__, case, *rest]
            subprocess.run(command, check=True)
