r"""Stretches of a state-space model with their data, as elements that join in any grouping.

An element stands for what happens between the state :math:`s` at its start and :math:`s^+` at its
end, the data in between being taken in:

.. math:: p(\text{data}, s^+ \mid s) = \exp(\ell + \eta^\top s - \tfrac12 s^\top J s)\,
   N(s^+;\, A s + b,\, P).

Joining two elements gives an element and is associative [1]_, so a series is split into chunks
that are worked on side by side, and a tree over the chunks replaces the loop over the data. No
covariance is inverted, only :math:`I + P J`: points that coincide and P = 0 need no special case.

Matrices are ``(d, d, c)``, vectors ``(d, c)``, constants ``(c,)``, for c elements one after the
other.

References
----------
.. [1] Sarkka and Garcia-Fernandez (2021), Temporal parallelization of Bayesian smoothers. Their
   element, to which the constant is added here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.linalg.small_matrices import (
    identity_plus,
    inner,
    inverse_and_log_det,
    matmul,
    matvec,
    symmetrize,
)

__all__ = ["Element", "ElementTree", "combine", "pull", "push"]


@dataclass(frozen=True)
class Element:
    """Stretches of a state-space model; see the module for what the letters mean."""

    A: Tensor  # (d, d, c)
    b: Tensor  # (d, c)
    P: Tensor  # (d, d, c), positive semi-definite
    eta: Tensor  # (d, c)
    J: Tensor  # (d, d, c), symmetric
    ll: Tensor  # (c,), nats

    def __len__(self) -> int:
        """How many elements lie one after the other."""
        return self.A.shape[-1]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Element":
        """The element whose tensors are those of this one under `function`."""
        return Element(*map(function, self._tensors()))

    def at(self, index: slice) -> "Element":
        """The elements of a slice."""
        return self.map(lambda t: t[..., index].contiguous())

    @staticmethod
    def join(*parts: "Element") -> "Element":
        """The elements of all parts, one after the other."""
        tensors = zip(*(part._tensors() for part in parts), strict=True)
        return Element(*(torch.cat(same, -1) for same in tensors))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.A, self.b, self.P, self.eta, self.J, self.ll


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
    GA, Gm, GP, gain = _meet(first.A, first.b, first.P, second.eta, second.J)
    return Element(
        A=matmul(second.A, GA),
        b=matvec(second.A, Gm) + second.b,
        P=symmetrize(matmul(matmul(second.A, GP), second.A.transpose(0, 1))) + second.P,
        eta=_past_eta(first, GA, second.eta, second.J),
        J=_past_J(first, GA, second.J),
        ll=first.ll + second.ll + gain,
    )


def push(element: Element, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take a Gaussian state at the start, given the past, through the element and its data.

    ``mean`` (d, c), ``cov`` (d, d, c). Returns mean and covariance at the end, and
    the log-density (c,) of the element's data given what lies before.
    """
    _, Gm, GP, gain = _meet(None, mean, cov, element.eta, element.J)
    pushed = matvec(element.A, Gm) + element.b
    spread = symmetrize(matmul(matmul(element.A, GP), element.A.transpose(0, 1)))
    return pushed, spread + element.P, gain + element.ll


def pull(element: Element, eta: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
    """Take what is known of the state at the end, exp(eta's - s'J s / 2), back to the start.

    ``eta`` (d, c), ``J`` (d, d, c). Returns the same of the state at the start, the
    data of the element being taken in.
    """
    G, _ = inverse_and_log_det(identity_plus(matmul(element.P, J)))
    GA = matmul(G, element.A)
    return _past_eta(element, GA, eta, J), _past_J(element, GA, J)


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

        From mean (d,) and covariance (d, d) at the start of the first: (d, *batch,
        c) and (d, d, c).
        """
        mean, cov = mean[..., None], cov[..., None]
        for level in reversed(self._levels[:-1]):
            left = level.at(slice(0, len(level) - 1, 2))
            pairs = len(left)
            right_mean, right_cov, _ = push(left, mean[..., :pairs], cov[..., :pairs])
            mean, cov = _interleave(mean, right_mean), _interleave(cov, right_cov)
        return mean, cov

    def futures(self) -> tuple[Tensor, Tensor]:
        """What all the data after the end of every element say of the state there, as of `pull`.

        (d, c) and (d, d, c); zero at the end of the last element.
        """
        eta, J = torch.zeros_like(self.total.eta), torch.zeros_like(self.total.J)
        for level in reversed(self._levels[:-1]):
            right = level.at(slice(1, None, 2))
            pairs = len(right)
            left_eta, left_J = pull(right, eta[..., :pairs], J[..., :pairs])
            # Of each pair the right one ends where its parent does.
            alone = slice(pairs, None)
            eta = torch.cat([_interleave(left_eta, eta[..., :pairs]), eta[..., alone]], -1)
            J = torch.cat([_interleave(left_J, J[..., :pairs]), J[..., alone]], -1)
        return eta, J


def _meet(
    A: Tensor | None, b: Tensor, P: Tensor, eta: Tensor, J: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weigh N(A s + b, P) by exp(eta's - s'Js/2): G A, G (b + P eta), G P and the log of the mass.

    The mass is that at s = 0.
    """
    G, log_det = inverse_and_log_det(identity_plus(matmul(P, J)))
    P_eta = matvec(P, eta)
    Gm = matvec(G, b + P_eta)
    # [eta'G P eta + 2 eta'G b - b'J G b] / 2, and with b'G' eta = b'(I - J G P) eta it is
    # [(eta - J b)'G (b + P eta) + eta'b] / 2: one product with G, which is at hand.
    gain = 0.5 * (inner(eta - matvec(J, b), Gm) + inner(eta, b) - log_det)
    GA = G if A is None else matmul(G, A)
    return GA, Gm, matmul(G, P), gain


def _past_eta(first: Element, GA: Tensor, eta: Tensor, J: Tensor) -> Tensor:
    return matvec(GA.transpose(0, 1), eta - matvec(J, first.b)) + first.eta


def _past_J(first: Element, GA: Tensor, J: Tensor) -> Tensor:
    return symmetrize(matmul(GA.transpose(0, 1), matmul(J, first.A))) + first.J


def _join_neighbours(elements: Element) -> Element:
    even = len(elements) // 2 * 2
    joined = combine(elements.at(slice(0, even, 2)), elements.at(slice(1, even, 2)))
    if even == len(elements):
        return joined
    return Element.join(joined, elements.at(slice(even, None)))


def _interleave(left: Tensor, right: Tensor) -> Tensor:
    """Alternate two sequences along the last axis, `left` first; it may be one longer."""
    pairs = right.shape[-1]
    mixed = torch.stack([left[..., :pairs], right], -1).flatten(-2)
    return torch.cat([mixed, left[..., pairs:]], -1)
