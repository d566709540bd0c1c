"""Predictions of a QSGP over its basis functions, streamed: nothing of size n x m is held."""

import torch
from torch import Tensor

from skgp.kernels import gram_diag, gram_tile
from skgp.variational import WeightGaussian

from .basis import InducingBasis, StochasticBasis
from .sgd_sampling import take_rows

__all__ = ["augmentation_variance", "predict_latent"]


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


@torch.no_grad()
def augmentation_variance(
    basis: InducingBasis,
    X: Tensor,
    X_train: Tensor,
    noise_variance: float,
    theta: Tensor | None = None,
    *,
    tile_rows: int = 4096,
) -> Tensor:
    r"""Proposition 4: what a basis function centred on the test point adds to the variance.

    .. math:: \frac{\sigma^2 k(x_*, x_*)^2}{k(x_*)^T k(x_*) + \sigma^2 k(x_*, x_*)},
              \qquad k(x_*) = k(X_\text{train}, x_*)

    It vanishes among the training rows and tends to the prior variance far from them. The new
    function's squares are summed over the training rows, whatever the inducing points are.

    Parameters
    ----------
    basis : InducingBasis
    X : Tensor of shape (n_test, d)
    X_train : Tensor or ndarray of shape (n, d)
    noise_variance : float
    theta : Tensor, optional
    tile_rows : int, default=4096
        Training rows at a time.

    Returns
    -------
    Tensor of shape (n_test,)
        Not negative. O(n_test n d).
    """
    X = X.to(basis.dtype)
    norms = torch.zeros(len(X), dtype=basis.dtype)
    for start in range(0, len(X_train), tile_rows):
        rows = torch.arange(start, min(start + tile_rows, len(X_train)))
        tile = take_rows(X_train, rows, basis.dtype)
        norms += gram_tile(basis.kernel, X, tile, theta).square().sum(1)
    prior = gram_diag(basis.kernel, X, theta)
    return noise_variance * prior.square() / (norms + noise_variance * prior)
