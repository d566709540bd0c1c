r"""Gaussian noise inside the residual: the density of observations, and f given them.

With the conditionals of :mod:`skgp.inference.vecchia.conditionals`, noise among the variances, the
covariance of targets Y (n, c) is :math:`\tilde S + \Phi \Phi^T`. Its density needs four sums over
the rows, of D, of the contrasts e of Y and E of :math:`\Phi`,

.. math:: \log p(Y) = -\tfrac12 \Big[ c \sum_i \log D_i + c \log |P| + \sum_i |e_i|^2 / D_i
          - \operatorname{tr}(h^T P^{-1} h) + n c \log 2 \pi \Big], \qquad
          P = I + \sum_i E_i E_i^T / D_i, \quad h = \sum_i E_i e_i^T / D_i,

and :math:`\Phi u`, u ~ N(0, I), has the posterior :math:`u \sim N(P^{-1} h, P^{-1})` (Woodbury).
Sums over some rows, multiplied by n over their number, estimate those of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.vecchia.conditionals import Conditionals, Cotangents, Tile
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det
from skgp.linalg.rows import gather_rows


@dataclass(frozen=True)
class Sums:
    """What the density of targets needs of some rows, and the posterior of u."""

    n: float  # observations that the sums stand for
    scale: float  # observations a row
    log_variance: Tensor  # (); sum of log D
    square: Tensor  # (); sum of |e|^2 / D
    cross: Tensor  # (m, c); h
    precision: Tensor  # (m, m); P

    @cached_property
    def root(self) -> Tensor:
        """Lower Cholesky factor (m, m) of P."""
        return jittered_cholesky(self.precision).factor

    @cached_property
    def mean(self) -> Tensor:
        """E[u], (m, c)."""
        return cho_solve(self.root, self.cross)

    def log_density(self) -> Tensor:
        """log p(Y), a scalar in nats."""
        c = self.cross.shape[1]
        of_u = c * log_det(self.root) - (self.cross * self.mean).sum()
        constant = self.n * c * math.log(2 * math.pi)
        return -0.5 * (c * self.log_variance + of_u + self.square + constant)

    def cotangents(self, Y: Tensor) -> Cotangents:
        """Derivatives of `log_density` in the conditionals of a row."""
        c, mean = self.cross.shape[1], self.mean
        inner = c * torch.cholesky_inverse(self.root) + mean @ mean.mT  # -2 d/dP

        def of_tile(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
            D, e, E = tile.variance[:, None], tile.contrast(Y), tile.features
            error = e - E @ mean  # (t, c)
            weighted = E @ inner  # (t, m)
            squares = (e * (error + error - e)).sum(1) + (weighted * E).sum(1)
            of_D = 0.5 * self.scale * (squares / D[:, 0] - c) / D[:, 0]
            of_e = -self.scale * error / D
            of_b = torch.einsum("tc,thc->th", of_e, gather_rows(Y, tile.group))
            of_E = self.scale * (e @ mean.mT - weighted) / D
            return of_D, of_b, of_E

        return of_tile


@torch.no_grad()
def sums(conditionals: Conditionals, Y: Tensor, n: float | None = None) -> Sums:
    """Sums over the rows of the conditionals, of targets Y (n, c) of all points.

    `n` is the number of observations that they are to stand for; by default that of the rows.
    """
    t, m = len(conditionals.group), len(conditionals.Z)
    log_variance, square = Y.new_zeros(2).unbind()
    cross, precision = Y.new_zeros(m, Y.shape[1]), Y.new_zeros(m, m)
    for tile in conditionals:
        root = tile.variance.rsqrt()[:, None]
        e = root * tile.contrast(Y)
        log_variance -= 2 * root.log().sum()
        square += e.square().sum()
        E = root * tile.features
        cross += E.mT @ e
        precision += E.mT @ E
    scale = 1.0 if n is None else n / t
    precision = torch.eye(m).to(precision) + scale * precision
    return Sums(scale * t, scale, scale * log_variance, scale * square, scale * cross, precision)
