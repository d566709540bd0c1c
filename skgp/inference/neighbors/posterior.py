r"""Predictions from the nearest points, a row at a time or jointly, and q(u) of the paper.

What is known of f are values at points Z, of means m beside the prior mean b and, where q(u) has
one, of a covariance S. A row x with the active set I, :math:`a = K_I^{-1} k`, K with the noise of
the values on its diagonal (:mod:`skgp.inference.neighbors.conditionals`), has

.. math:: f \sim N(b + a^T m_I,\; k_{xx} - k^T a + a^T S_I a) \qquad \text{(eq. 13)}.

Eq. 13 says nothing of two rows together. Their covariance here is that of the errors
:math:`f - \tilde A u` under the prior, J, plus that of :math:`\tilde A u` under q,
:math:`\tilde A S_U \tilde A^T`: positive semi-definite, of the diagonal of eq. 13, and the same for
two rows whatever rows come with them.

The paper predicts jointly from the union U of active sets instead ("SWSGP-U", section 4.5): every
row is conditioned on all of U, which changes means and variances with the rows that come along, at
a cost cubic in U.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from skgp.inference.defaults import DIRECT_COLUMNS, LOCAL_JITTER, NEIGHBOR_TILE, SHARED_JITTER
from skgp.inference.neighbors.conditionals import (
    Neighborhood,
    SharedConditionals,
    fading_weights,
    joint_errors,
    quadratic_form,
    sparse_rows,
)
from skgp.inference.neighbors.search import distinct
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.runtime import TensorState, differentiable_in_rows, tile_rows
from skgp.linalg.small_matrices import gather_rows


class LocalPredictor(TensorState):
    """f given values at the points near an input, or at all where H reaches M.

    A subclass has the fields or properties `kernel`, `points` (M, d), `values` (M, c) less their
    prior means, `offset` (c,), `n_neighbors` (H), `neighbors` (how they are searched) and
    `n_scales`, and says by `noises` (M,) what variance the values have beside that of f. What is
    derived is built when first asked for and not pickled. O(H^3 + H^2 d) a row beside the search.
    """

    kernel: Any
    offset: Tensor
    n_neighbors: int
    neighbors: str
    n_scales: int = 1

    points: Any
    values: Any
    noises: Any

    @cached_property
    def neighborhood(self) -> Neighborhood:
        """Which points a row uses."""
        return Neighborhood(
            self.kernel, self.points, self.n_neighbors, self.neighbors, self.n_scales
        )

    @cached_property
    def shared(self) -> SharedConditionals:
        """Where all points are active."""
        return SharedConditionals(self.kernel, self.points, self.noises)

    @differentiable_in_rows
    def mean(self, X: Tensor) -> Tensor:
        """E[f], shape (n, c), of rows X (n, d), in tiles."""
        return torch.cat([self._mean(*self._weights(rows)[:2]) for rows in self._tiles(X)])

    @differentiable_in_rows
    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """E[f] (n, c) and V[f] (n, c), or (n,) where all columns have one, of rows X (n, d)."""
        parts = []
        for rows in self._tiles(X):
            active, weights, variance = self._weights(rows)
            parts.append((self._mean(active, weights), self._total(active, weights, variance)))
        mean, var = map(torch.cat, zip(*parts, strict=True))
        return mean, var

    @torch.no_grad()
    def mean_and_covariance(self, X: Tensor, *, union: bool = False) -> tuple[Tensor, Tensor]:
        """Joint prediction: mean (n, c) and covariance (c, n, n), or (1, n, n) of all columns.

        `union` conditions every row on the union of the active sets, as in the paper.
        """
        if union or self._uses_all:
            if self._uses_all:
                index, given = torch.arange(len(self.points), device=X.device), self.shared
            else:
                index = self.neighborhood.search.query(X, self.n_neighbors).unique()
                given = SharedConditionals(self.kernel, self.points[index], self.noises[index])
            A, _ = given(X)  # (n, |U|)
            errors = gram(self.kernel, X) - A @ gram(self.kernel, X, given.Z).mT
        else:
            parts = [self._weights(rows)[:2] for rows in self._tiles(X)]
            active, weights = map(torch.cat, zip(*parts, strict=True))
            index, position = active.unique(return_inverse=True)
            A = sparse_rows(position, weights, len(index))
            errors = joint_errors(self.kernel, X, self.points[index], A, self.noises[index])
        covariance = errors + self._joint_spread(A, index)
        return self.offset + A @ self.values[index], 0.5 * (covariance + covariance.mT)

    @property
    def _uses_all(self) -> bool:
        return self.n_neighbors >= len(self.points)

    def _tiles(self, X: Tensor) -> tuple[Tensor, ...]:
        return X.split(self._tile_rows(None if self._uses_all else self.neighborhood.size))

    def _tile_rows(self, H: int | None) -> int:
        """Rows of a tile, of H neighbours each or None for all points."""
        M, d = self.points.shape
        return tile_rows(8 * (M if H is None else H * (H + d)), 8 * NEIGHBOR_TILE)

    def _weights(self, X: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Active points (n, H), None for all; their weights; the variance of f given them (n,)."""
        if self._uses_all:
            return None, *self.shared(X)
        active, influence = self.neighborhood.find(X)
        return active, *self._given(X, active, influence, self.noises[active])

    def _given(
        self, X: Tensor, active: Tensor, influence: Tensor, noise: Tensor, method: str = "direct"
    ) -> tuple[Tensor, Tensor]:
        """Weights (n, H) and the variance (n,) of rows X given points `active` (n, H)."""
        points = gather_rows(self.points, active)  # (n, H, d)
        K = gram(self.kernel, points, method=method)
        K.diagonal(dim1=-2, dim2=-1).add_(noise)
        cross = gram(self.kernel, points, X[:, None], method=method)[..., 0]
        return fading_weights(K, cross, gram_diag(self.kernel, X), influence)

    def _mean(self, active: Tensor | None, weights: Tensor) -> Tensor:
        """b + a' m_I, shape (n, c)."""
        return self.offset + _sums(active, weights, self.values)

    def _total(self, active: Tensor | None, weights: Tensor, variance: Tensor) -> Tensor:
        """V[f] where f given the values has a variance (n,): the same of values that are known."""
        return variance

    def _joint_spread(self, A: Tensor, index: Tensor) -> Tensor:
        """A S A' (c, n, n) of dense or sparse weights A (n, m) of the points `index`."""
        return self.offset.new_zeros(1, 1, 1)


@dataclass(frozen=True)
class SWSGPState(TensorState):
    r"""Unwhitened posterior :math:`q(u_l) = N(m_l, S_l)` of c latent functions, l = 1 ... c.

    The functions share kernel and inducing points. u and f are modelled without the prior means:
    ``offset`` is added to f before a likelihood sees it. Either `var` or `root` is None.
    """

    kernel: Any  # covariance of f, without noise; its bounds hold while training
    likelihood: Tensor  # (p,); free parameters (`Likelihood.free_parameters`)
    Z: Tensor  # (M, d)
    mean: Tensor  # (M, c); m
    var: Tensor | None  # (M, c); diagonal of S, positive, where the covariance is diagonal
    root: Tensor | None  # (c, M, M); lower triangular with S = R R', where it is full
    offset: Tensor  # (c,); prior means

    @classmethod
    def prior(cls, kernel, likelihood: Tensor, Z: Tensor, offset: Tensor) -> SWSGPState:
        """A posterior to begin with: mean 0 and variances those of the prior, independent."""
        var = gram_diag(kernel, Z)[:, None].expand(-1, len(offset)).contiguous()
        return cls(kernel, likelihood, Z, torch.zeros_like(var), var, None, offset)

    @property
    def n_inducing(self) -> int:
        """M."""
        return len(self.Z)

    @property
    def n_latent(self) -> int:
        """The number c of latent functions."""
        return self.mean.shape[1]

    @property
    def roots(self) -> Tensor:
        """Root of a full covariance."""
        return cast(Tensor, self.root)

    def variance(self) -> Tensor:
        """Diagonal of S, (M, c), of either kind of covariance."""
        if self.root is not None:
            return self.root.square().sum(-1).T
        return cast(Tensor, self.var)

    def with_posterior(
        self, mean: Tensor, *, var: Tensor | None = None, root: Tensor | None = None
    ) -> SWSGPState:
        """The same hyper-parameters with another posterior."""
        return replace(self, mean=mean, var=var, root=root)


@dataclass(frozen=True)
class SWSGPPosterior(LocalPredictor):
    """Predictions of q(u) from the H inducing points nearest to a row."""

    state: SWSGPState
    n_neighbors: int
    neighbors: str = "auto"

    kernel = property(lambda self: self.state.kernel)
    points = property(lambda self: self.state.Z)
    values = property(lambda self: self.state.mean)
    offset = property(lambda self: self.state.offset)

    @cached_property
    def noises(self) -> Tensor:
        """The jitter, (M,): part of the model (:mod:`skgp.inference.neighbors.conditionals`)."""
        Z, full = self.state.Z, self.state.root is not None
        exact = full and self._uses_all and Z.dtype == torch.float64
        return (SHARED_JITTER if exact else LOCAL_JITTER) * gram_diag(self.state.kernel, Z)

    def _total(self, active, weights, variance):
        if self.state.var is not None:
            return variance[:, None] + _sums(active, weights.square(), self.state.var)
        if active is None:
            roots = [weights @ root for root in self.state.roots]
        else:
            near = (gather_rows(R, active) for R in self.state.roots)
            roots = [torch.einsum("nh,nhm->nm", weights, each) for each in near]
        return variance[:, None] + torch.stack([R.square().sum(1) for R in roots], dim=1)

    def _joint_spread(self, A, index):
        if self.state.var is not None:
            return torch.stack([quadratic_form(A, v) for v in self.state.var[index].T])
        roots = [A @ root[index] for root in self.state.roots]
        return torch.stack([R @ R.T for R in roots])


def _sums(active: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """Sums over active points, None for all, of weights (n, H) times values (M, c): (n, c)."""
    if active is None:
        return weights @ values
    return torch.einsum("nh,nhc->nc", weights, values[active])


@dataclass(frozen=True)
class KrigingModel(LocalPredictor):
    r"""Kriging: the exact GP on each row's neighbourhood, of rows and what they say of others.

    With I the H rows nearest to x, W their weights and T, m the targets and their prior means,

    .. math:: a = (K_I + \sigma^2 W_I^{-1})^{-1} k, \qquad
              \mu = m + a^T (T_I - m), \qquad q = k_{xx} - k^T a \qquad
              \text{(Rasmussen and Williams, eqs. 2.25-2.26)}

    for all columns of T at once: f ~ N(mu, q), to which an observation adds :math:`\sigma^2`.
    """

    kernel: Any  # without noise
    noise: float  # sigma^2, the variance of an observation of weight 1
    X: Tensor  # (M, d), distinct rows
    targets: Tensor  # (M, c)
    weight: Tensor | None  # (M,), positive; None counts every row once
    offset: Tensor  # (c,); m, the prior means of the targets
    n_neighbors: int  # H; all rows where there are fewer
    n_scales: int = 1  # that share the neighbours

    neighbors = "auto"
    points = property(lambda self: self.X)
    values = property(lambda self: self.targets - self.offset)

    @cached_property
    def noises(self) -> Tensor:
        """Noise variances of the rows, (M,)."""
        if self.weight is None:
            return self.X.new_tensor(self.noise).expand(len(self.X))
        return self.noise / self.weight

    def covariance(self, X: Tensor) -> Tensor:
        """Joint covariance (n, n) of rows X (n, d), that of every column."""
        return self.mean_and_covariance(X)[1][0]

    def others(self, row: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Neighbours (p, H) of training rows (p,), of which a part or all is left out; influence.

        Where something of a row stays, `shared` (p,), it is its own neighbour.
        """
        shape = len(row), self.neighborhood.size
        active = torch.empty(shape, dtype=torch.int64, device=row.device)
        influence = torch.empty(shape, dtype=self.X.dtype, device=self.X.device)
        for part, leaves in ((shared, False), (~shared, True)):
            some = row[part]
            if len(some):
                found = self.neighborhood.find(self.X[some], some if leaves else None)
                active[part], influence[part] = found
        return active, influence

    @torch.no_grad()
    def leave_out(
        self, row: Tensor, unit: Tensor, value: Tensor, others: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Mean (p, c), variance (p,) of training rows from all others and what is left of them.

        Of the rows (p,) observations of weight `unit` (p,) and target `value` (p, c) are taken
        away; `others` finds the neighbours.
        """
        weight = self.X.new_ones(len(row)) if self.weight is None else self.weight[row]
        left = (weight - unit)[:, None]  # (p, 1)
        active, influence = others
        rest = (weight[:, None] * self.targets[row] - unit[:, None] * value) / left  # (p, c)
        parts = []
        for i in torch.arange(len(row), device=row.device).split(self._tile_rows(active.shape[1])):
            own = (active[i] == row[i, None]) & (influence[i] > 0)
            noise = torch.where(own, self.noise / left[i], self.noises[active[i]])
            targets = torch.where(own[..., None], rest[i, None], self.targets[active[i]])
            weights, var = self._given(self.X[row[i]], active[i], influence[i], noise)
            known = torch.einsum("nh,nhc->nc", weights, targets - self.offset)
            parts.append((self.offset + known, var))
        mean, var = map(torch.cat, zip(*parts, strict=True))
        return mean, var

    def _given(self, X, active, influence, noise, method="direct"):
        method = "direct" if X.shape[1] <= DIRECT_COLUMNS else "expand"
        return super()._given(X, active, influence, noise, method)


@dataclass(frozen=True)
class LabelLink(TensorState):
    r"""Class probabilities of labels, -1 and +1, that were kriged as if they were numbers.

    Of many classes each is against the rest; g is the normal distribution function for two
    classes, exp for more, :math:`\nu = \mu - m`, and

    .. math:: p_k = (1 - \epsilon)\, \tilde p_k + \epsilon \pi_k, \qquad
              \tilde p_k \propto g\Big(t_k + \frac{\nu_k + d\, \nu_k^3}{\sqrt{a q + b}}\Big).

    If labels were the signs of a latent function with Gaussian noise, a would be 1, b the noise and
    d 0. If so many noisy labels were averaged that :math:`\mu = 2 p - 1`, then
    :math:`\Phi^{-1}(p) = \sqrt{\pi/2}\,(\mu + \tfrac{\pi}{12} \mu^3 + \dots)`. Labels are
    neither, so t, a, b and d >= 0 maximise the likelihood of labels left out one by one
    (:mod:`skgp.learning.local.hyperparameters`). That :math:`\epsilon` of all rows belong to any
    class keeps probabilities off 0 and 1 where neighbours all agree: n rows can tell nothing of
    events that are rarer than 1 / n.
    """

    intercept: Tensor  # (c,); t
    log_scales: Tensor  # (3,); logs of a, b and d
    frequency: Tensor  # (max(c, 2),); pi, of the classes
    lapse: float  # epsilon

    def log_probabilities(self, mean: Tensor, var: Tensor) -> Tensor:
        """Log-probabilities (n, C) from kriged labels less their prior means (n, c), and q (n,)."""
        slope, floor, bend = self.log_scales.exp().unbind()
        signal = mean + bend * mean**3
        z = self.intercept + signal / (slope * var + floor).sqrt()[:, None]
        if z.shape[1] == 1:
            log_p = torch.special.log_ndtr(torch.cat([-z, z], 1))
        else:
            log_p = z.log_softmax(1)
        lapsed = math.log(self.lapse) + self.frequency.log()
        return torch.logaddexp(math.log1p(-self.lapse) + log_p, lapsed)


def is_shared(weight: Tensor, unit: Tensor) -> Tensor:
    """Whether something is left of rows of some weight of which a unit is taken, (p,)."""
    return weight - unit > 1e-9 * weight


def merge_rows(
    X: Tensor, targets: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge equal rows of X (n, d) to their weighted mean target (n, c) and total weight (n,).

    Rows stay in the order in which they come first; no weights if none are equal or given.
    """
    first, group = distinct(X)
    if len(first) == len(X):
        return X, targets, weight
    each = X.new_ones(len(X)) if weight is None else weight
    total = X.new_zeros(len(first)).index_add_(0, group, each)
    sums = targets.new_zeros(len(first), targets.shape[1])
    sums.index_add_(0, group, each[:, None] * targets)
    return X[first], sums / total[:, None], total
