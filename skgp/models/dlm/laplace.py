r"""Laplace's approximation of the evidence for few rows, all latent functions at once.

The formulas are those of :mod:`skgp.models.laplace_evidence`, which has the references and takes
one function after the other to save memory. Here rows are few: matrices of all functions are held,
(c, n, n), and a factorisation is kept for the gradient, so that hardly anything but the
factorisations themselves takes time. Vectors are rows here, (c, n).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky, log_det

__all__ = ["LaplaceEvidence"]

_MAX_NEWTON = 30
_MAX_HALVINGS = 20
# Squared length, in the metric of the Hessian, of a step that leaves about its square.
_LAST_STEP = 1e-5


class _Mode(NamedTuple):
    """A point: alpha = K^-1 g and g, (c, n), and what the mode maximises, (c,)."""

    alpha: Tensor
    g: Tensor
    value: Tensor


class LaplaceEvidence:
    """Log evidence of latent functions that share a covariance K, summed over them.

    Parameters
    ----------
    likelihood : Likelihood
        With a log density concave in f.
    y : Tensor of shape (n, c)
    offset : Tensor of shape (c,)
        Prior means of the latent functions.
    weight : Tensor of shape (n,), optional
        Of the rows' log likelihoods.

    Notes
    -----
    Each call begins at the modes of the last one.
    """

    def __init__(
        self, likelihood: Likelihood, y: Tensor, offset: Tensor, weight: Tensor | None = None
    ) -> None:
        self.likelihood = likelihood
        self.y = y.mT.contiguous()
        self.offset = offset[:, None]
        self.weight = torch.ones_like(self.y) if weight is None else weight.expand_as(self.y)
        self.last: tuple[Tensor, Tensor, Tensor] | None = None  # modes, and derivatives there

    def __call__(self, K: Tensor) -> Tensor:
        """The sum, a scalar in nats, differentiable in K (n, n); a few times O(c n^3)."""
        return _Evidence.apply(K, self)

    def log_prob(self, g: Tensor) -> Tensor:
        """Weighted log likelihoods, summed over the rows, (c,)."""
        return (self.weight * self.likelihood.log_prob(self.y, self.offset + g)).sum(1)

    def derivatives(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """First derivative and minus the second of the rows' log likelihoods, (c, n) each."""
        first, second = self.likelihood.derivatives(self.y, self.offset + g)
        return self.weight * first, (-self.weight * second).clamp_min(0.0)

    def third(self, g: Tensor) -> Tensor:
        """Third derivative over the curvature, (c, n): bounded where both underflow to 0."""
        with torch.enable_grad():
            f = (self.offset + g).detach().requires_grad_()
            second = self.likelihood.derivatives(self.y, f)[1]
            (third,) = torch.autograd.grad(second.sum(), f)
        return torch.where(second < 0, -third / second.detach(), 0.0)

    def mode(self, K: Tensor) -> _Mode:
        """Newton's method with step halving, from the last modes or from 0."""
        zero = torch.zeros_like(self.y)
        best = _Mode(zero, zero, self.log_prob(zero))
        if self.last is not None:
            best = self._better(self._at(self._newton(K, *self.last), K), best)
        for _ in range(_MAX_NEWTON):
            slope, curvature = self.derivatives(best.g)
            step = self._newton(K, best.g, slope, curvature) - best.alpha
            moved = step @ K
            decrement = ((slope - best.alpha) * moved).sum(1)
            if float(decrement.max()) <= _LAST_STEP:
                best = _Mode(best.alpha + step, best.g + moved, best.value)
                break
            new = self._at(best.alpha + step, K)
            for halvings in range(1, _MAX_HALVINGS):
                if bool((new.value >= best.value).all()):
                    break
                worse = (new.value < best.value)[:, None]
                shorter = best.alpha + step / 2**halvings
                new = self._at(torch.where(worse, shorter, new.alpha), K)
            best = self._better(new, best)
        return best

    def factor(self, K: Tensor, root: Tensor) -> Tensor:
        """Cholesky factors (c, n, n) of I + W^1/2 K W^1/2 for the roots (c, n) of W."""
        B = (root[:, :, None] * K).mul_(root[:, None, :])
        B.diagonal(dim1=1, dim2=2).add_(1.0)
        return jittered_cholesky(B).factor

    def _newton(self, K: Tensor, g: Tensor, slope: Tensor, curvature: Tensor) -> Tensor:
        """Where a full step from g leads, as alpha."""
        root = curvature.sqrt()
        target = curvature * g + slope
        inner = torch.cholesky_solve((root * (target @ K))[..., None], self.factor(K, root))
        return target - root * inner[..., 0]

    def _at(self, alpha: Tensor, K: Tensor) -> _Mode:
        g = alpha @ K
        return _Mode(alpha, g, self.log_prob(g) - 0.5 * (alpha * g).sum(1))

    @staticmethod
    def _better(a: _Mode, b: _Mode) -> _Mode:
        """The better of two points, function by function."""
        take = a.value > b.value
        column = take[:, None]
        return _Mode(
            torch.where(column, a.alpha, b.alpha),
            torch.where(column, a.g, b.g),
            torch.where(take, a.value, b.value),
        )


class _Evidence(torch.autograd.Function):
    """Value and gradient, the motion of the mode included (Rasmussen and Williams, alg. 5.1)."""

    @staticmethod
    def forward(ctx, K: Tensor, problem: LaplaceEvidence) -> Tensor:
        alpha, g, _ = problem.mode(K)
        slope, curvature = problem.derivatives(g)
        problem.last = g, slope, curvature
        root = curvature.sqrt()
        L = problem.factor(K, root)
        ctx.problem = problem
        ctx.save_for_backward(K, alpha, g, root, L)
        return (problem.log_prob(g) - 0.5 * (alpha * g).sum(1) - 0.5 * log_det(L)).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        K, alpha, g, root, L = ctx.saved_tensors
        inverse = cho_inverse(L)
        s = 0.5 * (1 - inverse.diagonal(dim1=1, dim2=2)) * ctx.problem.third(g)
        u = s - root * (inverse @ (root * (s @ K))[..., None])[..., 0]
        outer = (0.5 * alpha + u).mT @ alpha
        R = torch.einsum("cij,ci,cj->ij", inverse, root, root)
        return 0.5 * grad * (outer + outer.mT - R), None
