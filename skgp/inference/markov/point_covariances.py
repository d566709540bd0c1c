r"""Covariances of f at any times with f at the points of a series, under its posterior.

Given the states :math:`v = (s_a, s_b)` at the points on both sides of x, f(x) is independent of
all other states, with mean :math:`h^\top v` (:mod:`.conditionals`). With the posterior covariances
G of the states at the points and f there, (m, d, m), therefore

.. math:: \operatorname{Cov}(f(x), f(t_k)) = \sum_{p} h_p(x)\, G_{v_p k},

and a quadratic form :math:`a^\top C\, a'` of such covariances with the points of two series is one
of :math:`G\, C\, G'^\top`, of which a row takes :math:`4 d^2` entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.defaults import BATCH_NUMBERS
from skgp.inference.markov.conditionals import condition
from skgp.inference.markov.posterior import Posterior
from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import tile_rows


@dataclass(frozen=True)
class PointCovariances:
    """Covariances of f at n times with f at the m points of a series, not worked out."""

    h: Tensor  # (2d, n), weights of the states at the points before and after
    first: Tensor  # (n,) row of G of the first of them
    G: Tensor  # ((m + 2) d, m): zeros where there is no point before or after

    @staticmethod
    def of(dynamics: Dynamics, posterior: Posterior, x: Tensor) -> "PointCovariances":
        """At times x (n,) in any order. O(m^2 d^2) at the first call for a posterior; O(n d^3)."""
        G = posterior.state_covariances  # (m, d, m)
        d, m = G.shape[1:]
        found = condition(dynamics, posterior.times, x)
        padded = torch.nn.functional.pad(G.reshape(m * d, m), (0, 0, d, d))
        return PointCovariances(found.h, d * found.interval, padded)

    def __getitem__(self, rows: slice) -> "PointCovariances":
        """Of some of the times."""
        return PointCovariances(self.h[:, rows], self.first[rows], self.G)

    def __matmul__(self, v: Tensor) -> Tensor:
        """Products (n, k) with v (m, k)."""
        return self._weighted(self.G @ v)

    def dense(self) -> Tensor:
        """The covariances (n, m)."""
        return self._weighted(self.G)

    def _weighted(self, table: Tensor) -> Tensor:
        """Rows (n, k) of a table with the rows of G, weighted by h."""
        total = self.h.new_zeros(len(self.first), table.shape[1])
        for p, weight in enumerate(self.h):
            total.addcmul_(weight[:, None], table[self.first + p])
        return total

    def form(self, C: Tensor, other: "PointCovariances") -> Tensor:
        """``a' C b`` (n,) for the covariances a (m,) of each time and b (m',) of the `other`'s.

        With C (m, m'): O(n m m') of few times; of many O(m m' d (m + m' d) + n d^2).
        """
        (rows, m), (columns, _) = self.G.shape, other.G.shape
        if rows * columns > BATCH_NUMBERS or len(self.first) * m < rows * (m + columns):
            step, out = tile_rows(8 * 3 * (m + C.shape[1])), torch.empty_like(self.h[0])
            for some in (slice(i, i + step) for i in range(0, len(out), step)):
                out[some] = ((self[some] @ C) * other[some].dense()).sum(1)
            return out
        table = (self.G @ C @ other.G.T).reshape(-1)
        start = self.first * columns + other.first
        total = torch.zeros_like(self.h[0])
        for p, left in enumerate(self.h):
            for q, right in enumerate(other.h):
                total += left * right * table[start + (p * columns + q)]
        return total
