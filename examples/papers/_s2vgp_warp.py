r"""Two series of one wave in different time: a deep composition of GPs (4.4, C.4, figure 6).

.. math:: y_k = g_k(f(a_k(x))) + \varepsilon, \qquad a_1(x) = x, \quad a_2(x) = x^2, \quad
          g_1 = \tanh, \quad g_2(x) = x.

The series only tell time relative to each other: whatever bends :math:`a_1` may bend f the other
way. What they decide, and what the table has the errors of, is :math:`a_1^{-1} \circ a_2`; and f
and :math:`g_k` only together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _s2vgp_layers import StateSpaceLayer, fit_layers
from _s2vgp_study import (
    GaussianFit,
    Row,
    Study,
    dynamics_of,
    gaussian_scores,
    learn_gaussian,
    seconds_of,
)
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from torch import Tensor

from skgp.inference.markov.inducing import fit_inducing
from skgp.inference.markov.knots import PairSites
from skgp.inference.markov.series import make_series
from skgp.likelihoods import Gaussian

_REMOVED = (((0.55, 0.6), (0.85, 0.9)), ((0.4, 0.5),))  # of each series
_KNOTS = (50, 100, 50)  # of each layer, as in the paper
_N_DRAWS, _N_PREDICTIVE = 3, 200
_START_NOISE = 0.1
_LEARNING_RATE = 0.02
_GRID = np.linspace(0, 1, 401)
_STEEPEST = 3  # grid steps of series 1 for one of series 2, of the first alignment


@dataclass(frozen=True)
class WarpedPair:
    """Times and values of both series, (2, n) each, and which of them were removed."""

    x: np.ndarray
    clean: np.ndarray
    y: np.ndarray
    removed: np.ndarray

    @staticmethod
    def draw(noise: float, n: int = 1000, seed: int = 0) -> "WarpedPair":
        """Data of appendix C.4, with noise of a standard deviation."""
        rng = np.random.default_rng(seed)
        x = np.sort(rng.uniform(0, 1, (2, n)), axis=1)
        clean = np.stack([np.tanh(wave(x[0])), wave(x[1] ** 2)])
        y = clean + noise * rng.standard_normal(x.shape)
        removed = np.stack(
            [
                np.any([(low < row) & (row < high) for low, high in intervals], axis=0)
                for row, intervals in zip(x, _REMOVED, strict=True)
            ]
        )
        return WarpedPair(x, clean, y, removed)

    def observed(self, k: int) -> tuple[Tensor, Tensor]:
        """Times and values that are left of series k."""
        kept = ~self.removed[k]
        return torch.from_numpy(self.x[k][kept]), torch.from_numpy(self.y[k][kept])


def wave(x: np.ndarray) -> np.ndarray:
    """The function f that both series see."""
    return (0.75 * (1 - np.tanh(20 * math.pi * x / 15)) + 0.25) * np.sin(20 * math.pi * x)


def warping(folder: Path, quick: bool) -> Study:
    """Errors of the warping functions and of predictions where observations were removed."""
    n_iter = 20 if quick else 300
    study = Study({})
    for noise in (0.05,) if quick else (0.05, 0.1):
        data, rows = WarpedPair.draw(noise), []
        rows.append({"model": "a GP each"} | _alone_scores(data))
        starts = {"deep, a_k from the alignment": align(data)}
        if noise == 0.05 and not quick:
            starts["deep, a_k from the prior"] = None
        for name, warp in starts.items():
            model = WarpModel(data, warp)
            _, seconds = seconds_of(model.fit, n_iter)
            rows.append({"model": name} | model.scores(data) | {"seconds": seconds})
            study.curves.setdefault("shown", (data, model))
        study.tables[f"time warping, noise {noise}, {n_iter} iterations"] = rows
    return study


class WarpModel:
    """Five layers: a_1, a_2, one f, g_1 and g_2.

    Parameters
    ----------
    data : WarpedPair
    warp : ndarray of shape (401,), optional
        Of a_2 on a grid of [0, 1], to start from; by default its prior mean, x.
    """

    def __init__(self, data: WarpedPair, warp: np.ndarray | None = None) -> None:
        self.data = data
        slow, wavy, bend = (
            ConstantKernel(variance) * Matern(scale, nu=1.5)
            for variance, scale in ((0.01, 4.0), (1.0, 0.05), (0.01, 1.0))
        )
        grids = ((0.0, 1.0), (-0.05, 1.05), (-1.5, 1.5))
        times, inner, outer = (
            torch.linspace(*ends, size, dtype=torch.float64)
            for ends, size in zip(grids, _KNOTS, strict=True)
        )
        starts: list[PairSites | None] = [None, None]
        if warp is not None:
            starts = [_sites(slow, times, _GRID, w - _GRID, _GRID[1]) for w in (_GRID, warp)]
        self.a = [StateSpaceLayer(slow, times, slope=1.0, sites=start) for start in starts]
        first = [part.numpy() for part in data.observed(0)]
        self.f = StateSpaceLayer(wavy, inner, sites=_sites(wavy, inner, *first, 0.05))
        self.g = [StateSpaceLayer(bend, outer, slope=1.0) for _ in range(2)]
        self.log_noise = torch.tensor(math.log(_START_NOISE**2), dtype=torch.float64)
        self.log_noise.requires_grad_()
        self.generator = torch.Generator().manual_seed(0)

    def fit(self, n_iter: int) -> list[float]:
        """Train all layers together; the negative bound at each iteration."""

        def expected_log_prob() -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for k in range(2):
                x, y = self.data.observed(k)
                mean, var = self.draws(k, x, _N_DRAWS)
                likelihood = Gaussian(self.log_noise.exp())
                density = likelihood.expected_log_prob(y.expand(_N_DRAWS, -1), mean, var)
                total = total + density.sum() / _N_DRAWS
            return total

        layers = [*self.a, self.f, *self.g]
        return fit_layers(
            layers,
            expected_log_prob,
            [self.log_noise],
            n_iter=n_iter,
            learning_rate=_LEARNING_RATE,
        )

    def draws(self, k: int, x: Tensor, n_draws: int) -> tuple[Tensor, Tensor]:
        """Moments (n_draws, n) of g_k at draws of the layers below."""
        times = self.a[k].sample(x.expand(n_draws, -1), self.generator)
        return self.g[k].marginals(self.f.sample(times, self.generator))

    def predict(self, k: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n,) of new observations of series k."""
        with torch.no_grad():
            mean, var = self.draws(k, torch.from_numpy(x), _N_PREDICTIVE)
            spread = var.mean(0) + mean.var(0, correction=0) + self.log_noise.exp()
        return mean.mean(0).numpy(), spread.numpy()

    def warps(self) -> np.ndarray:
        """Means of both a_k on the grid, (2, 401)."""
        with torch.no_grad():
            return np.stack([a.marginals(torch.from_numpy(_GRID))[0].numpy() for a in self.a])

    def scores(self, data: WarpedPair) -> Row:
        """Errors of the relative warp, and of predictions where observations were removed."""
        first, second = self.warps()
        # a_1 rises: it hardly leaves its prior mean, x.
        relative = np.interp(second, np.maximum.accumulate(first), _GRID)
        error = relative - _GRID**2
        return {
            "warp_rms": np.sqrt(np.mean(error**2)),
            "warp_max": np.abs(error).max(),
            **_removed_scores(data, self.predict),
            "noise_std": float(self.log_noise.detach().exp().sqrt()),
        }


def _removed_scores(
    data: WarpedPair, predict: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> Row:
    """By series: RMSE to the noiseless function and NLPD of the observations that were removed."""
    scores: Row = {}
    for k, removed in enumerate(data.removed):
        mean, var = predict(k, data.x[k][removed])
        error = mean - data.clean[k][removed]
        scores[f"rmse_{k + 1}"] = np.sqrt(np.mean(error**2))
        scores[f"nlpd_{k + 1}"] = gaussian_scores(data.y[k][removed], mean, var)["nlpd"]
    return scores


# ---- one series at a time --------------------------------------------------------------------


def _alone(data: WarpedPair, k: int) -> GaussianFit:
    """An exact GP on one series."""
    kernel = ConstantKernel(0.5) * Matern(0.05, nu=1.5)
    return learn_gaussian([kernel], make_series(*data.observed(k)), noise=0.01)


def _alone_scores(data: WarpedPair) -> Row:
    fits, seconds = seconds_of(lambda: [_alone(data, k) for k in range(2)])
    noise = math.sqrt(np.mean([fit.noise for fit in fits]))
    return {
        "warp_rms": math.nan,
        "warp_max": math.nan,
        **_removed_scores(data, lambda k, x: fits[k].predict(x)),
        "noise_std": noise,
        "seconds": seconds,
    }


def align(data: WarpedPair) -> np.ndarray:
    """Times of series 1, (401,), at which it looks most like series 2 on the grid.

    Dynamic time warping of the smoothed series: the rising path from 0 to 1, of at most
    ``_STEEPEST`` steps of series 1 for one of series 2, along which their squared differences, in
    units of their variance, have the least sum.
    """
    smooth = [_alone(data, k).predict(_GRID) for k in range(2)]
    (mean, var), (other_mean, other_var) = smooth
    cost = (other_mean[:, None] - mean) ** 2 / (other_var[:, None] + var)
    n = len(_GRID)
    total, steps = np.full(n, np.inf), np.zeros((n, n), dtype=int)
    total[0] = cost[0, 0]
    for i in range(1, n):
        moved = np.full((_STEEPEST + 1, n), np.inf)
        for step in range(_STEEPEST + 1):
            moved[step, step:] = total[: n - step]
        steps[i], total = moved.argmin(0), moved.min(0) + cost[i]
    path = [n - 1]
    for i in range(n - 1, 0, -1):
        path.append(path[-1] - steps[i, path[-1]])
    return _GRID[path[::-1]]


def _sites(kernel: Any, knots: Tensor, x: np.ndarray, y: np.ndarray, noise: float) -> PairSites:
    """Sites of a layer that has seen y at x, with noise of a standard deviation."""
    series = make_series(torch.from_numpy(x), torch.from_numpy(y))
    likelihood = Gaussian(noise**2)
    return fit_inducing(dynamics_of(kernel), knots, series, likelihood, max_iter=1).posterior.sites
