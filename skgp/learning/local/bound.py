r"""The bound of eq. (11) of the sparse-within-sparse GP, and its gradients in closed form.

A row x with active set I, :math:`K = K_I` (with jitter), :math:`k = K_{Z_I x}`, conditions on its
own inducing variables only. With :math:`a = K^{-1} k` and :math:`q(u) = N(m, S)`,

.. math::

    \mu &= a^T m_I, \qquad v = k_{xx} - k^T a + a^T S_I a \qquad \text{(eq. 13)} \\
    \mathrm{KL} &= \tfrac12 \left( \operatorname{tr} K^{-1} S_I + m_I^T K^{-1} m_I - H
                   + \log |K| - \log |S_I| \right) \\
    \mathcal L &= \sum_n w_n \left( E_{q(f_n)}[\log p(y_n \mid f_n)]
                   - \frac{\kappa}{N} \mathrm{KL}_n \right), \qquad N = \sum_n w_n,

summed over the latent functions, which share K and k. A row of weight 2 is the row given twice.

The weight :math:`\kappa` of the divergence is 1 in the paper. The mean of the local divergences is
then of about H nats, whatever M: many inducing points are free to overfit. M / H restores about
what the divergence of all M is, and H = M gives exactly the bound of SVGP.

Autograd needs the gradient of a batch of Cholesky factors, substitutions and products for these few
numbers. With :math:`C = K^{-1} m_I` and :math:`u = K^{-1} S_I a`, one latent function has

==========  =====================  =======================================  ===================
            k                      K                                        m, S
==========  =====================  =======================================  ===================
mu          C                      :math:`-a C^T`                           a; 0
v           2 u - 2 a              :math:`a a^T - 2 a u^T`                  0; :math:`a a^T`
KL          0                      :math:`\frac12 (K^{-1} - K^{-1} S_I      C;
                                   K^{-1} - C C^T)`                         :math:`\frac12 (K^{-1}
                                                                            - S_I^{-1})`
==========  =====================  =======================================  ===================

(to be symmetrised), of which sums over c functions share every product of size H^3.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skgp.data import Data
from skgp.inference.defaults import LOCAL_JITTER
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.kernels.gram import gram
from skgp.learning.local.defaults import BOUND_NUMBERS
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import jittered_cholesky


@dataclass(frozen=True)
class LocalObjective:
    """What to maximise and over what."""

    likelihood: Likelihood  # with its free parameters
    kl_weight: float  # kappa; the paper's is 1, SVGP's M / H
    learn_kernel: bool = True
    learn_likelihood: bool = True
    learn_inducing: bool = False


class LocalMoments(NamedTuple):
    """What b rows say of c latent functions, without prior means; each (b, c)."""

    mean: Tensor  # of q(f)
    var: Tensor  # of q(f)
    kl: Tensor  # of q(u) from the prior over each row's active inducing variables, in nats


def bound(
    state: SWSGPState,
    data: Data,
    active: Tensor,
    objective: LocalObjective,
    *,
    theta: Tensor | None = None,
    total: float | None = None,
) -> Tensor:
    """The rows' part of the bound, eq. 11, in nats; differentiable in theta and the state.

    Of b rows with active points (b, H); `theta` replaces the kernel's own values, `total` is N if
    these rows are not all. A minibatch of b of n rows, times n / b, is an unbiased estimate of the
    bound of all. O(b H^2 (H + d + c)), and O(c b H^2 M) more with a full covariance, for value and
    gradient: nothing grows with M otherwise, but the gradients of m, S and Z are dense.
    """
    likelihood = data.likelihood(objective.likelihood.with_parameters(state.likelihood))
    moments = _row_moments(state, data.X, active, theta)
    total = data.total if total is None else total
    fit = likelihood.expected_log_prob(data.y, state.offset + moments.mean, moments.var)
    return data.weighted_sum(fit - (objective.kl_weight / total) * moments.kl)


@torch.no_grad()
def total_bound(state: SWSGPState, data: Data, active: Tensor, objective: LocalObjective) -> float:
    """The bound of all rows, in nats; a tile at a time, without gradients."""
    return sum(
        float(bound(state, data.take(rows), active[rows], objective, total=data.total))
        for rows in _tiles(state, active)
    )


@torch.no_grad()
def latent_moments(state: SWSGPState, X: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, prior mean included, and variance of q(f) (eq. 13), each (n, c); without gradients."""
    parts = [_row_moments(state, X[rows], active[rows], None) for rows in _tiles(state, active)]
    mean, var = (torch.cat(each) for each in ([p.mean for p in parts], [p.var for p in parts]))
    return state.offset + mean, var


def local_moments(
    joint: Tensor, mean: Tensor, *, var: Tensor | None = None, covariance: Tensor | None = None
) -> LocalMoments:
    """Moments of q(f) and local KL divergences, with gradients in closed form, of first order.

    `joint` (b, H + 1, H + 1) is the prior covariance of f at the active points of each observation
    and, last, at its input; mean (b, H, c); var (b, H, c) is the diagonal of S_I, covariance
    (c, b, H, H) all of it.
    """
    if covariance is None:
        return LocalMoments(*_DiagonalMoments.apply(joint, mean, var))
    return LocalMoments(*_FullMoments.apply(joint, mean, covariance))


def _row_moments(
    state: SWSGPState, X: Tensor, active: Tensor, theta: Tensor | None
) -> LocalMoments:
    """Moments and KL divergences at X (b, d) given the H inducing points active for each (b, H)."""
    (b, H), flat = active.shape, active.reshape(-1)
    # The gradient of index_select, unlike that of indexing, adds rows without sorting them.
    points = state.Z.index_select(0, flat).view(b, H, -1)
    joint = gram(state.kernel, torch.cat([points, X[:, None]], dim=1), theta=theta)
    mean = state.mean.index_select(0, flat).view(b, H, -1)
    if state.var is not None:
        return local_moments(joint, mean, var=state.var.index_select(0, flat).view(b, H, -1))
    root = cast(Tensor, state.root)
    rows = root.index_select(1, flat).view(-1, b, H, state.n_inducing)
    return local_moments(joint, mean, covariance=rows @ rows.mT)


def _tiles(state: SWSGPState, active: Tensor) -> tuple[Tensor, ...]:
    """Indices of the observations of each tile, whose largest array has `BOUND_NUMBERS`."""
    n, H = active.shape
    numbers = H * (H + state.Z.shape[1] + 2 * state.n_latent)
    if state.root is not None:
        numbers += H * state.n_inducing * state.n_latent
    return torch.arange(n, device=active.device).split(max(1, BOUND_NUMBERS // numbers))


# Closed-form gradients --------------------------------------------------------------------------


class _Conditional(NamedTuple):
    """Rows given their active inducing variables."""

    weights: Tensor  # a (b, H)
    precision: Tensor  # P = K^-1 (b, H, H)
    projected: Tensor  # C = K^-1 m (b, H, c)
    var: Tensor  # k_xx - k'a (b, 1)
    log_det: Tensor  # log |K| (b, 1)


def _condition(joint: Tensor, mean: Tensor) -> _Conditional:
    K = joint[:, :-1, :-1].clone()
    K.diagonal(dim1=-2, dim2=-1).mul_(1 + LOCAL_JITTER)
    L = jittered_cholesky(K).factor
    P = torch.cholesky_inverse(L)
    cross = joint[:, :-1, -1]
    # One product serves k and the c columns of m.
    solved = P @ torch.cat([cross[..., None], mean], dim=-1)
    a, C = solved[..., 0], solved[..., 1:]
    var = (joint[:, -1, -1] - (cross * a).sum(-1)).clamp_min(0.0)
    log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return _Conditional(a, P, C, var[:, None], log_det[:, None])


def _moments(
    given: _Conditional, mean: Tensor, spread: Tensor, trace: Tensor, log_det: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """mu, v and KL, each (b, c), from a'S a, tr(P S) and log|S|, each (b, c)."""
    mu = (given.weights[..., None] * mean).sum(1)
    quadratic = (mean * given.projected).sum(1)
    kl = 0.5 * (trace + quadratic - mean.shape[1] + given.log_det - log_det)
    return mu, given.var + spread, kl


def _mean_gradient(a: Tensor, C: Tensor, grads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Of m_I, (b, H, c)."""
    mu, _, kl = grads
    return torch.addcmul(a[..., None] * mu[:, None], C, kl[:, None])


def _joint_gradient(
    a: Tensor,
    P: Tensor,
    C: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    u: Tensor,
    sandwich: Tensor,
) -> Tensor:
    """Of the covariance of active points and row, symmetric.

    u (b, H) is P (sum_l g_l S_l) a with g the gradients of v, and the sandwich (b, H, H)
    P (sum_l g_l S_l) P with g those of KL.
    """
    mu, var, kl = grads
    v = var.sum(1, keepdim=True)
    # Terms of mu and v: -(a r' + r a') / 2 of K, and r - v a of k.
    r = (C @ mu[..., None])[..., 0] + 2 * u - v * a
    left = torch.cat([C * kl[:, None], a[..., None], r[..., None]], dim=-1)
    right = torch.cat([C, r[..., None], a[..., None]], dim=-1)
    K = torch.baddbmm(P * kl.sum(1)[:, None, None] - sandwich, left, right.mT, alpha=-1).mul_(0.5)
    K.diagonal(dim1=-2, dim2=-1).mul_(1 + LOCAL_JITTER)
    k = (0.5 * (r - v * a))[..., None]
    return torch.cat([torch.cat([K, k], dim=2), torch.cat([k.mT, v[..., None]], dim=2)], dim=1)


class _DiagonalMoments(torch.autograd.Function):
    """`local_moments` of var (b, H, c)."""

    @staticmethod
    def forward(ctx, joint, mean, var):
        given = _condition(joint, mean)
        ctx.save_for_backward(given.weights, given.precision, given.projected, var)
        diagonal = given.precision.diagonal(dim1=-2, dim2=-1)[..., None]
        # Both sums over H in one.
        factors = torch.cat([given.weights.square()[..., None], diagonal], dim=-1)
        spread, trace = (factors.mT @ var).unbind(1)
        return _moments(given, mean, spread, trace, var.log().sum(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        a, P, C, var = ctx.saved_tensors
        for_joint, for_mean, for_var = ctx.needs_input_grad
        joint = mean = spread = None
        if for_joint:
            of_var, of_kl = (var @ torch.stack(grads[1:], dim=-1)).unbind(-1)  # each (b, H)
            u = (P @ (a * of_var)[..., None])[..., 0]
            sandwich = (P * of_kl[:, None]) @ P
            joint = _joint_gradient(a, P, C, grads, u, sandwich)
        if for_mean:
            mean = _mean_gradient(a, C, grads)
        if for_var:
            excess = P.diagonal(dim1=-2, dim2=-1)[..., None] - 1 / var
            spread = a.square()[..., None] * grads[1][:, None] + excess * (0.5 * grads[2][:, None])
        return joint, mean, spread


class _FullMoments(torch.autograd.Function):
    """`local_moments` of covariances S (c, b, H, H)."""

    @staticmethod
    def forward(ctx, joint, mean, S):
        given = _condition(joint, mean)
        L = jittered_cholesky(S).factor
        ctx.save_for_backward(given.weights, given.precision, given.projected, S, L)
        spread = torch.einsum("bh,cbhk,bk->bc", given.weights, S, given.weights)
        trace = torch.einsum("bhk,cbhk->bc", given.precision, S)
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1).T
        return _moments(given, mean, spread, trace, log_det)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        a, P, C, S, L = ctx.saved_tensors
        for_joint, for_mean, for_spread = ctx.needs_input_grad
        joint = mean = spread = None
        if for_joint:
            of_var, of_kl = torch.einsum("gbc,cbhk->gbhk", torch.stack(grads[1:]), S)
            u = (P @ (of_var @ a[..., None]))[..., 0]
            joint = _joint_gradient(a, P, C, grads, u, P @ of_kl @ P)
        if for_mean:
            mean = _mean_gradient(a, C, grads)
        if for_spread:
            of_var, of_kl = (each.T[..., None, None] for each in grads[1:])
            outer = a[:, :, None] * a[:, None]
            spread = outer * of_var + (P - torch.cholesky_inverse(L)) * (0.5 * of_kl)
        return joint, mean, spread
