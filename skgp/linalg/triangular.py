r"""Systems with a sparse triangular matrix of unit diagonal, I - B.

Substitution works through a row after another, or through some hundred levels of rows that do not
depend on each other, whose few numbers each are no work for a device: SciPy does it on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from skgp.linalg.defaults import TRIANGULAR_COLUMNS


class UnitLower:
    """I - B (n, n), factored once: row i of B has the numbers b_i in the columns index_i.

    Parameters
    ----------
    index : Tensor of int64, shape (n, H)
        Columns below i; another, as i itself, stands for no entry.
    b : Tensor of float64, shape (n, H)
    """

    def __init__(self, index: Tensor, b: Tensor) -> None:
        n, H = index.shape
        columns, values = index.cpu().numpy(), b.cpu().numpy()
        rows = np.broadcast_to(np.arange(n)[:, None], (n, H))
        kept = columns < rows
        entries = (-values[kept], (rows[kept], columns[kept]))
        matrix = sparse.csc_matrix(entries, shape=(n, n)) + sparse.eye(n, format="csc")
        # With neither permutations nor pivots the factors are the matrix and the identity.
        self._factor = splu(
            matrix,
            permc_spec="NATURAL",
            diag_pivot_thresh=0.0,
            options={"Equil": False, "SymmetricMode": False},
        )

    def solve(self, V: Tensor) -> Tensor:
        """(I - B)^-1 V, (n, k)."""
        return self._solved(V, "N")

    def rsolve(self, V: Tensor) -> Tensor:
        """(I - B)^-T V, (n, k)."""
        return self._solved(V, "T")

    def _solved(self, V: Tensor, trans: str) -> Tensor:
        solve: Any = self._factor.solve  # whose stubs know of no transpose
        parts = np.array_split(V.cpu().numpy(), -(-V.shape[1] // TRIANGULAR_COLUMNS), axis=1)
        found = np.concatenate([solve(np.asfortranarray(part), trans) for part in parts], axis=1)
        return torch.from_numpy(found).to(V.device)
