r"""f at any time given the states at the knots on both sides of it, and the derivatives of that.

With the transitions :math:`(A_1, Q_1)` from the knot before to x, :math:`A_2` from x to the knot
after, and :math:`(A_{12}, Q_{12})` between the knots,

.. math::
    f(x) \mid v &\sim N(h^\top v, T), \qquad h = (h_1, g), \qquad
    c = A_2 Q_1 H^\top, \quad g = Q_{12}^{-1} c, \\
    h_1 &= A_1^\top H^\top - A_{12}^\top g, \qquad T = H Q_1 H^\top - g^\top c

(Adam et al., 2020, eqs. 12-14 and A.1; the covariances there have :math:`A^\top P_0` for
:math:`P_0 A^\top`). Before the first knot :math:`A_1 = A_{12} = 0` and :math:`Q_1 = Q_{12} = P_0`;
after the last one c = 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.defaults import ENTRIES, PAIRS
from skgp.inference.markov.knots import Chain, PairPosterior, PairSites
from skgp.kernels.sde import Dynamics, GapSlope
from skgp.linalg.small_matrices import inner, inverse_and_log_det, matvec, outer


@dataclass(frozen=True)
class Conditionals:
    """What the states at the knots say of f at n times."""

    chain: Chain
    knots: Tensor  # (M,)
    x: Tensor  # (n,)
    observation: Tensor  # (d,), H
    interval: Tensor  # (n,) int64: 0 before the first knot, M from the last one on
    h: Tensor  # (2d, n)
    T: Tensor  # (n,) variance of f given the states; not negative

    def marginals(self, pairs: PairPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, (n,) each; O(n d^2)."""
        mean, var = torch.empty_like(self.T), torch.empty_like(self.T)
        for rows in self._tiles():
            h, k = self.h[:, rows], self.interval[rows]
            mean[rows] = inner(h, pairs.mean[:, k])
            var[rows] = self.T[rows] + inner(h, matvec(pairs.cov[..., k], h))
        return mean, var

    def covariance(self, pairs: PairPosterior) -> Tensor:
        """Joint covariance of f, (n, n); O((n + M d)^2 d)."""
        d, n_knots = len(self.h) // 2, len(self.knots)
        weights = self.h.new_zeros(len(self.x), n_knots + 2, d)
        row = torch.arange(len(self.x), device=self.x.device)
        weights[row, self.interval], weights[row, self.interval + 1] = self.h.T.split(d, 1)
        weights = weights[:, 1:-1].reshape(len(self.x), -1)
        return weights @ pairs.joint_covariance() @ weights.T + self._residual_covariance()

    def _residual_covariance(self) -> Tensor:
        """Of f given the states, (n, n): times in different intervals are independent.

        For x before x' it is H A(x' - x) Q_1 H' - g' c', with c' of x'.
        """
        legs = _Legs.of(self, slice(None))
        g = self.h[len(self.h) // 2 :]
        later = (self.x[:, None] <= self.x) & (self.interval[:, None] == self.interval)
        first, second = later.nonzero(as_tuple=True)
        values = self.x.new_empty(len(first))
        for i, j, at in zip(
            *(
                t.split(PAIRS)
                for t in (first, second, torch.arange(len(first), device=first.device))
            ),
            strict=True,
        ):
            F, _ = self.chain.dynamics.transition(self.x[j] - self.x[i])
            ahead = inner(self.observation[:, None], matvec(F, legs.q[:, i]))
            values[at] = ahead - inner(g[:, i], legs.c[:, j])
        residual = self.x.new_zeros(len(self.x), len(self.x))
        residual[second, first] = values
        residual[first, second] = values
        return residual

    def collect(self, beta: Tensor, weight: Tensor) -> PairSites:
        """Sum of the sites of f (n,), as sites of the pairs: lambda and Lambda above; O(n d^2)."""
        d2, size = len(self.h), len(self.knots) + 1
        linear = self.h.new_empty(d2, size)
        precision = self.h.new_empty(d2, d2, size)
        for i in range(d2):
            linear[i] = self._interval_sums(self.h[i] * beta, size)
            weighted = self.h[i] * weight
            for j in range(i + 1):
                precision[i, j] = self._interval_sums(self.h[j] * weighted, size)
                precision[j, i] = precision[i, j]
        return PairSites(linear, precision)

    def _interval_sums(self, values: Tensor, size: int) -> Tensor:
        return torch.bincount(self.interval, weights=values, minlength=size)

    def gradient(self, pairs: PairPosterior, beta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        r"""Gradient of :math:`\log Z - \tfrac12 \sum_n \omega_n T_n`, the sites (n,) of f held.

        `pairs` are given ``collect(beta, weight)``. Returns it in the log variances and rates of
        the dynamics, (q,), and in the knots, (M,). O((n + M) d^3), through all three transitions of
        each row by hand.
        """
        backward = _Backward(self)
        second = pairs.second_moments()
        for rows in self._tiles():
            h, k, w = self.h[:, rows], self.interval[rows], weight[rows]
            h_bar = beta[rows] * pairs.mean[:, k] - w * matvec(second[..., k], h)
            backward.add(rows, h_bar, -0.5 * w)
        backward.F_bar += pairs.F_bar
        backward.Q_bar += pairs.Q_bar
        return backward.finish()

    def backward(self, h_bar: Tensor, T_bar: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives in the parameters (q,) and in x (n,), given those in h (2d, n) and T (n,)."""
        backward = _Backward(self)
        for rows in self._tiles():
            backward.add(rows, h_bar[:, rows], T_bar[rows])
        parameters, _ = backward.finish()
        return parameters, backward.before - backward.after

    def _tiles(self) -> Iterator[slice]:
        size = max(256, ENTRIES // len(self.h) ** 2)
        return (slice(i, i + size) for i in range(0, len(self.x), size))


def condition(
    dynamics: Dynamics, knots: Tensor, x: Tensor, observation: Tensor | None = None
) -> Conditionals:
    """Find f's distribution at times (n,), in any order, given the states at knots (M,), rising.

    `observation` (d,) is H, if of another function of the state than f, such as a component. O(n
    d^3 + M d^3) time, O(n d) memory.
    """
    chain = Chain.of(dynamics, knots)
    interval = torch.searchsorted(knots, x, right=True)
    found = Conditionals(
        chain,
        knots,
        x,
        dynamics.observation_at(x) if observation is None else observation,
        interval,
        x.new_empty(2 * dynamics.n_states, len(x)),
        torch.empty_like(x),
    )
    inverse = _noise_inverse(chain.Q)
    for rows in found._tiles():
        leg = _Legs.of(found, rows)
        g = matvec(inverse[..., leg.interval], leg.c)
        start = matvec(leg.F1.transpose(0, 1), leg.H)
        F12 = chain.F[..., leg.interval]
        found.h[:, rows] = torch.cat([start - matvec(F12.transpose(0, 1), g), g])
        found.T[rows] = (inner(leg.H, leg.q) - inner(g, leg.c)).clamp_min_(0.0)
    return found


@dataclass(frozen=True)
class _Legs:
    """Transitions from the knot before a tile's times, and to the knot after: see the module."""

    interval: Tensor  # (n,)
    before: Tensor  # (n,) gaps, 0 where there is no knot
    after: Tensor
    has_before: Tensor  # (n,) bool
    has_after: Tensor
    H: Tensor  # (d, 1)
    F1: Tensor  # (d, d, n)
    q: Tensor  # (d, n): Q1 H'
    F2: Tensor
    c: Tensor  # (d, n)

    @staticmethod
    def of(rows_of: Conditionals, rows: slice) -> "_Legs":
        dynamics, knots = rows_of.chain.dynamics, rows_of.knots
        x, k = rows_of.x[rows], rows_of.interval[rows]
        has_before, has_after = k > 0, k < len(knots)
        before = torch.where(has_before, x - knots[(k - 1).clamp_min(0)], 0.0)
        after = torch.where(has_after, knots[k.clamp_max(len(knots) - 1)] - x, 0.0)
        H = rows_of.observation[:, None]
        F1, Q1 = dynamics.transition(before)
        F1 = F1 * has_before
        outside = matvec(dynamics.prior_at(x)[..., None], H)
        q = torch.where(has_before, matvec(Q1, H), outside)
        F2, _ = dynamics.transition(after)
        c = matvec(F2, q) * has_after
        return _Legs(k, before, after, has_before, has_after, H, F1, q, F2, c)


class _Backward:
    """Derivatives of h and T, gathered tile by tile."""

    def __init__(self, forward: Conditionals) -> None:
        self.forward, self.dynamics = forward, forward.chain.dynamics
        self.F_bar = torch.zeros_like(forward.chain.F)
        self.Q_bar = torch.zeros_like(forward.chain.Q)
        self.inverse = _noise_inverse(forward.chain.Q)
        self.parameters = forward.x.new_zeros(self.dynamics.n_parameters)
        self.slope = GapSlope(self.dynamics)
        # Derivatives in the gaps to the knots before and after, (n,).
        self.before, self.after = torch.zeros_like(forward.T), torch.zeros_like(forward.T)

    def add(self, rows: slice, h_bar: Tensor, T_bar: Tensor) -> None:
        """Take in derivatives in h (2d, n) and T (n,) of a tile."""
        leg = _Legs.of(self.forward, rows)
        k, d = leg.interval, len(leg.q)
        start_bar, g_bar = h_bar[:d], h_bar[d:]
        g = self.forward.h[d:, rows]
        F12 = self.forward.chain.F[..., k]
        u = matvec(self.inverse[..., k], g_bar - matvec(F12, start_bar)) * leg.has_after
        c_bar = u - 2 * T_bar * g
        H = leg.H.expand_as(g)
        Q1_bar = outer(matvec(leg.F2.transpose(0, 1), c_bar) + T_bar * H, H)
        # Without a knot before, Q1 is the stationary covariance: that of interval 0.
        self.Q_bar[..., 0] += (Q1_bar * ~leg.has_before).sum(-1)
        F1_bar, Q1_bar = outer(H, start_bar) * leg.has_before, Q1_bar * leg.has_before
        F2_bar = outer(c_bar, leg.q) * leg.has_after
        self.before[rows] = self._add_leg(leg.before, leg.F1, F1_bar, Q1_bar)
        self.after[rows] = self._add_leg(leg.after, leg.F2, F2_bar, torch.zeros_like(F2_bar))
        self.F_bar.index_add_(-1, k, -outer(g, start_bar) * leg.has_after)
        self.Q_bar.index_add_(-1, k, outer(T_bar * g - u, g))

    def _add_leg(self, gaps: Tensor, F: Tensor, F_bar: Tensor, Q_bar: Tensor) -> Tensor:
        self.parameters += self.dynamics.transition_gradient(gaps, F_bar, Q_bar)
        return self.slope(F, F_bar, Q_bar)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Gradients in the parameters (q,) and in the knots (M,)."""
        chain = self.forward.chain
        parameters = self.parameters + chain.gradient(self.F_bar, self.Q_bar)
        between = self.slope(chain.F, self.F_bar, self.Q_bar)
        between[0] = between[-1] = 0.0
        # Knot k ends interval k and begins interval k + 1.
        sums, size = self.forward._interval_sums, len(between)
        ends, begins = sums(self.after, size) + between, sums(self.before, size) + between
        return parameters, ends[:-1] - begins[1:]


def _noise_inverse(Q: Tensor) -> Tensor:
    """Inverse of noise covariances (d, d, m), of which the first is the stationary covariance.

    Rows are brought to unit variance: those of a short gap differ by many orders of magnitude.
    States whose noise is less than the rounding of their variance are left out of g: that they
    are known at both knots would tell more of f than covariances have digits for, and T, which
    f then has in their place, is less than its variance given the knot before: tiny itself.
    """
    variance = Q.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    noisy = variance > torch.finfo(Q.dtype).eps * variance[:, :1]
    scale = torch.where(noisy, variance.rsqrt(), 0.0)
    scaled = Q * outer(scale, scale)
    scaled.diagonal(dim1=0, dim2=1).copy_(torch.ones_like(scale).movedim(0, -1))
    inverse, _ = inverse_and_log_det(scaled)
    return inverse * outer(scale, scale)
