"""``dlm.py --figure gradients``: sampled gradients of the log-loss, their bias and what they learn.

1. Statistics as in the supplement's figure 8, just after the initialisation (q(u) = p(u), unit
   variance, inducing points from the training rows). For draws g' of the gradient g of the summed
   log-loss in the whitened mean of q(u):

   - condition (i): g'.g / ||g||^2, mean and standard deviation over draws; 1 for g itself;
   - condition (ii): ||g'|| / ||g||;
   - bias: ||mean of g' - g|| / ||g||, with its Monte Carlo floor, the size that an unbiased
     estimator would show over as many draws.

   g is by quadrature; the paper takes 10000 samples. ``prior mean`` is 0, as in the paper, or the
   constant that fits the mean of y, where the estimator starts.

2. Learning curves as in figures 9 to 14. From the optimum of the ELBO, its hyper-parameters kept,
   the log-loss moves q(u) by exact gradients (L-BFGS) or by steps along sampled ones: test NLL
   and seconds by the length of the search, ``max_iter`` = 1, 4, 16, ... banana takes the place of
   the airline data.

Rows go to ``FOLDER/gradients.csv`` and ``FOLDER/curves.csv``, figures beside them.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _dlm_tasks import TASKS, draw_part, make_estimator, make_kernel, test_scores
from _runs import Results, Row

# Estimator, its formula and the number of samples; "score" is the paper's for ups, "combined" the
# default of `log_expectation_loss`.
SAMPLED = [
    *[("bmc", "pathwise", n) for n in (1, 10, 100)],
    *[("smooth_bmc", "pathwise", n) for n in (1, 10, 100)],
    *[("ups", form, n) for form in ("score", "combined") for n in (1, 10, 100)],
]
LEARNED = [
    ("auto", 0),
    *[("bmc", n) for n in (1, 10, 100)],
    ("smooth_bmc", 10),
    *[("ups", n) for n in (1, 10)],
]
BIAS_KEYS = ("data", "gradient", "form", "n_samples", "prior_mean", "size", "n_draws")
BIAS_VALUES = (
    "condition_1",
    "condition_1_sd",
    "condition_2",
    "condition_2_sd",
    "bias",
    "bias_floor",
    "milliseconds",
)
CURVE_KEYS = ("data", "gradient", "n_samples", "max_iter", "beta", "size", "repetition", "kernel")
CURVE_VALUES = ("nll", "loss", "n_iter", "fit_seconds")


def measure(args: argparse.Namespace) -> int:
    """Compute the rows that are missing, print and draw them; 1 if some of them failed."""
    biases = Results(args.out / "gradients.csv", BIAS_KEYS, BIAS_VALUES)
    bias_jobs = list(all_bias_jobs(args))
    failed = biases.compute(bias_jobs, run_bias, args.data_dir)
    print_biases([row for job in bias_jobs if (row := biases.find(job))])
    curves = Results(args.out / "curves.csv", CURVE_KEYS, CURVE_VALUES)
    curve_jobs = list(all_curve_jobs(args))
    failed += curves.compute(curve_jobs, run_fit, args.data_dir)
    rows = [row for job in curve_jobs if (row := curves.find(job))]
    print_curves(rows)
    draw_curves(rows, args.out / "curves.png")
    return int(failed > 0)


def training_rows(args: argparse.Namespace) -> int:
    return args.sizes[-1] if args.sizes else 500 if args.quick else 2000


def all_bias_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job an estimator, number of samples and prior mean."""
    for data in args.data:
        for prior_mean in ("zero", "fitted"):
            for gradient, form, n_samples in SAMPLED:
                yield {
                    "data": data,
                    "gradient": gradient,
                    "form": form,
                    "n_samples": n_samples,
                    "prior_mean": prior_mean,
                    "size": training_rows(args),
                    "n_draws": 100 if args.quick else 1000,
                }


def all_curve_jobs(args: argparse.Namespace) -> Iterator[Row]:
    """One job an estimator and number of iterations."""
    lengths = [0, *(4**k for k in range(3 if args.quick else 5))]
    for repetition in range(1 if args.quick else args.repetitions):
        for data in args.data:
            for gradient, n_samples in LEARNED:
                for max_iter in lengths:
                    yield {
                        "data": data,
                        "gradient": gradient,
                        "n_samples": n_samples,
                        "max_iter": max_iter,
                        "beta": args.beta,
                        "size": training_rows(args),
                        "repetition": repetition,
                        "kernel": "ard" if args.ard else "isotropic",
                    }


def run_bias(job: Row, folder: Path) -> Row:
    """Draw the gradient many times just after the initialisation."""
    import torch

    from skgp.likelihoods.log_expectation import log_expectation_loss

    likelihood, y, A, var, offset = initial_state(job, folder)
    mean = torch.full_like(y, offset, requires_grad=True)
    generator = torch.Generator().manual_seed(0)

    def gradient(name: str, **options: Any) -> Any:
        loss = log_expectation_loss(
            likelihood, y, mean, var, gradient=name, generator=generator, **options
        )
        (slopes,) = torch.autograd.grad(loss.sum(), mean)
        return A @ slopes

    exact = gradient("quadrature")
    options = {"form": job["form"], "n_samples": job["n_samples"]}
    start = time.perf_counter()
    draws = [gradient(job["gradient"], **options) for _ in range(job["n_draws"])]
    seconds = time.perf_counter() - start
    return {
        **bias_statistics(torch.stack(draws).numpy(), exact.numpy()),
        "milliseconds": 1e3 * seconds / job["n_draws"],
    }


def initial_state(job: Row, folder: Path) -> tuple[Any, Any, Any, Any, float]:
    """Likelihood, y (n,), whitened features A (m, n), prior variances (n,) and prior mean."""
    import torch

    from skgp.kernels import gram, gram_diag
    from skgp.kernels.expression import split_noise
    from skgp.likelihoods import Bernoulli, Poisson

    kind, n_inducing = TASKS[job["data"]]
    if kind == "regression":
        raise ValueError(f"data={job['data']!r} has exact gradients; give counts or classes")
    part = draw_part(folder, job["data"], job["size"], 0)
    kernel = split_noise(make_kernel(kind, part.X_train.shape[1], ard=False))[0]
    X, y = torch.from_numpy(part.X_train), torch.from_numpy(part.y_train)
    Kzz = gram(kernel, X[:n_inducing], X[:n_inducing])
    Lz = torch.linalg.cholesky(Kzz + 1e-6 * torch.eye(n_inducing, dtype=Kzz.dtype))
    A = torch.linalg.solve_triangular(Lz, gram(kernel, X[:n_inducing], X), upper=False)
    likelihood, fitted = Poisson(link="exp"), float(y.mean().log())
    if kind == "classification":
        share = y.mean()
        y = 2 * y - 1
        likelihood, fitted = Bernoulli("probit"), float(torch.special.ndtri(share))
    return likelihood, y, A, gram_diag(kernel, X), 0.0 if job["prior_mean"] == "zero" else fitted


def bias_statistics(draws: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Conditions (i) and (ii) and the bias, from draws (r, m) of the gradient (m,)."""
    norm = np.linalg.norm(exact)
    along, sizes = draws @ exact / norm**2, np.linalg.norm(draws, axis=1) / norm
    return {
        "condition_1": along.mean(),
        "condition_1_sd": along.std(),
        "condition_2": sizes.mean(),
        "condition_2_sd": sizes.std(),
        "bias": np.linalg.norm(draws.mean(0) - exact) / norm,
        "bias_floor": np.sqrt(draws.var(0, ddof=1).sum() / len(draws)) / norm,
    }


def run_fit(job: Row, folder: Path) -> Row:
    """Fit the ELBO, then the log-loss from there; score and time the latter."""
    from sklearn.exceptions import ConvergenceWarning

    part = draw_part(folder, job["data"], job["size"], job["repetition"])
    ard = job["kernel"] == "ard"
    bound = {"objective": "elbo"}
    model = make_estimator(job["data"], part.X_train.shape[1], ard, job["repetition"], bound)
    model.fit(part.X_train, part.y_train)
    seconds, n_iter = 0.0, 0
    if job["max_iter"]:
        model.set_params(
            objective="log_loss",
            beta=job["beta"],
            gradient=job["gradient"],
            n_gradient_samples=job["n_samples"] or 1,
            hyperparameters="fixed",
            max_iter=job["max_iter"],
            warm_start=True,
            early_stopping=False,
        )
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # short fits are the point here
            model.fit(part.X_train, part.y_train)
        seconds, n_iter = time.perf_counter() - start, model.n_iter_
    scores = test_scores(model, TASKS[job["data"]].kind, part)
    return {**scores, "n_iter": n_iter, "fit_seconds": seconds}


def print_biases(rows: list[dict[str, str]]) -> None:
    """One line an estimator, number of samples and prior mean."""
    print("\nGradients just after the initialisation, relative to the exact one")
    print(
        f"{'':<10}{'mean':<8}{'estimator':<22}{'samples':>8}{'condition (i)':>18}"
        f"{'condition (ii)':>18}{'bias':>10}{'its floor':>11}{'ms':>8}"
    )
    for row in rows:
        name = f"{row['gradient']}, {row['form']}"
        values = {name: float(row[name]) for name in BIAS_VALUES}
        first, second = (
            f"{values[name]:.3f} ± {values[name + '_sd']:.3f}"
            for name in ("condition_1", "condition_2")
        )
        print(
            f"{row['data']:<10}{row['prior_mean']:<8}{name:<22}{row['n_samples']:>8}"
            f"{first:>18}{second:>18}{values['bias']:>10.2g}{values['bias_floor']:>11.2g}"
            f"{values['milliseconds']:>8.1f}"
        )


def label(row: dict[str, str]) -> str:
    """An estimator and its number of samples."""
    return "exact" if row["gradient"] == "auto" else f"{row['gradient']}-{row['n_samples']}"


def mean_curves(rows: list[dict[str, str]]) -> dict[tuple[str, str], np.ndarray]:
    """Columns iterations, seconds, NLL, by data set and estimator; means over repetitions."""
    groups: dict[tuple[str, str], dict[int, list[tuple[float, ...]]]] = {}
    for row in rows:
        curve = groups.setdefault((row["data"], label(row)), {})
        values = tuple(float(row[name]) for name in ("n_iter", "fit_seconds", "nll"))
        curve.setdefault(int(row["max_iter"]), []).append(values)
    return {
        key: np.array([np.mean(curve[length], axis=0) for length in sorted(curve)])
        for key, curve in groups.items()
    }


def print_curves(rows: list[dict[str, str]]) -> None:
    """Test NLL by the number of iterations."""
    lengths = sorted({int(row["max_iter"]) for row in rows})
    print("\nTest NLL by max_iter, 0 being the ELBO; iterations and seconds of the longest search")
    header = "".join(f"{length:>9}" for length in lengths)
    print(f"{'':<24}{header}{'n_iter_':>9}{'s':>9}")
    for (data, name), curve in mean_curves(rows).items():
        cells = "".join(f"{nll:>9.4f}" for nll in curve[:, 2])
        print(f"{data:<10}{name:<14}{cells}{curve[-1, 0]:>9.0f}{curve[-1, 1]:>9.1f}")


def draw_curves(rows: list[dict[str, str]], path: Path) -> None:
    """Test NLL against iterations and against seconds; a row of panels a data set."""
    try:
        import matplotlib
    except ImportError:
        print("\nno figure: matplotlib is not installed (pip install skgp[plot])")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["data"] for row in rows))
    if not names:
        return
    figure, axes = plt.subplots(
        len(names), 2, figsize=(8, 3.2 * len(names)), squeeze=False, layout="constrained"
    )
    for (data, name), curve in mean_curves(rows).items():
        for axis, column, title in zip(
            axes[names.index(data)], (0, 1), ("iterations", "seconds"), strict=True
        ):
            axis.plot(curve[1:, column], curve[1:, 2], "o-", markersize=3, label=name)
            axis.set(xscale="log", xlabel=title, ylabel="test NLL, nats", title=data)
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"\nfigure: {path}")
