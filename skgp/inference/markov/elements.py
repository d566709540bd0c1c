r"""Stretches of a state-space model with their data, as elements that join in any grouping.

An element stands for what happens between the state :math:`s` at its start and :math:`s^+` at its
end, the data in between being taken in:

.. math:: p(\text{data}, s^+ \mid s) = \exp(\ell + \eta^\top s - \tfrac12 s^\top J s)\,
   N(s^+;\, A s + b,\, P).

Joining two elements gives an element and is associative [1]_, so a series is split into chunks
that are worked on side by side, and a tree over the chunks replaces the loop over the data. No
covariance is inverted, only :math:`I + P J`: points that coincide and P = 0 need no special case.

Elements are batches: matrices ``(c, d, d)``, vectors ``(c, d)``, constants ``(c,)``, for c elements
one after the other. What is multiplied together lies side by side, so that a join takes six
products of small matrices and one factor.

On a CPU the states between the chunks of a long series come one after the other instead, by LAPACK:
a chunk costs some 15 us and 4 d^3 operations, where the tree factors three matrices. With
:math:`G = (I + P J)^{-1}` a filter over the chunks and its way back are

.. math:: P_+ = A G P A^\top + P_e, \quad m_+ = A G (m + P \eta) + b, \qquad
          N = G^\top J + (A G)^\top N_+ A G, \quad r = G^\top (\eta - J m) + (A G)^\top r_+ .

References
----------
.. [1] Sarkka and Garcia-Fernandez (2021), Temporal parallelization of Bayesian smoothers. Their
   element, to which the constant is added here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from scipy.linalg.blas import dgemm
from torch import Tensor

from skgp.linalg.small_matrices import solve_and_log_det


@dataclass(frozen=True)
class Element:
    """Stretches of a state-space model; see the module for what the letters mean."""

    AbP: Tensor  # (c, d, 2d + 1): A, b and P, positive semi-definite, side by side
    Je: Tensor  # (c, d, d + 1): J, symmetric, and eta
    ll: Tensor  # (c,), nats

    @staticmethod
    def of(A: Tensor, b: Tensor, P: Tensor, eta: Tensor, J: Tensor, ll: Tensor) -> "Element":
        """From its parts."""
        return Element(torch.cat([A, b[..., None], P], -1), torch.cat([J, eta[..., None]], -1), ll)

    @property
    def A(self) -> Tensor:
        """(c, d, d)."""
        return self.AbP[..., : self.AbP.shape[1]]

    @property
    def b(self) -> Tensor:
        """(c, d)."""
        return self.AbP[..., self.AbP.shape[1]]

    @property
    def P(self) -> Tensor:
        """(c, d, d)."""
        return self.AbP[..., self.AbP.shape[1] + 1 :]

    @property
    def eta(self) -> Tensor:
        """(c, d)."""
        return self.Je[..., -1]

    @property
    def J(self) -> Tensor:
        """(c, d, d)."""
        return self.Je[..., :-1]

    def __len__(self) -> int:
        """How many elements lie one after the other."""
        return len(self.AbP)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Element":
        """The element whose tensors are those of this one under `function`."""
        return Element(function(self.AbP), function(self.Je), function(self.ll))

    def at(self, index: slice) -> "Element":
        """The elements of a slice."""
        return self.map(lambda t: t[index])

    @staticmethod
    def join(*parts: "Element") -> "Element":
        """The elements of all parts, one after the other."""
        tensors = zip(*((part.AbP, part.Je, part.ll) for part in parts), strict=True)
        return Element(*(torch.cat(same) for same in tensors))


def combine(first: Element, second: Element) -> Element:
    r"""Join elements one by one: `first` runs up to where `second` begins.

    With :math:`G = (I + P_1 J_2)^{-1}` and the state in the middle integrated out,

    .. math::
        A &= A_2 G A_1, \quad b = A_2 G (b_1 + P_1 \eta_2) + b_2, \quad
        P = A_2 G P_1 A_2^\top + P_2, \\
        \eta &= (G A_1)^\top (\eta_2 - J_2 b_1) + \eta_1, \quad
        J = (G A_1)^\top J_2 A_1 + J_1, \\
        \ell &= \ell_1 + \ell_2 + \tfrac12 [\eta_2^\top G P_1 \eta_2 + 2 \eta_2^\top G b_1
        - b_1^\top J_2 G b_1 - \log |I + P_1 J_2|].

    Constants are NaN where the weights of the data are so negative that the integral diverges.
    """
    d = second.AbP.shape[1]
    met, log_det = _meet(first.AbP, second.Je)
    back = _informed(first.AbP[..., : d + 1], second.Je)
    AbP = second.A @ met  # (c, d, 2d + 1)
    AbP[..., d] += second.b
    AbP[..., d + 1 :] = _symmetric(AbP[..., d + 1 :] @ second.A.mT) + second.P
    Je = _pulled(met[..., :d], back, first.Je)
    ll = first.ll + second.ll + _gain(back[..., -1], met[..., d], second.eta, first.b, log_det)
    return Element(AbP, Je, ll)


def push(element: Element, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take a Gaussian state at the start, given the past, through the element and its data.

    ``mean`` (c, d), ``cov`` (c, d, d). Returns mean and covariance at the end, and
    the log-density (c,) of the element's data given what lies before.
    """
    met, log_det = _meet(torch.cat([mean[..., None], cov], -1), element.Je)
    pushed = element.A @ met  # (c, d, 1 + d)
    spread = _symmetric(pushed[..., 1:] @ element.A.mT) + element.P
    rest = _informed(mean[..., None], element.Je)[..., 0]
    gain = _gain(rest, met[..., 0], element.eta, mean, log_det)
    return pushed[..., 0] + element.b, spread, gain + element.ll


def pull(element: Element, eta: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
    """Take what is known of the state at the end, exp(eta's - s'J s / 2), back to the start.

    ``eta`` (c, d), ``J`` (c, d, d). Returns the same of the state at the start, the
    data of the element being taken in.
    """
    Je = _pull(element, torch.cat([J, eta[..., None]], -1))
    return Je[..., -1], Je[..., :-1]


class ElementTree:
    """All groupings of consecutive elements that scans in both directions need.

    Neighbours are joined pairwise until one element, `total`, is left; Gaussians are then pushed,
    and information is pulled, down the tree. O(c d^3) for c elements, in 2 log2(c) steps.
    """

    def __init__(self, elements: Element) -> None:
        self._levels = [elements]
        while len(elements) > 1:
            elements = _join_neighbours(elements)
            self._levels.append(elements)
        self.total = elements

    def starts(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussians of the state at the start of every element, given all the data before.

        From mean (d,) and covariance (d, d) at the start of the first: (c, d) and (c, d, d).
        """
        mean, cov = mean[None], cov[None]
        for level in reversed(self._levels[:-1]):
            left = level.at(slice(0, len(level) - 1, 2))
            right_mean, right_cov, _ = push(left, mean[: len(left)], cov[: len(left)])
            mean, cov = _interleave(mean, right_mean), _interleave(cov, right_cov)
        return mean, cov

    def futures(self) -> tuple[Tensor, Tensor]:
        """What all the data after the end of every element say of the state there, as of `pull`.

        (c, d) and (c, d, d); zero at the end of the last element.
        """
        Je = torch.zeros_like(self.total.Je)
        for level in reversed(self._levels[:-1]):
            right = level.at(slice(1, None, 2))
            pairs = len(right)
            # Of each pair the right one ends where its parent does.
            Je = torch.cat([_interleave(_pull(right, Je[:pairs]), Je[:pairs]), Je[pairs:]])
        return Je[..., -1], Je[..., :-1]


def _meet(bP: Tensor, Je: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh N(A s + b, P) by exp(eta's - s'Js/2): G [A, b + P eta, P], and log |I + P J|.

    From A, b and P side by side, (c, d, 2d + 1), or b and P alone.
    """
    d = bP.shape[1]
    PJe = bP[..., -d:] @ Je  # (c, d, d + 1)
    right = bP.clone()
    right[..., -d - 1] += PJe[..., d]
    return solve_and_log_det(_identity_plus(PJe[..., :d]), right)


def _informed(Ab: Tensor, Je: Tensor) -> Tensor:
    """``J A`` and ``eta - J b`` side by side, (c, d, d + 1), or the latter alone."""
    back = Je[..., :-1] @ Ab
    torch.sub(Je[..., -1], back[..., -1], out=back[..., -1])
    return back


def _gain(rest: Tensor, met: Tensor, eta: Tensor, b: Tensor, log_det: Tensor) -> Tensor:
    """Log of the mass (c,) at s = 0 of what `_meet` weighs.

    It is [eta'G P eta + 2 eta'G b - b'J G b - log|I + P J|] / 2, and with b'G' eta = b'(I - J G P)
    eta the first terms are (eta - J b)'G (b + P eta) + eta'b, of what is at hand.
    """
    return 0.5 * ((rest * met).sum(-1) + (eta * b).sum(-1) - log_det)


def _pull(element: Element, Je: Tensor) -> Tensor:
    """`pull` of J and eta side by side."""
    d = Je.shape[1]
    GA, _ = solve_and_log_det(_identity_plus(element.P @ Je[..., :d]), element.A)
    return _pulled(GA, _informed(element.AbP[..., : d + 1], Je), element.Je)


def _pulled(GA: Tensor, back: Tensor, Je: Tensor) -> Tensor:
    """``(G A)' [J A, eta - J b] + [J, eta]`` of the element in front, (c, d, d + 1)."""
    out = GA.mT @ back
    out[..., :-1] = _symmetric(out[..., :-1])
    return out.add_(Je)


def _symmetric(A: Tensor) -> Tensor:
    return (A + A.mT).mul_(0.5)


def _identity_plus(A: Tensor) -> Tensor:
    A.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return A


def _join_neighbours(elements: Element) -> Element:
    even = len(elements) // 2 * 2
    joined = combine(elements.at(slice(0, even, 2)), elements.at(slice(1, even, 2)))
    if even == len(elements):
        return joined
    return Element.join(joined, elements.at(slice(even, None)))


def _interleave(left: Tensor, right: Tensor) -> Tensor:
    """Alternate two sequences, `left` first; it may be one longer."""
    pairs = len(right)
    mixed = torch.stack([left[:pairs], right], 1).flatten(0, 1)
    return mixed if len(left) == pairs else torch.cat([mixed, left[pairs:]])


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
