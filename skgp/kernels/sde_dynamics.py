r"""Transitions of a sum of products of Markov processes, for many gaps at once, and their gradient.

The state of a product is the Kronecker product of the states of its factors, with

.. math:: F = F_1 \otimes F_2, \qquad
          Q = Q_1 \otimes P_2 + (P_1 - Q_1) \otimes Q_2, \qquad P_i = P_{0,i},

a sum without cancellation; that of a sum is their concatenation, with block-diagonal matrices. The
derivatives are closed forms: with :math:`r_i = \lambda_i t` and :math:`w_i = \sqrt{q_i} F_i L_i`,

.. math:: \frac{\partial F}{\partial \log \lambda_i} = r_i A_i F, \qquad
          \frac{\partial Q}{\partial \log \lambda_i} = v \dots \otimes
          F_{i-1} P_{i-1} F_{i-1}^\top \otimes r_i w_i w_i^\top \otimes \dots, \qquad
          \frac{\partial Q}{\partial \log v} = Q.
"""

import math
from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .defaults import TILE_ENTRIES
from .sde_processes import Primitive

__all__ = ["Block", "Dynamics"]


class Block:
    """One component: the product of processes at given rates per unit of time; none for a constant.

    `kind` joins the names of the primitives; the variance is in `stationary`; from the `horizon` on
    F is 0, which is inf for a component that never forgets.
    """

    def __init__(
        self, variance: float, primitives: Sequence[Primitive], rates: Sequence[float]
    ) -> None:
        self.variance = variance
        self.primitives = tuple(primitives)
        self.rates = tuple(rates)
        self.kind = " * ".join(p.name for p in self.primitives) or "constant"
        self._noisy = [i for i, p in enumerate(self.primitives) if p.is_noisy]
        self.n_states = math.prod(p.n_states for p in self.primitives)
        self.horizon = min(
            (p.horizon / rate for p, rate in zip(self.primitives, self.rates, strict=True)),
            default=math.inf,
        )

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def observation(self) -> Tensor:
        one = torch.ones(1, dtype=torch.float64)
        return reduce(torch.kron, (p.observation for p in self.primitives), one)

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def stationary(self) -> Tensor:
        variance = torch.full((1, 1), self.variance, dtype=torch.float64)
        return reduce(torch.kron, (p.stationary for p in self.primitives), variance)

    def transition(self, gaps: Tensor) -> tuple[Tensor, Tensor]:
        """Return F and Q, (d, d, n); see `Dynamics.transition`."""
        shape = (self.n_states, self.n_states, len(gaps))
        F, Q = gaps.new_empty(shape), gaps.new_empty(shape)
        self.fill(gaps, F, Q)
        return F, Q

    def fill(self, gaps: Tensor, F: Tensor, Q: Tensor) -> None:
        """Write F and Q, (d, d, n) with the batch contiguous."""
        gaps = self._finite(gaps)
        for tile in self._tiles(len(gaps)):
            f, q = F[..., tile], Q[..., tile]
            if len(self.primitives) == 1:
                self.primitives[0].fill(self.rates[0] * gaps[tile], f, q)
            else:
                product, noise = self._product(self._factors(gaps[tile]), gaps[tile])
                f.copy_(product)
                q.copy_(noise)
            q.mul_(self.variance)

    def covariance(self, lags: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return k and its derivatives in the log rates, each in the shape of the lags."""
        if not self.primitives:
            return np.full_like(lags, self.variance), []
        parts = [p.correlation(r * lags) for p, r in zip(self.primitives, self.rates, strict=True)]
        values, slopes = zip(*parts, strict=True)
        if len(values) == 1:
            return self.variance * values[0], [self.variance * slopes[0]]
        others = [[*values[:i], *values[i + 1 :]] for i in range(len(values))]
        return self.variance * reduce(np.multiply, values), [
            self.variance * reduce(np.multiply, rest, slope)
            for slope, rest in zip(slopes, others, strict=True)
        ]

    def gradient(self, gaps: Tensor, F_bar: Tensor, Q_bar: Tensor) -> tuple[float, list[float]]:
        """Return the contraction with d/dlog variance and with each d/dlog rate."""
        gaps = self._finite(gaps)
        d = self.n_states
        by_variance = gaps.new_zeros(())
        by_rate = gaps.new_zeros(len(self.primitives))
        spread = gaps.new_zeros(d, d)  # sum of gap F_bar F'
        for tile in self._tiles(len(gaps)):
            gap, factors = gaps[tile], self._factors(gaps[tile])
            F, Q = self._product(factors, gap)
            weighted = F_bar[..., tile] * gap
            spread += weighted.reshape(d, -1) @ F.reshape(d, -1).T
            barred = Q_bar[..., tile]
            by_variance += (barred * Q).sum()
            for i in self._noisy:
                by_rate[i] += (barred * self._noise_slope(factors, i, gap)).sum()
        by_rate *= self.variance
        for i in range(len(self.primitives)):
            by_rate[i] += self.rates[i] * (self._feedback(i).to(spread) * spread).sum()
        return float(by_variance) * self.variance, by_rate.tolist()

    def _finite(self, gaps: Tensor) -> Tensor:
        """Gaps capped where the component has forgotten all: there F = 0 and Q = P0."""
        if math.isfinite(self.horizon):
            return gaps.clamp(max=self.horizon)
        if self.primitives and bool(gaps.isinf().any()):
            raise ValueError(
                f"gaps must be finite for the component {self.kind}, which never forgets; got an "
                "infinite one. Multiply the kernel by one that decays, or keep the series whole."
            )
        return gaps if self.primitives else gaps.clamp(max=0)

    def _tiles(self, n: int) -> list[slice]:
        size = max(512, TILE_ENTRIES // self.n_states**2)
        return [slice(start, start + size) for start in range(0, n, size)]

    def _factors(self, gap: Tensor) -> list[tuple[Tensor, Tensor]]:
        factors = []
        for p, rate in zip(self.primitives, self.rates, strict=True):
            shape = (p.n_states, p.n_states, len(gap))
            F, Q = gap.new_empty(shape), gap.new_empty(shape)
            p.fill(rate * gap, F, Q)
            factors.append((F, Q))
        return factors

    def _product(self, factors: list[tuple[Tensor, Tensor]], gap: Tensor) -> tuple[Tensor, Tensor]:
        """Transition and noise covariance of the product of factors at variance 1."""
        if not factors:
            one = gap.new_ones(1, 1, len(gap))
            return one, torch.zeros_like(one)
        (F, Q), noisy = factors[0], self.primitives[0].is_noisy
        P = self.primitives[0].stationary.to(gap)[..., None]
        for p, (F2, Q2) in zip(self.primitives[1:], factors[1:], strict=True):
            P2 = p.stationary.to(gap)[..., None]
            product = _kron(Q, P2)
            if p.is_noisy:
                product += _kron(P - Q if noisy else P, Q2)
            F, Q, P, noisy = _kron(F, F2), product, _kron(P, P2), noisy or p.is_noisy
        return F, Q

    def _noise_slope(self, factors: list[tuple[Tensor, Tensor]], i: int, gap: Tensor) -> Tensor:
        """Return dQ / dlog rate_i at variance 1, (d, d, m)."""
        parts = []
        for j, (p, (F, Q)) in enumerate(zip(self.primitives, factors, strict=True)):
            if j == i:
                w = F[:, -1] * p.noise[-1].to(F)
                parts.append(w[:, None] * (self.rates[i] * gap * w))
            else:
                P = p.stationary.to(Q)[..., None]
                parts.append(P - Q if p.is_noisy else P)
        return reduce(_kron, parts)

    def _feedback(self, i: int) -> Tensor:
        """Return I x A_i x I, (d, d)."""
        feedback = torch.ones(1, 1, dtype=torch.float64)
        for j, p in enumerate(self.primitives):
            eye = torch.eye(p.n_states, dtype=torch.float64)
            feedback = torch.kron(feedback, p.feedback if j == i else eye)
        return feedback


class Dynamics:
    r"""A state-space form at numbers: plain tensors, no autograd; made when first asked for.

    Its parameters (q,) are the log variances of the blocks, then the log rates of their factors;
    over a time t, with constant matrices that commute with F,

    .. math:: \frac{\partial F}{\partial \log \lambda_i} = t B_i F, \qquad
              \frac{\partial Q}{\partial \log \lambda_i} = t F W_i F^\top.

    Attributes
    ----------
    n_states, n_parameters : int
        d and q.
    blocks : list of (slice, Block)
        The states of each component. F, Q and P0 are 0 between blocks.
    observation : Tensor of shape (d,)
        H: f = H s.
    stationary : Tensor of shape (d, d)
        P0, covariance of the state at any one time.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        ends = [0, *accumulate(b.n_states for b in blocks)]
        self.blocks = [(slice(ends[i], ends[i + 1]), b) for i, b in enumerate(blocks)]
        self.n_states = ends[-1]
        self.n_parameters = sum(1 + len(b.primitives) for b in blocks)

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def observation(self) -> Tensor:
        return torch.cat([block.observation for _, block in self.blocks])

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def stationary(self) -> Tensor:
        return torch.block_diag(*(block.stationary for _, block in self.blocks))

    def transition(self, gaps: Tensor) -> tuple[Tensor, Tensor]:
        """Transition matrices F and noise covariances Q (d, d, n) over time gaps (n,): s' = F s +
        N(0, Q).

        Gaps are not negative, float64; 0 gives I and 0; inf gives 0 and P0, and a ValueError where
        a component never forgets (a Cosine, a periodic kernel). Entry (i, j) of Q is accurate
        relative to sqrt(Q_ii Q_jj). O(n d^2) and the exponentials.
        """
        if len(self.blocks) == 1:
            return self.blocks[0][1].transition(gaps)
        shape = (self.n_states, self.n_states, len(gaps))
        F, Q = gaps.new_zeros(shape), gaps.new_zeros(shape)
        for s, block in self.blocks:
            block.fill(gaps, F[s, s], Q[s, s])
        return F, Q

    def covariance(self, lags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Covariance (n,) of f over lags (n,), finite, and its derivatives in the parameters, (q,
        n).
        """
        values, slopes = zip(*(block.covariance(lags) for _, block in self.blocks), strict=True)
        return reduce(np.add, values), np.stack(
            [*values, *(each for part in slopes for each in part)]
        )

    def transition_gradient(self, gaps: Tensor, F_bar: Tensor, Q_bar: Tensor) -> Tensor:
        r"""Contraction of the transition's derivatives, summed over gaps (n,); (q,).

        .. math:: \sum_n \langle \bar F_n, \partial F_n / \partial p \rangle
                  + \langle \bar Q_n, \partial Q_n / \partial p \rangle.

        Entries of F_bar, Q_bar (d, d, n) between the blocks are not read; Q_bar need not be
        symmetric.
        """
        by_variance, by_rate = [], []
        for s, block in self.blocks:
            slope, slopes = block.gradient(gaps, F_bar[s, s], Q_bar[s, s])
            by_variance.append(slope)
            by_rate += slopes
        return torch.tensor(by_variance + by_rate, dtype=torch.float64)

    def stationary_gradient(self, P_bar: Tensor) -> Tensor:
        """Contraction of P_bar (d, d) with the derivatives of P0, (q,): rates do not move it."""
        gradient = torch.zeros(self.n_parameters, dtype=torch.float64)
        for i, (s, block) in enumerate(self.blocks):
            gradient[i] = (P_bar[s, s].cpu() * block.stationary).sum()
        return gradient


def _kron(A: Tensor, B: Tensor) -> Tensor:
    """Kronecker products of the matrices (a, b, m) and (c, e, m), (ac, be, m)."""
    a, b = A.shape[:2]
    c, e = B.shape[:2]
    return (A[:, None, :, None] * B[None, :, None]).reshape(a * c, b * e, -1)
