r"""The equations of the best q(u) given a Gaussian factor in f for every row, and their solution.

The bound is quadratic in m where the likelihood of each row is replaced by a site
(:mod:`skgp.inference.natural`). With the share :math:`s_n = \kappa w_n / \sum w` of a row in the
divergence (kappa, the KL weight; w, the weights of the rows), it is stationary where, for every
latent function,

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

*Full S*: where every inducing point is active for every row, H = M, the bound is that of SVGP with
its divergence multiplied by kappa (:class:`~skgp.inference.natural.FullSystem`). For fewer active
points no such closed form is known: the condition
:math:`\sum_n s_n P_n^T S_{I_n}^{-1} P_n = \sum_n \lambda_n a_n a_n^T + Q` mixes inverses of
overlapping blocks of S, and q is left to gradients.

*Rows in batches*, for fixed hyper-parameters: what was learned becomes the prior (`update`). Rows
that are gone leave, beside their posterior mean :math:`m_0`, one precision D_j for each inducing
point and latent function, the diagonal of their data term. The next batch B sees q through

.. math:: \Big[ D + Q_Z + \sum_{n \in B} \lambda_n a_n a_n^T \Big] (m - m_0)
          = \sum_{n \in B} (\eta_n - \lambda_n a_n^T m_0)\, a_n,

and S likewise. Two things are approximate. The divergence of the rows that are gone is that of as
many rows at the inducing points (Q_Z), which is near where these are themselves rows or spread like
them. And D leaves out that a row informs several inducing points at once: old rows bind smooth
changes less than they should, so that a late row counts for somewhat more than an early one.

A full covariance whose inducing points are active for every row loses nothing (`update_full`): the
posterior is the prior of the next batch as it stands, new inducing points join by their
conditional. With Gaussian noise and an inducing point a row that is the exact GP of all rows.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.natural import FullSystem, Sites, VariationalPosterior, fit_natural_sites
from skgp.inference.neighbors.assembly import (
    ROOM,
    LocalPrior,
    assembly_of,
    compressed_rows,
    index_type,
    local_prior,
    multiply,
    shared_entries,
)
from skgp.inference.neighbors.conditionals import SharedConditionals, Tiles, prior_variance
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.inference.neighbors.search import NeighborSearch, distinct
from skgp.kernels.gram import gram, gram_diag
from skgp.likelihoods.base import Likelihood
from skgp.linalg.cg import CGResult, block_cg
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.runtime import TensorState, require_memory


class RowWeights:
    """The sparse matrix A (n, M) of the weights a_n, and the variances (n,) of f given u.

    Compressed rows of A and of its transpose: products cost 2 n H c flops, hardly more for ten
    columns than for one, where gathering and scattering costs ten times as much.
    """

    def __init__(self, active: Tensor, weights: Tensor, variance: Tensor, n_inducing: int) -> None:
        n, H = active.shape
        self.shape = (n, n_inducing)
        self.variance = variance
        flat = active.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=n_inducing).cumsum(0)
        short = index_type(n * H)
        starts = torch.arange(0, n * H + 1, H, device=flat.device)
        self._rows = starts.to(short), flat.to(short)
        starts = torch.cat([counts.new_zeros(1), counts])
        self._columns = starts.to(short), (order // H).to(short)
        self._values, self._transposed = weights.reshape(-1), weights.reshape(-1)[order]

    def __len__(self) -> int:
        return self.shape[0]

    def last(self, n: int) -> "RowWeights":
        """Those of the last n rows."""
        active, weights = (x.view(len(self), -1)[-n:] for x in (self._rows[1], self._values))
        return RowWeights(active.long(), weights, self.variance[-n:], self.shape[1])

    def project(self, V: Tensor) -> Tensor:
        """A V, shape (n, c), for V (M, c)."""
        return multiply(compressed_rows(*self._rows, self._values, self.shape), V)

    def project_squares(self, V: Tensor) -> Tensor:
        """(A o A) V, shape (n, c), for V (M, c)."""
        return multiply(compressed_rows(*self._rows, self._values.square(), self.shape), V)

    def collect(self, R: Tensor) -> Tensor:
        """A' R, shape (M, c), for R (n, c)."""
        return multiply(compressed_rows(*self._columns, self._transposed, self.shape[::-1]), R)

    def collect_squares(self, R: Tensor) -> Tensor:
        """(A o A)' R, shape (M, c), for R (n, c)."""
        squares = self._transposed.square()
        return multiply(compressed_rows(*self._columns, squares, self.shape[::-1]), R)


def row_weights(tiles: Tiles) -> RowWeights:
    """The matrix A alone."""
    parts = [(local.weights, local.variance) for _, local in tiles]
    weights, variance = map(torch.cat, zip(*parts, strict=True))
    return RowWeights(tiles.active, weights, variance, len(tiles.Z))


@dataclass(frozen=True)
class LocalSystem:
    """What the bound knows of n rows and M inducing points, for a diagonal S."""

    is_signed: ClassVar[bool] = False
    rows: RowWeights  # A
    prior: LocalPrior
    weight: Tensor | None = None  # (n,) or None
    anchor: Tensor | None = None  # (M, c) or None; precisions of further sites at u itself, at 0

    def __len__(self) -> int:
        return len(self.rows)

    def solve(
        self, sites: Sites, *, start: Tensor | None = None, **options
    ) -> tuple[VariationalPosterior, CGResult]:
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
        return VariationalPosterior(found.solution, self.variance(sites)), found

    def variance(self, sites: Sites) -> Tensor:
        """Diagonal of S, (M, c).

        Where curvatures are negative, a variance stays within ten times that without any data.
        """
        curvature = self.rows.collect_squares(sites.curvature)
        return local_variance(self.prior, self._prior_diagonal(), curvature)

    def moments(self, q: VariationalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without prior means."""
        explained = self.rows.project_squares(q.var)
        return self.rows.project(q.mean), self.rows.variance[:, None] + explained

    def divergence(self, q: VariationalPosterior) -> Tensor:
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


def local_variance(prior: LocalPrior, least: Tensor, curvature: Tensor) -> Tensor:
    """Diagonal of S, (M, c), of sums of curvatures (M, c) and precisions `least` without data."""
    precision = torch.maximum(curvature + least, 0.1 * least)
    known = (prior.mass > 0)[:, None]
    return torch.where(known, prior.mass[:, None] / precision, prior.variance[:, None])


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
    active = torch.cat([tiles.active for tiles in parts])
    n, H = active.shape
    entries = 2 * n * H + 2 * shared_entries(active, len(parts[0].Z))
    what = f"A system of {n} rows with H={H} neighbours each among M={len(parts[0].Z)} inducing"
    require_memory(defaults.SPARSE_ENTRY * entries, what + " points", ROOM)
    each = parts[0].X.new_ones(sum(len(p.X) for p in parts)) if weight is None else weight
    share = kl_weight * each / each.sum()
    assembly, weights, variance, systems = assembly_of(parts[0]), [], [], []
    start = 0
    for tiles in parts:
        for rows, local in tiles:
            assembly.add(local, share[start + rows.start : start + rows.stop])
            weights.append(local.weights)
            variance.append(local.variance)
        start += len(tiles.X)
        joined = active[:start], torch.cat(weights), torch.cat(variance)
        A = RowWeights(*joined, len(tiles.Z))
        given = None if weight is None else weight[:start]
        systems.append(LocalSystem(A, assembly.prior(), given))
    return systems


def full_system(
    kernel, X: Tensor, Z: Tensor, *, kl_weight: float = 1.0, weight: Tensor | None = None
) -> FullSystem:
    """The system of rows X (n, d), float64, given all of Z (M, d); memory O(n M + c M^2)."""
    n, M = len(X), len(Z)
    what = f"A system of {n} rows and a full covariance of M={M} inducing points"
    require_memory(8.0 * defaults.DENSE_SYSTEM * (n * M + M**2), what, "Use a smaller n_inducing")
    given = SharedConditionals(kernel, Z, defaults.SHARED_JITTER * gram_diag(kernel, Z))
    return FullSystem(*given.features(X), kl_weight, weight, given.factor)


@dataclass(frozen=True)
class Summary(TensorState):
    """What is kept of rows that are gone, beside the posterior."""

    precision: Tensor  # (M, c); D


def summarize(system: LocalSystem, sites: Sites) -> Summary:
    """Put the rows of a system away, with their sites at the end of the fit; anchors included."""
    precision = system.rows.collect_squares(sites.precision)
    if system.anchor is not None:
        precision = precision + system.anchor
    return Summary(precision)


def update(
    state: SWSGPState,
    summary: Summary,
    data: Data,
    likelihood: Likelihood,
    *,
    n_neighbors: int,
    kl_weight: float | None = None,
    kl_factor: float = 1.0,
    max_inducing: int = 0,
    neighbors: str = "auto",
    **steps,
) -> tuple[SWSGPState, Summary]:
    """The posterior of a diagonal covariance after a batch of data.

    kappa is kl_factor M / H by default. Rows that the inducing points explain least of join them,
    up to `max_inducing` in all. `steps` go to :func:`~skgp.inference.natural.fit_natural_sites`.
    """
    X, likelihood = data.X, likelihood.at(data.offset)
    state = _with_new_inducing(state, X, n_neighbors, max_inducing, neighbors)
    anchor = summary.precision.new_zeros(state.mean.shape)
    anchor[: len(summary.precision)] = summary.precision

    search = NeighborSearch(state.kernel, state.Z, neighbors)
    H = min(n_neighbors, state.n_inducing)
    active = search.query(X, H)
    rows = row_weights(Tiles(state.kernel, X, state.Z, active))
    peers = Tiles(state.kernel, state.Z, state.Z, search.query(state.Z, H))
    kappa = kl_factor * state.n_inducing / H if kl_weight is None else kl_weight
    prior = local_prior(peers, state.Z.new_full((state.n_inducing,), kappa / state.n_inducing))

    system = LocalSystem(rows, prior, data.weight, anchor)
    offset = state.offset + rows.project(state.mean)
    fit = fit_natural_sites(system, data.y, likelihood, offset=offset, **steps)
    after = state.with_posterior(state.mean + fit.q.mean, var=fit.q.var)
    return after, summarize(system, fit.sites)


def update_full(
    state: SWSGPState,
    data: Data,
    likelihood: Likelihood,
    *,
    kl_weight: float = 1.0,
    max_inducing: int = 0,
    **steps,
) -> SWSGPState:
    """The posterior of a full covariance after a batch, float64, all points active.

    O((n + M) M^2 c). Arguments as of `update`; kl_weight is that of the divergence from the
    posterior before.
    """
    X, likelihood = data.X, likelihood.at(data.offset)
    given = _all_points(state)
    features, variance = given(X)  # weights a
    chosen = _novel(state.kernel, X, variance, max_inducing - state.n_inducing)
    if len(chosen):
        state = _joined(state, X[chosen], features[chosen])
        features, variance = _all_points(state)(X)
    means, roots = [], []
    for l, root in enumerate(state.roots):
        m0 = state.mean[:, l]
        system = FullSystem(features @ root, variance, kl_weight, data.weight, root)
        offset = state.offset[l] + (features @ m0)[:, None]
        fit = fit_natural_sites(system, data.y[:, l : l + 1], likelihood, offset=offset, **steps)
        q = system.unwhitened(fit.q)
        means.append(m0 + q.mean[:, 0])
        roots.append(cast(Tensor, q.root)[0])
    return state.with_posterior(torch.stack(means, dim=1), root=torch.stack(roots))


def localized(state: SWSGPState) -> tuple[SWSGPState, Summary]:
    """The nearest independent inducing variables, and the data's part of their precision."""
    # Of u and as much noise as leaves digits to the difference of the inverses.
    noise = defaults.SEPARABLE * gram_diag(state.kernel, state.Z)
    factor = SharedConditionals(state.kernel, state.Z, noise).factor
    prior = torch.cholesky_inverse(factor).diagonal()
    precision = []
    for root in state.roots:
        S = root @ root.mT
        S.diagonal().add_(noise)
        precision.append(torch.cholesky_inverse(jittered_cholesky(S).factor).diagonal())
    precisions = torch.stack(precision, dim=1)  # (M, c), of u
    data = (precisions - prior[:, None]).clamp_min(0.0)
    return state.with_posterior(state.mean, var=1 / precisions), Summary(data)


def _all_points(state: SWSGPState) -> SharedConditionals:
    noise = defaults.SHARED_JITTER * gram_diag(state.kernel, state.Z)
    return SharedConditionals(state.kernel, state.Z, noise)


def _novel(kernel, X: Tensor, variance: Tensor, room: int) -> Tensor:
    """Distinct rows that the inducing points explain least, as many as there is room for."""
    unexplained = variance / prior_variance(kernel, X)
    chosen = distinct(X)[0]
    chosen = chosen[unexplained[chosen] > defaults.NOVEL]
    return chosen[unexplained[chosen].argsort(descending=True, stable=True)[: max(room, 0)]]


def _joined(state: SWSGPState, points: Tensor, weights: Tensor) -> SWSGPState:
    """A full posterior with p points more, of weights (p, M), at their conditional."""
    K = gram(state.kernel, points) - weights @ gram(state.kernel, state.Z, points)
    K = 0.5 * (K + K.T)
    K.diagonal().add_(defaults.SHARED_JITTER * gram_diag(state.kernel, points))
    corner = jittered_cholesky(K).factor  # (p, p)
    roots = []
    for root in state.roots:
        upper = torch.cat([root, root.new_zeros(len(root), len(points))], dim=1)
        roots.append(torch.cat([upper, torch.cat([weights @ root, corner], dim=1)]))
    mean = torch.cat([state.mean, weights @ state.mean])
    state = replace(state, Z=torch.cat([state.Z, points]))
    return state.with_posterior(mean, root=torch.stack(roots))


def _with_new_inducing(
    state: SWSGPState, X: Tensor, n_neighbors: int, max_inducing: int, neighbors: str
) -> SWSGPState:
    """The state with new inducing points at their predicted means."""
    room = max_inducing - state.n_inducing
    if room <= 0:
        return state
    H = min(n_neighbors, state.n_inducing)
    active = NeighborSearch(state.kernel, state.Z, neighbors).query(X, H)
    rows = row_weights(Tiles(state.kernel, X, state.Z, active))
    chosen = _novel(state.kernel, X, rows.variance, room)
    mean = torch.cat([state.mean, rows.project(state.mean)[chosen]])
    var = torch.cat([state.variance(), rows.project_squares(state.variance())[chosen]])
    return replace(state, Z=torch.cat([state.Z, X[chosen]]), mean=mean, var=var)
