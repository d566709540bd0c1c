r"""The pair (Phi, S) of QSGP, by columns: random Fourier features and inducing points.

The model is :math:`f(x) = \sum_r w_r \phi_r(x)` with prior :math:`w \sim N(0, S^{-1})`, so that
:math:`k(x, z) \approx \phi(x)^T S^{-1} \phi(z)` (Evans and Nair, 2020, section 2). Both classes
below answer the same questions about the basis functions asked for, at a cost that depends on those
alone:

======================================  ================================================
paper                                   code
======================================  ================================================
m                                       ``n_features``
:math:`\Phi_{\tilde l, \tilde i}`       ``features(X, indices, theta)``
:math:`S_{\tilde j, \tilde i}`          ``precision(rows, columns, theta)``
:math:`s_{ii}`                          ``precision_diag(indices, theta)``
:math:`\log s_{ii}` (Prop. 2)           ``log_precision_diag(indices, theta)``
======================================  ================================================

All are differentiable in ``theta``, the logarithms of the kernel's free hyper-parameters.

Where the kernel's amplitude goes
---------------------------------
With Fourier features the variance k(0) of the kernel may scale the features (S = I, the default, in
which the weights are those of every other solver) or the weights' prior (``amplitude="precision"``:
:math:`\phi / \sqrt{k(0)}` and :math:`s_{ii} = 1 / k(0)`). Both give the same prior over functions.
The second keeps the amplitude out of Phi, so that control variates, whose features stay at the
initial hyper-parameters (appendix F.3), stay exact while the amplitude is learned.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.sampling import take_rows
from skgp.kernels import FourierFeatures, gram, gram_diag, gram_tile

__all__ = ["FourierBasis", "InducingBasis", "KernelColumns", "SpectralColumns", "StochasticBasis"]

_AMPLITUDES = ("features", "precision")


class StochasticBasis(Protocol):
    """What the stochastic estimators ask of a basis. Tensors are of `dtype`, on the CPU."""

    n_features: int
    n_units: int
    unit_size: int
    block_size: int
    dtype: torch.dtype
    diagonal_precision: bool
    kernel: Any  # a scikit-learn kernel expression

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the columns `indices` of Phi at the rows of X, of shape (n, k)."""

    def precision(self, rows: Tensor, columns: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the entries (rows, columns) of S, of shape (|rows|, |columns|)."""

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the diagonal entries of S, of shape (k,)."""

    def log_precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the logarithms of the diagonal of a diagonal S, of shape (k,)."""


class FourierBasis:
    r"""Random Fourier features: S is diagonal, Phi regenerated from seeds.

    The sampling unit is a block of the counter-based generator: random access to a block costs
    O(block) and nothing of size m x d is stored, for m up to 1e7 and beyond.

    Parameters
    ----------
    fourier : FourierFeatures
        Features scaled such that :math:`\Phi \Phi^T \approx K`.
    amplitude : {"features", "precision"}, default="features"
        Where the kernel's variance goes (see the module).
    dtype : torch.dtype, default=torch.float64
        Of what the methods return.

    Raises
    ------
    ValueError
        If `amplitude` is unknown.
    """

    diagonal_precision = True

    def __init__(
        self,
        fourier: FourierFeatures,
        *,
        amplitude: str = "features",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if amplitude not in _AMPLITUDES:
            raise ValueError(f"amplitude must be one of {_AMPLITUDES}, got {amplitude!r}.")
        self.fourier = fourier
        self.amplitude = amplitude
        self.dtype = dtype
        self.kernel = fourier.kernel
        self.n_features = fourier.n_features
        self.n_units = fourier.n_blocks
        self.unit_size = self.block_size = fourier.block_features

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return columns of Phi, in O(n k d) for whole blocks; a touched block is made in full."""
        X = X.to(self.dtype)
        blocks, counts = torch.unique_consecutive(indices // self.unit_size, return_counts=True)
        parts, start = [], 0
        for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            part = self.fourier.features(X, block, theta)
            chosen = indices[start : start + count] - block * self.unit_size
            start += count
            parts.append(part if _is_range(chosen, part.shape[1]) else part[:, chosen])
        Phi = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return Phi if self.amplitude == "features" else Phi / self._variance(theta).sqrt()

    def precision(self, rows: Tensor, columns: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of S, dense: for tests and small samples."""
        same = (rows[:, None] == columns).to(self.dtype)
        return same * self.precision_diag(columns, theta)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return 1, or 1 / k(0) when the amplitude is in S."""
        ones = torch.ones(len(indices), dtype=self.dtype)
        return ones if self.amplitude == "features" else ones / self._variance(theta)

    def log_precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return 0, or -log k(0) when the amplitude is in S."""
        return self.precision_diag(indices, theta).log()

    def _variance(self, theta: Tensor | None) -> Tensor:
        origin = torch.zeros(1, self.fourier.n_inputs, dtype=self.dtype)
        return gram_diag(self.kernel, origin, theta)[0]


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
    block_size : int, default=1000
        Columns a block when all m are streamed for a prediction.
    """

    diagonal_precision = False
    unit_size = 1

    def __init__(
        self,
        kernel: Any,
        Z: Tensor | np.ndarray,
        *,
        dtype: torch.dtype = torch.float64,
        block_size: int = 1000,
    ) -> None:
        self.kernel = kernel
        self.Z = Z
        self.dtype = dtype
        self.block_size = block_size
        self.n_features = self.n_units = len(Z)

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return columns of K(X, Z), in O(n k d)."""
        return self._gram(X.to(self.dtype), take_rows(self.Z, indices, self.dtype), theta)

    def precision(self, rows: Tensor, columns: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of K(Z, Z), in O(|rows| |columns| d)."""
        return self.features(take_rows(self.Z, rows, self.dtype), columns, theta)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of the diagonal of K(Z, Z)."""
        return gram_diag(self.kernel, take_rows(self.Z, indices, self.dtype), theta)

    def log_precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Refuse: S is dense, and its log-determinant has no cheap unbiased estimator.

        Raises
        ------
        ValueError
            Always: Proposition 2 holds for a diagonal S.
        """
        raise ValueError(
            "Proposition 2 needs a diagonal prior precision, and that of inducing points is "
            'K(Z, Z). Learn the hyper-parameters beforehand, or use basis="fourier".'
        )

    def _gram(self, X: Tensor, Z: Tensor, theta: Tensor | None) -> Tensor:
        if theta is not None and theta.requires_grad:
            return gram(self.kernel, X, Z, theta)
        return gram_tile(self.kernel, X, Z, theta)


class SpectralColumns:
    """Fourier features at learned hyper-parameters, block by block, for predictions.

    Frequencies are shared among the terms of a kernel as they were when the features were made;
    features made anew under the learned kernel could share them otherwise.

    Parameters
    ----------
    fourier : FourierFeatures
    theta : Tensor of shape (kernel.n_dims,), optional
        Log hyper-parameters; the kernel's own by default.
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


class KernelColumns:
    """Columns of K(X, Z), block by block, for predictions.

    Parameters
    ----------
    kernel : Kernel
        Without noise.
    Z : Tensor of shape (m, d)
    block_size : int, default=1000
    """

    def __init__(self, kernel: Any, Z: Tensor, *, block_size: int = 1000) -> None:
        self.kernel = kernel
        self._Z = Z.cpu().numpy()
        self.block_size = block_size
        self.n_features = len(Z)
        self.n_blocks = -(-self.n_features // block_size)

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        start = block * self.block_size
        return slice(start, min(start + self.block_size, self.n_features))

    def features(self, X: Tensor, block: int) -> Tensor:
        """Columns of a block, of shape (n, width), in the dtype of X."""
        return gram_tile(self.kernel, X, torch.as_tensor(self._Z[self.block_slice(block)]).to(X))


def _is_range(chosen: Tensor, size: int) -> bool:
    """Tell whether indices are 0, 1, ..., size - 1."""
    return len(chosen) == size and bool((chosen == torch.arange(size)).all())
