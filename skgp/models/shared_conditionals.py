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
        parts = [self._tile(rows) for rows in X.split(max(1, _SHARED_ENTRIES // len(self.Z)))]
        weights, variance = map(torch.cat, zip(*parts, strict=True))
        return weights, variance

    def _tile(self, X: Tensor) -> tuple[Tensor, Tensor]:
        cross = gram(self.kernel, self.Z, X)  # (M, n)
        weights = torch.cholesky_solve(cross, self.factor)
        variance = gram_diag(self.kernel, X) - (weights * cross).sum(0)
        return weights.T, variance.clamp_min(0.0)
