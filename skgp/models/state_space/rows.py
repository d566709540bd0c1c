r"""Few rows of an additive model: exact inference in their own space, without bins.

Columns of numbers have about as many bins as there are rows, c of them together c times as many,
and inference in bins is cubic in that. The sum of the components has one value in a row. Rows of
equal inputs share it, and one site (:mod:`..series`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.additive.dense import DensePosterior, DensePrior, condition
from skgp.inference.markov.additive.rows_state import RowsState
from skgp.inference.markov.additive.state import Outcome
from skgp.inference.markov.series import Series, make_series
from skgp.learning.markov.additive_objectives import Evaluation

__all__ = ["DenseGaussian", "DenseRows", "make_rows"]


@dataclass(frozen=True)
class DenseRows:
    """Rows and their distinct inputs.

    Attributes
    ----------
    x : Tensor of shape (c, m)
        Distinct rows, as columns.
    series : Series
        Of the n rows; its times number the distinct ones.
    offset : float
        Prior mean of the sum.
    """

    x: Tensor
    series: Series
    offset: float

    @property
    def y(self) -> Tensor:
        """Targets, (n,)."""
        return self.series.y

    @property
    def log_exposure(self) -> Tensor | None:
        """Of counts, (n,)."""
        return self.series.log_exposure

    def prior(self, dynamics: Sequence[Any]) -> DensePrior:
        """Covariance of the sum at the distinct rows."""
        return DensePrior(dynamics, self.x)

    def weighted(self, values: Tensor) -> Tensor:
        """Values (n,) times the weights."""
        return values if self.series.weight is None else values * self.series.weight

    def sums(self, values: Tensor) -> Tensor:
        """Weighted sums at each distinct row, (m,), of values (n,)."""
        return self.series.sums(values)

    def posterior(
        self, prior: DensePrior, linear: Tensor, curved: Tensor
    ) -> tuple[DensePosterior, Tensor, Tensor]:
        """Posterior given sites (n,), (n,); mean and variance of the sum in every row."""
        q = condition(prior, self.sums(linear), self.sums(curved))
        return q, self.series.at_rows(q.mean) + self.offset, self.series.at_rows(q.var)

    def state(self, kernels: Sequence[Any], q: DensePosterior, outcome: Outcome) -> RowsState:
        """What predicts, with the components' kernels and the posterior found."""
        shares = self.series.counts / self.series.total
        centre = float(q.prior.levels(shares).sum(0) @ q.alpha)
        return RowsState(
            tuple(kernels),
            self.x.T.contiguous(),
            q.beta,
            q.weight,
            shares,
            self.offset + centre,
            self.x.new_zeros(len(self.x)),
            **vars(outcome),
        )


class DenseGaussian:
    """Log marginal likelihood under Gaussian noise, in O(m^3).

    Parameters
    ----------
    rows : DenseRows
    """

    def __init__(self, rows: DenseRows) -> None:
        self._rows, self.total = rows, rows.series.total
        # Targets less the prior mean, so that nothing cancels in their squares.
        self._series = Series(
            rows.series.times, rows.series.index, rows.y - rows.offset, rows.series.weight
        )

    def __call__(self, dynamics: Sequence[Any], parameters: Tensor) -> Evaluation:
        noise, series = float(parameters[0].exp()), self._series
        q = condition(self._rows.prior(dynamics), *series.gaussian_sites(noise))
        residual = series.y - series.at_rows(q.mean)
        squares = float(series.sums(residual**2).sum())
        slope = 0.5 * (squares / noise + q.spread - self.total)
        value = q.log_normalizer + series.gaussian_constant(noise)
        return Evaluation(value, q, parameters.new_tensor([slope]))

    def state(self, kernels: Sequence[Any], q: DensePosterior, outcome: Outcome) -> RowsState:
        """What predicts, with the components' kernels and the posterior of an evaluation."""
        return self._rows.state(kernels, q, outcome)


def make_rows(
    X: Tensor,
    y: Tensor,
    weight: Tensor | None,
    offset: float,
    log_exposure: Tensor | None = None,
) -> DenseRows:
    """Find the distinct rows of X (n, c). O(n c log n)."""
    distinct, which = torch.unique(X, dim=0, return_inverse=True)
    return DenseRows(distinct.T.contiguous(), make_series(which, y, weight, log_exposure), offset)
