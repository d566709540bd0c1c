r"""Kriging from the nearest rows: exact Gaussian process regression on each row's neighbourhood.

With I the H training rows nearest to x (:mod:`skgp.inference.neighbors.search`), W their weights
and the targets T less their prior means m,

.. math:: a = (K_I + \sigma^2 W_I^{-1})^{-1} k, \qquad
          \mu = m + a^T (T_I - m), \qquad q = k_{xx} - k^T a \qquad
          \text{(Rasmussen and Williams, eqs. 2.25-2.26)}

for all columns of T at once. Rows of equal inputs are one row of their mean and total weight.

*Regression*: f ~ N(mu, q), an observation adds :math:`\sigma^2`. *Classification*: labels -1 and
+1 (of many classes, each against the rest) are kriged as if they were numbers, and a link turns the
result into probabilities (:mod:`skgp.inference.neighbors.label_link`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.neighbors.joint import joint_errors, sparse_rows
from skgp.inference.neighbors.neighborhood import Neighborhood, fading_weights
from skgp.inference.neighbors.search import distinct
from skgp.inference.neighbors.shared_conditionals import SharedConditionals
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.tensor_state import TensorState

__all__ = ["KrigingModel", "is_shared", "merge_rows"]

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
    link : object or None
        Of a classifier, with a method ``log_probabilities``.
    neighbors : {"auto", "exact", "faiss"}
        See :class:`~skgp.inference.neighbors.search.NeighborSearch`.
    n_scales : int
        Scales that share the neighbours (:mod:`skgp.inference.neighbors.neighborhood`).

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
    link: Any = None
    neighbors: str = "auto"
    n_scales: int = 1

    @cached_property
    def neighborhood(self) -> Neighborhood:
        """Which training rows a row uses."""
        return Neighborhood(self.kernel, self.X, self.n_neighbors, self.neighbors, self.n_scales)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for derived in ("neighborhood", "shared"):
            state.pop(derived, None)
        return state

    @cached_property
    def shared(self) -> SharedConditionals:
        """Where all rows are neighbours; built when first asked for, not pickled."""
        everything = torch.arange(len(self.X), device=self.X.device)
        return SharedConditionals(self.kernel, self.X, self._row_noise(everything))

    @property
    def _uses_all(self) -> bool:
        return self.n_neighbors >= len(self.X)

    def mean(self, X: Tensor) -> Tensor:
        """Kriging means, (n, c), in tiles."""
        return self.mean_and_variance(X)[0]

    @torch.no_grad()
    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, c) and variance q (n,) of f, without the noise of an observation; in tiles."""
        if self._uses_all:
            weights, var = self.shared(X)
            return self.offset + weights @ (self.targets - self.offset), var
        parts = []
        for rows in X.split(self._tile_rows()):
            active, influence = self.neighborhood.find(rows)
            weights, var = self._weights(rows, active, influence, self._row_noise(active))
            parts.append((self._mean(weights, self.targets[active]), var))
        mean, var = map(torch.cat, zip(*parts, strict=True))
        return mean, var

    @torch.no_grad()
    def mean_and_covariance(self, X: Tensor, *, union: bool = False) -> tuple[Tensor, Tensor]:
        """Joint prediction of f, without the noise of an observation.

        Parameters
        ----------
        X : Tensor of shape (n, d)
        union : bool
            Krige every row from the union of the neighbours; by default from its own
            (:mod:`skgp.inference.neighbors.joint`).

        Returns
        -------
        mean : Tensor of shape (n, c)
        covariance : Tensor of shape (1, n, n)
            Of every column of the targets.
        """
        if self._uses_all:
            return self._from_all(X, self.shared, self.targets)
        if union:
            points = self.neighborhood.search.query(X, self.n_neighbors).unique()
            given = SharedConditionals(self.kernel, self.X[points], self._row_noise(points))
            return self._from_all(X, given, self.targets[points])
        active, influence = self.neighborhood.find(X)
        points, position = active.unique(return_inverse=True)
        noise = self._row_noise(points)
        tiles = (each.split(self._tile_rows()) for each in (X, active, influence))
        weights = torch.cat(
            [self._weights(x, I, d, self._row_noise(I))[0] for x, I, d in zip(*tiles, strict=True)]
        )
        A = sparse_rows(position, weights, len(points))
        mean = self.offset + torch.sparse.mm(A, self.targets[points] - self.offset)
        return mean, joint_errors(self.kernel, X, self.X[points], A, noise)[None]

    def _from_all(
        self, X: Tensor, given: SharedConditionals, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Joint prediction from all the points given, and their targets."""
        weights, _ = given(X)
        covariance = gram(self.kernel, X) - weights @ gram(self.kernel, X, given.Z).mT
        mean = self.offset + weights @ (targets - self.offset)
        return mean, 0.5 * (covariance + covariance.T)[None]

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

    def others(self, row: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Neighbours of training rows of which a part, or all, is left out.

        Parameters
        ----------
        row : Tensor of int64, shape (p,)
        shared : Tensor of bool, shape (p,)
            Whether something of the row stays: it is then its own neighbour.

        Returns
        -------
        active : Tensor of int64, shape (p, H)
        influence : Tensor of shape (p, H)
            As by :class:`~skgp.inference.neighbors.neighborhood.Neighborhood`.

        Raises
        ------
        ValueError
            If there is but one training row.
        """
        if len(self.X) < 2:
            raise ValueError("X has one distinct row; leaving it out needs 2 or more.")
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
        self,
        row: Tensor,
        unit: Tensor,
        value: Tensor,
        others: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict rows from all others, and from what is left of themselves.

        Parameters
        ----------
        row : Tensor of int64, shape (p,)
            Training rows.
        unit : Tensor of shape (p,)
            The weight that is taken from each.
        value : Tensor of shape (p, c)
            The target of what is taken.
        others : tuple of Tensor, optional
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
        weight = self.X.new_ones(len(row)) if self.weight is None else self.weight[row]
        left = (weight - unit)[:, None]  # (p, 1)
        active, influence = self.others(row, is_shared(weight, unit)) if others is None else others
        rest = (weight[:, None] * self.targets[row] - unit[:, None] * value) / left  # (p, c)
        parts = []
        for i in torch.arange(len(row), device=row.device).split(self._tile_rows()):
            own = (active[i] == row[i, None]) & (influence[i] > 0)
            noise = torch.where(own, self.noise / left[i], self._row_noise(active[i]))
            targets = torch.where(own[..., None], rest[i, None], self.targets[active[i]])
            weights, var = self._weights(self.X[row[i]], active[i], influence[i], noise)
            parts.append((self._mean(weights, targets), var))
        mean, var = map(torch.cat, zip(*parts, strict=True))
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

    def _tile_rows(self) -> int:
        """Rows of a tile."""
        H = self.neighborhood.size
        return max(1, _TILE // (H * (H + self.X.shape[1])))

    def _row_noise(self, active: Tensor) -> Tensor:
        """Noise variances, of the shape of `active`."""
        if self.weight is None:
            return self.X.new_tensor(self.noise).expand(active.shape)
        return self.noise / self.weight[active]

    def _weights(
        self, X: Tensor, active: Tensor, influence: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """a (n, H) and the variance q (n,) of rows X (n, d) given rows `active` (n, H)."""
        method = "direct" if X.shape[1] <= _DIRECT_COLUMNS else "expand"
        points = self.X[active]  # (n, H, d)
        K = gram(self.kernel, points, method=method)
        K.diagonal(dim1=-2, dim2=-1).add_(noise)
        cross = gram(self.kernel, points, X[:, None], method=method)[..., 0]
        return fading_weights(K, cross, gram_diag(self.kernel, X), influence)

    def _mean(self, weights: Tensor, targets: Tensor) -> Tensor:
        """m + a'(T - m), shape (n, c), of targets (n, H, c)."""
        return self.offset + torch.einsum("nh,nhc->nc", weights, targets - self.offset)


def is_shared(weight: Tensor, unit: Tensor) -> Tensor:
    """Whether something is left of rows of some weight of which a unit is taken, (p,)."""
    return weight - unit > 1e-9 * weight


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
