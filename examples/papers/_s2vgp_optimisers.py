"""Natural gradients, Adam and L-BFGS for the same bound (C.1, figure 7); classification (D).

Adam and L-BFGS see q as the paper does: the mean of the states, and the lower band of the Cholesky
factor of their precision. 50 states of two numbers are few: matrices are dense here, the band is
masked. All three start from q = p.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _s2vgp_study import Row, Study, dynamics_of, mean_and_spread, seconds_of
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from torch import Tensor

from skgp import StateSpaceGPClassifier
from skgp.inference.markov.conditionals import condition
from skgp.inference.markov.inducing import fit_inducing
from skgp.inference.markov.series import Series, make_series
from skgp.likelihoods import Gaussian, Likelihood, StudentT
from skgp.optim.bfgs import minimize_lbfgs

_KERNEL = Matern(0.1, nu=1.5)
_LIKELIHOODS = {"Gaussian": Gaussian(0.01), "Student-t": StudentT(1.0, 1.0)}
_ADAM_RATE = 0.05
_MARKS = (1, 2, 5, 10, 20, 50, 100)  # iterations that the table shows

_CLASSES = ConstantKernel(4.0, "fixed") * Matern(1.5, "fixed", nu=1.5)
_SPAN = 30.0


# ---- figure 7 --------------------------------------------------------------------------------


def optimisers(folder: Path, quick: bool) -> Study:
    """Bound below the best one found, by iteration; medians over data sets."""
    n, n_knots, n_sets, n_iter = (200, 10, 2, 20) if quick else (1000, 50, 10, 100)
    x = torch.linspace(0, 1, n, dtype=torch.float64)
    knots = torch.linspace(0, 1, n_knots, dtype=torch.float64)
    tables: dict[str, list[Row]] = {}
    curves: dict[str, Any] = {}
    for noise, likelihood in _LIKELIHOODS.items():
        traces: dict[str, list[np.ndarray]] = {}
        for seed in range(n_sets):
            series = make_series(x, _draw(x, likelihood, seed))
            found = _traces(knots, series, likelihood, n_iter)
            best = max(trace.max() for trace in found.values())
            for name, trace in found.items():
                traces.setdefault(name, []).append(best - trace)
        median = {name: np.median(gaps, axis=0) for name, gaps in traces.items()}
        title = f"optimisers, {noise} noise: nats below the best, by iteration ({n_sets} data sets)"
        tables[title] = [
            {"optimiser": name} | {str(i): gap[i] for i in _MARKS if i < len(gap)}
            for name, gap in median.items()
        ]
        curves[noise] = traces
    return Study(tables, curves)


def _draw(x: Tensor, likelihood: Likelihood, seed: int) -> Tensor:
    """Observations at x of a draw from the prior."""
    generator = torch.Generator().manual_seed(seed)
    gram = torch.from_numpy(_KERNEL(x[:, None].numpy())) + 1e-10 * torch.eye(len(x))
    noise = torch.randn(len(x), generator=generator, dtype=torch.float64)
    return likelihood.sample(torch.linalg.cholesky(gram) @ noise, generator)


def _traces(
    knots: Tensor, series: Series, likelihood: Likelihood, n_iter: int
) -> dict[str, np.ndarray]:
    """Bounds before the first iteration and after each, (n_iter + 1,)."""
    bound = DenseBound(knots, series, likelihood)
    return {
        "natural gradients": _natural(knots, series, likelihood, n_iter),
        "Adam": _adam(bound, n_iter),
        "L-BFGS": _lbfgs(bound, n_iter),
    }


def _natural(knots: Tensor, series: Series, likelihood: Likelihood, n_iter: int) -> np.ndarray:
    """Steps of rate 1, halved while the bound falls; a pass over the rows is an iteration."""
    trace = np.full(n_iter + 1, -np.inf)

    def note(iteration: int, values: dict) -> bool:
        trace[iteration - 1] = -values["loss"]
        return False

    nothing = torch.zeros_like(series.times)
    fit_inducing(
        dynamics_of(_KERNEL),
        knots,
        series,
        likelihood,
        start=(nothing, nothing),
        max_iter=n_iter + 1,
        tol=0.0,
        callback=note,
    )
    return np.maximum.accumulate(trace)


class DenseBound:
    """The bound of S2VGP as a function of mean and factor of the precision; loss for torch.

    Parameters
    ----------
    knots : Tensor of shape (M,)
    series : Series
    likelihood : Likelihood

    Attributes
    ----------
    mean : Tensor of shape (M d,)
        A leaf, 0 at first.
    factor : Tensor of shape (M d, M d)
        A leaf of which the lower band counts; at first that of the prior. Its diagonal is kept as
        logarithms.
    """

    def __init__(self, knots: Tensor, series: Series, likelihood: Likelihood) -> None:
        self.series, self.likelihood = series, likelihood
        dynamics = dynamics_of(_KERNEL)
        rows = condition(dynamics, knots, series.times)
        self.rest = rows.T
        self.weights = _state_weights(rows.h, rows.interval, len(knots))
        self.prior = _prior_precision(dynamics, knots)
        d = dynamics.n_states
        block = torch.arange(len(self.prior)) // d
        self.band = ((block[:, None] - block) <= 1).tril(-1)
        root = torch.linalg.cholesky(self.prior)
        self.prior_log_det = 2 * root.diagonal().log().sum()
        self.mean = torch.zeros(len(self.prior), dtype=torch.float64, requires_grad=True)
        self.factor = root.tril(-1) + root.diagonal().log().diag()
        self.factor.requires_grad_()

    def leaves(self) -> list[Tensor]:
        """Mean and factor, new ones."""
        return [leaf.detach().clone().requires_grad_() for leaf in (self.mean, self.factor)]

    def loss(self, mean: Tensor, factor: Tensor) -> Tensor:
        """Minus the bound, in nats."""
        log_diagonal = factor.diagonal()
        root = factor * self.band + log_diagonal.exp().diag()
        spread = torch.linalg.solve_triangular(root, self.weights.T, upper=False)
        var = self.rest + spread.square().sum(0)
        expected = self.likelihood.expected_log_prob(self.series.y, self.weights @ mean, var)
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
        trace = ((inverse @ self.prior) * inverse).sum()
        log_dets = 2 * log_diagonal.sum() - self.prior_log_det
        kl = 0.5 * (trace + mean @ self.prior @ mean - len(mean) + log_dets)
        return kl - expected.sum()


def _state_weights(h: Tensor, interval: Tensor, n_knots: int) -> Tensor:
    """E[f | u] = W u at n times, as W (n, M d)."""
    d, n = len(h) // 2, h.shape[1]
    weights = h.new_zeros(n, n_knots + 2, d)
    row = torch.arange(n)
    weights[row, interval], weights[row, interval + 1] = h.T.split(d, 1)
    return weights[:, 1:-1].reshape(n, -1)


def _prior_precision(dynamics: Any, knots: Tensor) -> Tensor:
    """Of the states at the knots, (M d, M d)."""
    gaps = (knots - knots[:, None]).clamp_min(0.0).reshape(-1)
    F, _ = dynamics.transition(gaps)
    M, d = len(knots), dynamics.n_states
    F = F.movedim(-1, 0).reshape(M, M, d, d)  # from row knot to column knot
    later = (F @ dynamics.stationary).permute(1, 2, 0, 3).reshape(M * d, M * d)
    block = torch.arange(M * d) // d
    covariance = torch.where(block[:, None] >= block, later, later.T)
    return torch.linalg.inv(0.5 * (covariance + covariance.T))


def _adam(bound: DenseBound, n_iter: int) -> np.ndarray:
    leaves = bound.leaves()
    adam = torch.optim.Adam(leaves, lr=_ADAM_RATE)
    trace = []
    for _ in range(n_iter + 1):
        adam.zero_grad()
        loss = bound.loss(*leaves)
        loss.backward()
        trace.append(-float(loss.detach()))
        adam.step()
    return np.array(trace)


def _lbfgs(bound: DenseBound, n_iter: int) -> np.ndarray:
    """An iteration is a step, whatever its line search costs."""
    mean, factor = bound.leaves()
    first = -float(bound.loss(mean, factor).detach())
    found = minimize_lbfgs(
        lambda leaves: bound.loss(**leaves) / bound.series.total,
        {"mean": mean.detach(), "factor": factor.detach()},
        max_iter=n_iter,
        tol=0.0,
    )
    values = [-bound.series.total * loss for loss in found.history]
    trace = np.array([first, *values])
    return np.pad(trace, (0, n_iter + 1 - len(trace)), mode="edge")


# ---- appendix D ------------------------------------------------------------------------------


def classification(folder: Path, quick: bool) -> Study:
    """Labels of a wave that bends; fixed hyper-parameters."""
    n, n_sets = (500, 2) if quick else (5000, 5)
    models: dict[str, Callable[[], StateSpaceGPClassifier]] = {
        "S2VGP-50": lambda: _classifier(n_inducing=50),
        "exact sites": lambda: _classifier(),
    }
    _classifier().fit(*_labels(100, 0))  # the first call of all is slower
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in models}
    for seed in range(n_sets):
        X, y = _labels(n, seed)
        X_test, y_test = _labels(2000, 1000 + seed)
        for name, make in models.items():
            model, fit = seconds_of(make().fit, X, y)
            density, predict = seconds_of(model.log_predictive_density, X_test, y_test)
            error = float(np.mean(model.predict(X_test) != y_test))
            found[name].append((model.elbo_, -density.mean(), error, fit, predict))
    columns = ("elbo", "test_nlpd", "error", "fit_seconds", "predict_seconds")
    table = [
        {"model": name}
        | {
            c: mean_and_spread(list(v))
            for c, v in zip(columns, zip(*rows, strict=True), strict=True)
        }
        for name, rows in found.items()
    ]
    grid = np.linspace(0, _SPAN, 600)[:, None]
    latent = model.latent_mean_and_variance(grid)
    curves = {
        "x": X[:, 0],
        "y": y,
        "grid": grid[:, 0],
        "latent": latent,
        "truth": _wave(grid[:, 0]),
    }
    return Study({f"classification, n = {n}, {n_sets} data sets": table}, curves)


def _classifier(**params: Any) -> StateSpaceGPClassifier:
    return StateSpaceGPClassifier(_CLASSES, optimizer=None, **params)


def _wave(x: np.ndarray) -> np.ndarray:
    return 2 * np.sin(x) + np.cos(0.37 * x)


def _labels(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, _SPAN, n)
    return x[:, None], np.where(rng.random(n) < 1 / (1 + np.exp(-_wave(x))), 1, 0)
