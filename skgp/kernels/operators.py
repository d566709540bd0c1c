r"""Products with kernel matrices too large to form, or to form in full.

::

    symmetric K, stored           rectangular K(X, Z), streamed
    +----+----+----+              +---------+
    | 00 | 01 | 02 |  panel 0     | row tile|  formed, used, dropped
    +----+----+----+              +---------+
         | 11 | 12 |  panel 1     |         |
         +----+----+              +---------+
              | 22 |  panel 2
              +----+

A panel serves both ``K[i, i:] V[i:]`` and, transposed, ``K[i:, i] V[i]``: half the memory, and half
the traffic of a product, of the full matrix. What is not stored is formed tile by tile, each used
for both products and dropped.
"""

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from skgp.kernels.defaults import DISTANCE_ERROR, LEAST_SIDE, MIRRORED, PANEL, PASS, STORED_SHARE
from skgp.kernels.expression import bind
from skgp.kernels.gram import evaluate_tile, gram_tile, largest_square
from skgp.linalg.defaults import ENTRY
from skgp.linalg.runtime import large_operation, memory_budget, tile_rows


class KernelOperator:
    r"""Symmetric kernel matrix :math:`K(X, X)` as an operator.

    Entries and products have the `dtype`. Entries are computed in float64 before they are rounded:
    the expansion of squared distances loses digits to cancellation, which float32 cannot spare when
    ``n * variance / noise`` exceeds about 1e6. X is (n, d); the kernel has no WhiteKernel. The
    upper triangle is `stored` where it fits in :func:`~skgp.linalg.runtime.memory_budget`; else
    entries are recomputed at every product.
    """

    def __init__(self, kernel, X: Tensor, *, dtype: torch.dtype = torch.float32):
        n = X.shape[0]
        self.kernel, self.shape, self.dtype = kernel, (n, n), dtype
        self._X = X.double()
        self._starts = range(0, n, PANEL)
        self.stored = self.stored_bytes(n, dtype) <= memory_budget(X.device)
        self._panels: list[Tensor] = []
        if self.stored:
            for start in self._starts:
                self._panels.append(self._panel(start))

    @staticmethod
    def stored_bytes(n: int, dtype: torch.dtype) -> float:
        """Bytes of the upper triangle of n rows, whole tiles on the diagonal."""
        return dtype.itemsize * n * (n + PANEL) / 2

    def matmul(self, V: Tensor) -> Tensor:
        """``K V`` for V of shape (n, k), computed and returned in the dtype of the operator."""
        V = V.to(self.dtype)
        out = torch.zeros_like(V)
        if not self.stored:
            for rows, columns in upper_tiles(self.shape[0], self._X):
                tile = gram_tile(self.kernel, self._X[rows], self._X[columns]).to(self.dtype)
                out[rows] += tile @ V[columns]
                if columns.start > rows.start:
                    out[columns] += tile.T @ V[rows]
            return out
        for start, panel in zip(self._starts, self._panels, strict=True):
            stop = min(start + PANEL, self.shape[0])
            with large_operation(PASS * panel.numel()):
                out[start:stop] += panel @ V[start:]
                if stop < self.shape[0]:
                    out[stop:] += panel[:, stop - start :].T @ V[start:stop]
        return out

    def _panel(self, start: int) -> Tensor:
        """Rows ``start : start + tile`` from the diagonal to the right, shape (t, n - start).

        Formed in slices of columns, so that at higher precision only a slice is held.
        """
        rows = self._X[start : start + PANEL]
        n = self.shape[0]
        panel = torch.empty((rows.shape[0], n - start), dtype=self.dtype, device=rows.device)
        for left in range(start, n, 2 * PANEL):
            right = min(left + 2 * PANEL, n)
            panel[:, left - start : right - start] = gram_tile(
                self.kernel, rows, self._X[left:right]
            )
        return panel


class RowOperator:
    r"""Products :math:`V K_\theta(X, X)` with few rows V, for a theta that keeps changing.

    Centred columns of X (n, d) lose the fewest digits. Entries and products have the `dtype`, by
    default that of X. Distances are computed in it, too, unless they would err by more than 3e-5:
    then in that of X. The full matrix is `stored` (a product with few rows is bound by memory, and
    half a matrix would be read twice) where it fits in half of
    :func:`~skgp.linalg.runtime.memory_budget`; else its upper triangle is recomputed tile by tile
    at every product.

    :meth:`set_theta` overwrites the stored matrix in place, ``O(n^2 d / 2)``; a product with k rows
    takes ``2 k n^2`` flops, and is a RuntimeError before the first theta.
    """

    def __init__(self, kernel, X: Tensor, *, dtype: torch.dtype | None = None):
        n, self.dtype = len(X), X.dtype if dtype is None else dtype
        self._kernel, self._exact, self._rounded = kernel, X, X.to(self.dtype)
        self.inputs = self._rounded  # in the dtype that distances take at the last theta
        self._node = bind(kernel, None, dtype=self.dtype, device=X.device)
        self.stored = self.stores(n, self.dtype, X.device)
        self._memory: Tensor | None = None  # of the matrix

    @staticmethod
    def stores(n: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the matrix of n rows is stored: what works on it needs memory, too."""
        return dtype.itemsize * n * n <= STORED_SHARE * memory_budget(device)

    def __getstate__(self):
        """Without the matrix, which :meth:`set_theta` makes anew."""
        return self.__dict__ | {"_memory": None}

    def set_theta(self, theta: Tensor) -> None:
        """Make `theta` (n_theta,) the hyper-parameters of the products; call it before these."""
        n = len(self.inputs)
        self._bind(theta, self._rounded)
        if self._exact.dtype != self.dtype:
            error = torch.finfo(self.dtype).eps * largest_square(self._node, self._rounded)
            if error > DISTANCE_ERROR:
                self._bind(theta, self._exact)
        if not self.stored:
            return
        if self._memory is None:
            self._memory = self._rounded.new_empty(n, n)
        K = self._memory
        for start in range(0, n, MIRRORED):
            stop = min(start + MIRRORED, n)
            for left in range(start, n, MIRRORED):
                right = min(left + MIRRORED, n)
                tile = self._tile(start, stop, left, right)
                K[start:stop, left:right] = tile
                if left > start:
                    K[left:right, start:stop] = tile.T

    def _bind(self, theta: Tensor, inputs: Tensor) -> None:
        self.inputs = inputs
        self._node = bind(self._kernel, theta, dtype=inputs.dtype, device=inputs.device)

    def _tile(self, start: int, stop: int, left: int, right: int) -> Tensor:
        X = self.inputs
        out = X.new_empty(stop - start, right - left)
        return evaluate_tile(self._node, X[start:stop], X[left:right], out)

    def matmul(self, V: Tensor) -> Tensor:
        """``V K`` for V of shape (k, n)."""
        n = len(self.inputs)
        if self.stored:
            with large_operation(PASS * n**2):
                return V @ self._matrix
        out = torch.zeros_like(V)
        for rows, columns in upper_tiles(n, self.inputs):
            tile = self._tile(rows.start, rows.stop, columns.start, columns.stop).to(V)
            out[:, columns] += V[:, rows] @ tile
            if columns.start > rows.start:
                out[:, rows] += V[:, columns] @ tile.T
        return out

    def seconds_a_product(self) -> float:
        """Of one that is not stored, with a few rows: from the time of one tile."""
        n, tiles = len(self.inputs), list(upper_tiles(len(self.inputs), self.inputs))
        rows, columns = tiles[0]
        start = time.perf_counter()
        tile = self._tile(rows.start, rows.stop, columns.start, columns.stop)
        float(tile[-1, -1])  # an accelerator has done its work
        return (time.perf_counter() - start) * n * (n + len(tile)) / (2 * tile.numel())

    def rows(self, index: Tensor) -> Tensor:
        """``K[index]`` of shape (b, n)."""
        X, n = self.inputs, len(self.inputs)
        if self.stored:
            return self._matrix[index]
        return evaluate_tile(self._node, X[index], X, X.new_empty(len(index), n)).to(self.dtype)

    @property
    def _matrix(self) -> Tensor:
        if self._memory is None:
            raise RuntimeError("RowOperator has no hyper-parameters yet; call set_theta first.")
        return self._memory


def upper_tiles(n: int, X: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the square tiles of an upper triangle (n, n), row by row."""
    side = min(PANEL, max(LEAST_SIDE, math.isqrt(tile_rows(2 * X.element_size()))))
    for start in range(0, n, side):
        rows = slice(start, min(start + side, n))
        for left in range(start, n, side):
            yield rows, slice(left, min(left + side, n))


def kernel_matmul(kernel, X: Tensor, Z: Tensor, V: Tensor) -> Tensor:
    """``K(X, Z) V`` without holding K: row tiles are formed, used and dropped.

    X (n, d), Z (m, d), V (m, k); the result (n, k) is in the dtype of X. O(n m (d + k)).
    """
    rows = tile_rows(len(Z) * X.element_size())
    with large_operation(ENTRY * X.shape[0] * Z.shape[0]):
        return torch.cat([gram_tile(kernel, tile, Z) @ V for tile in X.split(rows)])
