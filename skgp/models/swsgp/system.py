r"""The equations of the best q(u) given a Gaussian factor in f for every row, and their solution.

The bound is quadratic in m where the likelihood of each row is replaced by a *site*, the factor
:math:`\exp(-\tfrac12 \lambda_n f_n^2 + \eta_n f_n)`, f without its prior mean. With the share
:math:`s_n = \kappa w_n / \sum w` of a row in the divergence (kappa, the KL weight; w, the weights
of the rows), it is stationary where, for every latent function,

.. math:: \Big[ \sum_n \lambda_n a_n a_n^T + Q \Big] m = \sum_n \eta_n a_n, \qquad
          Q = \sum_n s_n P_n^T K_n^{-1} P_n,

P_n selecting the active set, and for a diagonal S where

.. math:: S_{jj} = \frac{\sum_{n : j \in I_n} s_n}
                        {\sum_n \lambda_n a_{nj}^2 + Q_{jj}}.

No matrix of size M x M is formed but Q, which is sparse: it couples points that are active
together. Neighbourhoods overlap, so that it holds 2 to 50 times fewer numbers than the n local
inverses (kin40k: 390 a row of the 1024 at H = 32, M = N, and 60 at M = N / 10) and is as much
faster to multiply by, the more so with many columns. Q and the matrix A of the rows a_n are made
in one pass over the conditionals, which need not be kept.

Inducing points that are active for no row keep their prior: mean 0 and the prior variance.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from skgp.linalg.cg import CGResult, block_cg
from skgp.models.swsgp.conditionals import LocalConditionals, Tiles, prior_variance

__all__ = [
    "LocalPrior",
    "LocalSystem",
    "Posterior",
    "RowWeights",
    "Sites",
    "local_prior",
    "local_system",
    "nested_systems",
    "row_weights",
]

_CHUNK = 2**25  # entries of local inverses held while Q is assembled: 400 MB with their indices


@dataclass(frozen=True)
class Sites:
    """Gaussian factors in f, one a row and latent function.

    Attributes
    ----------
    precision : Tensor of shape (n, c)
        lambda, not negative; weights of the rows included.
    shift : Tensor of shape (n, c)
        eta, precision times location, the prior mean of f removed.
    curvature : Tensor of shape (n, c)
        What takes the place of lambda in S; differs where a likelihood is not log-concave.
    """

    precision: Tensor
    shift: Tensor
    curvature: Tensor

    @classmethod
    def none(cls, like: Tensor) -> "Sites":
        """Sites that say nothing."""
        zero = torch.zeros_like(like)
        return cls(zero, zero, zero)

    def towards(self, other: "Sites", rate: float) -> "Sites":
        """The part `rate` of the way from these to `other`."""
        return Sites(
            torch.lerp(self.precision, other.precision, rate),
            torch.lerp(self.shift, other.shift, rate),
            torch.lerp(self.curvature, other.curvature, rate),
        )


@dataclass(frozen=True)
class Posterior:
    """q(u) = N(mean (M, c), S): diagonal of S (M, c) and, if S is full, root root' (c, M, M)."""

    mean: Tensor
    var: Tensor
    root: Tensor | None = None


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
        starts = torch.zeros(n_inducing + 1, dtype=torch.int64, device=flat.device)
        starts[1:] = flat.bincount(minlength=n_inducing).cumsum(0)
        self._rows = torch.arange(0, n * H + 1, H, device=flat.device), flat
        self._columns = starts, order // H
        self._values, self._transposed = weights.reshape(-1), weights.reshape(-1)[order]

    def __len__(self) -> int:
        return self.shape[0]

    def project(self, V: Tensor) -> Tensor:
        """A V, shape (n, c), for V (M, c)."""
        return _csr(*self._rows, self._values, self.shape) @ V

    def project_squares(self, V: Tensor) -> Tensor:
        """(A o A) V, shape (n, c), for V (M, c)."""
        return _csr(*self._rows, self._values.square(), self.shape) @ V

    def collect(self, R: Tensor) -> Tensor:
        """A' R, shape (M, c), for R (n, c)."""
        return _csr(*self._columns, self._transposed, self.shape[::-1]) @ R

    def collect_squares(self, R: Tensor) -> Tensor:
        """(A o A)' R, shape (M, c), for R (n, c)."""
        return _csr(*self._columns, self._transposed.square(), self.shape[::-1]) @ R


@dataclass(frozen=True)
class LocalPrior:
    r"""The weighted sum of the local divergences, as a function of q(u).

    Attributes
    ----------
    matrix : sparse Tensor of shape (M, M)
        Q.
    diagonal : Tensor of shape (M,)
        Of Q.
    mass : Tensor of shape (M,)
        Sums of the shares of the rows that an inducing point is active for.
    constant : Tensor of shape ()
        :math:`\sum_n s_n (\log |K_n| - H)`.
    variance : Tensor of shape (M,)
        Of u under the prior.
    """

    matrix: Tensor
    diagonal: Tensor
    mass: Tensor
    constant: Tensor
    variance: Tensor

    def divergence(self, mean: Tensor, var: Tensor) -> Tensor:
        r""":math:`\sum_n s_n KL(q(u_{I_n}) \| p(u_{I_n}))` over all latent functions, in nats.

        Parameters
        ----------
        mean, var : Tensor of shape (M, c)
            Of independent u.

        Returns
        -------
        Tensor of shape ()
        """
        quadratic = (mean * (self.matrix @ mean)).sum() + (self.diagonal @ var).sum()
        return 0.5 * (quadratic - (self.mass @ var.log()).sum() + self.constant * mean.shape[1])


@dataclass(frozen=True)
class LocalSystem:
    """What the bound knows of rows and inducing points, for a diagonal S.

    Attributes
    ----------
    rows : RowWeights
        Of n rows.
    prior : LocalPrior
    weight : Tensor of shape (n,) or None
        Of the rows' likelihoods.
    anchor : Tensor of shape (M, c) or None
        Precisions of further sites at u itself, at 0.
    """

    rows: RowWeights
    prior: LocalPrior
    weight: Tensor | None = None
    anchor: Tensor | None = None

    def solve_mean(
        self,
        sites: Sites,
        *,
        start: Tensor | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
        warn: bool = True,
    ) -> CGResult:
        """Mean of u by conjugate gradients, preconditioned by the diagonal of each column.

        Parameters
        ----------
        sites : Sites
        start : Tensor of shape (M, c), optional
        tol : float
            Relative residual of every column.
        max_iter, warn
            See :func:`~skgp.linalg.cg.block_cg`.

        Returns
        -------
        CGResult
            ``solution`` (M, c); an iteration costs ``O((n H + nnz Q) c)``.
        """
        diagonal = self.rows.collect_squares(sites.precision) + self._prior_diagonal()
        inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)
        return block_cg(
            lambda V: self.matmul(sites.precision, V),
            self.rows.collect(sites.shift),
            preconditioner=lambda R: inverse * R,
            X0=start,
            tol=tol,
            max_iter=max_iter,
            warn=warn,
        )

    def matmul(self, precision: Tensor, V: Tensor) -> Tensor:
        """Product of the matrix of the mean, for sites of a precision (n, c), with V (M, c)."""
        product = self.rows.collect(precision * self.rows.project(V)) + self.prior.matrix @ V
        return product if self.anchor is None else product + self.anchor * V

    def variance(self, sites: Sites) -> Tensor:
        """Diagonal of S, (M, c).

        Where curvatures are negative, a variance stays within ten times that without any data.
        """
        least = self._prior_diagonal()
        precision = self.rows.collect_squares(sites.curvature) + least
        var = self.prior.mass[:, None] / torch.maximum(precision, 0.1 * least)
        known = (self.prior.mass > 0)[:, None]
        return torch.where(known, var, self.prior.variance[:, None])

    def solve(self, sites: Sites, **options) -> tuple[Posterior, CGResult]:
        """q(u); `options` as for `solve_mean`."""
        found = self.solve_mean(sites, **options)
        return Posterior(found.solution, self.variance(sites)), found

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

    def _prior_diagonal(self) -> Tensor:
        diagonal = self.prior.diagonal[:, None]
        return diagonal if self.anchor is None else diagonal + self.anchor


def local_system(tiles: Tiles, *, kl_weight: float, weight: Tensor | None = None) -> LocalSystem:
    """The system of n rows.

    Parameters
    ----------
    tiles : Tiles
        Passed through once; ``budget=0`` spares their memory.
    kl_weight : float
        kappa: M / H, or 1 for the bound of the paper (eq. 11).
    weight : Tensor of shape (n,), optional
        Not negative. A row of weight 2 counts as the same row twice, in both parts of the bound.

    Returns
    -------
    LocalSystem
        ``O(n H^2 (H + d))``.

    Raises
    ------
    ValueError
        If the KL weight is not positive, or no weight is.
    """
    return nested_systems([tiles], kl_weight=kl_weight, weight=weight)[0]


def nested_systems(
    parts: list[Tiles], *, kl_weight: float, weight: Tensor | None = None
) -> list[LocalSystem]:
    """Systems of the rows of the first part, of the first two, and so on.

    Parameters
    ----------
    parts : list of Tiles
        Of one kernel and the same inducing points.
    kl_weight : float
        As in `local_system`, of all rows: the divergences of fewer weigh less in proportion.
    weight : Tensor, optional
        Of all rows, one part after another.

    Returns
    -------
    list of LocalSystem
        At the cost of the last.
    """
    n = sum(len(tiles.X) for tiles in parts)
    share = _shares(parts[0].X.new_ones(n) if weight is None else weight, kl_weight)
    assembly, active, weights, variance, systems = _Assembly(parts[0]), [], [], [], []
    start = 0
    for tiles in parts:
        for rows, local in tiles:
            assembly.add(local, share[start + rows.start : start + rows.stop])
            weights.append(local.weights)
            variance.append(local.variance)
        active.append(tiles.active)
        start += len(tiles.X)
        joined = torch.cat(active), torch.cat(weights), torch.cat(variance)
        matrix = RowWeights(*joined, len(tiles.Z))
        given = None if weight is None else weight[:start]
        systems.append(LocalSystem(matrix, assembly.prior(), given))
    return systems


def row_weights(tiles: Tiles) -> RowWeights:
    """The matrix A alone."""
    parts = [(local.weights, local.variance) for _, local in tiles]
    weights, variance = map(torch.cat, zip(*parts, strict=True))
    return RowWeights(tiles.active, weights, variance, len(tiles.Z))


def local_prior(tiles: Tiles, share: Tensor) -> LocalPrior:
    """The divergences of rows whose shares (n,) are given."""
    assembly = _Assembly(tiles)
    for rows, local in tiles:
        assembly.add(local, share[rows])
    return assembly.prior()


def _shares(weight: Tensor, kl_weight: float) -> Tensor:
    if not kl_weight > 0:
        raise ValueError(
            f"kl_weight must be positive; got {kl_weight!r}. Use 1.0 for the paper's bound or "
            "n_inducing / n_neighbors."
        )
    total = weight.sum()
    if not total > 0:
        raise ValueError("weight must hold a positive number; drop the weights or these rows.")
    return kl_weight * weight / total


class _Assembly:
    """Accumulates a `LocalPrior` over tiles."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self.diagonal = tiles.Z.new_zeros(len(tiles.Z))
        self.mass, self.constant = torch.zeros_like(self.diagonal), tiles.Z.new_zeros(())
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.n_pending = 0
        dtype = self.constant.cpu().numpy().dtype
        self.matrix = sparse.csr_matrix((len(tiles.Z), len(tiles.Z)), dtype=dtype)

    def add(self, local: LocalConditionals, share: Tensor) -> None:
        flat, H = local.active.reshape(-1), local.active.shape[1]
        scaled = share[:, None, None] * local.precision
        self.diagonal.index_add_(0, flat, scaled.diagonal(dim1=-2, dim2=-1).reshape(-1))
        self.mass.index_add_(0, flat, share.repeat_interleave(H))
        self.constant += share @ (local.log_det - H)
        self.pending.append((local.active, scaled))
        self.n_pending += scaled.numel()
        if self.n_pending > _CHUNK:
            self._flush()

    def prior(self) -> LocalPrior:
        self._flush()
        Z = self.tiles.Z
        arrays = self.matrix.indptr, self.matrix.indices, self.matrix.data
        starts, columns, values = (torch.from_numpy(array).to(Z.device) for array in arrays)
        Q = _csr(starts, columns, values, (len(Z), len(Z)))
        variance = prior_variance(self.tiles.kernel, Z)
        sums = self.diagonal.clone(), self.mass.clone(), self.constant.clone()
        return LocalPrior(Q, *sums, variance)

    def _flush(self) -> None:
        if not self.pending:
            return
        active, scaled = (torch.cat(part).cpu().numpy() for part in zip(*self.pending, strict=True))
        self.pending, self.n_pending = [], 0
        self.matrix = self.matrix + _scatter(active, scaled, len(self.tiles.Z))


def _scatter(active: np.ndarray, blocks: np.ndarray, M: int) -> sparse.csr_matrix:
    """sum_n P_n' B_n P_n for active (n, H) and blocks (n, H, H).

    As the product of the P_n' with the B_n P_n, all n stacked: four times faster than sorting the
    n H^2 entries.
    """
    n, H = active.shape
    starts = np.arange(n * H + 1, dtype=np.int32)  # _CHUNK is far below 2^31
    flat = active.reshape(-1).astype(np.int32)
    ones: np.ndarray = np.ones(n * H, dtype=blocks.dtype)
    select = sparse.csr_matrix((ones, flat, starts), shape=(n * H, M))
    columns = np.repeat(flat.reshape(n, H), H, axis=0).reshape(-1)
    stacked = sparse.csr_matrix((blocks.reshape(-1), columns, starts * H), shape=(n * H, M))
    return select.T.tocsr() @ stacked


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # said to be in beta
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)
