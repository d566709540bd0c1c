r"""The posterior of a series: marginals, joint covariances and samples at any times.

Between two points of the series the state filtered at the left one is pushed forwards and what the
smoother knows at the right one, (r, N) of :mod:`.passes`, is pulled back; marginals cost O(d^3) a
new time. What is joint over many times runs along the chain of :mod:`.conditional_chain`. No
covariance is inverted and weights may be negative; one that leaves f less variance than the
rounding of its prior variance counts as one that leaves as much. The mean is that of the marginals,
which keeps its digits where information :math:`J^{-1} \eta` has none: at weights of 1e17 draws lay
200 of their standard deviations beside it.

A trend goes on to both sides of its origin o from one level and one slope, and what is stationary
knows no direction. Seen in a mirror the process has the same law, the state :math:`D s` for the s
of the other direction (`Dynamics.mirror`), so that, with h the time to the origin,

.. math:: s(o - h) = D F(h) D\, s(o) + N(0, D Q(h) D^\top),

independent, given s(o), of all that comes after the origin.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.markov.conditional_chain import (
    chain_products,
    conditioned,
    precision_before,
    sample_chain,
)
from skgp.inference.markov.passes import Filtered, Gaussian, Model, Visitor
from skgp.inference.markov.series import Steps
from skgp.inference.markov.smoother import Smoother
from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import constant_like, standard_normal
from skgp.linalg.small_matrices import inner, matmul, matvec, square_root


def until_origin(dynamics: Dynamics, x: Tensor) -> Tensor:
    """Times (n,) to the origin from what lies before it; 0 of the rest, and without one."""
    if dynamics.origin is None:
        return torch.zeros_like(x)
    return (dynamics.origin - x).clamp(min=0)


def backwards(dynamics: Dynamics, h: Tensor) -> tuple[Tensor, Tensor]:
    """Transitions and noise covariances (d, d, n) to times h (n,) earlier."""
    F, Q = dynamics.transition(h)
    D = constant_like(dynamics.mirror, F)[..., None]
    return matmul(matmul(D, F), D), matmul(matmul(D, Q), D.transpose(0, 1))


def carried_back(dynamics: Dynamics, h: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """States (d, n) and (d, d, n), those of times before the origin given as they are there."""
    B, R = backwards(dynamics, h)
    return matvec(B, mean), matmul(matmul(B, cov), B.transpose(0, 1)) + R


def covariance_before(
    dynamics: Dynamics, h: Tensor, V: Tensor, origin: Tensor
) -> tuple[Tensor, Tensor]:
    """Lower triangle (k, k) of the joint covariance of f at times h (k,) to the origin, falling.

    And covariances (d, k) with the state there. V (d, d, k) are the covariances of the states,
    `origin` (d, d) that of the state at the origin.
    """
    H, k = dynamics.observation_at(V), len(h)
    covariance, with_next = V.new_zeros(k, k), V.new_zeros(len(V), k)
    steps, _ = backwards(dynamics, -h.diff(append=h.new_zeros(1)))
    for i in reversed(range(k)):
        with_next[:, i + 1 :] = steps[..., i] @ with_next[:, i + 1 :]
        with_next[:, i] = V[..., i] @ H
        covariance[i:, i] = H @ with_next[:, i:]
    B, _ = backwards(dynamics, h)
    return covariance, origin @ torch.einsum("i,ijk->jk", H, B)


def draws_before(
    dynamics: Dynamics, h: Tensor, start: Tensor, generator: torch.Generator
) -> Tensor:
    """Draws of f (k, S) at times h (k,) to the origin, falling, from states (d, S) there."""
    B, R = backwards(dynamics, -h.diff(append=h.new_zeros(1)))
    noise = standard_normal((*start.shape, len(h)), generator, R.dtype)
    moves, found = matmul(square_root(R), noise), start.new_empty(len(h), start.shape[1])
    H = dynamics.observation_at(start)
    for i in reversed(range(len(h))):
        start = B[..., i] @ start + moves[..., i]
        found[i] = H @ start
    return found


class Posterior:
    r"""What all the data say of f at any times.

    The smoothed states of a series that fits in a tile (half a gigabyte) are kept; a longer one is
    run through again at each call, in O(n d^3).

    Parameters
    ----------
    dynamics : Dynamics
    x : Tensor of shape (n,)
        Times in rising order; equal ones may follow each other. At least one.
    beta, weight : Tensor of shape (n,)
        Sites :math:`\exp(\beta f - \omega f^2 / 2)`; zeros for a missing value.

    Raises
    ------
    ValueError
        If the times fall somewhere.
    NotPositiveDefiniteError
        If negative weights leave no proper posterior.
    """

    def __init__(self, dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor) -> None:
        if bool((x.diff() < 0).any()):
            raise ValueError("x must be in rising order: sort the times and their sites together.")
        self._dynamics, self.times, self._beta, self._weight = dynamics, x, beta, weight
        self._kept: list[_Run] | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Run through the series, where that is kept or may fail."""
        if self._smoother.has_negative_weights or self._fits:
            for _ in self._runs():
                pass

    @cached_property
    def _smoother(self) -> Smoother:
        gaps = self._dynamics.gaps(self.times)
        return Smoother(self._dynamics, gaps, self._beta, self._weight)

    @property
    def _model(self) -> Model:
        return self._smoother.model

    @property
    def _fits(self) -> bool:
        return len(list(self._smoother.tiles())) == 1

    def marginals(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at times in any order, each (m,)."""
        m, P, r, N = self._states(x_new)
        return _project(self._dynamics.observation_at(m), m, P, r, N)

    def latent(self, x_new: Tensor, projections: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (m, p) of the projections (p, d) of the state, one by one."""
        states = self._states(x_new)
        columns = [_project(row, *states) for row in projections]
        means, variances = zip(*columns, strict=True)
        return torch.stack(means, 1), torch.stack(variances, 1)

    def past(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (d, m) and covariance (d, d, m) of the state given the data before each time."""
        left = torch.searchsorted(self.times, x_new)
        (m, P), _ = self._neighbours(left)
        since = (x_new - time_before(self._dynamics, self.times, left)).clamp(min=0)
        F, Q = self._dynamics.transition(since)
        m, P = self._model.times(F, m), self._model.sandwich(F, P) + Q
        h = until_origin(self._dynamics, x_new)
        return carried_back(self._dynamics, h, m, P) if bool((h > 0).any()) else (m, P)

    @property
    def end(self) -> tuple[Tensor, Tensor]:
        """Mean (d,) and covariance (d, d) of the state at the last time given all data."""
        m, P = self._neighbours(torch.tensor([len(self.times)], device=self.times.device))[0]
        return m[:, 0], P[..., 0]

    def covariance(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (m,) and joint covariance (m, m) of f at times in any order.

        O((n + m) d^3 + m^2 d^2).
        """
        x_sorted, order = x_new.sort(stable=True)
        mean, V, forward = self._chain(x_sorted)
        V_h = self._model.observe(V)  # (d, m)
        H, covariance = self._dynamics.observation_at(V), V.new_zeros(len(x_new), len(x_new))
        # Row i: state at time i against f at the times before, from Cov(s_i, f_i) = V_i H'.
        with_past = torch.zeros_like(V_h)
        h = until_origin(self._dynamics, x_sorted)
        first = int((h > 0).sum())
        if first:
            before = slice(first)
            at_origin = self._states(x_new.new_tensor([self._dynamics.origin]))
            origin = _covariance(*at_origin)[..., 0]
            covariance[before, before], with_past[:, before] = covariance_before(
                self._dynamics, h[before], V[..., before], origin
            )
        for i in range(first, len(x_new)):
            with_past[:, :i] = forward[..., i] @ with_past[:, :i]
            with_past[:, i] = V_h[:, i]
            covariance[i, : i + 1] = H @ with_past[:, : i + 1]
        covariance.diagonal().clamp_(min=0)
        covariance = covariance + covariance.tril(-1).T
        back = order.argsort()
        return self._model.observe(mean)[back], covariance[back][:, back]

    @cached_property
    def state_covariances(self) -> Tensor:
        """Covariances of the state at each point with f at each, (n, d, n); O(n^2 d^2), kept."""
        _, V, forward = self._chain(self.times)
        H, (d, _, n) = self._dynamics.observation_at(V), V.shape
        found = V.new_empty(n, d, n)
        past, future = V.new_zeros(2, d, n)
        V_h = self._model.observe(V)
        for i in range(n):
            past[:, :i] = forward[..., i] @ past[:, :i]
            past[:, i] = V_h[:, i]
            found[i, :, : i + 1] = past[:, : i + 1]
        for i in reversed(range(n)):  # T_{i+1}' ... T_k' H' for the points k after i
            found[i, :, i + 1 :] = V[..., i] @ future[:, i + 1 :]
            future[:, i] = H
            future[:, i:] = forward[..., i].T @ future[:, i:]
        return found

    def _chain(self, x_sorted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the states at rising times (m,): means (d, m), covariances V and products of T.

        Both (d, d, m): Cov(s_i, s_{i-1}) is the product i times V_{i-1}.
        """
        m, P, r, N = self._states(x_sorted)
        smoother, places = self._merged(x_sorted)
        V = _covariance(m, P, r, N)
        return matvec(P, r) + m, V, chain_products(smoother, places)

    def sample(self, x_new: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at times (m,) in any order, exact, (m, n_samples).

        O((n + m) d^2 (d + n_samples)); the generator is on the device of the series.
        """
        x_sorted, order = x_new.sort(stable=True)
        smoother, places = self._merged(x_sorted)
        draws, start = sample_chain(smoother, places, n_samples, generator)
        h = until_origin(self._dynamics, x_sorted)
        if first := int((h > 0).sum()):
            draws[:first] = draws_before(self._dynamics, h[:first], start, generator)
        return draws[order.argsort()] + self.marginals(x_new)[0][:, None]

    def _merged(self, x_sorted: Tensor) -> tuple[Smoother, Tensor]:
        """The precisions of the series with new times (m,), missing values, and where they are.

        What lies before an origin stands at the origin.
        """
        x_sorted = x_sorted + until_origin(self._dynamics, x_sorted)
        n, m = len(self.times), len(x_sorted)
        places = torch.searchsorted(self.times, x_sorted, right=True)
        places = places + torch.arange(m, device=places.device)
        old = torch.ones(n + m, dtype=torch.bool, device=places.device)
        old[places] = False
        x, weight = (self.times.new_zeros(n + m) for _ in range(2))
        H = self._dynamics.observation_at(weight)
        least = torch.finfo(weight.dtype).eps * (H @ self._smoother.prior[1] @ H)
        x[old], weight[old] = self.times, self._weight.minimum(1 / least)
        x[places] = x_sorted
        gaps = self._dynamics.gaps(x)
        return Smoother(self._dynamics, gaps, torch.zeros_like(weight), weight), places

    def _states(self, x_new: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """State at new times: m, P given the data up to there, r, N given the data after.

        Before the first time, and an origin, m and P are given all data, and r and N are 0.
        """
        h = until_origin(self._dynamics, x_new)
        x_new = x_new + h
        right = torch.searchsorted(self.times, x_new, right=True)
        (m, P), (r, N) = self._neighbours(right)
        last = len(self.times) - 1
        # Before the first point the prior stands, whatever the gap; after the last, r = N = 0.
        since = (x_new - time_before(self._dynamics, self.times, right)).clamp(min=0)
        F, Q = self._dynamics.transition(since)
        m, P = self._model.times(F, m), self._model.sandwich(F, P) + Q
        F, Q = self._dynamics.transition((self.times[right.clamp(max=last)] - x_new).clamp(min=0))
        r, N = self._model.transposed_times(F, r), self._model.sandwich(F.transpose(0, 1), N)
        first, before = right == 0, h > 0
        settled = first | before
        if not bool(settled.any()):
            return m, P, r, N
        mean, V = m + matvec(P, r), _covariance(m, P, r, N)
        if bool(first.any()) and not x_new.requires_grad:  # a wide prior leaves P - P N P no digits
            J = precision_before(self._smoother, F[..., first], Q[..., first])
            V[..., first] = conditioned(P[..., first], J)
        if bool(before.any()):
            mean, V = carried_back(self._dynamics, h, mean, V)
        m, P = torch.where(settled, mean, m), torch.where(settled, V, P)
        return m, P, r * ~settled, N * ~settled

    def _neighbours(self, right: Tensor) -> tuple[Gaussian, Gaussian]:
        """Filtered (m, P) at the points ``right - 1`` and (r, N) at the points ``right``."""
        d, k = self._dynamics.n_states, len(right)
        m, r = self.times.new_zeros(k, d), self.times.new_zeros(k, d)
        P = self._smoother.prior[1].expand(k, d, d).clone()
        N = self.times.new_zeros(k, d, d)
        length, n = self._smoother.chunks.length, self._smoother.chunks.n
        for run in self._runs():
            for points, fill in ((right - 1, run.filtered), (right, run.future)):
                chunk = points.div(length, rounding_mode="floor")
                here = (chunk >= run.tile.start) & (chunk < run.tile.stop) & (points < n)
                vector, matrix = fill(points[here] % length, chunk[here] - run.tile.start)
                target = (m, P) if fill == run.filtered else (r, N)
                target[0][here], target[1][here] = vector, matrix
        return (m.T, P.movedim(0, -1)), (r.T, N.movedim(0, -1))

    def _runs(self) -> Iterator["_Run"]:
        if self._kept is not None:
            yield from self._kept
            return
        for tile, steps, filtered in self._smoother.filtered():
            run = _Run(self._smoother, tile, steps, filtered)
            if self._fits:
                self._kept = [run]
            yield run


class _Run(Visitor):
    """A tile of chunks, filtered and smoothed: what prediction needs of every point."""

    def __init__(self, smoother: Smoother, tile: slice, steps: Steps, filtered: Filtered) -> None:
        self.tile, self._filtered, self._model = tile, filtered, smoother.model
        self._r, self._N = torch.empty_like(filtered.mean), torch.empty_like(filtered.cov)
        smoother.smooth(tile, steps, filtered, self)

    def updated(self, j: int, F: Tensor, Q: Tensor, r: Tensor, N: Tensor) -> None:
        """Keep what is known at point j."""
        self._r[j], self._N[j] = r, N

    def filtered(self, row: Tensor, chunk: Tensor) -> Gaussian:
        """State given the data up to and with some points: (k, d) and (k, d, d)."""
        run = self._filtered
        P = run.cov[row, :, :, chunk]
        k = self._model.observe(P.movedim(0, -1)).T
        m = run.mean[row, :, chunk] + k * run.e[row, chunk][:, None]
        return m, P - run.g[row, chunk][:, None, None] * k[:, :, None] * k[:, None]

    def future(self, row: Tensor, chunk: Tensor) -> Gaussian:
        """(r, N) of some points, their own data taken in: (k, d) and (k, d, d)."""
        return self._r[row, :, chunk], self._N[row, :, :, chunk]


def time_before(dynamics: Dynamics, x: Tensor, right: Tensor) -> Tensor:
    """Times (m,) since which the state is pushed to new ones: of points (n,), or the origin.

    `right` (m,) are the points that follow.
    """
    before = x[(right - 1).clamp(min=0)]
    if dynamics.origin is None:
        return before
    return torch.where(right > 0, before, dynamics.origin)


def _covariance(m: Tensor, P: Tensor, r: Tensor, N: Tensor) -> Tensor:
    """Of the states of `Posterior._states`, (d, d, m)."""
    return P - matmul(matmul(P, N), P)


def _project(row: Tensor, m: Tensor, P: Tensor, r: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``row @ s`` for the states of `Posterior._states`."""
    k = torch.einsum("i,ijn->jn", row, P)
    var = row @ k - inner(k, matvec(N, k))
    return row @ m + inner(k, r), var.clamp_(min=0)
