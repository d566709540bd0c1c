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
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import MADE_OF
from skgp.inference.newton import PointLikelihood, halved_steps, newton_problem, prior_variances
from skgp.inference.weights.design import Basis, StreamedDesign
from skgp.linalg import NumericalWarning
from skgp.linalg.cholesky import cho_solve, jittered_cholesky
from skgp.linalg.runtime import tile_rows

Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class NewtonSums:
    """What a pass adds up of c columns, at their weights; in float64."""

    loss: Tensor  # (c,), negative log-likelihood, nats
    slope: Tensor  # (m, c), its gradient
    hessian: Tensor  # (c, m, m)
    zero_slope: Tensor  # (m, c), the gradient at zero weights
    weight: Tensor  # (), of the observations

    def __add__(self, other: NewtonSums) -> NewtonSums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return NewtonSums(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class ClassRows:
    """The model that observations are seen through; picklable, for whoever has the blocks."""

    basis: Basis
    likelihood: PointLikelihood
    offset: Tensor  # (c,)

    def __call__(self, data: Data, *, weights: Tensor, first: bool) -> NewtonSums:
        """The statistic of a block, y (n, c), at weights (m, c).

        The gradient at zero weights is that of the `first` pass. Features are made once, of as many
        rows as a tile holds.
        """
        step = tile_rows(8 * MADE_OF * self.basis.n_features)
        tiles = (data.take(slice(i, i + step)) for i in range(0, max(len(data), 1), step))
        return reduce(operator.add, (self._of_tile(tile, weights, first) for tile in tiles))

    def _of_tile(self, data: Data, weights: Tensor, first: bool) -> NewtonSums:
        design = StreamedDesign(self.basis, data.X)
        problem = newton_problem(
            design, data.y, self.likelihood, offset=self.offset, row_weight=data.weight
        )
        zero = self.offset.expand_as(problem.Y)
        latent = zero + design.matmul(weights)
        return NewtonSums(
            problem.loss(latent, torch.zeros_like(self.offset)),
            -design.rmatmul(problem.slope(latent)),
            design.curvature_gram(problem.curvature(latent)),
            -design.rmatmul(problem.slope(zero)) if first else torch.zeros_like(weights),
            problem.row_weight[:, 0].sum(),
        )


@dataclass(frozen=True)
class SumsFit:
    """Outcome of `fit_newton_sums`; every tensor float64."""

    weights: Tensor  # (m, c)
    loss: Tensor  # (c,), J at the weights, nats
    hessian: Tensor  # (c, m, m), of the negative log-likelihood there
    n_iter: int  # Newton steps
    converged: bool
    history: list[dict]


def fit_newton_sums(
    blocks: Any,
    rows: ClassRows,
    *,
    prior_variance: float,
    start: Tensor | None = None,
    tol: float = 1e-4,
    loss_tol: float = 1e-5,
    max_iter: int = 30,
    callback: Callback | None = None,
) -> SumsFit:
    """The mode of c problems that share their features, as `skgp.inference.newton.fit_newton`.

    Parameters
    ----------
    blocks : Blocks
        Of which `Data` with y (n, c) are read, on the device of the offset.
    rows : ClassRows
    prior_variance, start, tol, loss_tol, max_iter, callback
        As there; the callback hears of the rows of a pass, too.

    Returns
    -------
    SumsFit

    Notes
    -----
    ``O(n c m^2)`` a pass, one a step and one at the start.
    """
    m, c = rows.basis.n_features, len(rows.offset)
    precision = 1 / prior_variances(prior_variance, c).to(rows.offset)
    W = rows.offset.new_zeros(m, c) if start is None else start.to(rows.offset)

    def at(weights: Tensor, first: bool = False) -> tuple[NewtonSums, Tensor]:
        """Sums, and J (c,)."""
        sums = blocks.sum(partial(rows, weights=weights, first=first), callback)
        return sums, sums.loss + 0.5 * precision * weights.square().sum(0)

    sums, loss = at(W, first=True)
    scale = torch.linalg.vector_norm(sums.zero_slope, dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    settled, stopped = torch.zeros_like(loss, dtype=torch.bool), False
    history: list[dict] = []
    while True:
        gradient = precision * W + sums.slope  # (m, c)
        norm = torch.linalg.vector_norm(gradient, dim=0) / scale
        settled |= norm <= tol
        if stopped or len(history) == max_iter or bool(settled.all()):
            break
        D = torch.where(settled, 0.0, _directions(sums.hessian, precision, -gradient))
        last: list[tuple[NewtonSums, Tensor]] = [(sums, loss)]

        def after(step: Tensor, D: Tensor = D, W: Tensor = W, last: list = last) -> Tensor:
            last[0] = at(W + step * D)
            return last[0][1]

        step, found = halved_steps(after, loss, (gradient * D).sum(0))
        W = W + step * D
        if not torch.equal(found, last[0][1]):  # no step of some columns lowers their loss
            last[0] = at(W)
        settled |= loss - last[0][1] <= loss_tol * sums.weight
        sums, loss = last[0]
        info = {
            "loss": float(loss.sum()),
            "gradient_norm": float(norm.max()),
            "n_active": int((~settled).sum()),
            "step": float(step.min()),
        }
        history.append(info)
        stopped = callback is not None and bool(callback(len(history), info))
    if not (stopped or bool(settled.all())):
        warnings.warn(
            f"Newton's method ended after max_iter={max_iter} steps at a relative gradient of "
            f"{float(norm.max()):.1e}, short of tol={tol:.1e}. Raise max_iter.",
            NumericalWarning,
            stacklevel=2,
        )
    return SumsFit(W, loss, sums.hessian, len(history), bool(settled.all()), history)


def _directions(hessian: Tensor, precision: Tensor, B: Tensor) -> Tensor:
    """Newton directions (m, c), a Cholesky factor a column."""
    D = torch.empty_like(B)
    for j, H in enumerate(hessian):
        A = H.clone()
        A.diagonal().add_(precision[j])
        D[:, j] = cho_solve(jittered_cholesky(A).factor, B[:, j])
    return D
