r"""Direct loss minimisation for the square loss: a closed form for the mean.

With the features and statistics of :mod:`skgp.inference.sparse.collapsed`, the objective [1]_

.. math:: \tfrac12 \sum_i w_i (\phi_i^T a - y_i)^2 + \tfrac{\beta \kappa}{2} a^T a

is least at :math:`a = A^{-1} b`, :math:`A = G + t I`, :math:`t = \beta \kappa`, where it is
:math:`\tfrac12 (\sum_i w_i y_i^2 - b^T A^{-1} b)`. Nothing but the ratio of :math:`\beta` and the
kernel's amplitude matters, and left free the amplitude would run away:
:math:`\kappa = \sum_i w_i k(x_i, x_i) / W`, the mean prior variance, stands for an amplitude of 1.

What :math:`\beta = 1` is worth must not depend on the amplitude either. The fit multiplies
:math:`\beta` by the ratio of noise and prior variance at which the evidence bound of the kernel and
the points that it begins with is greatest: with these :math:`\beta = 1` gives the mean of the
Gaussian process. The paper's :math:`\beta`, for an amplitude of 1, is that product. With the noise
at its optimum for each amplitude, the negative bound is, for eigenvalues
:math:`\lambda_j` of G and the ratio :math:`t` of noise and amplitude,

.. math:: \frac W2 \log \big( \sum_i w_i y_i^2 - b^T A^{-1} b \big)
          + \frac12 \sum_j \log \Big( 1 + \frac{\lambda_j}{t} \Big)
          + \frac{\sum_i w_i r_i}{2 t} + \text{const.}

The objective says nothing about variances. A Gaussian process with the same mean has the kernel
:math:`s k` and noise of variance :math:`s t`, for any s; s is set to the mean squared
leave-one-out residual, each relative to its variance under s = 1:

.. math:: e_i = \frac{y_i - \phi_i^T a}{1 - h_i}, \quad h_i = \phi_i^T A^{-1} \phi_i, \quad
          s = \frac1W \sum_i w_i \frac{e_i^2}{t / (1 - h_i) + r_i} .

Erratum: section 1 of the paper adds :math:`\beta` times the divergence to the sum of squares,
section 2 to half of it. This is section 2's; :math:`\beta` of section 1 is twice as large.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes,
   section 2.
"""

from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.collapsed import Statistics, posterior_from_precision, statistics
from skgp.inference.sparse.sparse import SparseState, inducing_factor
from skgp.kernels.amplitude import amplitude_range, scale_amplitude
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve

__all__ = [
    "calibrated_state",
    "calibrated_variance",
    "evidence_ratio",
    "ridge",
    "square_loss",
    "square_loss_path",
    "square_posterior",
]

_LEAST_NOISE = 1e-8  # of a calibrated process: residuals of one row, or of a constant, are 0
_RATIOS = np.logspace(-6, 3, 46)  # of noise and prior variance, among which the search begins


def ridge(sums: Statistics, beta: float) -> Tensor:
    r"""The regulariser :math:`t = \beta \kappa`, a scalar."""
    return beta * sums.sum_prior / sums.total


def evidence_ratio(sums: Statistics) -> float:
    """Ratio of noise and mean prior variance at which the evidence bound is greatest.

    Parameters
    ----------
    sums : Statistics
        Of a kernel whose amplitude does not matter.

    Returns
    -------
    float
        Between 1e-6 and 1e3; O(M^3).
    """
    values, vectors = torch.linalg.eigh(sums.gram)
    values = values.clamp_min(0.0).double().cpu().numpy()
    squares = (vectors.mT @ sums.projection).square()[:, 0].double().cpu().numpy()
    sum_square, prior = float(sums.sum_square), float(sums.sum_prior)
    unexplained = max(prior - values.sum(), 0.0)
    least = np.finfo(float).eps * max(sum_square, np.finfo(float).tiny)

    def bound(log_ratio: float) -> float:
        t = np.exp(log_ratio) * prior / sums.total
        residual = max(sum_square - (squares / (values + t)).sum(), least)
        complexity = np.log1p(values / t).sum() + unexplained / t
        return 0.5 * (sums.total * np.log(residual) + complexity)

    grid = np.log(_RATIOS)
    best = int(np.argmin([bound(log_ratio) for log_ratio in grid]))
    bracket = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = minimize_scalar(bound, bounds=bracket, method="bounded", options={"xatol": 1e-7})
    return float(np.exp(found.x))


def square_loss(sums: Statistics, *, beta: float) -> Tensor:
    """Least value of the objective over a, a scalar in squared units of y; O(M^3)."""
    A = sums.gram.diagonal_scatter(sums.gram.diagonal() + ridge(sums, beta))
    L = jittered_cholesky(A).factor
    explained = tri_solve(L, sums.projection, upper=False).square().sum()
    return 0.5 * (sums.sum_square - explained)


def square_posterior(sums: Statistics, *, beta: float) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) of the optimum and root (1, M, M) of the process's variance for s = 1."""
    t = ridge(sums, beta)
    precision = (sums.gram / t).diagonal_scatter(sums.gram.diagonal() / t + 1.0)
    return posterior_from_precision(precision, sums.projection / t)


def square_loss_path(sums: Statistics, betas: Tensor) -> Tensor:
    r"""Optimal means for many :math:`\beta` from one eigenvalue decomposition.

    .. math:: a_\beta = U (\Lambda + \beta \kappa I)^{-1} U^T b, \qquad G = U \Lambda U^T .

    Parameters
    ----------
    sums : Statistics
    betas : Tensor of shape (k,)

    Returns
    -------
    Tensor of shape (M, k)
        O(M^3 + M^2 k).
    """
    values, vectors = torch.linalg.eigh(sums.gram)
    shift = betas * sums.sum_prior / sums.total
    rotated = vectors.mT @ sums.projection  # (M, 1)
    return vectors @ (rotated / (values.clamp_min(0.0)[:, None] + shift))


def calibrated_variance(kernel, data: Data, Z: Tensor, sums: Statistics, *, beta: float) -> float:
    """The factor s of the module docstring, from leave-one-out residuals; O(n M^2)."""
    t = ridge(sums, beta)
    L = inducing_factor(kernel, Z)
    Phi = tri_solve(L, gram(kernel, Z, data.X), upper=False)
    A = jittered_cholesky(sums.gram.diagonal_scatter(sums.gram.diagonal() + t)).factor
    weight = torch.ones_like(data.y[:, 0]) if data.weight is None else data.weight
    leverage = tri_solve(A, Phi, upper=False).square().sum(0)  # of weight 1
    residual = data.y[:, 0] - (Phi.mT @ cho_solve(A, sums.projection))[:, 0]
    # One observation is left out, also where a row stands for several.
    kept = (1 - leverage).clamp_min(torch.finfo(Phi.dtype).eps)
    unexplained = (gram_diag(kernel, data.X) - Phi.square().sum(0)).clamp_min(0.0)
    squares = (residual / kept).square() / (t / kept + unexplained)
    return float((weight * squares).sum() / sums.total)


def calibrated_state(state: SparseState, data: Data, *, beta: float) -> SparseState:
    """The Gaussian process with the mean of the square loss and variances of the right size."""
    with torch.no_grad():
        sums = statistics(state.kernel, data, state.Z)
        factor = calibrated_variance(state.kernel, data, state.Z, sums, beta=beta)
        factor = max(factor, _LEAST_NOISE / float(ridge(sums, beta)))
        noise = factor * ridge(sums, beta)
    low, high = amplitude_range(state.kernel)
    kernel = state.kernel
    # A kernel without a free constant gains one.
    kernel = scale_amplitude(kernel, factor) if low <= factor <= high else factor * kernel
    return replace(
        state, kernel=kernel, likelihood=noise.log().reshape(1), mean=state.mean / factor**0.5
    )
