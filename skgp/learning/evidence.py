r"""Log marginal likelihood of a dense GP at many theta, and of observations given neighbours.

.. math:: \log p(y) = -\tfrac12 y^T \alpha - \tfrac12 \log|A| - \tfrac n2 \log 2\pi, \qquad
          \frac{\partial \log p(y)}{\partial \theta_t} = \operatorname{tr}\Big(W \frac{\partial A}
          {\partial \theta_t}\Big), \quad W = \tfrac12 (\alpha \alpha^T - A^{-1}), \quad
          \alpha = A^{-1} y,

with :math:`A = K_\theta + \sigma^2 \operatorname{diag}(w)^{-1}` and sample weights w [1]_,
eqs. (5.8) and (5.9). The same inverse predicts every observation from all others, eqs. (5.10) and
(5.11):

.. math:: y_i - \mu_{-i} = \alpha_i / [A^{-1}]_{ii}, \qquad \sigma_{-i}^2 = 1 / [A^{-1}]_{ii}.

For many observations, :func:`leave_one_out_log_density` is the density of each given its nearest
neighbours [2]_, differentiable in torch.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, chapter 5.
.. [2] Vecchia (1988), Estimation and model identification for continuous spatial processes.
"""

import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.expression import split_noise, split_theta, theta_places
from skgp.kernels.gram import gram
from skgp.kernels.pairwise import GramWithGradient
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import cho_inverse, cho_solve, jittered_cholesky, log_det, raise_diagonal_
from skgp.linalg.runtime import to_arrays
from skgp.linalg.small_matrices import gather_rows

_LOG_2PI = math.log(2 * math.pi)  # mathematical


class EvidenceAt(NamedTuple):
    """What an evaluation yields."""

    value: float  # log marginal likelihood, in nats
    gradient: np.ndarray  # (n_theta,)
    #: (n,) or (n, t), mean targets of each distinct input less their predictions, left out
    residual: np.ndarray
    variance: np.ndarray  # (n,), of each of these, noise included

    @property
    def leave_one_out(self) -> np.ndarray:
        """Log density of the mean targets of an input given all others, shape (n,), in nats."""
        each = np.log(2 * math.pi * self.variance) + self.residual.T**2 / self.variance
        return -0.5 * np.atleast_2d(each).sum(0)


class ExactEvidence:
    """The log marginal likelihood of an expression with a top-level WhiteKernel; float64 data.

    Parameters
    ----------
    kernel : sklearn kernel expression
        Its WhiteKernel is a summand; a ValueError if there is none.
    data : Data
        Of targets y (n, t), which share the kernel and the noise, values are sums over them.

    Notes
    -----
    An evaluation takes ``n^3`` multiplications and O(n^2 d) more, and holds five n x n matrices.
    """

    def __init__(self, kernel, data: Data) -> None:
        self.kernel = kernel
        places, self.noise_place, self._noise = theta_places(kernel)
        contiguous = places == list(range(len(places)))  # a slice takes no copy
        self._places = slice(len(places)) if contiguous else places
        self._gram = GramWithGradient(split_noise(kernel)[0], data.X)
        self.data = data = data.to("cpu") if self._gram.few else data
        weight = data.y.new_ones(len(data)) if data.weight is None else data.weight
        arrays: Any = (data.y, weight)
        self._y, self._weight = (a.numpy() if self._gram.few else a for a in arrays)

    @property
    def in_closed_form(self) -> bool:
        """Whether an evaluation of these few rows is in arrays of NumPy, without autograd."""
        return self._gram.few and self._gram.in_closed_form

    def value(self, theta: np.ndarray) -> float:
        """The log marginal likelihood alone, in nats; as `__call__`."""
        L = _factor(self._gram.values(theta[self._places]), self._noise_at(theta) / self._weight)
        return float(self._value(theta, L, cho_solve(L, self._y)))

    @torch.no_grad()
    def of_many(self, theta: np.ndarray, *, slope: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Values (k,) at theta (k, n_theta), and gradients if `slope`, of few rows y (n,).

        NaN without a Cholesky factor.
        """
        data, at = self.data, self.data.X.new_tensor(theta)
        noise = self.noise_variance(at)  # (k, 1)
        K, of_signal = self._gram.of_many(theta[:, self._places])
        A = K.clone()
        A.diagonal(dim1=-2, dim2=-1).add_(data.row_noise(noise))
        L = _factors(A)
        y = data.y[:, None].expand(len(at), -1, -1)
        alpha = cho_solve(L, y)  # (k, n, 1)
        value = log_density(L, y, alpha) + data.log_power(noise).sum(-1)
        if not slope:
            return value.cpu().numpy(), None
        W = slope_(cho_inverse(L), alpha)
        gradient = torch.zeros_like(at)
        gradient[:, self._places] = of_signal(W)
        if self.noise_place is not None:
            diagonal = W.diagonal(dim1=-2, dim2=-1)
            gradient[:, self.noise_place] = data.noise_gradient(diagonal, noise)
        values, gradients = to_arrays(value, gradient)
        return values, gradients

    def __call__(self, theta: np.ndarray) -> EvidenceAt:
        """Evaluate at theta (n_theta,); a NotPositiveDefiniteError without a Cholesky factor."""
        data, place = self.data, self.noise_place
        row_noise = self._noise_at(theta) / self._weight
        K, of_signal = self._gram(theta[self._places])
        L = _factor(K, row_noise)
        del K
        alpha = cho_solve(L, self._y)
        value = self._value(theta, L, alpha)
        inverse = cho_inverse(L)
        scale = inverse.diagonal() + 0.0
        W = slope_(inverse, alpha)
        of_noise = W.diagonal() @ row_noise
        if place is not None and data.scatter is not None:
            noise = data.y.new_full((), self._noise_at(theta))
            of_noise = of_noise + self._like_K(data.log_power_slope(noise))
        residual = alpha / (scale if alpha.ndim == 1 else scale[:, None])
        found: Any = value, of_signal(W), of_noise, residual, 1 / scale
        if not self._gram.few:
            found = to_arrays(*found)  # at once
        gradient = np.zeros(len(theta))
        gradient[self._places] = found[1]
        if place is not None:
            gradient[place] = found[2]
        return EvidenceAt(float(found[0]), gradient, *found[3:])

    def _like_K(self, total: Tensor) -> Any:
        """A sum, which is a float where K is an array."""
        return float(total) if self._gram.few else total

    def noise_variance(self, theta: Tensor) -> Tensor:
        """(..., 1) at theta (..., n_theta)."""
        if self.noise_place is None:
            return theta.new_full((*theta.shape[:-1], 1), self._noise)
        return theta[..., self.noise_place, None].exp()

    def _noise_at(self, theta: np.ndarray) -> float:
        return self._noise if self.noise_place is None else math.exp(theta[self.noise_place])

    def _value(self, theta: np.ndarray, L: Any, alpha: Any) -> Any:
        """Of distinct inputs, and of the scatter within them."""
        value, data = log_density(L, self._y, alpha), self.data
        if data.scatter is None:
            return value
        noise = data.y.new_full((), self._noise_at(theta))
        return value + self._like_K(data.log_power(noise).sum())


def _factor(K: Any, row_noise: Any, **options: Any) -> Any:
    """L (n, n) of A = K + diag(noise) = L L'; K is left as it is."""
    A = K + 0.0
    raise_diagonal_(A, row_noise)
    return jittered_cholesky(A, **options).factor


def _factors(A: Tensor) -> Tensor:
    """Cholesky factors (k, n, n), of which those that have none are NaN."""
    L, info = torch.linalg.cholesky_ex(A)
    for i in info.nonzero()[:, 0].tolist():
        try:
            L[i] = jittered_cholesky(A[i]).factor
        except NotPositiveDefiniteError:
            L[i] = math.nan
    return L


class TargetsEvidence:
    r"""The same of t targets that share a kernel, rows of known noise variances, for a minimiser.

    .. math:: \sum_{j=1}^t \log N(y_j; 0, K_\theta + \operatorname{diag}(v))

    `gram` gives K at theta, noise included (:func:`skgp.kernels.training.training_gram`), Y (n, t),
    v of one number or (n,).

    No diagonal is raised: a covariance without a Cholesky factor is a NotPositiveDefiniteError.
    """

    def __init__(self, gram: Any, Y: np.ndarray, row_noise: float | np.ndarray) -> None:
        self._gram = gram
        Y = np.asarray(Y, dtype=float)
        noise = np.broadcast_to(np.asarray(row_noise, dtype=float), len(Y))
        self._tensors = torch.tensor(Y), torch.tensor(noise)
        self._arrays: Any = (Y, noise)
        if not gram.few:
            self._arrays = tuple(a.to(gram.device) for a in self._tensors)

    @property
    def has_many(self) -> bool:
        """Whether :meth:`of_many` can be: the kernel has a batch."""
        return self._gram.has_many

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Minus the log marginal likelihood at theta (n_theta,), in nats, and its gradient."""
        Y, row_noise = self._arrays
        K, gradient = self._gram(theta)
        L = _factor(K, row_noise, max_jitter=0.0)
        alpha = cho_solve(L, Y)
        return -float(log_density(L, Y, alpha)), -gradient(slope_(cho_inverse(L), alpha))

    def of_many(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same at theta (k, n_theta): (k,), infinite without a factor, and (k, n_theta)."""
        (K, gradient), (Y, row_noise) = self._gram.of_many(theta), self._tensors
        A = K.clone()
        A.diagonal(dim1=1, dim2=2).add_(row_noise)
        L, failed = torch.linalg.cholesky_ex(A)
        L[failed != 0] = torch.eye(len(Y), dtype=L.dtype)
        Y = Y.expand(len(theta), *Y.shape)
        alpha = cho_solve(L, Y)
        loss = torch.where(failed == 0, -log_density(L, Y, alpha), math.inf)
        return loss.numpy(), -gradient(slope_(cho_inverse(L), alpha))


def log_density(L: Any, Y: Any, alpha: Any) -> Any:
    """Of Y under N(0, A), in nats, given A's factor L (..., n, n) and alpha = A^-1 Y.

    Y is (n,), or (..., n, t) of t targets, which are summed over.
    """
    if Y.ndim == 1:
        return -0.5 * (Y @ alpha + log_det(L) + len(Y) * _LOG_2PI)
    n, n_targets = Y.shape[-2:]
    return -0.5 * ((Y * alpha).sum((-2, -1)) + n_targets * (log_det(L) + n * _LOG_2PI))


def slope_(inverse: Any, alpha: Any) -> Any:
    """Derivative W (..., n, n) of `log_density` in A, in the place of A^-1."""
    if alpha.ndim == 1:
        inverse -= alpha[:, None] * alpha
    else:
        inverse *= alpha.shape[-1]
        inverse -= alpha @ alpha.swapaxes(-2, -1)
    inverse *= -0.5
    return inverse


def leave_one_out_log_density(
    kernel, data: Data, rows: Tensor, neighbors: Tensor, theta: Tensor, *, jitter: float = 0.0
) -> Tensor:
    """Log-density of all that was observed at each row given its neighbours, noise included.

    Summed over targets. The row is put last in the joint covariance of its neighbourhood
    (:class:`_LastGivenOthers`).

    `rows` (b,) and `neighbors` (b, k) are indices; the densities (b,), in nats, are differentiable
    in `theta` (n_theta,). `jitter` is further noise of the neighbours, relative to the variances of
    f. ``O(b k^3)``.
    """
    signal, _ = split_noise(kernel)
    theta_signal, log_noise = split_theta(kernel, theta)
    if log_noise is None:
        raise ValueError(f"kernel={kernel} has no noise; add + WhiteKernel(0.1) to it.")
    noise = log_noise.exp()
    group = torch.cat([neighbors, rows[:, None]], dim=1)  # (b, k + 1)
    K = gram(signal, gather_rows(data.X, group), theta=theta_signal, method="expand")
    added = data.row_noise(noise)[group]
    if jitter:
        own = jitter * K.diagonal(dim1=-2, dim2=-1)
        added = added + torch.cat([own[:, :-1], torch.zeros_like(own[:, -1:])], dim=1)
    return _LastGivenOthers.apply(K, added, data.y[group]) + data.log_power(noise)[rows]


@torch.no_grad()
def leave_one_out_errors(
    kernel, data: Data, rows: Tensor, neighbors: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors and their variances, (b,) each, of predictions of one target from neighbours (b, k).

    Noise included, as of :func:`leave_one_out_log_density`.
    """
    signal, white = cast(tuple[Any, Any], split_noise(kernel))
    group = torch.cat([neighbors, rows[:, None]], dim=1)  # (b, k + 1)
    K = gram(signal, gather_rows(data.X, group), method="expand")
    noise = data.row_noise(data.X.new_tensor(white.noise_level))[group]
    u, v = _last_of_inverse(K, noise, data.y[group][..., None])
    return v[:, -1, 0] / u[:, -1, 0], 1 / u[:, -1, 0]


def _last_of_inverse(K: Tensor, noise: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """u (b, k, 1) and v (b, k, t) of `_LastGivenOthers`."""
    A = K.clone()
    A.diagonal(dim1=-2, dim2=-1).add_(noise)
    last = torch.zeros_like(Y[..., :1])
    last[:, -1] = 1.0
    both = torch.cholesky_solve(torch.cat([last, Y], dim=-1), jittered_cholesky(A).factor)
    u, v = both.split([1, Y.shape[-1]], -1)
    return u, v


class _LastGivenOthers(torch.autograd.Function):
    r"""Log-density of the last entry of :math:`y \sim N(0, A)` given the others, for a batch.

    With A = K + diag(noise), K (b, k, k), of y (b, k), or (b, k, t) of t targets, over which it is
    summed.

    With :math:`u = A^{-1} e_k` and :math:`v = A^{-1} y` the conditional variance is
    :math:`1 / u_k` and the residual :math:`v_k / u_k` (Rasmussen and Williams, eqs. 5.10-5.12), so

    .. math:: \log p = \tfrac12 \log u_k - \tfrac12 v_k^2 / u_k - \tfrac12 \log 2\pi, \qquad
              \frac{\partial \log p}{\partial A} =
              \frac{v_k}{2 u_k} (u v^T + v u^T) - \frac{1 + v_k^2 / u_k}{2 u_k} u u^T.

    The closed form spares the backward pass of a batch of Cholesky factorisations.
    """

    @staticmethod
    def forward(ctx, K: Tensor, noise: Tensor, y: Tensor) -> Tensor:
        u, v = _last_of_inverse(K, noise, y[..., None] if y.ndim == 2 else y)
        ctx.save_for_backward(u, v)
        each = u[:, -1].log() - v[:, -1].square() / u[:, -1] - _LOG_2PI  # (b, t)
        return 0.5 * each.sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        u, v = ctx.saved_tensors
        u_last, v_last, g = u[:, -1], v[:, -1], grad[:, None]  # (b, 1), (b, t), (b, 1)
        b = ((g * v_last / u_last)[:, None] * v).sum(-1)  # (b, k)
        b = b - (g * (1 + v_last.square() / u_last) / (2 * u_last)).sum(1)[:, None] * u[..., 0]
        outer = u * b[:, None, :]  # symmetrised: u b^T and b u^T, half each
        return 0.5 * (outer + outer.mT), u[..., 0] * b, None
