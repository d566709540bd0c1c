r"""K(X, X) and its gradient for few rows, in NumPy: there a call of torch outlasts its work.

Constants times one RBF or Matern leaf, as the closed form of
:class:`skgp.kernels.gradients.GramWithGradient`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, Product

from .expression import Part

__all__ = ["FewRowsGram", "StationaryLeaf", "stationary_leaf"]

_EPS = np.finfo(np.float64).eps


class StationaryLeaf:
    """Where theta has the parameters of constants times one stationary leaf.

    Attributes
    ----------
    nu : float
        Smoothness; infinite for RBF.
    place : slice or None
        Of the length scale in theta, None where that is fixed.
    length_scale : ndarray of shape () or (d,)
        The kernel's own.
    is_vector : bool
    constants : list of slice
        Of the free constants.
    factor : float
        Product of the fixed ones.
    """

    def __init__(self, factors: list[Part], leaf: Part) -> None:
        self.nu = float(getattr(leaf.kernel, "nu", math.inf))
        ((_, self.place, length_scale),) = leaf.params
        self.length_scale = np.asarray(length_scale, dtype=float)
        self.is_vector = np.size(self.length_scale) > 1
        constants = [factor.params[0][1:] for factor in factors if factor is not leaf]
        self.constants = [place for place, _ in constants if place is not None]
        self.factor = math.prod(float(own) for place, own in constants if place is None)
        self.root = 1.0 if self.nu == math.inf else math.sqrt(2 * self.nu)

    def amplitude(self, theta) -> float:
        """Product of all constants."""
        return self.factor * math.exp(sum(float(theta[place.start]) for place in self.constants))


def stationary_leaf(part: Part) -> StationaryLeaf | None:
    """The reading of an expression that was bound; None of any other."""
    factors = _factors(part)
    leaves = [factor for factor in factors if type(factor.kernel) is not ConstantKernel]
    if len(leaves) != 1 or type(leaves[0].kernel) not in (RBF, Matern):
        return None
    return StationaryLeaf(factors, leaves[0])


def _factors(part: Part) -> list[Part]:
    if type(part.kernel) is Product:
        return _factors(part.children[0]) + _factors(part.children[1])
    return [part]


class FewRowsGram:
    """K(X, X) at many theta, each with its gradient.

    Parameters
    ----------
    leaf : StationaryLeaf
    centred : ndarray of shape (n, d)
        X from an origin among its rows.
    """

    def __init__(self, leaf: StationaryLeaf, centred: np.ndarray) -> None:
        self._leaf, self._centred = leaf, centred
        self._profile = _PROFILES[leaf.nu]

    def __call__(
        self, theta: np.ndarray
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray], float]:
        """K (n, n), its gradient as a function of symmetric W (n, n), the largest scaled square."""
        leaf = self._leaf
        scale = leaf.length_scale if leaf.place is None else np.exp(theta[leaf.place])
        A = self._centred * (leaf.root / scale)
        squares = A * A
        norms = squares.sum(1)
        s = A @ A.T
        s *= -2
        s += norms
        s += norms[:, None]
        np.maximum(s, 0, out=s)
        s.flat[:: len(s) + 1] = 0  # what is left of it is rounding
        largest = float(norms.max())
        k, slope = self._profile(s, 16 * _EPS * largest)
        amplitude = leaf.amplitude(theta)
        k *= amplitude

        def gradient(W: np.ndarray) -> np.ndarray:
            found = np.zeros(len(theta))
            for place in leaf.constants:
                found[place] = W.ravel() @ k.ravel()
            if leaf.place is not None:
                H = slope * W
                # -2 sum_ij H_ij (a_i - a_j)^2 of each column, H symmetric
                each = (4 * amplitude) * ((A * (H @ A)).sum(0) - H.sum(1) @ squares)
                found[leaf.place] = each if leaf.is_vector else each.sum()
            return found

        return k, gradient, largest


def _rbf(s: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    k = np.exp(-0.5 * s)
    return k, -0.5 * k


def _matern12(s: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    r = np.sqrt(np.where(s > floor, s, 0.0))
    k = np.exp(-r)
    return k, np.where(r > 0, k / (-2 * np.maximum(r, 1e-300)), 0.0)


def _matern32(s: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    r = np.sqrt(s)
    decay = np.exp(-r)
    return (1 + r) * decay, -0.5 * decay


def _matern52(s: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    r = np.sqrt(s)
    decay = np.exp(-r)
    linear = (1 + r) * decay
    s *= decay
    s *= 1 / 3
    s += linear
    return s, linear * (-1 / 6)


# k and k' of s, as in `skgp.kernels.gradients`; s may be overwritten.
_PROFILES = {0.5: _matern12, 1.5: _matern32, 2.5: _matern52, math.inf: _rbf}
