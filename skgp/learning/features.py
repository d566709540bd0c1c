"""Features of unit prior that a QSGP plan names, and the precision that they are trained in."""

from typing import Any

import torch
from torch import Tensor

from skgp.inference.weights.design import Basis, WhitenedInducingBasis
from skgp.kernels.distances import origin
from skgp.kernels.spectral import FourierFeatures
from skgp.learning.defaults import PROBE_ROWS, SINGLE_SIZE
from skgp.learning.plan import Options, Plan

__all__ = ["in_dtype", "training_dtype", "unit_prior_basis"]


def unit_prior_basis(
    kernel, X: Tensor, plan: Plan, options: Options, Z: Tensor | None, *, near: bool = False
) -> Basis:
    """Whitened inducing points, Z or all X; or Fourier features: `near` X phases lose no digits."""
    if plan.basis == "inducing":
        return WhitenedInducingBasis(kernel, X if Z is None else Z)
    draws: dict[str, Any] = {"kind": options.feature_map, "seed": options.seed}
    zero = origin(X)[0] if near else None
    return FourierFeatures(kernel, plan.size, X.shape[1], origin=zero, **draws)


def training_dtype(n_numbers: int, route: str, options: Options) -> torch.dtype:
    """Single precision for many features of a route ("laplace", "newton"), else as asked."""
    return torch.float32 if n_numbers > SINGLE_SIZE[route] else options.dtype


def in_dtype(dtype: torch.dtype, basis: Basis, X: Tensor, route: str) -> Basis:
    """The basis for inputs of a dtype, judged by some; Fourier features suit them as they are."""
    if dtype == torch.float32 and isinstance(basis, WhitenedInducingBasis):
        return basis.in_single_precision(X[:: -(-len(X) // PROBE_ROWS[route])])
    return basis
