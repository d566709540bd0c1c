r"""States at knots: a Markov chain with a site on every pair of neighbours.

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
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.markov.elements import Element, ElementTree
from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import TensorState
from skgp.linalg.small_matrices import (
    batch_first,
    batch_last,
    identity_plus,
    inner,
    inverse_and_log_det,
    matmul,
    matvec,
    outer,
    symmetrize,
)


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
    nowhere = torch.zeros_like(tree.total.P[0])
    before = batch_last(*tree.starts(nowhere[0], nowhere))
    after = batch_last(*tree.futures())
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
    parts = WF - matmul(P, L21), b, P, linear1 + matvec(back, linear2), symmetrize(J)
    return Element.of(*batch_first(*parts, 0.5 * (inner(linear2, b) - log_det)))


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
