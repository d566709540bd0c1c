"""The matrix of the weights that each row gives its inducing points, and products with it."""

import warnings

import torch
from torch import Tensor

from skgp.inference.neighbors.conditionals import Tiles

__all__ = ["RowWeights", "compressed_rows", "multiply", "row_weights"]

_MOST_SHORT = 2**31 - 1


class RowWeights:
    """The sparse matrix A (n, M) of the weights a_n, and what u does not explain of each row.

    Parameters
    ----------
    active : Tensor of int64, shape (n, H)
    weights : Tensor of shape (n, H)
    variance : Tensor of shape (n,)
    n_inducing : int

    Notes
    -----
    Compressed rows of A and of its transpose: products cost ``2 n H c`` flops, hardly more for
    ten columns than for one, where gathering and scattering costs ten times as much.
    """

    def __init__(self, active: Tensor, weights: Tensor, variance: Tensor, n_inducing: int) -> None:
        n, H = active.shape
        self.shape = (n, n_inducing)
        self.variance = variance
        flat = active.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=n_inducing).cumsum(0)
        short = _index_type(n * H)
        starts = torch.arange(0, n * H + 1, H, device=flat.device)
        self._rows = starts.to(short), flat.to(short)
        starts = torch.cat([counts.new_zeros(1), counts])
        self._columns = starts.to(short), (order // H).to(short)
        self._values, self._transposed = weights.reshape(-1), weights.reshape(-1)[order]

    def __len__(self) -> int:
        return self.shape[0]

    def project(self, V: Tensor) -> Tensor:
        """A V, shape (n, c), for V (M, c)."""
        return multiply(compressed_rows(*self._rows, self._values, self.shape), V)

    def project_squares(self, V: Tensor) -> Tensor:
        """(A o A) V, shape (n, c), for V (M, c)."""
        return multiply(compressed_rows(*self._rows, self._values.square(), self.shape), V)

    def collect(self, R: Tensor) -> Tensor:
        """A' R, shape (M, c), for R (n, c)."""
        return multiply(compressed_rows(*self._columns, self._transposed, self.shape[::-1]), R)

    def collect_squares(self, R: Tensor) -> Tensor:
        """(A o A)' R, shape (M, c), for R (n, c)."""
        squares = self._transposed.square()
        return multiply(compressed_rows(*self._columns, squares, self.shape[::-1]), R)


def row_weights(tiles: Tiles) -> RowWeights:
    """The matrix A alone."""
    parts = [(local.weights, local.variance) for _, local in tiles]
    weights, variance = map(torch.cat, zip(*parts, strict=True))
    return RowWeights(tiles.active, weights, variance, len(tiles.Z))


def compressed_rows(
    starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """A sparse matrix of the indices given; of int32 where they fit.

    Products of torch with indices of int64 convert them first, which takes as long.

    Parameters
    ----------
    starts : Tensor of an integer type, shape (n + 1,)
        Where each row begins among the values.
    columns : Tensor of an integer type, shape (nnz,)
    values : Tensor of shape (nnz,)
    shape : (int, int)

    Returns
    -------
    sparse Tensor of shape `shape`
    """
    short = _index_type(max(len(values), *shape))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # said to be in beta
        return torch.sparse_csr_tensor(
            starts.to(short), columns.to(short), values, shape, check_invariants=False
        )


def multiply(matrix: Tensor, V: Tensor) -> Tensor:
    """Product (n, c) of a sparse matrix (n, m) with V (m, c).

    One column takes half the time as a vector.
    """
    return (matrix @ V[:, 0])[:, None] if V.shape[1] == 1 else matrix @ V


def _index_type(n_values: int) -> torch.dtype:
    return torch.int32 if n_values <= _MOST_SHORT else torch.int64
