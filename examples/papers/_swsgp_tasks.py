"""Data sets, models and fits of ``swsgp.py``."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _runs import data_path, peak_gigabytes
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern, WhiteKernel
from sklearn.preprocessing import StandardScaler

Params = dict[str, Any]
Row = dict[str, Any]
NEIGHBORS = (4, 8, 16)
KINDS = {
    "powerplant": "regression",
    "protein": "regression",
    "kin40k": "regression",
    "spambase": "classification",
    "german": "classification",
    "mnist": "classification",
    "flights_nyc13": "classification",
}
LOSSES = {"regression": "RMSE", "classification": "error"}
#: Of figure 5.
BATCHES = (4, 16, 64, 256)
_TIMED_ROWS = 1000  # predicted to time a row


class Part(NamedTuple):
    """One split, inputs standardised by the training rows (pixels: divided by 255)."""

    X_train: np.ndarray
    X_test: np.ndarray
    y_train: np.ndarray
    y_test: np.ndarray

    @property
    def scale(self) -> float:
        """Standard deviation of the training targets."""
        return float(self.y_train.std())


class SweepClock:
    """A callback of scikit-learn that notes when the iterations of the posterior end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def setup(self, estimator, context) -> None:
        """Nothing to do."""

    def teardown(self, estimator, context) -> None:
        """Nothing to do."""

    def on_fit_task_begin(self, estimator, context, **ignored) -> None:
        if context.task_name == "solve":
            self.ends = []

    def on_fit_task_end(self, estimator, context, **ignored) -> bool:
        if context.task_name == "iteration":
            self.ends.append(time.process_time())
        return False

    def seconds(self, model: Any) -> float:
        """Median of a step of the last solver, without its first, which sets up.

        Algorithm 1 tells of every tenth of its steps only.
        """
        history = model.history_
        earlier = len(history["prior"]) + len(history["solve"]) - model.n_iter_
        ends = self.ends[earlier:]
        if len(ends) < 2:
            return np.nan
        return float(np.median(np.diff(ends))) / max(1, round(model.n_iter_ / len(ends)))


def draw_part(folder: Path, data: str, repetition: int, limit: int | None = None) -> Part:
    """The split of a repetition; at most `limit` training rows and as many test rows."""
    with np.load(data_path(folder, data)) as arrays:
        X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
        masks = arrays["test_mask"]
    if data == "mnist":
        y = y % 2  # odd or even
    elif data == "flights_nyc13":
        y = (y > 0).astype(np.float64)  # delayed or not
    elif data == "spambase":
        X = np.log1p(X)  # counts and rates with heavy tails
    test = masks[:, repetition % masks.shape[1]]
    rng = np.random.default_rng(repetition)
    train, test = (rng.permutation(np.flatnonzero(rows))[:limit] for rows in (~test, test))
    if data == "mnist":
        return Part(X[train] / 255, X[test] / 255, y[train], y[test])
    scaler = StandardScaler().fit(X[train])
    return Part(scaler.transform(X[train]), scaler.transform(X[test]), y[train], y[test])


def make_kernel(kind: str, n_features: int) -> Kernel:
    """Matern-5/2 with a length scale for each column; of images, one for all."""
    start = np.sqrt(n_features)
    scales = np.full(n_features, start) if n_features <= 100 else 5.0
    kernel = ConstantKernel(1.0, (1e-4, 1e4)) * Matern(scales, (1e-3, 1e4), nu=2.5)
    return kernel + WhiteKernel(0.1, (1e-6, 1e1)) if kind == "regression" else kernel


def make_swsgp(kind: str, params: Params) -> Any:
    """The estimator of a kind of task."""
    import skgp  # here, so that the parent process stays small

    name = "SWSGPRegressor" if kind == "regression" else "SWSGPClassifier"
    return getattr(skgp, name)(**params)


def swsgp_scores(model: Any, kind: str, part: Part) -> Row:
    """RMSE or error rate, and mean NLL in nats; y standardised."""
    nll = -np.mean(model.log_predictive_density(part.X_test, part.y_test))
    predicted = model.predict(part.X_test)
    if kind == "classification":
        return {"loss": float(np.mean(predicted != part.y_test)), "nll": float(nll)}
    rmse = np.sqrt(np.mean((part.y_test - predicted) ** 2))
    return {"loss": float(rmse / part.scale), "nll": float(nll - np.log(part.scale))}


# ---- the fits ------------------------------------------------------------------------------


def run(job: Row, folder: Path) -> Row:
    """Fit, score and time the model that a job names."""
    part = draw_part(folder, job["data"], job["repetition"], job["limit"] or None)
    params = json.loads(job["params"])
    kind = KINDS[job["data"]]
    fit = FITS[job["method"]]
    row = fit(job, part, kind, params)
    return {
        "n_train": len(part.y_train),
        "scale": part.scale if kind == "regression" else 1.0,
        "loss": np.nan,
        "nll": np.nan,
        "iteration_ms": np.nan,
        "row_ms": np.nan,
        "more": "",
        **row,
        "peak_gb": peak_gigabytes(),
    }


def run_swsgp(job: Row, part: Part, kind: str, params: Params) -> Row:
    """SWSGP-M-H; the kernel of :func:`make_kernel` unless the parameters say "default"."""
    if params.pop("default_kernel", False):
        kernel = None
    else:
        kernel = make_kernel(kind, part.X_train.shape[1])
    asked = {"n_inducing": job["m"] or None, "n_neighbors": job["h"]}
    common = {"kernel": kernel, "random_state": job["repetition"], **asked}
    model = make_swsgp(kind, {**common, **params})
    clock = SweepClock()
    start = time.process_time()
    model.set_callbacks(clock).fit(part.X_train, part.y_train)
    seconds = time.process_time() - start
    return {
        **swsgp_scores(model, kind, part),
        "fit_seconds": seconds,
        "iteration_ms": 1e3 * clock.seconds(model),
        "row_ms": milliseconds_a_row(model.predict, part.X_test),
    }


def milliseconds_a_row(predict: Callable, X: np.ndarray) -> float:
    """Processor time of a prediction after a first one, which sets up."""
    rows = X[:_TIMED_ROWS]
    predict(rows)
    start = time.process_time()
    predict(rows)
    return 1e3 * (time.process_time() - start) / len(rows)


def run_svgp(job: Row, part: Part, kind: str, params: Params) -> Row:
    """SVGP-M of gpytorch, and the same predicted from the H nearest: one fit for all H."""
    from _swsgp_peers import SVGP, Watch

    images = part.X_train.shape[1] > 100
    model = SVGP(
        job["m"],
        likelihood="gaussian" if kind == "regression" else "bernoulli",
        random_state=job["repetition"],
        ard=not images,
        standardise=not images,
        initial_length_scale=5.0 if images else None,
        **params,
    )
    watch = Watch(part.X_test, part.y_test, every=model.max_seconds / 10)
    model.fit(part.X_train, part.y_train, watch=watch)
    nearest = {
        str(H): model.score_nearest(part.X_test, part.y_test, H)
        for H in NEIGHBORS
        if job["study"] == "figure3" and job["h"]
    }
    more = {"nearest": nearest, "trace": model.trace_}
    return {
        **model.score(part.X_test, part.y_test),
        "fit_seconds": model.fit_seconds_,
        "iteration_ms": 1e3 * model.fit_seconds_ / model.n_steps_,
        "row_ms": milliseconds_a_row(model.latent, part.X_test),
        "more": json.dumps(more),
    }


def run_local_gps(job: Row, part: Part, kind: str, params: Params) -> Row:
    """64 exact GPs of 100 rows each."""
    from _swsgp_peers import LocalGPs

    model = LocalGPs(job["method"] == "transductive", random_state=job["repetition"], **params)
    model.fit(part.X_train, part.y_train)
    return {**model.score(part.X_test, part.y_test), "fit_seconds": model.fit_seconds_}


def run_trees(job: Row, part: Part, kind: str, params: Params) -> Row:
    """Gradient-boosted trees of scikit-learn."""
    from _swsgp_peers import class_scores, classifiers

    model = classifiers(job["repetition"])["HistGradientBoosting 1500"].set_params(**params)
    start = time.process_time()
    model.fit(part.X_train, part.y_train)
    seconds = time.process_time() - start
    probability = model.predict_proba(part.X_test)[:, 1]
    return {**class_scores(part.y_test, probability), "fit_seconds": seconds}


# ---- figure 5 ------------------------------------------------------------------------------


def run_covariances(job: Row, part: Part, kind: str, params: Params) -> Row:
    """Joint predictions of batches by SWSGP, SVGP and the full GP whose kernel they have."""
    rows = np.random.default_rng(job["repetition"]).permutation(len(part.y_train))
    rows = rows[: params["n_rows"]]
    X, y = part.X_train[rows], part.y_train[rows]
    mean, scale = y.mean(), y.std()
    full = GaussianProcessRegressor(make_kernel(kind, X.shape[1]), random_state=0)
    start = time.process_time()
    full.fit(X, (y - mean) / scale)
    seconds = time.process_time() - start
    joint = {"full GP": lambda rows: full.predict(rows, return_cov=True)}
    fixed = {"kernel": full.kernel_, "optimizer": None, "normalize_y": False, "random_state": 0}
    M = min(job["m"], len(X))

    def add(name: str, **more: Any) -> None:
        model = make_swsgp(kind, {**fixed, "n_inducing": M, **more}).fit(X, (y - mean) / scale)
        joint[name] = lambda rows: model.predict(rows, return_cov=True)

    add(f"svgp-{M}", n_neighbors=M, covariance="full", kl_weight=1.0)
    for H in params["neighbors"]:
        for form in ("local", "union"):
            add(f"{form}-{H}", n_neighbors=H, joint_prediction=form)
    z = (part.y_test - mean) / scale
    batches = {
        str(size): covariance_scores(joint, part.X_test, z, size, job["repetition"])
        for size in BATCHES
    }
    return {"fit_seconds": seconds, "more": json.dumps(batches)}


def covariance_scores(
    joint: dict[str, Callable], X: np.ndarray, z: np.ndarray, size: int, seed: int
) -> dict[str, Row]:
    """By model: RMSE, NLL of single rows and of batches (nats a row), MSE of the covariance."""
    order = np.random.default_rng(seed).permutation(len(z))
    n = len(z) - len(z) % max(BATCHES)  # the same rows whatever the size
    batches = np.split(order[:n], n // size)
    sums = {name: np.zeros(4) for name in joint}
    for rows in batches:
        reference = joint["full GP"](X[rows])[1]
        for name, predict in joint.items():
            sums[name] += _joint_losses(*predict(X[rows]), z[rows], reference)
    results = {}
    for name, total in sums.items():
        square, single, together, error = total / len(batches)
        scores = {"rmse": np.sqrt(square), "nll": single, "joint_nll": together}
        results[name] = {**scores, "covariance_mse": error}
    return results


def _joint_losses(mean, covariance, z, reference) -> np.ndarray:
    """Squared error, NLL of rows and of the batch, squared error of the covariance; means."""
    residual, variance = z - mean, np.diag(covariance)
    single = 0.5 * np.mean(np.log(2 * np.pi * variance) + residual**2 / variance)
    log_det = np.linalg.slogdet(covariance)[1]
    quadratic = residual @ np.linalg.solve(covariance, residual)
    together = 0.5 * (np.log(2 * np.pi) + (log_det + quadratic) / len(z))
    return np.array(
        [np.mean(residual**2), single, together, np.mean((covariance - reference) ** 2)]
    )


FITS: dict[str, Callable[[Row, Part, str, Params], Row]] = {
    "swsgp": run_swsgp,
    "swsgp-adam": run_swsgp,
    "svgp": run_svgp,
    "inductive": run_local_gps,
    "transductive": run_local_gps,
    "trees": run_trees,
    "covariances": run_covariances,
}
