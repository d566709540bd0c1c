r"""The conditional chain of a series: its states given those before and all data.

Deviations from the posterior mean run as :math:`s_n = T_n s_{n-1} + N(0, C_n)`, with

.. math:: T_n = (I + Q_n J_n)^{-1} F_n, \quad C_n = (Q_n^{-1} + J_n)^{-1}

for the precision J that its own site and all later ones give the state. The chain is made from the
back of each chunk to its front, all chunks side by side, and then run from front to back: once from
zero to learn what a chunk does to its start, then, the starts being known, for good.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skgp.inference.markov.passes import Model
from skgp.inference.markov.smoother import Smoother
from skgp.linalg.runtime import standard_normal
from skgp.linalg.small_matrices import (
    identity_plus,
    inverse_and_log_det,
    matmul,
    outer,
    square_root,
    symmetrize,
)


class _Chain(NamedTuple):
    """The conditional chain of deviations over a tile of chunks."""

    T: Tensor  # (d, d, L, C)
    C: Tensor  # (d, d, L, C)
    J: Tensor  # (d, d, C), at the first point of each chunk


def precision_before(smoother: Smoother, F: Tensor, Q: Tensor) -> Tensor:
    """What all data say of states at times (m,) before the first, as a precision (d, d, m).

    F and Q (d, d, m) are the transitions from there to the first time.
    """
    J = _make_chain(smoother, slice(0, 1)).J.expand_as(F)
    T, _ = _conditional(F, Q, J)
    return symmetrize(matmul(T.transpose(0, 1), matmul(J, F)))


def sample_chain(
    smoother: Smoother, places: Tensor, n_samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw deviations of f jointly at the points of some indices `places` (m,), (m, S).

    And those of the state before the first point of the series, (d, S).
    """
    first = start = _sample_start(smoother, n_samples, generator)  # (d, S)
    chunks = smoother.chunks
    out = start.new_empty(len(places), n_samples)
    for tile in smoother.tiles(width=(smoother.model.n_states + 1) * n_samples):
        chain = _make_chain(smoother, tile)
        shape = len(start), n_samples, *chain.T.shape[2:]
        noise = standard_normal(shape, generator, start.dtype)
        moves = matmul(square_root(chain.C), noise)
        f, start = _run(smoother.model, chain.T, moves, start)  # (S, L, C)
        chunk = places.div(chunks.length, rounding_mode="floor")
        here = (chunk >= tile.start) & (chunk < tile.stop)
        out[here] = f[:, places[here] % chunks.length, chunk[here] - tile.start].T
    return out, first


def chain_products(smoother: Smoother, places: Tensor) -> Tensor:
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
        (F, Q), here = steps[j], J
        T[:, :, j], C[:, :, j] = _conditional(F, Q, J)
        J = symmetrize(matmul(T[:, :, j].transpose(0, 1), matmul(J, F.expand_as(J))))
    return _Chain(T, C, here)


def conditioned(P: Tensor, J: Tensor) -> Tensor:
    r"""``(P^-1 + J)^-1 = S (I + S' J S)^-1 S'`` for ``P = S S'``, (d, d, *batch).

    What is inverted is symmetric and of unit diagonal: of states of many scales, as those of RBF,
    ``(I + P J)^-1 P`` has no digit, and draws from it were 1e9 times too wide.
    """
    S = square_root(P)
    M = identity_plus(symmetrize(matmul(S.transpose(0, 1), matmul(J, S))))
    scale = M.diagonal(dim1=0, dim2=1).movedim(-1, 0).rsqrt()
    inverse, _ = inverse_and_log_det(M * outer(scale, scale))
    half = S * scale[None]
    return symmetrize(matmul(matmul(half, inverse), half.transpose(0, 1)))


def _conditional(F: Tensor, Q: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
    """``(I + Q J)^-1 F`` and ``(Q^-1 + J)^-1``."""
    G, _ = inverse_and_log_det(identity_plus(matmul(Q, J)))
    return matmul(G, F), conditioned(Q.expand_as(J), J)


def _sample_start(smoother: Smoother, n_samples: int, generator: torch.Generator) -> Tensor:
    """Draw the deviation of the state before the first point, given all data, (d, n_samples)."""
    _, P = smoother.prior
    noise = standard_normal((len(P), n_samples), generator, P.dtype)
    return square_root(conditioned(P, smoother.tree.total.J[0])) @ noise


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
