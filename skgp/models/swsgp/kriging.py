r"""Kriging from the nearest rows: exact Gaussian process regression on each row's neighbourhood.

With I the H training rows nearest to x (:mod:`skgp.models.neighbors`), W their weights and
the targets T less their prior means m,

.. math:: a = (K_I + \sigma^2 W_I^{-1})^{-1} k, \qquad
          \mu = m + a^T (T_I - m), \qquad q = k_{xx} - k^T a \qquad
          \text{(Rasmussen and Williams, eqs. 2.25-2.26)}

for all columns of T at once. Rows of equal inputs are one row of their mean and total weight.

*Regression*: f ~ N(mu, q), an observation adds :math:`\sigma^2`. *Classification*: labels -1 and
+1 (of many classes, each against the rest) are kriged as if they were numbers, and a link turns the
result into probabilities (:mod:`skgp.models.swsgp.label_link`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.tensor_state import TensorState
from skgp.models.neighbors import NeighborSearch, distinct
from skgp.models.swsgp.joint import joint_errors, sparse_rows
from skgp.models.swsgp.label_link import LabelLink

__all__ = ["KrigingModel", "merge_rows"]

_TILE = 2**22  # numbers in the kernel matrices and the points of a tile
_DIRECT_COLUMNS = 10  # up to which differences are as fast as a matrix product


@dataclass(frozen=True)
class KrigingModel(TensorState):
    r"""Training rows, and what they say about others near them.

    Attributes
    ----------
    kernel : sklearn kernel expression without noise
    noise : float
        :math:`\sigma^2`, the variance of an observation of weight 1.
    X : Tensor of shape (M, d)
        Distinct rows.
    targets : Tensor of shape (M, c)
    weight : Tensor of shape (M,) or None
        Positive; None counts every row once.
    offset : Tensor of shape (c,)
        m, the prior means of the targets.
    n_neighbors : int
        H; all rows where there are fewer.
    link : LabelLink or None
        Of a classifier.
    neighbors : {"auto", "exact", "faiss"}
        See :class:`~skgp.models.neighbors.NeighborSearch`.

    Notes
    -----
    Holds the training rows. ``O(H^3 + H^2 d)`` a row beside the search, which is prepared at the
    first prediction and not pickled.
    """

    kernel: Any
    noise: float
    X: Tensor
    targets: Tensor
    weight: Tensor | None
    offset: Tensor
    n_neighbors: int
    link: LabelLink | None = None
    neighbors: str = "auto"

    @cached_property
    def search(self) -> NeighborSearch:
        """The search among the training rows."""
        return NeighborSearch(self.kernel, self.X, self.neighbors)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("search", None)
        return state

    def mean(self, X: Tensor) -> Tensor:
        """Kriging means, (n, c), in tiles."""
        return self.mean_and_variance(X)[0]

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, c) and variance q (n,) of f, without the noise of an observation; in tiles."""
        active = self.search.query(X, min(self.n_neighbors, len(self.X)))
        return self._krige(X, active, self._row_noise(active), self.targets[active])

    def mean_and_covariance(self, X: Tensor, *, union: bool = False) -> tuple[Tensor, Tensor]:
        """Joint prediction of f, without the noise of an observation.

        Parameters
        ----------
        X : Tensor of shape (n, d)
        union : bool
            Krige every row from the union of the neighbours; by default from its own
            (:mod:`skgp.models.swsgp.joint`).

        Returns
        -------
        mean : Tensor of shape (n, c)
        covariance : Tensor of shape (1, n, n)
            Of every column of the targets.
        """
        active = self.search.query(X, min(self.n_neighbors, len(self.X)))
        union_of, position = active.unique(return_inverse=True)
        points, noise = self.X[union_of], self._row_noise(union_of)
        if union:
            cross = gram(self.kernel, points, X)
            L = jittered_cholesky(gram(self.kernel, points) + noise.diag()).factor
            weights = torch.cholesky_solve(cross, L).T
            covariance = gram(self.kernel, X) - weights @ cross
            mean = self.offset + weights @ (self.targets[union_of] - self.offset)
            return mean, 0.5 * (covariance + covariance.T)[None]
        weights = self._weights(X, active)
        A = sparse_rows(position, weights, len(points))
        mean = self.offset + torch.sparse.mm(A, self.targets[union_of] - self.offset)
        return mean, joint_errors(self.kernel, X, points, A, noise)[None]

    def _weights(self, X: Tensor, active: Tensor) -> Tensor:
        """a (n, H) of rows X (n, d), whose targets are those of the identity."""
        H = active.shape[1]
        unit = torch.eye(H, dtype=X.dtype, device=X.device)
        noise = self._row_noise(active)
        parts = [
            _krige_tile(self.kernel, X[i], self.X[active[i]], noise[i], unit.expand(len(i), H, H))
            for i in self._tiles(len(X), H)
        ]
        return torch.cat([mean for mean, _ in parts])

    def log_probabilities(self, X: Tensor) -> Tensor:
        """Log-probabilities of the classes, (n, 2) or (n, c), in nats.

        Raises
        ------
        ValueError
            If the model has no link.
        """
        if self.link is None:
            raise ValueError("link is None: kriging of numbers has no classes; use krige_labels.")
        mean, var = self.mean_and_variance(X)
        return self.link.log_probabilities(mean - self.offset, var)

    def others(self, row: Tensor) -> Tensor:
        """The training rows nearest to each of the training rows (p,), itself left out; (p, H).

        Raises
        ------
        ValueError
            If there is but one training row.
        """
        if len(self.X) < 2:
            raise ValueError("X has one distinct row; leaving it out needs 2 or more.")
        size = min(self.n_neighbors, len(self.X) - 1)
        return self.search.query(self.X[row], size, exclude=row)

    def leave_out(
        self, row: Tensor, unit: Tensor, value: Tensor, others: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Predict rows from all others, and from what is left of themselves.

        Parameters
        ----------
        row : Tensor of int64, shape (p,)
            Indices of training rows.
        unit : Tensor of shape (p,)
            The weight that is taken from each: all of it, unless equal rows were merged.
        value : Tensor of shape (p, c)
            The target of what is taken.
        others : Tensor of int64, shape (p, H), optional
            As `others` finds them, if that is known.

        Returns
        -------
        mean : Tensor of shape (p, c)
        var : Tensor of shape (p,)

        Raises
        ------
        ValueError
            If there is but one training row.
        """
        others = self.others(row) if others is None else others
        weight = self.X.new_ones(len(row)) if self.weight is None else self.weight[row]
        left = weight - unit
        shared = left > 1e-9 * weight  # something of the row is left
        mean, var = torch.empty_like(value), value.new_empty(len(value))
        for part in (shared.nonzero()[:, 0], (~shared).nonzero()[:, 0]):
            if not len(part):
                continue
            own, active = row[part], others[part]
            if shared[part[0]]:
                active = torch.cat([own[:, None], active], 1)[:, : self.n_neighbors]
            noise, targets = self._row_noise(active).clone(), self.targets[active]
            if shared[part[0]]:
                rest = weight[part, None] * targets[:, 0] - unit[part, None] * value[part]
                noise[:, 0] = self.noise / left[part]
                targets[:, 0] = rest / left[part, None]
            mean[part], var[part] = self._krige(self.X[own], active, noise, targets)
        return mean, var

    def appended(self, X: Tensor, targets: Tensor, weight: Tensor | None = None) -> KrigingModel:
        """The model with more rows; kernel, noise, prior means and link are kept.

        Parameters
        ----------
        X : Tensor of shape (p, d)
        targets : Tensor of shape (p, c)
            Numbers, or labels as `label_targets` writes them.
        weight : Tensor of shape (p,), optional

        Returns
        -------
        KrigingModel
            ``O((M + p) log(M + p))``; this one is not modified.
        """
        if weight is not None or self.weight is not None:
            before = self.X.new_ones(len(self.X)) if self.weight is None else self.weight
            after = X.new_ones(len(X)) if weight is None else weight
            weight = torch.cat([before, after])
        rows = torch.cat([self.X, X]), torch.cat([self.targets, targets])
        X, targets, weight = merge_rows(*rows, weight)
        return replace(self, X=X, targets=targets, weight=weight)

    def _tiles(self, n: int, H: int) -> tuple[Tensor, ...]:
        """Indices of n rows, a tile at a time."""
        rows = max(1, _TILE // (H * (H + self.X.shape[1])))
        return torch.arange(n, device=self.X.device).split(rows)

    def _row_noise(self, active: Tensor) -> Tensor:
        """Noise variances, of the shape of `active`."""
        if self.weight is None:
            return self.X.new_tensor(self.noise).expand(active.shape)
        return self.noise / self.weight[active]

    @torch.no_grad()
    def _krige(self, X: Tensor, active: Tensor, noise: Tensor, targets: Tensor):
        """Mean (n, c) and variance (n,) given rows `active` (n, H), noise and targets of each."""
        n, H = active.shape
        parts = [
            _krige_tile(self.kernel, X[i], self.X[active[i]], noise[i], targets[i] - self.offset)
            for i in torch.arange(n, device=X.device).split(max(1, _TILE // (H * (H + X.shape[1]))))
        ]
        mean, var = (torch.cat(each) for each in zip(*parts, strict=True))
        return mean + self.offset, var


def _krige_tile(kernel, X: Tensor, points: Tensor, noise: Tensor, residual: Tensor):
    """Mean and variance of rows (n, d) given points (n, H, d) and residuals (n, H, c)."""
    method = "direct" if X.shape[1] <= _DIRECT_COLUMNS else "expand"
    K = gram(kernel, points, method=method)
    K.diagonal(dim1=-2, dim2=-1).add_(noise)
    cross = gram(kernel, points, X[:, None], method=method)  # (n, H, 1)
    weights = torch.cholesky_solve(cross, jittered_cholesky(K).factor)
    var = gram_diag(kernel, X) - (cross * weights).sum((1, 2))
    return (weights * residual).sum(1), var.clamp_min(0.0)


def merge_rows(
    X: Tensor, targets: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Merge rows of equal inputs to their weighted mean and total weight.

    Parameters
    ----------
    X : Tensor of shape (n, d)
    targets : Tensor of shape (n, c)
    weight : Tensor of shape (n,), optional
        Positive.

    Returns
    -------
    X : Tensor of shape (M, d)
        In the order in which they come first.
    targets : Tensor of shape (M, c)
    weight : Tensor of shape (M,) or None
        None if no rows are equal and none was given.
    """
    first, group = distinct(X)
    if len(first) == len(X):
        return X, targets, weight
    each = X.new_ones(len(X)) if weight is None else weight
    total = X.new_zeros(len(first)).index_add_(0, group, each)
    sums = targets.new_zeros(len(first), targets.shape[1])
    sums.index_add_(0, group, each[:, None] * targets)
    return X[first], sums / total[:, None], total
