r"""Covariances over a few fixed rows for many hyper-parameters at once, with their gradients.

The squared differences :math:`D_{d,ij} = (x_{id} - x_{jd})^2` of every column are kept, so that for
stationary kernels :math:`k(s)` both directions are one matrix product for all hyper-parameters:

.. math:: s = 2 \nu \sum_d \ell_d^{-2} D_d, \qquad
          \frac{\partial}{\partial \log \ell_d} \sum_{ij} W_{ij} k(s_{ij})
          = -\frac{4 \nu}{\ell_d^2} \sum_{ij} W_{ij} k'(s_{ij}) D_{d,ij}

(RBF: without the factor :math:`2 \nu`). Sums and products of such kernels, of constants and of
``ActiveDims`` follow by the chain rule; other expressions go through autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern, Product, Sum
from torch import Tensor

from .defaults import LARGEST_SQUARE, MOST_NUMBERS
from .distances import METRICS, squared_differences
from .expression import Binder, Part, children_of
from .gradients import pulled_back
from .gram import covariance
from .leaves import LEAVES
from .specs import ActiveDims

__all__ = ["PairwiseKernel"]

Pull = Callable[[Tensor], Tensor]
Evaluate = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], list[Tensor]]]]


class PairwiseKernel:
    """A kernel expression over fixed rows.

    Parameters
    ----------
    kernel : Kernel
        A checked expression without WhiteKernel.
    X : Tensor of shape (n, d)

    Notes
    -----
    Memory ``n^2 d`` numbers. ``O(k n^2 d)`` for k sets of hyper-parameters.
    """

    def __init__(self, kernel: Kernel, X: Tensor) -> None:
        self._X, self._bind, self._n = X, Binder(kernel), len(X)
        self._evaluate: Evaluate | None = None
        if _closed_form(kernel) and X.shape[1] * self._n**2 <= MOST_NUMBERS:
            self._evaluate = _compiled(self._bind.part, squared_differences(X))

    def __call__(self, theta: Tensor) -> tuple[Tensor, Pull]:
        """Covariances (k, n, n) at theta (k, n_dims), and their pullback.

        The pullback maps W (k, n, n) to the gradient (k, n_dims) of the sum of W times the
        covariances, by the logarithms theta.
        """
        if self._evaluate is None:
            return self._by_autograd(theta)
        value, pull = self._evaluate(theta)
        K = value.expand(len(theta), self._n**2).reshape(-1, self._n, self._n)
        empty = theta[:, :0]
        return K, lambda W: torch.cat([empty, *pull(W.reshape(len(theta), -1))], 1)

    def _by_autograd(self, theta: Tensor) -> tuple[Tensor, Pull]:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            node = self._bind(theta, dtype=theta.dtype, device=theta.device)
            K = covariance(node, self._X, None, METRICS["expand"])
            K = K.expand(len(theta), self._n, self._n)

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
    (_, place, own) = part.params[0]
    fixed = squares.new_tensor(float(own))

    def evaluate(theta: Tensor):
        if place is None:
            return fixed, lambda G: []
        value = theta[:, place].exp()  # (k, 1)
        return value, lambda G: [G.sum(1, keepdim=True) * value]

    return evaluate


def _stationary(part: Part, squares: Tensor) -> Evaluate:
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


def _closed_form(kernel: Kernel) -> bool:
    if type(kernel) in (Sum, Product, ActiveDims):
        return all(map(_closed_form, children_of(kernel)))
    return type(kernel) in (ConstantKernel, RBF, Matern)
