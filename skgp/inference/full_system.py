r"""q(u) of full covariance, in closed form for given sites (:mod:`skgp.inference.natural`).

In whitened coordinates :math:`u = m_0 + L v` with a prior
:math:`v \sim N(0, I)`, of which row n sees :math:`f_n = b_n + \psi_n^T v` and a rest of a variance
of its own, the ELBO with its divergence multiplied by :math:`\kappa` is largest at

.. math:: S_v = \kappa \Big[ \sum_n \lambda_n \psi_n \psi_n^T + \kappa I \Big]^{-1}, \qquad
          m_v = \tfrac1\kappa S_v \sum_n \eta_n \psi_n .

With L the Cholesky factor of K this is the prior, with inducing points at all rows the exact GP.
With :math:`m_0` and L those of a posterior it is that of rows that come after it
(:mod:`skgp.inference.neighbors.streaming`), and as exact.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from skgp.inference.defaults import NEARLY_EXACT
from skgp.inference.natural import Posterior, Sites
from skgp.linalg.cg import CGResult
from skgp.linalg.cholesky import log_det, reverse_cholesky
from skgp.linalg.least_squares import ridge_by_rows


@dataclass(frozen=True)
class FullSystem:
    """What the ELBO knows of n rows, for a full S; its q is one of v."""

    is_signed: ClassVar[bool] = True
    features: Tensor  # (n, M); psi
    variance: Tensor  # (n,); of f given u
    kl_weight: float = 1.0  # kappa
    weight: Tensor | None = None  # (n,)
    factor: Tensor | None = None  # (M, M); L, for `unwhitened` and `whitened`

    def __len__(self) -> int:
        return len(self.features)

    def solve(self, sites: Sites, **options) -> tuple[Posterior, CGResult]:
        """q(v) by dense factors, ``O((n + M) M^2 c)``; options are of no use."""
        columns = [
            self._column(precision, shift)
            for precision, shift in zip(sites.precision.T, sites.shift.T, strict=True)
        ]
        return joined_columns(columns)

    def moments(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without b."""
        spread = [(self.features @ root).square().sum(1) for root in cast(Tensor, q.root)]
        return self.features @ q.mean, self.variance[:, None] + torch.stack(spread, dim=1)

    def divergence(self, q: Posterior) -> Tensor:
        """kappa times the sum of KL(q(v) || p(v)) over the latent functions, in nats."""
        return whitened_divergence(q, self.kl_weight)

    def unwhitened(self, q: Posterior) -> Posterior:
        """q of u - m_0."""
        factor = cast(Tensor, self.factor)
        root = factor @ cast(Tensor, q.root)
        return Posterior(factor @ q.mean, root.square().sum(-1).T, root)

    def whitened(self, q: Posterior) -> Posterior:
        """The way back, of a posterior of full covariance."""
        factor = cast(Tensor, self.factor)
        root = torch.linalg.solve_triangular(factor, cast(Tensor, q.root), upper=False)
        mean = torch.linalg.solve_triangular(factor, q.mean, upper=False)
        return Posterior(mean, root.square().sum(-1).T, root)

    def _column(self, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        M = self.features.shape[1]
        eye = torch.eye(M, dtype=self.features.dtype, device=self.features.device)
        if not precision.any():  # before the first step: the prior
            return torch.zeros_like(eye[0]), eye
        size = precision * self.features.square().sum(1) / self.kl_weight
        if bool((precision > 0).all()) and float(size.max()) > NEARLY_EXACT:
            noise = self.kl_weight / precision
            mean, root, _ = ridge_by_rows(self.features, shift / precision, noise)
            return mean, root
        scaled = self.features.T * precision
        return full_column(scaled @ self.features, self.features.T @ shift, self.kl_weight)


def whitened_divergence(q: Posterior, kl_weight: float) -> Tensor:
    """kappa times the sum of KL(q(v) || N(0, I)) over the latent functions, in nats."""
    root = cast(Tensor, q.root)
    quadratic = q.mean.square().sum() + root.square().sum()
    return 0.5 * kl_weight * (quadratic - q.mean.numel() - log_det(root).sum())


def full_column(data: Tensor, shift: Tensor, kl_weight: float) -> tuple[Tensor, Tensor]:
    """Mean (M,) and root of S of one latent function, of the sums (M, M) and (M,) of its sites."""
    eye = torch.eye(len(data), dtype=data.dtype, device=data.device)
    upper = reverse_cholesky(eye + data / kl_weight).factor
    root = torch.linalg.solve_triangular(upper, eye, upper=True).T  # S^-1 = U U'
    return root @ (root.T @ shift) / kl_weight, root


def joined_columns(columns: list[tuple[Tensor, Tensor]]) -> tuple[Posterior, CGResult]:
    """q of means (M,) and roots (M, M), one of each latent function, that are exact."""
    mean = torch.stack([column for column, _ in columns], dim=1)
    root = torch.stack([factor for _, factor in columns])
    exact = CGResult(mean, 0, mean.new_zeros(mean.shape[1]), True, torch.zeros_like(mean))
    return Posterior(mean, root.square().sum(-1).T, root), exact
