r"""Distances between scaled inputs, by differences or by a product, and kernels as their functions.

A squared distance by the expansion :math:`|a|^2 + |b|^2 - 2 a^T b` errs by about
:math:`\varepsilon \max(|a|^2, |b|^2)`. Inputs are therefore taken from an origin near those of the
second set, and rows that are *far* from it, their squared norm above `far_limit`, by differences:
what is computed of one row does not depend on the rows beside it. Scaled inputs are bounded, so
that no distance overflows: rows beyond the bound, which lie infinitely far from all data, are one.

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

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .defaults import LARGEST_SQUARE, ORIGIN_ROWS


def exp_decay_(exponent: Tensor, top: float = 0.0) -> Tensor:
    """Exponential in place of numbers up to `top`; 0 where it is below eps^2 times the largest.

    Such values are lost in any sum with the others, but subnormal numbers, which they or their
    products may be, take a processor a hundred times as long.
    """
    least = top + 2 * math.log(torch.finfo(exponent.dtype).eps)
    return torch.threshold_(exponent, least, -math.inf).exp_()


def squared_differences(X: Tensor) -> Tensor:
    """(x_id - x_jd)^2 of every column and pair of rows of X (n, d); shape (d, n^2)."""
    bound = LARGEST_SQUARE**0.4
    rows = (X - origin(X)).clamp(-bound, bound)
    return (rows[:, None] - rows).square_().reshape(-1, X.shape[1]).T.contiguous()


class Metric(NamedTuple):
    """How distances are computed: functions of scaled inputs A (..., n, d) and B (..., p, d)."""

    squared: Callable[[Tensor, Tensor, bool], Tensor]
    root: Callable[[Tensor, Tensor, bool], Tensor]


def far_limit(dtype: torch.dtype) -> float:
    """Squared norm of a scaled input beyond which its distances are taken by differences.

    1.8e6 in float64, where the expansion errs by 8e-10; 590 and 1.4e-4 in float32.
    """
    return torch.finfo(dtype).eps ** -0.4


def origin(X: Tensor) -> Tensor:
    """Of each column (..., 1, d) the value of least magnitude among some rows of X (..., n, d).

    Subtracting it loses no digit of X, and a few outliers among the rows do not move it.
    """
    rows = X.detach()[..., :: max(1, -(-X.shape[-2] // ORIGIN_ROWS)), :]
    if not rows.shape[-2]:
        return rows.new_zeros(*rows.shape[:-2], 1, rows.shape[-1])
    # argmin takes seven times as long.
    return rows.gather(-2, rows.abs().min(-2, keepdim=True).indices)


def scaled_inputs(
    X: Tensor, Z: Tensor | None, scale: Tensor | float
) -> tuple[Tensor, Tensor, bool]:
    """Move to an origin, that of Z, and divide by ``scale`` (() or (..., d)).

    Predictions give the rows of the fit as Z: what they compute of one row of X then does not
    depend on the others. A and B are X and Z, finite and of finite squares for any finite inputs;
    the third tells whether Z is None and A and B are one.
    """
    n_elements = scale.shape[-1] if isinstance(scale, Tensor) and scale.ndim else 1
    # One number for each of a batch of thetas has a last axis of 1.
    if n_elements != X.shape[-1] and not (n_elements == 1 and getattr(scale, "ndim", 0) != 1):
        raise ValueError(
            f"length_scale has {n_elements} elements and X has {X.shape[-1]} columns; "
            "they must agree, or the length scale must be one number."
        )
    # The distance does not depend on the origin, so no gradient needs to flow through it.
    zero = origin(X if Z is None else Z)
    bound = torch.finfo(X.dtype).max ** 0.4
    A = (X - zero).clamp(-bound, bound) / scale
    return (A, A, True) if Z is None else (A, (Z - zero).clamp(-bound, bound) / scale, False)


def _cdist(A: Tensor, B: Tensor) -> Tensor:
    # The other compute modes expand the square: 1e-8 between equal rows and NaN gradients.
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")


class _DirectSquaredDistance(torch.autograd.Function):
    """Squared distances by differences; their gradient by matrix products.

    With H = dL/dD: dL/dA = 2 (diag(H 1) A - H B). In `_cdist`'s own gradient a division by the
    distance follows a multiplication by it, at five times the cost. Pairs of far rows, which may be
    near to each other, are taken by differences, one column at a time.
    """

    @staticmethod
    def forward(ctx, A, B):
        ctx.save_for_backward(A, B)
        return _cdist(A, B).square_()

    @staticmethod
    def backward(ctx, H):
        A, B = ctx.saved_tensors
        i, j = _far_rows(A), _far_rows(B)
        # Autograd itself sums them over batch dimensions that were broadcast.
        needed = ctx.needs_input_grad
        if not len(i) or not len(j):
            return _gradient_by_products(A, B, H, needed)
        pairs = ..., i[:, None], j
        others = H.clone()
        others[pairs] = 0
        grads = _gradient_by_products(A, B, others, needed)
        of_far = _gradient_by_differences(A[..., i, :], B[..., j, :], H[pairs])
        for grad, far, rows in zip(grads, of_far, (i, j), strict=True):
            if grad is not None:
                grad[..., rows, :] += far
        return grads


class _ExpandedSquaredDistance(_DirectSquaredDistance):
    """Squared distances by a matrix product, those between far rows by differences."""

    @staticmethod
    def forward(ctx, A, B):
        ctx.save_for_backward(A, B)
        a2 = A.square().sum(-1)
        b2 = a2 if A is B else B.square().sum(-1)
        # In place: to obtain the memory of several matrices takes longer than to fill one.
        D = (A @ B.mT).mul_(-2).add_(a2[..., :, None]).add_(b2[..., None, :]).clamp_min_(0)
        if any_far(a2) and any_far(b2):
            i, j = _far_rows(A), _far_rows(B)
            D[..., i[:, None], j] = _cdist(A[..., i, :], B[..., j, :]).square_()
        return D


def _far_rows(A: Tensor) -> Tensor:
    """Rows of A (..., n, d) that are far in some of a batch."""
    far = A.detach().square().sum(-1) > far_limit(A.dtype)
    return far.reshape(-1, far.shape[-1]).any(0).nonzero()[:, 0]


def _gradient_by_products(
    A: Tensor, B: Tensor, H: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Of A (..., n, d) and B (..., p, d) by H (..., n, p), each where `needed`."""
    of_A = 2 * (A * H.sum(-1)[..., None] - H @ B) if needed[0] else None
    of_B = 2 * (B * H.sum(-2)[..., None] - H.mT @ A) if needed[1] else None
    return of_A, of_B


def _gradient_by_differences(A: Tensor, B: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """The same, one column at a time."""
    of_A, of_B = [], []
    for a, b in zip(A.unbind(-1), B.unbind(-1), strict=True):
        pulled = 2 * H * (a[..., :, None] - b[..., None, :])
        of_A.append(pulled.sum(-1))
        of_B.append(-pulled.sum(-2))
    return torch.stack(of_A, -1), torch.stack(of_B, -1)


class SafeRoot(torch.autograd.Function):
    """Square root whose derivative at 0 is taken as 0."""

    @staticmethod
    def forward(ctx, x):
        """Root of x."""
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, grad):
        """Gradient in x."""
        (root,) = ctx.saved_tensors
        return torch.where(root > 0, grad / (2 * root), 0)


def _direct_squared(A: Tensor, B: Tensor, same: bool) -> Tensor:
    if A.requires_grad or B.requires_grad:
        return _DirectSquaredDistance.apply(A, B)
    return _cdist(A, B).square_()


def _direct_root(A: Tensor, B: Tensor, same: bool) -> Tensor:
    return _cdist(A, B)


def any_far(squares: Tensor) -> bool:
    """Whether some row is far, of squared norms of scaled inputs; O(n)."""
    return squares.numel() > 0 and float(squares.detach().max()) > far_limit(squares.dtype)


def correct_far_(
    values: Tensor,
    A: Tensor,
    B: Tensor,
    a2: Tensor,
    b2: Tensor,
    of_squares: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Replace, in place and by differences, what a matrix product gave for far rows of A and B.

    values (n, p) are the squared distances of A (n, d) and B (p, d), from `scaled_inputs`,
    or a function `of_squares` of them; a2 (n, 1) and b2 (p, 1) are the squared norms.
    """
    for out, left, right, norms in ((values, A, B, a2), (values.T, B, A, b2)):
        if any_far(norms):
            far = norms[:, 0] > far_limit(norms.dtype)
            squares = _cdist(left[far], right).square_()
            out[far] = squares if of_squares is None else of_squares(squares)
    return values


def by_differences_where_near(D: Tensor, A: Tensor, B: Tensor, a2: Tensor) -> Tensor:
    """Replace, by differences, squared distances of near rows, whose root is to keep its digits.

    Of squares that err by eps |a|^2 the root of one below sqrt(eps) |a|^2 errs by up to
    sqrt(eps) |a|, of others by less than eps^(3/4) |a|. D (..., n, p), which a matrix product gave
    of A (..., n, d) and B (..., p, d), is changed in place or replaced where most pairs are near.
    """
    limit = torch.finfo(D.dtype).eps ** 0.5 * a2.expand(D.shape[:-1])
    rows = (D.detach().amin(-1) < limit).nonzero(as_tuple=True)  # few: scanned a second time
    k, j = (D.detach()[rows] < limit[rows][:, None]).nonzero(as_tuple=True)
    if len(k) * A.shape[-1] > D.numel():
        return _direct_squared(A, B, False)
    *batch, i = (each[k] for each in rows)
    A, B = (M.expand(*D.shape[:-2], *M.shape[-2:]) for M in (A, B))
    return D.index_put_((*batch, i, j), (A[*batch, i] - B[*batch, j]).square().sum(-1))


def _expanded_squared(A: Tensor, B: Tensor, same: bool) -> Tensor:
    """Squared distances (..., n, p) by products, far rows by differences."""
    D = _ExpandedSquaredDistance.apply(A, B)
    if same:
        D.diagonal(dim1=-2, dim2=-1).zero_()
    return D


def _expanded_root(A: Tensor, B: Tensor, same: bool) -> Tensor:
    squared = _expanded_squared(A, B, same)
    return SafeRoot.apply(by_differences_where_near(squared, A, B, A.detach().square().sum(-1)))


METRICS = {
    "direct": Metric(_direct_squared, _direct_root),
    "expand": Metric(_expanded_squared, _expanded_root),
}


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
