r"""Uniform samples of basis functions and of rows, at a cost that depends on neither m nor n.

The sums over basis functions of QSGP (Evans and Nair, 2020) are estimated from subsets. A subset
is made of whole *sampling units*: single basis functions, or, for features that a counter-based
generator yields block by block, the blocks. Units are drawn without replacement, all with the same
probability :math:`\pi`, hence so are the basis functions, and

.. math:: \sum_{r=1}^m t_r = E\Big[\tfrac{1}{\pi} \sum_{r \in \tilde{i}} t_r\Big],
          \qquad \pi = \frac{\text{units drawn}}{\text{units}}.

The weight :math:`1 / \pi` is the paper's :math:`m / \tilde m` when all units have one size. When
the last block is short, the realised :math:`m / |\tilde i|` would be biased, not :math:`1 / \pi`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from skgp.optim import sample_without_replacement

__all__ = [
    "IndexSet",
    "SamplingUnits",
    "everything",
    "index_set",
    "sample_indices",
    "take_rows",
    "union_weight",
]


class SamplingUnits(Protocol):
    """What sampling asks of a basis."""

    @property
    def n_features(self) -> int:
        """Number of basis functions m."""

    @property
    def n_units(self) -> int:
        """Number of sampling units."""

    @property
    def unit_size(self) -> int:
        """Basis functions a unit; the last unit may be shorter."""


@dataclass(frozen=True)
class IndexSet:
    r"""A sample :math:`\tilde i` of basis functions.

    Attributes
    ----------
    indices : Tensor of shape (k,)
        Distinct, increasing int64 positions in 0..m.
    weight : float
        Inverse of the probability of each basis function to be in the sample.
    units : Tensor of shape (u,)
        Distinct, increasing numbers of the sampled units.
    n_units, unit_size : int
        Of the population.
    """

    indices: Tensor
    weight: float
    units: Tensor
    n_units: int
    unit_size: int

    def __len__(self) -> int:
        return len(self.indices)


def sample_indices(basis: SamplingUnits, size: int, *, generator: torch.Generator) -> IndexSet:
    """Draw about `size` basis functions: as many whole units as fit, at least one.

    Parameters
    ----------
    basis : SamplingUnits
        Population.
    size : int
        Number of basis functions wanted; at least 1. More than m takes every one.
    generator : torch.Generator

    Returns
    -------
    IndexSet
        O(size) time and memory.

    Raises
    ------
    ValueError
        If `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"basis_batch_size must be at least 1, got {size}.")
    n_draws = min(max(1, size // basis.unit_size), basis.n_units)
    units = sample_without_replacement(basis.n_units, n_draws, generator=generator)
    return index_set(basis, units)


def everything(basis: SamplingUnits) -> IndexSet:
    """Return the sample of all basis functions, of weight 1; O(m) memory."""
    return index_set(basis, torch.arange(basis.n_units))


def index_set(basis: SamplingUnits, units: Tensor) -> IndexSet:
    """Return the sample made of the given distinct, increasing units, as if drawn uniformly."""
    size = basis.unit_size
    indices = (units[:, None] * size + torch.arange(size)).reshape(-1)
    return IndexSet(
        indices=indices[indices < basis.n_features],
        weight=basis.n_units / len(units),
        units=units,
        n_units=basis.n_units,
        unit_size=size,
    )


def union_weight(i: IndexSet, j: IndexSet) -> float:
    r"""Weight of a sum over the union of two independent samples (appendix F.1).

    Given its size u in units, the union is uniform over all sets of u units by symmetry. Hence

    .. math:: E\Big[\frac{\text{units}}{u} \sum_{r \in \tilde i \cup \tilde j} t_r\Big] = \sum_r t_r

    holds exactly, although u is random. The paper's :math:`m / |\tilde i \cup \tilde j|` counts
    basis functions in place of units: the same if all units have one size, biased otherwise
    (units of 3 and 1 functions, one drawn for each sample: expected weights 5/6 and 3/2).
    """
    return i.n_units / len(torch.cat([i.units, j.units]).unique())


def take_rows(X: Tensor | np.ndarray, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy some rows of a tensor, array or memory map; the rest is never read.

    Parameters
    ----------
    X : Tensor or ndarray of shape (n, ...)
        May be a read-only ``numpy.memmap``.
    indices : Tensor of shape (k,)
        Increasing, so that a file is read forwards.
    dtype : torch.dtype
        Of the result.
    """
    if isinstance(X, Tensor):
        return X[indices.to(X.device)].to(dtype)
    # Fancy indexing copies: the result is writable whatever the array is.
    return torch.from_numpy(np.asarray(X[indices.numpy()])).to(dtype)
