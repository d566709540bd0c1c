r"""The equations of the best q(u) given a Gaussian factor in f for every row, and their solution.

The bound is quadratic in m where the likelihood of each row is replaced by a site
(:mod:`skgp.inference.natural`). With the share :math:`s_n = \kappa w_n / \sum w` of a row in the
divergence (kappa, the KL weight; w, the weights of the rows), it is stationary where, for every
latent function,

.. math:: \Big[ \sum_n \lambda_n a_n a_n^T + Q \Big] m = \sum_n \eta_n a_n, \qquad
          Q = \sum_n s_n P_n^T K_n^{-1} P_n,

P_n selecting the active set, and for a diagonal S where

.. math:: S_{jj} = \frac{\sum_{n : j \in I_n} s_n}
                        {\sum_n \lambda_n a_{nj}^2 + Q_{jj}}.

No matrix of size M x M is formed but Q, which is sparse: it couples points that are active
together. Neighbourhoods overlap, so that Q holds 2 to 50 times fewer numbers than the n local
inverses (kin40k: 390 a row of the 1024 at H = 32, M = N, and 60 at M = N / 10). Q and the matrix A
of the rows a_n are made in one pass over the conditionals, which need not be kept. Inducing points
that are active for no row keep their prior: mean 0 and the prior variance.

*Full S*: where every inducing point is active for every row, H = M, the bound is that of SVGP with
its divergence multiplied by kappa (:class:`~skgp.inference.natural.FullSystem`). For fewer active
points no such closed form is known: the condition
:math:`\sum_n s_n P_n^T S_{I_n}^{-1} P_n = \sum_n \lambda_n a_n a_n^T + Q` mixes inverses of
overlapping blocks of S, and q is left to gradients.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from skgp.inference.defaults import (
    ASSEMBLED,
    COUNTED_POINTS,
    DENSE_SYSTEM,
    ENTRY_BYTES,
    SHARED_JITTER,
    SPARSE_ENTRY,
)
from skgp.inference.natural import FullSystem, Posterior, Sites
from skgp.inference.neighbors.conditionals import (
    LocalConditionals,
    SharedConditionals,
    Tiles,
    prior_variance,
)
from skgp.kernels.gram import gram_diag
from skgp.linalg.cg import CGResult, block_cg
from skgp.linalg.runtime import require_memory, tile_rows

# ---- the sparse matrices: A of the rows, and Q of their divergences


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
    the transpose of the sum at the end, in half the time. Neighbours are put in the order of their
    numbers first, so that the sum is upper triangular and has half of the entries.
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
        make = _HalfOnHost if self.Z.device.type == "cpu" else _HalfOnDevice
        self._half: _HalfOnHost | _HalfOnDevice = make(tiles.Z)

    def add(self, local: LocalConditionals, share: Tensor) -> None:
        """Add rows of the shares (b,)."""
        b, H = local.active.shape
        active, order = local.active.sort(1)
        flat = active.reshape(-1)
        scaled = share[:, None, None] * local.precision
        scaled = scaled.gather(1, order[:, :, None].expand_as(scaled))
        scaled = scaled.gather(2, order[:, None].expand_as(scaled))
        diagonal = scaled.diagonal(dim1=-2, dim2=-1)
        self._diagonal.index_add_(0, flat, diagonal.reshape(-1))
        self._mass.index_add_(0, flat, share.repeat_interleave(H))
        self._constant += share @ (local.log_det - H)
        diagonal.mul_(0.5)
        upper = scaled.view(b, H * H).index_select(1, self._upper[0] * H + self._upper[1])
        self._pending.append((active, upper))
        self._n_pending += upper.numel()
        if self._n_pending > tile_rows(ENTRY_BYTES, ENTRY_BYTES * ASSEMBLED):
            self._flush()

    def prior(self) -> LocalPrior:
        """What was added so far."""
        self._flush()
        M = len(self.Z)
        Q = compressed_rows(*self._half.symmetric(), (M, M))
        sums = self._diagonal.clone(), self._mass.clone(), self._constant.clone()
        return LocalPrior(Q, *sums, prior_variance(self.kernel, self.Z))

    def _flush(self) -> None:
        if not self._pending:
            return
        active, upper = map(torch.cat, zip(*self._pending, strict=True))
        self._pending, self._n_pending = [], 0
        self._half.add(active, upper)


class _HalfOnHost:
    """The sum of upper triangles of local inverses, diagonals halved, by SciPy."""

    def __init__(self, Z: Tensor) -> None:
        self._sum = sparse.csr_matrix((len(Z), len(Z)), dtype=Z[:0].numpy().dtype)

    def add(self, active: Tensor, upper: Tensor) -> None:
        """Add triangles (n, H (H + 1) / 2) of the points `active` (n, H)."""
        self._sum = self._sum + _scatter(active.numpy(), upper.numpy(), self._sum.shape[0])

    def symmetric(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sum and its transpose: starts (M + 1,) of the rows, columns and values (nnz,)."""
        # Sums are slow unless the columns of each row are sorted, as a conversion does.
        self._sum.sort_indices()
        matrix = self._sum + self._sum.T.tocsr()
        starts, columns, values = map(
            torch.from_numpy, (matrix.indptr, matrix.indices, matrix.data)
        )
        return starts, columns, values


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


# ---- the system


@dataclass(frozen=True)
class LocalSystem:
    """What the bound knows of n rows and M inducing points, for a diagonal S."""

    is_signed: ClassVar[bool] = False
    rows: RowWeights  # A
    prior: LocalPrior
    weight: Tensor | None = None  # (n,) or None
    anchor: Tensor | None = None  # (M, c) or None; precisions of further sites at u itself, at 0

    def __len__(self) -> int:
        return len(self.rows)

    def solve(
        self, sites: Sites, *, start: Tensor | None = None, **options
    ) -> tuple[Posterior, CGResult]:
        """q(u): m by conjugate gradients from `start` (M, c), preconditioned by the diagonal.

        O((n H + nnz Q) c) an iteration; `options` are those of :func:`~skgp.linalg.cg.block_cg`.
        """
        diagonal = self.rows.collect_squares(sites.precision) + self._prior_diagonal()
        inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)
        found = block_cg(
            lambda V: self._matmul(sites.precision, V),
            self.rows.collect(sites.shift),
            preconditioner=lambda R: inverse * R,
            X0=start,
            **options,
        )
        return Posterior(found.solution, self.variance(sites)), found

    def variance(self, sites: Sites) -> Tensor:
        """Diagonal of S, (M, c).

        Where curvatures are negative, a variance stays within ten times that without any data.
        """
        least = self._prior_diagonal()
        precision = self.rows.collect_squares(sites.curvature) + least
        var = self.prior.mass[:, None] / torch.maximum(precision, 0.1 * least)
        known = (self.prior.mass > 0)[:, None]
        return torch.where(known, var, self.prior.variance[:, None])

    def moments(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without prior means."""
        explained = self.rows.project_squares(q.var)
        return self.rows.project(q.mean), self.rows.variance[:, None] + explained

    def divergence(self, q: Posterior) -> Tensor:
        """What the bound subtracts from the expected log-likelihood, in nats."""
        value = self.prior.divergence(q.mean, q.var)
        if self.anchor is None:
            return value
        return value + 0.5 * (self.anchor * (q.mean.square() + q.var)).sum()

    def _matmul(self, precision: Tensor, V: Tensor) -> Tensor:
        """Product of the matrix of the mean, for sites of a precision (n, c), with V (M, c)."""
        product = self.rows.collect(precision * self.rows.project(V)) + self.prior.multiply(V)
        return product if self.anchor is None else product + self.anchor * V

    def _prior_diagonal(self) -> Tensor:
        diagonal = self.prior.diagonal[:, None]
        return diagonal if self.anchor is None else diagonal + self.anchor


def local_system(tiles: Tiles, *, kl_weight: float, weight: Tensor | None = None) -> LocalSystem:
    """The system of n rows of weights (n,); one of weight 2 is the row twice, in both parts.

    kl_weight is kappa: M / H, or 1 for the bound of the paper (eq. 11). O(n H^2 (H + d)).
    """
    return nested_systems([tiles], kl_weight=kl_weight, weight=weight)[0]


def nested_systems(
    parts: list[Tiles], *, kl_weight: float, weight: Tensor | None = None
) -> list[LocalSystem]:
    """Systems of the rows of the first part, of the first two, and so on; at the cost of the last.

    The KL weight is that of all rows: the divergences of fewer weigh less in proportion.
    """
    _require_room(parts)
    each = parts[0].X.new_ones(sum(len(p.X) for p in parts)) if weight is None else weight
    share = kl_weight * each / each.sum()
    assembly, active, weights, variance, systems = PriorAssembly(parts[0]), [], [], [], []
    start = 0
    for tiles in parts:
        for rows, local in tiles:
            assembly.add(local, share[start + rows.start : start + rows.stop])
            weights.append(local.weights)
            variance.append(local.variance)
        active.append(tiles.active)
        start += len(tiles.X)
        joined = torch.cat(active), torch.cat(weights), torch.cat(variance)
        A = RowWeights(*joined, len(tiles.Z))
        given = None if weight is None else weight[:start]
        systems.append(LocalSystem(A, assembly.prior(), given))
    return systems


def _require_room(parts: list[Tiles]) -> None:
    """Refuse rows and inducing points whose sparse matrices do not fit in memory.

    Entries of Q are counted at some inducing points: those that share a row with each.
    """
    active = torch.cat([tiles.active for tiles in parts]).cpu().numpy()
    (n, H), M = active.shape, len(parts[0].Z)
    ends = np.arange(0, n * H + 1, H)
    member = sparse.csr_matrix((np.ones(n * H, np.float32), active.reshape(-1), ends), (n, M))
    some = np.arange(0, M, -(-M // COUNTED_POINTS))
    shared = (member.tocsc()[:, some].T @ member).nnz / len(some)
    needed = SPARSE_ENTRY * (2 * n * H + 2 * M * shared)
    what = f"A system of {n} rows with H={H} neighbours each among M={M} inducing points"
    require_memory(needed, what, "Use a smaller n_neighbors or n_inducing")


def full_system(
    kernel, X: Tensor, Z: Tensor, *, kl_weight: float = 1.0, weight: Tensor | None = None
) -> FullSystem:
    """The system of rows X (n, d), float64, given all of Z (M, d); memory O(n M + c M^2)."""
    n, M = len(X), len(Z)
    what = f"A system of {n} rows and a full covariance of M={M} inducing points"
    require_memory(8.0 * DENSE_SYSTEM * (n * M + M**2), what, "Use a smaller n_inducing")
    given = SharedConditionals(kernel, Z, SHARED_JITTER * gram_diag(kernel, Z))
    return FullSystem(*given.features(X), kl_weight, weight, given.factor)
