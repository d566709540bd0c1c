"""Predictions of a QSGP over its basis functions, streamed: nothing of size n x m is held."""

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.variational import WeightGaussian

__all__ = ["predict_latent"]


@torch.no_grad()
def predict_latent(
    basis: StochasticBasis,
    q: WeightGaussian,
    X: Tensor,
    theta: Tensor | None = None,
    *,
    return_var: bool = True,
    tile_rows: int = 4096,
) -> tuple[Tensor, Tensor | None]:
    r"""Mean and variance of :math:`f(x) = \phi(x)^T w` under q(w).

    Parameters
    ----------
    basis : StochasticBasis
    q : WeightGaussian
        Over the m weights.
    X : Tensor of shape (n, d)
    theta : Tensor, optional
        Log hyper-parameters.
    return_var : bool, default=True
        False takes the fast path and returns None for the variance.
    tile_rows : int, default=4096
        Rows at a time.

    Returns
    -------
    mean : Tensor of shape (n,)
    variance : Tensor of shape (n,) or None
        Of the latent function, without noise. :math:`O(n m (d + k))` for k dense columns; memory
        O(tile_rows (block + k)).
    """
    means, variances = [], []
    for rows in X.split(tile_rows):
        accumulator = q.accumulator(len(rows)) if return_var else None
        mean = torch.zeros(len(rows), dtype=q.mean.dtype)
        for start in range(0, basis.n_features, basis.block_size):
            block = slice(start, min(start + basis.block_size, basis.n_features))
            Phi = basis.features(rows, torch.arange(block.start, block.stop), theta)
            if accumulator is None:
                mean += Phi @ q.mean[block]
            else:
                accumulator.add(Phi, block)
        means.append(mean if accumulator is None else accumulator.mean())
        if accumulator is not None:
            variances.append(accumulator.variance())
    return torch.cat(means), torch.cat(variances) if return_var else None
