r"""The joint Gaussian of values at n points: products, solves, log-determinant and draws.

With the conditionals of :mod:`skgp.inference.vecchia.conditionals`,

.. math:: \Sigma = (I - B)^{-1} D (I - B)^{-T} + \Phi \Phi^T, \qquad
          \Sigma^{-1} = \Lambda - \Lambda \Phi P^{-1} \Phi^T \Lambda, \qquad
          \Lambda = (I - B)^T D^{-1} (I - B), \quad P = I + \Phi^T \Lambda \Phi .

Points are in the order in which they condition on each other. A product takes O(n (H + m)) time.
Solves with I - B go through the points in levels: those of a level depend on lower ones alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.vecchia.conditionals import (
    Conditionals,
)
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det
from skgp.linalg.runtime import TensorState


@dataclass(frozen=True)
class VecchiaPrior(TensorState):
    """N(0, Sigma) of values at n ordered points; vectors are (n,) or, c of them, (n, c)."""

    index: Tensor  # (n, H) of int64; neighbours, the own index in places left
    weights: Tensor  # (n, H); B, 0 in places left
    variance: Tensor  # (n,); D
    features: Tensor  # (n, m); Phi, of no columns without inducing points
    contrasts: Tensor  # (n, m); (I - B) Phi

    @classmethod
    def of(cls, conditionals: Conditionals) -> VecchiaPrior:
        """That of conditionals of all points, in their order."""
        parts = [(tile.b, tile.variance, tile.features) for tile in conditionals]
        b, variance, contrasts = map(torch.cat, zip(*parts, strict=True))
        index = conditionals.group[:, :-1]
        return cls(index, -b[:, :-1], variance, conditionals.features, contrasts)

    def __len__(self) -> int:
        return len(self.variance)

    def _lasting(self) -> dict[str, Any]:
        derived = ("root", "levels")
        return {name: value for name, value in super()._lasting().items() if name not in derived}

    # ---- the residual

    def differences(self, v: Tensor) -> Tensor:
        """(I - B) v."""
        return v - torch.einsum("nh,nh...->n...", self.weights, v[self.index])

    def differences_transposed(self, v: Tensor) -> Tensor:
        """(I - B)' v."""
        spread = torch.einsum("nh,n...->nh...", self.weights, v)
        return v.index_add(0, self.index.reshape(-1), -spread.flatten(0, 1))

    def accumulated(self, v: Tensor) -> Tensor:
        """(I - B)^-1 v."""
        x = v.clone()
        for rows in self.levels[1:]:
            known = torch.einsum("nh,nh...->n...", self.weights[rows], x[self.index[rows]])
            x[rows] = v[rows] + known
        return x

    def accumulated_transposed(self, v: Tensor) -> Tensor:
        """(I - B)^-T v."""
        x = v.clone()
        for rows in reversed(self.levels[1:]):
            spread = torch.einsum("nh,n...->nh...", self.weights[rows], x[rows])
            x.index_add_(0, self.index[rows].reshape(-1), spread.flatten(0, 1))
        return x

    @cached_property
    def levels(self) -> list[Tensor]:
        """Rows by level: those without neighbours first, then those that depend on these, ..."""
        level = torch.zeros(len(self), dtype=torch.int64, device=self.index.device)
        if self.index.shape[1]:
            pending, k = torch.arange(len(self), device=self.index.device), 0
            while len(pending):  # rows that depend on rows of level k or more
                near = self.index[pending]
                depends = ((level[near] >= k) & (near != pending[:, None])).any(1)
                pending, k = pending[depends], k + 1
                level[pending] = k
        order = level.argsort(stable=True)
        return list(order.split(torch.bincount(level).tolist()))

    # ---- with the global part

    @cached_property
    def root(self) -> Tensor:
        """Lower Cholesky factor (m, m) of P."""
        E = self._scaled(self.contrasts, self.variance.rsqrt())
        return jittered_cholesky(torch.eye(E.shape[1]).to(E) + E.mT @ E).factor

    def precision(self, v: Tensor) -> Tensor:
        """Sigma^-1 v."""
        e = self._scaled(self.differences(v), 1 / self.variance)
        if self.contrasts.shape[1]:
            known = cho_solve(self.root, self.contrasts.mT @ e)
            e = e - self._scaled(self.contrasts @ known, 1 / self.variance)
        return self.differences_transposed(e)

    def covariance(self, v: Tensor) -> Tensor:
        """Sigma v."""
        x = self._scaled(self.accumulated_transposed(v), self.variance)
        return self.accumulated(x) + self.features @ (self.features.mT @ v)

    def log_det(self) -> Tensor:
        """log |Sigma|, a scalar."""
        return self.variance.log().sum() + log_det(self.root)

    def precision_diagonal(self) -> Tensor:
        """Diagonal of Sigma^-1, (n,); O(n (H + m^2))."""
        each = 1 / self.variance
        spread = (self.weights.square() * each[:, None]).reshape(-1)
        diagonal = each.index_add(0, self.index.reshape(-1), spread)
        known = self.differences_transposed(self._scaled(self.contrasts, each))  # (n, m)
        whitened = torch.linalg.solve_triangular(self.root, known.mT, upper=False)
        return diagonal - whitened.square().sum(0)

    def leave_one_out(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Values v less their means given all others, and the variances (n,) of these."""
        variance = 1 / self.precision_diagonal()
        return self._scaled(self.precision(v), variance), variance

    def log_density(self, v: Tensor) -> Tensor:
        """log N(v; 0, Sigma) in nats, a scalar; of several columns their sum."""
        n_columns = v.numel() / len(self)
        constant = self.log_det() + len(self) * math.log(2 * math.pi)
        return -0.5 * (n_columns * constant + (v * self.precision(v)).sum())

    def draw(self, residual: Tensor, inducing: Tensor) -> Tensor:
        """A draw (n, c), of standard Gaussian numbers (n, c) and (m, c)."""
        x = self.accumulated(self._scaled(residual, self.variance.sqrt()))
        return x + self.features @ inducing

    @staticmethod
    def _scaled(v: Tensor, factor: Tensor) -> Tensor:
        return v * (factor if v.ndim == 1 else factor[:, None])
