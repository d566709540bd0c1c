r"""The covariance of a noisy series, inverted and applied to many columns at once.

:math:`V = K + \Omega^{-1}` is the covariance of :math:`c = f + N(0, \Omega^{-1})` at n times. The
gains of the filter do not depend on the data: one run of the smoother gives them with
:math:`\log |\Omega V|`, the diagonal of :math:`K - K V^{-1} K` and
:math:`\operatorname{tr} V^{-1} \partial K`. Of S columns C (n, S) the rest is O(n S d^2):

.. math:: v_n = c_n - H F_n m_{n-1}, \quad m_n = F_n m_{n-1} + k_n g_n v_n, \qquad
          C^\top V^{-1} C = \sum_n g_n v_n v_n^\top,

sums of squares where :math:`\omega \ge 0`; and with
:math:`r_n = H^\top a_n + F_{n+1}^\top r_{n+1}` on the way back

.. math:: a_n = (V^{-1} C)_n = g_n (v_n - k_n^\top F_{n+1}^\top r_{n+1}), \qquad
          s_n = F_n s_{n-1} + Q_n r_n, \quad s_0 = P_0 F_1^\top r_1,

where :math:`H s_n = (K a)_n` and s between the times follows the same recursion. They are also how
quadratic forms depend on the dynamics:

.. math:: \partial \tfrac12 a^\top K a = \sum_n r_n^\top \partial F_n\, s_{n-1}
          + \tfrac12 r_n^\top \partial Q_n\, r_n + \tfrac12 s_0^\top P_0^{-1} \partial P_0
          P_0^{-1} s_0 .

Every recursion is affine in the state at the start of a chunk: chunks are run side by side from a
start of 0, with d columns more that tell what becomes of a start, and joined by doubling.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from scipy.linalg import blas, lapack
from torch import Tensor

from skgp.inference.markov.conditional_chain import scan_affine
from skgp.inference.markov.passes import Moments
from skgp.inference.markov.posterior import backwards, time_before, until_origin
from skgp.inference.markov.series import Lags
from skgp.inference.markov.short import DenseFactor, DensePrior
from skgp.inference.markov.smoother import Smoother
from skgp.kernels.sde import Dynamics
from skgp.linalg.small_matrices import inner, matmul


@dataclass(frozen=True)
class ColumnStates:
    """States of S columns at n times."""

    r: Tensor  # (d, S, n), what the column says of the state from there on
    s: Tensor  # (d, S, n) smoothed
    start: Tensor  # (d, S), P0^-1 s_0: r before the first time


class SeriesColumns:
    """By the smoother; memory n (d + 3) numbers, and (d S + d^2) n beside."""

    def __init__(self, dynamics: Dynamics, gaps: Tensor, weight: Tensor) -> None:
        self._dynamics = dynamics
        self._smoother = smoother = Smoother(dynamics, gaps, torch.zeros_like(weight), weight)
        self._model, self._chunks = smoother.model, smoother.chunks
        length, count = self._chunks.length, self._chunks.count
        self._k = weight.new_empty(smoother.model.n_states, length, count)
        self._g, var = weight.new_empty(length, count), weight.new_empty(length, count)
        moments = Moments(dynamics, smoother.transitions.gaps)
        value = 0.0
        with torch.inference_mode():
            for tile, steps, run in smoother.filtered():
                value += smoother.tile_log_normalizer(tile, run)
                moments.begin(tile, run)
                _, var[:, tile] = smoother.smooth(tile, steps, run, moments)
                self._k[..., tile] = self._model.observe(run.cov.movedim((1, 2), (0, 1)))
                self._g[:, tile] = run.g
            trace = moments.gradient()
        self.half_log_det = -value  # of Omega V: half its logarithm
        self.var = self._chunks.gather(var)  # (n,) of f given c
        self.half_trace = -trace.clone()  # (q,), tr V^-1 dK / 2

    def whiten(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """Innovations v (n, S) of columns (n, S) and their precisions g (n,)."""
        C = self._spread(C)  # (S, L, C)
        v, start = torch.empty_like(C), self._zeros(C)
        for tile in self._tiles(C):
            v[..., tile], start = self._forward(tile, C[..., tile], start)
        v = v.transpose(-1, -2).flatten(1)[:, : self._chunks.n].T
        return v, self._chunks.gather(self._g)

    def filtered(self, C: Tensor) -> Tensor:
        """States (d, S, n) of columns (n, S) after each point."""
        C = self._spread(C)
        m = C.new_empty(self._model.n_states, *C.shape)
        start = self._zeros(C)
        for tile in self._tiles(C):
            _, start = self._forward(tile, C[..., tile], start, m[..., tile])
        return m.transpose(-1, -2).flatten(2)[..., : self._chunks.n]

    def smooth(self, v: Tensor) -> ColumnStates:
        """States of columns C from their innovations v (n, S)."""
        v = self._spread(v)
        r = v.new_empty(self._model.n_states, *v.shape)
        start = self._zeros(v)
        for tile in reversed(list(self._tiles(v))):
            r[..., tile], start = self._back(tile, v[..., tile], start)
        s, state = torch.empty_like(r), self._smoother.prior[1] @ start
        for tile in self._tiles(v):
            s[..., tile], state = self._smooth(tile, r[..., tile], state)
        r, s = (x.transpose(-1, -2).flatten(2)[..., : self._chunks.n] for x in (r, s))
        return ColumnStates(r, s, start)

    def observe(self, states: ColumnStates) -> Tensor:
        """``K a`` (n, S)."""
        return self._model.observe(states.s).T

    def pull(self, states: ColumnStates) -> Tensor:
        """Derivative (q,) of ``tr a' K a / 2``, a held."""
        r, start = states.r, self._smoother.prior[1] @ states.start
        before = torch.cat([start[..., None], states.s[..., :-1]], -1)
        F_bar, Q_bar = _summed_outer(r, before), _summed_outer(r, r).mul_(0.5)
        P_bar = 0.5 * states.start @ states.start.T
        gaps = self._smoother.chunks.gather(self._smoother.transitions.gaps)
        apart = gaps.isinf()  # where nothing is remembered: F = 0, Q = P0
        if bool(apart.any()):
            P_bar = P_bar + Q_bar[..., apart].sum(-1)
            gaps = torch.where(apart, 0.0, gaps)
            F_bar, Q_bar = (torch.where(apart, 0.0, bar) for bar in (F_bar, Q_bar))
        values, which = gaps.unique(return_inverse=True)
        zero = F_bar.new_zeros(*F_bar.shape[:2], len(values))
        sums = [zero.index_add(2, which, bar) for bar in (F_bar, Q_bar)]
        found = self._dynamics.transition_gradient(values, *sums)
        return (found + self._dynamics.stationary_gradient(P_bar)).cpu()

    # ---- passes over the chunks; columns are (S, L, C), states (d, S, C)

    def _forward(
        self, tile: slice, C: Tensor, start: Tensor, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Innovations of a tile, and the state (d, S) filtered at its end; all of them if `kept`.

        These are written there, (d, S, L, C).
        """
        steps, k, g = self._smoother.transitions.over(tile), self._k[..., tile], self._g[:, tile]
        n_columns = len(C)
        X, f = self._starts(C), C.new_empty(n_columns + len(k), *C.shape[1:])
        responses = None if kept is None else C.new_empty(len(k), len(k), *C.shape[1:])
        for j in range(len(g)):
            X = self._model.times(steps[j][0], X)
            f[:, j] = self._model.observe(X)
            e = -f[:, j]
            e[:n_columns] += C[:, j]
            X = X.addcmul(k[:, None, j], g[j] * e)
            if kept is not None and responses is not None:
                kept[:, :, j], responses[:, :, j] = X.split([n_columns, len(k)], 1)
        ends = scan_affine(X[:, n_columns:], X[:, :n_columns], start)
        starts = torch.cat([start[..., None], ends[..., :-1]], -1)
        if kept is not None and responses is not None:
            kept += _moved(responses, starts)
        own, response = f.split([n_columns, len(k)])
        return C - own - _moved(response[None], starts)[0], ends[..., -1]

    def _back(self, tile: slice, v: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Come back through a tile from r (d, S) behind it: r (d, S, L, C), and r before it."""
        steps, k, g = self._smoother.transitions.over(tile), self._k[..., tile], self._g[:, tile]
        n_columns, d = len(v), len(k)
        X, r = self._starts(v), v.new_empty(d, len(v) + d, *v.shape[1:])
        for j in reversed(range(len(g))):
            a = -g[j] * inner(k[:, None, j], X)
            a[:n_columns].addcmul_(g[j], v[:, j])
            self._model.add_observed(X, a)
            r[:, :, j] = X
            X = self._model.transposed_times(steps[j][0], X)
        A, b = (x.flip(-1) for x in (X[:, n_columns:], X[:, :n_columns]))
        before = scan_affine(A, b, end).flip(-1)
        ends = torch.cat([before[..., 1:], end[..., None]], -1)
        own, response = r.split([n_columns, d], 1)
        return own + _moved(response, ends), before[..., 0]

    def _smooth(self, tile: slice, r: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """States smoothed (d, S, L, C) of a tile, and the last of them (d, S)."""
        steps, n_columns, d = self._smoother.transitions.over(tile), r.shape[1], len(r)
        X = self._starts(r[0])
        s = r.new_empty(d, n_columns + d, *r.shape[2:])
        for j in range(r.shape[2]):
            F, Q = steps[j]
            X = self._model.times(F, X)
            X[:, :n_columns] += self._model.times(Q, r[:, :, j])
            s[:, :, j] = X
        ends = scan_affine(X[:, n_columns:], X[:, :n_columns], start)
        starts = torch.cat([start[..., None], ends[..., :-1]], -1)
        own, response = s.split([n_columns, d], 1)
        return own + _moved(response, starts), ends[..., -1]

    def _starts(self, C: Tensor) -> Tensor:
        """Zeros for the columns, and the unit vectors, (d, S + d, C)."""
        d, count = self._model.n_states, C.shape[-1]
        unit = torch.eye(d, dtype=C.dtype, device=C.device)[..., None].expand(d, d, count)
        return torch.cat([C.new_zeros(d, len(C), count), unit], 1)

    def _zeros(self, C: Tensor) -> Tensor:
        return C.new_zeros(self._model.n_states, len(C))

    def _tiles(self, C: Tensor):
        return self._smoother.tiles(width=3 * (self._model.n_states + 1) * len(C))

    def _spread(self, C: Tensor) -> Tensor:
        """Columns (n, S) as (S, L, C); zeros pad."""
        length, count = self._chunks.length, self._chunks.count
        padded = torch.nn.functional.pad(C.T, (0, length * count - len(C)))
        return padded.unflatten(1, (count, length)).transpose(1, 2).contiguous()


def between(dynamics: Dynamics, times: Tensor, states: ColumnStates, x: Tensor) -> Tensor:
    """States smoothed at new times x (m,), in any order, (d, S, m); `times` (n,) rise."""
    h = until_origin(dynamics, x)
    x = x + h
    right = torch.searchsorted(times, x.detach(), right=True)
    last = len(times) - 1
    F, Q = dynamics.transition((x - time_before(dynamics, times, right)).clamp(min=0))
    forward, _ = dynamics.transition((times[right.clamp(max=last)] - x).clamp(min=0))
    r = states.r[..., right.clamp(max=last)] * (right <= last)
    r = matmul(forward.transpose(0, 1), r)
    # Before the first time the prior stands, at whatever distance if it is stationary.
    P0 = dynamics.prior_at(x)[..., None]
    first = matmul(P0, matmul(F.transpose(0, 1), r))
    pushed = matmul(F, torch.where(right > 0, states.s[..., (right - 1).clamp(min=0)], first))
    found = pushed + matmul(Q, r)
    return matmul(backwards(dynamics, h)[0], found) if bool((h > 0).any()) else found


def _moved(response: Tensor, starts: Tensor) -> Tensor:
    """What starts (d, S, C) add, (k, S, L, C), by the responses (k, d, L, C) to unit starts."""
    return matmul(response, starts[:, :, None])


def _summed_outer(r: Tensor, s: Tensor) -> Tensor:
    """Sums over the columns of ``r s'``, (d, d, n), of states (d, S, n)."""
    return torch.stack([(row * s).sum(1) for row in r])


class DenseColumns(DenseFactor):
    """Of a short series, by one Cholesky factor: O(n^3 + n^2 S), as `DensePosterior`."""

    @cached_property
    def half_trace(self) -> Tensor:
        """(q,), tr V^-1 dK / 2."""
        return torch.from_numpy(self._prior.contract(self._upper))

    def whiten(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """As of `SeriesColumns`."""
        right = (self._root[:, None] * C.numpy()).T  # which needs no copy for Fortran
        white = blas.dtrsm(1.0, self._L, right, side=1, lower=1, trans_a=1, overwrite_b=True).T
        return torch.from_numpy(white), torch.ones(len(C), dtype=C.dtype)

    def smooth(self, v: Tensor) -> Tensor:
        """``V^-1 C`` (n, S), which stands for states."""
        found, _ = lapack.dtrtrs(self._L, v.numpy(), lower=True, trans=1)
        return torch.from_numpy(self._root[:, None] * found)

    def observe(self, a: Tensor) -> Tensor:
        """``K a`` (n, S)."""
        return self._prior.covariance @ a

    def pull(self, a: Tensor) -> Tensor:
        """Derivative (q,) of ``tr a' K a / 2``, a held."""
        return self._prior.pull(a @ a.T)


def columns_of(
    dynamics: Dynamics, gaps: Tensor, weight: Tensor, lags: Lags | None = None
) -> SeriesColumns | DenseColumns:
    """Dense where the series is short and the weights allow it; `lags` are those of the gaps.

    NotPositiveDefiniteError if negative weights leave no proper posterior.
    """
    if lags is not None and math.isfinite(float(weight.sum())):
        prior = DensePrior(dynamics, lags)
        if prior.suits(weight.numpy()):
            return DenseColumns(prior, weight.numpy())
    return SeriesColumns(dynamics, gaps, weight)
