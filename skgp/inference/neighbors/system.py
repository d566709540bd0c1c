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

No matrix of size M x M is formed but Q (:mod:`skgp.inference.neighbors.local_prior`), which is
sparse: it couples points that are active together. Q and the matrix A of the rows a_n
(:mod:`skgp.inference.neighbors.row_weights`) are made in one pass over the conditionals, which
need not be kept.

Inducing points that are active for no row keep their prior: mean 0 and the prior variance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.local_prior import LocalPrior, PriorAssembly
from skgp.inference.neighbors.row_weights import RowWeights
from skgp.linalg.cg import CGResult, block_cg

__all__ = [
    "LocalSystem",
    "Posterior",
    "Sites",
    "local_system",
    "nested_systems",
]


@dataclass(frozen=True)
class Sites:
    """Gaussian factors in f, one a row and latent function.

    Attributes
    ----------
    precision : Tensor of shape (n, c)
        lambda, not negative; weights of the rows included.
    shift : Tensor of shape (n, c)
        eta, precision times location, the prior mean of f removed.
    curvature : Tensor of shape (n, c)
        What takes the place of lambda in S; differs where a likelihood is not log-concave.
    """

    precision: Tensor
    shift: Tensor
    curvature: Tensor

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
    """What the bound knows of rows and inducing points, for a diagonal S.

    Attributes
    ----------
    rows : RowWeights
        Of n rows.
    prior : LocalPrior
    weight : Tensor of shape (n,) or None
        Of the rows' likelihoods.
    anchor : Tensor of shape (M, c) or None
        Precisions of further sites at u itself, at 0.
    """

    rows: RowWeights
    prior: LocalPrior
    weight: Tensor | None = None
    anchor: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def solve_mean(
        self,
        sites: Sites,
        *,
        start: Tensor | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
        warn: bool = True,
    ) -> CGResult:
        """Mean of u by conjugate gradients, preconditioned by the diagonal of each column.

        Parameters
        ----------
        sites : Sites
        start : Tensor of shape (M, c), optional
        tol : float
            Relative residual of every column.
        max_iter, warn
            See :func:`~skgp.linalg.cg.block_cg`.

        Returns
        -------
        CGResult
            ``solution`` (M, c); an iteration costs ``O((n H + nnz Q) c)``.
        """
        diagonal = self.rows.collect_squares(sites.precision) + self._prior_diagonal()
        inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)
        return block_cg(
            lambda V: self.matmul(sites.precision, V),
            self.rows.collect(sites.shift),
            preconditioner=lambda R: inverse * R,
            X0=start,
            tol=tol,
            max_iter=max_iter,
            warn=warn,
        )

    def matmul(self, precision: Tensor, V: Tensor) -> Tensor:
        """Product of the matrix of the mean, for sites of a precision (n, c), with V (M, c)."""
        product = self.rows.collect(precision * self.rows.project(V)) + self.prior.multiply(V)
        return product if self.anchor is None else product + self.anchor * V

    def variance(self, sites: Sites) -> Tensor:
        """Diagonal of S, (M, c).

        Where curvatures are negative, a variance stays within ten times that without any data.
        """
        least = self._prior_diagonal()
        precision = self.rows.collect_squares(sites.curvature) + least
        var = self.prior.mass[:, None] / torch.maximum(precision, 0.1 * least)
        known = (self.prior.mass > 0)[:, None]
        return torch.where(known, var, self.prior.variance[:, None])

    def solve(self, sites: Sites, **options) -> tuple[Posterior, CGResult]:
        """q(u); `options` as for `solve_mean`."""
        found = self.solve_mean(sites, **options)
        return Posterior(found.solution, self.variance(sites)), found

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

    def _prior_diagonal(self) -> Tensor:
        diagonal = self.prior.diagonal[:, None]
        return diagonal if self.anchor is None else diagonal + self.anchor


def local_system(tiles: Tiles, *, kl_weight: float, weight: Tensor | None = None) -> LocalSystem:
    """The system of n rows.

    Parameters
    ----------
    tiles : Tiles
        Passed through once; ``budget=0`` spares their memory.
    kl_weight : float
        kappa: M / H, or 1 for the bound of the paper (eq. 11).
    weight : Tensor of shape (n,), optional
        Not negative. A row of weight 2 counts as the same row twice, in both parts of the bound.

    Returns
    -------
    LocalSystem
        ``O(n H^2 (H + d))``.

    Raises
    ------
    ValueError
        If the KL weight is not positive, or no weight is.
    """
    return nested_systems([tiles], kl_weight=kl_weight, weight=weight)[0]


def nested_systems(
    parts: list[Tiles], *, kl_weight: float, weight: Tensor | None = None
) -> list[LocalSystem]:
    """Systems of the rows of the first part, of the first two, and so on.

    Parameters
    ----------
    parts : list of Tiles
        Of one kernel and the same inducing points.
    kl_weight : float
        As in `local_system`, of all rows: the divergences of fewer weigh less in proportion.
    weight : Tensor, optional
        Of all rows, one part after another.

    Returns
    -------
    list of LocalSystem
        At the cost of the last.
    """
    n = sum(len(tiles.X) for tiles in parts)
    share = _shares(parts[0].X.new_ones(n) if weight is None else weight, kl_weight)
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
        matrix = RowWeights(*joined, len(tiles.Z))
        given = None if weight is None else weight[:start]
        systems.append(LocalSystem(matrix, assembly.prior(), given))
    return systems


def _shares(weight: Tensor, kl_weight: float) -> Tensor:
    if not kl_weight > 0:
        raise ValueError(
            f"kl_weight must be positive; got {kl_weight!r}. Use 1.0 for the paper's bound or "
            "n_inducing / n_neighbors."
        )
    total = weight.sum()
    if not total > 0:
        raise ValueError("weight must hold a positive number; drop the weights or these rows.")
    return kl_weight * weight / total
