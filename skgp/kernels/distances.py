"""Distances between scaled inputs, by differences or by a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["METRICS", "Metric", "SafeRoot", "exp_decay_", "scaled_inputs"]


def exp_decay_(exponent: Tensor, top: float = 0.0) -> Tensor:
    """Exponential in place of numbers up to `top`; 0 where it is below eps^2 times the largest.

    Such values are lost in any sum with the others, but subnormal numbers, which they or their
    products may be, take a processor a hundred times as long.
    """
    least = top + 2 * math.log(torch.finfo(exponent.dtype).eps)
    return torch.threshold_(exponent, least, -math.inf).exp_()


class Metric(NamedTuple):
    """How distances are computed: functions of scaled inputs A (..., n, d) and B (..., p, d)."""

    squared: Callable[[Tensor, Tensor, bool], Tensor]
    root: Callable[[Tensor, Tensor, bool], Tensor]


def scaled_inputs(
    X: Tensor, Z: Tensor | None, scale: Tensor | float
) -> tuple[Tensor, Tensor, bool]:
    """Centre and divide by ``scale`` (() or (..., d)); the flag says that both are the same."""
    # The distance does not depend on the centre, so no gradient needs to flow through it.
    centre = X.detach().reshape(-1, X.shape[-1]).mean(0)
    _check_scale(X, scale)
    A = (X - centre) / scale
    return (A, A, True) if Z is None else (A, (Z - centre) / scale, False)


def _check_scale(X: Tensor, scale: Tensor | float) -> None:
    n_elements = scale.shape[-1] if isinstance(scale, Tensor) and scale.ndim else 1
    # One number for each of a batch of thetas has a last axis of 1.
    if n_elements != X.shape[-1] and not (n_elements == 1 and getattr(scale, "ndim", 0) != 1):
        raise ValueError(
            f"length_scale has {n_elements} elements and X has {X.shape[-1]} columns; "
            "they must agree, or the length scale must be one number."
        )


def _cdist(A: Tensor, B: Tensor) -> Tensor:
    # The other compute modes expand the square: 1e-8 between equal rows and NaN gradients.
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")


class _DirectSquaredDistance(torch.autograd.Function):
    """Squared distances by differences; their gradient by matrix products.

    With H = dL/dD: dL/dA = 2 (diag(H 1) A - H B). In `_cdist`'s own gradient a division by the
    distance follows a multiplication by it, at five times the cost.
    """

    @staticmethod
    def forward(ctx, A, B):
        ctx.save_for_backward(A, B)
        return _cdist(A, B).square_()

    @staticmethod
    def backward(ctx, H):
        A, B = ctx.saved_tensors
        grad_A = grad_B = None
        if ctx.needs_input_grad[0]:
            grad_A = 2 * (A * H.sum(-1)[..., None] - H @ B)
        if ctx.needs_input_grad[1]:
            grad_B = 2 * (B * H.sum(-2)[..., None] - H.mT @ A)
        # Autograd itself sums them over batch dimensions that were broadcast.
        return grad_A, grad_B


class SafeRoot(torch.autograd.Function):
    """Square root whose derivative at 0 is taken as 0."""

    @staticmethod
    def forward(ctx, x):
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, grad):
        (root,) = ctx.saved_tensors
        return torch.where(root > 0, grad / (2 * root), 0)


def _direct_squared(A: Tensor, B: Tensor, same: bool) -> Tensor:
    return _DirectSquaredDistance.apply(A, B)


def _direct_root(A: Tensor, B: Tensor, same: bool) -> Tensor:
    return _cdist(A, B)


def _expanded_squared(A: Tensor, B: Tensor, same: bool) -> Tensor:
    squares = A.square().sum(-1)[..., :, None] + B.square().sum(-1)[..., None, :]
    D = (squares - 2 * (A @ B.mT)).clamp_min(0)
    if same:
        eye = torch.eye(A.shape[-2], dtype=torch.bool, device=A.device)
        D = D.masked_fill(eye, 0)
    return D


def _expanded_root(A: Tensor, B: Tensor, same: bool) -> Tensor:
    return SafeRoot.apply(_expanded_squared(A, B, same))


METRICS = {
    "direct": Metric(_direct_squared, _direct_root),
    "expand": Metric(_expanded_squared, _expanded_root),
}
