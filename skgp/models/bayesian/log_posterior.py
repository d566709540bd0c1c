r"""The exact log posterior of the hyper-parameters, in their logarithms u.

.. math:: \log p(u \mid y) = \log N(y; 0, K_u + \sigma_u^2 I) + \sum_j \log p_j(u_j) + \text{const}

with :math:`p_j` the density of u (:mod:`skgp.models.bayesian.priors`), and zero outside the bounds
of the kernel's hyper-parameters.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skgp.kernels import split_noise, split_theta
from skgp.kernels.covariance import variance
from skgp.kernels.expression import bind
from skgp.kernels.tiles import evaluate_tile
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.models.bayesian.priors import Prior
from skgp.models.objectives import log_marginal_likelihood
from skgp.models.replicates import Replicates

__all__ = ["LogPosterior"]


class LogPosterior:
    """Log posterior density of u, by Cholesky factorisation; picklable.

    Parameters
    ----------
    kernel : sklearn kernel expression
        With a top-level WhiteKernel and at least one free hyper-parameter.
    data : Replicates
        Float64.
    priors : sequence of Prior
        One for each element of ``kernel.theta``.

    Attributes
    ----------
    n_dims : int
    bounds : ndarray of shape (n_dims, 2)
        Of u.
    medians : ndarray of shape (n_dims,)
        Logarithms of the priors' medians.

    Raises
    ------
    ValueError
        If the kernel has no noise or nothing to infer, or the number of priors is not `n_dims`.

    Notes
    -----
    A density costs a kernel matrix and :math:`n^3 / 3` flops, its gradient about five times that;
    both hold a few n x n matrices.
    """

    def __init__(self, kernel: Any, data: Replicates, priors: Sequence[Prior]) -> None:
        signal, white = split_noise(kernel)
        if white is None:
            raise ValueError(f"kernel={kernel} has no noise; add + WhiteKernel(0.1) to it.")
        if kernel.n_dims == 0:
            raise ValueError(
                f"kernel={kernel} has no free hyper-parameter and hence no posterior; free one, "
                "or use one plain model."
            )
        if len(priors) != kernel.n_dims:
            raise ValueError(
                f"priors has {len(priors)} entries and the kernel {kernel.n_dims} free "
                "hyper-parameters; give one prior for each."
            )
        self.kernel, self.data, self.priors = kernel, data, tuple(priors)
        self.n_dims = int(kernel.n_dims)
        self.bounds = np.asarray(kernel.bounds, dtype=float)
        self.medians = np.log([prior.median for prior in self.priors])
        # Kernel objects take longer to ask than a small matrix to factor: they are asked once.
        # Places in u pass through the split of theta in the place of values.
        places, noise = split_theta(kernel, torch.arange(self.n_dims, dtype=torch.float64))
        self._signal, self._places = signal, places.long().tolist()
        self._noise_place = int(torch.as_tensor(noise)) if white.n_dims else None
        self._noise = float(white.noise_level)

    def log_prior(self, u: np.ndarray) -> np.ndarray:
        """Log prior of u (..., n_dims), in nats; -inf outside the bounds."""
        u = np.asarray(u, dtype=float)
        parts = [prior.log_density(u[..., j]) for j, prior in enumerate(self.priors)]
        inside = ((u >= self.bounds[:, 0]) & (u <= self.bounds[:, 1])).all(-1)
        return np.where(inside, np.sum(parts, axis=0), -np.inf)

    def prior_gradient(self, u: np.ndarray) -> np.ndarray:
        """Gradient (..., n_dims) of the log prior."""
        u = np.asarray(u, dtype=float)
        parts = [prior.gradient(u[..., j]) for j, prior in enumerate(self.priors)]
        return np.stack(parts, axis=-1)

    def log_density(self, u: np.ndarray) -> float:
        """Log posterior of u (n_dims,) in nats, up to the evidence.

        -inf outside the bounds and where the kernel matrix cannot be factored.
        """
        prior = float(self.log_prior(u))
        if prior == -math.inf:
            return prior
        try:
            return prior + self._log_likelihood(u)
        except NotPositiveDefiniteError:
            return -math.inf

    @torch.no_grad()
    def _log_likelihood(self, u: np.ndarray) -> float:
        """As `log_marginal_likelihood`, without what only a gradient needs: half the time."""
        data, theta = self.data, self.data.X.new_tensor(u)
        X, place = data.X, self._noise_place
        noise = theta.new_tensor(self._noise) if place is None else theta[place].exp()
        node = bind(self._signal, theta[self._places], dtype=X.dtype, device=X.device)
        A = evaluate_tile(node, X, X, X.new_empty(len(X), len(X)))
        # Distances by a matrix product are not quite 0 between equal rows.
        A.diagonal().copy_(variance(node, X) + data.row_noise(noise))
        L = jittered_cholesky(A).factor
        residual = torch.linalg.solve_triangular(L, data.y[:, None], upper=False)
        half_log_det = L.diagonal().log().sum()
        constant = 0.5 * len(data.y) * math.log(2 * math.pi)
        value = -0.5 * residual.square().sum() - half_log_det - constant
        if data.weight is not None:
            value = value + data.log_power(noise).sum()
        return float(value)

    def log_density_and_gradient(self, u: np.ndarray) -> tuple[float, np.ndarray]:
        """Log posterior of u (n_dims,) and its gradient (n_dims,); -inf and 0 as `log_density`."""
        prior = float(self.log_prior(u))
        if prior == -math.inf:
            return prior, np.zeros(self.n_dims)
        theta = self.data.X.new_tensor(u).requires_grad_()
        try:
            value = log_marginal_likelihood(self.kernel, self.data, theta)
        except NotPositiveDefiniteError:
            return -math.inf, np.zeros(self.n_dims)
        (gradient,) = torch.autograd.grad(value, theta)
        return prior + value.item(), gradient.cpu().numpy() + self.prior_gradient(u)
