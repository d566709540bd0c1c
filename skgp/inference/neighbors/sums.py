r"""Natural-gradient steps on rows in blocks: what rows say of q(u) adds up, and none is kept.

The sites of the rows enter the equations of :mod:`skgp.inference.neighbors.system` only by sums,

.. math:: \sum_n \lambda_n a_n a_n^T, \qquad \sum_n \eta_n a_n, \qquad \sum_n \lambda_n a_{nj}^2,

of as many numbers as Q has, and so do the divergences, by Q itself. They are linear in the sites:
a step that moves the sites a part of the way moves the sums as much. So a step is one pass over the
blocks, which looks up neighbours anew and gives the ELBO at the last q together with the sums of
the sites at it. Gaussian noise has the same sites whatever q, and an expected log-likelihood that
is quadratic in f: one pass in all. With a full S and H = M the sums are those of
:math:`\psi_n` in place of :math:`a_n`, and dense.

Memory O(nnz Q) a latent function, or O(M^2), a few times over; nothing grows with n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.natural import (
    SitesFit,
    VariationalPosterior,
    full_column,
    full_sites,
    joined_columns,
    whitened_divergence,
)
from skgp.inference.neighbors.assembly import (
    ROOM,
    LocalPrior,
    PriorAssembly,
    PriorSums,
    TriangleSum,
    multiply,
    shared_entries,
    symmetric_matrix,
)
from skgp.inference.neighbors.conditionals import SharedConditionals, Tiles, prior_variance
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.neighbors.system import local_variance
from skgp.kernels.gram import gram_diag
from skgp.likelihoods import Likelihood
from skgp.linalg.cg import CGResult, block_cg
from skgp.linalg.runtime import Callback, require_memory, tile_rows
from skgp.optim.stopping import Stopped


@dataclass(frozen=True)
class SiteSums:
    """Sites of some rows as q(u) sees them; linear in the sites. In float64, on the host."""

    matrices: tuple[Any, ...]  # c of (M, M): sum lambda a a', sparse halves or dense
    #: (3, M, c); sums of eta a, of lambda a^2 and of -w h a^2, of a full S the first alone.
    columns: Tensor
    #: (2,); the expected log-likelihood less what the sites say of it, and the sum of lambda times
    #: the variances of f given u.
    constants: Tensor

    def __add__(self, other: SiteSums) -> SiteSums:
        pairs = zip(self.matrices, other.matrices, strict=True)
        return SiteSums(
            tuple(a + b for a, b in pairs),
            self.columns + other.columns,
            self.constants + other.constants,
        )

    def scaled(self, factor: float) -> SiteSums:
        """Of sites of a multiple of their precisions and shifts."""
        matrices = tuple(factor * matrix for matrix in self.matrices)
        return SiteSums(matrices, factor * self.columns, factor * self.constants)

    def towards(self, other: SiteSums, rate: float) -> SiteSums:
        """As of `Sites`."""
        return other if rate == 1 else self.scaled(1 - rate) + other.scaled(rate)


@dataclass(frozen=True)
class PassSums:
    """What a pass over some rows adds up."""

    sites: SiteSums  # that a full step from q goes to
    fit: float  # weighted expected log-likelihood at q, in nats
    prior: PriorSums | None = None

    def __add__(self, other: PassSums) -> PassSums:
        prior = None
        if self.prior is not None and other.prior is not None:
            prior = self.prior + other.prior
        return PassSums(self.sites + other.sites, self.fit + other.fit, prior)


@dataclass(frozen=True)
class Rows:
    """The model that rows are seen through, and how much each weighs in the divergence."""

    kernel: Any
    likelihood: Likelihood
    offset: Tensor  # (c,); prior means
    Z: Tensor  # (M, d)
    kl_weight: float  # kappa
    total: float  # of the weights of all rows
    n_neighbors: int
    neighbors: str = "auto"

    def sums(self, data: Data, mean: Tensor, var: Tensor, signed: bool) -> tuple[Any, Tensor, Any]:
        """Sites of rows where f is N(offset + mean, var), their fit and the site's constant."""
        likelihood = self.likelihood.at(data.offset)
        found = full_sites(likelihood, data.y, self.offset, mean, var, data.weight, signed=signed)
        rows = likelihood.expected_log_prob(data.y, self.offset + mean, var)
        fit = data.weighted_sum(rows).double()
        said = found.shift * mean - 0.5 * found.precision * (mean.square() + var)
        return found, fit, fit - said.sum().double()


@dataclass(frozen=True)
class LocalRows(Rows):
    """H neighbours of each row and a diagonal S."""

    is_signed: ClassVar[bool] = False

    def __call__(
        self, data: Data, *, q: VariationalPosterior, first: bool, signed: bool = False
    ) -> PassSums:
        """The statistic of a block; divergences, which do not depend on q, in the `first` pass."""
        Z, c = self.Z, len(self.offset)
        H, M = min(self.n_neighbors, len(Z)), len(Z)
        search = NeighborSearch(self.kernel, Z, self.neighbors)
        q = VariationalPosterior(q.mean.to(Z), q.var.to(Z))
        matrices = [TriangleSum(Z, H) for _ in range(c)]
        columns, constants = Z.new_zeros(M, 3 * c), Z.new_zeros(3, dtype=torch.float64)
        assembly = PriorAssembly(Z, self.kernel, H) if first else None
        for start in range(0, len(data), step := tile_rows(64 * H, 8 * defaults.NEIGHBOR_TILE)):
            part = data.take(slice(start, start + step))
            active = search.query(part.X, H).sort(1).values
            for rows, local in Tiles(self.kernel, part.X, Z, active):
                some = part.take(rows)
                a, squares = local.weights, local.weights.square()
                mean = torch.einsum("nh,nhc->nc", a, q.mean[local.active])
                spread = torch.einsum("nh,nhc->nc", squares, q.var[local.active])
                var = local.variance[:, None] + spread
                sites, fit, rest = self.sums(some, mean, var, signed)
                for matrix, scale in zip(matrices, sites.precision.T, strict=True):
                    matrix.add_outer(local.active, a, scale)
                said = (sites.shift, a), (sites.precision, squares), (sites.curvature, squares)
                each = [weights[:, :, None] * site[:, None] for site, weights in said]  # (n, H, c)
                flat = local.active.reshape(-1)
                columns.index_add_(0, flat, torch.cat(each, 2).view(len(flat), 3 * c))
                left = (sites.precision.sum(1) * local.variance).sum().double()
                constants += torch.stack([rest, left, fit])
                if assembly is not None:
                    weight = a.new_ones(len(a)) if some.weight is None else some.weight
                    assembly.add(local, self.kl_weight / self.total * weight)
        halves = tuple(matrix.half() for matrix in matrices)
        columns = columns.view(M, 3, c).transpose(0, 1).cpu().double()
        constants = constants.cpu()
        sums, fit = SiteSums(halves, columns, constants[:2]), constants[2]
        return PassSums(sums, float(fit), None if assembly is None else assembly.sums())

    @cached_property
    def _points(self) -> Tensor:
        return self.Z.double()

    def begin(self) -> VariationalPosterior:
        """q before any pass."""
        var = prior_variance(self.kernel, self._points)
        var = var[:, None].expand(-1, len(self.offset))
        return VariationalPosterior(torch.zeros_like(var), var)

    def prior(self, sums: PassSums) -> LocalPrior:
        """Divergences of all rows."""
        return cast(PriorSums, sums.prior).prior(self.kernel, self._points)

    def solve(
        self, sites: SiteSums, prior: LocalPrior, start: Tensor | None, **options: Any
    ) -> tuple[VariationalPosterior, CGResult]:
        """As `LocalSystem.solve`."""
        matrices = [symmetric_matrix(half, self._points) for half in sites.matrices]
        shift, squares, curvature = sites.columns.to(self.Z.device)
        least = prior.diagonal[:, None]
        inverse = torch.where(squares + least > 0, 1 / (squares + least), 0.0)

        def matmul(V: Tensor) -> Tensor:
            data = [multiply(B, V[:, j : j + 1]) for j, B in enumerate(matrices)]
            return torch.cat(data, 1) + prior.multiply(V)

        found = block_cg(matmul, shift, preconditioner=lambda R: inverse * R, X0=start, **options)
        return VariationalPosterior(found.solution, local_variance(prior, least, curvature)), found

    def divergence(self, q: VariationalPosterior, prior: LocalPrior) -> Tensor:
        """What the ELBO subtracts, in nats."""
        return prior.divergence(q.mean, q.var)

    def spread(self, sites: SiteSums, q: VariationalPosterior) -> float:
        """Sum of lambda a' S a."""
        return float((sites.columns[1] * q.var.cpu()).sum())

    def quadratic(self, sites: SiteSums, q: VariationalPosterior) -> float:
        """Sum of lambda (a' m)^2."""
        m = q.mean.cpu()
        B = (symmetric_matrix(half, m) for half in sites.matrices)
        return float(sum((m[:, j] * (each @ m[:, j])).sum() for j, each in enumerate(B)))

    def require_room(self, X: Tensor) -> None:
        """Refuse sums that do not fit in memory, by the pairs of neighbours of some rows X."""
        active = NeighborSearch(self.kernel, self.Z, self.neighbors).query(
            X, min(self.n_neighbors, len(self.Z))
        )
        entries = shared_entries(active, len(self.Z)) * (1 + len(self.offset))
        what = f"The sums over blocks of rows of M={len(self.Z)} inducing points"
        require_memory(defaults.SPARSE_ENTRY * entries * (1 + 0.5 * defaults.HELD_SUMS), what, ROOM)


@dataclass(frozen=True)
class FullRows(Rows):
    """H = M and a full S; its q is one of the whitened variables v, as of `FullSystem`."""

    is_signed: ClassVar[bool] = True

    @cached_property
    def given(self) -> SharedConditionals:
        """Features of rows."""
        noise = defaults.SHARED_JITTER * gram_diag(self.kernel, self.Z)
        return SharedConditionals(self.kernel, self.Z, noise)

    def __call__(
        self, data: Data, *, q: VariationalPosterior, first: bool, signed: bool = False
    ) -> PassSums:
        """The statistic of a block."""
        root, M = cast(Tensor, q.root), len(self.Z)
        total: PassSums | None = None
        for start in range(0, len(data), step := tile_rows(32 * M)):
            some = data.take(slice(start, start + step))
            psi, variance = self.given.features(some.X)
            mean = psi @ q.mean
            var = variance[:, None] + torch.stack([(psi @ R).square().sum(1) for R in root], 1)
            sites, fit, rest = self.sums(some, mean, var, signed)
            matrices = tuple(((psi.T * scale) @ psi).cpu() for scale in sites.precision.T)
            left = (sites.precision.sum(1) * variance).sum()
            shift = (psi.T @ sites.shift)[None]
            sums = SiteSums(matrices, shift.cpu(), torch.stack([rest, left]).cpu())
            found = PassSums(sums, float(fit))
            total = found if total is None else total + found
        return cast(PassSums, total)

    def begin(self) -> VariationalPosterior:
        """q before any pass: the prior."""
        M, c = len(self.Z), len(self.offset)
        root = torch.eye(M).to(self.Z).expand(c, -1, -1)
        return VariationalPosterior(self.Z.new_zeros(M, c), self.Z.new_ones(M, c), root)

    def prior(self, sums: PassSums) -> None:
        """None: the divergence needs no sums."""

    def solve(self, sites: SiteSums, prior: None, start: Any, **options: Any):
        """As `FullSystem.solve`."""
        shift = sites.columns[0].to(self.Z).T
        pairs = zip(sites.matrices, shift, strict=True)
        return joined_columns([full_column(B.to(self.Z), b, self.kl_weight) for B, b in pairs])

    def divergence(self, q: VariationalPosterior, prior: None) -> Tensor:
        """What the ELBO subtracts, in nats."""
        return whitened_divergence(q, self.kl_weight)

    def spread(self, sites: SiteSums, q: VariationalPosterior) -> float:
        """Sum of lambda psi' S psi."""
        roots = cast(Tensor, q.root).cpu()
        pairs = zip(sites.matrices, roots, strict=True)
        return float(sum(((B @ root) * root).sum() for B, root in pairs))

    def quadratic(self, sites: SiteSums, q: VariationalPosterior) -> float:
        """Sum of lambda (psi' m)^2."""
        pairs = zip(sites.matrices, q.mean.cpu().T, strict=True)
        return float(sum(m @ B @ m for B, m in pairs))

    def require_room(self, X: Tensor) -> None:
        """Refuse sums that do not fit in memory."""
        M, c = len(self.Z), len(self.offset)
        what = f"The sums over blocks of rows of a full covariance of M={M} inducing points"
        require_memory(8.0 * M**2 * (1 + c * defaults.HELD_SUMS), what, ROOM)


class BlocksProblem:
    """What `skgp.inference.natural.natural_steps` ask of rows in blocks.

    Where the callback returns True within a pass, the steps end with the state before that pass,
    once a first step has been taken.
    """

    haste = 1.0  # a pass takes longer than the digits of a mean

    def __init__(
        self,
        blocks: Any,  # of which `Data` are read, on the device and in the dtype of Z
        rows: LocalRows | FullRows,
        *,
        cg_tol: float,  # as of `natural.fit_natural_sites`; likewise the next
        cg_max_iter: int,
        callback: Callback | None = None,  # hears of the rows read
    ) -> None:
        self.blocks, self.rows, self.callback = blocks, rows, callback
        self.options = {"tol": cg_tol, "max_iter": cg_max_iter, "warn": False}
        self.likelihood, self.is_signed = rows.likelihood, rows.is_signed
        self._prior: Any = None
        self._last: tuple[VariationalPosterior, bool, SiteSums] | None = None
        self._n_passes = 0  # that came to their end

    def start(self, q: VariationalPosterior | None) -> SitesFit:
        """At q, with the sites there; or without data, with none."""
        at = self.rows.begin() if q is None else q
        sums = self._pass(at)
        sites = sums.sites if q is not None else sums.sites.scaled(0.0)
        bound = sums.fit - float(self.rows.divergence(at, self._prior))
        return SitesFit(at, sites, bound, at.mean)

    def solved(
        self, sites: SiteSums, start: Tensor | None, haste: float = 1.0
    ) -> tuple[SitesFit, dict]:
        """q of sites, and the ELBO by a pass at it."""
        q, found = self.rows.solve(sites, self._prior, start, **self.options)
        fit = self._gaussian_fit(sites, q) if self.likelihood.is_gaussian else self._pass(q).fit
        bound = fit - float(self.rows.divergence(q, self._prior))
        entry = {"n_cg": found.n_iter, "cg_residual": float(found.residual.max())}
        return SitesFit(q, sites, bound if math.isfinite(bound) else -math.inf, q.mean), entry

    def sites(self, q: VariationalPosterior, *, signed: bool = False) -> SiteSums:
        """The sites that a full step from q goes to."""
        if self._last is None or self._last[0] is not q or self._last[1] != signed:
            self._pass(q, signed=signed)
        return cast(tuple, self._last)[2]

    def _pass(self, q: VariationalPosterior, *, signed: bool = False) -> PassSums:
        first = self._prior is None
        statistic = partial(self.rows, q=q, first=first, signed=signed)
        sums = self.blocks.sum(statistic, self._hear)
        if first:
            self._prior = self.rows.prior(sums)
        self._last = q, signed, sums.sites
        self._n_passes += 1
        return sums

    def _hear(self, iteration: int, info: dict) -> None:
        """Of the rows read: Stopped where the callback says so, after those of the first step."""
        stops = self.callback is not None and self.callback(iteration, info)
        if stops and self._n_passes >= defaults.FIRST_PASSES:
            raise Stopped

    def _gaussian_fit(self, sites: SiteSums, q: VariationalPosterior) -> float:
        """The expected log-likelihood at any q, which Gaussian sites know."""
        said, rest = sites.constants.tolist()
        linear = float((sites.columns[0] * q.mean.cpu()).sum())
        squares = self.rows.quadratic(sites, q) + self.rows.spread(sites, q) + rest
        return said + linear - 0.5 * squares
