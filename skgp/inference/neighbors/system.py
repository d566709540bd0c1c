r"""The equations of the best q(u) given a Gaussian factor in f for every row, and their solution.

The bound is quadratic in m where the likelihood of each row is replaced by a *site*, the factor
:math:`\exp(-\tfrac12 \lambda_n f_n^2 + \eta_n f_n)`, f without its prior mean. With the share
:math:`s_n = \kappa w_n / \sum w` of a row in the divergence (kappa, the KL weight; w, the weights
of the rows), it is stationary where, for every latent function,

.. math:: \Big[ \sum_n \lambda_n a_n a_n^T + Q \Big] m = \sum_n \eta_n a_n, \qquad
          Q = \sum_n s_n P_n^T K_n^{-1} P_n,

P_n selecting the active set, and for a diagonal S where

.. math:: S_{jj} = \frac{\sum_{n : j \in I_n} s_n}
                        {\sum_n \lambda_n a_{nj}^2 + Q_{jj}}.

No matrix of size M x M is formed but Q, which is sparse: it couples points that are active
together. Neighbourhoods overlap, so that Q holds 2 to 50 times fewer numbers than the n local
inverses (kin40k: 390 a row of the 1024 at H = 32, M = N, and 60 at M = N / 10). Q and the matrix A
of the rows a_n are made in one pass over the conditionals, which need not be kept. Inducing points
that are active for no row keep their prior: mean 0 and the prior variance.

*Full S, every inducing point active for every row* (`FullSystem`). The bound is that of SVGP with
its divergence multiplied by kappa. In whitened coordinates :math:`u = m_0 + L v` with a prior
:math:`v \sim N(0, I)`, of which row n sees :math:`f_n = b_n + \psi_n^T v` and a rest of a variance
of its own, it is largest at

.. math:: S_v = \kappa \Big[ \sum_n \lambda_n \psi_n \psi_n^T + \kappa I \Big]^{-1}, \qquad
          m_v = \tfrac1\kappa S_v \sum_n \eta_n \psi_n .

With L the Cholesky factor of K this is the prior, with inducing points at all rows the exact GP.
With :math:`m_0` and L those of a posterior it is that of rows that come after it
(:mod:`skgp.inference.neighbors.streaming`), and as exact. For fewer active points no such closed
form is known: the condition
:math:`\sum_n s_n P_n^T S_{I_n}^{-1} P_n = \sum_n \lambda_n a_n a_n^T + Q` mixes inverses of
overlapping blocks of S, and q is left to gradients.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from skgp.inference.neighbors.assembly import LocalPrior, PriorAssembly, RowWeights
from skgp.inference.neighbors.conditionals import SharedConditionals, Tiles
from skgp.inference.neighbors.defaults import SHARED_JITTER
from skgp.kernels.gram import gram_diag
from skgp.linalg.cg import CGResult, block_cg
from skgp.linalg.cholesky import log_det, reverse_cholesky


@dataclass(frozen=True)
class Sites:
    """Gaussian factors in f, one a row and latent function."""

    precision: Tensor  # (n, c); lambda, not negative; weights of the rows included
    shift: Tensor  # (n, c); eta, precision times location, the prior mean of f removed
    curvature: Tensor  # (n, c); takes the place of lambda in S; differs if p is not log-concave

    @classmethod
    def none(cls, like: Tensor) -> "Sites":
        """Sites that say nothing."""
        zero = torch.zeros_like(like)
        return cls(zero, zero, zero)

    def towards(self, other: "Sites", rate: float) -> "Sites":
        """The part `rate` of the way from these to `other`."""
        return Sites(
            torch.lerp(self.precision, other.precision, rate),
            torch.lerp(self.shift, other.shift, rate),
            torch.lerp(self.curvature, other.curvature, rate),
        )


@dataclass(frozen=True)
class Posterior:
    """q(u) = N(mean (M, c), S): diagonal of S (M, c) and, if S is full, root root' (c, M, M)."""

    mean: Tensor
    var: Tensor
    root: Tensor | None = None


@dataclass(frozen=True)
class LocalSystem:
    """What the bound knows of n rows and M inducing points, for a diagonal S."""

    rows: RowWeights  # A
    prior: LocalPrior
    weight: Tensor | None = None  # (n,) or None
    anchor: Tensor | None = None  # (M, c) or None; precisions of further sites at u itself, at 0

    def __len__(self) -> int:
        return len(self.rows)

    def solve(
        self, sites: Sites, *, start: Tensor | None = None, **options
    ) -> tuple[Posterior, CGResult]:
        """q(u): m by conjugate gradients from `start` (M, c), preconditioned by the diagonal.

        O((n H + nnz Q) c) an iteration; `options` are those of :func:`~skgp.linalg.cg.block_cg`.
        """
        diagonal = self.rows.collect_squares(sites.precision) + self._prior_diagonal()
        inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)
        found = block_cg(
            lambda V: self._matmul(sites.precision, V),
            self.rows.collect(sites.shift),
            preconditioner=lambda R: inverse * R,
            X0=start,
            **options,
        )
        return Posterior(found.solution, self.variance(sites)), found

    def variance(self, sites: Sites) -> Tensor:
        """Diagonal of S, (M, c).

        Where curvatures are negative, a variance stays within ten times that without any data.
        """
        least = self._prior_diagonal()
        precision = self.rows.collect_squares(sites.curvature) + least
        var = self.prior.mass[:, None] / torch.maximum(precision, 0.1 * least)
        known = (self.prior.mass > 0)[:, None]
        return torch.where(known, var, self.prior.variance[:, None])

    def moments(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without prior means."""
        explained = self.rows.project_squares(q.var)
        return self.rows.project(q.mean), self.rows.variance[:, None] + explained

    def divergence(self, q: Posterior) -> Tensor:
        """What the bound subtracts from the expected log-likelihood, in nats."""
        value = self.prior.divergence(q.mean, q.var)
        if self.anchor is None:
            return value
        return value + 0.5 * (self.anchor * (q.mean.square() + q.var)).sum()

    def _matmul(self, precision: Tensor, V: Tensor) -> Tensor:
        """Product of the matrix of the mean, for sites of a precision (n, c), with V (M, c)."""
        product = self.rows.collect(precision * self.rows.project(V)) + self.prior.multiply(V)
        return product if self.anchor is None else product + self.anchor * V

    def _prior_diagonal(self) -> Tensor:
        diagonal = self.prior.diagonal[:, None]
        return diagonal if self.anchor is None else diagonal + self.anchor


def local_system(tiles: Tiles, *, kl_weight: float, weight: Tensor | None = None) -> LocalSystem:
    """The system of n rows of weights (n,); one of weight 2 is the row twice, in both parts.

    kl_weight is kappa: M / H, or 1 for the bound of the paper (eq. 11). O(n H^2 (H + d)).
    """
    return nested_systems([tiles], kl_weight=kl_weight, weight=weight)[0]


def nested_systems(
    parts: list[Tiles], *, kl_weight: float, weight: Tensor | None = None
) -> list[LocalSystem]:
    """Systems of the rows of the first part, of the first two, and so on; at the cost of the last.

    The KL weight is that of all rows: the divergences of fewer weigh less in proportion.
    """
    each = parts[0].X.new_ones(sum(len(p.X) for p in parts)) if weight is None else weight
    share = kl_weight * each / each.sum()
    assembly, active, weights, variance, systems = PriorAssembly(parts[0]), [], [], [], []
    start = 0
    for tiles in parts:
        for rows, local in tiles:
            assembly.add(local, share[start + rows.start : start + rows.stop])
            weights.append(local.weights)
            variance.append(local.variance)
        active.append(tiles.active)
        start += len(tiles.X)
        joined = torch.cat(active), torch.cat(weights), torch.cat(variance)
        A = RowWeights(*joined, len(tiles.Z))
        given = None if weight is None else weight[:start]
        systems.append(LocalSystem(A, assembly.prior(), given))
    return systems


@dataclass(frozen=True)
class FullSystem:
    """What the bound knows of n rows, for a full S; its q is one of v."""

    features: Tensor  # (n, M); psi
    variance: Tensor  # (n,); of f given u
    factor: Tensor  # (M, M); L, lower triangular
    kl_weight: float  # kappa
    weight: Tensor | None = None  # (n,) or None

    def __len__(self) -> int:
        return len(self.features)

    def solve(self, sites: Sites, **options) -> tuple[Posterior, CGResult]:
        """q(v) by dense factors, ``O((n + M) M^2 c)``; options are of no use."""
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
    kernel, X: Tensor, Z: Tensor, *, kl_weight: float = 1.0, weight: Tensor | None = None
) -> FullSystem:
    """The system of rows X (n, d), float64, given all of Z (M, d); memory O(n M + c M^2)."""
    given = SharedConditionals(kernel, Z, SHARED_JITTER * gram_diag(kernel, Z))
    return FullSystem(*given.features(X), given.factor, kl_weight, weight)
