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

import math
from collections.abc import Iterator

import torch
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Sum
from torch import Tensor

from skgp.linalg.runtime import tile_rows

from .defaults import ALIVE, CACHED
from .distances import correct_far_, far_limit, scaled_inputs
from .expression import Node, bind, check_kernel, factors
from .gram import gram
from .hyperparameters import free_of
from .leaves import LEAVES
from .specs import ActiveDims


def bilinear_gradient(
    kernel: Kernel,
    X: Tensor,  # (n, d)
    U: Tensor,  # (c, n), in the dtype of X
    V: Tensor,  # (c, n)
    theta: Tensor | None = None,  # (n_dims,); the kernel's own by default
) -> Tensor:
    r"""Gradient of :math:`\operatorname{tr}(U K_\theta(X, X) V^T)`.

    Shape (n_dims,), float64: tiles are computed in the dtype of X, and their sums added up in
    float64.

    Tiles of the upper triangle, ``O(n^2 (c + d) / 2)`` with one exponential an element. Agrees
    with autograd to rounding; within ``sqrt(eps)`` of distance 0, Matern 1/2 counts as flat.
    """
    return _evaluate(kernel, X, X, theta, _PairTiles(X, U, V, _side(X)))


def weighted_gradient(
    kernel: Kernel, X: Tensor, Z: Tensor, W: Tensor, theta: Tensor | None = None
) -> Tensor:
    r"""Gradient of :math:`\sum_{ij} W_{ij} k_\theta(x_i, z_j)`.

    X (n, d), Z (p, d) and W (n, p) are of one dtype; the rest is as in `bilinear_gradient`.
    """
    return _evaluate(kernel, X, Z, theta, _DenseTiles(W, _side(X)))


def _side(X: Tensor) -> int:
    elements = tile_rows(ALIVE * X.element_size())
    return math.isqrt(elements if X.is_cuda else min(elements, CACHED))


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
    """Gradient (p,) in theta of the sum of W * K over tiles ``(rows, columns, W)``."""
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
    if len(leaves) == 1 and getattr(LEAVES.get(type(leaves[0].kernel)), "has_profile", False):
        return _StationaryTerm(parts, leaves[0], X, Z)
    return _AutogradTerm(kernel, X, Z, theta)


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
        parts = [self._constant * self._derivative(hyper) for _, hyper in free_of(factor.kernel)]
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
