r"""The q(w) that maximises the evidence lower bound of a Gaussian likelihood, in closed form.

Sections 2.1 and 2.2 of Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020). The
notation is that of `skgp.inference.variational.gaussian`; the precision of the exact posterior,
:math:`G = \Phi^T \Phi / \sigma^2 + S`, has no name in the paper.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skgp.inference.variational.gaussian import WeightGaussian
from skgp.linalg.cholesky import reverse_cholesky

__all__ = ["Optimum", "optimal_gaussian", "optimal_std", "posterior_precision"]


class Optimum(NamedTuple):
    """The best q of a structure.

    Attributes
    ----------
    q : WeightGaussian
        The maximiser of the evidence lower bound.
    jitter : float
        What had to be added to the diagonal of the precision; 0.0 almost always.
    """

    q: WeightGaussian
    jitter: float


def posterior_precision(
    gram: Tensor, noise_variance: float | Tensor, prior_precision: Tensor | None = None
) -> Tensor:
    r"""Precision of the exact posterior, :math:`G = \Phi^T \Phi / \sigma^2 + S`.

    Parameters
    ----------
    gram : Tensor of shape (m, m)
        :math:`\Phi^T \Phi`.
    noise_variance : float or Tensor of shape ()
        :math:`\sigma^2`.
    prior_precision : Tensor of shape (m,) or (m, m), optional
        S; the identity by default.

    Returns
    -------
    Tensor of shape (m, m)
        A new tensor.
    """
    if prior_precision is None:
        prior_precision = gram.new_ones(len(gram))
    if prior_precision.ndim == 2:
        return gram / noise_variance + prior_precision
    scaled = gram / noise_variance
    return scaled.diagonal_scatter(scaled.diagonal() + prior_precision)


def optimal_gaussian(
    gram: Tensor,
    projection: Tensor,
    noise_variance: float | Tensor,
    prior_precision: Tensor | None = None,
    *,
    n_dense: int,
) -> Optimum:
    r"""Maximiser of the ELBO of eq. (2) among the q with `n_dense` dense columns.

    .. math:: \mu = G^{-1} \Phi^T y / \sigma^2, \qquad
              \mathcal{L}_\Sigma(C) = \operatorname{tr}(C^T G C) - 2 \sum_r \log c_{rr}.

    The objective of C is a sum over its columns, so column r of any structure is the minimiser over
    its own free entries. A dense column has :math:`c \propto G_{r:,r:}^{-1} e_1`: it is column r of
    the full optimum, for which :math:`C C^T = G^{-1}`. A diagonal one has
    :math:`c_{rr} = G_{rr}^{-1/2}` (Prop. 1). With :math:`G = U U^T`, U upper triangular, the full
    optimum is :math:`U^{-T}`.

    Parameters
    ----------
    gram : Tensor of shape (m, m)
        :math:`\Phi^T \Phi`.
    projection : Tensor of shape (m,)
        :math:`\Phi^T y`.
    noise_variance : float or Tensor of shape ()
        :math:`\sigma^2`.
    prior_precision : Tensor of shape (m,) or (m, m), optional
        S; the identity by default.
    n_dense : int
        0 for the diagonal structure, m for the full one, chevron between them.

    Returns
    -------
    Optimum
        ``q`` and the jitter used.

    Raises
    ------
    ValueError
        If `n_dense` is not in 0..m.
    NotPositiveDefiniteError
        If G cannot be factored.

    Notes
    -----
    :math:`O(m^3 / 3 + m^2 k)`, three matrices of size m x m in memory.
    """
    m = len(gram)
    if not 0 <= n_dense <= m:
        raise ValueError(
            f"n_dense must lie between 0 (diagonal) and the number of features {m} (full); "
            f"got {n_dense}."
        )
    G = posterior_precision(gram, noise_variance, prior_precision)
    U, jitter = reverse_cholesky(G)
    half = torch.linalg.solve_triangular(U, projection[:, None] / noise_variance, upper=True)
    mean = torch.linalg.solve_triangular(U.T, half, upper=False)[:, 0]
    units = torch.eye(m, n_dense, dtype=G.dtype, device=G.device)
    columns = torch.linalg.solve_triangular(U.T, units, upper=False)
    # Prop. 1 for the tail.
    return Optimum(WeightGaussian(mean, columns, optimal_std(G.diagonal()[n_dense:])), jitter)


def optimal_std(precision_diagonal: Tensor) -> Tensor:
    r"""Optimal diagonal entries of C in diagonal columns (Prop. 1).

    .. math:: c_{rr} = G_{rr}^{-1/2} = \sqrt{\sigma^2 / (\phi_r^T \phi_r + \sigma^2 s_{rr})}.

    Parameters
    ----------
    precision_diagonal : Tensor of shape (t,)
        Entries :math:`G_{rr} = \phi_r^T \phi_r / \sigma^2 + s_{rr}` for the columns wanted.

    Returns
    -------
    Tensor of shape (t,)
    """
    return precision_diagonal.rsqrt()
