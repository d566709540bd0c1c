r"""Predictions of a sparse-within-sparse GP, a row at a time or jointly.

A row x with the active set I, :math:`a = K_I^{-1} k` (:mod:`skgp.models.swsgp.conditionals`), has

.. math:: f \sim N(b + a^T m_I,\; k_{xx} - k^T a + a^T S_I a) \qquad \text{(eq. 13)}

with b the constant prior mean. Eq. 13 says nothing of two rows together. Their covariance here is
that of the errors :math:`f - \tilde A u` under the prior (:mod:`skgp.models.swsgp.joint`) plus that
of :math:`\tilde A u` under q, :math:`\tilde A S_U \tilde A^T`: positive semi-definite, of the
diagonal of eq. 13, and the same for two rows whatever rows come with them.

The paper predicts jointly from the union instead ("SWSGP-U"): every row is conditioned on all of U,
which changes means and variances with the rows that come along, at a cost cubic in U.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky
from skgp.models.neighbors import NeighborSearch
from skgp.models.swsgp.conditionals import JITTER, LocalConditionals, local_conditionals
from skgp.models.swsgp.joint import joint_errors, quadratic_form, sparse_rows
from skgp.models.swsgp.state import SWSGPState

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
        How they are searched (:class:`~skgp.models.neighbors.NeighborSearch`).
    """

    state: SWSGPState
    n_neighbors: int
    neighbors: str = "auto"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("state", "n_neighbors", "neighbors")}

    @cached_property
    def search(self) -> NeighborSearch:
        """Index of the inducing points; built when first asked for, not pickled."""
        return NeighborSearch(self.state.kernel, self.state.Z, self.neighbors)

    def mean(self, X: Tensor) -> Tensor:
        """E[f], shape (n, c), of rows X (n, d); ``O(n (H^3 + H^2 d))`` and the search."""
        return torch.cat([self._mean(self._conditionals(rows)) for rows in self._tiles(X)])

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
        if union:
            return self._union(X)
        parts = [self._conditionals(rows) for rows in self._tiles(X)]
        active = torch.cat([part.active for part in parts])
        weights = torch.cat([part.weights for part in parts])
        mean = self.state.offset + _mean(active, weights, self.state.mean)
        return mean, self._joint(X, active, weights)

    # ---- one row at a time -----------------------------------------------------------------

    @property
    def _n_active(self) -> int:
        return min(self.n_neighbors, self.state.n_inducing)

    def _tiles(self, X: Tensor) -> tuple[Tensor, ...]:
        H = self._n_active
        return X.split(max(1, _TILE_ENTRIES // (H * (H + X.shape[1]))))

    def _conditionals(self, X: Tensor) -> LocalConditionals:
        active = self.search.query(X, self._n_active)
        return local_conditionals(self.state.kernel, X, self.state.Z, active)

    def _mean(self, local: LocalConditionals) -> Tensor:
        """b + a' m_I, shape (n, c)."""
        return self.state.offset + _mean(local.active, local.weights, self.state.mean)

    def _tile(self, X: Tensor) -> tuple[Tensor, Tensor]:
        local = self._conditionals(X)
        return self._mean(local), local.variance[:, None] + self._spread(local)

    def _spread(self, local: LocalConditionals) -> Tensor:
        """a' S_I a, shape (n, c)."""
        if self.state.var is not None:
            return _mean(local.active, local.weights.square(), self.state.var)
        rows = [
            torch.einsum("nh,nhm->nm", local.weights, root[local.active]).square().sum(1)
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
        active = self.search.query(X, self._n_active)
        union = active.unique()
        points = self.state.Z[union]
        K = gram(self.state.kernel, points)
        K.diagonal().mul_(1 + JITTER)
        cross = gram(self.state.kernel, points, X)
        A = torch.cholesky_solve(cross, jittered_cholesky(K).factor).T  # (n, |U|)
        prior = gram(self.state.kernel, X) - A @ cross
        if self.state.var is not None:
            spreads = [(A * v) @ A.T for v in self.state.var[union].T]
        else:
            spreads = [_square(A @ root[union]) for root in self.state.roots]
        covariance = torch.stack([prior + S for S in spreads])
        return self.state.offset + A @ self.state.mean[union], 0.5 * (covariance + covariance.mT)


def _mean(active: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """Sums over active points of weights (n, H) times values (M, c), shape (n, c)."""
    return torch.einsum("nh,nhc->nc", weights, values[active])


def _square(root: Tensor) -> Tensor:
    """R R' of R (n, m)."""
    return root @ root.T
