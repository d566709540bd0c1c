r"""Gradients of bilinear forms in a kernel matrix with respect to all its hyper-parameters.

.. math:: g_t = \sum_{ij} W_{ij}\, \frac{\partial k_\theta(x_i, z_j)}{\partial \theta_t},
          \qquad W = U^T V \text{ or given}.

A stationary kernel is :math:`c\, k(s)`, :math:`s = \sum_d (a_d - b_d)^2` between scaled inputs.
With :math:`H = c\, W \circ k'(s)`, every length scale comes out of one pass:

.. math:: g_{\log \ell_d} = -2 \sum_{ij} H_{ij} (a_{id} - b_{jd})^2
          = -2 \{ (H 1)^T a_d^2 + (H^T 1)^T b_d^2 - 2\, a_d^T H b_d \} .

Summands that are no product of constants and one leaf with a `Leaf.profile`, of k and k', go
through autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Kernel,
    Matern,
    Sum,
)
from torch import Tensor

from .defaults import ALIVE, CACHED, DIFFERENCES, FEW_ROWS, LARGEST_SQUARE
from .distances import METRICS, correct_far_, far_limit, scaled_inputs, squared_differences
from .expression import Binder, Node, Part, bind, check_kernel, factors
from .gram import covariance, gram, variance
from .leaves import LEAVES
from .specs import ActiveDims

__all__ = [
    "GramWithGradient",
    "bilinear_gradient",
    "pulled_back",
    "weighted_gradient",
]


def bilinear_gradient(
    kernel: Kernel,
    X: Tensor,
    U: Tensor,
    V: Tensor,
    theta: Tensor | None = None,
    *,
    memory_budget: float = 2.5e8,
) -> Tensor:
    r"""Gradient of :math:`\operatorname{tr}(U K_\theta(X, X) V^T)`.

    Parameters
    ----------
    kernel : Kernel
        An expression without WhiteKernel.
    X : Tensor of shape (n, d)
    U, V : Tensor of shape (c, n)
        In the dtype of X.
    theta : Tensor of shape (kernel.n_dims,), optional
        Logarithms of the free hyper-parameters; the kernel's own by default.
    memory_budget : float, default=2.5e8
        Bytes that the temporaries of a tile may take.

    Returns
    -------
    Tensor of shape (kernel.n_dims,)
        float64; tiles are computed in the dtype of X, and their sums added up in float64.

    Notes
    -----
    Tiles of the upper triangle, ``O(n^2 (c + d) / 2)`` with one exponential an element. Agrees
    with autograd to rounding; within ``sqrt(eps)`` of distance 0, Matern 1/2 counts as flat.
    """
    return _evaluate(kernel, X, X, theta, _PairTiles(X, U, V, _side(X, memory_budget)))


def weighted_gradient(
    kernel: Kernel,
    X: Tensor,
    Z: Tensor,
    W: Tensor,
    theta: Tensor | None = None,
    *,
    memory_budget: float = 2.5e8,
) -> Tensor:
    r"""Gradient of :math:`\sum_{ij} W_{ij} k_\theta(x_i, z_j)`.

    X (n, d), Z (p, d) and W (n, p) are of one dtype; the rest is as in `bilinear_gradient`.
    """
    return _evaluate(kernel, X, Z, theta, _DenseTiles(W, _side(X, memory_budget)))


class GramWithGradient:
    r"""K(X, X) at many theta, and :math:`\sum_{ij} W_{ij}\, \partial k_\theta(x_i, x_j)` of each.

    Constants times one stationary leaf share one pass over the distances between value and
    gradient, in closed form; any other expression, and many inputs with far rows, go through
    autograd.

    The kernel, without WhiteKernel, is asked once for its hyper-parameters; X is (n, d). Of `few`
    rows, whose differences are kept, K and W are arrays of NumPy, in place of tensors like X.

    Examples
    --------
    >>> X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> K, gradient = GramWithGradient(RBF(), X)(np.zeros(1))
    >>> gradient(np.ones_like(K)).round(4)
    array([1.2131])
    """

    def __init__(self, kernel: Kernel, X: Tensor) -> None:
        check_kernel(kernel)
        self._bind, self._X = Binder(kernel), X
        self._leaf = _stationary_leaf(self._bind.part)
        few = len(X) <= FEW_ROWS and len(X) * X.numel() <= DIFFERENCES
        self.few = few and X.dtype == torch.float64 and not X.is_cuda
        self._centred = scaled_inputs(X, None, 1.0)[0]
        if self._leaf is None:
            return
        scaled_inputs(X[:1], None, X.new_tensor(self._leaf.length_scale))  # says what does not fit
        if self.few:
            D = squared_differences(X).numpy()
            self._D = D if self._leaf.is_vector else D.sum(0, keepdims=True)  # (e, n^2)

    def __call__(self, theta: np.ndarray) -> tuple[Any, Callable[[Any], np.ndarray]]:
        """K (n, n) at theta (n_theta,), and the gradient (n_theta,) as a function of W (n, n).

        W is symmetric. K is not to be changed; O(n^2 d) each.
        """
        if self._leaf is not None:
            evaluate = self._of_few if self.few else self._of_many
            found = evaluate(self._leaf, theta)
            if found is not None:
                return found
        K, of_tensor = self._by_autograd(torch.as_tensor(theta).to(self._X))

        def gradient(W: Any) -> np.ndarray:
            return of_tensor(torch.as_tensor(W)).cpu().numpy().astype(float)

        return K.numpy() if self.few else K, gradient

    def _of_few(self, leaf: _StationaryLeaf, theta: np.ndarray):
        """By the differences of all pairs, in arrays of NumPy."""
        precision = (leaf.root / leaf.scale(theta)) ** 2  # (e,)
        s = np.minimum(precision @ self._D, LARGEST_SQUARE)  # beyond, rows are infinitely far apart
        k, slope = _profile_of_few(leaf.nu, s)  # (n^2,)
        amplitude = leaf.amplitude(theta)
        k *= amplitude

        def gradient(W: np.ndarray) -> np.ndarray:
            found, w = np.zeros(len(theta)), W.reshape(-1)
            for place in leaf.constants:
                found[place] = w @ k
            if leaf.place is not None:
                found[leaf.place] = -2 * amplitude * precision * (self._D @ (slope * w))
            return found

        return k.reshape(len(self._X), -1), gradient

    @torch.no_grad()
    def _of_many(self, leaf: _StationaryLeaf, theta: np.ndarray):
        """By a product of matrices, in tensors; None where rows are far."""
        A = self._centred * self._X.new_tensor(leaf.root / leaf.scale(theta))  # (n, d)
        squares = A * A
        norms = squares.sum(1)
        largest = float(norms.max())
        if largest > far_limit(self._X.dtype):
            return None
        s = (A @ A.T).mul_(-2).add_(norms).add_(norms[:, None]).clamp_min_(0)
        s.diagonal().zero_()  # what is left of it is rounding
        k, slope = leaf.profile(s, 16 * torch.finfo(self._X.dtype).eps * largest)
        amplitude = leaf.amplitude(theta)
        k *= amplitude

        @torch.no_grad()
        def gradient(W: Tensor) -> np.ndarray:
            found = np.zeros(len(theta))
            for place in leaf.constants:
                found[place] = float(W.reshape(-1) @ k.reshape(-1))
            if leaf.place is not None:
                H = slope * W
                # -2 sum_ij H_ij (a_i - a_j)^2 of each column, H symmetric
                each = (4 * amplitude) * ((A * (H @ A)).sum(0) - H.sum(1) @ squares)
                found[leaf.place] = (each if leaf.is_vector else each.sum()).cpu().numpy()
            return found

        return k, gradient

    def _by_autograd(self, theta: Tensor):
        theta = theta.detach().clone().requires_grad_()
        with torch.enable_grad():
            node = self._bind(theta, dtype=self._X.dtype, device=self._X.device)
            K = covariance(node, self._X, None, METRICS["expand"])
            K = K.expand(len(self._X), len(self._X))  # of a constant alone
        value = K.detach().clone()
        value.diagonal().copy_(variance(node, self._X).detach())  # distances by products err there

        def gradient(W: Tensor) -> Tensor:
            if not K.requires_grad:
                return torch.zeros_like(theta)
            return pulled_back(K, W, theta)

        return value, gradient


class _StationaryLeaf:
    """Where theta has the parameters of constants times one stationary leaf.

    `place` is that of the length scale in theta, None where fixed; `constants`
    are the places of the free constants, `factor` the product of the fixed ones.
    """

    def __init__(self, factors: list[Part], leaf: Part) -> None:
        ((_, self.place, length_scale),) = leaf.params
        self.length_scale = np.asarray(length_scale, dtype=float)
        self.is_vector = np.size(self.length_scale) > 1
        constants = [factor.params[0][1:] for factor in factors if factor is not leaf]
        self.constants = [place for place, _ in constants if place is not None]
        self.factor = math.prod(float(own) for place, own in constants if place is None)
        self.profile, self.root = LEAVES[type(leaf.kernel)].profile(leaf.kernel, {})
        self.nu = getattr(leaf.kernel, "nu", math.inf)

    def scale(self, theta: np.ndarray) -> np.ndarray:
        """Length scales, (e,) where they are a vector and else (1,)."""
        own = self.length_scale if self.place is None else np.exp(theta[self.place])
        return own.reshape(-1)

    def amplitude(self, theta) -> float:
        """Product of all constants."""
        return self.factor * math.exp(sum(float(theta[place.start]) for place in self.constants))


def _profile_of_few(nu: float, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k(s) and k'(s) of RBF (nu = inf) and Matern, the table of `skgp.kernels.leaves`.

    In NumPy, whose exponential of some thousand numbers takes a third of torch's time.
    """
    if nu == math.inf:
        k = np.exp(-0.5 * s)
        return k, -0.5 * k
    r = np.sqrt(s)
    decay = np.exp(-r)
    if nu == 0.5:  # k' grows without bound towards 0, where s k' vanishes
        return decay, -0.5 * np.divide(decay, r, out=np.zeros_like(r), where=r > 0)
    linear = (1 + r) * decay
    if nu == 1.5:
        return linear, -0.5 * decay
    return linear + s * decay / 3, linear / -6


def _stationary_leaf(part: Part) -> _StationaryLeaf | None:
    """Of an expression that was bound: constants times one RBF or Matern; None of any other."""
    parts = factors(part)
    leaves = [each for each in parts if type(each.kernel) is not ConstantKernel]
    if len(leaves) != 1 or type(leaves[0].kernel) not in (RBF, Matern):
        return None
    return _StationaryLeaf(parts, leaves[0])


def pulled_back(K: Tensor, W: Tensor, theta: Tensor) -> Tensor:
    """Gradient in theta of the sum of W * K, of the shape of theta, by autograd.

    As a scalar: torch imports its compiler for the shapes of any other ``grad_outputs``.
    """
    with torch.enable_grad():
        total = torch.dot(K.reshape(-1), W.reshape(-1))
    return torch.autograd.grad(total, theta, materialize_grads=True)[0]


def _side(X: Tensor, memory_budget: float) -> int:
    elements = memory_budget / (ALIVE * X.element_size())
    return max(1, math.isqrt(int(elements if X.is_cuda else min(elements, CACHED))))


Tile = tuple[slice, slice, Tensor]


class _PairTiles:
    """Tiles of U'V folded on the upper triangle, where the symmetric kernel needs them."""

    def __init__(self, X: Tensor, U: Tensor, V: Tensor, side: int):
        self._left, self._right = torch.cat([U, V]), torch.cat([V, U])
        self._n, self._side = len(X), side

    def __iter__(self) -> Iterator[Tile]:
        cuts = [slice(i, min(i + self._side, self._n)) for i in range(0, self._n, self._side)]
        for i, rows in enumerate(cuts):
            for columns in cuts[i:]:
                # U_i'V_j + V_i'U_j: both triangles at once; on the diagonal that is twice too much.
                W = self._left[:, rows].T @ self._right[:, columns]
                yield rows, columns, W.mul_(0.5) if rows == columns else W


class _DenseTiles:
    """Tiles of a matrix that exists."""

    def __init__(self, W: Tensor, side: int):
        self._W, self._side = W, side

    def __iter__(self) -> Iterator[Tile]:
        n, p = self._W.shape
        for i in range(0, n, self._side):
            rows = slice(i, min(i + self._side, n))
            for j in range(0, p, self._side):
                columns = slice(j, min(j + self._side, p))
                yield rows, columns, self._W[rows, columns]


@torch.no_grad()
def _evaluate(kernel, X, Z, theta, tiles) -> Tensor:
    check_kernel(kernel)
    if theta is None:
        theta = torch.as_tensor(kernel.theta)
    theta = theta.detach().to(X)
    bind(kernel, theta, dtype=X.dtype, device=X.device)  # its check of the shape
    terms = [_make_term(k, X, Z, t, dims) for k, t, dims in _summands(kernel, theta, None)]
    for rows, columns, W in tiles:
        for term in terms:
            term.add(rows, columns, W)
    return torch.cat([term.gradient() for term in terms])


def _summands(kernel, theta, dims) -> Iterator[tuple[Kernel, Tensor, ActiveDims | None]]:
    """Summands with their parts of theta, and the columns that they see."""
    if type(kernel) is Sum:
        size = kernel.k1.n_dims
        yield from _summands(kernel.k1, theta[:size], dims)
        yield from _summands(kernel.k2, theta[size:], dims)
    elif type(kernel) is ActiveDims and dims is None:
        yield from _summands(kernel.kernel, theta, kernel)
    else:
        yield kernel, theta, dims


def _make_term(kernel, X, Z, theta, dims):
    if dims is not None:
        X, Z = dims.select(X), dims.select(Z)
    node = bind(kernel, theta, dtype=X.dtype, device=X.device)
    parts = factors(node)
    leaves = [f for f in parts if type(f.kernel) is not ConstantKernel]
    if len(leaves) == 1 and _has_profile(leaves[0].kernel):
        return _StationaryTerm(parts, leaves[0], X, Z)
    return _AutogradTerm(kernel, X, Z, theta)


def _has_profile(kernel: Kernel) -> bool:
    return type(kernel) in LEAVES and LEAVES[type(kernel)].has_profile


class _AutogradTerm:
    """Any summand: the tile is evaluated with a graph."""

    def __init__(self, kernel: Kernel, X: Tensor, Z: Tensor, theta: Tensor):
        self._kernel, self._X, self._Z = kernel, X, Z
        self._theta = theta.clone().requires_grad_()
        self._total = torch.zeros_like(theta, dtype=torch.float64)

    def add(self, rows: slice, columns: slice, W: Tensor) -> None:
        if not len(self._theta):
            return
        with torch.enable_grad():
            K = gram(self._kernel, self._X[rows], self._Z[columns], self._theta)
            (gradient,) = torch.autograd.grad((W * K).sum(), self._theta)
        self._total += gradient

    def gradient(self) -> Tensor:
        return self._total


class _StationaryTerm:
    """Constants times one stationary leaf, in closed form."""

    def __init__(self, factors: list[Node], leaf: Node, X: Tensor, Z: Tensor):
        self._factors, self._leaf = factors, leaf
        constants = [f.params["constant_value"] for f in factors if f is not leaf]
        self._constant = float(torch.stack(constants).prod()) if constants else 1.0
        self._alpha = leaf.params.get("alpha")
        self._profile, root = LEAVES[type(leaf.kernel)].profile(leaf.kernel, leaf.params)
        self._A, self._B, _ = scaled_inputs(X, Z, leaf.params["length_scale"] / root)
        a2, b2 = (M.square().sum(1, keepdim=True) for M in (self._A, self._B))
        one = torch.ones_like
        self._A_norm = torch.cat([-2 * self._A, a2, one(a2)], 1)
        self._B_norm = torch.cat([self._B, one(b2), b2], 1)
        # Squared distances below this are rounding, and 0; far rows are free of it.
        largest, limit = float(torch.maximum(a2.max(), b2.max())), far_limit(X.dtype)
        self._any_far = largest > limit
        self._floor = 16 * torch.finfo(X.dtype).eps * min(largest, limit)
        self._squares = X.new_zeros(X.shape[1], dtype=torch.float64)
        # Sums of W o k and of W o dk / d log alpha.
        self._value, self._shape = self._squares.new_zeros(2).unbind()

    def add(self, rows: slice, columns: slice, W: Tensor) -> None:
        A, B = self._A[rows], self._B[columns]
        a2, b2 = self._A_norm[rows, -2:-1], self._B_norm[columns, -1:]
        s = (self._A_norm[rows] @ self._B_norm[columns].T).clamp_min_(0)
        if self._any_far:
            correct_far_(s, A, B, a2, b2)
        if self._alpha is not None:
            self._shape += (W * _shape_derivative(s, float(self._alpha))).sum()
        k, slope = self._profile(s, self._floor)
        self._value += torch.tensordot(W, k)
        H = slope.mul_(W)
        if self._any_far:  # moments of far rows would cancel: one column at a time by differences
            apart = H * (torch.maximum(a2, b2.T) > far_limit(a2.dtype))
            H = H - apart
            pairs = zip(A.T, B.T, strict=True)
            self._squares += torch.stack(
                [apart.mul((a[:, None] - b).square_()).sum() for a, b in pairs]
            )
        self._squares += H.sum(1) @ A.square() + H.sum(0) @ B.square() - 2 * (A * (H @ B)).sum(0)

    def gradient(self) -> Tensor:
        return torch.cat([self._of(factor) for factor in self._factors])

    def _of(self, factor: Node) -> Tensor:
        """Derivatives by the free hyper-parameters of one factor, in their order."""
        parts = []
        for hyper in factor.kernel.hyperparameters:
            if not hyper.fixed:
                parts.append(self._constant * self._derivative(hyper))
        return torch.cat(parts) if parts else self._squares[:0]

    def _derivative(self, hyper) -> Tensor:
        if hyper.name == "length_scale":
            each = -2 * self._squares
            return each if hyper.n_elements > 1 else each.sum()[None]
        value = self._shape if hyper.name == "alpha" else self._value
        return value[None]


def _shape_derivative(s: Tensor, alpha: float) -> Tensor:
    """Derivative of the rational quadratic by log alpha: alpha k (t / (1 + t) - log(1 + t))."""
    t = s / (2 * alpha)
    log = torch.log1p(t)
    return alpha * torch.exp(-alpha * log) * (t / (1 + t) - log)
