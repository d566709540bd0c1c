"""What the sparse models train on, where they stand, and what they may change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference.sparse.sparse import SparsePosterior

__all__ = ["SparseData", "SparseState"]


@dataclass(frozen=True)
class SparseData:
    """Training rows.

    Attributes
    ----------
    X : Tensor of shape (n, d)
    y : Tensor of shape (n, c)
        One column a latent function.
    weight : Tensor of shape (n,) or None
        Positive likelihood weights: a weight of 2 equals the row given twice.
    offset : Tensor of shape (n, 1) or None
        Of the observations, for the likelihood: log-exposures of counts.
    """

    X: Tensor
    y: Tensor
    weight: Tensor | None = None
    offset: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def total(self) -> float:
        """Number of observations, rows of weight w counted w times."""
        return float(len(self) if self.weight is None else self.weight.sum())

    @property
    def exposure(self) -> float:
        """Weighted sum of the exposures; of no offsets the number of observations."""
        if self.offset is None:
            return self.total
        return float(self.weighted_sum(self.offset.double().exp()))

    def double(self) -> "SparseData":
        """The same in float64."""
        return self._each(lambda tensor: tensor.double())

    def rows(self, index: Tensor) -> "SparseData":
        """The rows of an index or mask."""
        index = index.to(self.X.device)
        return self._each(lambda tensor: tensor[index])

    def _each(self, function: Callable[[Tensor], Tensor]) -> "SparseData":
        weight, offset = (
            None if each is None else function(each) for each in (self.weight, self.offset)
        )
        return SparseData(function(self.X), function(self.y), weight, offset)

    def some_rows(self, size: int, generator: torch.Generator) -> "SparseData":
        """At most `size` rows at random, in their order."""
        if len(self) <= size:
            return self
        order = torch.randperm(len(self), generator=generator, device=generator.device)
        return self.rows(order[:size].sort().values)

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Sum over the rows of values (n,) or (n, c), a scalar."""
        if self.weight is None:
            return values.sum()
        return (values * (self.weight if values.ndim == 1 else self.weight[:, None])).sum()


@dataclass(frozen=True)
class SparseState:
    """A sparse posterior and the hyper-parameters that it was found with.

    Attributes
    ----------
    kernel : sklearn kernel expression
        Covariance of f, without noise; its bounds hold while training.
    likelihood : Tensor of shape (p,)
        Free parameters of the likelihood (see `skgp.likelihoods.families`).
    Z : Tensor of shape (M, d)
    mean : Tensor of shape (M, c)
    root : Tensor of shape (c, M, M)
        Whitened posterior (see `skgp.inference.sparse.sparse`).
    offset : Tensor of shape (c,)
        Prior means.
    """

    kernel: Any
    likelihood: Tensor
    Z: Tensor
    mean: Tensor
    root: Tensor
    offset: Tensor

    @classmethod
    def prior(cls, kernel, likelihood: Tensor, Z: Tensor, offset: Tensor) -> "SparseState":
        """The posterior of no data."""
        M, c = len(Z), len(offset)
        root = torch.eye(M, dtype=Z.dtype, device=Z.device).expand(c, M, M).contiguous()
        return cls(kernel, likelihood, Z, Z.new_zeros(M, c), root, offset)

    def with_posterior(self, mean: Tensor, root: Tensor) -> "SparseState":
        """The same hyper-parameters with another posterior."""
        return replace(self, mean=mean, root=root)

    def posterior(self) -> SparsePosterior:
        """What predicts."""
        return SparsePosterior(self.kernel, self.Z, self.mean, self.root, self.offset)
