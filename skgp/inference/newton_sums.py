r"""Newton's method on sums over blocks of observations, of which none has all in memory.

The negative log joint density of :mod:`skgp.inference.newton`, its gradient and its Hessian are
sums over the observations: for given weights W (m, c) a pass over the blocks adds up

.. math:: -\sum_i s_i \log p(y_{ij} \mid f_{ij}), \qquad \Phi^T g_j, \qquad
          \Phi^T \operatorname{diag}(c_j) \Phi, \qquad f_{ij} = o_j + \phi_i^T w_j,

``O(c m^2)`` numbers whatever n is, where the blocks lie. A step is exact: of all columns at once,
and the pass at its end tells its loss and whence the next one goes. Halving a step takes a pass.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import MADE_OF
from skgp.inference.newton import check_start, newton_problem, prior_variances
from skgp.inference.newton_steps import Direction, Modes, newton_steps
from skgp.inference.weights.bases import Basis
from skgp.inference.weights.design import StreamedDesign
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import cho_solve, jittered_cholesky
from skgp.linalg.runtime import Callback, tile_rows


@dataclass(frozen=True)
class NewtonSums:
    """What a pass adds up of k columns, at their weights; in float64."""

    loss: Tensor  # (k,), negative log-likelihood, nats
    slope: Tensor  # (m, k), its gradient
    hessian: Tensor  # (k, m, m)
    zero_slope: Tensor  # (m, k), the gradient at zero weights
    weight: Tensor  # (k,), of the observations

    def __add__(self, other: NewtonSums) -> NewtonSums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return NewtonSums(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class ClassRows:
    """The model that observations are seen through; picklable, for whoever has the blocks."""

    basis: Basis
    likelihood: Likelihood
    offset: Tensor  # (c,)

    def __call__(
        self, data: Data, *, columns: Tensor, weights: Tensor, first: bool = False
    ) -> NewtonSums:
        """The statistic of a block, y (n, c), of some columns (k,) at weights (m, k).

        The gradient at zero weights is that of the `first` pass. Features are made once, of as many
        rows as a tile holds.
        """
        step = tile_rows(8 * MADE_OF * self.basis.n_features)
        tiles = (data.take(slice(i, i + step)) for i in range(0, max(len(data), 1), step))
        return reduce(operator.add, (self._of_tile(t, columns, weights, first) for t in tiles))

    def _of_tile(self, data: Data, columns: Tensor, weights: Tensor, first: bool) -> NewtonSums:
        """The sums of some observations at weights (m, k) of the columns that still move."""
        design = StreamedDesign(self.basis, data.X)
        offset = self.offset[columns]
        problem = newton_problem(
            design, data.y[:, columns], self.likelihood, offset=offset, row_weight=data.weight
        )
        zero = offset.expand_as(problem.Y)
        latent = zero + design.matmul(weights)
        return NewtonSums(
            problem.loss(latent, torch.zeros_like(offset)),
            -design.rmatmul(problem.slope(latent)),
            design.curvature_gram(problem.curvature(latent)),
            -design.rmatmul(problem.slope(zero)) if first else torch.zeros_like(weights),
            problem.row_weight.sum(0),
        )


@dataclass(frozen=True)
class SumsFit(Modes):
    """Outcome of `fit_newton_sums`; every tensor float64."""

    hessian: Tensor  # (c, m, m), of the negative log-likelihood at the weights


def fit_newton_sums(
    blocks: Any,  # of which `Data` with y (n, c) are read, on the device of the offset
    rows: ClassRows,
    *,
    prior_variance: float,
    start: Tensor | None = None,
    tol: float = 1e-4,
    loss_tol: float = 1e-5,
    max_iter: int = 30,
    callback: Callback | None = None,  # hears of the rows of a pass, too
) -> SumsFit:
    """The mode of c problems that share their features, as `skgp.inference.newton.fit_newton`.

    Notes
    -----
    ``O(n c m^2)`` a pass, one a step and one at the start.
    """
    at = _OfBlocks(blocks, rows, prior_variance, start, callback)
    modes = newton_steps(at, tol=tol, loss_tol=loss_tol, max_iter=max_iter, callback=callback)
    return SumsFit(**vars(modes), hessian=at.hessian)


class _OfBlocks:
    """`Objective` that passes over blocks: `losses` takes a pass, which tells all of the step."""

    def __init__(
        self,
        blocks: Any,
        rows: ClassRows,
        prior_variance: float,
        start: Tensor | None,
        callback: Callback | None,
    ) -> None:
        m, c = rows.basis.n_features, len(rows.offset)
        self._blocks, self._rows, self._callback = blocks, rows, callback
        self._precision = 1 / prior_variances(prior_variance, c).to(rows.offset)
        self.weights = rows.offset.new_zeros(m, c)
        if start is not None:
            check_start(start, self.weights)
            self.weights += start.to(self.weights)
        self._columns = torch.arange(c, device=rows.offset.device)
        first = self._pass(self.weights, first=True)
        self.loss, self._slope, self.hessian = self._joint(first, self.weights)
        self.total = first.weight
        self.zero_norm = torch.linalg.vector_norm(first.zero_slope, dim=0)

    def _pass(self, weights: Tensor, *, first: bool = False) -> NewtonSums:
        """Sums of the present columns at weights (m, k)."""
        at = partial(self._rows, columns=self._columns, weights=weights, first=first)
        return self._blocks.sum(at, self._callback)

    def _joint(self, sums: NewtonSums, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """J (k,), and gradients (m, k) and Hessians (k, m, m) of the negative log-likelihood."""
        prior = 0.5 * self._precision[self._columns] * weights.square().sum(0)
        return sums.loss + prior, sums.slope, sums.hessian

    def gradient(self, columns: Tensor) -> Tensor:
        """O(m k)."""
        return self._precision[columns] * self.weights[:, columns] + self._slope[:, columns]

    def direction(self, columns: Tensor, B: Tensor, forcing: Tensor) -> Direction:
        """Exact, by a Cholesky factor a column."""
        self._columns, self._D = columns, torch.empty_like(B)
        for j, column in enumerate(columns.tolist()):
            A = self.hessian[column].clone()
            A.diagonal().add_(self._precision[column])
            self._D[:, j] = cho_solve(jittered_cholesky(A).factor, B[:, j])
        return Direction(self._D, self._D[:0], 0, 0)

    def losses(self, step: Tensor) -> Tensor:
        """A pass, whose sums are kept."""
        weights = self.weights[:, self._columns] + step * self._D
        self._tried = step, self._joint(self._pass(weights), weights)
        return self._tried[1][0]

    def move(self, step: Tensor, after: Tensor) -> None:
        """Another pass where no step of some columns lowers their loss."""
        if not torch.equal(step, self._tried[0]):
            self.losses(step)
        columns, (loss, slope, hessian) = self._columns, self._tried[1]
        self.weights[:, columns] += step * self._D
        self.loss[columns], self._slope[:, columns], self.hessian[columns] = loss, slope, hessian
