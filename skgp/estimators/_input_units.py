r"""Inputs and targets as numbers that do not depend on their units.

A search that does not converge amplifies rounding, and a choice by a few held-out observations can
make a jump of it. What is searched with is therefore

.. math:: u = g \operatorname{round}\big((x - c) / (s g)\big)

with c the median of a column, s its robust standard deviation and :math:`g = 2^{-30}`: in other
units of x the rounding of :math:`x - c` differs, and u, but for rare numbers between two steps of
g, does not. Predictions are in these units, too: where c is much larger than s, inducing points
:math:`c + s u` would have fewer digits than the search. Standardised targets go to the grid
likewise (`on_grid`).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import arrays, to_tensor
from skgp.inference.sparse import SparseState
from skgp.kernels.scales import capped_weights, in_units, robust_std, vary


@dataclass(frozen=True)
class InputUnits:
    """Units of the columns, one for all where a kernel has one length scale for them."""

    origin: np.ndarray  # c (d,)
    unit: np.ndarray  # s (d,)
    coarse: np.ndarray  # steps of the grid (d,), in these units, over 2^-30: powers of two

    @classmethod
    def of(cls, data: Data, kernels: list[Kernel]) -> "InputUnits":
        """Units of observations, for kernels scaled to their columns."""
        X, weight = arrays(data)
        middle, spread = np.median(X, axis=0), robust_std(X, capped_weights(weight))
        # A constant column is to be seen so by default kernels: less its median it would be like
        # others.
        varies = vary(X, spread)
        origin, spread = np.where(varies, middle, 0.0), np.where(varies, spread, 1.0)
        unit = spread
        if any(np.size(scale) < X.shape[1] for kernel in kernels for scale in _scales(kernel)):
            unit = np.full(X.shape[1], np.linalg.norm(spread[varies]) or 1.0)
        # A power of two, which units do not change either.
        return cls(origin, unit, np.exp2(np.rint(np.log2(spread / unit))))

    def inputs(self, X: Any) -> Any:
        """Rows of X (n, d), array or tensor, in these units."""
        if not torch.is_tensor(X):
            return (X - self.origin) / self.unit
        return (X - X.new_tensor(self.origin)) / X.new_tensor(self.unit)

    def data(self, data: Data) -> Data:
        """The observations, their inputs in these units and on the grid."""
        U = self.inputs(arrays(data)[0])
        return replace(data, X=to_tensor(on_grid(U / self.coarse) * self.coarse))

    def state(self, state: SparseState, old: "InputUnits") -> SparseState:
        """A state in other units, in these."""
        ratio, shift = self.unit / old.unit, (old.origin - self.origin) / self.unit
        Z = state.Z / state.Z.new_tensor(ratio) + state.Z.new_tensor(shift)
        return replace(state, kernel=in_units(state.kernel, ratio), Z=Z)

    def kernel_of_x(self, kernel: Kernel) -> Kernel:
        """A kernel of rows in these units, as one of rows in those of x."""
        return in_units(kernel, 1 / self.unit)


def on_grid(values: Any) -> Any:
    """Numbers of the order of 1, array or tensor, as whole multiples of 2^-30."""
    return (values * 2.0**defaults.GRID_BITS).round() / 2.0**defaults.GRID_BITS


def _scales(kernel: Kernel) -> list[Any]:
    return [v for k, v in kernel.get_params().items() if k.split("__")[-1] == "length_scale"]
