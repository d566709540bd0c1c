"""What the parts of ``s2vgp.py`` share: their results, data, fits of a series and scores."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _runs import data_path
from torch import Tensor

from skgp.inference.markov.inducing import fit_inducing
from skgp.inference.markov.series import Series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.kernels.sde import state_space
from skgp.learning.markov.objectives import GaussianEvidence, VariationalEvidence
from skgp.learning.markov.search import maximise
from skgp.likelihoods import Gaussian

Row = dict[str, Any]
State = SeriesState | InducingState


@dataclass
class Study:
    """What a part found.

    Attributes
    ----------
    tables : dict of str to list of dict
        Rows with the same columns, by the title of the table.
    curves : dict
        What the figure of the part shows.
    """

    tables: dict[str, list[Row]]
    curves: dict[str, Any] = field(default_factory=dict)


def read(folder: Path, name: str, split: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X (n, d) and y (n,) in double precision, and which rows are test rows of a split."""
    with np.load(data_path(folder, name)) as arrays:
        test = arrays["test_mask"].reshape(len(arrays["y"]), -1)[:, split]
        return arrays["X"].astype(np.float64), arrays["y"].astype(np.float64), test


def seconds_of(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, float]:
    """Result and processor seconds of a call."""
    start = time.process_time()
    result = function(*arguments, **named)
    return result, time.process_time() - start


def gaussian_scores(y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> dict[str, float]:
    """Root mean squared error, and mean negative log density of N(mean, var) in nats."""
    error = y - mean
    nlpd = 0.5 * np.mean(np.log(2 * math.pi * var) + error**2 / var)
    return {"rmse": float(np.sqrt(np.mean(error**2))), "nlpd": float(nlpd)}


def mean_and_spread(values: list[float]) -> str:
    """Mean and standard deviation, for a table."""
    array = np.array(values)
    spread = array.std(ddof=1) if len(array) > 1 else math.nan
    return f"{array.mean():.4g} ± {spread:.2g}"


def dynamics_of(kernel: Any) -> Any:
    """Matrices of the process at the kernel's own hyper-parameters."""
    return state_space(kernel).at()


@dataclass(frozen=True)
class GaussianFit:
    """A series with Gaussian noise: kernel, noise, evidence or bound in nats, posterior."""

    kernel: Any
    noise: float
    value: float
    state: State

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n,) of new observations."""
        mean, var = self.state.moments(torch.from_numpy(x))
        return mean.numpy(), var.numpy() + self.noise


def learn_gaussian(
    kernels: list[Any], series: Series, knots: Tensor | None = None, noise: float = 0.1
) -> GaussianFit:
    """Fit by the evidence, or by its bound where there are knots; the best of several starts."""
    family = Gaussian(noise, bounds=(1e-8, 10.0))
    objective = GaussianEvidence(series) if knots is None else VariationalEvidence(series, family)
    searches = [maximise([kernel], objective, family, knots=knots) for kernel in kernels]
    best = max(searches, key=lambda search: search.value)
    return condition_gaussian(best.kernel, float(best.parameters[0].exp()), series, knots)


def condition_gaussian(
    kernel: Any, noise: float, series: Series, knots: Tensor | None = None
) -> GaussianFit:
    """The same at given hyper-parameters."""
    family = Gaussian(noise, bounds=(noise, noise))
    if knots is None:
        log_noise = torch.tensor([math.log(noise)], dtype=torch.float64)
        value = GaussianEvidence(series)([dynamics_of(kernel)], log_noise).value
        state: State = SeriesState(kernel, series.times, *series.gaussian_sites(noise), 0.0)
    else:
        likelihood = family.with_parameters(torch.tensor([math.log(noise)], dtype=torch.float64))
        # The first sites of Gaussian noise are the best.
        found = fit_inducing(dynamics_of(kernel), knots, series, likelihood, max_iter=1)
        value, state = found.elbo, InducingState(kernel, knots, found.posterior.sites)
    return GaussianFit(kernel, noise, value, state)
