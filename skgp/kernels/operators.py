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
the traffic of a product, of the full matrix.
"""

import math

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag, gram_tile

_TILE = 2048  # rows of a panel: large enough for full matrix-multiply speed


class KernelOperator:
    r"""Symmetric kernel matrix :math:`K(X, X)` as an operator.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    dtype : torch.dtype, default=torch.float32
        Of the entries and of the products.
    distance_dtype : torch.dtype, default=torch.float64
        In which entries are computed before they are rounded to `dtype`. The expansion of squared
        distances loses digits to cancellation, which float32 cannot spare when
        ``n * variance / noise`` exceeds about 1e6.
    memory_budget : float, default=8e9
        Bytes. The upper triangle is stored when it fits, else entries are recomputed at every
        product.

    Attributes
    ----------
    stored : bool
    shape : tuple (n, n)
    """

    def __init__(
        self,
        kernel,
        X: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        distance_dtype: torch.dtype = torch.float64,
        memory_budget: float = 8e9,
    ):
        n = X.shape[0]
        self.kernel, self.shape, self.dtype = kernel, (n, n), dtype
        self._X = X.to(distance_dtype)
        self._starts = range(0, n, _TILE)
        itemsize = torch.finfo(dtype).bits // 8
        self.stored = itemsize * n * (n + _TILE) / 2 <= memory_budget
        self._panels: list[Tensor] = []
        if self.stored:
            for start in self._starts:
                self._panels.append(self._panel(start))

    def diag(self) -> Tensor:
        """Diagonal of K, shape (n,), in the dtype of the distances."""
        return gram_diag(self.kernel, self._X)

    def matmul(self, V: Tensor) -> Tensor:
        """``K V`` for V of shape (n, k), computed and returned in the dtype of the operator."""
        V = V.to(self.dtype)
        out = torch.zeros_like(V)
        for i, start in enumerate(self._starts):
            stop = min(start + _TILE, self.shape[0])
            panel = self._panels[i] if self.stored else self._panel(start)
            out[start:stop] += panel @ V[start:]
            if stop < self.shape[0]:
                out[stop:] += panel[:, stop - start :].T @ V[start:stop]
        return out

    def columns(self, index: Tensor) -> Tensor:
        """``K[:, index]`` of shape (n, b), in the dtype of the distances."""
        return gram_tile(self.kernel, self._X, self._X[index])

    def _panel(self, start: int) -> Tensor:
        """Rows ``start : start + tile`` from the diagonal to the right, shape (t, n - start).

        Formed in slices of columns, so that at higher precision only a slice is held.
        """
        rows = self._X[start : start + _TILE]
        n = self.shape[0]
        panel = torch.empty((rows.shape[0], n - start), dtype=self.dtype, device=rows.device)
        for left in range(start, n, 2 * _TILE):
            right = min(left + 2 * _TILE, n)
            panel[:, left - start : right - start] = gram_tile(
                self.kernel, rows, self._X[left:right]
            )
        return panel


def kernel_matmul(
    kernel, X: Tensor, Z: Tensor, V: Tensor, *, memory_budget: float = 2.5e8
) -> Tensor:
    """``K(X, Z) V`` without holding K: row tiles are formed, used and dropped.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    Z : Tensor of shape (m, d)
    V : Tensor of shape (m, k)
    memory_budget : float
        Bytes that a tile may take.

    Returns
    -------
    Tensor of shape (n, k)
        In the dtype of `X`. ``O(n m (d + k))``.
    """
    rows = tile_rows(Z.shape[0], X.dtype, memory_budget)
    return torch.cat([gram_tile(kernel, tile, Z) @ V for tile in X.split(rows)])


def theta_gradient(
    kernel, X: Tensor, left: Tensor, right: Tensor, theta: Tensor, *, memory_budget: float = 2.5e8
) -> Tensor:
    r"""Gradient of :math:`\mathrm{tr}(A^T K_\theta B)` with respect to theta, tile by tile.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    left, right : Tensor of shape (n, k)
        A and B.
    theta : Tensor of shape (n_theta,)

    Returns
    -------
    Tensor of shape (n_theta,)
    """
    theta = theta.detach().requires_grad_()
    total = torch.zeros_like(theta)
    # The backward pass keeps about eight matrices of the tile's size alive.
    rows = tile_rows(X.shape[0], X.dtype, memory_budget / 8)
    for tile, A in zip(X.split(rows), left.split(rows), strict=True):
        with torch.enable_grad():
            form = (A * (gram(kernel, tile, X, theta=theta) @ right)).sum()
            total += torch.autograd.grad(form, theta)[0]
    return total


def tile_rows(n_columns: int, dtype: torch.dtype, memory_budget: float) -> int:
    """Rows of a tile with `n_columns` columns that fits in `memory_budget` bytes; at least one."""
    itemsize = torch.finfo(dtype).bits // 8
    return max(1, math.floor(memory_budget / (itemsize * max(n_columns, 1))))
