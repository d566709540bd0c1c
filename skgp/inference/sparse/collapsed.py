r"""Gaussian noise: the objectives in which q(u) is already at its optimum.

With :math:`\phi_i = L^{-1} k_u(x_i)`, weights :math:`w_i`, :math:`W = \sum_i w_i`, residual
variances :math:`r_i = k(x_i, x_i) - \phi_i^T \phi_i`, and the statistics

.. math:: G = \sum_i w_i \phi_i \phi_i^T, \qquad b = \sum_i w_i \phi_i y_i,

the least value over q of the negative evidence bound with :math:`\beta` times the divergence is,
for :math:`t = \beta \sigma^2` and :math:`A = G + t I`,

.. math:: \frac{\beta}{2} \Big[ \frac{\sum_i w_i y_i^2 - b^T A^{-1} b}{t} + \log |A| - M \log t
          \Big] + \frac{\sum_i w_i r_i}{2 \sigma^2} + \frac W2 \log 2 \pi \sigma^2,
          \qquad q(w) = N(A^{-1} b,\; t A^{-1});

for :math:`\beta = 1` the bound of Titsias [1]_. FITC [2]_ replaces the noise by
:math:`\Lambda_i = r_i + \sigma^2`; with :math:`G, b` of the weights :math:`w_i / \Lambda_i`,

.. math:: \tfrac12 \Big[ \sum_i w_i \Big( \frac{y_i^2}{\Lambda_i} + \log 2 \pi \Lambda_i \Big)
          - b^T A^{-1} b + \log |A| \Big], \qquad A = I + G, \quad q(w) = N(A^{-1} b, A^{-1}).

References
----------
.. [1] Titsias (2009), Variational learning of inducing variables in sparse Gaussian processes.
.. [2] Snelson and Ghahramani (2006), Sparse Gaussian processes using pseudo-inputs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.sparse import inducing_factor
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky, reverse_cholesky, tri_solve

__all__ = [
    "Statistics",
    "elbo_loss",
    "elbo_posterior",
    "fitc_loss",
    "fitc_posterior",
    "natural_parameters",
    "posterior_from_precision",
    "statistics",
]

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Statistics:
    """Sums over the rows that suffice for Gaussian noise.

    Attributes
    ----------
    gram : Tensor of shape (M, M)
        G.
    projection : Tensor of shape (M, 1)
        b.
    sum_square : Tensor of shape ()
        Of the weighted targets.
    sum_prior : Tensor of shape ()
        Weighted sum of the prior variances k(x, x).
    total : float
        W.
    """

    gram: Tensor
    projection: Tensor
    sum_square: Tensor
    sum_prior: Tensor
    total: float

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.gram + other.gram,
            self.projection + other.projection,
            self.sum_square + other.sum_square,
            self.sum_prior + other.sum_prior,
            self.total + other.total,
        )


def statistics(
    kernel, data: Data, Z: Tensor, theta: Tensor | None = None, *, tile: int = 2**15
) -> Statistics:
    """Sums over the rows, differentiable in `theta` and `Z`; O(n M^2)."""
    L = inducing_factor(kernel, Z, theta)
    prior = data.weighted_sum(gram_diag(kernel, data.X, theta=theta))
    weight = None if data.weight is None else data.weight[:, None]
    y = data.y if weight is None else weight * data.y
    G, b = Z.new_zeros(len(Z), len(Z)), Z.new_zeros(len(Z), 1)
    for rows in torch.arange(len(data)).split(tile):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        K = gram(kernel, data.X[part], Z, theta=theta, method="expand")
        scaled = K if weight is None else weight[part].sqrt() * K
        G = G + _WhitenedGram.apply(scaled, L)
        b = b + tri_solve(L, K.mT @ y[part], upper=False)
    return Statistics(G, b, (y * data.y).sum(), prior, data.total)


class _WhitenedGram(torch.autograd.Function):
    r""":math:`G = \Phi \Phi^T` for :math:`\Phi = L^{-1} K^T`: one product with K in the backward.

    With the symmetrised slope S of G, :math:`dK = \Phi^T S L^{-1}` and
    :math:`dL = -\operatorname{tril}(L^{-T} S G)`.
    """

    @staticmethod
    def forward(ctx, K: Tensor, L: Tensor) -> Tensor:
        Phi = tri_solve(L, K.mT, upper=False)
        G = Phi @ Phi.mT
        ctx.save_for_backward(Phi, L, G)
        return G

    @staticmethod
    def backward(ctx, slope: Tensor):
        Phi, L, G = ctx.saved_tensors
        P = tri_solve(L.mT, slope + slope.mT, upper=True)  # L^-T S
        return Phi.mT @ P.mT, -(P @ G).tril()


def elbo_loss(sums: Statistics, noise: Tensor, *, beta: float = 1.0) -> Tensor:
    """Least negative bound over q, a scalar in nats (module docstring); O(M^3)."""
    M, t = len(sums.gram), beta * noise
    A, b = _raised(sums.gram, t), sums.projection
    L = jittered_cholesky(A).factor
    explained = tri_solve(L, b, upper=False).square().sum()
    fit = (sums.sum_square - explained) / (2 * noise)
    complexity = 0.5 * beta * (2 * L.diagonal().log().sum() - M * t.log())
    unexplained = (sums.sum_prior - sums.gram.trace()) / (2 * noise)
    return fit + complexity + unexplained + 0.5 * sums.total * (_LOG_2PI + noise.log())


def elbo_posterior(sums: Statistics, noise: Tensor, *, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) and root (1, M, M) of the optimal q(w); O(M^3)."""
    t = beta * noise
    return posterior_from_precision(_raised(sums.gram / t, 1.0), sums.projection / t)


def posterior_from_precision(precision: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    r"""Gaussian of natural parameters: :math:`N(P^{-1} b, P^{-1})`.

    Parameters
    ----------
    precision : Tensor of shape (M, M) or (c, M, M)
    projection : Tensor of shape (M, c)

    Returns
    -------
    mean : Tensor of shape (M, c)
    root : Tensor of shape (c, M, M)
        Lower Cholesky factors of the covariances.
    """
    precision = precision.expand(projection.shape[1], *precision.shape[-2:])
    U = reverse_cholesky(precision).factor  # U U^T = P, so that U^-T is the factor of P^-1
    identity = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device).expand_as(U)
    root = tri_solve(U.mT, identity, upper=False)
    mean = root @ (root.mT @ projection.mT[:, :, None])
    return mean[..., 0].mT, root


def fitc_loss(kernel, data: Data, Z: Tensor, noise: Tensor, theta: Tensor | None = None) -> Tensor:
    """Negative log marginal likelihood of FITC, a scalar in nats; O(n M^2)."""
    G, b, variance = _fitc_statistics(kernel, data, Z, noise, theta)
    L = jittered_cholesky(_raised(G, 1.0)).factor
    explained = tri_solve(L, b, upper=False).square().sum()
    rows = data.y[:, 0].square() / variance + variance.log() + _LOG_2PI
    return 0.5 * (data.weighted_sum(rows) - explained) + L.diagonal().log().sum()


def fitc_posterior(kernel, data: Data, Z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) and root (1, M, M) of FITC's q(w); O(n M^2)."""
    G, b, _ = _fitc_statistics(kernel, data, Z, noise, None)
    return posterior_from_precision(_raised(G, 1.0), b)


def natural_parameters(
    kernel, data: Data, Z: Tensor, noise: Tensor, *, beta: float = 1.0, fitc: bool = False
) -> tuple[Tensor, Tensor]:
    """What rows of Gaussian noise add to the precision (M, M) and to precision times mean (M, 1).

    Of the bound with weight `beta` of the divergence, or of FITC; O(n M^2).
    """
    if fitc:
        return _fitc_statistics(kernel, data, Z, noise, None)[:2]
    sums = statistics(kernel, data, Z)
    return sums.gram / (beta * noise), sums.projection / (beta * noise)


def _fitc_statistics(kernel, data: Data, Z: Tensor, noise: Tensor, theta):
    """G, b and the variances (n,) of the targets given w."""
    L = inducing_factor(kernel, Z, theta)
    K = gram(kernel, data.X, Z, theta=theta, method="expand")
    Phi = tri_solve(L, K.mT, upper=False)
    prior = gram_diag(kernel, data.X, theta=theta)
    variance = (prior - Phi.square().sum(0)).clamp_min(0.0) + noise
    weighted = Phi / variance if data.weight is None else Phi * (data.weight / variance)
    return weighted @ Phi.mT, weighted @ data.y, variance


def _raised(A: Tensor, shift: Tensor | float) -> Tensor:
    """A plus `shift` on its diagonal."""
    return A.diagonal_scatter(A.diagonal() + shift)
