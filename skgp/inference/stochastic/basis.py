r"""The pair (Phi, S) of QSGP by columns, and uniform samples of them, free of n and m.

The model is :math:`f(x) = \sum_r w_r \phi_r(x)` with prior :math:`w \sim N(0, S^{-1})`, so that
:math:`k(x, z) \approx \phi(x)^T S^{-1} \phi(z)` (Evans and Nair, 2020, section 2). All bases answer
the same questions about the functions asked for, at a cost that depends on those alone, and
differentiably in ``theta``, the logarithms of the kernel's free hyper-parameters:

======================================  ================================================
paper                                   code
======================================  ================================================
m                                       ``n_features``
:math:`\Phi_{\tilde l, \tilde i}`       ``features(X, indices, theta)``
:math:`S_{\tilde j, \tilde i}`          ``precision(rows, columns, theta)``, of a dense S
:math:`s_{ii}`                          ``precision_diag(indices, theta)``
:math:`m / \tilde m`                    ``IndexSet.weight``
======================================  ================================================

Sums over basis functions are estimated from subsets of whole *sampling units*: single functions,
or, for features that a counter-based generator yields block by block, the blocks. Units are drawn
without replacement, all with the same probability :math:`\pi`, hence so are the functions, and

.. math:: \sum_{r=1}^m t_r = E\Big[\tfrac{1}{\pi} \sum_{r \in \tilde{i}} t_r\Big],
          \qquad \pi = \frac{\text{units drawn}}{\text{units}}.

The weight :math:`1 / \pi` is the paper's :math:`m / \tilde m` when all units have one size. When
the last block is short, the realised :math:`m / |\tilde i|` would be biased, not :math:`1 / \pi`.

Steps of the sampled weights: AdaGrad, Newton directions of blocks, Adam. Each keeps its moments for
all m functions but reads and writes those of the sample alone. ``step`` returns the change and the
new moments, which `commit` stores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.defaults import BLOCK
from skgp.kernels import FourierFeatures, gram, gram_diag, gram_tile
from skgp.linalg.runtime import TensorState
from skgp.optim import sample_without_replacement

Array = Tensor | np.ndarray


class StochasticBasis(Protocol):
    """What the estimators ask of a basis. Tensors are of `dtype`, on `device`."""

    n_features: int
    n_units: int
    unit_size: int  # functions a sampling unit; the last may be shorter
    block_size: int  # functions at a time where all are streamed
    dtype: torch.dtype
    device: torch.device
    diagonal_precision: bool
    kernel: Any  # a scikit-learn kernel expression without noise

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Columns `indices` (k,) of Phi at the rows of X, of shape (n, k)."""

    def sampled(self, X: Tensor, sample: "IndexSet", theta: Tensor | None = None) -> Tensor:
        """Columns of Phi in a sample, of shape (n, |i|); no value of `sample` goes to the host."""

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Diagonal entries of S, of shape (k,)."""


class FourierBasis:
    """Random Fourier features: S = I, Phi regenerated from seeds, in blocks as sampling units.

    Random access to a block costs O(block) and nothing of size m x d is stored, for m up to 1e7 and
    beyond.
    """

    diagonal_precision = True

    def __init__(
        self,
        fourier: FourierFeatures,  # scaled such that Phi Phi' is about K
        *,
        dtype: torch.dtype = torch.float64,  # of what the methods return
        device: torch.device | str = "cpu",  # where X and theta lie, and what the methods return
    ) -> None:
        self.fourier = fourier
        self.dtype, self.device = dtype, torch.device(device)
        self.kernel = fourier.kernel
        self.n_features = fourier.n_features
        self.n_units = fourier.n_blocks
        self.unit_size = self.block_size = fourier.block_features

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return columns of Phi, in O(n k d) for whole blocks; a touched block is made in full."""
        X = X.to(self.dtype)
        blocks, counts = torch.unique_consecutive(indices // self.unit_size, return_counts=True)
        parts = []
        chosen = (indices % self.unit_size).split(counts.tolist())
        for block, within in zip(blocks.tolist(), chosen, strict=True):
            part = self.fourier.features(X, block, theta)
            whole = torch.equal(within, torch.arange(part.shape[1], device=within.device))
            parts.append(part if whole else part[:, within])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def sampled(self, X: Tensor, sample: "IndexSet", theta: Tensor | None = None) -> Tensor:
        """Return the columns of whole blocks, (n, |i|), in O(n |i| d)."""
        X = X.to(self.dtype)
        parts = [self.fourier.features(X, block, theta) for block in sample.units.tolist()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return ones."""
        return torch.ones(len(indices), dtype=self.dtype, device=self.device)


class InducingBasis:
    r"""Kernels centred on inducing points: :math:`\Phi = K(X, Z)`, :math:`S = K(Z, Z)`.

    With Z = X (m = n) the prior and the posterior mean are those of the exact GP (appendix I.2).
    Each inducing point is a sampling unit.
    """

    diagonal_precision = False
    unit_size = 1
    block_size = BLOCK

    def __init__(
        self,
        kernel: Any,  # without noise
        Z: Array,  # (m, d), inducing points; a memory map is read row by row
        *,
        dtype: torch.dtype = torch.float64,  # of what the methods return
        device: torch.device | str = "cpu",  # where X and theta lie, and what the methods return
    ) -> None:
        self.kernel = kernel
        self.Z = Z
        self.dtype, self.device = dtype, torch.device(device)
        self.n_features = self.n_units = len(Z)

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return columns of K(X, Z), in O(n k d)."""
        X, Z = X.to(self.dtype), take_rows(self.Z, indices, self.dtype, self.device)
        if theta is not None and theta.requires_grad:
            return gram(self.kernel, X, Z, theta)
        return gram_tile(self.kernel, X, Z, theta)

    def sampled(self, X: Tensor, sample: "IndexSet", theta: Tensor | None = None) -> Tensor:
        """Return the columns of a sample, (n, |i|)."""
        return self.features(X, sample.indices, theta)

    def precision(self, rows: Tensor, columns: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of K(Z, Z), of shape (|rows|, |columns|)."""
        return self.features(take_rows(self.Z, rows, self.dtype, self.device), columns, theta)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of the diagonal of K(Z, Z)."""
        Z = take_rows(self.Z, indices, self.dtype, self.device)
        return gram_diag(self.kernel, Z, theta)


@torch.no_grad()
def product(basis: StochasticBasis, X: Tensor, V: Tensor, theta: Tensor | None = None) -> Tensor:
    r"""Return :math:`\Phi V` (n, q) for V (m, q), block by block, in O(n m (d + q))."""
    out = V.new_zeros(len(X), V.shape[1])
    for sample in blocks(basis):
        out += basis.sampled(X, sample, theta) @ V[sample.indices]
    return out


# Bases of predictions: see `skgp.inference.weights.bases.Basis` ---------------------------------


class SpectralColumns:
    """Fourier features at learned hyper-parameters, block by block, for predictions.

    Frequencies are shared among the terms of a kernel as they were when the features were made;
    features made anew under the learned kernel could share them otherwise. Only the first
    `n_blocks`, by default all.
    """

    def __init__(
        self, fourier: FourierFeatures, theta: Tensor | None = None, n_blocks: int | None = None
    ) -> None:
        self.fourier = fourier
        self.theta = None if theta is None else tuple(theta.tolist())
        self.n_blocks = fourier.n_blocks if n_blocks is None else n_blocks
        self.n_features = fourier.block_slice(self.n_blocks - 1).stop

    def _theta(self) -> Tensor | None:
        return None if self.theta is None else torch.tensor(self.theta, dtype=torch.float64)

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        return self.fourier.block_slice(block)

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block, of shape (n, width), in the dtype of X."""
        return self.fourier.features(X, block, self._theta())


class KernelColumns(TensorState):
    """Kernels centred on the rows of Z (m, d), block by block; m may be 0."""

    Z: Tensor

    def __init__(self, kernel: Any, Z: Tensor) -> None:
        self.kernel = kernel
        self.Z = Z.to(torch.float64)

    @property
    def n_features(self) -> int:
        """Number of basis functions m."""
        return len(self.Z)

    @property
    def n_blocks(self) -> int:
        """Number of column blocks; 0 for an empty basis."""
        return -(-len(self.Z) // BLOCK)

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        return slice(block * BLOCK, min((block + 1) * BLOCK, len(self.Z)))

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block, of shape (n, width), in the dtype of X."""
        return gram_tile(self.kernel, X, self.Z[self.block_slice(block)].to(X))


# Samples ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexSet:
    r"""A sample :math:`\tilde i` of basis functions."""

    indices: Tensor  # (k,), distinct, increasing int64 positions in 0..m, on the basis' device
    weight: float  # inverse of the probability of each function to be in the sample
    # (u,), distinct, increasing numbers of the sampled units; on the CPU where a unit is a block
    units: Tensor
    n_units: int  # of the population, which the model has so far
    unit_size: int
    n_all: int  # units of the basis

    @property
    def share(self) -> float:
        """Prior precision of the population, which has the prior variance of f of all functions."""
        return self.n_units / self.n_all

    def __len__(self) -> int:
        return len(self.indices)


def n_sampled_units(basis: StochasticBasis, size: int) -> int:
    """Whole units that fit into a sample of `size` functions, at least one, at most all."""
    return min(max(1, size // basis.unit_size), basis.n_units)


def sample_indices(basis: StochasticBasis, size: int, *, generator: torch.Generator) -> IndexSet:
    """Draw about `size` functions: as many whole units as fit, at least one, at most all."""
    n_draws = n_sampled_units(basis, size)
    return index_set(basis, sample_without_replacement(basis.n_units, n_draws, generator=generator))


def everything(basis: StochasticBasis) -> IndexSet:
    """Return the sample of all basis functions, of weight 1; O(m) memory."""
    return index_set(basis, torch.arange(basis.n_units))


def blocks(basis: StochasticBasis) -> Iterator[IndexSet]:
    """All functions in turn, `basis.block_size` at a time; the weights are of no meaning."""
    for units in torch.arange(basis.n_units).split(max(1, basis.block_size // basis.unit_size)):
        yield index_set(basis, units)


def index_set(basis: StochasticBasis, units: Tensor, n_units: int | None = None) -> IndexSet:
    """Return the sample made of the given distinct, increasing units, as if drawn uniformly.

    From the first `n_units`, by default all. Units of one function may lie on the device of the
    basis; blocks are numbered on the CPU.
    """
    size, m, device = basis.unit_size, basis.n_features, basis.device
    if size == 1:
        units = indices = units.to(device)
    else:  # made where they are used
        indices = torch.cat(
            [
                torch.arange(unit * size, min((unit + 1) * size, m), device=device)
                for unit in units.tolist()
            ]
        )
    n_units = n_units or basis.n_units
    return IndexSet(indices, n_units / len(units), units, n_units, size, basis.n_units)


def take_rows(
    X: Array, indices: Tensor, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """Copy the rows `indices` (k,), increasing, of a tensor, array or memory map; no other is read.

    Increasing, so that a file is read forwards. They lie where X does, by default: an array, on
    the CPU.
    """
    if isinstance(X, Tensor):
        return X[indices.to(X.device)].to(device or X.device, dtype)
    # Fancy indexing copies: the result is writable whatever the array is.
    return torch.from_numpy(np.asarray(X[indices.cpu().numpy()])).to(device, dtype)


Step = tuple[Tensor, dict[str, Tensor]]


class AdaGrad(TensorState):
    r"""AdaGrad (Duchi et al., 2011), appendix I.1: :math:`-\rho\, g / \sqrt{\sum g^2}` an entry."""

    def __init__(self, weights: Tensor) -> None:
        """For parameters of the shape, dtype and device of `weights` (m, q)."""
        self.state = {"sum_squares": torch.zeros_like(weights)}

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        return self._scaled(indices, gradient, gradient.square(), rate)

    def commit(
        self, indices: Tensor, moments: dict[str, Tensor], good: Tensor | None = None
    ) -> None:
        """Store the moments of a step, in place; those of a step that was not taken are dropped."""
        for name, values in moments.items():
            if good is not None:
                values = torch.where(good, values, self.state[name][indices])
            self.state[name][indices] = values

    def _scaled(self, indices: Tensor, direction: Tensor, squares: Tensor, rate: float) -> Step:
        total = self.state["sum_squares"][indices] + squares
        tiny = torch.finfo(total.dtype).tiny
        return -rate * direction / total.clamp_min(tiny).sqrt(), {"sum_squares": total}


class NystromAdaGrad(AdaGrad):
    r"""Block Newton directions from the control variate's features, scaled as AdaGrad does.

    The Hessian of the losses in a sampled block is nearly
    :math:`\tfrac{n}{\sigma^2 \bar n} B_i^T B_i` with the support features B (r, k) already at hand.
    The direction is :math:`d = (\lambda I + B_i^T B_i)^{-1} g` (by Woodbury, in O(r^2 k)), with
    :math:`\lambda` a fraction of the trace; its step divides by the root of the sum of the mean
    squares of d so far. No constant of proportionality matters: AdaGrad is scale-free.
    """

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        if B is None or not len(B):
            raise ValueError(
                'optimizer="nystrom" needs the support features: set n_support to 50 or more.'
            )
        # Some support rows at even distances: they are in the order of the observations, whose
        # first ones are alike in a series.
        some = B[:: -(-len(B) // defaults.NEWTON_RANK)]
        direction = self._direction(some, gradient)
        return self._scaled(indices, direction, direction.square().mean(0), rate)

    def _direction(self, B: Tensor, gradient: Tensor) -> Tensor:
        inner = B @ B.T
        damping = defaults.NEWTON_DAMPING * inner.diagonal().sum()
        inner.diagonal().add_(damping)
        L = torch.linalg.cholesky_ex(inner).L
        direction = (gradient - B.T @ torch.cholesky_solve(B @ gradient, L)) / damping
        return torch.where(damping > 0, direction, gradient)


class SparseAdam(AdaGrad):
    """Adam (Kingma and Ba, 2015) whose moments age only when their row is sampled."""

    def __init__(self, weights: Tensor) -> None:
        self.state = {
            "first": torch.zeros_like(weights),
            "second": torch.zeros_like(weights),
            "visits": torch.zeros_like(weights, dtype=torch.int32),
        }

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        first, second, visits = (self.state[k][indices] for k in ("first", "second", "visits"))
        first = 0.9 * first + (1 - 0.9) * gradient
        second = 0.999 * second + (1 - 0.999) * gradient.square()
        visits = visits + 1
        spread = (second / (1 - 0.999**visits)).sqrt() + 1e-30
        step = -rate * (first / (1 - 0.9**visits)) / spread
        return step, {"first": first, "second": second, "visits": visits}


def make_optimizer(name: str | None, n_support: int, weights: Tensor) -> AdaGrad:
    """Build the optimizer of parameters of this shape by name.

    None is "nystrom" where there are support rows, and else "adagrad", the paper's.
    """
    known = {"adagrad": AdaGrad, "adam": SparseAdam, "nystrom": NystromAdaGrad}
    if name is None:
        name = "nystrom" if n_support else "adagrad"
    return known[name](weights)
