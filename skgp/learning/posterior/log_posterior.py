r"""The exact log posterior of the hyper-parameters, in their logarithms u.

.. math:: \log p(u \mid y) = \log N(y; 0, K_u + \sigma_u^2 I) + \sum_j \log p_j(u_j) + \text{const}

with :math:`p_j` the density of u (:mod:`skgp.priors`), and zero outside the bounds
of the kernel's hyper-parameters.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels import split_noise
from skgp.kernels.covariance import variance
from skgp.kernels.expression import Binder, built_in, theta_places
from skgp.kernels.gradients import weighted_gradient
from skgp.kernels.pairwise import PairwiseKernel
from skgp.kernels.tiles import evaluate_tile
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.priors import Prior

__all__ = ["LogPosterior"]

_PRIOR_SD = 1.5  # of a user's own prior that does not say
_FEW_ROWS = 200  # up to which overheads outweigh a factorisation
_BATCH = 2**18  # entries of the kernel matrices of a batch


class LogPosterior:
    """Log posterior density of u, by Cholesky factorisation; picklable.

    Parameters
    ----------
    kernel : sklearn kernel expression
        With a top-level WhiteKernel and at least one free hyper-parameter.
    data : Data
        Float64.
    priors : sequence of Prior
        One for each element of ``kernel.theta``.

    Attributes
    ----------
    n_dims : int
    bounds : ndarray of shape (n_dims, 2)
        Of u.
    medians, prior_sd : ndarray of shape (n_dims,)
        Logarithms of the priors' medians, and standard deviations of the priors of u.

    Raises
    ------
    ValueError
        If the kernel has no noise or nothing to infer, or the number of priors is not `n_dims`.

    Notes
    -----
    A density costs a kernel matrix and :math:`n^3 / 3` flops, its gradient about four times that;
    they hold two and three n x n matrices.
    """

    def __init__(self, kernel: Any, data: Data, priors: Sequence[Prior]) -> None:
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
        self.prior_sd = np.array([getattr(p, "log_sd", _PRIOR_SD) for p in self.priors])
        # Kernel objects take longer to ask than a small matrix to factor: they are asked once.
        self._signal, self._bind = signal, Binder(signal)
        self._places, self._noise_place, self._noise = theta_places(kernel)

    @property
    def batched(self) -> bool:
        """Whether :meth:`log_densities` takes all points at once."""
        return len(self.data.y) <= _FEW_ROWS and built_in(self._signal)

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

    def log_densities(self, u: np.ndarray) -> np.ndarray:
        """As `log_density` for each row of u (k, n_dims); few data rows take all k at once."""
        u = np.asarray(u, dtype=float)
        if not self.batched:
            return np.array([self.log_density(each) for each in u])
        out = np.full(len(u), -math.inf)
        for rows, prior in self._batches(u):
            found = prior + self._log_likelihoods(u[rows])
            out[rows] = np.where(np.isnan(found), -math.inf, found)
        return out

    def _batches(self, u: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Indices of points inside the bounds, so many as are evaluated at once; their prior."""
        prior, size = self.log_prior(u), _BATCH // len(self.data.y) ** 2 + 1
        inside = np.flatnonzero(prior > -math.inf)
        for start in range(0, len(inside), size):
            rows = inside[start : start + size]
            yield rows, prior[rows]

    @torch.no_grad()
    def _log_likelihoods(self, u: np.ndarray) -> np.ndarray:
        """Log likelihoods (k,) of u (k, n_dims), their kernel matrices held at once."""
        data, theta = self.data, self.data.X.new_tensor(u)
        noise = self._noise_levels(theta)
        L = self._factors(self._pairwise(theta[:, self._places])[0], noise)
        residual = torch.linalg.solve_triangular(L, data.y[:, None], upper=False)
        half_log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = 0.5 * len(data.y) * math.log(2 * math.pi)
        value = -0.5 * residual.square().sum((-2, -1)) - half_log_det - constant
        if data.weight is not None:
            value = value + data.log_power(noise).sum(-1)
        return value.cpu().numpy()

    @cached_property
    def _pairwise(self) -> PairwiseKernel:
        """The signal over the data; made again where the posterior was pickled."""
        return PairwiseKernel(self._signal, self.data.X)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pairwise"}

    def _noise_levels(self, theta: Tensor) -> Tensor:
        """Noise variances (k, 1) at theta (k, n_dims)."""
        if self._noise_place is None:
            return theta.new_full((len(theta), 1), self._noise)
        return theta[:, self._noise_place, None].exp()

    def _factors(self, K: Tensor, noise: Tensor) -> Tensor:
        """Cholesky factors (k, n, n) of the covariances of y; NaN where there is none."""
        A = K.clone()
        A.diagonal(dim1=-2, dim2=-1).add_(self.data.row_noise(noise))
        L, info = torch.linalg.cholesky_ex(A)
        for i in info.nonzero()[:, 0].tolist():
            try:
                L[i] = jittered_cholesky(A[i]).factor
            except NotPositiveDefiniteError:
                L[i] = math.nan
        return L

    @torch.no_grad()
    def _log_likelihood(self, u: np.ndarray) -> float:
        """As the value below, without what only a gradient needs: half the time."""
        L, noise = self._factor(self.data.X.new_tensor(u))
        residual = torch.linalg.solve_triangular(L, self.data.y[:, None], upper=False)
        return self._value(L, residual.square().sum(), noise)

    def _factor(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factor (n, n) of the covariance of y, and the noise variance."""
        X, noise = self.data.X, self._noise_variance(theta)
        node = self._bind(theta[self._places], dtype=X.dtype, device=X.device)
        A = evaluate_tile(node, X, X, X.new_empty(len(X), len(X)))
        # Distances by a matrix product are not quite 0 between equal rows.
        A.diagonal().copy_(variance(node, X) + self.data.row_noise(noise))
        return jittered_cholesky(A).factor, noise

    def _noise_variance(self, theta: Tensor) -> Tensor:
        place = self._noise_place
        return theta.new_tensor(self._noise) if place is None else theta[place].exp()

    def _value(self, L: Tensor, quadratic: Tensor, noise: Tensor) -> float:
        """Log likelihood from the factor and :math:`y^T A^{-1} y`."""
        constant = 0.5 * len(self.data.y) * math.log(2 * math.pi)
        value = -0.5 * quadratic - L.diagonal().log().sum() - constant
        if self.data.weight is not None:
            value = value + self.data.log_power(noise).sum()
        return float(value)

    def log_density_and_gradient(self, u: np.ndarray) -> tuple[float, np.ndarray]:
        """Log posterior of u (n_dims,) and its gradient (n_dims,); -inf and 0 as `log_density`."""
        u = np.asarray(u, dtype=float)
        if self.batched:
            values, gradients = self.log_densities_and_gradients(u[None])
            return float(values[0]), gradients[0]
        prior = float(self.log_prior(u))
        if prior == -math.inf:
            return prior, np.zeros(self.n_dims)
        try:
            value, gradient = self._by_tiles(u)
        except NotPositiveDefiniteError:
            return -math.inf, np.zeros(self.n_dims)
        return prior + value, gradient + self.prior_gradient(u)

    def log_densities_and_gradients(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`log_density_and_gradient` for each row of u (k, n_dims): (k,), (k, n_dims).

        Few data rows take all k at once.
        """
        u = np.asarray(u, dtype=float)
        values, gradients = np.full(len(u), -math.inf), np.zeros_like(u)
        if not self.batched:
            for i, each in enumerate(u):
                values[i], gradients[i] = self.log_density_and_gradient(each)
            return values, gradients
        for rows, prior in self._batches(u):
            value, gradient = self._by_batches(u[rows])
            usable = np.isfinite(value)
            values[rows] = np.where(usable, prior + value, -math.inf)
            gradient = gradient + self.prior_gradient(u[rows])
            gradients[rows] = np.where(usable[:, None], gradient, 0.0)
        return values, gradients

    @torch.no_grad()
    def _by_batches(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        r"""Log likelihoods (k,) and gradients (k, n_dims) of u (k, n_dims).

        :math:`\partial / \partial A = \tfrac12 (\alpha \alpha^T - A^{-1}) = W`.
        """
        data, theta = self.data, self.data.X.new_tensor(u)
        noise = self._noise_levels(theta)
        K, pull = self._pairwise(theta[:, self._places])
        L = self._factors(K, noise)
        alpha = torch.cholesky_solve(data.y[:, None], L)  # (k, n, 1)
        value = -0.5 * (data.y @ alpha)[:, 0] - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value -= 0.5 * len(data.y) * math.log(2 * math.pi)
        if data.weight is not None:
            value += data.log_power(noise).sum(-1)
        W = torch.cholesky_inverse(L).neg_().add_(alpha @ alpha.mT).mul_(0.5)
        gradient = torch.zeros_like(theta)
        gradient[:, self._places] = pull(W)
        if self._noise_place is not None:
            gradient[:, self._noise_place] = self._noise_gradient(
                W.diagonal(dim1=-2, dim2=-1), noise
            )
        return value.cpu().numpy(), gradient.cpu().numpy()

    def _noise_gradient(self, diagonal: Tensor, noise: Tensor) -> Tensor:
        """By the logarithm of the noise (..., 1), given the diagonal (..., n) of W."""
        data = self.data
        gradient = (diagonal * data.row_noise(noise)).sum(-1)
        if data.weight is not None and data.scatter is not None:
            gradient = gradient + 0.5 * (1 - data.weight + data.scatter / noise).sum(-1)
        return gradient

    @torch.no_grad()
    def _by_tiles(self, u: np.ndarray) -> tuple[float, np.ndarray]:
        r"""The same with a closed form a tile, three n x n matrices in all.

        :math:`\partial / \partial A = \tfrac12 (\alpha \alpha^T - A^{-1}) = W`.
        """
        data, theta = self.data, self.data.X.new_tensor(u)
        L, noise = self._factor(theta)
        alpha = torch.cholesky_solve(data.y[:, None], L)[:, 0]
        value = self._value(L, data.y @ alpha, noise)
        W = cho_inverse(L)
        del L
        W.neg_().addr_(alpha, alpha).mul_(0.5)
        gradient = np.zeros(self.n_dims)
        signal = weighted_gradient(self._signal, data.X, data.X, W, theta[self._places])
        gradient[self._places] = signal.cpu().numpy()
        if self._noise_place is not None:
            gradient[self._noise_place] = float(self._noise_gradient(W.diagonal(), noise))
        return value, gradient
