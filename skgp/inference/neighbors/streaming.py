r"""Rows that come in batches, for fixed hyper-parameters: what was learned becomes the prior.

Rows that are gone leave, beside their posterior mean :math:`m_0`, one precision D_j for each
inducing point and latent function, the diagonal of their data term
:math:`\sum_n \lambda_n a_n a_n^T`. The next batch B sees q through

.. math:: \Big[ D + Q_Z + \sum_{n \in B} \lambda_n a_n a_n^T \Big] (m - m_0)
          = \sum_{n \in B} (\eta_n - \lambda_n a_n^T m_0)\, a_n,

and S likewise: the system of :mod:`skgp.inference.neighbors.system` for the deviation from
:math:`m_0`, with sites of precision D at the inducing points. A batch that says nothing new
changes nothing.

Two things are approximate. The divergence of the rows that are gone is that of as many rows at the
inducing points (Q_Z), which is near where these are themselves rows or spread like them. And D
leaves out that a row informs several inducing points at once: old rows bind smooth changes less
than they should, so that a late row counts for somewhat more than an early one.

A full covariance whose inducing points are active for every row loses nothing: the posterior is the
prior of the next batch as it stands (`update_full`), and new inducing points join by their
conditional. With Gaussian noise and an inducing point a row that is the exact GP of all rows.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import NOVEL, SEPARABLE, SHARED_JITTER
from skgp.inference.natural import FullSystem, Sites, fit_sites
from skgp.inference.neighbors.assembly import local_prior
from skgp.inference.neighbors.conditionals import SharedConditionals, Tiles, prior_variance
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.inference.neighbors.search import NeighborSearch, distinct
from skgp.inference.neighbors.system import LocalSystem, row_weights
from skgp.kernels.gram import gram, gram_diag
from skgp.likelihoods.base import Likelihood
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.runtime import TensorState


@dataclass(frozen=True)
class Summary(TensorState):
    """What is kept of rows that are gone, beside the posterior."""

    precision: Tensor  # (M, c); D
    rows_seen: int


def summarize(system: LocalSystem, sites: Sites, rows_seen: int = 0) -> Summary:
    """Put the rows of a system away, with their sites at the end of the fit; anchors included."""
    precision = system.rows.collect_squares(sites.precision)
    if system.anchor is not None:
        precision = precision + system.anchor
    return Summary(precision, rows_seen + len(system.rows))


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
    up to `max_inducing` in all. `steps` go to :func:`~skgp.inference.natural.fit_sites`.
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
    fit = fit_sites(system, data.y, likelihood, offset=offset, **steps)
    after = state.with_posterior(state.mean + fit.q.mean, var=fit.q.var)
    return after, summarize(system, fit.sites, summary.rows_seen)


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
        fit = fit_sites(system, data.y[:, l : l + 1], likelihood, offset=offset, **steps)
        q = system.unwhitened(fit.q)
        means.append(m0 + q.mean[:, 0])
        roots.append(cast(Tensor, q.root)[0])
    return state.with_posterior(torch.stack(means, dim=1), root=torch.stack(roots))


def localized(state: SWSGPState) -> tuple[SWSGPState, Summary]:
    """The nearest independent inducing variables, and the data's part of their precision."""
    # Of u and as much noise as leaves digits to the difference of the inverses.
    noise = SEPARABLE * gram_diag(state.kernel, state.Z)
    factor = SharedConditionals(state.kernel, state.Z, noise).factor
    prior = torch.cholesky_inverse(factor).diagonal()
    precision = []
    for root in state.roots:
        S = root @ root.mT
        S.diagonal().add_(noise)
        precision.append(torch.cholesky_inverse(jittered_cholesky(S).factor).diagonal())
    precisions = torch.stack(precision, dim=1)  # (M, c), of u
    data = (precisions - prior[:, None]).clamp_min(0.0)
    return state.with_posterior(state.mean, var=1 / precisions), Summary(data, state.n_inducing)


def _all_points(state: SWSGPState) -> SharedConditionals:
    noise = SHARED_JITTER * gram_diag(state.kernel, state.Z)
    return SharedConditionals(state.kernel, state.Z, noise)


def _novel(kernel, X: Tensor, variance: Tensor, room: int) -> Tensor:
    """Distinct rows that the inducing points explain least, as many as there is room for."""
    unexplained = variance / prior_variance(kernel, X)
    chosen = distinct(X)[0]
    chosen = chosen[unexplained[chosen] > NOVEL]
    return chosen[unexplained[chosen].argsort(descending=True, stable=True)[: max(room, 0)]]


def _joined(state: SWSGPState, points: Tensor, weights: Tensor) -> SWSGPState:
    """A full posterior with p points more, of weights (p, M), at their conditional."""
    K = gram(state.kernel, points) - weights @ gram(state.kernel, state.Z, points)
    K = 0.5 * (K + K.T)
    K.diagonal().add_(SHARED_JITTER * gram_diag(state.kernel, points))
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
