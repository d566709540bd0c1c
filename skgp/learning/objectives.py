r"""Log-densities of observations given their neighbours, differentiable in theta.

``theta`` are the log hyper-parameters of a scikit-learn kernel expression whose top-level
``WhiteKernel`` is the noise. Where all observations count jointly, their log marginal likelihood
is in :mod:`skgp.learning.evidence`.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, chapter 5.
.. [2] Vecchia (1988), Estimation and model identification for continuous spatial processes.
"""

import math

import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.gram import gram, split_noise, split_theta
from skgp.linalg.cholesky import jittered_cholesky

_LOG_2PI = math.log(2 * math.pi)  # mathematical


def leave_one_out_log_density(
    kernel, data: Data, rows: Tensor, neighbors: Tensor, theta: Tensor
) -> Tensor:
    """Log-density of all that was observed at each row given its neighbours, noise included.

    The row is put last in the joint covariance of its neighbourhood (:class:`_LastGivenOthers`).

    Parameters
    ----------
    kernel : sklearn kernel expression with a top-level WhiteKernel
    data : Data
    rows : Tensor of int64, shape (b,)
    neighbors : Tensor of int64, shape (b, k)
    theta : Tensor of shape (n_theta,)

    Returns
    -------
    Tensor of shape (b,)
        Nats; differentiable in `theta`. ``O(b k^3)``.
    """
    signal, white = split_noise(kernel)
    if white is None:
        raise ValueError(f"kernel={kernel} has no noise; add + WhiteKernel(0.1) to it.")
    theta_signal, log_noise = split_theta(kernel, theta)
    noise = theta.new_tensor(white.noise_level) if log_noise is None else log_noise.exp()
    group = torch.cat([neighbors, rows[:, None]], dim=1)  # (b, k + 1)
    K = gram(signal, data.X[group], theta=theta_signal, method="expand")
    K = K + torch.diag_embed(data.row_noise(noise)[group])
    return _LastGivenOthers.apply(K, data.y[group]) + data.log_power(noise)[rows]


class _LastGivenOthers(torch.autograd.Function):
    r"""Log-density of the last entry of :math:`y \sim N(0, A)` given the others, for a batch.

    With :math:`u = A^{-1} e_k` and :math:`v = A^{-1} y` the conditional variance is
    :math:`1 / u_k` and the residual :math:`v_k / u_k` (Rasmussen and Williams, eqs. 5.10-5.12), so

    .. math:: \log p = \tfrac12 \log u_k - \tfrac12 v_k^2 / u_k - \tfrac12 \log 2\pi, \qquad
              \frac{\partial \log p}{\partial A} =
              \frac{v_k}{2 u_k} (u v^T + v u^T) - \frac{1 + v_k^2 / u_k}{2 u_k} u u^T.

    The closed form spares the backward pass of a batch of Cholesky factorisations.
    """

    @staticmethod
    def forward(ctx, A: Tensor, y: Tensor) -> Tensor:
        last = torch.zeros_like(y)
        last[:, -1] = 1.0
        L = jittered_cholesky(A).factor
        u, v = torch.cholesky_solve(torch.stack([last, y], dim=-1), L).unbind(-1)
        ctx.save_for_backward(u, v)
        return 0.5 * (u[:, -1].log() - v[:, -1].square() / u[:, -1] - _LOG_2PI)

    @staticmethod
    def backward(ctx, grad: Tensor):
        u, v = ctx.saved_tensors
        u_last, v_last = u[:, -1], v[:, -1]
        b = (grad * v_last / u_last)[:, None] * v
        b = b - (grad * (1 + v_last.square() / u_last) / (2 * u_last))[:, None] * u
        outer = u[:, :, None] * b[:, None, :]  # symmetrised: u b^T and b u^T, half each
        return 0.5 * (outer + outer.mT), None
