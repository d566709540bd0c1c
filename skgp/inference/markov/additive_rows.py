r"""Covariances of the components of an additive model, in the space of its distinct rows.

They, and their gradients, are

.. math:: k_j(t) = \sum_{b \in j} v_b \prod_{i \in b} c_i(\lambda_{bi} |t|), \qquad
          \frac{\partial k_j}{\partial \log v_b} = v_b \prod_i c_i, \qquad
          \frac{\partial k_j}{\partial \log \lambda_{bi}}
          = v_b\, r c_i'(r) \prod_{k \ne i} c_k, \quad r = \lambda_{bi} |t|.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skgp.inference.defaults import COVARIANCES
from skgp.kernels.sde import Dynamics
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.runtime import asks_for_gradients, constant, constant_like


def _matern12(r: Tensor) -> tuple[Tensor, Tensor]:
    e = r.neg().exp_()
    return e, (r * e).neg_()


def _matern32(r: Tensor) -> tuple[Tensor, Tensor]:
    e = r.neg().exp_()
    re = r * e
    return e.add_(re), re.mul_(r).neg_()


def _matern52(r: Tensor) -> tuple[Tensor, Tensor]:
    e = r.neg().exp_()
    linear = (r * e).add_(e)  # (1 + r) e
    third = (r * r).mul_(1 / 3)
    return torch.addcmul(linear, third, e), third.mul_(linear).neg_()


def _rotation(r: Tensor) -> tuple[Tensor, Tensor]:
    return r.cos(), r.sin().mul_(r).neg_()


def _gaussian(r: Tensor) -> tuple[Tensor, Tensor]:
    squares = r * r
    value = (squares * -0.5).exp_()
    return value, squares.mul_(value).neg_()


# By the primitive's name: c(r) and r c'(r).
CORRELATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "matern12": _matern12,
    "matern32": _matern32,
    "matern52": _matern52,
    "rotation": _rotation,
    "gaussian4": _gaussian,
    "gaussian6": _gaussian,
}


class _Correlation(torch.autograd.Function):
    """c(r) of a process as a function that autograd knows; its derivative at 0 is taken as 0."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, name: str) -> Tensor:
        value, slope = CORRELATIONS[name](r)
        ctx.save_for_backward(r, slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        r, slope = ctx.saved_tensors
        return grad * torch.where(r > 0, slope / r, 0.0), None


@dataclass
class _Group:
    """Blocks that are products of the same processes, g of them with k factors each."""

    names: tuple[str, ...]  # of the processes
    columns: list[int] = field(default_factory=list)  # (g,) the component of each block
    variances: list[float] = field(default_factory=list)  # (g,)
    rates: list[list[float]] = field(default_factory=list)  # (g, k)
    #: Where log variances (g,) and log rates (g, k) stand among the parameters of all components.
    places: list[int] = field(default_factory=list)
    rate_places: list[list[int]] = field(default_factory=list)

    def gaps(self, left: Tensor, right: Tensor) -> Tensor:
        """Distances (g, n, m) of the inputs (c, n) and (c, m)."""
        columns = constant(self.columns, dtype=torch.int64, device=left.device)
        return (left[columns, :, None] - right[columns, None]).abs_()

    def factors(self, gaps: Tensor) -> list[tuple[Tensor, Tensor]]:
        """c and r c' of each factor, (g, n, m)."""
        rates = constant_like(self.rates, gaps)
        return [
            CORRELATIONS[name](gaps * rates[:, i, None, None]) for i, name in enumerate(self.names)
        ]

    def correlations(self, left: Tensor, right: Tensor) -> Tensor:
        """Products of the factors, (g, n, m)."""
        gaps = self.gaps(left, right)
        if not self.names:
            return torch.ones_like(gaps)
        if asks_for_gradients(left):
            rates = constant_like(self.rates, gaps).T[..., None, None]  # (k, g, 1, 1)
            parts = zip(rates, self.names, strict=True)
            return reduce(torch.mul, [_Correlation.apply(gaps * r, name) for r, name in parts])
        return reduce(torch.mul, [value for value, _ in self.factors(gaps)])

    def slopes(self, left: Tensor, right: Tensor, K_bar: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Contractions (g,) of K_bar (n, m) with the derivatives in log variances and log rates."""
        gaps = self.gaps(left, right)
        variances, bar = constant_like(self.variances, gaps), K_bar.reshape(-1)

        def contract(values: Tensor) -> Tensor:
            return variances * (values.reshape(len(values), -1) @ bar)

        if not self.names:
            return contract(torch.ones_like(gaps)), []
        factors = self.factors(gaps)
        by_rate = [
            contract(reduce(torch.mul, [slope] + [v for k, (v, _) in enumerate(factors) if k != i]))
            for i, (_, slope) in enumerate(factors)
        ]
        return contract(reduce(torch.mul, [value for value, _ in factors])), by_rate


class Covariances:
    """Covariance functions of all c components, at fixed hyper-parameters.

    Inputs are (c, n): a row for each component. O(n m) a block of the dynamics. Blocks of the same
    make are worked on together, whatever their columns, a few rows at a time, so that what is held
    stays in a core's cache and a model of many columns of few rows takes few calls. The processes
    that stand for a squared exponential are given its own covariance here.
    """

    def __init__(self, dynamics: Sequence[Dynamics]) -> None:
        self._sizes = [each.n_parameters for each in dynamics]
        #: k_j(0) of each component.
        self.variances = [sum(b.variance for _, b in each.blocks) for each in dynamics]
        groups: dict[tuple[str, ...], _Group] = {}
        start = 0
        for column, each in enumerate(dynamics):
            place = start + len(each.blocks)  # of the next log rate
            for k, (_, block) in enumerate(each.blocks):
                names = tuple(primitive.name for primitive in block.primitives)
                group = groups.setdefault(names, _Group(names))
                group.columns.append(column)
                group.variances.append(block.variance)
                group.rates.append(list(block.rates))
                group.places.append(start + k)
                group.rate_places.append(list(range(place, place + len(names))))
                place += len(names)
            start += each.n_parameters
        self._groups = list(groups.values())

    def total(self, left: Tensor, right: Tensor) -> Tensor:
        """Covariance of the sum between inputs (c, n) and (c, m), (n, m)."""
        found = left.new_empty(left.shape[1], right.shape[1])
        for rows in self._rows(*found.shape):
            found[rows] = self._sum(left[:, rows], right)
        return found

    def each(self, left: Tensor, right: Tensor) -> Tensor:
        """Covariances of the components between inputs (c, n) and (c, m), (c, n, m)."""
        found = left.new_zeros(len(left), left.shape[1], right.shape[1])
        for group in self._groups:
            variances = constant_like(group.variances, left)[:, None, None]
            columns = constant(group.columns, dtype=torch.int64, device=left.device)
            found.index_add_(0, columns, group.correlations(left, right).mul_(variances))
        return found

    def levels(self, x: Tensor, shares: Tensor) -> Tensor:
        """Products of the covariances at inputs (c, n) with a vector (n,), (c, n)."""
        parts = [self.each(x[:, rows], x) @ shares for rows in self._rows(x.shape[1], x.shape[1])]
        return torch.cat(parts, 1)

    def symmetric(self, x: Tensor) -> Tensor:
        """Covariance of the sum at inputs (c, n), (n, n)."""
        n = x.shape[1]
        found = x.new_zeros(n, n)
        for rows in self._rows(n, n):
            found[rows, : rows.stop] = self._sum(x[:, rows], x[:, : rows.stop])
        found.tril_()
        return found.add_(found.tril(-1).T)

    def gradient(self, x: Tensor, K_bar: Tensor) -> list[Tensor]:
        r"""Contractions of a symmetric matrix with the derivatives of K in each component, (q_j,).

        :math:`\langle \bar K, \partial K / \partial p_j \rangle` for inputs (c, n) and K_bar (n,
        n).
        """
        lower = K_bar.tril(-1).mul_(2)
        lower.diagonal().copy_(K_bar.diagonal())
        total = x.new_zeros(sum(self._sizes))
        for rows in self._rows(*K_bar.shape):
            bar = lower[rows, : rows.stop]
            for group in self._groups:
                slope, slopes = group.slopes(x[:, rows], x[:, : rows.stop], bar)
                places = [group.places, *zip(*group.rate_places, strict=True)]
                for at, each in zip(places, [slope, *slopes], strict=True):
                    total[constant(at, dtype=torch.int64, device=x.device)] += each
        return list(total.cpu().split(self._sizes))

    def _sum(self, left: Tensor, right: Tensor) -> Tensor:
        found = left.new_zeros(left.shape[1] * right.shape[1])
        for group in self._groups:
            values = group.correlations(left, right).reshape(len(group.columns), -1)
            found += constant_like(group.variances, left) @ values
        return found.reshape(left.shape[1], -1)

    def _rows(self, n: int, m: int) -> Iterator[slice]:
        """Blocks of the n rows of a matrix of m columns."""
        widest = max(len(group.columns) for group in self._groups)
        height = max(1, COVARIANCES // (widest * max(1, m)))
        return (slice(a, min(n, a + height)) for a in range(0, n, height))


class RowsPrior:
    """Covariance K (m, m) of the sum at the distinct rows x (c, m), for fixed dynamics."""

    def __init__(self, dynamics: Sequence[Any], x: Tensor) -> None:
        self.covariances, self.x = Covariances(dynamics), x
        self.K = self.covariances.symmetric(x)

    @cached_property
    def factor(self) -> Tensor:
        """Lower Cholesky factor of K."""
        return jittered_cholesky(self.K).factor

    def levels(self, shares: Tensor) -> Tensor:
        r"""Covariances :math:`\sum_i p_i k_j(x_i, \cdot)` of the components' means, (c, m)."""
        return self.covariances.levels(self.x, shares)
