"""Large tiles of a covariance, evaluated in place and without gradients."""

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
)
from torch import Tensor

from .covariance import covariance
from .distances import METRICS, by_differences_where_near, correct_far_, exp_decay_, scaled_inputs
from .expression import Node
from .specs import ActiveDims, Cosine

__all__ = ["evaluate_tile", "largest_square"]

# Elements of a piece whose temporaries stay in the cache and in the allocator's own memory.
PIECE = 2**18


def evaluate_tile(node: Node, X: Tensor, Z: Tensor, out: Tensor) -> Tensor:
    """Write K(X, Z) to ``out`` (n, p), X (n, d) and Z (p, d); return it.

    Expressions that need temporaries are evaluated by pieces of columns, each small enough for
    the cache. A product of constants and RBFs needs none and is evaluated at once.
    """
    plain = all(type(f.kernel) is ConstantKernel or _squared_exponential(f) for f in _factors(node))
    width = max(1, Z.shape[0] if plain or out.is_cuda else max(64, PIECE // max(1, X.shape[0])))
    for start in range(0, Z.shape[0], width):
        piece = out[:, start : start + width]
        K = _tile(node, X, Z[start : start + width], piece)
        if K is not piece:
            piece.copy_(K)
    return out


def largest_square(node: Node, X: Tensor) -> float:
    """Largest squared norm S of the rows of X (n, d) from an origin, over a kernel's length scales.

    A tile's squared distances, from the expanded square, err by about ``eps S``: short length
    scales, or rows far from the others, ask for more digits than float32 has.
    """
    if type(node.kernel) is ActiveDims:
        X = node.kernel.select(X)
    largest = max((largest_square(child, X) for child in node.children), default=0.0)
    scale = node.params.get("periodicity", node.params.get("length_scale"))
    if scale is not None:
        largest = max(largest, float(scaled_inputs(X, None, scale)[0].square().sum(1).max()))
    return largest


def _tile(node: Node, X: Tensor, Z: Tensor, out: Tensor | None) -> Tensor:
    """Evaluate a part in place. The result may be ``out``, is owned by the caller, or a scalar."""
    kind = type(node.kernel)
    if kind is Sum:
        parts = [_tile(node.children[0], X, Z, out), _tile(node.children[1], X, Z, None)]
        parts.sort(key=lambda part: part.ndim, reverse=True)  # a scalar cannot hold the sum
        return parts[0].add_(parts[1]) if parts[0].ndim else parts[0] + parts[1]
    if kind is ActiveDims:
        return _tile(node.children[0], node.kernel.select(X), node.kernel.select(Z), out)
    if kind is Product or _squared_exponential(node):
        return _tile_product(_factors(node), X, Z, out)
    leaf = _TILE_LEAVES.get(kind)
    if leaf is not None:
        return leaf(node, X, Z, out)
    K = covariance(node, X, Z, METRICS["expand"])
    # What a constant or a user's function returns is theirs and must not be written to.
    return K if kind in (Exponentiation, ExpSineSquared, Cosine, DotProduct) else K.clone()


def _tile_product(factors: list[Node], X: Tensor, Z: Tensor, out: Tensor | None) -> Tensor:
    """Evaluate a product, with its constants inside the exponent of its RBFs where it has any."""
    constants = [f for f in factors if type(f.kernel) is ConstantKernel]
    gaussians = [f for f in factors if _squared_exponential(f)]
    others = [
        f for f in factors if type(f.kernel) is not ConstantKernel and not _squared_exponential(f)
    ]
    scale = torch.ones((), dtype=X.dtype, device=X.device)
    for constant in constants:
        scale = scale * constant.params["constant_value"]
    if gaussians:
        # A product of RBFs is one RBF whose inverse squared length scales are their sum.
        precision = gaussians[0].params["length_scale"] ** -2
        for gaussian in gaussians[1:]:
            precision = precision + gaussian.params["length_scale"] ** -2
        K = _tile_gaussian(precision.rsqrt(), scale.log(), X, Z, out)
    elif others:
        K = _tile(others.pop(0), X, Z, out).mul_(scale)
    else:
        K = scale
    for factor in others:
        K = K.mul_(_tile(factor, X, Z, None)) if K.ndim else _tile(factor, X, Z, None).mul_(K)
    return K


def _tile_gaussian(length_scale, log_scale, X, Z, out) -> Tensor:
    """exp(log_scale - |x - z|^2 / (2 l^2)) by one product, a clamp and an exponential."""
    A, B, _ = scaled_inputs(X, Z, length_scale)
    # (a, -|a|^2/2, 1) . (b, 1, c - |b|^2/2) is the exponent, c = log_scale.
    a2, b2 = A.square().sum(1, keepdim=True), B.square().sum(1, keepdim=True)
    left = torch.cat([A, a2 / -2, torch.ones_like(a2)], 1)
    right = torch.cat([B, torch.ones_like(b2), log_scale - b2 / 2], 1)
    K = torch.matmul(left, right.T, out=out)
    top = log_scale.item()
    correct_far_(K, A, B, a2, b2, lambda squares: top - squares / 2)
    return exp_decay_(K.clamp_max_(top), top)


def _tile_squared(
    X: Tensor, Z: Tensor, scale: Tensor, out: Tensor | None, near: bool = False
) -> Tensor:
    """Squared distance of scaled inputs, clamped at 0; ``near``: with the digits for a root."""
    A, B, _ = scaled_inputs(X, Z, scale)
    a2, b2 = A.square().sum(1, keepdim=True), B.square().sum(1, keepdim=True)
    left = torch.cat([-2 * A, a2, torch.ones_like(a2)], 1)
    right = torch.cat([B, torch.ones_like(b2), b2], 1)
    D = correct_far_(torch.matmul(left, right.T, out=out).clamp_min_(0), A, B, a2, b2)
    return by_differences_where_near(D, A, B, a2[:, 0]) if near else D


def _tile_matern(node: Node, X: Tensor, Z: Tensor, out: Tensor | None) -> Tensor:
    nu = node.kernel.nu
    scale = node.params["length_scale"] / math.sqrt(2 * nu)
    # Of the Matern kernels this alone is rough: linear in the distance, not in its square.
    squared = _tile_squared(X, Z, scale, out, near=nu == 0.5)
    if nu == 0.5:
        return exp_decay_(squared.sqrt_().neg_())
    if nu == 1.5:
        s = squared.sqrt_()
        decay = exp_decay_(-s)
        return s.mul_(decay).add_(decay)
    s = squared.sqrt()
    squared.mul_(1 / 3).add_(s).add_(1)
    return squared.mul_(exp_decay_(s.neg_()))


def _tile_rational_quadratic(node: Node, X: Tensor, Z: Tensor, out: Tensor | None) -> Tensor:
    alpha = node.params["alpha"]
    # length_scale sqrt(2 alpha) leaves 1 + squared as the base of the power.
    squared = _tile_squared(X, Z, node.params["length_scale"] * (2 * alpha).sqrt(), out)
    return squared.log1p_().mul_(-alpha).exp_()


def _factors(node: Node) -> list[Node]:
    if type(node.kernel) is Product:
        return _factors(node.children[0]) + _factors(node.children[1])
    return [node]


def _squared_exponential(node: Node) -> bool:
    kind = type(node.kernel)
    return kind is RBF or (kind is Matern and node.kernel.nu == math.inf)


_TILE_LEAVES = {Matern: _tile_matern, RationalQuadratic: _tile_rational_quadratic}
