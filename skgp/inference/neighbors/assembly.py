"""The sparse matrices of the system of q(u): A of the rows, and Q of their divergences.

With the share s_n of a row in the divergence and P_n selecting its active set,
Q = sum_n s_n P_n' K_n^-1 P_n (:mod:`skgp.inference.neighbors.system`).
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from skgp.inference.neighbors.conditionals import LocalConditionals, Tiles, prior_variance
from skgp.inference.neighbors.defaults import ASSEMBLED


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
    assembly = PriorAssembly(tiles)
    for rows, local in tiles:
        assembly.add(local, share[rows])
    return assembly.prior()


class PriorAssembly:
    """Accumulates a `LocalPrior` over tiles.

    Q is symmetric: of each local inverse the upper triangle is added up, its diagonal halved, and
    the transpose of the sum at the end, in half the time.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.kernel, self.Z = tiles.kernel, tiles.Z
        H = tiles.active.shape[1]
        self._upper = torch.triu_indices(H, H, device=tiles.Z.device)
        self._diagonal = tiles.Z.new_zeros(len(tiles.Z))
        self._mass = torch.zeros_like(self._diagonal)
        self._constant = tiles.Z.new_zeros(())
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._n_pending = 0
        dtype = self._constant.cpu().numpy().dtype
        self._half = sparse.csr_matrix((len(tiles.Z), len(tiles.Z)), dtype=dtype)

    def add(self, local: LocalConditionals, share: Tensor) -> None:
        """Add rows of the shares (b,)."""
        flat, (b, H) = local.active.reshape(-1), local.active.shape
        scaled = share[:, None, None] * local.precision
        diagonal = scaled.diagonal(dim1=-2, dim2=-1)
        self._diagonal.index_add_(0, flat, diagonal.reshape(-1))
        self._mass.index_add_(0, flat, share.repeat_interleave(H))
        self._constant += share @ (local.log_det - H)
        diagonal.mul_(0.5)
        upper = scaled.view(b, H * H).index_select(1, self._upper[0] * H + self._upper[1])
        self._pending.append((local.active, upper))
        self._n_pending += upper.numel()
        if self._n_pending > ASSEMBLED:
            self._flush()

    def prior(self) -> LocalPrior:
        """What was added so far."""
        self._flush()
        # Conversions sort the columns of each row, without which sums are slow.
        lower = self._half.T.tocsr()
        matrix = lower + lower.T.tocsr()
        arrays = matrix.indptr, matrix.indices, matrix.data
        starts, columns, values = (torch.from_numpy(array).to(self.Z.device) for array in arrays)
        Q = compressed_rows(starts, columns, values, matrix.shape)
        sums = self._diagonal.clone(), self._mass.clone(), self._constant.clone()
        return LocalPrior(Q, *sums, prior_variance(self.kernel, self.Z))

    def _flush(self) -> None:
        if not self._pending:
            return
        pending = zip(*self._pending, strict=True)
        active, upper = (torch.cat(part).cpu().numpy() for part in pending)
        self._pending, self._n_pending = [], 0
        self._half = self._half + _scatter(active, upper, len(self.Z))


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


class RowWeights:
    """The sparse matrix A (n, M) of the weights a_n, and the variances (n,) of f given u.

    Compressed rows of A and of its transpose: products cost 2 n H c flops, hardly more for ten
    columns than for one, where gathering and scattering costs ten times as much.
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

    def last(self, n: int) -> "RowWeights":
        """Those of the last n rows."""
        active, weights = (x.view(len(self), -1)[-n:] for x in (self._rows[1], self._values))
        return RowWeights(active.long(), weights, self.variance[-n:], self.shape[1])

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
    """A sparse matrix of given row starts (n + 1,), columns and values (nnz,).

    Indices are int32 where they fit: products of torch convert int64 first, which takes as long.
    """
    short = _index_type(max(len(values), *shape))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # said to be in beta
        return torch.sparse_csr_tensor(
            starts.to(short), columns.to(short), values, shape, check_invariants=False
        )


def multiply(matrix: Tensor, V: Tensor) -> Tensor:
    """A sparse matrix (n, m) times V (m, c); one column takes half the time as a vector."""
    return (matrix @ V[:, 0])[:, None] if V.shape[1] == 1 else matrix @ V


def _index_type(n_values: int) -> torch.dtype:
    return torch.int32 if n_values <= 2**31 - 1 else torch.int64
