r"""Laplace approximation of a GP classifier in function space, for up to a few thousand rows.

The latent function of column j is :math:`f_j = b_j + g_j`, :math:`g_j \sim N(0, K_\theta)`, and
:math:`w_i` weighs row i. With :math:`\hat g` the mode of :math:`\sum_i w_i \log p(y_i \mid b + g_i)
- \tfrac12 g^T K^{-1} g`, :math:`a = K^{-1} \hat g` and :math:`W = -\nabla^2` of the first term,

.. math:: \log q(y \mid \theta) = \sum_i w_i \log p(y_i \mid b + \hat g_i) - \tfrac12 a^T \hat g
          - \tfrac12 \log |B|, \qquad B = I + W^{1/2} K W^{1/2} \qquad [1]_, \text{ eq. (3.32)}.

==================  ================================================
Code                Rasmussen and Williams
==================  ================================================
``alpha``           :math:`a = K^{-1} \hat g = \nabla \log p`
``root``            :math:`W^{1/2}`, a diagonal
``curvature``       W
``third``           :math:`\nabla^3 \log p / W`
==================  ================================================

Everything works on a K that several one-vs-rest columns share, one column after the other, so that
memory is a few n x n matrices whatever their number.

Erratum: Algorithm 5.1 prints :math:`s_2` with a minus sign; eq. (5.23) has the right one.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, sections 3.4, 5.5.1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag, split_noise
from skgp.linalg.cholesky import cho_inverse, cho_solve, jittered_cholesky, log_det, tri_solve

_MAX_NEWTON = 100
_MAX_HALVINGS = 30
# A Newton step of squared length 1e-10 (in the metric of the Hessian) leaves about 1e-10 of error.
_LAST_STEP = 1e-10


class WarmStart:
    """Modes of the last evaluation, from which the next one starts.

    Attributes
    ----------
    latent : Tensor of shape (n, c) or None
        :math:`\\hat g`; None before the first evaluation. When K is scaled, the mode changes far
        less than :math:`K K_{old}^{-1} \\hat g_{old}`, so this and not ``alpha`` is kept.
    """

    def __init__(self) -> None:
        self.latent: Tensor | None = None

    def column(self, j: int, shape: torch.Size) -> Tensor | None:
        """Return the start of column j, None where there is none of this ``shape`` (n, c)."""
        return None if self.latent is None or self.latent.shape != shape else self.latent[:, j]


@dataclass(frozen=True)
class LaplaceFit:
    """The Gaussian approximation of the posterior of the latent functions.

    Attributes
    ----------
    alpha : Tensor of shape (n, c)
        The latent mean is ``offset + K(., X) alpha``.
    root : Tensor of shape (n, c)
        Square root of the curvature at the mode.
    offset : Tensor of shape (c,)
    log_evidence : Tensor of shape (c,)
        In nats.
    """

    alpha: Tensor
    root: Tensor
    offset: Tensor
    log_evidence: Tensor


def laplace_log_evidence(
    kernel,
    X: Tensor,
    Y: Tensor,
    theta: Tensor,
    *,
    likelihood,
    offset: Tensor | None = None,
    row_weight: Tensor | None = None,
    warm_start: WarmStart | None = None,
) -> Tensor:
    """Approximate log evidence of each one-vs-rest column, differentiable in `theta`.

    Parameters
    ----------
    kernel : sklearn kernel expression without WhiteKernel
    X : Tensor of shape (n, d)
    Y : Tensor of shape (n, c)
        Labels -1 and +1.
    theta : Tensor of shape (kernel.n_dims,)
        Log hyper-parameters.
    likelihood : skgp.likelihoods.Bernoulli
        Or any other whose log density is concave in f: needs ``log_prob`` and ``derivatives``, the
        second of them differentiable.
    offset : Tensor of shape (c,), optional
        Constant part of the latent functions. None means 0.
    row_weight : Tensor of shape (n,), optional
        Factor of each row's log likelihood, not negative. None means 1.
    warm_start : WarmStart, optional
        Read and updated.

    Returns
    -------
    Tensor of shape (c,)
        In nats.

    Raises
    ------
    ValueError
        If the kernel contains a WhiteKernel.

    Notes
    -----
    ``O(c n^3)`` time: a few Cholesky factorisations a column and one inverse in the backward pass;
    ``O(n^2)`` memory. The gradient is exact at the mode, Newton's iterations are not traced.
    """
    check_no_noise(kernel)
    K = gram(kernel, X, theta=theta, method="expand")
    problem = Problem.of(Y, likelihood, offset, row_weight)
    return _LogEvidence.apply(K, problem, warm_start or WarmStart())


@torch.no_grad()
def laplace_fit(
    K: Tensor,
    Y: Tensor,
    *,
    likelihood,
    offset: Tensor | None = None,
    row_weight: Tensor | None = None,
    warm_start: WarmStart | None = None,
) -> LaplaceFit:
    """Find the modes for a given covariance K (n, n); the rest as in `laplace_log_evidence`."""
    problem = Problem.of(Y, likelihood, offset, row_weight)
    return _fit(K, problem, warm_start or WarmStart())


def laplace_predict(
    fit: LaplaceFit, kernel, X: Tensor, X_new: Tensor, theta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of the latent functions at new rows.

    .. math:: m = b + k_*^T a, \qquad v = k_{**} - k_*^T W^{1/2} B^{-1} W^{1/2} k_*
              \qquad \text{(Algorithm 3.2)}

    Parameters
    ----------
    fit : LaplaceFit
        Of the rows X.
    kernel, theta
        Those that it was fitted with.
    X : Tensor of shape (n, d)
    X_new : Tensor of shape (p, d)

    Returns
    -------
    mean, var : Tensor of shape (p, c)
        ``O(c n^2 (n / 3 + p))``.
    """
    K = gram(kernel, X, theta=theta, method="expand")
    K_new = gram(kernel, X, X_new, theta=theta, method="expand")  # (n, p)
    prior = gram_diag(kernel, X_new, theta)
    var = []
    for root in fit.root.T:
        half = tri_solve(_factor(K, root), root[:, None] * K_new, upper=False)
        var.append((prior - half.square().sum(0)).clamp(min=0))
    return fit.offset + K_new.mT @ fit.alpha, torch.stack(var, dim=1)


def check_no_noise(kernel) -> None:
    """Raise ValueError where the kernel of a classifier contains a WhiteKernel."""
    if split_noise(kernel)[1] is not None:
        raise ValueError(
            f"kernel={kernel} contains a WhiteKernel, which a classifier has no use for: its "
            "likelihood is the noise of the labels. Remove the WhiteKernel summand."
        )


# ------------------------------------------------------------------------- columns and their modes


class Problem(NamedTuple):
    """All that the evidence depends on besides K: ``Y (n, c)``, ``offset (c,)``, weights (n,)."""

    Y: Tensor
    likelihood: object
    offset: Tensor
    weight: Tensor | None

    @classmethod
    def of(cls, Y: Tensor, likelihood, offset: Tensor | None, weight: Tensor | None) -> "Problem":
        """Fill in the default offset."""
        return cls(Y, likelihood, Y.new_zeros(Y.shape[1]) if offset is None else offset, weight)

    def column(self, j: int) -> "_Column":
        """The problem of column j."""
        return _Column(self.Y[:, j], self.likelihood, self.offset[j], self.weight)


class _Column:
    """Log likelihood of one column as a function of g, and its derivatives."""

    def __init__(self, y: Tensor, likelihood, offset: Tensor, weight: Tensor | None) -> None:
        self.y, self.likelihood, self.offset = y, likelihood, offset
        self.weight = torch.ones_like(y) if weight is None else weight

    def log_prob(self, g: Tensor) -> Tensor:
        """Weighted sum of the log likelihoods, shape ()."""
        return self.weight @ self.likelihood.log_prob(self.y, self.offset + g)

    def slope_and_curvature(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """First derivative and minus the second, shape (n,) each."""
        first, second = self.likelihood.derivatives(self.y, self.offset + g)
        return self.weight * first, (-self.weight * second).clamp(min=0)

    def third(self, g: Tensor) -> Tensor:
        """Third derivative over the curvature, shape (n,): bounded where both underflow to 0."""
        with torch.enable_grad():
            f = (self.offset + g).detach().requires_grad_()
            second = self.likelihood.derivatives(self.y, f)[1]
            (third,) = torch.autograd.grad(second.sum(), f)
        curvature = -second.detach()
        return torch.where(curvature > 0, third / curvature, 0.0)


def _fit(K: Tensor, problem: Problem, warm: WarmStart) -> LaplaceFit:
    """Modes and evidences of all columns; remembers the modes."""
    alphas, latents, roots, evidences = [], [], [], []
    for j in range(problem.Y.shape[1]):
        column = problem.column(j)
        alpha, g = _mode(K, column, warm.column(j, problem.Y.shape))
        root = column.slope_and_curvature(g)[1].sqrt()
        evidences.append(_objective(column, alpha, g) - 0.5 * log_det(_factor(K, root)))
        alphas.append(alpha)
        latents.append(g)
        roots.append(root)
    warm.latent = torch.stack(latents, dim=1)
    return LaplaceFit(
        torch.stack(alphas, dim=1),
        torch.stack(roots, dim=1),
        problem.offset,
        torch.stack(evidences),
    )


def _mode(K: Tensor, column: _Column, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Newton's method with step halving (Algorithm 3.1): ``alpha (n,)`` and ``g = K alpha``."""
    alpha, g = torch.zeros_like(column.y), torch.zeros_like(column.y)
    value = _objective(column, alpha, g)
    if start is not None:
        # K^-1 start is unknown, so that the step itself is judged, not what it starts from.
        a_start = _newton(K, *column.slope_and_curvature(start), start)
        g_start = K @ a_start
        value_start = _objective(column, a_start, g_start)
        if value_start > value:
            alpha, g, value = a_start, g_start, value_start
    for _ in range(_MAX_NEWTON):
        slope, curvature = column.slope_and_curvature(g)
        step = _newton(K, slope, curvature, g) - alpha
        moved = K @ step
        decrement = float((slope - alpha) @ moved)
        if decrement <= _LAST_STEP:
            return alpha + step, g + moved
        for halvings in range(_MAX_HALVINGS):
            a_new, g_new = alpha + step / 2**halvings, g + moved / 2**halvings
            value_new = _objective(column, a_new, g_new)
            if value_new > value:
                break
        else:
            break  # rounding hides any further rise
        alpha, g, value = a_new, g_new, value_new
    return alpha, g


def _objective(column: _Column, alpha: Tensor, g: Tensor) -> Tensor:
    """What the mode maximises, eq. (3.12) up to a constant."""
    return column.log_prob(g) - 0.5 * alpha @ g


def _newton(K: Tensor, slope: Tensor, curvature: Tensor, g: Tensor) -> Tensor:
    """Where a full Newton step from g leads, as ``alpha`` (Algorithm 3.1, lines 4-6)."""
    root = curvature.sqrt()
    rhs = curvature * g + slope
    return rhs - root * cho_solve(_factor(K, root), root * (K @ rhs))


def _factor(K: Tensor, root: Tensor) -> Tensor:
    """Cholesky factor of ``B = I + W^1/2 K W^1/2``, whose eigenvalues are at least 1."""
    B = root[:, None] * K * root
    B.diagonal().add_(1.0)
    return jittered_cholesky(B).factor


class _LogEvidence(torch.autograd.Function):
    r"""The evidences as a function of K, with the gradient of Algorithm 5.1 in matrix form.

    With :math:`R = W^{1/2} B^{-1} W^{1/2}` and :math:`s = \tfrac12 \mathrm{diag}((K^{-1} + W)^{-1})
    \nabla^3 \log p`, which by :math:`\mathrm{diag}((K^{-1} + W)^{-1}) = (1 - \mathrm{diag}\,B^{-1})
    / W` needs no further matrix product,

    .. math:: \frac{d \log q}{d K} = \tfrac12 (a a^T - R) + \tfrac12 (u a^T + a u^T),
              \qquad u = (I - R K) s.

    The last term is the motion of the mode. The factors are computed again in the backward pass:
    one matrix at a time is held, however many columns there are.
    """

    @staticmethod
    def forward(ctx, K: Tensor, problem: Problem, warm: WarmStart) -> Tensor:
        fit = _fit(K, problem, warm)
        ctx.save_for_backward(K, fit.alpha, fit.root)
        ctx.problem = problem
        return fit.log_evidence

    @staticmethod
    def backward(ctx, grad: Tensor):
        K, alphas, roots = ctx.saved_tensors
        total = torch.zeros_like(K)
        for j in range(alphas.shape[1]):
            alpha, root = alphas[:, j], roots[:, j]
            inverse = cho_inverse(_factor(K, root))
            third = ctx.problem.column(j).third(K @ alpha)
            s = 0.5 * (1 - inverse.diagonal()) * third
            u = s - root * (inverse @ (root * (K @ s)))
            R = inverse.mul_(root[:, None]).mul_(root)
            outer = torch.outer(0.5 * alpha + u, alpha)
            total += 0.5 * grad[j] * (outer + outer.mT - R)
        return total, None, None
