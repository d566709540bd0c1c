"""Sparse triangular systems of unit diagonal, I - B.

Of few numbers they are substituted row by row (SuperLU). Many go level by level: rows of a level
depend on earlier levels alone, of which there are some hundred of random orders, a sparse product
each. Their few rows each are no work for a device: SciPy does it on the host.
"""

from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from skgp.linalg.defaults import LEVELLED_NUMBERS


class UnitLower:
    """I - B (n, n): row i of B has the numbers b_i (H,) in the columns index_i (H,), int64.

    These are below i; another, as i itself, stands for no entry. A solution with k columns takes
    O(n H k).
    """

    def __init__(self, index: Tensor, b: Tensor) -> None:
        n, H = index.shape
        columns, values = index.cpu().numpy(), b.cpu().numpy()
        rows = np.broadcast_to(np.arange(n)[:, None], (n, H))
        kept = columns < rows
        entries = (values[kept], (rows[kept], columns[kept]))
        self._B = sparse.csr_matrix(entries, shape=(n, n))

    def solve(self, V: Tensor) -> Tensor:
        """(I - B)^-1 V, (n, k)."""
        return self._solved(V, turned=False)

    def rsolve(self, V: Tensor) -> Tensor:
        """(I - B)^-T V, (n, k)."""
        return self._solved(V, turned=True)

    def _solved(self, V: Tensor, turned: bool) -> Tensor:
        given = V.cpu().numpy()
        if given.size <= LEVELLED_NUMBERS:
            out = self._factor.solve(np.asfortranarray(given), "T" if turned else "N")
        else:
            order, *blocks = self._levels
            found, out = given[order], np.empty_like(given)
            for rows, block in blocks[turned]:
                found[rows] += block @ found
            out[order] = found
        return torch.from_numpy(out).to(V.device)

    @cached_property
    def _factor(self) -> Any:
        """Of SuperLU: with neither permutations nor pivots, the matrix and the identity."""
        matrix = sparse.eye(self._B.shape[0], format="csc") - self._B.tocsc()
        options = {"Equil": False, "SymmetricMode": False}
        return splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0.0, options=options)

    @cached_property
    def _levels(self) -> tuple[np.ndarray, list, list]:
        """Rows by level; those of each level after the first, and B or its transpose there."""
        levels = levels_of(self._B)
        order, ends = np.concatenate(levels), np.cumsum([len(level) for level in levels])
        slices = [slice(end - len(level), end) for level, end in zip(levels, ends, strict=True)]
        B = self._B[order][:, order]
        turned = B.T.tocsr()
        ahead = [(rows, B[rows]) for rows in slices[1:]]
        return order, ahead, [(rows, turned[rows]) for rows in slices[-2::-1]]


def levels_of(B: sparse.csr_matrix) -> list[np.ndarray]:
    """Rows of strictly triangular B by level, each of rows with entries in those before alone."""
    left, users = np.diff(B.indptr), B.tocsc()
    levels = [np.flatnonzero(left == 0)]
    while len(levels[-1]):
        starts, ends = users.indptr[levels[-1]], users.indptr[levels[-1] + 1]
        counts = ends - starts
        first = np.repeat(starts - counts.cumsum() + counts, counts)
        rows, times = np.unique(users.indices[first + np.arange(len(first))], return_counts=True)
        left[rows] -= times.astype(left.dtype)
        levels.append(rows[left[rows] == 0])
    return levels[:-1]
