r"""Joint draws of f at any times from states at knots, in linear time (Adam et al., 2020, A.2).

Given the states u at the knots, the process in one interval is independent of that in another. A
draw of u is a walk along the knots, which q makes a Markov chain; within an interval Matheron's
rule turns a path of the prior into one that ends where u says,

.. math:: f(x) = h(x)^\top (u_k, u_{k+1}) + \tilde f(x) - h(x)^\top (\tilde s_k, \tilde s_{k+1}),

with :math:`\tilde s` a prior path and h that of :mod:`.conditionals`. The path may begin anywhere,
as the rule conditions on where it does: it begins at :math:`\tilde s_k = 0`, before the first knot
in the stationary distribution. All intervals are walked through side by side; crowded ones are
first divided by states drawn at some of their times.
"""

import math

import torch
from torch import Tensor

from skgp.inference.markov.conditionals import condition
from skgp.inference.markov.defaults import CROWDED
from skgp.inference.markov.pairs import PairPosterior
from skgp.kernels.sde_dynamics import Dynamics
from skgp.linalg.small_matrices import matmul, square_root

__all__ = ["draw_jointly"]


def draw_jointly(
    dynamics: Dynamics,
    knots: Tensor,
    pairs: PairPosterior,
    x: Tensor,
    n_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw f, without its prior mean, jointly at times x (n,); (n, n_samples).

    O((n + M) d^2 (d + n_samples)), in about M + 2 sqrt(n) steps.
    """
    states = _draw_states(pairs, n_samples, generator)
    times, place = torch.unique(x, return_inverse=True)
    most = int(torch.bincount(torch.searchsorted(knots, times, right=True)).max()) if len(x) else 0
    if most > CROWDED:
        some = times[:: math.isqrt(most)]
        some = some[~torch.isin(some, knots)]
        rows = torch.eye(dynamics.n_states, dtype=x.dtype)
        found = _given_states(dynamics, knots, states, some, rows, generator)
        knots, order = torch.cat([knots, some]).sort()
        states = torch.cat([states, found])[order]
    H = dynamics.observation.to(x)[None]
    return _given_states(dynamics, knots, states, times, H, generator)[place, 0]


def _draw_states(pairs: PairPosterior, n_samples: int, generator: torch.Generator) -> Tensor:
    """Draw the states at the knots from q, (M, d, n_samples)."""
    d, M = len(pairs.mean) // 2, pairs.mean.shape[-1] - 1
    mean, cov = pairs.mean[d:, :M].T, pairs.cov.movedim(-1, 0)
    own, regression = cov[:M, d:, d:], pairs.regressions()
    spread = own.clone()
    spread[1:] -= regression @ own[:-1] @ regression.mT
    noise = torch.randn(M, d, n_samples, generator=generator, dtype=own.dtype)
    states = square_root(spread.movedim(0, -1)).movedim(-1, 0) @ noise
    for k in range(1, M):
        states[k] += regression[k - 1] @ states[k - 1]
    return states + mean[..., None]


def _given_states(
    dynamics: Dynamics,
    knots: Tensor,
    states: Tensor,
    times: Tensor,
    rows: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Draw functions of the state, `rows` (p, d), at rising times (n,), given the states at knots.

    `states` (M, d, S). Returns (n, p, S).
    """
    d, n_samples = states.shape[1:]
    interval = torch.searchsorted(knots, times, right=True)
    path, right = _prior_paths(dynamics, knots, times, interval, n_samples, generator)
    nowhere = states.new_zeros(1, d, n_samples)
    before = torch.cat([nowhere, states])[interval]  # (n, d, S)
    after = (torch.cat([states, nowhere]) - right)[interval]
    h = torch.stack([condition(dynamics, knots, times, row).h.T for row in rows], 1)  # (n, p, 2d)
    return rows @ path + h[..., :d] @ before + h[..., d:] @ after


def _prior_paths(
    dynamics: Dynamics,
    knots: Tensor,
    times: Tensor,
    interval: Tensor,
    n_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Prior paths: states at the times (n, d, S) and at the ends of the intervals (M + 1, d, S).

    The latter are 0 where an interval has no end or holds no time.
    """
    d, M = dynamics.n_states, len(knots)
    first = torch.searchsorted(interval, torch.arange(M + 1))  # row where an interval begins
    count = torch.bincount(interval, minlength=M + 1)

    def draw(Q: Tensor) -> Tensor:
        noise = torch.randn(d, n_samples, Q.shape[-1], generator=generator, dtype=Q.dtype)
        return matmul(square_root(Q), noise).movedim(-1, 0)

    def walk(states: Tensor, gaps: Tensor) -> Tensor:
        """States (k, d, S) after gaps (k,)."""
        F, Q = dynamics.transition(gaps)
        return F.movedim(-1, 0) @ states + draw(Q)

    states, path = times.new_zeros(M + 1, d, n_samples), times.new_empty(len(times), d, n_samples)
    states[:1] = draw(dynamics.stationary.to(times)[..., None])
    last = torch.cat([times[:1] if len(times) else knots[:1], knots])  # of each interval's state
    for j in range(int(count.max())):
        here = (count > j).nonzero()[:, 0]
        at = first[here] + j
        states[here] = path[at] = walk(states[here], times[at] - last[here])
        last[here] = times[at]
    ends = (count[:M] > 0).nonzero()[:, 0]
    right = torch.zeros_like(states)
    right[ends] = walk(states[ends], knots[ends] - last[ends])
    return path, right
