r"""A linear kernel on inputs far from zero, without the digits that its own values lose there.

With :math:`x = c + u` and :math:`V = \sigma_0^2 + |c|^2`, completing the square,

.. math:: \sigma_0^2 + x^\top z = V h(u) h(v) + u^\top (I - c c^\top / V) v,
          \qquad h(u) = 1 + c^\top u / V .

Where the rows lie much closer to c than c to zero the first term, a level, is
:math:`|c|^2 / |u|^2` times the second, the slopes: sums of both keep no digit of the slopes. Data
decide the level all the same, whatever its variance, once that is large. `at_origin` therefore
lowers V in front of the first term, and nothing else, to :math:`10^3 |u|^2`.
"""

from __future__ import annotations

import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Kernel, Product, Sum

from .defaults import FAR_LINEAR, LEVEL
from .expression import register_kernel
from .specs import ActiveDims

__all__ = ["FarDotProduct", "at_origin"]


class FarDotProduct(DotProduct):
    """``DotProduct`` for rows far from zero; see `at_origin`.

    Parameters
    ----------
    sigma_0, sigma_0_bounds
        As of ``DotProduct``, whose values and gradients it has in NumPy.
    origin : ndarray of shape (d,)
        c.
    level : float
        Largest variance of the level.
    """

    def __init__(self, sigma_0=1.0, sigma_0_bounds=(1e-5, 1e5), origin=0.0, level=np.inf):
        super().__init__(sigma_0, sigma_0_bounds)
        self.origin = origin
        self.level = level

    def __repr__(self):
        return f"DotProduct(sigma_0={self.sigma_0:.3g})"


def at_origin(kernel: Kernel, X: np.ndarray) -> Kernel:
    """Return the expression with linear summands that keep their digits at the rows of X (n, d).

    Summands, constants times them and choices of columns of them; of other products and powers the
    level is not all that is large, and they stay as they are.
    """
    if type(kernel) is DotProduct:
        origin = np.median(X, axis=0)
        spread = np.median(np.square(X - origin).sum(axis=1)) or 1.0
        if np.square(origin).sum() <= FAR_LINEAR * spread:
            return kernel
        bounds = kernel.sigma_0_bounds
        return FarDotProduct(kernel.sigma_0, bounds, origin, float(LEVEL * spread))
    if type(kernel) is ActiveDims:
        inner = at_origin(kernel.kernel, kernel.select(X))
        return kernel if inner is kernel.kernel else ActiveDims(inner, kernel.dims)
    constant = type(kernel) is Product and ConstantKernel in (type(kernel.k1), type(kernel.k2))
    if type(kernel) is Sum or constant:
        k1, k2 = at_origin(kernel.k1, X), at_origin(kernel.k2, X)
        return kernel if k1 is kernel.k1 and k2 is kernel.k2 else type(kernel)(k1, k2)
    return kernel


def _evaluate(kernel, params, X, Z):
    c = X.new_tensor(kernel.origin)
    variance = params["sigma_0"] ** 2 + c.square().sum()  # V
    U, W = X - c, Z - c
    along = U @ c, W @ c
    left, right = (1 + a / variance for a in along)  # h
    slopes = U @ W.mT - along[0][..., :, None] * (along[1] / variance)[..., None, :]
    return variance.clamp(max=kernel.level) * left[..., :, None] * right[..., None, :] + slopes


register_kernel(FarDotProduct, _evaluate)
