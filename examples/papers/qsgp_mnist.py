"""MNIST as in section 4 of Evans and Nair, "Quadruply stochastic Gaussian processes", 2020.

Odd against even digits, or all ten of them: each method is fitted to the 60000 training images in
a process of its own and scored on the 10000 others. Accuracy, mean negative log-probability, the
expected calibration error in 15 bins, seconds and peak memory are added to a CSV file and printed
beside the figures of the paper. Rows that the file already has are not computed again.

    python examples/papers/qsgp_mnist.py --data-dir FOLDER
    python examples/papers/qsgp_mnist.py --data-dir FOLDER --task digits --methods default svc mlp

FOLDER holds ``mnist.npz`` with ``X`` (70000, 784) uint8, ``y`` (70000,) and the boolean
``test_mask``, true for the test images. QSGPClassifier is given the pixels as they are, the
others the pixels divided by 255.

==================  ===============================================================================
method
==================  ===============================================================================
default             ``QSGPClassifier(random_state=0)``
inducing-8192       the same with 8192 inducing points
fourier-newton      4096 random Fourier features, Newton's method
fourier-probit      the same with the probit link
sgd-paper           theorem 3 with the paper's sizes: 1e6 Fourier features, of which an iteration
                    draws 20000, and 100 rows; AdaGrad, mean-field, ``"iid"`` frequencies
sgd                 the same with 400 rows and Newton directions from 200 support rows
sgd-hadamard        the latter with structured frequencies
svc, svc-platt      SVC with C = 10: without probabilities, and with Platt's sigmoid by 3 folds
mlp                 MLPClassifier, one layer of 256, early stopping
logistic            LogisticRegression
==================  ===============================================================================

The ``sgd`` methods stop after ``--max-seconds`` of fitting, the search for hyper-parameters
included, or after ``--max-iter`` iterations; learning rates fall to a tenth by then, so give as
many as the time allows. ``--n-basis 10000000`` is the paper's largest model. The paper's own fit
took 11.1 minutes on a GPU, and its probabilities are those at the posterior median of f: a
``moderation`` of 0. ``--limit-rows 3000`` tries the script out, on so many training rows and at
most as many test rows.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Results, Row, data_path, peak_gigabytes, some_rows, split_masks

SGD: dict[str, Any] = {
    "solver": "sgd",
    "basis": "fourier",
    "n_basis": 1_000_000,
    "basis_batch_size": 20_000,
    "batch_size": 400,
    "feature_map": "iid",
    "dtype": "float32",
}
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "inducing-8192": {"basis": "inducing", "n_basis": 8192},
    "fourier-newton": {"basis": "fourier", "solver": "newton", "n_basis": 4096},
    "fourier-probit": {
        "basis": "fourier",
        "solver": "newton",
        "n_basis": 4096,
        "likelihood": "probit",
    },
    # The paper does not state its learning rate; of .1, .03 and .01 the last did best.
    "sgd-paper": {**SGD, "batch_size": 100, "n_support": 0, "learning_rate": 0.01},
    "sgd": SGD,
    "sgd-hadamard": {**SGD, "feature_map": "hadamard"},
}
COMPETITORS = ("svc", "svc-platt", "mlp", "logistic")
DEFAULT_METHODS = {
    "odd-even": ["default", "inducing-8192", "fourier-newton", "sgd-paper", "sgd"],
    "digits": ["default", "svc", "svc-platt", "mlp", "logistic"],
}
# Accuracy, mean NLP, time.
PAPER = {
    "odd-even": {
        "paper, QSGP, m = 1e6": ("97.85%", "0.068", "666 s, GPU"),
        "paper, QSGP, m = 1e7": ("", "0.063", ""),
        "paper, SVGP (Hensman et al.)": ("97.8%", "0.069", ""),
    },
    "digits": {},
}
KEYS = ("task", "method", "limit_rows", "max_seconds", "params")
VALUES = (
    "n_train",
    "solver",
    "basis",
    "n_basis",
    "moderation",
    "n_iter",
    "iteration_ms",
    "accuracy",
    "nlp",
    "ece",
    "fit_seconds",
    "predict_seconds",
    "peak_gb",
)


def main() -> int:
    """Compute the rows that are missing, print the table; 1 if some fit failed."""
    args = parse_arguments()
    jobs = list(all_jobs(args))
    results = Results(args.csv, KEYS, VALUES)
    failed = results.compute(jobs, run, args.data_dir)
    print_table(args.task, [row for job in jobs if (row := results.find(job))])
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """What to fit, where the images are and where the rows go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of mnist.npz")
    parser.add_argument("--task", choices=list(DEFAULT_METHODS), default="odd-even")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *COMPETITORS])
    parser.add_argument("--max-seconds", type=float, default=600.0, help="of the sgd methods (600)")
    parser.add_argument("--max-iter", type=int, default=2000, help="of the sgd methods (2000)")
    parser.add_argument("--n-basis", type=int, help="of the sgd methods (1000000)")
    parser.add_argument("--limit-rows", type=int, help="training rows, to try the script out")
    parser.add_argument("--csv", type=Path, default=Path("results/qsgp_mnist.csv"))
    args = parser.parse_args()
    if not data_path(args.data_dir, "mnist").is_file():
        parser.error(f"--data-dir {args.data_dir} has no mnist.npz")
    return args


def all_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job a method."""
    for method in args.methods or DEFAULT_METHODS[args.task]:
        params = dict(METHODS.get(method, {}))
        stochastic = params.get("solver") == "sgd"
        if stochastic:
            params["max_iter"] = args.max_iter
            params["n_basis"] = args.n_basis or params["n_basis"]
        yield {
            "task": args.task,
            "method": method,
            "limit_rows": args.limit_rows,
            "max_seconds": args.max_seconds if stochastic else None,
            "params": json.dumps(params, sort_keys=True),
        }


def load(folder: Path, task: str, limit: int | None) -> list[np.ndarray]:
    """``X_train, X_test, y_train, y_test``."""
    with np.load(data_path(folder, "mnist")) as arrays:
        X, y = arrays["X"], arrays["y"]
        test = split_masks(arrays["test_mask"])[:, 0].astype(bool)
    if task == "odd-even":
        y = y % 2
    train_rows, test_rows = (
        np.flatnonzero(part)[some_rows(int(part.sum()), limit)] for part in (~test, test)
    )
    return [X[train_rows], X[test_rows], y[train_rows], y[test_rows]]


class Stopwatch:
    """A callback of ``sklearn.callback``: time of each iteration of the solver, and the end."""

    def __init__(self, max_seconds: float | None) -> None:
        self.max_seconds = np.inf if max_seconds is None else max_seconds
        self.begun = 0.0
        self.stamps: list[float] = []

    def setup(self, estimator, context) -> None:
        """The fit begins."""
        self.begun = time.perf_counter()

    def teardown(self, estimator, context) -> None:
        """The fit is over."""

    def on_fit_task_begin(self, estimator, context) -> None:
        """A stage or an iteration begins."""

    def on_fit_task_end(self, estimator, context) -> bool:
        """Whether to stop the stage."""
        if context.task_name != "iteration" or context.parent.task_name != "solve":
            return False
        self.stamps.append(time.perf_counter())
        return self.stamps[-1] - self.begun > self.max_seconds

    @property
    def iteration_ms(self) -> float:
        """Median time of an iteration."""
        return 1e3 * float(np.median(np.diff(self.stamps))) if len(self.stamps) > 1 else np.nan


def run(job: Row, folder: Path) -> Row:
    """Fit, predict once and score."""
    X_train, X_test, y_train, y_test = load(folder, job["task"], job["limit_rows"])
    watch = Stopwatch(job["max_seconds"])
    if job["method"] in COMPETITORS:
        X_train, X_test = X_train / 255, X_test / 255
        model = competitor(job["method"])
    else:
        from skgp import QSGPClassifier  # here, so that the parent process stays small

        model = QSGPClassifier(random_state=0, **json.loads(job["params"])).set_callbacks(watch)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "n_basis=.* exceeds")  # with --limit-rows
        model.fit(X_train, y_train)
    fitted = time.perf_counter()
    accuracy, nlp, ece = scores(model, X_test, y_test)
    return {
        "n_train": len(X_train),
        "solver": getattr(model, "solver_", ""),
        "basis": getattr(model, "basis_", ""),
        "n_basis": getattr(model, "n_basis_", ""),
        "moderation": getattr(model, "moderation_", ""),
        "n_iter": len(watch.stamps) or "",
        "iteration_ms": watch.iteration_ms,
        "accuracy": accuracy,
        "nlp": nlp,
        "ece": ece,
        "fit_seconds": fitted - start,
        "predict_seconds": time.perf_counter() - fitted,
        "peak_gb": peak_gigabytes(),
    }


def competitor(name: str):
    """A classifier of scikit-learn."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.svm import SVC

    svc = SVC(C=10.0, cache_size=1000)
    return {
        "svc": svc,
        "svc-platt": CalibratedClassifierCV(svc, cv=3, ensemble=False),
        "mlp": MLPClassifier((256,), early_stopping=True, random_state=0),
        "logistic": LogisticRegression(max_iter=500),
    }[name]


def scores(model, X: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Accuracy, mean negative log-probability and calibration error; NaN without probabilities."""
    from skgp.displays import expected_calibration_error

    if not hasattr(model, "predict_proba"):
        return float(np.mean(model.predict(X) == y)), np.nan, np.nan
    # One pass over the images: with 1e6 basis functions it takes minutes.
    log_proba = predict_log_proba(model, X)
    codes = np.searchsorted(model.classes_, y)
    accuracy = np.mean(log_proba.argmax(1) == codes)
    nlp = -np.mean(log_proba[np.arange(len(y)), codes])
    proba = np.exp(log_proba)
    column = proba[:, 1] if len(model.classes_) == 2 else proba
    ece = expected_calibration_error(y, column, labels=model.classes_)
    return float(accuracy), float(nlp), ece


def predict_log_proba(model, X: np.ndarray) -> np.ndarray:
    """Of a competitor, probabilities of 0 count as the least number above 0."""
    if hasattr(model, "predict_log_proba"):
        with np.errstate(divide="ignore"):
            log_proba = model.predict_log_proba(X)
    else:
        log_proba = np.log(np.maximum(model.predict_proba(X), np.finfo(float).tiny))
    return np.maximum(log_proba, np.log(np.finfo(float).tiny))


def print_table(task: str, rows: list[dict[str, str]]) -> None:
    """One line a method, then the paper's."""
    print(f"\nMNIST, {task}")
    print(
        f"  {'':<30}{'accuracy':>10}{'NLP':>9}{'ECE':>9}{'fit':>12}{'predict':>10}{'peak':>9}"
        f"{'iterations':>12}{'ms each':>9}"
    )
    for row in rows:
        detail = ""
        if row["basis"]:
            factor = float(row["moderation"])
            detail = f", {row['basis']} {row['n_basis']}, moderation {factor:.3g}"
        print(
            f"  {row['method']:<30}{float(row['accuracy']):>10.2%}{float(row['nlp']):>9.4f}"
            f"{float(row['ece']):>9.4f}{float(row['fit_seconds']):>10.1f} s"
            f"{float(row['predict_seconds']):>8.1f} s{float(row['peak_gb']):>6.2f} GB"
            f"{row['n_iter']:>12}{float(row['iteration_ms']):>9.0f}"
            f"  {row['n_train']} rows{detail}"
        )
    for name, (accuracy, nlp, seconds) in PAPER[task].items():
        print(f"  {name:<30}{accuracy:>10}{nlp:>9}{'':>9}{seconds:>12}")


if __name__ == "__main__":
    sys.exit(main())
