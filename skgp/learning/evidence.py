r"""Log marginal likelihood of a dense GP at many theta: value, gradient, leave-one-out predictions.

.. math:: \log p(y) = -\tfrac12 y^T \alpha - \tfrac12 \log|A| - \tfrac n2 \log 2\pi, \qquad
          \frac{\partial \log p(y)}{\partial \theta_t} = \operatorname{tr}\Big(W \frac{\partial A}
          {\partial \theta_t}\Big), \quad W = \tfrac12 (\alpha \alpha^T - A^{-1}), \quad
          \alpha = A^{-1} y,

with :math:`A = K_\theta + \sigma^2 \operatorname{diag}(w)^{-1}` and sample weights w [1]_,
eqs. (5.8) and (5.9). The same inverse predicts every observation from all others, eqs. (5.10) and
(5.11):

.. math:: y_i - \mu_{-i} = \alpha_i / [A^{-1}]_{ii}, \qquad \sigma_{-i}^2 = 1 / [A^{-1}]_{ii}.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, chapter 5.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from skgp.data import Data
from skgp.kernels.expression import split_noise, theta_places
from skgp.kernels.pairwise import GramWithGradient
from skgp.linalg.cholesky import (
    cho_inverse,
    cho_solve,
    jittered_cholesky,
    log_det,
    raise_diagonal_,
)

__all__ = ["EvidenceAt", "ExactEvidence"]


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
    data : Data
        Float64.

    Raises
    ------
    ValueError
        If the kernel has no noise.

    Notes
    -----
    An evaluation takes ``n^3`` multiplications and O(n^2 d) more, and holds five n x n matrices.
    """

    def __init__(self, kernel, data: Data) -> None:
        self.kernel, self.data = kernel, data
        places, self.noise_place, self._noise = theta_places(kernel)
        contiguous = places == list(range(len(places)))  # a slice takes no copy
        self._places = slice(len(places)) if contiguous else places
        self._gram = GramWithGradient(split_noise(kernel)[0], data.X)
        weight = torch.ones_like(data.y) if data.weight is None else data.weight
        arrays: Any = (data.y, weight)
        self._y, self._weight = (a.numpy() if self._gram.few else a for a in arrays)

    def __call__(self, theta: np.ndarray) -> EvidenceAt:
        """Evaluate at theta (n_theta,).

        Raises
        ------
        NotPositiveDefiniteError
            If the covariance has no factor.
        """
        at = self._of_distinct(theta)
        data, place = self.data, self.noise_place
        if data.weight is None or data.scatter is None:
            return at
        noise = data.y.new_tensor(self._noise if place is None else math.exp(theta[place]))
        if place is not None:
            within = 1 - data.weight + data.scatter / noise
            at.gradient[place] += 0.5 * float(within.sum())
        return at._replace(value=at.value + float(data.log_power(noise).sum()))

    def _of_distinct(self, theta: np.ndarray) -> EvidenceAt:
        """Of distinct inputs."""
        y, n, place = self._y, len(self._y), self.noise_place
        noise = self._noise if place is None else math.exp(theta[place])
        row_noise = noise / self._weight
        K, of_signal = self._gram(theta[self._places])
        A = K + 0.0
        raise_diagonal_(A, row_noise)
        L = jittered_cholesky(A).factor
        del A
        alpha = cho_solve(L, y)
        value = -0.5 * float(y @ alpha + log_det(L) + n * math.log(2 * math.pi))
        W = cho_inverse(L)
        scale = W.diagonal() + 0.0
        W -= alpha[:, None] * alpha
        W *= -0.5
        gradient = np.zeros(len(theta))
        gradient[self._places] = of_signal(W)
        if place is not None:
            gradient[place] = float(W.diagonal() @ row_noise)
        residual: Any = alpha / scale
        variance: Any = 1 / scale
        if not self._gram.few:
            residual, variance = residual.cpu().numpy(), variance.cpu().numpy()
        return EvidenceAt(value, gradient, residual, variance)
