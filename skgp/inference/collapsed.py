r"""Gaussian noise: the objectives in which q(u) is already at its optimum.

With :math:`\phi_i = L^{-1} k_u(x_i)`, weights :math:`w_i`, :math:`W = \sum_i w_i`, residual
variances :math:`r_i = k(x_i, x_i) - \phi_i^T \phi_i`, and the statistics

.. math:: G = \sum_i w_i \phi_i \phi_i^T, \qquad b = \sum_i w_i \phi_i y_i,

the least value over q of the negative ELBO with :math:`\beta` times the divergence is, for
:math:`t = \beta \sigma^2` and :math:`A = G + t I`,

.. math:: \frac{\beta}{2} \Big[ \frac{\sum_i w_i y_i^2 - b^T A^{-1} b}{t} + \log |A| - M \log t
          \Big] + \frac{\sum_i w_i r_i}{2 \sigma^2} + \frac W2 \log 2 \pi \sigma^2,
          \qquad q(w) = N(A^{-1} b,\; t A^{-1});

for :math:`\beta = 1` the bound of Titsias [1]_. FITC [2]_ replaces the noise by
:math:`\Lambda_i = r_i + \sigma^2`; with :math:`G, b` of the weights :math:`w_i / \Lambda_i`,

.. math:: \tfrac12 \Big[ \sum_i w_i \Big( \frac{y_i^2}{\Lambda_i} + \log 2 \pi \Lambda_i \Big)
          - b^T A^{-1} b + \log |A| \Big], \qquad A = I + G, \quad q(w) = N(A^{-1} b, A^{-1}).

Square loss
-----------
The objective of direct loss minimisation [3]_

.. math:: \tfrac12 \sum_i w_i (\phi_i^T a - y_i)^2 + \tfrac{\beta \kappa}{2} a^T a

is least at :math:`a = A^{-1} b`, :math:`A = G + t I`, :math:`t = \beta \kappa`, where it is
:math:`\tfrac12 (\sum_i w_i y_i^2 - b^T A^{-1} b)`. Nothing but the ratio of :math:`\beta` and the
kernel's amplitude matters, and left free the amplitude would run away:
:math:`\kappa = \sum_i w_i k(x_i, x_i) / W`, the mean prior variance, stands for an amplitude of 1.
``evidence_ratio`` is the :math:`\beta` that the ELBO prefers, ``calibrated_state`` gives variances.

Erratum: section 1 of the paper adds :math:`\beta` times the divergence to the sum of squares,
section 2 to half of it. This is section 2's; :math:`\beta` of section 1 is twice as large.

References
----------
.. [1] Titsias (2009), Variational learning of inducing variables in sparse Gaussian processes.
.. [2] Snelson and Ghahramani (2006), Sparse Gaussian processes using pseudo-inputs.
.. [3] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes,
   section 2.
.. [4] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eqs. (2.25), (2.26).
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.pathwise import nearly_exact, pivot_posterior
from skgp.inference.sparse import (
    SparsePosterior,
    SparseState,
    inducing_factor,
    posterior_from_precision,
    whitened_features,
)
from skgp.kernels.gram import gram, gram_diag
from skgp.kernels.scales import amplitude_range, scale_amplitude
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve
from skgp.linalg.runtime import memory_budget, tile_rows

_LOG_2PI = math.log(2 * math.pi)  # mathematical


@dataclass(frozen=True)
class Statistics:
    """Sums over the observations that suffice for Gaussian noise; they add up over batches."""

    gram: Tensor  # (M, M), G
    projection: Tensor  # (M, 1), b
    sum_square: Tensor  # (), of the weighted targets
    sum_prior: Tensor  # (), weighted sum of k(x, x)
    total: float  # W

    def __add__(self, other: "Statistics") -> "Statistics":
        names = [each.name for each in fields(self)]
        return Statistics(*(getattr(self, name) + getattr(other, name) for name in names))


def statistics(
    kernel, data: Data, Z: Tensor, theta: Tensor | None = None, *, tile: int = 2**15
) -> Statistics:
    """Sums over the observations, differentiable in `theta` and `Z`; O(n M^2).

    A derivative keeps the features of all observations, or, where they exceed half of the budget,
    makes those of each tile again.
    """
    L = inducing_factor(kernel, Z, theta)
    bytes_of_row = defaults.FEATURES_OF_ROW * Z.element_size() * len(Z)
    tile = tile_rows(bytes_of_row, bytes_of_row * tile)
    anew = torch.is_grad_enabled() and bytes_of_row * len(data) > memory_budget(Z.device) / 2
    prior = data.weighted_sum(gram_diag(kernel, data.X, theta=theta))
    weight = None if data.weight is None else data.weight[:, None]
    y = data.y if weight is None else weight * data.y
    G, b = Z.new_zeros(len(Z), len(Z)), Z.new_zeros(len(Z), 1)

    def sums(part: slice, Z: Tensor, L: Tensor, theta: Tensor | None) -> tuple[Tensor, Tensor]:
        K = gram(kernel, data.X[part], Z, theta=theta, method="expand")
        scaled = K if weight is None else weight[part].sqrt() * K
        return _WhitenedGram.apply(scaled, L), tri_solve(L, K.mT @ y[part], upper=False)

    for start in range(0, len(data), tile):
        given = slice(start, start + tile), Z, L, theta
        added = checkpoint(sums, *given, use_reentrant=False) if anew else sums(*given)
        G, b = G + added[0], b + added[1]
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
    """Least negative ELBO over q, a scalar in nats (module docstring); O(M^3)."""
    M, t = len(sums.gram), beta * noise
    L = jittered_cholesky(_raised(sums.gram, t)).factor
    fit = (sums.sum_square - _explained(L, sums.projection)) / (2 * noise)
    complexity = 0.5 * beta * (2 * L.diagonal().log().sum() - M * t.log())
    unexplained = (sums.sum_prior - sums.gram.trace()) / (2 * noise)
    return fit + complexity + unexplained + 0.5 * sums.total * (_LOG_2PI + noise.log())


def elbo_posterior(sums: Statistics, noise: Tensor, *, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) and root (1, M, M) of the optimal q(w); O(M^3)."""
    t = beta * noise
    return posterior_from_precision(_raised(sums.gram / t, 1.0), sums.projection / t)


def fitc_loss(kernel, data: Data, Z: Tensor, noise: Tensor, theta: Tensor | None = None) -> Tensor:
    """Negative log marginal likelihood of FITC, a scalar in nats; O(n M^2)."""
    G, b, variance = _fitc_statistics(kernel, data, Z, noise, theta)
    L = jittered_cholesky(_raised(G, 1.0)).factor
    rows = data.y[:, 0].square() / variance + variance.log() + _LOG_2PI
    return 0.5 * (data.weighted_sum(rows) - _explained(L, b)) + L.diagonal().log().sum()


def fitc_posterior(kernel, data: Data, Z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) and root (1, M, M) of FITC's q(w); O(n M^2)."""
    G, b, _ = _fitc_statistics(kernel, data, Z, noise, None)
    return posterior_from_precision(_raised(G, 1.0), b)


def natural_parameters(
    kernel, data: Data, Z: Tensor, noise: Tensor, *, beta: float = 1.0, fitc: bool = False
) -> tuple[Tensor, Tensor]:
    """What Gaussian observations add to the precision (M, M) and to precision times mean (M, 1).

    Of the ELBO with weight `beta` of the divergence, or of FITC; O(n M^2).
    """
    if fitc:
        return _fitc_statistics(kernel, data, Z, noise, None)[:2]
    sums = statistics(kernel, data, Z)
    return sums.gram / (beta * noise), sums.projection / (beta * noise)


def _fitc_statistics(kernel, data: Data, Z: Tensor, noise: Tensor, theta):
    """G, b and the variances (n,) of the targets given w."""
    L = inducing_factor(kernel, Z, theta)
    K = gram(kernel, data.X, Z, theta=theta, method="expand")
    Phi = tri_solve(L, K.mT, upper=False)  # (M, n)
    prior = gram_diag(kernel, data.X, theta=theta)
    variance = (prior - Phi.square().sum(0)).clamp_min(0.0) + noise
    weighted = Phi / variance if data.weight is None else Phi * (data.weight / variance)
    return weighted @ Phi.mT, weighted @ data.y, variance


def _raised(A: Tensor, shift: Tensor | float) -> Tensor:
    """A plus `shift` on its diagonal."""
    return A.diagonal_scatter(A.diagonal() + shift)


def _explained(L: Tensor, b: Tensor) -> Tensor:
    r""":math:`b^T (L L^T)^{-1} b`."""
    return tri_solve(L, b, upper=False).square().sum()


def ridge(sums: Statistics, beta: float) -> Tensor:
    r"""The regulariser :math:`t = \beta \kappa`, a scalar."""
    return beta * sums.sum_prior / sums.total


def square_loss(sums: Statistics, *, beta: float) -> Tensor:
    """Least value of the objective over a, a scalar in squared units of y; O(M^3)."""
    L = jittered_cholesky(_raised(sums.gram, ridge(sums, beta))).factor
    return 0.5 * (sums.sum_square - _explained(L, sums.projection))


def square_posterior(sums: Statistics, *, beta: float) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) of the optimum and root (1, M, M) of the process's variance for s = 1."""
    return elbo_posterior(sums, ridge(sums, beta))


def square_loss_path(sums: Statistics, betas: Tensor) -> Tensor:
    r"""Optimal means (M, k) for many :math:`\beta` (k,) from one eigenvalue decomposition.

    .. math:: a_\beta = U (\Lambda + \beta \kappa I)^{-1} U^T b, \qquad G = U \Lambda U^T .
    """
    values, vectors = torch.linalg.eigh(sums.gram)
    shift = betas * sums.sum_prior / sums.total
    rotated = vectors.mT @ sums.projection  # (M, 1)
    return vectors @ (rotated / (values.clamp_min(0.0)[:, None] + shift))


def evidence_ratio(sums: Statistics) -> float:
    r"""Ratio t of noise and mean prior variance at which the ELBO is greatest.

    What :math:`\beta = 1` is worth must not depend on the kernel's amplitude. The fit multiplies
    :math:`\beta` by this ratio, of the kernel and the points that it begins with: with these
    :math:`\beta = 1` gives the mean of the Gaussian process. The paper's :math:`\beta`, for an
    amplitude of 1, is that product. With the noise at its optimum for each amplitude, the negative
    ELBO is, for eigenvalues :math:`\lambda_j` of G,

    .. math:: \frac W2 \log \big( \sum_i w_i y_i^2 - b^T A^{-1} b \big)
              + \frac12 \sum_j \log \Big( 1 + \frac{\lambda_j}{t} \Big)
              + \frac{\sum_i w_i r_i}{2 t} + \text{const.}
    """
    values, vectors = torch.linalg.eigh(sums.gram)
    values = values.clamp_min(0.0).double().cpu().numpy()
    squares = (vectors.mT @ sums.projection).square()[:, 0].double().cpu().numpy()
    sum_square, prior = float(sums.sum_square), float(sums.sum_prior)
    unexplained = max(prior - values.sum(), 0.0)
    least = np.finfo(float).eps * max(sum_square, np.finfo(float).tiny)

    def negative_elbo(log_ratio: float) -> float:
        t = np.exp(log_ratio) * prior / sums.total
        residual = max(sum_square - (squares / (values + t)).sum(), least)
        complexity = np.log1p(values / t).sum() + unexplained / t
        return 0.5 * (sums.total * np.log(residual) + complexity)

    grid = np.log(defaults.RIDGE_RATIOS)
    best = int(np.argmin([negative_elbo(log_ratio) for log_ratio in grid]))
    bracket = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = minimize_scalar(
        negative_elbo, bounds=bracket, method="bounded", options={"xatol": 1e-7}
    )
    return float(np.exp(found.x))


def calibrated_variance(kernel, data: Data, Z: Tensor, sums: Statistics, *, beta: float) -> float:
    r"""Factor s of the variances after a square loss, which says nothing about them; O(n M^2).

    A Gaussian process with the same mean has the kernel :math:`s k` and noise of variance
    :math:`s t`, for any s; s is set to the mean squared leave-one-out residual, each relative to
    its variance under s = 1:

    .. math:: e_i = \frac{y_i - \phi_i^T a}{1 - h_i}, \quad h_i = \phi_i^T A^{-1} \phi_i, \quad
              s = \frac1W \sum_i w_i \frac{e_i^2}{t / (1 - h_i) + r_i} .
    """
    t = ridge(sums, beta)
    Phi, unexplained = whitened_features(kernel, data.X, Z)
    A = jittered_cholesky(_raised(sums.gram, t)).factor
    leverage = tri_solve(A, Phi, upper=False).square().sum(0)  # of weight 1
    residual = data.y[:, 0] - (Phi.mT @ cho_solve(A, sums.projection))[:, 0]
    # One observation is left out, also where a row stands for several.
    kept = (1 - leverage).clamp_min(torch.finfo(Phi.dtype).eps)
    squares = (residual / kept).square() / (t / kept + unexplained)
    return float(data.weighted_sum(squares) / sums.total)


@torch.no_grad()
def calibrated_state(state: SparseState, data: Data, *, beta: float) -> SparseState:
    """The Gaussian process with the mean of the square loss and variances of the right size."""
    sums = statistics(state.kernel, data, state.Z)
    factor = calibrated_variance(state.kernel, data, state.Z, sums, beta=beta)
    factor = max(factor, defaults.LEAST_CALIBRATED_NOISE / float(ridge(sums, beta)))
    noise = factor * ridge(sums, beta)
    (low, high), kernel = amplitude_range(state.kernel), state.kernel
    # A kernel without a free constant gains one.
    kernel = scale_amplitude(kernel, factor) if low <= factor <= high else factor * kernel
    return replace(
        state, kernel=kernel, likelihood=noise.log().reshape(1), mean=state.mean / factor**0.5
    )


@torch.no_grad()
def dense_posterior(state: SparseState, data: Data, noise: Tensor) -> tuple[SparsePosterior, float]:
    r"""Posterior of a dense process, and its log evidence in nats, of float64 data; O(n^3).

    That of Bayes' rule [4]_, where u are the observations themselves:
    :math:`K + \sigma^2 W^{-1} = L L^T` needs no jitter, which next to little noise would count.
    """
    rows = merged_column(data)
    row_noise = rows.row_noise(noise)
    if nearly_exact(state.kernel, rows.X, row_noise):
        at = pivot_posterior(state.kernel, rows.X, rows.y - state.offset, row_noise)
        mean, none = at.mean[:, None], torch.zeros_like(at.mean)
        posterior = SparsePosterior(
            state.kernel, at.Z, mean, at.root[None], state.offset, noise=none
        )
        return posterior, at.evidence + float(rows.log_power(noise).sum())
    L = inducing_factor(state.kernel, rows.X, jitter=0.0, noise=row_noise)
    mean = tri_solve(L, (rows.y - state.offset)[:, None], upper=False)  # (n, 1)
    evidence = -0.5 * (mean.square().sum() + len(mean) * _LOG_2PI)
    evidence = evidence - L.diagonal().log().sum() + rows.log_power(noise).sum()
    known = mean.new_zeros(1, len(mean), 0)
    posterior = SparsePosterior(state.kernel, rows.X, mean, known, state.offset, row_noise)
    return posterior, float(evidence)


def sparse_posterior(dense: SparsePosterior) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) and root (1, M, M) of f at the inputs, whitened, for what comes later; O(M^3)."""
    assert dense.noise is not None
    if dense.root.shape[-1]:  # f itself at pivots, its whitening without the jitter
        change = tri_solve(inducing_factor(dense.kernel, dense.Z), dense.factor, upper=False)
        return change @ dense.whitened_mean, change @ dense.root
    Phi = whitened_features(dense.kernel, dense.Z, dense.Z)[0] / dense.noise.sqrt()
    observed = dense.factor @ dense.whitened_mean / dense.noise.sqrt()[:, None]
    return posterior_from_precision(_raised(Phi @ Phi.mT, 1.0), Phi @ observed)


def merged_column(data: Data) -> Data:
    """Observations (n, 1) with those of equal inputs merged: y (n,)."""
    return replace(data, y=data.y[:, 0]).merged()
