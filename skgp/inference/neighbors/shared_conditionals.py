"""Conditionals of a Gaussian process on values at points that all rows share."""

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky

__all__ = ["SharedConditionals"]

_SHARED_ENTRIES = 2**22  # of covariances between a tile of rows and all points


class SharedConditionals:
    """Conditionals of rows for all of which every point is active: one factor for all rows.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (M, d)
    noise : Tensor of shape (M,)
        Variances of the values at Z beside those of f.
    """

    def __init__(self, kernel, Z: Tensor, noise: Tensor) -> None:
        self.kernel, self.Z = kernel, Z
        K = gram(kernel, Z)
        K.diagonal().add_(noise)
        self.factor = jittered_cholesky(K).factor  # (M, M)

    def __call__(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (n, M) and the variance (n,) of f given the values; ``O(n M (M + d))``."""
        psi, variance = self.features(X)
        return torch.linalg.solve_triangular(self.factor.T, psi.T, upper=True).T, variance

    def features(self, X: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\psi = L^{-1} k`, (n, M), the weights of :math:`L^{-1} u`; and the variance."""
        parts = []
        for rows in X.split(max(1, _SHARED_ENTRIES // len(self.Z))):
            cross = gram(self.kernel, rows, self.Z).mT  # (M, n)
            psi = torch.linalg.solve_triangular(self.factor, cross, upper=False).T
            left = gram_diag(self.kernel, rows) - psi.square().sum(1)
            parts.append((psi, left.clamp_min(0.0)))
        psi, variance = map(torch.cat, zip(*parts, strict=True))
        return psi, variance
