r"""The posterior of a series: marginals, joint covariances and samples at any times.

Between two points of the series the state filtered at the left one is pushed forwards and what the
smoother knows at the right one, (r, N) of :mod:`.passes`, is pulled back; marginals cost O(d^3) a
new time. What is joint over many times runs along the *conditional chain* of deviations from the
mean: given the states before and all data, :math:`s_n = T_n s_{n-1} + N(0, C_n)`, with

.. math:: G_n = (I + Q_n J_n)^{-1}, \quad T_n = G_n F_n, \quad C_n = G_n Q_n

for the precision J that its own site and all later ones give the state. No covariance is inverted
and weights may be negative; one that leaves f less variance than the rounding of its prior variance
counts as one that leaves as much. The mean is that of the marginals, which keeps its digits where
information :math:`J^{-1} \eta` has none: at weights of 1e17 draws lay 200 of their standard
deviations beside it. The chain is made from
the back of each chunk to its front, all chunks side by side, and then run from front to back: once
from zero to learn what a chunk does to its start, then, the starts being known, for good.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skgp.inference.markov.passes import Filtered, Gaussian, Model, Visitor
from skgp.inference.markov.series import Steps
from skgp.inference.markov.smoother import Smoother
from skgp.kernels.sde import Dynamics
from skgp.linalg.small_matrices import (
    identity_plus,
    inner,
    inverse_and_log_det,
    matmul,
    matvec,
    square_root,
    symmetrize,
)


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
        self._smoother = Smoother(dynamics, dynamics.gaps(x), beta, weight)
        self._model = self._smoother.model
        self._kept: list[_Run] | None = None
        if self._smoother.has_negative_weights or self._fits:
            for _ in self._runs():
                pass

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
        since = (x_new - time_before(self._dynamics, self.times, left, x_new)).clamp(min=0)
        F, Q = self._dynamics.transition(since)
        return self._model.times(F, m), self._model.sandwich(F, P) + Q

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
        for i in range(len(x_new)):
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
        V = P - matmul(matmul(P, N), P)
        return matvec(P, r) + m, V, _chain_products(smoother, places)

    def sample(self, x_new: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at times (m,) in any order, exact, (m, n_samples).

        O((n + m) d^2 (d + n_samples)); the generator is on the device of the series.
        """
        x_sorted, order = x_new.sort(stable=True)
        smoother, places = self._merged(x_sorted)
        draws = _sample_chain(smoother, places, n_samples, generator)
        return draws[order.argsort()] + self.marginals(x_new)[0][:, None]

    def _merged(self, x_sorted: Tensor) -> tuple[Smoother, Tensor]:
        """The precisions of the series with new times (m,), missing values, and where they are."""
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
        """State at new times: m, P given the data up to there, r, N given the data after."""
        right = torch.searchsorted(self.times, x_new, right=True)
        (m, P), (r, N) = self._neighbours(right)
        last = len(self.times) - 1
        # Before the first point the prior stands, whatever the gap; after the last, r = N = 0.
        since = (x_new - time_before(self._dynamics, self.times, right, x_new)).clamp(min=0)
        F, Q = self._dynamics.transition(since)
        m, P = self._model.times(F, m), self._model.sandwich(F, P) + Q
        F, _ = self._dynamics.transition((self.times[right.clamp(max=last)] - x_new).clamp(min=0))
        r, N = self._model.transposed_times(F, r), self._model.sandwich(F.transpose(0, 1), N)
        return m, P, r, N

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


def time_before(dynamics: Dynamics, x: Tensor, right: Tensor, x_new: Tensor) -> Tensor:
    """Times (m,) since which the state is pushed to new ones: of points (n,), or the origin.

    `right` (m,) are the points that follow.
    """
    before = x[(right - 1).clamp(min=0)]
    if dynamics.origin is None or not len(x_new):
        return before
    dynamics.gaps(x_new.detach().min()[None])  # refuses what lies before
    return torch.where(right > 0, before, dynamics.origin)


def _project(row: Tensor, m: Tensor, P: Tensor, r: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``row @ s`` for the states of `Posterior._states`."""
    k = torch.einsum("i,ijn->jn", row, P)
    var = row @ k - inner(k, matvec(N, k))
    return row @ m + inner(k, r), var.clamp_(min=0)


class _Chain(NamedTuple):
    """The conditional chain of deviations over a tile of chunks."""

    T: Tensor  # (d, d, L, C)
    C: Tensor  # (d, d, L, C)


def _sample_chain(
    smoother: Smoother, places: Tensor, n_samples: int, generator: torch.Generator
) -> Tensor:
    """Draw deviations of f jointly at the points of some indices `places` (m,), (m, S)."""
    start = _sample_start(smoother, n_samples, generator)  # (d, S)
    chunks = smoother.chunks
    out = start.new_empty(len(places), n_samples)
    for tile in smoother.tiles(width=(smoother.model.n_states + 1) * n_samples):
        chain = _make_chain(smoother, tile)
        noise = _draw(chain.T.new_empty, (len(start), n_samples, *chain.T.shape[2:]), generator)
        moves = matmul(square_root(chain.C), noise)
        f, start = _run(smoother.model, chain.T, moves, start)  # (S, L, C)
        chunk = places.div(chunks.length, rounding_mode="floor")
        here = (chunk >= tile.start) & (chunk < tile.stop)
        out[here] = f[:, places[here] % chunks.length, chunk[here] - tile.start].T
    return out


def _chain_products(smoother: Smoother, places: Tensor) -> Tensor:
    """Products of the chain's T from each of some points to the next, (d, d, m).

    `places` (m,) are their indices, rising; the first product is that from before the series.
    """
    chunks, d = smoother.chunks, smoother.model.n_states
    prior = smoother.prior[1]
    marked = torch.zeros(chunks.n, dtype=prior.dtype, device=prior.device)
    marked[places] = 1.0
    marks = chunks.spread(marked) > 0
    out = prior.new_empty(d, d, len(places))
    carry = torch.eye(d, dtype=prior.dtype, device=prior.device)
    for tile in smoother.tiles():
        products, carry = _marked_products(_make_chain(smoother, tile).T, marks[:, tile], carry)
        chunk = places.div(chunks.length, rounding_mode="floor")
        here = (chunk >= tile.start) & (chunk < tile.stop)
        out[..., here] = products[:, :, places[here] % chunks.length, chunk[here] - tile.start]
    return out


def _make_chain(smoother: Smoother, tile: slice) -> _Chain:
    """Come back through a tile with all that later data say of the state."""
    steps, sites = smoother.transitions.over(tile), smoother.sites_of(tile)
    J = smoother.boundaries[1][1][..., tile].clone()
    length, n_chunks = sites[0].shape
    d = smoother.model.n_states
    T, C = J.new_empty(d, d, length, n_chunks), J.new_empty(d, d, length, n_chunks)
    for j in reversed(range(length)):
        half = J.new_zeros(d, n_chunks)
        smoother.model.add_observed(half, 0.5 * sites[1][j])
        smoother.model.add_observed_outer(J, half)  # its own site
        T[:, :, j], C[:, :, j] = _conditional(steps, j, J)
        F, _ = steps[j]
        J = symmetrize(matmul(T[:, :, j].transpose(0, 1), matmul(J, F.expand_as(J))))
    return _Chain(T, C)


def _conditional(steps: Steps, j: int, J: Tensor) -> tuple[Tensor, Tensor]:
    """``G F`` and ``G Q`` for ``G = (I + Q J)^-1``."""
    F, Q = steps[j]
    G, _ = inverse_and_log_det(identity_plus(matmul(Q, J)))
    return matmul(G, F), symmetrize(matmul(G, Q))


def _sample_start(smoother: Smoother, n_samples: int, generator: torch.Generator) -> Tensor:
    """Draw the deviation of the state before the first point, given all data, (d, n_samples)."""
    _, P = smoother.prior
    total = smoother.tree.total
    cov = torch.linalg.solve(torch.eye(len(P), **_like(P)) + P @ total.J[..., 0], P)
    noise = _draw(P.new_empty, (len(P), n_samples), generator)
    return square_root(symmetrize(cov)) @ noise


def _run(model: Model, T: Tensor, moves: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``s = T s + move`` through a tile from a state (d, S): f (S, L, C) and the last state."""
    d, n_samples, length, n_chunks = moves.shape
    A = torch.eye(d, **_like(T))[..., None].expand(d, d, n_chunks)
    s = moves.new_zeros(d, n_samples, n_chunks)
    for j in range(length):
        A, s = matmul(T[:, :, j], A), matmul(T[:, :, j], s).add_(moves[:, :, j])
    ends = scan_affine(A, s, start)  # (d, S, C)
    s = torch.cat([start[..., None], ends[..., :-1]], -1)
    f = moves.new_empty(n_samples, length, n_chunks)
    for j in range(length):
        s = matmul(T[:, :, j], s).add_(moves[:, :, j])
        f[:, j] = model.observe(s)
    return f, ends[..., -1]


def scan_affine(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States after each of the maps ``A s + b`` in turn, (d, S, C), by doubling."""
    b = b.clone()
    b[..., 0] += A[..., 0] @ start
    shift, A = 1, A.clone()
    while shift < A.shape[-1]:
        b[..., shift:] += matmul(A[..., shift:], b[..., :-shift])
        A[..., shift:] = matmul(A[..., shift:], A[..., :-shift])
        shift *= 2
    return b


def _marked_products(T: Tensor, marks: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Products of T since the last marked point, (d, d, L, C): at every point, and after the tile.

    `marks` (L, C); `carry` (d, d) is the product that comes into the tile.
    """
    eye = torch.eye(len(T), **_like(T))[..., None]
    since = eye.expand(*T.shape[:2], T.shape[3])
    products = torch.empty_like(T)
    for j in range(T.shape[2]):
        products[:, :, j] = matmul(T[:, :, j], since)
        since = torch.where(marks[j], eye, products[:, :, j])
    into = _scan_products(since, marks.any(0), carry)
    first = (marks.cumsum(0) - marks.int()) == 0  # no mark before in the chunk
    whole = matmul(products, into[:, :, None, :-1])
    return torch.where(first, whole, products), into[..., -1]


def _scan_products(since: Tensor, has_mark: Tensor, carry: Tensor) -> Tensor:
    """Products that come into each chunk and out of the last, (d, d, C + 1), by doubling."""
    products = torch.cat([carry[..., None], since], -1)
    closed = torch.cat([has_mark.new_ones(1), has_mark])
    shift = 1
    while shift < products.shape[-1]:
        longer = matmul(products[..., shift:], products[..., :-shift])
        longer = torch.where(closed[shift:], products[..., shift:], longer)
        products = torch.cat([products[..., :shift], longer], -1)
        closed = torch.cat([closed[:shift], closed[shift:] | closed[:-shift]])
        shift *= 2
    return products


def _like(x: Tensor) -> dict[str, Any]:
    """Dtype and device."""
    return {"dtype": x.dtype, "device": x.device}


def _draw(new_empty, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return new_empty(shape).normal_(generator=generator)
