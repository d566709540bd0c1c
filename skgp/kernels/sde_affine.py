"""State-space forms with log parameters that are affine in the logarithms of hyper-parameters.

Those of sums and products of the leaves here: one form, found once, serves all kernels of one
structure, where torch's way through an expression takes longer than the evidence of few rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern, Product, Sum
from torch import Tensor

from .expression import Binder
from .hyperparameters import children_of
from .sde_expression import Component, expand
from .sde_processes import Primitive
from .specs import SHO, ActiveDims, Cosine, LocalLinearTrend

_LEAVES = (ConstantKernel, Cosine, LocalLinearTrend, Matern, RBF, SHO)


class AffineForm(NamedTuple):
    """The processes of each component, and q log parameters of h logarithms."""

    primitives: list[list[Primitive]]
    is_exact: bool
    level: np.ndarray  # (q,), where all logarithms are 0
    slopes: np.ndarray  # (q, h), whole numbers


def affine_form(kernel: Kernel, tolerance: float | None) -> AffineForm | None:
    """The form of a kernel whose hyper-parameters are single numbers; None where it is another."""
    structure = _structure(kernel)
    return None if structure is None else _of_structure(structure, tolerance)


def _structure(kernel: Any) -> tuple | None:
    """Classes of the parts, and what of a class besides hyper-parameters decides the processes."""
    kind = type(kernel)
    if kind is ActiveDims:  # of the only column
        return _structure(kernel.kernel)
    if kind in (Sum, Product):
        found = tuple(map(_structure, children_of(kernel)))
        return None if None in found else (kind, found)
    return (kind, getattr(kernel, "nu", None)) if kind in _LEAVES else None


@lru_cache(maxsize=128)
def _of_structure(structure: tuple, tolerance: float | None) -> AffineForm:
    bind = Binder(_unit_kernel(structure))
    n_logs = bind.kernel.n_dims
    places = torch.cat([torch.zeros(1, n_logs), torch.eye(n_logs)]).double()
    found = [expand(bind(place, dtype=torch.float64), tolerance) for place in places]
    level, *moved = (log_parameters(each.components).numpy() for each in found)
    slopes = [np.round(each - level) for each in moved]
    primitives = [[f.primitive for f in c.factors] for c in found[0].components]
    return AffineForm(primitives, found[0].error == 0, level, np.stack(slopes, 1))


def _unit_kernel(structure: tuple) -> Kernel:
    """A kernel of a structure, of which all hyper-parameters are free."""
    kind, rest = structure
    if kind in (Sum, Product):
        return kind(*map(_unit_kernel, rest))
    return kind() if rest is None else kind(nu=rest)


def log_parameters(components: Sequence[Component]) -> Tensor:
    """Log variances of components, log rates of their factors and log shapes, (q,)."""
    variances, factors = zip(*((c.log_variance, c.factors) for c in components), strict=True)
    rates = [f.log_rate for each in factors for f in each]
    shapes = [f.log_shape for each in factors for f in each if f.log_shape is not None]
    return torch.stack([*variances, *rates, *shapes])
