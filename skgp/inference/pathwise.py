r"""Pivots of K and posterior draws: of few rows chosen by variance, and pathwise.

Pivots are rows chosen by the prior variance that they leave. They are inducing points; and where
noise variances D fall below eps times the prior's variance, :math:`K + D` no longer tells
observations apart that the kernel takes for one, and representer weights of 1/D leave the mean no
digits. The features :math:`\phi = L^{-1} k_Z(x)` of the r pivots Z that leave no variance above
rounding, :math:`K = \Phi \Phi^T`, have weights of posterior :math:`N(a, R R^T)`, by least squares
row by row (:mod:`skgp.linalg.cholesky`).

Pathwise conditioning, or Matheron's rule (Wilson et al., 2021): a draw of the prior, corrected by a
solve with the noisy values that it would have made, is a draw of the posterior. Draws are more
right-hand sides of one solve, nearly free, in function space (:mod:`.exact`) or in that of the
weights; their spread is the posterior variance, and :func:`leave_one_out_z2` calibrates it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skgp.data import random_rows
from skgp.inference.defaults import MIXTURE_JITTER, NEARLY_EXACT, PIVOT_SHARE, PIVOT_TOLERANCE
from skgp.inference.sparse import inducing_factor
from skgp.inference.weights.bases import Basis, SumBasis, WhitenedInducingBasis, inducing_parts
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.kernels.distances import origin
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.kernels.operators import kernel_matmul
from skgp.kernels.spectra import split_spectral
from skgp.kernels.spectral import FourierFeatures
from skgp.linalg.cholesky import jittered_cholesky, pivoted_rows, ridge_by_rows, tri_solve
from skgp.linalg.preconditioners import LowRank, rp_cholesky
from skgp.linalg.runtime import TensorState, memory_budget, standard_normal, tile_rows


def greedy_variance(kernel, X: Tensor, n_points: int, *, tol: float | None = None) -> Tensor:
    """Rows of X (n, d) chosen one by one where those before leave the greatest prior variance [1]_.

    The pivots of a Cholesky decomposition of K(X, X), of which only the columns chosen are
    evaluated where these are the lesser part; fewer where the rest has no variance left, beyond
    `tol` (eps) times the largest. O(n n_points^2) time. A NotPositiveDefiniteError where a variance
    left is below 0 by more than rounding: the kernel is no covariance.

    .. [1] Burt, Rasmussen and van der Wilk (2020), Convergence of sparse variational inference in
       Gaussian processes regression, section 4.3.
    """
    eps, prior = torch.finfo(X.dtype).eps, gram_diag(kernel, X)
    least = float(prior.max()) * (eps if tol is None else tol)
    if 2 * n_points > len(X):
        chosen, left = pivoted_rows(gram(kernel, X, X), n_points, least)
    else:
        chosen, left = _greedy_rows(kernel, X, n_points, least)
    if float(left.min()) < -(eps**0.5) * float(prior.max()):
        jittered_cholesky(gram(kernel, X[[*chosen, int(left.argmin())]]))  # says what is wrong
    return torch.tensor(chosen, device=X.device, dtype=torch.int64)


def _greedy_rows(kernel, X: Tensor, n_points: int, least: float) -> tuple[list[int], Tensor]:
    """The pivots of K(X, X) above `least`, column by column, and what is left of each variance."""
    left = gram_diag(kernel, X)
    rows = X.new_empty(n_points, len(X))  # of the Cholesky factor, transposed
    chosen = list[int]()
    for i in range(n_points):
        pivot = int(left.argmax())
        if left[pivot] <= least:
            break
        column = gram(kernel, X[pivot : pivot + 1], X)[0] - rows[:i, pivot] @ rows[:i]
        rows[i] = column / left[pivot].sqrt()
        left = left - rows[i].square()
        left[pivot] = 0.0
        chosen.append(pivot)
    return chosen, left


class PivotPosterior(NamedTuple):
    r"""Posterior :math:`N(a, R R^T)` of the weights of :math:`\phi = L^{-1} k_Z(x)`."""

    Z: Tensor  # (r, d), pivots of K(X, X)
    factor: Tensor  # (r, r), L of K(Z, Z)
    mean: Tensor  # (r,), a; or (r, t)
    root: Tensor  # (r, r), R
    evidence: float  # log N(y; 0, K + D), in nats, summed over targets


def nearly_exact(kernel, X: Tensor, row_noise: Tensor) -> bool:
    """Whether an observation (n,) has so little noise that K + D has no digits left for it."""
    return float((gram_diag(kernel, X) / row_noise).max()) > NEARLY_EXACT


def pivot_posterior(kernel, X: Tensor, y: Tensor, row_noise: Tensor) -> PivotPosterior:
    r"""The exact GP of X (n, d), y (n,) or (n, t), where :math:`K + D` would lose its digits.

    Of inputs that the kernel cannot tell apart the weighted mean counts, whatever the ratio of
    noises. O(n r^2).
    """
    Z = X[greedy_variance(kernel, X, len(X), tol=PIVOT_TOLERANCE)]
    L = inducing_factor(kernel, Z, jitter=0.0)
    Phi = tri_solve(L, gram(kernel, X, Z).mT, upper=False).T  # (n, r)
    ridge = ridge_by_rows(Phi, y, row_noise)
    log_det = row_noise.log().sum() - 2 * ridge.root.diagonal().log().sum()
    n_targets = 1 if y.ndim == 1 else y.shape[1]
    volume = n_targets * (log_det + len(X) * math.log(2 * math.pi))
    evidence = -0.5 * float(ridge.misfit + volume)
    return PivotPosterior(Z, L, ridge.mean, ridge.root, evidence)


@dataclass
class PivotCovariance(TensorState):
    r"""Covariance of f whose weights of :math:`\phi = L^{-1} k_Z` have S = R R'; O(r^2 p).

    .. math:: k(x, x') + \phi(x)^T (R R^T - I) \phi(x'),

    without augmentation the part of S alone.
    """

    factor: Tensor  # (r, r), L
    root: Tensor  # (r, r), R
    augment: bool

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,)."""
        phi, spread = self._features(kernel, X, Z)
        variance = spread.square().sum(0)
        if self.augment:
            variance += (gram_diag(kernel, X) - phi.square().sum(0)).clamp_min(0.0)
        return variance

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""
        phi, spread = self._features(kernel, X, Z)
        prior = gram_tile(kernel, X, X) - phi.T @ phi if self.augment else 0.0
        return prior + spread.T @ spread

    def _features(self, kernel, X: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        phi = tri_solve(self.factor, gram(kernel, X, Z).mT, upper=False)  # (r, p)
        return phi, self.root.T @ phi


def pathwise_posterior(
    design: StreamedDesign,
    y: Tensor,
    noise_variance: float,
    solve: Callable[[Tensor], Any],  # T (n, t + S) to a result whose `solution` is V (m, t + S)
    *,
    n_samples: int,  # S; 0 leaves the variances 0
    generator: torch.Generator,
) -> tuple[LinearWeightsPosterior, Any, Tensor]:
    r"""Posterior mean and draws from one solve with several right-hand sides.

    With :math:`w_0 \sim N(0, I)` and :math:`\varepsilon \sim N(0, \sigma^2 W^{-1})`,

    .. math:: w_s - \mu = w_0 + (\Phi^T W \Phi + \sigma^2 I)^{-1}
              \Phi^T W (\varepsilon - \Phi w_0)

    has the covariance of the posterior (sample, then optimise; Wilson et al., 2021). The correction
    starts from 0, so a solver stopped early leaves a deviation between the prior's and the
    posterior's: variances err upwards.

    `solve` finds V with :math:`(\Phi^T W \Phi + \sigma^2 I) V = \Phi^T W^{1/2} T`, the columns of
    y (n, t) among the right-hand sides, or y (n,) where t is 1. Returned are the posterior, what
    `solve` returned, and :math:`T - \Phi V` (n, t + S): the noise times
    :math:`(\Phi \Phi^T + \sigma^2 W^{-1})^{-1}` of the targets, up to a root weight a row.
    """
    prior_weights = standard_normal((design.n_features, n_samples), generator).to(design.device)
    noise = standard_normal((design.n_rows, n_samples), generator).to(design.device)
    # W^(1/2) eps has variance s2 whatever the weights; the rows of Phi w0 are scaled already.
    perturbed = noise_variance**0.5 * noise
    if n_samples:
        perturbed = perturbed - design.matmul(prior_weights)
    Y = y.reshape(len(y), -1)  # (n, t)
    t = Y.shape[1]
    targets = torch.cat([design.scale_rows(Y), perturbed], dim=1)
    result = solve(targets)
    mean, correction = result.solution[:, :t].reshape(-1, *y.shape[1:]), result.solution[:, t:]
    deviations = prior_weights + correction  # (m, S)
    posterior = LinearWeightsPosterior.from_deviations(design.basis, mean, deviations)
    return posterior, result, targets - design.matmul(result.solution)


@dataclass
class PathwiseCovariance(TensorState):
    """Covariance of s posterior draws, kept as functions; the divisor is s.

    What inducing points among the features of the prior draws leave of the prior is added.
    """

    prior: Basis
    prior_weights: Tensor  # (n_features, s)
    sample_weights: Tensor  # (n, s), A^-1 (f_s(Z) + eps_s)

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


def pivoted_factor(
    kernel, X: Tensor, rank: int, *, generator: torch.Generator, tol: float = 0.0
) -> LowRank:
    """Randomly pivoted partial Cholesky factorisation of ``K(X, X)``, in the dtype of X."""
    return rp_cholesky(
        lambda index: gram_tile(kernel, X, X[index]),
        gram_diag(kernel, X),
        rank,
        generator=generator,
        tol=tol,
    )


def pivots_of(kernel, X: Tensor, rank: int, *, generator: torch.Generator) -> Tensor:
    """Pivots (r,) of K(X, X); of a random part of X where the factor of all takes too much memory.

    A quarter of the budget holds the factor.
    """
    n_rows = max(rank, int(PIVOT_SHARE * memory_budget(X.device) / (8 * rank)))
    if n_rows >= len(X):
        return pivoted_factor(kernel, X, rank, generator=generator).pivots
    rows = random_rows(len(X), n_rows, generator).to(X.device)
    return rows[pivoted_factor(kernel, X[rows], rank, generator=generator).pivots]


def nystrom_root(kernel: Any, M: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor:
    """Lower Cholesky factor (r, r) of K(M, M), with the jitter that products in `dtype` ask for."""
    K = gram_tile(kernel, M, M, theta)
    if len(M):
        K.diagonal().add_(MIXTURE_JITTER[dtype] * K.diagonal().mean())
    return jittered_cholesky(K).factor


def affordable_rank(n: int, rank: int, copies: float = 1.0) -> int:
    """`rank`, or as much of it as a quarter of the budget holds `copies` factors (n, r) of."""
    most = int(PIVOT_SHARE * memory_budget() / (8 * copies * max(n, 1)))
    return max(min(1, rank), min(rank, most))


def prior_features(
    kernel, X: Tensor, m: int, rank: int, *, seed: int, generator: torch.Generator
) -> Basis:
    """Features whose Gram matrix stands for K in prior draws: m Fourier ones where there can be.

    Summands without a spectral density have `rank` inducing points at the pivots of their matrix.
    """
    spectral, rest = split_spectral(kernel)
    parts: list[Basis] = []
    if spectral is not None:
        zero = origin(X)[0]
        parts.append(FourierFeatures(spectral, m, len(zero), seed=seed, origin=zero))
    if rest is not None:
        pivots = pivoted_factor(rest, X, min(len(X), rank), generator=generator).pivots
        parts.append(WhitenedInducingBasis(rest, X[pivots]))
    return parts[0] if len(parts) == 1 else SumBasis(parts)


def perturbed_targets(
    prior, X: Tensor, row_noise: float | Tensor, n_samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weights of prior draws (n_features, s) and the noisy values of the draws at X (n, s)."""
    weights = standard_normal((prior.n_features, n_samples), generator, X.dtype).to(X.device)
    noise = standard_normal((len(X), n_samples), generator, X.dtype).to(X.device)
    std = torch.as_tensor(row_noise, dtype=X.dtype, device=X.device).sqrt()
    noise = noise * (std[:, None] if std.ndim else std)
    return weights, prior_draws(prior, X, weights) + noise


def leave_one_out_z2(weights: Tensor, sample_weights: Tensor) -> float:
    r"""Mean squared standardised leave-one-out residual, from draws alone.

    :math:`\beta_s = A^{-1}(f_s(X) + \varepsilon_s)`, `sample_weights` (n, s), has covariance
    :math:`A^{-1}`, so :math:`\hat d_i = \overline{\beta_{si}^2}` estimates
    :math:`d_i = (A^{-1})_{ii}`; with :math:`\alpha = A^{-1} y`, `weights` (n,), the leave-one-out
    residual of row i is :math:`\alpha_i / d_i` and its variance :math:`1 / d_i` (Rasmussen and
    Williams, eqs. 5.10-5.12). As :math:`E[1 / \hat d_i] = \frac{s}{s - 2} / d_i`,

    .. math:: z^2 = \frac{s - 2}{s}\, \frac1n \sum_i \alpha_i^2 / \hat d_i

    is unbiased; a factor a row that both arguments share cancels. Above one the model is
    overconfident. A common factor on all variances fits the leave-one-out residuals best at this
    value; the ratio of means :math:`\overline{\alpha^2} / \overline{d}` weighs rows by their
    precision instead, which misleads where the noise is not the same everywhere. 1 for fewer than
    three draws or a constant y. Of several targets, `weights` (n, t), one factor for all.
    """
    weights, s = weights.reshape(len(weights), -1), sample_weights.shape[1]
    if s < 3 or not bool(weights.any()):
        return 1.0
    d = sample_weights.square().mean(1).clamp(min=torch.finfo(weights.dtype).tiny)
    return float((s - 2) / s * (weights.square() / d[:, None]).mean())


def prior_draws(prior, X: Tensor, weights: Tensor) -> Tensor:
    """Prior functions ``Phi(X) w`` for weights (n_features, s), block by block; shape (p, s)."""
    out = X.new_zeros((X.shape[0], weights.shape[1]))
    for block in range(prior.n_blocks):
        columns = prior.block_slice(block)
        rows = tile_rows((columns.stop - columns.start) * X.element_size())
        for start in range(0, X.shape[0], rows):
            features = prior.features(X[start : start + rows], block)
            out[start : start + rows] += features @ weights[columns]
    return out
