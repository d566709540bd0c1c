r"""Gaussian posteriors of several latent functions that share their features.

.. math:: f_j(x) = o_j + \phi(x)^T w_j, \qquad w_j \sim N(\mu_j, C_j C_j^T), \qquad j = 1, \dots, c

independent of each other: the one-vs-rest columns of a classifier. The features are generated once
for all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skgp.inference.weights.design import Basis, StreamedDesign, block_width, row_chunks
from skgp.inference.weights.gaussian import WeightGaussian
from skgp.linalg.tensor_state import TensorState

__all__ = ["ClassifierPosterior"]

_TILE_BYTES = 2**27  # of features and of products with roots held at once


class ClassifierPosterior(TensorState):
    r"""Means and variances of c latent functions at new rows.

    Parameters
    ----------
    basis : Basis
    weights : Tensor of shape (m, c)
        :math:`\mu_j`.
    offset : Tensor of shape (c,)
        :math:`o_j`.
    covariance : sequence of c WeightGaussian, optional
        Their factors :math:`C_j`, of the same number k of dense columns; their means are not used.
        Without it the weights are known exactly, and every variance is 0.

    Raises
    ------
    ValueError
        If the shapes do not fit together.

    Notes
    -----
    State, and pickle: the basis, ``8 m c`` bytes of weights, ``8 (m - k) c`` of standard deviations
    and ``4 m k c`` of dense columns, which are rounded to float32 (a relative error of 1e-7 in a
    variance). With m = 4096 and ten columns: .7 MB diagonal, 17 MB chevron of 100 columns, 670 MB
    full.

    Everything is evaluated in float64. ``O(p m c)`` for the means of p rows, ``O(p m c (k + 1))``
    with variances; memory beside the state and the basis' own: 128 MiB of tiles and one block of
    dense columns in float64.
    """

    def __init__(
        self,
        basis: Basis,
        weights: Tensor,
        offset: Tensor,
        covariance: Sequence[WeightGaussian] | None = None,
    ):
        m, c = basis.n_features, offset.shape[0]
        if weights.shape != (m, c):
            raise ValueError(f"weights must have shape ({m}, {c}); got {tuple(weights.shape)}.")
        self.basis = basis
        self.weights = weights.double()
        self.offset = offset.double()
        self.tail_std: Tensor | None = None  # (m - k, c)
        self.columns: Tensor | None = None  # (c, m, k)
        if covariance is not None:
            shapes = {(q.n_features, q.n_dense) for q in covariance}
            if len(covariance) != c or len(shapes) != 1 or next(iter(shapes))[0] != m:
                raise ValueError(
                    f"covariance must hold {c} Gaussians over {m} weights with the same number of "
                    f"dense columns; got {len(covariance)} of (weights, dense columns) "
                    f"{sorted(shapes)}."
                )
            self.tail_std = torch.stack([q.tail_std.double() for q in covariance], dim=1)
            self.columns = torch.stack([q.columns.float() for q in covariance])

    def mean(self, X: Tensor) -> Tensor:
        """Posterior means of the latent functions, shape (p, c), float64."""
        design = StreamedDesign(self.basis, X, memory_budget=0)
        return design.matmul(self.weights.to(X.device)) + self.offset.to(X.device)

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments of the latent functions, each of shape (p, c), float64."""
        if self.columns is None or self.tail_std is None:
            mean = self.mean(X)
            return mean, torch.zeros_like(mean)
        X = X.double()
        c, _, k = self.columns.shape
        mean = torch.empty(X.shape[0], c, dtype=torch.float64, device=X.device)
        variance = torch.empty_like(mean)
        width = max(block_width(self.basis, b) for b in range(self.basis.n_blocks))
        row_bytes = 8 * (2 * width + c * (2 * k + 2))
        for rows in row_chunks(X.shape[0], row_bytes, _TILE_BYTES, max(1, X.shape[0])):
            mean[rows], variance[rows] = self._moments(X[rows], self.tail_std, self.columns)
        return mean, variance

    def _moments(self, X: Tensor, tail_std: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Moments at the rows of one tile, the features of a block held at a time."""
        c, m, k = roots.shape
        mean = self.offset.to(X.device).repeat(len(X), 1)
        variance = torch.zeros_like(mean)
        dense = mean.new_zeros(c, len(X), k)  # Phi times the dense columns
        for block in range(self.basis.n_blocks):
            part = self.basis.block_slice(block)
            F = self.basis.features(X, block)
            mean += F @ self.weights[part].to(X.device)
            # Rows of this block in the lower triangular columns: those after its end are 0.
            stop = min(part.stop, k)
            for j in range(c if stop else 0):
                dense[j, :, :stop] += F @ roots[j, part, :stop].to(X)
            first = max(part.start, k)  # a block may straddle the dense columns and the tail
            if first < part.stop:
                std = tail_std[first - k : part.stop - k].to(X.device)
                variance += F[:, first - part.start :].square() @ std.square()
        return mean, variance + dense.square().sum(2).mT
