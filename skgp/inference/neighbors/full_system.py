r"""The best q(u) of a full covariance, where every inducing point is active for every row.

The bound is then that of SVGP with its divergence multiplied by kappa. In whitened coordinates
:math:`u = m_0 + L v` with a prior :math:`v \sim N(0, I)`, of which row n sees
:math:`f_n = b_n + \psi_n^T v` and a rest of a variance of its own, it is largest at

.. math:: S_v = \kappa \Big[ \sum_n \lambda_n \psi_n \psi_n^T + \kappa I \Big]^{-1}, \qquad
          m_v = \tfrac1\kappa S_v \sum_n \eta_n \psi_n

given Gaussian sites (:mod:`skgp.inference.neighbors.system`). With L the Cholesky factor of K
this is the prior, with inducing points at all rows the exact GP. With :math:`m_0` and L those of
a posterior it is that of rows that come after it (:mod:`skgp.inference.neighbors.streaming`), and
as exact.

For fewer active points no such closed form is known: the condition
:math:`\sum_n s_n P_n^T S_{I_n}^{-1} P_n = \sum_n \lambda_n a_n a_n^T + Q` mixes inverses of
overlapping blocks of S, and q is left to gradients.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from skgp.inference.neighbors.conditionals import SHARED_JITTER
from skgp.inference.neighbors.shared_conditionals import SharedConditionals
from skgp.inference.neighbors.system import Posterior, Sites
from skgp.kernels.gram import gram_diag
from skgp.linalg.cg import CGResult
from skgp.linalg.cholesky import log_det, reverse_cholesky

__all__ = ["FullSystem", "full_system"]


@dataclass(frozen=True)
class FullSystem:
    """What the bound knows of n rows, for a full S; its q is one of v.

    Attributes
    ----------
    features : Tensor of shape (n, M)
        psi.
    variance : Tensor of shape (n,)
        Of f given u.
    factor : Tensor of shape (M, M)
        L, lower triangular.
    kl_weight : float
        kappa.
    weight : Tensor of shape (n,) or None
        Of the rows' likelihoods.
    """

    features: Tensor
    variance: Tensor
    factor: Tensor
    kl_weight: float
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features)

    def solve(self, sites: Sites, **options) -> tuple[Posterior, CGResult]:
        """q(v) by dense factors, ``O((n + M) M^2 c)``; there are no options."""
        columns = [
            self._column(precision, shift)
            for precision, shift in zip(sites.precision.T, sites.shift.T, strict=True)
        ]
        mean = torch.stack([column for column, _ in columns], dim=1)
        root = torch.stack([factor for _, factor in columns])
        exact = CGResult(mean, 0, mean.new_zeros(mean.shape[1]), True)
        return Posterior(mean, root.square().sum(-1).T, root), exact

    def moments(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without b."""
        spread = [(self.features @ root).square().sum(1) for root in cast(Tensor, q.root)]
        return self.features @ q.mean, self.variance[:, None] + torch.stack(spread, dim=1)

    def divergence(self, q: Posterior) -> Tensor:
        """kappa times the sum of KL(q(v) || p(v)) over the latent functions, in nats."""
        root = cast(Tensor, q.root)
        quadratic = q.mean.square().sum() + root.square().sum()
        return 0.5 * self.kl_weight * (quadratic - q.mean.numel() - log_det(root).sum())

    def unwhitened(self, q: Posterior) -> Posterior:
        """q of u - m_0."""
        root = self.factor @ cast(Tensor, q.root)
        return Posterior(self.factor @ q.mean, root.square().sum(-1).T, root)

    def whitened(self, q: Posterior) -> Posterior:
        """The way back, of a posterior of full covariance."""
        root = torch.linalg.solve_triangular(self.factor, cast(Tensor, q.root), upper=False)
        mean = torch.linalg.solve_triangular(self.factor, q.mean, upper=False)
        return Posterior(mean, root.square().sum(-1).T, root)

    def _column(self, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        M = self.features.shape[1]
        eye = torch.eye(M, dtype=self.features.dtype, device=self.features.device)
        if not precision.any():  # before the first step: the prior
            return torch.zeros_like(eye[0]), eye
        scaled = self.features.T * precision
        upper = reverse_cholesky(eye + (scaled @ self.features) / self.kl_weight).factor
        root = torch.linalg.solve_triangular(upper, eye, upper=True).T  # S^-1 = U U'
        return root @ (root.T @ (self.features.T @ shift)) / self.kl_weight, root


def full_system(
    kernel,
    X: Tensor,
    Z: Tensor,
    *,
    kl_weight: float = 1.0,
    weight: Tensor | None = None,
    jitter: float = SHARED_JITTER,
) -> FullSystem:
    """The system of n rows for a full S.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
        float64.
    Z : Tensor of shape (M, d)
        Distinct; all are active for every row.
    kl_weight, weight
        See :func:`~skgp.inference.neighbors.system.local_system`.
    jitter : float
        Relative to the variance at each inducing point.

    Returns
    -------
    FullSystem
        Memory O(n M + c M^2).
    """
    given = SharedConditionals(kernel, Z, jitter * gram_diag(kernel, Z))
    features, variance = given.features(X)
    return FullSystem(features, variance, given.factor, kl_weight, weight)
