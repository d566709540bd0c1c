r"""States between the chunks of a long series: a filter over the chunks, and its way back.

With the :class:`~.elements.Element` of every chunk and :math:`G = (I + P J)^{-1}`

.. math:: P_+ = A G P A^\top + P_e, \quad m_+ = A G (m + P \eta) + b, \qquad
          N = G^\top J + (A G)^\top N_+ A G, \quad r = G^\top (\eta - J m) + (A G)^\top r_+,

one after the other, by LAPACK: a chunk costs some 15 us and 4 d^3 operations, where the tree of
:mod:`.elements` factors three matrices.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from scipy.linalg.blas import dgemm
from torch import Tensor


class Tile(NamedTuple):
    """Some chunks with their data, c of them."""

    clocks: list[Tensor]
    root: Tensor  # (c, L) of the weights
    right: Tensor  # (c, 2d + 1, L): U', V' and c', weighted, as all that follows
    inverse: Tensor  # (c, L, L) of B
    solved: Tensor  # (c, 2d + 1, L): `right` times the inverse, Z_c'
    products: Tensor  # (c, 2d + 1, 2d + 1): of these
    F: Tensor  # (c, d, d) Phi
    Q: Tensor
    half_log_det: float

    @property
    def y(self) -> Tensor:
        """(c, L)."""
        return self.right[:, -1]


class Joint(NamedTuple):
    """What is known of the states at the starts and the ends of some chunks, c of them."""

    h: Tensor  # (c, 2d), as theta (c, 2d, 2d): see :mod:`.dense_chunks`
    theta: Tensor
    r: Tensor  # (c, d) after
    N: Tensor  # (c, d, d)


class Joints:
    """The states between chunks: a filter over the chunks, and its way back."""

    def __init__(self, tiles: Iterable[Tile], count: int, prior: Tensor) -> None:
        d = len(prior)
        known = np.zeros((count + 1, d + 1, d))  # P and m
        known[0, :d] = prior.numpy()
        solved = np.empty((count, 2 * d + 1, d))  # (A G), (I + J P)^-1 J and that of eta - J m
        systems = np.empty((count, d + 1, d))  # factors of I + J P
        start, half_log_det, transitions = 0, 0.0, []
        for tile in tiles:
            transitions.append(tile.F)
            here, stop = slice(start, start + len(tile.F)), start + len(tile.F) + 1
            _filter(tile, known[start:stop], solved[here], systems[here])
            half_log_det += tile.half_log_det
            start += len(tile.F)
        later = _way_back(solved)
        pivots = np.abs(systems[:, :d].diagonal(axis1=1, axis2=2))
        self.half_log_det = half_log_det + 0.5 * float(np.log(pivots).sum())
        N, P = torch.from_numpy(later), torch.from_numpy(known)
        self.N, self.r = N[:, :d], N[:, d]  # (count + 1, d, d), (count + 1, d)
        self._P = P[:, :d]
        self._smoothed = P[:, d] + (self._P @ self.r[..., None])[..., 0]
        self._AG, self._F = torch.from_numpy(solved)[:, :d], torch.cat(transitions)

    def tiles(self, size: int) -> Iterator[Joint]:
        """Tile by tile of so many chunks."""
        count, d, _ = self._AG.shape
        for start in range(0, count, size):
            here, after = slice(start, start + size), slice(start + 1, min(start + size, count) + 1)
            P, N, r, F = self._P[:-1][here], self.N[after], self.r[after], self._F[here]
            theta, back = P.new_empty(len(P), 2 * d, 2 * d), F.mT @ N
            theta[:, :d, :d] = P @ self.N[:-1][here] @ P - P
            theta[:, d:] = back @ torch.cat([self._AG[here] @ P, F], 2)
            theta[:, :d, d:] = theta[:, d:, :d].mT
            h = torch.cat([self._smoothed[:-1][here], (F.mT @ r[..., None])[..., 0]], 1)
            yield Joint(h, theta, r, N)


def _filter(tile: Tile, known: np.ndarray, solved: np.ndarray, systems: np.ndarray) -> None:
    """Run the filter over the chunks of a tile: write states, solutions and factors of I + J P.

    States are P with m for one more row, (d + 1, d). BLAS and LAPACK read transposes of all arrays
    here, and add to what stands in the array they write to: a call less for each.
    """
    d, products, F = tile.F.shape[1], tile.products, tile.F  # of U, V and c
    A = F - F @ products[:, d : 2 * d, :d]
    eta = products[:, 2 * d :, :d]
    torch.cat([A, products[:, :d, :d], eta], 1, out=torch.from_numpy(solved))  # A, J and eta
    # ((A, 0), (eta', 1)), which makes A P and m' + eta' P of a state.
    onward = torch.nn.functional.pad(torch.cat([A, eta], 1), (0, 1))
    onward[:, d, d] = 1.0
    ends = products[:, d:, d : 2 * d] @ F.mT
    torch.sub(tile.Q, F @ ends[:, :d], out=ends[:, :d])
    known[1:] = ends.numpy()  # P and b' of each element
    systems[:] = np.eye(d + 1, d)
    moved = np.empty((d + 1, d))
    turned = (x.swapaxes(1, 2) for x in (known, known[1:], solved, systems))
    for here, ahead, right, system, move in zip(*turned, onward.numpy(), strict=False):
        J, e = right[:, d : 2 * d], right[:, 2 * d]
        dgemm(1.0, J, here, 1.0, system, 0, 0, True)  # I + J P and J m
        np.subtract(e, system[:, d], out=e)
        lapack.dgesv(system[:, :d], right, True, True)
        np.dot(move, here.T, out=moved)
        dgemm(1.0, right[:, :d], moved.T, 1.0, ahead, 1, 0, True)


def _way_back(solved: np.ndarray) -> np.ndarray:
    """N, with r for one more row, before chunks and after the last, (count + 1, d + 1, d)."""
    count, _, d = solved.shape
    later = np.zeros((count + 1, d + 1, d))
    later[:-1] = solved[:, d:]
    back = np.zeros((count, d + 1, d + 1))
    back[:, :d, :d], back[:, d, d] = solved[:, :d].swapaxes(1, 2), 1.0
    moved = np.empty((d + 1, d))
    arrays = later[1:], later[:-1].swapaxes(1, 2), solved[:, :d], back.swapaxes(1, 2)
    for after, here, AG, turn in zip(*(x[::-1] for x in arrays), strict=True):
        np.dot(after, AG, out=moved)
        dgemm(1.0, moved.T, turn, 1.0, here, 0, 0, True)
    return later
