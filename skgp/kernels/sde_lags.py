r"""Covariances of f: in an interval of time given the state before it, and of several components.

In an interval they have a low rank (`Generators`). At times :math:`\tau_1 \le \dots \le \tau_L`
after a state :math:`s_0` of a stationary process

.. math:: \operatorname{Cov}(f_j, f_i \mid s_0) = H F(\tau_j - \tau_i) Q(\tau_i) H^\top
          = u_j v_i^\top \quad (i \le j), \qquad
          u_j = H F(\tau_j), \quad v_i^\top = F(\tau_i)^{-1} P_0 H^\top - P_0 u_i^\top,

as :math:`Q = P_0 - F P_0 F^\top`: two vectors a point, of as many numbers as the state has, make
what takes exponentials of all pairs. The first shrink and the second grow as the slowest and the
fastest process forget; a gap over which a component has forgotten all is cut for that component,
and an interval must not be too long: of polynomials of a degree p, which Matern processes have,
products :math:`u_j v_i` of size one have terms of size :math:`r^{2p}`. Of a process that is not
stationary :math:`v_i^\top = F(\tau_i)^{-1} Q(\tau_i) H^\top` has a form of its own.

Those of the components j of a sum (`Covariances`), and their gradients, are

.. math:: k_j(t) = \sum_{b \in j} v_b \prod_{i \in b} c_i(\lambda_{bi} |t|), \qquad
          \frac{\partial k_j}{\partial \log v_b} = v_b \prod_i c_i, \qquad
          \frac{\partial k_j}{\partial \log \lambda_{bi}}
          = v_b\, r c_i'(r) \prod_{k \ne i} c_k, \quad r = \lambda_{bi} |t|.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skgp.linalg.runtime import asks_for_gradients, constant, constant_like

from .defaults import COVARIANCES, FORGOTTEN, LARGEST_TERM, MOST_DECAY
from .sde import Dynamics
from .sde_block import Block
from .sde_processes import MATERN12, MATERN32, MATERN52, ROTATION


class Generators:
    """The vectors u and v of all components, block by block.

    `is_complete` unless a component has none.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.is_complete = all(
            p.degree is not None and (p.is_stationary or len(block.primitives) == 1)
            for block in blocks
            for p in block.primitives
        )
        self._groups, start = [], 0
        for _, members in groupby(blocks, key=lambda block: block.primitives):
            self._groups.append(_Group(start, list(members)))
            start = self._groups[-1].states.stop
        self.n_states = start

    def clock(self, gaps: Tensor) -> list[Tensor] | None:
        """Times of points after the starts of intervals, as each group of blocks sees them.

        From the gaps (c, L) before each point; (b, c, L), or (1, c, L) where no gap is cut. None if
        an interval is too long.
        """
        largest, clocks = float(gaps.max()), []
        for group in self._groups:
            cut = gaps[None]
            if largest > float(group.memory.min()):
                cut = gaps.minimum(group.memory[:, None, None])
            clocks.append(cut.cumsum(-1))
            if not group.reaches(clocks[-1][..., -1].amax(-1)):
                return None
        return clocks

    def times(self, clocks: list[Tensor]) -> Tensor:
        """The same of each state, (c, d, L), or (c, 1, L) where no gap is cut."""
        if all(len(clock) == 1 for clock in clocks):
            return clocks[0].transpose(0, 1)
        parts = [
            clock.expand(group.size, -1, -1).repeat_interleave(group.n_states, 0)
            for clock, group in zip(clocks, self._groups, strict=True)
        ]
        return torch.cat(parts).transpose(0, 1)

    def fill(self, clocks: list[Tensor], scale: Tensor | None, u: Tensor, v: Tensor) -> None:
        """Write u and v, (c, d, L), of each point times a `scale` (c, L)."""
        c, L = clocks[0].shape[1:]
        for clock, group in zip(clocks, self._groups, strict=True):
            shape = group.size, group.n_states, c, L
            for out, part in zip((u, v), group.lags(clock), strict=True):
                part = part.view(group.n_states, group.size, c, L)
                if scale is not None:
                    part.mul_(scale)
                target = out[:, group.states].unflatten(1, shape[:2])  # (c, b, k, L)
                target.copy_(part.permute(2, 1, 0, 3))

    def ends(self, clocks: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Transitions F and Q over whole intervals, (c, d, d)."""
        c = clocks[0].shape[1]
        F, Q = clocks[0].new_zeros(2, c, self.n_states, self.n_states)
        for clock, group in zip(clocks, self._groups, strict=True):
            for out, part in zip((F, Q), group.transition(clock[..., -1]), strict=True):
                block = out[:, group.states, group.states]
                size = group.size, group.n_states
                cells = block.unflatten(2, size).unflatten(1, size).diagonal(0, 1, 3)
                cells.copy_(part.permute(3, 0, 1, 2))  # (c, k, k, b)
        return F, Q


class _Group:
    """Consecutive blocks of the same processes, which are worked on together."""

    def __init__(self, start: int, blocks: list[Block]) -> None:
        self._first, self.size = blocks[0], len(blocks)
        self.primitives, self.n_states = self._first.primitives, self._first.n_states
        self.states = slice(start, start + self.size * self.n_states)
        rows = [block.rates for block in blocks]
        self._rates = torch.tensor(rows, dtype=torch.float64)  # (b, f)
        self._variance = self._rates.new_tensor([block.variance for block in blocks])
        #: P0 of each, (b, k, k), as far as it stands in v.
        self._stationary = torch.stack([block.stationary * block.is_stationary for block in blocks])
        decay = self._rates.new_tensor([p.decay for p in self.primitives])
        self._decay = (self._rates * decay).sum(1)
        #: Gap (b,) over which each forgets all.
        self.memory = torch.where(self._decay > 0, FORGOTTEN / self._decay, math.inf)

    def reaches(self, time: Tensor) -> bool:
        """Whether intervals of some length, of each block (b,) or all (1,), are not too long."""
        degree = self._rates.new_tensor([2.0 * (p.degree or 0) for p in self.primitives])
        terms = (self._rates * time[:, None]).clamp(min=1.0).pow(degree).prod(1)
        return bool(((terms <= LARGEST_TERM) & (self._decay * time <= MOST_DECAY)).all())

    def lags(self, clock: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors u and v, (k, b, m), at times (b, ...), of m numbers, after the start."""
        parts, m = [], clock[0].numel()
        for r, p in zip(self._scaled(clock), self.primitives, strict=True):
            part = r.new_empty(2, p.n_states, len(r))
            p.fill_lags(r, part[0], part[1])
            parts.append(part)
        one = self._rates.new_ones(2, 1, self.size * m)
        both = reduce(lambda x, y: (x[:, :, None] * y[:, None]).flatten(1, 2), parts or [one])
        u, back = both.view(2, self.n_states, self.size, m)
        v = back * self._variance[:, None]
        for i, j in torch.nonzero(self._stationary.ne(0).any(0)).tolist():
            v[i].addcmul_(self._stationary[:, i, j, None], u[j], value=-1)
        return u, v

    def transition(self, clock: Tensor) -> tuple[Tensor, Tensor]:
        """F and Q, (k, k, b, m), over times (b, m)."""
        factors, shape = [], (self.n_states, self.n_states, self.size, clock.shape[-1])
        for r, p in zip(self._scaled(clock), self.primitives, strict=True):
            F = r.new_empty(p.n_states, p.n_states, len(r))
            factors.append((F, torch.empty_like(F)))
            p.fill(r, *factors[-1])
        like = clock.expand(self.size, -1).reshape(-1)
        F, Q = self._first.product(factors, like)
        return F.view(shape), Q.view(shape) * self._variance[:, None]

    def _scaled(self, clock: Tensor) -> list[Tensor]:
        """Times of each factor, (b m,), in its own units."""
        times = clock.flatten(1)
        return [(rate[:, None] * times).view(-1) for rate in self._rates.T]


def _gaussian(r: Tensor) -> tuple[Tensor, Tensor]:
    squares = r * r
    value = (squares * -0.5).exp_()
    return value, squares.mul_(value).neg_()


#: By the primitive's name: c(r) and r c'(r).
CORRELATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    **{each.name: each.correlation for each in (MATERN12, MATERN32, MATERN52, ROTATION)},
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
class _Products:
    """Blocks that are products of the same processes, g of them with k factors each."""

    names: tuple[str, ...]  # of the processes
    columns: list[int] = field(default_factory=list)  # (g,) the component of each block
    variances: list[float] = field(default_factory=list)  # (g,)
    rates: list[list[float]] = field(default_factory=list)  # (g, k)
    #: Where log variances (g,) and log rates (g, k) stand among the parameters of all components.
    places: list[int] = field(default_factory=list)
    rate_places: list[list[int]] = field(default_factory=list)

    _kept: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def constants(self, like: Tensor) -> tuple[Tensor, ...]:
        """Columns (g,), variances (g,), rates (g, k), and places (1 + k, g), made once."""
        key = like.dtype, like.device
        if key not in self._kept:
            places = [self.places, *zip(*self.rate_places, strict=True)]
            whole = [constant(x, dtype=torch.int64, device=key[1]) for x in (self.columns, places)]
            numbers = constant_like(self.variances, like), constant_like(self.rates, like)
            self._kept[key] = whole[0], *numbers, whole[1]
        return self._kept[key]

    def gaps(self, left: Tensor, right: Tensor) -> Tensor:
        """Distances (g, n, m) of the inputs (c, n) and (c, m)."""
        columns, *_ = self.constants(left)
        return (left[columns, :, None] - right[columns, None]).abs_()

    def factors(self, gaps: Tensor) -> list[tuple[Tensor, Tensor]]:
        """c and r c' of each factor, (g, n, m)."""
        _, _, rates, _ = self.constants(gaps)
        return [
            CORRELATIONS[name](gaps * rates[:, i, None, None]) for i, name in enumerate(self.names)
        ]

    def correlations(self, left: Tensor, right: Tensor) -> Tensor:
        """Products of the factors, (g, n, m)."""
        gaps = self.gaps(left, right)
        if not self.names:
            return torch.ones_like(gaps)
        if asks_for_gradients(left):
            rates = self.constants(gaps)[2].T[..., None, None]  # (k, g, 1, 1)
            parts = zip(rates, self.names, strict=True)
            return reduce(torch.mul, [_Correlation.apply(gaps * r, name) for r, name in parts])
        return reduce(torch.mul, [value for value, _ in self.factors(gaps)])

    def slopes(self, left: Tensor, right: Tensor, K_bar: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Contractions (g,) of K_bar (n, m) with the derivatives in log variances and log rates."""
        gaps = self.gaps(left, right)
        (_, variances, *_), bar = self.constants(gaps), K_bar.reshape(-1)

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
        groups: dict[tuple[str, ...], _Products] = {}
        start = 0
        for column, each in enumerate(dynamics):
            place = start + len(each.blocks)  # of the next log rate
            for k, (_, block) in enumerate(each.blocks):
                names = tuple(primitive.name for primitive in block.primitives)
                group = groups.setdefault(names, _Products(names))
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
            columns, variances, *_ = group.constants(left)
            values = group.correlations(left, right).mul_(variances[:, None, None])
            found.index_add_(0, columns, values)
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
                total[group.constants(x)[-1]] += torch.stack([slope, *slopes])
        return list(total.cpu().split(self._sizes))

    def _sum(self, left: Tensor, right: Tensor) -> Tensor:
        found = left.new_zeros(left.shape[1] * right.shape[1])
        for group in self._groups:
            values = group.correlations(left, right).reshape(len(group.columns), -1)
            found += group.constants(left)[1] @ values
        return found.reshape(left.shape[1], -1)

    def _rows(self, n: int, m: int) -> Iterator[slice]:
        """Blocks of the n rows of a matrix of m columns."""
        widest = max(len(group.columns) for group in self._groups)
        height = max(1, COVARIANCES // (widest * max(1, m)))
        return (slice(a, min(n, a + height)) for a in range(0, n, height))
