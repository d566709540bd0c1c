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
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import BLOCK
from skgp.kernels import FourierFeatures, gram, gram_diag, gram_tile
from skgp.linalg.runtime import TensorState
from skgp.optim import sample_without_replacement

Array = Tensor | np.ndarray


class StochasticBasis(Protocol):
    """What the estimators ask of a basis. Tensors are of `dtype`, on the CPU."""

    n_features: int
    n_units: int
    unit_size: int  # functions a sampling unit; the last may be shorter
    block_size: int  # functions at a time where all are streamed
    dtype: torch.dtype
    diagonal_precision: bool
    kernel: Any  # a scikit-learn kernel expression without noise

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Columns `indices` (k,) of Phi at the rows of X, of shape (n, k)."""

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Diagonal entries of S, of shape (k,)."""


class FourierBasis:
    """Random Fourier features: S = I, Phi regenerated from seeds, in blocks as sampling units.

    Random access to a block costs O(block) and nothing of size m x d is stored, for m up to 1e7 and
    beyond.

    Parameters
    ----------
    fourier : FourierFeatures
        Scaled such that Phi Phi' is about K.
    dtype : torch.dtype, default=torch.float64
        Of what the methods return.
    """

    diagonal_precision = True

    def __init__(self, fourier: FourierFeatures, *, dtype: torch.dtype = torch.float64) -> None:
        self.fourier = fourier
        self.dtype = dtype
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
            whole = torch.equal(within, torch.arange(part.shape[1]))
            parts.append(part if whole else part[:, within])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return ones."""
        return torch.ones(len(indices), dtype=self.dtype)


class InducingBasis:
    r"""Kernels centred on inducing points: :math:`\Phi = K(X, Z)`, :math:`S = K(Z, Z)`.

    With Z = X (m = n) the prior and the posterior mean are those of the exact GP (appendix I.2).
    Each inducing point is a sampling unit.

    Parameters
    ----------
    kernel : Kernel
        Without noise.
    Z : Tensor or ndarray of shape (m, d)
        Inducing points; a memory map is read row by row.
    dtype : torch.dtype, default=torch.float64
        Of what the methods return.
    """

    diagonal_precision = False
    unit_size = 1
    block_size = BLOCK

    def __init__(self, kernel: Any, Z: Array, *, dtype: torch.dtype = torch.float64) -> None:
        self.kernel = kernel
        self.Z = Z
        self.dtype = dtype
        self.n_features = self.n_units = len(Z)

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return columns of K(X, Z), in O(n k d)."""
        X, Z = X.to(self.dtype), take_rows(self.Z, indices, self.dtype)
        if theta is not None and theta.requires_grad:
            return gram(self.kernel, X, Z, theta)
        return gram_tile(self.kernel, X, Z, theta)

    def precision(self, rows: Tensor, columns: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of K(Z, Z), of shape (|rows|, |columns|)."""
        return self.features(take_rows(self.Z, rows, self.dtype), columns, theta)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of the diagonal of K(Z, Z)."""
        return gram_diag(self.kernel, take_rows(self.Z, indices, self.dtype), theta)


@torch.no_grad()
def product(basis: StochasticBasis, X: Tensor, V: Tensor, theta: Tensor | None = None) -> Tensor:
    r"""Return :math:`\Phi V` (n, q) for V (m, q), block by block, in O(n m (d + q))."""
    out = V.new_zeros(len(X), V.shape[1])
    for indices in torch.arange(basis.n_features).split(basis.block_size):
        out += basis.features(X, indices, theta) @ V[indices]
    return out


# Bases of predictions: see `skgp.inference.weights.design.Basis` ---------------------------------


class SpectralColumns:
    """Fourier features at learned hyper-parameters, block by block, for predictions.

    Frequencies are shared among the terms of a kernel as they were when the features were made;
    features made anew under the learned kernel could share them otherwise.
    """

    def __init__(self, fourier: FourierFeatures, theta: Tensor | None = None) -> None:
        self.fourier = fourier
        self.theta = None if theta is None else tuple(theta.tolist())
        self.n_features, self.n_blocks = fourier.n_features, fourier.n_blocks

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        return self.fourier.block_slice(block)

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block, of shape (n, width), in the dtype of X."""
        theta = None if self.theta is None else torch.tensor(self.theta, dtype=torch.float64)
        return self.fourier.features(X, block, theta)


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

    indices: Tensor  # (k,), distinct, increasing int64 positions in 0..m
    weight: float  # inverse of the probability of each function to be in the sample
    units: Tensor  # (u,), distinct, increasing numbers of the sampled units
    n_units: int  # of the population
    unit_size: int

    def __len__(self) -> int:
        return len(self.indices)


def sample_indices(basis: StochasticBasis, size: int, *, generator: torch.Generator) -> IndexSet:
    """Draw about `size` functions: as many whole units as fit, at least one, at most all."""
    if size < 1:
        raise ValueError(f"basis_batch_size must be at least 1, got {size}.")
    n_draws = min(max(1, size // basis.unit_size), basis.n_units)
    return index_set(basis, sample_without_replacement(basis.n_units, n_draws, generator=generator))


def everything(basis: StochasticBasis) -> IndexSet:
    """Return the sample of all basis functions, of weight 1; O(m) memory."""
    return index_set(basis, torch.arange(basis.n_units))


def index_set(basis: StochasticBasis, units: Tensor) -> IndexSet:
    """Return the sample made of the given distinct, increasing units, as if drawn uniformly."""
    size = basis.unit_size
    indices = (units[:, None] * size + torch.arange(size)).reshape(-1)
    indices = indices[indices < basis.n_features]
    return IndexSet(indices, basis.n_units / len(units), units, basis.n_units, size)


def take_rows(X: Array, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the rows `indices` (k,), increasing, of a tensor, array or memory map; no other is read.

    Increasing, so that a file is read forwards.
    """
    if isinstance(X, Tensor):
        return X[indices.to(X.device)].to(dtype)
    # Fancy indexing copies: the result is writable whatever the array is.
    return torch.from_numpy(np.asarray(X[indices.numpy()])).to(dtype)
