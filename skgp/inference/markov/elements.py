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

States at knots
---------------
The knots :math:`z_1 < \dots < z_M` cut time into M + 1 intervals, and interval k has a site

.. math:: \exp(\lambda_k^\top v_k - \tfrac12 v_k^\top \Lambda_k v_k), \qquad v_k = (u_k, u_{k+1}).

:math:`u_0` and :math:`u_{M+1}` are states infinitely long before and after, that tell nothing of
the others (F = 0, Q = :math:`P_0`), so that the rows outside the knots are like those within. With
the interval's transition the site is an element: with :math:`W = (I + Q \Lambda_{22})^{-1}` and
:math:`V = W^\top \Lambda_{22}`,

.. math::
    A &= W (F - Q \Lambda_{21}), \quad P = W Q, \quad b = P \lambda_2, \\
    J &= \Lambda_{11} + F^\top V F + F^\top W^\top \Lambda_{21} + (\cdot)^\top
         - \Lambda_{12} P \Lambda_{21}, \\
    \eta &= \lambda_1 + (F^\top W^\top - \Lambda_{12} P) \lambda_2, \quad
    \ell = \tfrac12 \lambda_2^\top b - \tfrac12 \log |I + Q \Lambda_{22}|.

States without noise (Q = 0) are allowed.

References
----------
.. [1] Sarkka and Garcia-Fernandez (2021), Temporal parallelization of Bayesian smoothers. Their
   element, to which the constant is added here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import TensorState
from skgp.linalg.small_matrices import (
    identity_plus,
    inner,
    inverse_and_log_det,
    matmul,
    matvec,
    outer,
    symmetrize,
)


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


@dataclass(frozen=True)
class PairSites(TensorState):
    """Sites on pairs of neighbouring states, or sums and averages of such."""

    linear: Tensor  # (2d, M + 1), lambda
    precision: Tensor  # (2d, 2d, M + 1), Lambda, symmetric

    @staticmethod
    def zeros(n_states: int, n_knots: int) -> "PairSites":
        """Sites that say nothing."""
        linear = torch.zeros(2 * n_states, n_knots + 1, dtype=torch.float64)
        return PairSites(linear, linear.new_zeros(2 * n_states, *linear.shape))

    def plus(self, other: "PairSites") -> "PairSites":
        """Both sites at once."""
        return PairSites(self.linear + other.linear, self.precision + other.precision)

    def towards(self, other: "PairSites", rate: float) -> "PairSites":
        """The point a fraction `rate` of the way to `other`."""
        return PairSites(
            torch.lerp(self.linear, other.linear, rate),
            torch.lerp(self.precision, other.precision, rate),
        )


@dataclass(frozen=True)
class Chain:
    """Prior of the states at knots."""

    dynamics: Dynamics
    gaps: Tensor  # (M - 1,) between knots
    F: Tensor  # (d, d, M + 1), of every interval
    Q: Tensor

    @staticmethod
    def of(dynamics: Dynamics, knots: Tensor) -> "Chain":
        """The chain at knots (M,), rising; O(M d^2)."""
        dynamics.require_stationary("a model with inducing states")
        gaps = knots.diff()
        F, Q = dynamics.transition(gaps)
        outside = dynamics.prior_at(knots)[..., None]
        apart = torch.zeros_like(outside)
        F = torch.cat([apart, F, apart], -1)
        return Chain(dynamics, gaps, F, torch.cat([outside, Q, outside], -1))

    def gradient(self, F_bar: Tensor, Q_bar: Tensor) -> Tensor:
        """Contraction with the derivatives in the parameters of the dynamics, (q,)."""
        inside, outside = slice(1, -1), Q_bar[..., 0] + Q_bar[..., -1]
        slope = self.dynamics.transition_gradient(
            self.gaps, F_bar[..., inside].contiguous(), Q_bar[..., inside].contiguous()
        )
        return slope + self.dynamics.stationary_gradient(outside)


@dataclass(frozen=True)
class PairPosterior:
    """Gaussian q of the pairs, given all sites."""

    log_normalizer: float  # of the sites, nats; NaN if the integral diverges
    mean: Tensor  # (2d, M + 1)
    cov: Tensor  # (2d, 2d, M + 1); those of a state that two pairs share agree
    F_bar: Tensor  # (d, d, M + 1) derivatives of the log normaliser, the sites held
    Q_bar: Tensor

    @property
    def is_proper(self) -> bool:
        """Whether the sites leave a posterior at all: weights may be so negative as not to."""
        spread = self.cov.diagonal(dim1=0, dim2=1)
        return math.isfinite(self.log_normalizer) and bool((spread >= 0).all())

    def second_moments(self) -> Tensor:
        """E[v v'], (2d, 2d, M + 1)."""
        return self.cov + outer(self.mean, self.mean)

    def regressions(self) -> Tensor:
        """Of the state at each knot but the first on that at the one before, (M - 1, d, d)."""
        d, cov = len(self.mean) // 2, self.cov.movedim(-1, 0)[1:-1]
        # States may be determined by others: the least regression serves as well as any.
        return cov[:, d:, :d] @ torch.linalg.pinv(cov[:, :d, :d], hermitian=True)

    def joint_covariance(self) -> Tensor:
        """Of the states at all knots, (M d, M d); O((M d)^2 d) in a loop over M.

        The states are a Markov chain: each is a regression on the one before, plus noise.
        """
        d, M = len(self.mean) // 2, self.mean.shape[-1] - 1
        own, regression = self.cov.movedim(-1, 0)[:M, d:, d:], self.regressions()
        joint = own.new_zeros(M, d, M * d)
        joint[0, :, :d] = own[0]
        for k in range(1, M):
            joint[k] = regression[k - 1] @ joint[k - 1]
            joint[k, :, k * d : (k + 1) * d] = own[k]
        lower = joint.reshape(M * d, M * d)
        return torch.tril(lower) + torch.tril(lower, -1).mT

    def kl(self, sites: PairSites) -> float:
        """KL divergence from the prior of the states at the knots, in nats."""
        second = (sites.precision * self.second_moments()).sum()
        expected = (sites.linear * self.mean).sum() - 0.5 * second
        return float(expected) - self.log_normalizer


def infer_pairs(chain: Chain, sites: PairSites) -> PairPosterior:
    """Posterior of every pair of neighbouring states; O(M d^3), in a tree without a loop."""
    tree = ElementTree(_elements(chain, sites))
    nowhere = torch.zeros_like(tree.total.P[..., 0])
    before = tree.starts(nowhere[0], nowhere)
    after = tree.futures()
    mean, cov = _pair_moments(chain, sites, before, after)
    F_bar, Q_bar = _transition_slopes(chain, sites, after, mean, cov)
    return PairPosterior(float(tree.total.ll[0]), mean, cov, F_bar, Q_bar)


def _elements(chain: Chain, sites: PairSites) -> Element:
    F, Q, d = chain.F, chain.Q, len(chain.F)
    linear1, linear2 = sites.linear.split(d)
    L11, L21, L22 = sites.precision[:d, :d], sites.precision[d:, :d], sites.precision[d:, d:]
    W, log_det = inverse_and_log_det(identity_plus(matmul(Q, L22)))
    P = symmetrize(matmul(W, Q))
    b = matvec(P, linear2)
    WF = matmul(W, F)
    cross = matmul(WF.transpose(0, 1), L21)
    J = matmul(matmul(F.transpose(0, 1), L22), WF) + cross + cross.transpose(0, 1) + L11
    J = J - matmul(L21.transpose(0, 1), matmul(P, L21))
    back = WF.transpose(0, 1) - matmul(L21.transpose(0, 1), P)
    return Element(
        A=WF - matmul(P, L21),
        b=b,
        P=P,
        eta=linear1 + matvec(back, linear2),
        J=symmetrize(J),
        ll=0.5 * (inner(linear2, b) - log_det),
    )


def _pair_moments(
    chain: Chain, sites: PairSites, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moments of the pairs: what comes before, the transition, the site and what comes after."""
    (start, P), (eta, J) = before, after
    d = len(start)
    FP = matmul(chain.F, P)
    spread = symmetrize(matmul(FP, chain.F.transpose(0, 1))) + chain.Q
    prior = torch.cat([torch.cat([P, FP.transpose(0, 1)], 1), torch.cat([FP, spread], 1)])
    linear, precision = sites.linear.clone(), sites.precision.clone()
    linear[d:] += eta
    precision[d:, d:] += J
    G, _ = inverse_and_log_det(identity_plus(matmul(prior, precision)))
    mean = torch.cat([start, matvec(chain.F, start)]) + matvec(prior, linear)
    return matvec(G, mean), symmetrize(matmul(G, prior))


def _transition_slopes(
    chain: Chain, sites: PairSites, after: tuple[Tensor, Tensor], mean: Tensor, cov: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Derivatives of the log normaliser in F and Q.

    For the noise :math:`n = u_{k+1} - F u_k` they are :math:`Q^{-1} E[n u_k^\top]` and
    :math:`\tfrac12 (Q^{-1} E[n n^\top] Q^{-1} - Q^{-1})`. Given :math:`u_k`,
    :math:`Q^{-1} E[n] = a - B u_k`, which needs no inverse of Q.
    """
    eta, J = after
    d = len(eta)
    linear2, L21, L22 = sites.linear[d:], sites.precision[d:, :d], sites.precision[d:, d:]
    ahead = J + L22
    W, _ = inverse_and_log_det(identity_plus(matmul(ahead, chain.Q)))
    a = matvec(W, eta + linear2)
    B = matmul(W, L21 + matmul(ahead, chain.F))
    u, S = mean[:d], cov[:d, :d]
    r, BS = a - matvec(B, u), matmul(B, S)
    G = outer(r, r) + matmul(BS, B.transpose(0, 1)) - matmul(W, ahead)
    return outer(r, u) - BS, 0.5 * symmetrize(G)
