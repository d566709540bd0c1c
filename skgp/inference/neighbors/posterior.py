r"""Predictions of a sparse-within-sparse GP, a row at a time or jointly.

A row x with the active set I, :math:`a = K_I^{-1} k`
(:mod:`skgp.inference.neighbors.conditionals`), has

.. math:: f \sim N(b + a^T m_I,\; k_{xx} - k^T a + a^T S_I a) \qquad \text{(eq. 13)}

with b the constant prior mean. Eq. 13 says nothing of two rows together. Their covariance here is
that of the errors :math:`f - \tilde A u` under the prior (:mod:`skgp.inference.neighbors.joint`)
plus that of :math:`\tilde A u` under q, :math:`\tilde A S_U \tilde A^T`: positive semi-definite,
of the diagonal of eq. 13, and the same for two rows whatever rows come with them.

The paper predicts jointly from the union instead ("SWSGP-U"): every row is conditioned on all of U,
which changes means and variances with the rows that come along, at a cost cubic in U.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.neighbors.conditionals import JITTER, SHARED_JITTER
from skgp.inference.neighbors.joint import joint_errors, quadratic_form, sparse_rows
from skgp.inference.neighbors.neighborhood import Neighborhood, fading_weights
from skgp.inference.neighbors.shared_conditionals import SharedConditionals
from skgp.inference.neighbors.state import SWSGPState
from skgp.kernels.gram import gram, gram_diag

__all__ = ["SWSGPPosterior"]

_TILE_ENTRIES = 2**21  # of the H x H matrices of a tile of rows


@dataclass(frozen=True)
class SWSGPPosterior:
    """q(u), and the neighbours that f is conditioned on.

    Attributes
    ----------
    state : SWSGPState
        On the CPU or wherever predictions are to run.
    n_neighbors : int
        H.
    neighbors : str
        How they are searched (:class:`~skgp.inference.neighbors.search.NeighborSearch`).
    """

    state: SWSGPState
    n_neighbors: int
    neighbors: str = "auto"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("state", "n_neighbors", "neighbors")}

    @cached_property
    def neighborhood(self) -> Neighborhood:
        """Which points a row uses; built when first asked for, not pickled."""
        return Neighborhood(self.state.kernel, self.state.Z, self.n_neighbors, self.neighbors)

    @cached_property
    def shared(self) -> SharedConditionals:
        """Where all points are active; built when first asked for, not pickled."""
        kernel, Z = self.state.kernel, self.state.Z
        jitter = JITTER if self.state.is_diagonal or Z.dtype != torch.float64 else SHARED_JITTER
        return SharedConditionals(kernel, Z, jitter * gram_diag(kernel, Z))

    def mean(self, X: Tensor) -> Tensor:
        """E[f], shape (n, c), of rows X (n, d); ``O(n (H^3 + H^2 d))`` and the search."""
        return torch.cat([self._mean(self._weights(rows)) for rows in self._tiles(X)])

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """E[f] and V[f] (eq. 13), shapes (n, c), of rows X (n, d)."""
        tiles = [self._tile(rows) for rows in self._tiles(X)]
        mean, var = zip(*tiles, strict=True)
        return torch.cat(mean), torch.cat(var)

    def mean_and_covariance(self, X: Tensor, *, union: bool = False) -> tuple[Tensor, Tensor]:
        """Joint prediction.

        Parameters
        ----------
        X : Tensor of shape (n, d)
        union : bool
            Condition every row on the union of the active sets, as in the paper; by default J.

        Returns
        -------
        mean : Tensor of shape (n, c)
        covariance : Tensor of shape (c, n, n)
        """
        if union or self._uses_all:
            return self._union(X)
        parts = [self._weights(rows) for rows in self._tiles(X)]
        active, weights, _ = map(torch.cat, zip(*parts, strict=True))
        mean = self.state.offset + _mean(active, weights, self.state.mean)
        return mean, self._joint(X, active, weights)

    # ---- one row at a time -----------------------------------------------------------------

    @property
    def _uses_all(self) -> bool:
        return self.n_neighbors >= self.state.n_inducing

    def _tiles(self, X: Tensor) -> tuple[Tensor, ...]:
        if self._uses_all:
            return X.split(max(1, _TILE_ENTRIES // self.state.n_inducing))
        H = self.neighborhood.size
        return X.split(max(1, _TILE_ENTRIES // (H * (H + X.shape[1]))))

    def _weights(self, X: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Active points (n, H), None for all; their weights; the variance of f given u (n,)."""
        if self._uses_all:
            return None, *self.shared(X)
        kernel, Z = self.state.kernel, self.state.Z
        active, influence = self.neighborhood.find(X)
        points = Z[active]  # (n, H, d)
        K = gram(kernel, points)
        K.diagonal(dim1=-2, dim2=-1).mul_(1 + JITTER)
        cross = gram(kernel, points, X[:, None])[..., 0]
        return active, *fading_weights(K, cross, gram_diag(kernel, X), influence)

    def _mean(self, local: tuple[Tensor | None, Tensor, Tensor]) -> Tensor:
        """b + a' m_I, shape (n, c)."""
        active, weights, _ = local
        return self.state.offset + _mean(active, weights, self.state.mean)

    def _tile(self, X: Tensor) -> tuple[Tensor, Tensor]:
        local = self._weights(X)
        active, weights, variance = local
        return self._mean(local), variance[:, None] + self._spread(active, weights)

    def _spread(self, active: Tensor | None, weights: Tensor) -> Tensor:
        """a' S_I a, shape (n, c)."""
        if self.state.var is not None:
            return _mean(active, weights.square(), self.state.var)
        if active is None:
            rows = [(weights @ root).square().sum(1) for root in self.state.roots]
        else:
            rows = [
                torch.einsum("nh,nhm->nm", weights, root[active]).square().sum(1)
                for root in self.state.roots
            ]
        return torch.stack(rows, dim=1)

    # ---- jointly ---------------------------------------------------------------------------

    def _joint(self, X: Tensor, active: Tensor, weights: Tensor) -> Tensor:
        """J (c, n, n)."""
        union, position = active.unique(return_inverse=True)
        A = sparse_rows(position, weights, len(union))
        points = self.state.Z[union]
        jitter = JITTER * gram_diag(self.state.kernel, points)
        errors = joint_errors(self.state.kernel, X, points, A, jitter)
        if self.state.var is not None:
            spreads = [quadratic_form(A, v) for v in self.state.var[union].T]
        else:
            spreads = [_square(torch.sparse.mm(A, root[union])) for root in self.state.roots]
        return torch.stack([errors + spread for spread in spreads])

    def _union(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Joint prediction of the paper."""
        if self._uses_all:
            union, given = torch.arange(self.state.n_inducing, device=X.device), self.shared
        else:
            union = self.neighborhood.search.query(X, self.n_neighbors).unique()
            points = self.state.Z[union]
            noise = JITTER * gram_diag(self.state.kernel, points)
            given = SharedConditionals(self.state.kernel, points, noise)
        A, _ = given(X)  # (n, |U|)
        prior = gram(self.state.kernel, X) - A @ gram(self.state.kernel, X, given.Z).mT
        if self.state.var is not None:
            spreads = [(A * v) @ A.T for v in self.state.var[union].T]
        else:
            spreads = [_square(A @ root[union]) for root in self.state.roots]
        covariance = torch.stack([prior + S for S in spreads])
        return self.state.offset + A @ self.state.mean[union], 0.5 * (covariance + covariance.mT)


def _mean(active: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """Sums over active points, None for all, of weights (n, H) times values (M, c): (n, c)."""
    if active is None:
        return weights @ values
    return torch.einsum("nh,nhc->nc", weights, values[active])


def _square(root: Tensor) -> Tensor:
    """R R' of R (n, m)."""
    return root @ root.T
