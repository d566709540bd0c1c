r"""The states of a series given all data, as a Markov chain that runs forwards.

.. math:: s_n \mid s_{n-1}, \text{data} \sim N(T_n s_{n-1} + c_n,\, C_n),

see :mod:`.posterior`. The chain is made from the back of each chunk to its front, all chunks side
by side, and then run from front to back: once from zero to learn what a chunk does to its start,
then, the starts being known, for good.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.markov.chunks import Steps
from skgp.inference.markov.passes import Gaussian, Model, Sites
from skgp.inference.markov.smoother import Smoother
from skgp.linalg.small_matrices import (
    inverse_and_log_det,
    matmul,
    matvec,
    square_root,
    symmetrize,
)

__all__ = ["chain_products", "sample_chain"]


@dataclass(frozen=True)
class _Chain:
    """Tensors over a tile of chunks.

    Attributes
    ----------
    T : Tensor of shape (d, d, L, C)
    c : Tensor of shape (d, L, C)
    C : Tensor of shape (d, d, L, C)
    """

    T: Tensor
    c: Tensor
    C: Tensor


def sample_chain(
    smoother: Smoother, places: Tensor, n_samples: int, generator: torch.Generator
) -> Tensor:
    """Draw f jointly at some points of a series, (m, n_samples).

    Parameters
    ----------
    smoother : Smoother
    places : Tensor of shape (m,)
        Indices of points.
    n_samples : int
    generator : torch.Generator
    """
    start = _sample_start(smoother, n_samples, generator)  # (d, S)
    chunks = smoother.chunks
    out = start.new_empty(len(places), n_samples)
    for tile in smoother.tiles(width=(smoother.model.n_states + 1) * n_samples):
        chain = _make_chain(smoother, tile)
        noise = _draw(chain.T.new_empty, (len(start), n_samples, *chain.c.shape[1:]), generator)
        moves = matmul(square_root(chain.C), noise).add_(chain.c[:, None])
        f, start = _run(smoother.model, chain.T, moves, start)  # (S, L, C)
        chunk = places.div(chunks.length, rounding_mode="floor")
        here = (chunk >= tile.start) & (chunk < tile.stop)
        out[here] = f[:, places[here] % chunks.length, chunk[here] - tile.start].T
    return out


def chain_products(smoother: Smoother, places: Tensor) -> Tensor:
    """Products of the chain's T from each of some points to the next, (d, d, m).

    Parameters
    ----------
    smoother : Smoother
    places : Tensor of shape (m,)
        Indices of points, rising.

    Returns
    -------
    Tensor of shape (d, d, m)
        The first is the product from before the series.
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
    eta, J = (x[..., tile].contiguous() for x in smoother.boundaries[1])
    length, n_chunks = sites[0].shape
    d = smoother.model.n_states
    T, C = eta.new_empty(d, d, length, n_chunks), eta.new_empty(d, d, length, n_chunks)
    c = eta.new_empty(d, length, n_chunks)
    for j in reversed(range(length)):
        eta, J = _take_in(smoother.model, sites, j, eta, J)
        T[:, :, j], C[:, :, j] = _conditional(steps, j, J)
        c[:, j] = matvec(C[:, :, j], eta)
        back = T[:, :, j].transpose(0, 1)
        F, _ = steps[j]
        eta, J = matvec(back, eta), symmetrize(matmul(back, matmul(J, F.expand_as(J))))
    return _Chain(T, c, C)


def _take_in(model: Model, sites: Sites, j: int, eta: Tensor, J: Tensor) -> Gaussian:
    """Information with that of the points' own sites."""
    beta, omega = sites
    eta, J = eta.clone(), J.clone()
    model.add_observed(eta, beta[j])
    half = torch.zeros_like(eta)
    model.add_observed(half, 0.5 * omega[j])
    model.add_observed_outer(J, half)
    return eta, J


def _conditional(steps: Steps, j: int, J: Tensor) -> tuple[Tensor, Tensor]:
    """``G F`` and ``G Q`` for ``G = (I + Q J)^-1``."""
    F, Q = steps[j]
    M = matmul(Q, J)
    M.diagonal(dim1=0, dim2=1).add_(1.0)
    G, _ = inverse_and_log_det(M)
    return matmul(G, F), symmetrize(matmul(G, Q))


def _sample_start(smoother: Smoother, n_samples: int, generator: torch.Generator) -> Tensor:
    """Draw the state before the first point, given all data, (d, n_samples)."""
    _, P = smoother.prior
    total = smoother.tree.total
    cov = torch.linalg.solve(torch.eye(len(P)).to(P) + P @ total.J[..., 0], P)
    noise = _draw(P.new_empty, (len(P), n_samples), generator)
    return cov @ total.eta + square_root(symmetrize(cov)) @ noise


def _run(model: Model, T: Tensor, moves: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``s = T s + move`` through a tile from a state (d, S): f (S, L, C) and the last state."""
    d, n_samples, length, n_chunks = moves.shape
    A = torch.eye(d).to(T)[..., None].expand(d, d, n_chunks)
    s = moves.new_zeros(d, n_samples, n_chunks)
    for j in range(length):
        A, s = matmul(T[:, :, j], A), matmul(T[:, :, j], s).add_(moves[:, :, j])
    ends = _scan(A, s, start)  # (d, S, C)
    s = torch.cat([start[..., None], ends[..., :-1]], -1)
    f = moves.new_empty(n_samples, length, n_chunks)
    for j in range(length):
        s = matmul(T[:, :, j], s).add_(moves[:, :, j])
        f[:, j] = model.observe(s)
    return f, ends[..., -1]


def _scan(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
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
    """Products of T since the last marked point: at every point, and after the tile.

    Parameters
    ----------
    T : Tensor of shape (d, d, L, C)
    marks : Tensor of shape (L, C)
    carry : Tensor of shape (d, d)
        The product that comes into the tile.
    """
    eye = torch.eye(len(T)).to(T)[..., None]
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


def _draw(new_empty, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return new_empty(shape).normal_(generator=generator)
