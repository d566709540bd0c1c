r"""Least squares with a Gaussian prior whose observations have noise of very unlike size.

Normal equations, :math:`I + \Phi^T D^{-1} \Phi`, lose what is eps times the heaviest observation;
:math:`\Phi \Phi^T + D` loses noise below eps times the prior's variance. The QR factorisation of
the rows themselves loses neither: with columns pivoted and rows sorted by size, each row is in
error by eps relative to its own size [1]_.

References
----------
.. [1] Cox and Higham (1998), Stability of Householder QR factorization for weighted least squares
   problems.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import qr_multiply
from torch import Tensor


class Ridge(NamedTuple):
    """Posterior of w ~ N(0, I) given y = Phi w + N(0, D)."""

    mean: Tensor  # (m,); or (m, t) of t columns of y
    root: Tensor  # (m, m), lower triangular with root root' = S, its diagonal positive
    misfit: Tensor  # (), (y - Phi mean)' D^-1 (y - Phi mean) + mean' mean, summed over columns


def ridge_by_rows(Phi: Tensor, y: Tensor, noise: Tensor) -> Ridge:
    r"""The w of the least :math:`\|D^{-1/2} (y - \Phi w)\|^2 + \|w\|^2`, and its covariance.

    Of Phi (n, m), y (n,) or (n, t), and the diagonal `noise` (n,) of D, positive, all in float64.
    By Householder reflections on the CPU, about ten times the cost of normal equations;
    O((n + m) m^2) time, O((n + m) m) memory.
    """
    std = noise.sqrt().cpu().numpy()
    m = Phi.shape[1]
    rows = np.concatenate([Phi.cpu().numpy() / std[:, None], np.eye(m)])  # (n + m, m)
    scaled = y.cpu().numpy().T / std  # (n,) or (t, n)
    target = np.concatenate([scaled, np.zeros((*scaled.shape[:-1], m))], axis=-1)
    order = np.argsort(-np.abs(rows).max(1), kind="stable")
    half, R, pivots = qr_multiply(rows[order], target[..., order], mode="right", pivoting=True)
    eye, place = np.eye(m), np.argsort(pivots)
    inverse = torch.linalg.solve_triangular(torch.tensor(R), torch.tensor(eye), upper=True)[place]
    mean = inverse @ torch.tensor(half.T)
    upper = torch.linalg.qr(inverse.mT, mode="r").R  # S = (P R^-1)(P R^-1)'
    root = (upper * upper.diagonal().sign()[:, None]).mT.contiguous()
    misfit = torch.tensor(target.T - rows @ mean.numpy()).square().sum()
    return Ridge(*(tensor.to(Phi.device) for tensor in (mean, root, misfit)))
