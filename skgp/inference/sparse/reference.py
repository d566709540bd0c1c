r"""Coordinates of q(w) in which its optimum is well conditioned.

Beside a reference Gaussian :math:`N(a_0, C_0 C_0^T)`, near the optimum sought, the posterior is

.. math:: a = a_0 + C_0 \alpha, \qquad R = C_0 T, \qquad T \text{ lower triangular with diagonal }
          e^{t_{ii}} .

At the reference, :math:`(\alpha, T) = (0, I)`, the Hessian of the negative evidence bound in
:math:`\alpha` is the identity if the reference is its optimum, whatever the data: what natural
gradients achieve by another metric, a change of variables achieves for L-BFGS and Adam. Any
positive-definite covariance has exactly one such T, so nothing is lost by a poor reference but
speed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ReferenceGaussian", "kl_from_standard_normal"]


@dataclass(frozen=True)
class ReferenceGaussian:
    r"""The reference :math:`N(a_0, C_0 C_0^T)` of each latent function.

    Attributes
    ----------
    mean : Tensor of shape (M, c)
    root : Tensor of shape (c, M, M)
        Lower Cholesky factors.
    """

    mean: Tensor
    root: Tensor

    def start(self) -> dict[str, Tensor]:
        r"""Coordinates of the reference itself: zeros, `alpha` (M, c), `triangle` (c, M(M+1)/2).

        `triangle` holds the entries of T below the diagonal and the logarithms of those on it, row
        by row.
        """
        M, c = self.mean.shape
        return {
            "alpha": torch.zeros_like(self.mean),
            "triangle": self.mean.new_zeros(c, M * (M + 1) // 2),
        }

    def posterior(self, alpha: Tensor, triangle: Tensor) -> tuple[Tensor, Tensor]:
        """Mean a (M, c) and root R (c, M, M) of the coordinates; O(c M^3)."""
        shift = (self.root @ alpha.mT[:, :, None])[..., 0].mT
        return self.mean + shift, self.root @ self.triangle(triangle)

    def triangle(self, entries: Tensor) -> Tensor:
        """T (c, M, M) of its entries (c, M(M+1)/2)."""
        M = len(self.mean)
        rows, columns = torch.tril_indices(M, M, device=entries.device)
        T = entries.new_zeros(len(entries), M, M)
        T[:, rows, columns] = entries
        return T.diagonal_scatter(T.diagonal(dim1=1, dim2=2).exp(), dim1=1, dim2=2)


def kl_from_standard_normal(mean: Tensor, root: Tensor) -> Tensor:
    r"""Divergence of q(w) from the prior, summed over the latent functions, a scalar in nats.

    .. math:: \mathrm{KL}(N(a, R R^T) \,\|\, N(0, I)) =
              \tfrac12 (a^T a + \|R\|_F^2 - M) - \sum_j \log R_{jj} .
    """
    logs = root.diagonal(dim1=-2, dim2=-1).log().sum()
    return 0.5 * (mean.square().sum() + root.square().sum() - mean.numel()) - logs
