r"""Posterior covariances of f over the inducing basis Phi = S = K, as functions of new rows.

Each has ``variance(kernel, X, Z)`` and ``covariance(kernel, X, Z)`` for new rows X (p, d) and
training rows Z (n, d); the posterior mean lives in :mod:`.function_space`. Source: Evans and Nair
(2020), "Quadruply stochastic Gaussian processes", section 2.2 and appendix G.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.weights.design import Basis
from skgp.inference.weights.gaussian import WeightGaussian, optimal_gaussian, optimal_std
from skgp.inference.weights.whitened import inducing_parts
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.kernels.operators import kernel_matmul, tile_rows
from skgp.linalg.cholesky import tri_solve
from skgp.linalg.tensor_state import TensorState


class Covariance(Protocol):
    """Posterior covariance of f at new rows X (p, d) of a kernel, given training rows Z (n, d)."""

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,)."""

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""


@dataclass
class DenseCovariance(TensorState):
    r"""Covariance of the exact GP, :math:`k(x, x') - k(x, Z) A^{-1} k(Z, x')`.

    Attributes
    ----------
    factor : Tensor of shape (n, n)
        Lower Cholesky factor of A.
    prior_factor : Tensor of shape (n, n), optional
        Lower Cholesky factor of K. When given, the covariance is that of the basis functions alone,
        :math:`k(x, Z) (K^{-1} - A^{-1}) k(Z, x')` (no augmentation).
    """

    factor: Tensor
    prior_factor: Tensor | None = None

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,). ``O(n^2 p)``."""
        K = gram_tile(kernel, X, Z).T
        root = tri_solve(self.factor, K, upper=False)
        if self.prior_factor is None:
            prior = gram_diag(kernel, X)
        else:
            prior = tri_solve(self.prior_factor, K, upper=False)
            prior = prior.square().sum(0)
        return prior - root.square().sum(0)

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p). ``O(n^2 p + n p^2)``."""
        K = gram_tile(kernel, X, Z).T
        root = tri_solve(self.factor, K, upper=False)
        if self.prior_factor is None:
            return gram_tile(kernel, X, X) - root.T @ root
        prior = tri_solve(self.prior_factor, K, upper=False)
        return prior.T @ prior - root.T @ root


@dataclass
class WeightCovariance(TensorState):
    r"""The paper's covariance of the weights in the basis K, and Proposition 4.

    .. math:: \mathbb V[f(x)] = k(x)^T C C^T k(x)
              + \frac{\sigma^2 k(x, x)^2}{k(x)^T W k(x) + \sigma^2 k(x, x)},

    the second term v(x) where `augment`. W holds the row weights, 1 in the paper. The proposition
    is about one test point. Between two, v is given the prior's correlation,
    :math:`\sqrt{v(x) v(x') / (k(x, x) k(x', x'))}\, k(x, x')`: draws are as smooth as the prior's,
    far from the data they are the prior's, and no variance depends on what is predicted together.

    Attributes
    ----------
    q : WeightGaussian
        Over the n weights; its mean is not used.
    noise : float
    augment : bool
    rows_per_point : float
        Training rows a basis function stands for, by which :math:`k(x)^T k(x)` over Z is scaled.
    row_weight : Tensor of shape (n,), optional
        Diagonal of W.
    """

    q: WeightGaussian
    noise: float
    augment: bool
    rows_per_point: float = 1.0
    row_weight: Tensor | None = None

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,). ``O(n p (1 + k))`` for k dense columns."""
        K = gram_tile(kernel, X, Z)
        return self.q.variance(K) + self._augmentation(kernel, X, K)

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""
        K = gram_tile(kernel, X, Z)
        posterior = self.q.covariance(K)
        if not self.augment:
            return posterior
        scale = (self._augmentation(kernel, X, K) / gram_diag(kernel, X)).sqrt()
        return posterior + scale[:, None] * gram(kernel, X) * scale

    def _augmentation(self, kernel, X: Tensor, K: Tensor) -> Tensor:
        prior = gram_diag(kernel, X)
        if not self.augment:
            return torch.zeros_like(prior)
        squares = K.square()
        squares = squares.sum(1) if self.row_weight is None else squares @ self.row_weight
        squares = self.rows_per_point * squares
        return self.noise * prior.square() / (squares + self.noise * prior)


@dataclass
class PathwiseCovariance(TensorState):
    """Covariance of s posterior draws, kept as functions.

    Draws scatter around the posterior mean, which is solved for and not estimated from them, so the
    divisor is s.

    Attributes
    ----------
    prior : Basis
        Features of the prior draws. What inducing points among them leave of the prior is added.
    prior_weights : Tensor of shape (n_features, s)
    sample_weights : Tensor of shape (n, s)
        :math:`A^{-1} (f_s(Z) + \varepsilon_s)`.
    """

    prior: Basis
    prior_weights: Tensor
    sample_weights: Tensor

    def deviations(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Draws minus the posterior mean, shape (p, s)."""
        draws = prior_draws(self.prior, X, self.prior_weights)
        return draws - kernel_matmul(kernel, X, Z, self.sample_weights)

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,), with a relative standard error of ``sqrt(2 / s)``."""
        return self.deviations(kernel, X, Z).square().mean(1) + sum(
            basis.unexplained(X) for basis in inducing_parts(self.prior)
        )

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p); of rank s and what the prior's features leave."""
        deviations = self.deviations(kernel, X, Z)
        drawn = deviations @ deviations.T / deviations.shape[1]
        return drawn + sum(basis.unexplained_covariance(X) for basis in inducing_parts(self.prior))


def weight_covariance(
    kernel,
    X: Tensor,
    noise: float,
    sample_weight: Tensor | None,
    covariance: str,
    n_dense_columns: int,
    augment: bool,
) -> WeightCovariance:
    """The paper's "diagonal" or "chevron" covariance of the weights, Phi = S = K, in closed form.

    Notes
    -----
    "diagonal" (Prop. 1) streams ``n^2`` kernel evaluations; "chevron" takes ``O(n^3)`` flops and
    three n x n matrices.
    """
    n = X.shape[0]
    row_weight = X.new_ones(n) if sample_weight is None else sample_weight
    if covariance == "diagonal":
        rows = tile_rows(n, X.dtype, 2.5e8)
        squares = torch.cat(
            [gram_tile(kernel, tile, X).square() @ row_weight for tile in X.split(rows)]
        )
        std = optimal_std(squares / noise + gram_diag(kernel, X))
        q = WeightGaussian.diagonal(torch.zeros_like(std), std)
    else:
        K = gram_tile(kernel, X, X)
        gram = (K * row_weight) @ K
        zero = X.new_zeros(n)
        q, _ = optimal_gaussian(gram, zero, noise, K, n_dense=min(n_dense_columns, n))
    return WeightCovariance(q, noise, augment, row_weight=sample_weight)


def perturbed_targets(
    prior, X: Tensor, row_noise: float | Tensor, n_samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weights of prior draws (n_features, s) and the noisy values of the draws at X (n, s)."""
    weights = torch.randn(prior.n_features, n_samples, generator=generator, dtype=X.dtype)
    noise = torch.randn(X.shape[0], n_samples, generator=generator, dtype=X.dtype)
    std = torch.as_tensor(row_noise, dtype=X.dtype, device=X.device).sqrt()
    noise = noise.to(X.device) * (std[:, None] if std.ndim else std)
    weights = weights.to(X.device)
    return weights, prior_draws(prior, X, weights) + noise


def leave_one_out_z2(weights: Tensor, sample_weights: Tensor) -> float:
    r"""Mean squared standardised leave-one-out residual, from draws alone.

    :math:`\beta_s = A^{-1}(f_s(X) + \varepsilon_s)` has covariance :math:`A^{-1}`, so
    :math:`\hat d_i = \overline{\beta_{si}^2}` estimates :math:`d_i = (A^{-1})_{ii}`; the
    leave-one-out residual of row i is :math:`\alpha_i / d_i` and its variance :math:`1 / d_i`
    (Rasmussen and Williams, eqs. 5.10-5.12). As :math:`E[1 / \hat d_i] = \frac{s}{s - 2} / d_i`,

    .. math:: z^2 = \frac{s - 2}{s}\, \frac1n \sum_i \alpha_i^2 / \hat d_i

    is unbiased. Above one the model is overconfident. A common factor on all variances fits the
    leave-one-out residuals best at this value; the ratio of means
    :math:`\overline{\alpha^2} / \overline{d}` weighs rows by their precision instead, which
    misleads where the noise is not the same everywhere.

    Parameters
    ----------
    weights : Tensor of shape (n,)
        :math:`\alpha = A^{-1} y`, up to a factor a row that `sample_weights` shares.
    sample_weights : Tensor of shape (n, s)
        :math:`\beta`. With fewer than three draws, or a constant y, the result is 1.
    """
    s = sample_weights.shape[1]
    if s < 3 or not bool(weights.any()):
        return 1.0
    d = sample_weights.square().mean(1).clamp(min=torch.finfo(weights.dtype).tiny)
    return float((s - 2) / s * (weights.square() / d).mean())


def prior_draws(prior, X: Tensor, weights: Tensor, *, memory_budget: float = 2.5e8) -> Tensor:
    """Prior functions ``Phi(X) w`` for weights (n_features, s), block by block; shape (p, s)."""
    out = X.new_zeros((X.shape[0], weights.shape[1]))
    for block in range(prior.n_blocks):
        columns = prior.block_slice(block)
        rows = tile_rows(columns.stop - columns.start, X.dtype, memory_budget)
        for start in range(0, X.shape[0], rows):
            features = prior.features(X[start : start + rows], block)
            out[start : start + rows] += features @ weights[columns]
    return out
