"""Data sets, splits, methods and scores of ``dlm.py``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _dlm_peers import mean_relative_error
from _runs import data_path
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, WhiteKernel
from sklearn.preprocessing import StandardScaler

Params = dict[str, Any]


class Task(NamedTuple):
    """What is learned, and from how many inducing points."""

    kind: str
    n_inducing: int


# Table 1 of the paper's supplement, but for kin40k, which is not among its data sets.
TASKS = {
    "pol": Task("regression", 100),
    "california": Task("regression", 206),
    "sarcos_testpart": Task("regression", 100),
    "kin40k": Task("regression", 200),
    "banana": Task("classification", 53),
    "thyroid": Task("classification", 37),
    "ringnorm": Task("classification", 74),
    "twonorm": Task("classification", 74),
    "abalone": Task("counts", 41),
}
SIZES = {
    "regression": (500, 1000, 2000, 4000, 8000),
    "classification": (200, 500, 1000, 2000),
    "counts": (200, 500, 1000, 2000),
}
LOSSES = {"regression": "MSE", "classification": "error", "counts": "MRE"}
METHODS: dict[str, Params] = {
    "elbo": {"objective": "elbo", "beta": 1.0},
    "beta-elbo": {"objective": "elbo", "beta": "auto"},
    "fitc": {"objective": "fitc"},
    "fixed-dlm": {"objective": "log_loss", "beta": "auto", "hyperparameters": "fixed"},
    "joint-dlm": {"objective": "log_loss", "beta": "auto", "hyperparameters": "joint"},
    "square-dlm": {"objective": "square_loss", "beta": "auto", "hyperparameters": "joint"},
}
REFERENCES = ("elbo", "beta-elbo", "fitc")
REGRESSION_ONLY = ("fitc", "square-dlm")
_GENERATED_ROWS = 7400  # as in the DELVE archive
_MOST_TEST_ROWS = 1000  # of classification and counts, as in the paper


class Part(NamedTuple):
    """One training subset and the test rows, inputs standardised by the former."""

    X_train: np.ndarray
    X_test: np.ndarray
    y_train: np.ndarray
    y_test: np.ndarray


def methods_for(data: str, methods: Sequence[str]) -> list[str]:
    """Those of the methods that the data set admits."""
    regression = TASKS[data].kind == "regression"
    return [name for name in methods if regression or name not in REGRESSION_ONLY]


def needs_file(data: str) -> bool:
    """Whether there is no generator to fall back on."""
    return data not in ("ringnorm", "twonorm")


def load_rows(folder: Path, data: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a data set: X (n, d) and y (n,), float64."""
    path = data_path(folder, data)
    if path.is_file():
        with np.load(path) as arrays:
            X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    else:
        from skgp import datasets

        generate = getattr(datasets, f"make_{data}")
        X, y = generate(_GENERATED_ROWS, random_state=0)
    # abalone: the first three columns are one factor (sex), of which the paper keeps two.
    return (X[:, 1:], y) if data == "abalone" else (X, y)


def n_test_rows(kind: str, n: int) -> int:
    """A quarter of the rows; of classification and counts at most 1000."""
    return n // 4 if kind == "regression" else min(n // 4, _MOST_TEST_ROWS)


def draw_part(folder: Path, data: str, size: int, repetition: int) -> Part:
    """Random test rows of a repetition, the same for all sizes, and the first `size` others."""
    X, y = load_rows(folder, data)
    order = np.random.default_rng(repetition).permutation(len(X))
    n_test = n_test_rows(TASKS[data].kind, len(X))
    test, train = order[:n_test], order[n_test : n_test + size]
    scaler = StandardScaler().fit(X[train])
    return Part(scaler.transform(X[train]), scaler.transform(X[test]), y[train], y[test])


def sizes_for(folder: Path, data: str, sizes: Sequence[int] | None) -> list[int]:
    """Training sizes, increasing; those above what is left of the test rows become that."""
    kind = TASKS[data].kind
    n = len(load_rows(folder, data)[1])
    available = n - n_test_rows(kind, n)
    return sorted({min(size, available) for size in sizes or SIZES[kind]})


def make_kernel(kind: str, n_features: int, ard: bool) -> Kernel:
    """RBF kernel for standardised inputs, isotropic or with a length scale for each column."""
    start = np.sqrt(n_features)
    shape = RBF(np.full(n_features, start) if ard else start, (1e-3, 1e4))
    kernel = ConstantKernel(1.0, (1e-4, 1e4)) * shape
    return kernel + WhiteKernel(0.1, (1e-6, 1e1)) if kind == "regression" else kernel


def make_estimator(data: str, n_features: int, ard: bool, seed: int, params: Params) -> Any:
    """The estimator of a data set, with the parameters of a method."""
    import skgp  # here, so that the parent process stays small

    kind, n_inducing = TASKS[data]
    common = {
        "kernel": make_kernel(kind, n_features, ard),
        "n_inducing": n_inducing,
        "random_state": seed,
        **params,
    }
    if kind == "classification":
        return skgp.DLMGPClassifier(**common)
    return skgp.DLMGPRegressor(likelihood="poisson" if kind == "counts" else "gaussian", **common)


def test_scores(model: Any, kind: str, part: Part) -> dict[str, float]:
    """Mean NLL of the test rows, nats, and the loss of :data:`LOSSES`; y standardised."""
    nll = -np.mean(model.log_predictive_density(part.X_test, part.y_test))
    predicted = model.predict(part.X_test)
    if kind == "classification":
        return {"nll": float(nll), "loss": float(np.mean(predicted != part.y_test))}
    if kind == "counts":
        return {"nll": float(nll), "loss": mean_relative_error(part.y_test, predicted)}
    scale = part.y_train.std()
    mse = np.mean((part.y_test - predicted) ** 2)
    # p(y) = p(z) / scale for z = (y - mean) / scale
    return {"nll": float(nll - np.log(scale)), "loss": float(mse / scale**2)}
