"""What the parts of ``ulisse.py`` share: the covariance of equation (1) on a data set."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _runs import some_rows
from _s2vgp_study import Row, read
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from torch import Tensor

from skgp.data import Data
from skgp.kernels import gram
from skgp.kernels.operators import RowOperator
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.priors import default_priors

NAMES = ("amplitude", "length scale", "noise")


@dataclass(frozen=True)
class Problem:
    """Standardised rows of a data set, none merged, under equation (1) and the default priors."""

    name: str
    posterior: LogPosterior

    @property
    def X(self) -> Tensor:
        return self.posterior.data.X

    @property
    def y(self) -> Tensor:
        return self.posterior.data.y

    def signal(self) -> Any:
        """The kernel without noise."""
        return self.posterior.kernel.k1

    def split(self, u: np.ndarray) -> tuple[Tensor, float]:
        """Theta of the signal, variance of the noise."""
        return torch.from_numpy(u[:-1]), float(np.exp(u[-1]))

    def matrix(self, u: np.ndarray) -> Tensor:
        """K + noise (n, n)."""
        theta, noise = self.split(u)
        A = gram(self.signal(), self.X, theta=theta)
        A.diagonal().add_(noise)
        return A

    def operator(self, u: np.ndarray, dtype: torch.dtype) -> RowOperator:
        """Products with K, without noise."""
        operator = RowOperator(self.signal(), self.X, dtype=dtype)
        operator.set_theta(self.split(u)[0].to(dtype))
        return operator


@dataclass(frozen=True)
class Draw:
    """Hyper-parameters drawn from the prior, and what is exact there."""

    u: np.ndarray
    condition: float

    @property
    def decade(self) -> str:
        """Of the condition number, for a table."""
        return f"1e{int(np.floor(np.log10(self.condition)))}"


def load_problem(folder: Path, name: str, rows: int | None) -> Problem:
    """All rows of a data set, or so many of them."""
    X, y, _ = read(folder, name)
    chosen = some_rows(len(y), rows)
    X, y = X[chosen], y[chosen]
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
    priors = default_priors(kernel, X, y)
    data = Data(torch.from_numpy(X), torch.from_numpy(y))
    return Problem(name, LogPosterior(kernel, data, priors))


def draws(problem: Problem, n_draws: int, seed: int = 0) -> list[Draw]:
    """Hyper-parameters from the prior, by rising condition number of K + noise."""
    rng = np.random.default_rng(seed)
    priors = problem.posterior.priors
    sd = np.array([getattr(prior, "sd", 1.0) for prior in priors])
    found = []
    for _ in range(n_draws):
        u = problem.posterior.medians + sd * rng.normal(size=len(priors))
        values = torch.linalg.eigvalsh(problem.matrix(u))
        found.append(Draw(u, float(values[-1] / values[0])))
    return sorted(found, key=lambda draw: draw.condition)


def by_decade(rows: list[Row], keys: tuple[str, ...]) -> Iterator[Row]:
    """Means of the numbers of rows with equal `keys`, in the order in which these appear."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for group in groups.values():
        numbers = {
            key: float(np.mean([row[key] for row in group])) for key in group[0] if key not in keys
        }
        yield {key: group[0][key] for key in keys} | {"draws": float(len(group))} | numbers
