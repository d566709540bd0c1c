r"""Stationary kernels as functions of the squared distance, with their derivatives.

A stationary kernel is a function k(s) of :math:`s = \sum_d (x_d - z_d)^2` between inputs divided by
the length scale (Matern: by :math:`\ell / \sqrt{2 \nu}`); r is the root of s, and
:math:`t = s / 2 \alpha`.

======================  ==========================  =================================
Kernel                  :math:`k(s)`                :math:`k'(s)`
======================  ==========================  =================================
RBF                     :math:`e^{-s/2}`            :math:`-k / 2`
Matern 1/2              :math:`e^{-r}`              :math:`-e^{-r} / 2 r`
Matern 3/2              :math:`(1+r) e^{-r}`        :math:`-e^{-r} / 2`
Matern 5/2              :math:`(1+r+s/3) e^{-r}`    :math:`-(1+r) e^{-r} / 6`
RationalQuadratic       :math:`(1+t)^{-\alpha}`     :math:`-k / 2 (1+t)`
======================  ==========================  =================================
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .distances import SafeRoot, exp_decay_

Profile = Callable[[Tensor, float], tuple[Tensor, Tensor]]  # of s, which it may overwrite: k and k'


def _profile_rbf(s: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    k = exp_decay_(s.mul_(-0.5))
    return k, k * -0.5


def _profile12(s: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    # k' grows without bound towards 0, where (a - b)^2 k' vanishes; and a root magnifies rounding.
    far = s > floor
    r = s.mul_(far).sqrt_()
    k = exp_decay_(-r)
    return k, torch.where(far, k / r.mul_(-2), 0.0)


def _profile32(s: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    r = s.sqrt_()
    decay = exp_decay_(-r)
    return torch.addcmul(decay, decay, r), decay * -0.5


def _profile52(s: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    r = s.sqrt()
    decay = exp_decay_(-r)
    linear = r.add_(1).mul_(decay)  # (1 + r) exp(-r)
    return torch.addcmul(linear, s, decay, value=1 / 3), linear / -6


#: k and k' of Matern kernels by nu, infinite of RBF; in the shape of s.
PROFILES: dict[float, Profile] = {  # mathematical: by nu
    0.5: _profile12,
    1.5: _profile32,
    2.5: _profile52,
    math.inf: _profile_rbf,
}


class _Matern32(torch.autograd.Function):
    """(1 + s) exp(-s) as a function of s^2, whose derivative -exp(-s) / 2 is free of 0 / 0."""

    @staticmethod
    def forward(ctx, squared):
        ctx.save_for_backward(squared)
        s = squared.sqrt()
        decay = torch.exp(-s)
        return torch.addcmul(decay, decay, s)

    @staticmethod
    def backward(ctx, grad):
        (squared,) = ctx.saved_tensors
        return grad * torch.exp(-SafeRoot.apply(squared)) * -0.5


class _Matern52(torch.autograd.Function):
    """(1 + s + s^2/3) exp(-s) as a function of s^2, with derivative -(1 + s) exp(-s) / 6."""

    @staticmethod
    def forward(ctx, squared):
        ctx.save_for_backward(squared)
        s = squared.sqrt()
        polynomial = torch.add(s, squared, alpha=1 / 3).add_(1)
        return polynomial.mul_(s.neg_().exp_())

    @staticmethod
    def backward(ctx, grad):
        (squared,) = ctx.saved_tensors
        return grad * _Matern32.apply(squared) * (-1 / 6)


def matern32(squared: Tensor) -> Tensor:
    """Matern 3/2 at squared distances s (any shape), differentiable at 0 too."""
    return _Matern32.apply(squared)


def matern52(squared: Tensor) -> Tensor:
    """Matern 5/2 at squared distances s (any shape), differentiable at 0 too."""
    return _Matern52.apply(squared)
