"""Sums over rows of small matrices that stand at their active inducing points: sparse ones.

Of symmetric matrices upper triangles are added up, their diagonals halved, and the transpose of the
sum at the end, in half the time. Neighbours are put in the order of their numbers first, so that
the sum is upper triangular and has half of the entries. Sums of blocks of rows add (`PriorSums`).
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.neighbors.conditionals import LocalConditionals, Tiles, prior_variance
from skgp.linalg.runtime import tile_rows


@dataclass(frozen=True)
class LocalPrior:
    """The weighted sum of the local divergences, as a function of q(u)."""

    matrix: Tensor  # (M, M) sparse; Q
    diagonal: Tensor  # (M,); of Q
    mass: Tensor  # (M,); sums of the shares of the rows that an inducing point is active for
    constant: Tensor  # (); sum_n s_n (log |K_n| - H)
    variance: Tensor  # (M,); of u under the prior

    def multiply(self, V: Tensor) -> Tensor:
        """Q V, shape (M, c), for V (M, c)."""
        return multiply(self.matrix, V)

    def divergence(self, mean: Tensor, var: Tensor) -> Tensor:
        """sum_n s_n KL(q(u_In) || p(u_In)) over all latent functions, in nats; mean, var (M, c)."""
        quadratic = (mean * self.multiply(mean)).sum() + (self.diagonal @ var).sum()
        return 0.5 * (quadratic - (self.mass @ var.log()).sum() + self.constant * mean.shape[1])


def local_prior(tiles: Tiles, share: Tensor) -> LocalPrior:
    """The divergences of rows whose shares (n,) are given."""
    assembly = assembly_of(tiles)
    for rows, local in tiles:
        assembly.add(local, share[rows])
    return assembly.prior()


@dataclass(frozen=True)
class PriorSums:
    """A `LocalPrior` of some rows, as sums that add over blocks of rows; on the host."""

    half: sparse.csr_matrix  # (M, M); the upper triangle of Q, its diagonal halved
    columns: Tensor  # (M, 2); `diagonal` and `mass`
    constant: Tensor

    def __add__(self, other: "PriorSums") -> "PriorSums":
        half = self.half + other.half
        return PriorSums(half, self.columns + other.columns, self.constant + other.constant)

    def prior(self, kernel, Z: Tensor) -> LocalPrior:
        """Of these rows, where Z (M, d) is and in its dtype."""
        diagonal, mass = self.columns.to(Z).unbind(1)
        Q = symmetric_matrix(self.half, Z)
        return LocalPrior(Q, diagonal, mass, self.constant.to(Z), prior_variance(kernel, Z))


class TriangleSum:
    """Adds up symmetric matrices at the active points of rows, upper triangles alone."""

    def __init__(self, Z: Tensor, n_neighbors: int) -> None:
        self._M = len(Z)
        self._i, self._j = torch.triu_indices(n_neighbors, n_neighbors, device=Z.device)
        self._halved = torch.where(self._i == self._j, 0.5, 1.0).to(Z)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._n_pending = 0
        on_host = _HalfTable if len(Z) <= defaults.TABLE_POINTS else _HalfOnHost
        make = on_host if Z.device.type == "cpu" else _HalfOnDevice
        self._half: _HalfTable | _HalfOnHost | _HalfOnDevice = make(Z)

    def add(self, active: Tensor, matrices: Tensor) -> None:
        """Add matrices (b, H, H) at points `active` (b, H), in the order of their numbers."""
        b, H = active.shape
        upper = matrices.view(b, H * H).index_select(1, self._i * H + self._j)
        self._add(active, upper.mul_(self._halved))

    def add_outer(self, active: Tensor, weights: Tensor, scale: Tensor) -> None:
        """Add scale (b,) times a a' of weights a (b, H)."""
        scaled = scale[:, None] * weights
        left, right = scaled.index_select(1, self._i), weights.index_select(1, self._j)
        self._add(active, left.mul_(right).mul_(self._halved))

    def matrix(self) -> Tensor:
        """The sum (M, M) so far, sparse."""
        self._flush()
        return compressed_rows(*self._half.symmetric(), (self._M, self._M))

    def half(self) -> sparse.csr_matrix:
        """The upper triangle so far, its diagonal halved, in float64 on the host."""
        self._flush()
        return self._half.upper().astype(np.float64)

    def _add(self, active: Tensor, upper: Tensor) -> None:
        self._pending.append((active, upper))
        self._n_pending += upper.numel()
        if self._n_pending > tile_rows(
            defaults.ENTRY_BYTES, defaults.ENTRY_BYTES * defaults.ASSEMBLED
        ):
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        active, upper = map(torch.cat, zip(*self._pending, strict=True))
        self._pending, self._n_pending = [], 0
        self._half.add(active, upper)


class PriorAssembly:
    """Accumulates a `LocalPrior` of points Z (M, d) over tiles of rows."""

    def __init__(self, Z: Tensor, kernel, n_neighbors: int) -> None:
        self.kernel, self.Z = kernel, Z
        self._matrix = TriangleSum(Z, n_neighbors)
        self._diagonal = Z.new_zeros(len(Z))
        self._mass = torch.zeros_like(self._diagonal)
        self._constant = Z.new_zeros(())

    def add(self, local: LocalConditionals, share: Tensor) -> None:
        """Add rows of the shares (b,)."""
        H = local.active.shape[1]
        active, order = local.active.sort(1)
        flat = active.reshape(-1)
        scaled = share[:, None, None] * local.precision
        if not torch.equal(active, local.active):
            scaled = scaled.gather(1, order[:, :, None].expand_as(scaled))
            scaled = scaled.gather(2, order[:, None].expand_as(scaled))
        diagonal = scaled.diagonal(dim1=-2, dim2=-1)
        self._diagonal.index_add_(0, flat, diagonal.reshape(-1))
        self._mass.index_add_(0, flat, share.repeat_interleave(H))
        self._constant += share @ (local.log_det - H)
        self._matrix.add(active, scaled)

    def prior(self) -> LocalPrior:
        """What was added so far."""
        Q = self._matrix.matrix()
        sums = self._diagonal.clone(), self._mass.clone(), self._constant.clone()
        return LocalPrior(Q, *sums, prior_variance(self.kernel, self.Z))

    def sums(self) -> PriorSums:
        """The same, to be added to those of other rows."""
        columns = torch.stack([self._diagonal, self._mass], 1).cpu().double()
        return PriorSums(self._matrix.half(), columns, self._constant.cpu().double())


def assembly_of(tiles: Tiles) -> PriorAssembly:
    """Nothing added yet."""
    return PriorAssembly(tiles.Z, tiles.kernel, tiles.active.shape[1])


def symmetric_matrix(half: sparse.csr_matrix, like: Tensor) -> Tensor:
    """The sparse matrix of a half, where a tensor is and in its dtype."""
    starts, columns, values = _symmetric(half)
    parts = (starts.to(like.device), columns.to(like.device), values.to(like))
    return compressed_rows(*parts, half.shape)


def _symmetric(half: sparse.csr_matrix) -> tuple[Tensor, Tensor, Tensor]:
    """A half and its transpose: starts (M + 1,) of the rows, columns and values (nnz,)."""
    # Sums are slow unless the columns of each row are sorted, as a conversion does.
    half.sort_indices()
    matrix = half + half.T.tocsr()
    starts, columns, values = map(torch.from_numpy, (matrix.indptr, matrix.indices, matrix.data))
    return starts, columns, values


class _HalfOnHost:
    """The sum of upper triangles of local inverses, diagonals halved, by SciPy."""

    def __init__(self, Z: Tensor) -> None:
        self._sum = sparse.csr_matrix((len(Z), len(Z)), dtype=Z[:0].numpy().dtype)

    def add(self, active: Tensor, upper: Tensor) -> None:
        """Add triangles (n, H (H + 1) / 2) of the points `active` (n, H)."""
        self._sum = self._sum + _scatter(active.numpy(), upper.numpy(), self._sum.shape[0])

    def upper(self) -> sparse.csr_matrix:
        """The sum."""
        return self._sum

    def symmetric(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sum and its transpose: starts (M + 1,) of the rows, columns and values (nnz,)."""
        return _symmetric(self._sum)


class _HalfTable:
    """The same of few points, whose pairs have a place each in a dense matrix."""

    def __init__(self, Z: Tensor) -> None:
        self._table = Z.new_zeros(len(Z), len(Z))

    def add(self, active: Tensor, upper: Tensor) -> None:
        """As of `_HalfOnHost`."""
        i, j = torch.triu_indices(*(active.shape[1],) * 2)
        place = (active * len(self._table)).index_select(1, i).add_(active.index_select(1, j))
        self._table.view(-1).scatter_add_(0, place.view(-1), upper.reshape(-1))

    def upper(self) -> sparse.csr_matrix:
        """As of `_HalfOnHost`."""
        return sparse.csr_matrix(self._table.numpy())

    def symmetric(self) -> tuple[Tensor, Tensor, Tensor]:
        """As of `_HalfOnHost`."""
        return _symmetric(self.upper())


class _HalfOnDevice:
    """The same where a GPU sorts the entries."""

    def __init__(self, Z: Tensor) -> None:
        self._M = len(Z)
        self._key = torch.empty(0, dtype=torch.int64, device=Z.device)  # row M + column, rising
        self._values = Z.new_empty(0)

    def add(self, active: Tensor, upper: Tensor) -> None:
        """As of `_HalfOnHost`."""
        row, column = torch.triu_indices(*(active.shape[1],) * 2, device=active.device)
        key = (active[:, row] * self._M + active[:, column]).reshape(-1)
        self._key, self._values = self._summed(key, upper.reshape(-1))

    def upper(self) -> sparse.csr_matrix:
        """As of `_HalfOnHost`."""
        key, values = self._key.cpu().numpy(), self._values.cpu().numpy()
        return sparse.csr_matrix((values, (key // self._M, key % self._M)), (self._M, self._M))

    def symmetric(self) -> tuple[Tensor, Tensor, Tensor]:
        """As of `_HalfOnHost`."""
        M = self._M
        key, values = self._summed(self._key % M * M + self._key // M, self._values)
        counts = (key // M).bincount(minlength=M).cumsum(0)
        return torch.cat([counts.new_zeros(1), counts]), key % M, values

    def _summed(self, key: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The sum so far and more entries (k,)."""
        key, place = torch.cat([self._key, key]).unique(return_inverse=True)
        values = torch.cat([self._values, values])
        return key, values.new_zeros(len(key)).index_add_(0, place, values)


def _scatter(active: np.ndarray, upper: np.ndarray, M: int) -> sparse.csr_matrix:
    """sum_n P_n' B_n P_n for active (n, H) and the upper triangles B (n, H (H + 1) / 2), by rows.

    As the product of the P_n' with the B_n P_n, all n stacked: four times faster than sorting the
    entries.
    """
    n, H = active.shape
    indices = active.astype(np.int32)  # ASSEMBLED is far below 2^31
    ones: np.ndarray = np.ones(n * H, dtype=upper.dtype)
    ends = np.arange(n * H + 1, dtype=np.int32)
    select = sparse.csr_matrix((ones, indices.reshape(-1), ends), shape=(n * H, M))
    columns = indices[:, np.triu_indices(H)[1]].reshape(-1)
    starts = np.zeros(n * H + 1, dtype=np.int32)
    np.cumsum(np.tile(np.arange(H, 0, -1), n), out=starts[1:])
    stacked = sparse.csr_matrix((upper.reshape(-1), columns, starts), shape=(n * H, M))
    return select.T.tocsr() @ stacked


def compressed_rows(
    starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """A sparse matrix of given row starts (n + 1,), columns and values (nnz,).

    Indices are int32 where they fit: products of torch convert int64 first, which takes as long.
    """
    short = index_type(max(len(values), *shape))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # said to be in beta
        return torch.sparse_csr_tensor(
            starts.to(short), columns.to(short), values, shape, check_invariants=False
        )


def multiply(matrix: Tensor, V: Tensor) -> Tensor:
    """A sparse matrix (n, m) times V (m, c); one column takes half the time as a vector."""
    return (matrix @ V[:, 0])[:, None] if V.shape[1] == 1 else matrix @ V


def index_type(n_values: int) -> torch.dtype:
    """Of indices of so many values."""
    return torch.int32 if n_values <= 2**31 - 1 else torch.int64


#: What needs less memory.
ROOM = "Use a smaller n_neighbors or n_inducing"


def shared_entries(active: Tensor, M: int) -> float:
    """Entries of Q about: the pairs of M inducing points that share a row of `active` (n, H).

    Counted at some inducing points.
    """
    rows = active.cpu().numpy()
    n, H = rows.shape
    ends = np.arange(0, n * H + 1, H)
    member = sparse.csr_matrix((np.ones(n * H, np.float32), rows.reshape(-1), ends), (n, M))
    some = np.arange(0, M, -(-M // defaults.COUNTED_POINTS))
    return M * (member.tocsc()[:, some].T @ member).nnz / len(some)
