r"""Interactions that an additive model leaves out, by Rao's score of their variance.

Where a search ended observations are taken for Gaussian ones of f, :math:`z = f + g / W` with
precisions W, of g the derivative of the log-likelihood at the posterior mean and W its Fisher
information. With :math:`P = (\sum_j K_j + W^{-1})^{-1}` and :math:`\alpha = P z`, a process of
columns i and j together, of covariance :math:`D = \bar K_i \circ \bar K_j` and variance v,
promises

.. math:: \frac{u^2}{2 (A_{vv} - A_{v \theta} A_{\theta \theta}^{-1} A_{\theta v})}, \qquad
          u = \tfrac12 (\alpha^\top D \alpha - \mathrm{tr}\, P D) > 0

nats, with the average information A of v, of the variances of all components and of the noise.
:math:`\bar K` are correlations less their means over rows, so that D has no part of one column.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels import gram
from skgp.learning.markov.defaults import (
    FISHER_RIDGE,
    INTERACTION_ENTRIES,
    INTERACTION_ROWS,
    LEAST_INFORMATION,
    LEAST_INTERACTION,
    PEAK_CHANCE,
)
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import jittered_cholesky


def rows_to_look_at(data: Data, n_components: int) -> Data:
    """Some of the rows that weigh, in main memory."""
    if data.weight is not None:
        data = data.take(data.weight > 0)
    most = min(INTERACTION_ROWS, int(math.sqrt(2 * INTERACTION_ENTRIES) / n_components))
    return data.take(torch.linspace(0, len(data) - 1, min(len(data), most)).long()).to("cpu")


def missed_interaction(
    kernels: Sequence[Any], data: Data, mean: Tensor, offset: float, likelihood: Likelihood
) -> tuple[int, int, float] | None:
    """Two components that act together, and the nats per observation that this promises, if any.

    The data are few, of X (m, d) and y (m,), the posterior mean of f is (m,), and the kernels are
    of the components, each on its column of X. O(c m^3 + c^2 m^2).
    """
    m, c = len(data), len(kernels)
    K = torch.stack([gram(kernel, data.X) for kernel in kernels])  # (c, m, m)
    likelihood = likelihood.at(data.log_exposure)
    least = LEAST_INFORMATION / float(K.sum(0).diagonal().mean())
    noise = 1 / likelihood.fisher_information(mean).clamp(min=least)
    z = mean - offset + noise * likelihood.derivatives(data.y, mean)[0]
    gains = _gains(K, z, noise if data.weight is None else noise / data.weight).numpy()
    i, j = np.unravel_index(gains.argmax(), gains.shape)
    chance = math.log(c * (c - 1) / 2 / PEAK_CHANCE)
    if gains[i, j] < max(LEAST_INTERACTION * m, chance):
        return None
    return int(i), int(j), float(gains[i, j]) / m


def _gains(K: Tensor, z: Tensor, noise: Tensor) -> Tensor:
    """Of components' covariances (c, m, m) and observations (m,): nats (c, c), 0 but for i < j."""
    L = jittered_cholesky(K.sum(0) + torch.diag(noise)).factor
    P = torch.cholesky_inverse(L)
    alpha = P @ z
    alpha = alpha / max(1.0, float(z @ alpha) / len(z)) ** 0.5  # noise too small is no interaction
    known = torch.cat([(K @ alpha).T, (noise * alpha)[:, None]], 1)  # (m, c + 1), of theta
    centred = K - K.mean(1, keepdim=True) - K.mean(2, keepdim=True) + K.mean((1, 2), keepdim=True)
    spread = centred.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(K.dtype).tiny)
    centred = centred / spread[:, None, None]
    within = 0.5 * known.T @ P @ known
    within.diagonal().add_(FISHER_RIDGE)
    gains = K.new_zeros(len(K), len(K))
    for i in range(len(K) - 1):
        D = centred[i] * centred[i + 1 :]  # (c - i - 1, m, m)
        moved = (D @ alpha).T  # (m, c - i - 1)
        u = 0.5 * (alpha @ moved - (D * P).sum((1, 2)))
        turned = P @ moved
        across = 0.5 * known.T @ turned
        left = 0.5 * (moved * turned).sum(0) - (across * torch.linalg.solve(within, across)).sum(0)
        gains[i, i + 1 :] = u.clamp(min=0).square() / (2 * left)
    return gains.nan_to_num(0.0)
