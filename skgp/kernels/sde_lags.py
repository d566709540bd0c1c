r"""Covariances of f in an interval of time, given the state before it, as a product of low rank.

At times :math:`\tau_1 \le \dots \le \tau_L` after a state :math:`s_0` of a stationary process

.. math:: \operatorname{Cov}(f_j, f_i \mid s_0) = H F(\tau_j - \tau_i) Q(\tau_i) H^\top
          = u_j v_i^\top \quad (i \le j), \qquad
          u_j = H F(\tau_j), \quad v_i^\top = F(\tau_i)^{-1} P_0 H^\top - P_0 u_i^\top,

as :math:`Q = P_0 - F P_0 F^\top`: two vectors a point, of as many numbers as the state has, make
what takes exponentials of all pairs. The first shrink and the second grow as the slowest and the
fastest process forget; a gap over which a component has forgotten all is cut for that component,
and an interval must not be too long: of polynomials of a degree p, which Matern processes have,
products :math:`u_j v_i` of size one have terms of size :math:`r^{2p}`. Of a process that is not
stationary :math:`v_i^\top = F(\tau_i)^{-1} Q(\tau_i) H^\top` has a form of its own.
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from .defaults import FORGOTTEN, LARGEST_TERM, MOST_DECAY
from .sde_block import Block


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
