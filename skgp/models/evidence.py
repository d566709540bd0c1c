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
from torch import Tensor

from skgp.kernels.expression import split_noise, theta_places
from skgp.kernels.gradients import GramWithGradient
from skgp.linalg.cholesky import jittered_cholesky
from skgp.models.replicates import Replicates

__all__ = ["EvidenceAt", "ExactEvidence"]


class EvidenceAt(NamedTuple):
    """What an evaluation yields.

    Attributes
    ----------
    value : float
        Log marginal likelihood, in nats.
    gradient : ndarray of shape (n_theta,)
    residual, variance : Tensor of shape (n,)
        Of each distinct input, left out: its mean target less the prediction, and the variance of
        that, noise included.
    """

    value: float
    gradient: np.ndarray
    residual: Tensor
    variance: Tensor

    @property
    def leave_one_out(self) -> np.ndarray:
        """Log density of each mean target given all others, shape (n,), in nats."""
        z2 = self.residual.square() / self.variance
        return (-0.5 * ((2 * math.pi * self.variance).log() + z2)).cpu().numpy()


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
        places, self._noise_place, self._noise = theta_places(kernel)
        contiguous = places == list(range(len(places)))  # a slice takes no copy
        self._places = slice(len(places)) if contiguous else places
        self._gram = GramWithGradient(split_noise(kernel)[0], data.X)

    @torch.no_grad()
    def __call__(self, theta: np.ndarray) -> EvidenceAt:
        """Evaluate at theta (n_theta,).

        Raises
        ------
        NotPositiveDefiniteError
            If the covariance has no factor.
        """
        data, n = self.data, len(self.data.y)
        log_parameters = torch.as_tensor(theta).to(data.X)
        place = self._noise_place
        noise = data.y.new_tensor(self._noise) if place is None else log_parameters[place].exp()
        K, of_signal = self._gram(log_parameters[self._places])
        row_noise = data.row_noise(noise)
        A = K.clone()
        A.diagonal().add_(row_noise)
        L = jittered_cholesky(A).factor
        alpha = torch.cholesky_solve(data.y[:, None], L)[:, 0]
        value = -0.5 * (data.y @ alpha + n * math.log(2 * math.pi)) - L.diagonal().log().sum()
        inverse = torch.cholesky_inverse(L)
        variance = 1 / inverse.diagonal()
        W = inverse.neg_().addr_(alpha, alpha).mul_(0.5)
        gradient = np.zeros(len(log_parameters))
        gradient[self._places] = of_signal(W).cpu().numpy()
        if place is not None:
            gradient[place] = float(W.diagonal() @ row_noise)
        if data.weight is not None and data.scatter is not None:
            value = value + data.log_power(noise).sum()
            if place is not None:
                within = 1 - data.weight + data.scatter / noise
                gradient[place] += 0.5 * float(within.sum())
        return EvidenceAt(float(value), gradient, alpha * variance, variance)
