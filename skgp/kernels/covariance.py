"""Covariance functions of the leaves, and the walk that combines them to an expression's.

Leaves are functions of a distance, r = |x - z| or its square, between inputs divided by the length
scale; inputs are first centred, so that data far from the origin lose no digits in that division.
"""

from __future__ import annotations

import math

import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Exponentiation,
    ExpSineSquared,
    Matern,
    Product,
    RationalQuadratic,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from .distances import METRICS, Metric, SafeRoot, scaled_inputs
from .expression import Node, registered_function
from .specs import ActiveDims, Cosine, check_one_column

__all__ = ["covariance", "variance"]


def covariance(node: Node, X: Tensor, Z: Tensor | None, metric: Metric) -> Tensor:
    """Evaluate a part: a tensor that broadcasts to (..., n, p); constants stay scalars."""
    kernel, kind = node.kernel, type(node.kernel)
    if kind in (Sum, Product):
        a, b = (covariance(child, X, Z, metric) for child in node.children)
        return a + b if kind is Sum else a * b
    if kind is Exponentiation:
        return covariance(node.children[0], X, Z, metric) ** kernel.exponent
    if kind is ActiveDims:
        X, Z = kernel.select(X), None if Z is None else kernel.select(Z)
        return covariance(node.children[0], X, Z, metric)
    if kind is WhiteKernel:
        raise ValueError(
            f"kernel contains {kernel}, which is noise and has no place in a covariance of the "
            "signal; separate it first with skgp.kernels.split_noise."
        )
    function = registered_function(kernel)
    if function is not None:
        return function(kernel, node.params, X, X if Z is None else Z)
    return _LEAVES[kind](kernel, node.params, X, Z, metric)


def variance(node: Node, X: Tensor) -> Tensor:
    """Evaluate the diagonal of a part: a tensor that broadcasts to (..., n)."""
    kernel, kind = node.kernel, type(node.kernel)
    if kind in (Sum, Product):
        a, b = (variance(child, X) for child in node.children)
        return a + b if kind is Sum else a * b
    if kind is Exponentiation:
        return variance(node.children[0], X) ** kernel.exponent
    if kind is ActiveDims:
        return variance(node.children[0], kernel.select(X))
    if kind is ConstantKernel:
        return node.params["constant_value"]
    if kind is DotProduct:
        return node.params["sigma_0"] ** 2 + X.square().sum(-1)
    if registered_function(kernel) is None and kind is not WhiteKernel:
        return X.new_ones(())
    # Every row as a batch of one: the general covariance then yields (..., n, 1, 1).
    return covariance(node, X[..., None, :], None, METRICS["direct"])[..., 0, 0]


# Leaves -----------------------------------------------------------------------------------------


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


def _constant(kernel, params, X, Z, metric):
    return params["constant_value"]


def _rbf(kernel, params, X, Z, metric):
    # exp saves its result alone, so both steps may work in place under autograd too.
    return metric.squared(*scaled_inputs(X, Z, params["length_scale"])).mul_(-0.5).exp_()


def _matern(kernel, params, X, Z, metric):
    nu, length_scale = kernel.nu, params["length_scale"]
    if nu == math.inf:
        return _rbf(kernel, params, X, Z, metric)
    A, B, same = scaled_inputs(X, Z, length_scale / math.sqrt(2 * nu))
    if nu == 0.5:
        return torch.exp(-metric.root(A, B, same))
    profile = _Matern32 if nu == 1.5 else _Matern52
    return profile.apply(metric.squared(A, B, same))


def _rational_quadratic(kernel, params, X, Z, metric):
    alpha = params["alpha"]
    squared = metric.squared(*scaled_inputs(X, Z, params["length_scale"]))
    return torch.exp(-alpha * torch.log1p(squared / (2 * alpha)))


def _exp_sine_squared(kernel, params, X, Z, metric):
    distance = metric.root(*scaled_inputs(X, Z, 1.0))
    sine = torch.sin(distance * (math.pi / params["periodicity"])) / params["length_scale"]
    return torch.exp(-2 * sine.square())


def _cosine(kernel, params, X, Z, metric):
    check_one_column("Cosine", X.shape[-1])
    return torch.cos(metric.root(*scaled_inputs(X, Z, 1.0)) * (2 * math.pi / params["period"]))


def _dot_product(kernel, params, X, Z, metric):
    return X @ (X if Z is None else Z).mT + params["sigma_0"] ** 2


_LEAVES = {
    ConstantKernel: _constant,
    RBF: _rbf,
    Matern: _matern,
    RationalQuadratic: _rational_quadratic,
    ExpSineSquared: _exp_sine_squared,
    Cosine: _cosine,
    DotProduct: _dot_product,
}
