"""The distance that a kernel expression falls with, where there is a single one."""

import numpy as np
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Exponentiation,
    Kernel,
    Matern,
    Product,
    RationalQuadratic,
    Sum,
)
from torch import Tensor

from .expression import children_of

__all__ = ["inverse_length_scales"]

_RELATIVE_TOLERANCE = 1e-12  # within which length scales weigh the columns alike


def inverse_length_scales(kernel: Kernel, X: Tensor) -> Tensor | None:
    r"""Read off the scaled distance that orders points as the kernel's correlation does.

    .. math:: D(x, z) = \sum_j (x_j - z_j)^2 / \ell_j^2 .

    Constants, RBF, Matern and rational quadratic parts fall with it, and so do sums, products and
    positive powers of such parts, provided that all weigh the columns alike.

    Parameters
    ----------
    kernel : Kernel
        Without noise.
    X : Tensor of shape (n, d)
        Inputs, for their number of columns and device.

    Returns
    -------
    Tensor of shape (d,) or None
        :math:`1 / \ell_j` in float64, up to a common factor; zeros for a constant. None where there
        is no such distance: parts that weigh the columns differently, periodic and linear parts, a
        choice of columns, a user's class.

    Examples
    --------
    >>> inverse_length_scales(2.0 * RBF([1.0, 4.0]) + Matern([2.0, 8.0]), torch.zeros(1, 2))
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    scales = _length_scales(kernel)
    if scales is None:
        return None
    if not scales:
        return torch.zeros(X.shape[1], dtype=torch.float64, device=X.device)
    inverse = np.array([np.broadcast_to(1 / scale, X.shape[1:]) for scale in scales])
    relative = inverse / inverse[:, :1]
    if not np.allclose(relative, relative[0], rtol=_RELATIVE_TOLERANCE, atol=0.0):
        return None
    return torch.tensor(inverse[0], device=X.device)


def _length_scales(kernel: Kernel) -> list[np.ndarray] | None:
    """Length scales of all leaves; None where one does not fall with a scaled distance."""
    kind = type(kernel)
    if kind is ConstantKernel:
        return []
    if kind in (RBF, Matern, RationalQuadratic):
        return [np.asarray(kernel.length_scale, dtype=float)]
    # Sums, products and powers of positive functions that fall do so too.
    if kind in (Sum, Product) or (kind is Exponentiation and kernel.exponent > 0):
        parts = [_length_scales(child) for child in children_of(kernel)]
        return [s for part in parts if part for s in part] if None not in parts else None
    return None
