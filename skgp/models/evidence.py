r"""Log marginal likelihood of a dense GP at many theta: value, gradient, leave-one-out predictions.

.. math:: \log p(y) = -\tfrac12 y^T \alpha - \tfrac12 \log|A| - \tfrac n2 \log 2\pi, \qquad
          \frac{\partial \log p(y)}{\partial \theta_t} = \operatorname{tr}\Big(W \frac{\partial A}
          {\partial \theta_t}\Big), \quad W = \tfrac12 (\alpha \alpha^T - A^{-1}), \quad
          \alpha = A^{-1} y,

with :math:`A = K_\theta + \sigma^2 W^{-1}` [1]_, eqs. (5.8) and (5.9). The same inverse predicts
every observation from all others, eqs. (5.10) and (5.11):

.. math:: y_i - \mu_{-i} = \alpha_i / [A^{-1}]_{ii}, \qquad \sigma_{-i}^2 = 1 / [A^{-1}]_{ii}.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, chapter 5.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs

from skgp.kernels.distances import far_limit, scaled_inputs
from skgp.kernels.expression import split_noise, theta_places
from skgp.kernels.few_rows import FewRowsGram, stationary_leaf
from skgp.kernels.gradients import GramWithGradient
from skgp.linalg.cholesky import jittered_cholesky
from skgp.models.replicates import Replicates

__all__ = ["EvidenceAt", "ExactEvidence"]

_FEW_ROWS = 150  # up to which NumPy takes less time than torch


class EvidenceAt(NamedTuple):
    """What an evaluation yields.

    Attributes
    ----------
    value : float
        Log marginal likelihood, in nats.
    gradient : ndarray of shape (n_theta,)
    residual, variance : ndarray of shape (n,)
        Of each distinct input, left out: its mean target less the prediction, and the variance of
        that, noise included.
    """

    value: float
    gradient: np.ndarray
    residual: np.ndarray
    variance: np.ndarray

    @property
    def leave_one_out(self) -> np.ndarray:
        """Log density of each mean target given all others, shape (n,), in nats."""
        z2 = self.residual**2 / self.variance
        return -0.5 * (np.log(2 * math.pi * self.variance) + z2)


class ExactEvidence:
    """The log marginal likelihood of an expression with noise.

    Parameters
    ----------
    kernel : sklearn kernel expression
        With a top-level WhiteKernel.
    data : Replicates
        Float64.

    Raises
    ------
    ValueError
        If the kernel has no noise.

    Notes
    -----
    An evaluation takes ``n^3`` multiplications and O(n^2 d) more, and holds five n x n matrices.
    """

    def __init__(self, kernel, data: Replicates) -> None:
        self.kernel, self.data = kernel, data
        places, self.noise_place, self._noise = theta_places(kernel)
        contiguous = places == list(range(len(places)))  # a slice takes no copy
        self._places = slice(len(places)) if contiguous else places
        signal = split_noise(kernel)[0]
        leaf = stationary_leaf(signal)
        self._few: FewRowsGram | None = None
        if leaf is not None and len(data.y) <= _FEW_ROWS and not data.X.is_cuda:
            centred = scaled_inputs(data.X, None, 1.0)[0].numpy()
            self._few, self._y = FewRowsGram(leaf, centred), data.y.numpy()
        self._gram = GramWithGradient(signal, data.X)

    def __call__(self, theta: np.ndarray) -> EvidenceAt:
        """Evaluate at theta (n_theta,).

        Raises
        ------
        NotPositiveDefiniteError
            If the covariance has no factor.
        """
        at = self._of_few(self._few, theta) if self._few is not None else None
        at = self._of_many(theta) if at is None else at
        data, place = self.data, self.noise_place
        if data.weight is None or data.scatter is None:
            return at
        noise = data.y.new_tensor(self._noise if place is None else math.exp(theta[place]))
        if place is not None:
            within = 1 - data.weight + data.scatter / noise
            at.gradient[place] += 0.5 * float(within.sum())
        return at._replace(value=at.value + float(data.log_power(noise).sum()))

    def _of_few(self, few: FewRowsGram, theta: np.ndarray) -> EvidenceAt | None:
        """Of distinct inputs; None where rows are far or the matrix is nearly singular."""
        y, n, place = self._y, len(self._y), self.noise_place
        noise = self._noise if place is None else math.exp(theta[place])
        row_noise = noise if self.data.weight is None else noise / self.data.weight.numpy()
        K, of_signal, largest = few(theta[self._places])
        A = K.copy()
        A.flat[:: n + 1] += row_noise
        L, failed = dpotrf(A, lower=1, overwrite_a=1)
        if failed or largest > far_limit(torch.float64):
            return None
        alpha, _ = dpotrs(L, y, lower=1)
        value = -0.5 * (y @ alpha + n * math.log(2 * math.pi)) - np.log(L.diagonal()).sum()
        inverse, _ = dpotri(L, lower=1)
        variance = 1 / inverse.diagonal()
        W = inverse + inverse.T  # of which one triangle is 0, but for the diagonal
        W.flat[:: n + 1] *= 0.5
        W -= alpha[:, None] * alpha
        W *= -0.5
        gradient = np.zeros(len(theta))
        gradient[self._places] = of_signal(W)
        if place is not None:
            gradient[place] = (W.diagonal() * row_noise).sum()
        return EvidenceAt(float(value), gradient, alpha * variance, variance)

    @torch.no_grad()
    def _of_many(self, theta: np.ndarray) -> EvidenceAt:
        """Of distinct inputs."""
        data, n, place = self.data, len(self.data.y), self.noise_place
        log_parameters = torch.as_tensor(theta).to(data.X)
        noise = data.y.new_tensor(self._noise) if place is None else log_parameters[place].exp()
        K, of_signal = self._gram(log_parameters[self._places])
        row_noise = data.row_noise(noise)
        A = K.clone()
        A.diagonal().add_(row_noise)
        L = jittered_cholesky(A).factor
        del A
        alpha = torch.cholesky_solve(data.y[:, None], L)[:, 0]
        value = -0.5 * (data.y @ alpha + n * math.log(2 * math.pi)) - L.diagonal().log().sum()
        inverse = torch.cholesky_inverse(L)
        variance = 1 / inverse.diagonal()
        W = inverse.neg_().addr_(alpha, alpha).mul_(0.5)
        gradient = np.zeros(len(log_parameters))
        gradient[self._places] = of_signal(W).cpu().numpy()
        if place is not None:
            gradient[place] = float(W.diagonal() @ row_noise)
        residual = (alpha * variance).cpu().numpy()
        return EvidenceAt(float(value), gradient, residual, variance.cpu().numpy())
