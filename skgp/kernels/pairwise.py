r"""Covariances over fixed rows at many hyper-parameters, with their gradients.

:class:`GramWithGradient` takes one theta after the other, as searches do, :class:`PairwiseKernel`
many at once, as samplers do. For a few rows both keep the squared differences
:math:`D_{d,ij} = (x_{id} - x_{jd})^2` of every column, so that for stationary kernels :math:`k(s)`
value and gradient are one matrix product each for all hyper-parameters:

.. math:: s = 2 \nu \sum_d \ell_d^{-2} D_d, \qquad
          \frac{\partial}{\partial \log \ell_d} \sum_{ij} W_{ij} k(s_{ij})
          = -\frac{4 \nu}{\ell_d^2} \sum_{ij} W_{ij} k'(s_{ij}) D_{d,ij}

(RBF: without the factor :math:`2 \nu`). Sums and products of such kernels, of constants and of
``ActiveDims`` follow by the chain rule; other expressions go through autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern, Product, Sum
from torch import Tensor

from .defaults import DIFFERENCES, EXPONENTIALS, FEW_ROWS, LARGEST_SQUARE, MOST_NUMBERS
from .distances import METRICS, far_limit, scaled_inputs, squared_differences
from .expression import Binder, Part, check_kernel, factors
from .gradients import weighted_gradient
from .gram import covariance, gram_diag, gram_tile
from .hyperparameters import children_of
from .leaves import LEAVES
from .specs import ActiveDims

Pull = Callable[[Tensor], Tensor]
Evaluate = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], list[Tensor]]]]


def pulled_back(K: Tensor, W: Tensor, theta: Tensor) -> Tensor:
    """Gradient in theta of the sum of W * K, of the shape of theta, by autograd.

    As a scalar: torch imports its compiler for the shapes of any other ``grad_outputs``.
    """
    with torch.enable_grad():
        total = torch.dot(K.reshape(-1), W.reshape(-1))
    return torch.autograd.grad(total, theta, materialize_grads=True)[0]


class GramWithGradient:
    r"""K(X, X) at many theta, and :math:`\sum_{ij} W_{ij}\, \partial k_\theta(x_i, x_j)` of each.

    Constants times one stationary leaf share one pass over the distances between value and
    gradient, in closed form. Any other expression goes through `PairwiseKernel`, or of many inputs
    without a closed form there tile by tile (:func:`skgp.kernels.gradients.weighted_gradient`).

    The kernel, without WhiteKernel, is asked once for its hyper-parameters; X is (n, d). Of `few`
    rows, whose differences are kept, K, W and the gradient are arrays of NumPy, in place of tensors
    like X: no device is as fast.

    Examples
    --------
    >>> X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> K, gradient = GramWithGradient(RBF(), X)(np.zeros(1))
    >>> gradient(np.ones_like(K)).round(4)
    array([1.2131])
    """

    def __init__(self, kernel: Kernel, X: Tensor) -> None:
        check_kernel(kernel)
        if type(kernel) is ActiveDims:  # theta is that of the kernel within
            kernel, X = kernel.kernel, kernel.select(X)
        self._kernel, self._X = kernel, X
        self._leaf = _stationary_leaf(Binder(kernel).part)
        few = len(X) <= FEW_ROWS and len(X) * X.numel() <= DIFFERENCES
        self.few = few and X.dtype == torch.float64
        if self.few:
            self._X = X = X.cpu()
        self._centred = scaled_inputs(X, None, 1.0)[0]
        if self._leaf is None:
            return
        scaled_inputs(X[:1], None, X.new_tensor(self._leaf.length_scale))  # says what does not fit
        if self.few:
            D = squared_differences(X).numpy()
            self._D = D if self._leaf.is_vector else D.sum(0, keepdims=True)  # (e, n^2)

    @property
    def in_closed_form(self) -> bool:
        """Whether the expression is constants times one stationary leaf."""
        return self._leaf is not None

    def __call__(self, theta: np.ndarray) -> tuple[Any, Callable[[Any], Any]]:
        """K (n, n) at theta (n_theta,), and the gradient (n_theta,) as a function of W (n, n).

        W is symmetric. K is not to be changed; O(n^2 d) each.
        """
        if self._leaf is not None:
            evaluate = self._of_few if self.few else self._of_many
            found = evaluate(self._leaf, theta)
            if found is not None:
                return found
        X, at = self._X, self._X.new_tensor(theta)
        if self._pairs.in_closed_form:
            batch, of_batch = self._pairs(at[None])
            K, pull = batch[0], lambda W: of_batch(W[None])[0]
        elif self.few:
            K, pull = self._pairs(at)
        else:
            return self.values(theta), lambda W: weighted_gradient(self._kernel, X, X, W, at)
        if not self.few:
            return K, pull
        return K.numpy(), lambda W: pull(torch.as_tensor(W)).numpy()

    def values(self, theta: np.ndarray) -> Any:
        """K (n, n) at theta alone."""
        if self.few:
            return self(theta)[0]
        at = self._X.new_tensor(theta)
        K = gram_tile(self._kernel, self._X, self._X, at)
        # Distances by a matrix product are not quite 0 between equal rows.
        K.diagonal().copy_(gram_diag(self._kernel, self._X, at))
        return K

    def of_many(self, theta: np.ndarray) -> tuple[Tensor, Pull]:
        """Tensors K (k, n, n) at theta (k, n_theta), and their pullback (`PairwiseKernel`)."""
        return self._pairs(self._X.new_tensor(theta))

    @cached_property
    def _pairs(self) -> PairwiseKernel:
        return PairwiseKernel(self._kernel, self._X)

    def _of_few(self, leaf: _StationaryLeaf, theta: np.ndarray):
        """By the differences of all pairs, in arrays of NumPy."""
        precision = (leaf.root / leaf.scale(theta)) ** 2  # (e,)
        s = np.minimum(precision @ self._D, LARGEST_SQUARE)  # beyond, rows are infinitely far apart
        k, slope = profile_of_few(leaf.nu, s)  # (n^2,)
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
        def gradient(W: Tensor) -> Tensor:
            found = W.new_zeros(len(theta))
            for place in leaf.constants:
                found[place] = W.reshape(-1) @ k.reshape(-1)
            if leaf.place is not None:
                H = slope * W
                # -2 sum_ij H_ij (a_i - a_j)^2 of each column, H symmetric
                each = (4 * amplitude) * ((A * (H @ A)).sum(0) - H.sum(1) @ squares)
                found[leaf.place] = each if leaf.is_vector else each.sum()
            return found

        return k, gradient


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


def profile_of_few(nu: float, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k(s) and k'(s) of RBF (nu = inf) and Matern, the table of `skgp.kernels.distances`."""
    if nu == math.inf:
        k = _exp_(-0.5 * s)
        return k, -0.5 * k
    r = np.sqrt(s)
    decay = _exp_(-r)
    if nu == 0.5:  # k' grows without bound towards 0, where s k' vanishes
        return decay, -0.5 * np.divide(decay, r, out=np.zeros_like(r), where=r > 0)
    linear = (1 + r) * decay
    if nu == 1.5:
        return linear, -0.5 * decay
    return linear + s * decay / 3, linear / -6


def values_of_few(nu: float, s: np.ndarray) -> np.ndarray:
    """k(s) alone, in the memory of s: new memory takes longer than the arithmetic."""
    if nu == math.inf:
        s *= -0.5
        return _exp_(s)
    np.minimum(s, LARGEST_SQUARE, out=s)  # infinity times k = 0 is no number
    np.sqrt(s, out=s)
    decay = _exp_(-s)
    if nu == 0.5:
        return decay
    if nu == 1.5:
        s += 1
    else:  # 1 + r + r^2 / 3
        linear = s + 1
        s *= s
        s /= 3
        s += linear
    s *= decay
    return s


def _exp_(x: np.ndarray) -> np.ndarray:
    """The exponential in place, by torch where its call does not outweigh its vector units."""
    if x.size <= EXPONENTIALS:
        return np.exp(x, out=x)
    tensor = torch.from_numpy(x)
    torch.exp(tensor, out=tensor)
    return x


def _stationary_leaf(part: Part) -> _StationaryLeaf | None:
    """Of an expression that was bound: constants times one RBF or Matern; None of any other."""
    parts = factors(part)
    leaves = [each for each in parts if type(each.kernel) is not ConstantKernel]
    if len(leaves) != 1 or type(leaves[0].kernel) not in (RBF, Matern):
        return None
    return _StationaryLeaf(parts, leaves[0])


class PairwiseKernel:
    """A kernel expression over fixed rows.

    The expression is checked and without WhiteKernel, X is (n, d).

    Memory ``n^2 d`` numbers. ``O(k n^2 d)`` for k sets of hyper-parameters.
    """

    def __init__(self, kernel: Kernel, X: Tensor) -> None:
        self._X, self._bind, self._n = X, Binder(kernel), len(X)
        self._evaluate: Evaluate | None = None
        if closed_form(kernel) and X.shape[1] * self._n**2 <= MOST_NUMBERS:
            self._evaluate = _compiled(self._bind.part, squared_differences(X))

    def __call__(self, theta: Tensor) -> tuple[Tensor, Pull]:
        """Covariances (k, n, n) at theta (k, n_dims), and their pullback.

        The pullback maps W (k, n, n) to the gradient (k, n_dims) of the sum of W times the
        covariances, by the logarithms theta. Without a closed form theta may be one, (n_dims,).
        """
        if self._evaluate is None:
            return self._by_autograd(theta)
        value, pull = self._evaluate(theta)
        K = value.expand(len(theta), self._n**2).reshape(-1, self._n, self._n)
        empty = theta[:, :0]
        return K, lambda W: torch.cat([empty, *pull(W.reshape(len(theta), -1))], 1)

    @property
    def in_closed_form(self) -> bool:
        """Whether no autograd is needed, and the differences are kept."""
        return self._evaluate is not None

    def _by_autograd(self, theta: Tensor) -> tuple[Tensor, Pull]:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            node = self._bind(theta, dtype=theta.dtype, device=theta.device)
            K = covariance(node, self._X, None, METRICS["expand"])
            K = K.expand(*theta.shape[:-1], self._n, self._n)

        def pull(W: Tensor) -> Tensor:
            if not K.requires_grad:
                return torch.zeros_like(theta)
            return pulled_back(K, W, theta)

        return K.detach(), pull


def _compiled(part: Part, squares: Tensor) -> Evaluate:
    """A part as a function of theta, given the squared differences (d, n^2) of its columns.

    It returns values (k, n^2) or what broadcasts to that, and maps G (k, n^2) to the gradients
    (k, .) of the part's free hyper-parameters, in their order.
    """
    kind = type(part.kernel)
    if kind is ActiveDims:
        return _compiled(part.children[0], squares[part.kernel.columns().tolist()])
    if kind is ConstantKernel:
        return _constant(part, squares)
    if kind in (RBF, Matern):
        return _stationary(part, squares)
    left, right = (_compiled(child, squares) for child in part.children)

    def evaluate(theta: Tensor):
        (a, pull_a), (b, pull_b) = left(theta), right(theta)
        if kind is Sum:
            return a + b, lambda G: pull_a(G) + pull_b(G)
        return a * b, lambda G: pull_a(G * b) + pull_b(G * a)

    return evaluate


def _constant(part: Part, squares: Tensor) -> Evaluate:
    """A constant as a function of theta (k, p), and its pullback."""
    (_, place, own) = part.params[0]
    fixed = squares.new_tensor(float(own))

    def evaluate(theta: Tensor):
        if place is None:
            return fixed, lambda G: []
        value = theta[:, place].exp()  # (k, 1)
        return value, lambda G: [G.sum(1, keepdim=True) * value]

    return evaluate


def _stationary(part: Part, squares: Tensor) -> Evaluate:
    """Entries (k, n^2) of a stationary kernel at squared differences, and their pullback."""
    (_, place, own) = part.params[0]
    k_and_slope, root = LEAVES[type(part.kernel)].profile(part.kernel, {})
    factor = root**2  # 1 or 2 nu
    fixed = factor * squares.new_tensor(own).reshape(1, -1) ** -2
    n_elements = fixed.shape[1] if place is None else place.stop - place.start
    D = squares.sum(0, keepdim=True) if n_elements == 1 else squares  # (e, n^2)

    def evaluate(theta: Tensor):
        precision = fixed if place is None else factor * theta[:, place].mul(-2).exp()
        s = (precision @ D).clamp_max_(LARGEST_SQUARE)  # beyond, rows are infinitely far apart
        k, slope = k_and_slope(s, 0.0)  # (k, n^2)
        if place is None:
            return k, lambda G: []
        return k, lambda G: [-2 * precision * ((G * slope) @ D.T)]

    return evaluate


def closed_form(kernel: Kernel) -> bool:
    """Whether a `PairwiseKernel` of an expression without noise takes no autograd."""
    if type(kernel) in (Sum, Product, ActiveDims):
        return all(map(closed_form, children_of(kernel)))
    return type(kernel) in (ConstantKernel, RBF, Matern)
