r"""Covariance between rows that are predicted from different neighbours.

Each row b estimates f by :math:`a_b^T v_{I_b}` from the values v at its own active points. With
:math:`\tilde A` the sparse rows a over the union U of the active points, and
:math:`\operatorname{Cov}(v) = K_{UU} + \operatorname{diag}(\epsilon)` under the prior, the errors
:math:`f - \tilde A v` have the covariance

.. math:: J = K_{BB} - \tilde A K_{UB} - (\tilde A K_{UB})^T
              + \tilde A (K_{UU} + \operatorname{diag}(\epsilon)) \tilde A^T,

which is positive semi-definite by construction, has the variances of rows predicted one by one on
its diagonal, and is the same for two rows whatever rows come with them.
"""

import torch
from torch import Tensor

from skgp.kernels.gram import gram

__all__ = ["joint_errors", "quadratic_form", "sparse_rows"]

_TILE = 2048  # points whose covariances with the union are in memory at once


def sparse_rows(position: Tensor, weights: Tensor, n_columns: int) -> Tensor:
    """Matrix (n, n_columns) with `weights` (n, H) in the columns `position` (n, H); sparse."""
    n, H = position.shape
    rows = torch.arange(n, device=position.device).repeat_interleave(H)
    index = torch.stack([rows, position.reshape(-1)])
    shape = (n, n_columns)
    return torch.sparse_coo_tensor(index, weights.reshape(-1), shape, check_invariants=False)


def quadratic_form(A: Tensor, diagonal: Tensor) -> Tensor:
    """A diag(v) A' (n, n), symmetric, of a sparse A (n, m) and v (m,)."""
    product = torch.sparse.mm(A, diagonal[:, None] * A.to_dense().T)
    return 0.5 * (product + product.T)


def joint_errors(kernel, X: Tensor, points: Tensor, A: Tensor, diagonal: Tensor) -> Tensor:
    r"""J above.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    points : Tensor of shape (m, d)
        U.
    A : sparse Tensor of shape (n, m)
        :math:`\tilde A`.
    diagonal : Tensor of shape (m,)
        :math:`\epsilon`.

    Returns
    -------
    Tensor of shape (n, n)
        Symmetric. ``O(m (m + n) (d + H) + n^2)`` time, ``O(n (m + n))`` memory.
    """
    cross = torch.sparse.mm(A, gram(kernel, X, points).mT)
    inner = [torch.sparse.mm(A, gram(kernel, points, tile)) for tile in points.split(_TILE)]
    inner = torch.sparse.mm(A, torch.cat(inner, dim=1).T)
    J = gram(kernel, X) - cross - cross.T + inner + quadratic_form(A, diagonal)
    return 0.5 * (J + J.T)
