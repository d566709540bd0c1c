r"""The divergences of all rows as one quadratic form in the mean of u.

.. math:: Q = \sum_n s_n P_n^T K_n^{-1} P_n,

with the share s_n of a row in the divergence and P_n selecting its active set. Neighbourhoods
overlap, so that Q holds 2 to 50 times fewer numbers than the n local inverses (kin40k: 390 a row
of the 1024 at H = 32, M = N, and 60 at M = N / 10) and is as much faster to multiply by, the more
so with many columns.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from skgp.inference.neighbors.conditionals import LocalConditionals, Tiles, prior_variance
from skgp.inference.neighbors.row_weights import compressed_rows, multiply

__all__ = ["LocalPrior", "PriorAssembly", "local_prior"]

_CHUNK = 2**25  # entries of local inverses held while Q is assembled: 400 MB with their indices


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

    def multiply(self, V: Tensor) -> Tensor:
        """Q V, shape (M, c), for V (M, c)."""
        return multiply(self.matrix, V)

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

    Parameters
    ----------
    tiles : Tiles
        Names kernel and inducing points.
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
        if self._n_pending > _CHUNK:
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
    indices = active.astype(np.int32)  # _CHUNK is far below 2^31
    ones: np.ndarray = np.ones(n * H, dtype=upper.dtype)
    ends = np.arange(n * H + 1, dtype=np.int32)
    select = sparse.csr_matrix((ones, indices.reshape(-1), ends), shape=(n * H, M))
    columns = indices[:, np.triu_indices(H)[1]].reshape(-1)
    starts = np.zeros(n * H + 1, dtype=np.int32)
    np.cumsum(np.tile(np.arange(H, 0, -1), n), out=starts[1:])
    stacked = sparse.csr_matrix((upper.reshape(-1), columns, starts), shape=(n * H, M))
    return select.T.tocsr() @ stacked
