r"""Where the search for q(u) begins.

``natural_gradients`` finds the optimum of the evidence bound for fixed hyper-parameters: with
:math:`g_i = E_q[\partial \log p]` and :math:`h_i = -E_q[\partial^2 \log p]` it repeats

.. math:: \lambda_i \leftarrow (1 - \rho) \lambda_i + \rho h_i, \quad
          \eta_i \leftarrow (1 - \rho) \eta_i + \rho (g_i + h_i (\mu_i - o)), \quad
          q(w) = N(P^{-1} b, P^{-1}), \quad
          P = I + \tfrac1\beta \sum_i w_i \lambda_i \phi_i \phi_i^T, \;
          b = \tfrac1\beta \sum_i w_i \eta_i \phi_i

(conjugate-computation variational inference [1]_); one step with :math:`\rho = 1` is exact for
Gaussian noise.

``broadened`` goes from there towards the log-loss. Its optimum has less noise and a wider q(u):
uncertainty of f takes the place of noise, for it can differ from place to place. Among

.. math:: S_\tau = \big(I + (S^{-1} - I) / \tau\big)^{-1}, \qquad \sigma^2 \leftarrow \nu \sigma^2,

the best pair :math:`(\tau, \nu)` of a grid is taken; that costs one eigenvalue decomposition, where
a gradient search would need many iterations.

References
----------
.. [1] Khan and Lin (2017), Conjugate-computation variational inference.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.collapsed import posterior_from_precision
from skgp.inference.sparse.reference import kl_from_standard_normal
from skgp.inference.sparse.sparse import SparseState, inducing_factor, whitened_features
from skgp.kernels.gram import gram_diag
from skgp.learning.sparse.objective import Objective, data_loss
from skgp.linalg.cholesky import jittered_cholesky

__all__ = ["broadened", "natural_gradients"]

_STEP = 0.8
_SLACK = 1e-9  # of the bound: what rounding may cost a step
_WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_NOISES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
_GRID_ROWS = 4000


def natural_gradients(
    state: SparseState,
    data: Data,
    objective: Objective,
    *,
    max_iter: int = 10,
    tol: float = 1e-4,
) -> SparseState:
    """Optimum of the evidence bound in q(u) for fixed hyper-parameters.

    Parameters
    ----------
    state : SparseState
        Its posterior is where the steps begin.
    data : Data
    objective : Objective
        For the likelihood and beta.
    max_iter : int, default=10
    tol : float, default=1e-4
        Root mean square change of the rows' means, relative to their size, at which to stop.

    Returns
    -------
    SparseState

    Notes
    -----
    O(n M^2 c) a step. Where a likelihood is not log-concave and the curvature negative, it is that
    of the parabola with the same slope whose top is the mode of the likelihood: nothing, in its
    place, would let q(u) run away from such rows. A step that would lower the bound is cut: from
    a rate far too low, that to a huge count goes beyond all bounds.
    """
    made = objective.family.with_parameters(state.likelihood)
    likelihood = made.at(data.offset)
    L = inducing_factor(state.kernel, state.Z)
    Phi = whitened_features(state.kernel, data.X, state.Z, L)
    unexplained = (gram_diag(state.kernel, data.X) - Phi.square().sum(0)).clamp_min(0.0)
    scale = _column(data.weight, data.y) / max(objective.beta, 1e-3)
    precision, shift = torch.zeros_like(data.y), torch.zeros_like(data.y)
    bound = replace(objective, name="elbo", beta=max(objective.beta, 1e-3), gradient="exact")

    def moments(state: SparseState) -> tuple[Tensor, Tensor]:
        var = (unexplained + (state.root.mT @ Phi).square().sum(1)).mT
        return Phi.mT @ state.mean, var

    def loss(state: SparseState, mean: Tensor, var: Tensor) -> float:
        rows = float(data_loss(bound, made, data, state.offset + mean, var))
        total = rows + bound.beta * float(kl_from_standard_normal(state.mean, state.root))
        return total if math.isfinite(total) else math.inf

    (mean, var), step = moments(state), 1.0
    best = loss(state, mean, var)
    for _ in range(max_iter):
        slope, curvature = likelihood.expected_derivatives(data.y, state.offset + mean, var)
        to_mode = likelihood.mode(data.y) - state.offset - mean
        curvature = torch.where(curvature < 0, -curvature, slope / to_mode)
        new_precision = (1 - step) * precision + step * curvature
        new_shift = (1 - step) * shift + step * (slope + curvature * mean)
        sites = scale * new_precision
        P = torch.stack([(Phi * column) @ Phi.mT for column in sites.unbind(1)])
        P = P.diagonal_scatter(P.diagonal(dim1=1, dim2=2) + 1.0, dim1=1, dim2=2)
        new = state.with_posterior(*posterior_from_precision(P, Phi @ (scale * new_shift)))
        before, found = mean, moments(new)
        value = loss(new, *found)
        if not value <= best + _SLACK * abs(best):
            step *= 0.25
            continue
        state, precision, shift, (mean, var) = new, new_precision, new_shift, found
        best, step = min(best, value), min(_STEP, 2 * step)
        if float((mean - before).square().mean().sqrt()) <= tol * float(mean.square().mean() + 1):
            break
    return state


def broadened(state: SparseState, data: Data, objective: Objective) -> SparseState:
    """The state with the posterior's width and, of noise, the variance that the log-loss prefers.

    Parameters
    ----------
    state : SparseState
        At the optimum of the evidence bound.
    data : Data
        At most 4000 rows of it are looked at.
    objective : Objective

    Returns
    -------
    SparseState
        Its mean is that of `state`.
    """
    n, objective = len(data), replace(objective, gradient="exact")
    some = data.take(torch.arange(0, n, -(-n // _GRID_ROWS)))
    share = data.total / some.total
    L = inducing_factor(state.kernel, state.Z)
    Phi = whitened_features(state.kernel, some.X, state.Z, L)
    unexplained = (gram_diag(state.kernel, some.X) - Phi.square().sum(0)).clamp_min(0.0)
    mean = state.offset + Phi.mT @ state.mean
    # S^-1 - I = V diag(gain) V^T for each latent function.
    variances, vectors = torch.linalg.eigh(state.root @ state.root.mT)
    gain = 1 / variances.clamp_min(torch.finfo(Phi.dtype).tiny) - 1
    squares = (vectors.mT @ Phi).square()  # (c, M, n)
    best, chosen = math.inf, (1.0, state.likelihood)
    for width in _WIDTHS:
        narrowed = 1 / (1 + gain / width)  # (c, M)
        var = (unexplained + (narrowed[:, None] @ squares)[:, 0]).mT
        divergence = 0.5 * (narrowed - 1 - narrowed.log()).sum()
        for likelihood in _less_noise(state, objective):
            made = objective.family.with_parameters(likelihood)
            rows = share * data_loss(objective, made, some, mean, var)
            loss = float(rows + objective.beta * divergence)
            if loss < best:
                best, chosen = loss, (width, likelihood)
    width, likelihood = chosen
    if width == 1.0:
        root = state.root
    else:
        covariance = (vectors / (1 + gain / width)[:, None]) @ vectors.mT
        root = jittered_cholesky(covariance).factor
    return SparseState(state.kernel, likelihood, state.Z, state.mean, root, state.offset)


def _less_noise(state: SparseState, objective: Objective) -> list[Tensor]:
    """Parameters of the likelihood with the variance of the noise, the first, made smaller."""
    if not (objective.learn_likelihood and len(state.likelihood)):
        return [state.likelihood]
    low, high = objective.family.box(state.likelihood)
    first = torch.eye(len(state.likelihood), dtype=low.dtype, device=low.device)[0]
    candidates = [state.likelihood + math.log(factor) * first for factor in _NOISES]
    return [candidate.clamp(low, high) for candidate in candidates]


def _column(weight: Tensor | None, like: Tensor) -> Tensor:
    return like.new_ones(1, 1) if weight is None else weight[:, None]
