r"""Training covariances :math:`K_\theta(X, X)` of any scikit-learn kernel at many theta.

:func:`training_gram` evaluates what skgp knows in closed forms (`skgp.kernels.pairwise`), with the
noise of a ``WhiteKernel`` summand on the diagonal, and calls any other kernel itself: those on
strings and graphs, ``PairwiseKernel``, ``CompoundKernel``, classes of a user's own. Either way

``gram(theta)``
    is K (n, n), which is not to be changed, and the gradient (n_theta,) of
    :math:`\sum_{ij} W_{ij} K_{ij}` as a function of a symmetric W (n, n);
``gram.few``
    says whether K and W are arrays of NumPy, in place of tensors;
``gram.of_many(theta)``
    is the same for a batch of theta (k, n_theta): K (k, n, n) and the gradients (k, n_theta) of
    W (k, n, n), tensors; where ``gram.has_many`` is true.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.spatial.distance import cdist
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Kernel,
    Matern,
    Product,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from skgp.linalg.cholesky import raise_diagonal_

from .defaults import CALLED_PAIRS, CALLED_ROWS, DISTANCE_COLUMNS, LARGEST_SQUARE
from .expression import MATERN_NU, split_noise, theta_places
from .gram import gram, gram_diag, gram_tile
from .pairwise import GramWithGradient, closed_form, profile_of_few, values_of_few

Pull = Callable[[np.ndarray], np.ndarray]  # W (p, n) to the gradients (p, d)


def can_evaluate(kernel: Kernel) -> bool:
    """Whether skgp evaluates an expression itself, its noise a summand at the top.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF, PairwiseKernel
    >>> can_evaluate(RBF()), can_evaluate(PairwiseKernel())
    (True, False)
    """
    try:
        split_noise(kernel)
    except (TypeError, ValueError):
        return False
    return True


def training_gram(kernel: Kernel, X: Any, device: torch.device | str = "cpu") -> Any:
    """The evaluator of a kernel over training inputs X, an array (n, d) or a list of objects.

    A kernel that is called computes on the CPU whatever `device` is. A ValueError if the kernel
    does not fit the columns of X.
    """
    if is_called(kernel, X, device):
        return CalledGram(kernel, X)
    return ExpressionGram(kernel, torch.tensor(X, dtype=torch.float64, device=device))


def is_called(kernel: Kernel, X: Any, device: torch.device | str = "cpu") -> bool:
    """Whether `training_gram` calls a kernel, which returns its derivatives (n, n, n_theta)."""
    if not (kernel.requires_vector_input and can_evaluate(kernel)):
        return True
    on_cpu = torch.device(device).type == "cpu"
    return on_cpu and len(X) <= CALLED_ROWS and not closed_form(split_noise(kernel)[0])


class ExpressionGram:
    """An expression that skgp evaluates, noise included; X (n, d) in float64."""

    def __init__(self, kernel: Kernel, X: Tensor) -> None:
        signal, white = split_noise(kernel)
        self._gram = GramWithGradient(signal, X)
        self.few, self.device = self._gram.few, X.device
        self._places, self._noise_place, self._noise = (
            (list(range(signal.n_dims)), None, 0.0) if white is None else theta_places(kernel)
        )

    def __call__(self, theta: np.ndarray) -> tuple[Any, Callable[[Any], np.ndarray]]:
        """K at theta, and the pull-back of what stands in its place to the gradient."""
        K, of_signal = self._gram(theta[self._places])
        noise = self._noise_at(theta)
        if noise:
            K = K + 0.0
            raise_diagonal_(K, float(noise))

        def gradient(W: Any) -> np.ndarray:
            found = np.zeros(len(theta))
            found[self._places] = torch.as_tensor(of_signal(W)).cpu().numpy()
            if self._noise_place is not None:
                found[self._noise_place] = noise * float(W.diagonal().sum())
            return found

        return K, gradient

    @property
    def has_many(self) -> bool:
        """Whether there is a batch: of many rows it saves nothing."""
        return self.few

    def of_many(self, theta: np.ndarray) -> tuple[Tensor, Callable[[Tensor], np.ndarray]]:
        """Covariances of a batch of theta (k, n_theta), and their pullback."""
        K, of_signal = self._gram.of_many(theta[:, self._places])
        noise = self._noise_at(theta.T)
        if self._noise_place is not None or self._noise:
            K = K.clone()
            K.diagonal(dim1=1, dim2=2).add_(torch.as_tensor(noise).reshape(-1, 1))

        def gradient(W: Tensor) -> np.ndarray:
            found = np.zeros(theta.shape)
            found[:, self._places] = of_signal(W).numpy()
            if self._noise_place is not None:
                found[:, self._noise_place] = noise * W.diagonal(dim1=1, dim2=2).sum(1).numpy()
            return found

        return K, gradient

    def _noise_at(self, theta: np.ndarray) -> Any:
        return self._noise if self._noise_place is None else np.exp(theta[self._noise_place])


class CalledGram:
    """A kernel that is called, with its own ``eval_gradient``."""

    few = True
    has_many = False  # the kernel takes one theta at a time

    def __init__(self, kernel: Kernel, X: Any) -> None:
        self._kernel, self._X = kernel.clone_with_theta(kernel.theta), X

    def __call__(self, theta: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """K at theta, and the pull-back of what stands in its place to the gradient."""
        self._kernel.theta = theta
        if len(theta) == 0:
            return np.asarray(self._kernel(self._X), dtype=float), lambda W: np.zeros(0)
        K, derivatives = self._kernel(self._X, eval_gradient=True)  # (n, n), (n, n, n_theta)

        def gradient(W: np.ndarray) -> np.ndarray:
            return W.reshape(-1) @ derivatives.reshape(W.size, -1)

        return np.asarray(K, dtype=float), gradient


def cross_gram(kernel: Kernel, X: Any, Z: Any) -> np.ndarray:
    """K(X, Z), (p, n), of new inputs X and training inputs Z, in NumPy, without noise.

    Constants times one stationary leaf take one pass over the distances, of a few pairs or a few
    columns; of other kernels many pairs take one product of matrices
    (`skgp.kernels.gram.gram_tile`), and a few a call.
    """
    if not kernel.requires_vector_input:
        return kernel(X, Z)
    few = len(X) * len(Z) <= CALLED_PAIRS
    if few or X.shape[1] <= DISTANCE_COLUMNS:
        found = _scaled_squares(kernel, X, Z)
        if found is not None:
            leaf, amplitude, s = found
            K = values_of_few(getattr(leaf, "nu", np.inf), s)
            K *= amplitude
            return K
    if few or not can_evaluate(kernel):
        return kernel(X, Z)
    tensors = (torch.tensor(array, dtype=torch.float64) for array in (X, Z))
    return gram_tile(split_noise(kernel)[0], *tensors).numpy()


def cross_gram_with_gradient(kernel: Kernel, X: Any, Z: Any) -> tuple[np.ndarray, Pull]:
    r"""`cross_gram`, and the gradients (p, d) of :math:`\sum_j W_{ij} k(x_i, z_j)` in each x_i.

    The latter as a function of W, which broadcasts to (p, n). ValueError if the kernel can only be
    called.
    """
    _check_differentiable(kernel)
    if len(X) * len(Z) <= CALLED_PAIRS:
        found = _of_few_pairs(kernel, X, Z)
        if found is not None:
            return found
    rows, points = (torch.tensor(array, dtype=torch.float64) for array in (X, Z))
    K = gram(split_noise(kernel)[0], rows.requires_grad_(), points)

    def pull(W: np.ndarray) -> np.ndarray:
        total = (K * torch.as_tensor(np.array(W))).sum()
        found = torch.autograd.grad(total, rows, retain_graph=True, materialize_grads=True)
        return found[0].numpy()

    return K.detach().numpy(), pull


def variance_gradient(kernel: Kernel, X: np.ndarray) -> np.ndarray:
    """Gradients (p, d) of k(x, x) in the rows of X (p, d); ValueError as above."""
    _check_differentiable(kernel)
    if kernel.is_stationary():
        return np.zeros(X.shape)
    rows = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    total = gram_diag(split_noise(kernel)[0], rows).sum()
    return torch.autograd.grad(total, rows, materialize_grads=True)[0].numpy()


def _check_differentiable(kernel: Kernel) -> None:
    if not (kernel.requires_vector_input and can_evaluate(kernel)):
        raise ValueError(
            f"kernel={kernel} is evaluated by calling it, which gives no gradients in X. Register "
            "its covariance function by skgp.kernels.register_kernel, and write noise as a summand."
        )


def _scaled_squares(
    kernel: Kernel, X: np.ndarray, Z: np.ndarray
) -> tuple[Kernel, float, np.ndarray] | None:
    r"""Constants times one RBF or Matern, and noise; None of any other expression.

    The leaf, the product of the constants, and :math:`s` (p, n), the squared distances over the
    length scales, times :math:`2 \nu` of a Matern.
    """
    amplitude = 1.0
    while type(kernel) in (Sum, Product):
        dropped = WhiteKernel if type(kernel) is Sum else ConstantKernel
        parts = sorted((kernel.k1, kernel.k2), key=lambda part: type(part) is dropped)
        if type(parts[1]) is not dropped:
            return None
        kernel, constant = parts
        amplitude *= constant.constant_value if dropped is ConstantKernel else 1.0
    if type(kernel) not in (RBF, Matern) or getattr(kernel, "nu", np.inf) not in MATERN_NU:
        return None
    if np.size(kernel.length_scale) not in (1, X.shape[1]):
        return None  # a call says what does not fit
    s = cdist(X / kernel.length_scale, Z / kernel.length_scale, "sqeuclidean")
    s *= _square_factor(kernel)
    return kernel, amplitude, s


def _square_factor(leaf: Kernel) -> float:
    """s of inputs over length scales: 1 of an RBF, 2 nu of a Matern."""
    nu = getattr(leaf, "nu", np.inf)
    return 1.0 if nu == np.inf else 2 * nu


def _of_few_pairs(kernel: Kernel, X: Any, Z: Any) -> tuple[np.ndarray, Pull] | None:
    """The covariance and the pullback of `cross_gram_with_gradient`, of the same expressions."""
    found = _scaled_squares(kernel, X, Z)
    if found is None:
        return None
    leaf, amplitude, s = found
    np.minimum(s, LARGEST_SQUARE, out=s)  # beyond, inputs are infinitely far apart
    K, slope = profile_of_few(getattr(leaf, "nu", np.inf), s)
    K *= amplitude
    scale, factor = leaf.length_scale, 2 * _square_factor(leaf) * amplitude

    def pull(W: np.ndarray) -> np.ndarray:
        """2 k'(s) (a_i - b_j) / l, summed; inputs from one of them, for the sake of digits."""
        A, B = ((np.asarray(each, dtype=float) - Z[0]) / scale for each in (X, Z))
        H = factor * slope * W
        return (A * H.sum(1)[:, None] - H @ B) / scale

    return K, pull
