"""Error and mean negative log density against time for m = 1e4 to 1e7 Fourier functions.

Section 4 of Evans and Nair, "Quadruply stochastic Gaussian processes", 2020: QSGP by stochastic
gradients, empirical Bayes on, with the same minibatches and the same number of iterations whatever
m is. Regression on kin40k (Theorems 1 and 2, mean-field) and MNIST digits, odd or even (Theorem 3).

    python examples/papers/qsgp_curves.py --data-dir FOLDER [--task kin40k] [--sizes 1e4 1e7]

Each run is a process of one thread, which starts from hyper-parameters that the estimator finds
(once a task, kept beside the results) and stops at an eighth, a quarter, half and all of its
iterations to predict test rows; these stops are not counted. Seconds are those of the processor: a
busy machine does not change them. Rows are added to a CSV file; runs that it has are not repeated.
``--max-iter`` sets the iterations: learning rates fall, and functions join those that are drawn
from, as it says.

For kin40k the error is the RMSE in standard deviations of y; "scaled" is the density of the fitted
model, whose variances are multiplied by the mean squared standardised residual of 300 rows held out
of the training part, and the one before it is that without this. For MNIST it is the share of wrong
labels, the density that at the median of f, as in the paper; "scaled" averages over f with its
variance times the factor that 300 such rows choose.

FOLDER holds ``kin40k.npz`` and ``mnist.npz`` (see ``qsgp.py`` and ``qsgp_mnist.py``). The paper's
figures, of a GPU: kin40k, m = 1e5, RMSE .174, density .135; MNIST, m = 1e6, 2.15% and .068 after
666 s, m = 1e7, .063.
"""

import argparse
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _runs import Results, Row, data_path, peak_gigabytes, some_rows, split_masks

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
#: Of an iteration, and the learning rate: the paper's batches, and rates that were hardly tuned.
SETTINGS: dict[str, dict[str, Any]] = {
    "kin40k": dict(batch_size=500, basis_batch_size=10_000, n_support=500, learning_rate=0.1),
    "mnist": dict(batch_size=400, basis_batch_size=20_000, n_support=200, learning_rate=0.1),
}
ITERATIONS = {"kin40k": 800, "mnist": 200}
TEST_ROWS = {"kin40k": 1000, "mnist": 1000}
N_HELD_OUT = 300
KEYS = ("task", "n_basis", "max_iter", "iteration")
VALUES = ("seconds", "n_drawn", "error", "mnlp", "mnlp_scaled", "kernel", "peak_gb")


def main() -> None:
    """Compute the runs that are missing; print the table; draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--task", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES)
    parser.add_argument("--max-iter", type=int, help="iterations (800 and 200)")
    parser.add_argument("--csv", type=Path, default=Path("results/qsgp_curves.csv"))
    args = parser.parse_args()
    results = Curves(args.csv, KEYS, VALUES)
    for task in args.task:
        for size in args.sizes:
            max_iter = args.max_iter or ITERATIONS[task]
            job = {"task": task, "n_basis": int(size), "max_iter": max_iter, "iteration": max_iter}
            results.compute([job], curve, args.data_dir, args.csv.parent)
    print_table(results)
    draw(results, args.csv.with_suffix(".png"))


class Curves(Results):
    """One job gives a row a checkpoint, the last with the job's own keys."""

    def _append(self, row: Row) -> None:
        for point in row.pop("points"):
            super()._append({**row, **point})


def curve(job: Row, data_dir: Path, folder: Path) -> Row:
    """Train one model, and score it at the checkpoints."""
    import torch

    torch.set_num_threads(1)
    task, max_iter = job["task"], job["max_iter"]
    train, held_out, test = load(data_dir, task)
    kernel, offset = start(task, train, folder)
    points: list[Row] = []
    begun, paused = time.process_time(), 0.0

    def callback(iteration: int, info: dict) -> bool:
        nonlocal paused
        if (iteration + 1) * 8 in (max_iter, 2 * max_iter, 4 * max_iter, 8 * max_iter):
            stop = time.process_time()
            point = score(task, info["fit"](), held_out, test)
            points.append({"iteration": iteration + 1, "seconds": stop - begun - paused, **point})
            print("  ", *points[-1].items(), flush=True)
            paused += time.process_time() - stop
        return False

    fit(task, kernel, offset, train, job, callback)
    return {"points": [{**point, "peak_gb": peak_gigabytes()} for point in points]}


def load(folder: Path, task: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Training, held-out and test rows (X, y); columns and y standardised, or labels -1 and 1."""
    with np.load(data_path(folder, task)) as arrays:
        X, y = arrays["X"], arrays["y"]
        test = split_masks(arrays["test_mask"])[:, 0].astype(bool)
    X, y = X.astype(np.float64), y.astype(np.float64)
    rng = np.random.default_rng(0)
    order = rng.permutation(np.flatnonzero(~test))
    train, held_out = order[N_HELD_OUT:], order[:N_HELD_OUT]
    if task == "mnist":
        y = 2 * (y % 2) - 1
    else:
        X = (X - X[train].mean(0)) / X[train].std(0)
        y = (y - y[train].mean()) / y[train].std()
    rows = np.flatnonzero(test)
    test_rows = rows[some_rows(len(rows), TEST_ROWS[task])]
    return ((X[part], y[part]) for part in (train, held_out, test_rows))


def start(task: str, train: tuple[np.ndarray, np.ndarray], folder: Path) -> tuple[Any, float]:
    """The kernel, and offset of f, that the estimator finds before its stochastic gradients."""
    from skgp import QSGPClassifier, QSGPRegressor

    path = folder / f"qsgp_curves_{task}.pkl"
    if not path.is_file():
        few: dict[str, Any] = dict(solver="sgd", n_basis=2000, max_iter=1, random_state=0)
        some = slice(None) if task == "kin40k" else slice(20_000)
        X, y = (part[some] for part in train)
        model = QSGPRegressor(basis="fourier", **few) if task == "kin40k" else QSGPClassifier(**few)
        model.fit(X, y)
        folder.mkdir(parents=True, exist_ok=True)
        offset = 0.0 if task == "kin40k" else float(model.offset_[0])
        path.write_bytes(pickle.dumps((model.kernel_, offset)))
    return pickle.loads(path.read_bytes())


def fit(task: str, kernel: Any, offset: float, train: tuple, job: Row, callback: Any) -> None:
    """The fit of the estimator, from known hyper-parameters, which it goes on to learn."""
    import torch

    from skgp.data import Data
    from skgp.kernels import split_noise
    from skgp.learning.plan import Options, Plan, Problem
    from skgp.likelihoods import Bernoulli
    from skgp.models import qsgp

    options = Options(
        **SETTINGS[task],
        max_iter=job["max_iter"],
        dtype=torch.float32,
        feature_map="iid" if task == "mnist" else "orthogonal",
        learn_hyperparameters=True,
        moderation=0.0,
    )
    signal, noise = split_noise(kernel)
    data = Data(*map(torch.as_tensor, train))
    plan = Plan("fourier", job["n_basis"], "sgd", "diagonal")
    level = 0.0 if noise is None else noise.noise_level
    generator = torch.Generator().manual_seed(0)
    problem = Problem(signal, data, level, options, generator, callback)
    if task == "kin40k":
        qsgp.fit_regression(problem, plan)
    else:
        from dataclasses import replace

        data = Data(data.X, data.y[:, None])
        o = torch.tensor([offset], dtype=torch.float64)
        problem = replace(problem, data=data, likelihood=Bernoulli("logit"), offset=o)
        qsgp.fit_classifier(problem, plan)


def score(task: str, fit: Any, held_out: tuple, test: tuple) -> Row:
    """Error and densities on the test rows."""
    from scipy.special import expit

    mean, var = moments(fit.posterior, np.concatenate([held_out[0], test[0]]))
    h, y_held, y = len(held_out[1]), held_out[1], test[1]
    row = {"n_drawn": fit.state.n_drawn_units, "kernel": str(fit.kernel)}
    if task == "kin40k":
        var = var + fit.noise
        nlp = [gaussian_nlp(y, mean[h:], var[h:] * factor) for factor in (1.0, fit.calibration)]
        return {**row, "error": np.sqrt(np.mean((y - mean[h:]) ** 2)), **densities(nlp)}
    z, weight = np.polynomial.hermite_e.hermegauss(31)

    def nlp_of(y: np.ndarray, mean: np.ndarray, var: np.ndarray, factor: float) -> float:
        f = mean[:, None] + np.sqrt(factor * var)[:, None] * z
        return -np.mean(np.log(expit(y[:, None] * f) @ (weight / weight.sum())))

    factors = (0.0, 1 / 16, 1 / 4, 1.0)
    best = min(factors, key=lambda factor: nlp_of(y_held, mean[:h], var[:h], factor))
    nlp = [nlp_of(y, mean[h:], var[h:], factor) for factor in (0.0, best)]
    return {**row, "error": np.mean(y * mean[h:] <= 0), **densities(nlp)}


def densities(nlp: list[float]) -> Row:
    """The last two columns."""
    return {"mnlp": nlp[0], "mnlp_scaled": nlp[1]}


def gaussian_nlp(y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> float:
    """Mean negative log density."""
    return float(np.mean(0.5 * np.log(2 * np.pi * var) + 0.5 * (y - mean) ** 2 / var))


def moments(posterior: Any, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of f as `posterior` has them, features in float32 to save time."""
    import torch

    drawn = getattr(posterior, "weights", posterior)  # less the functions that were never drawn
    if drawn is not posterior and not hasattr(drawn, "basis"):
        drawn = posterior
    rows = torch.tensor(X)
    basis = drawn.basis
    regression = hasattr(drawn, "mean_weights")
    weights = drawn.mean_weights if regression else drawn.weights[:, 0]
    std = drawn.tail_std if regression else drawn.tail_std[:, 0]
    mean = torch.zeros(len(rows), dtype=torch.float64)
    var = torch.zeros_like(mean)
    for block in range(basis.n_blocks):
        columns = basis.block_slice(block)
        Phi = basis.features(rows.float(), block)
        mean += (Phi @ weights[columns].float()).double()
        var += (Phi.square() @ std[columns].float().square()).double()
    if drawn is not posterior:
        var += posterior.amplitude * basis.unexplained(rows)
    offset = 0.0 if regression else float(drawn.offset[0])
    return (mean + offset).numpy(), var.numpy()


def print_table(results: Results) -> None:
    """One line a checkpoint."""
    print(
        f"{'':<8}{'m':>9}{'iteration':>11}{'seconds':>9}{'drawn':>7}{'error':>9}{'MNLP':>9}"
        f"{'scaled':>9}{'peak':>9}"
    )
    for row in results.rows.values():
        print(
            f"{row['task']:<8}{float(row['n_basis']):>9.0e}{row['iteration']:>11}"
            f"{float(row['seconds']):>9.0f}{row['n_drawn']:>7}{float(row['error']):>9.4f}"
            f"{float(row['mnlp']):>9.4f}{float(row['mnlp_scaled']):>9.4f}"
            f"{float(row['peak_gb']):>6.2f} GB"
        )


def draw(results: Results, path: Path) -> None:
    """Error and density against seconds, a line for each m; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8, 5.5), layout="constrained")
    for line, task in zip(axes, SETTINGS, strict=True):
        for size in SIZES:
            rows = [
                row
                for row in results.rows.values()
                if row["task"] == task and int(row["n_basis"]) == size
            ]
            seconds = [float(row["seconds"]) for row in rows]
            for axis, name in zip(line, ("error", "mnlp_scaled"), strict=True):
                axis.plot(
                    seconds, [float(row[name]) for row in rows], "o-", label=f"m = {size:.0e}"
                )
                axis.set(xlabel="seconds of one processor", ylabel=name.replace("_", ", "))
                axis.set_title(task)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
