"""Predictions of a QSGP over its basis functions, streamed: nothing of size n x m is held."""

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis


@torch.no_grad()
def product(basis: StochasticBasis, X: Tensor, V: Tensor, theta: Tensor | None = None) -> Tensor:
    r"""Return :math:`\Phi V` (n, q) for V (m, q), block by block, in O(n m (d + q))."""
    out = V.new_zeros(len(X), V.shape[1])
    for indices in torch.arange(basis.n_features).split(basis.block_size):
        out += basis.features(X, indices, theta) @ V[indices]
    return out
