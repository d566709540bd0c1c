"""Kernel expressions that every reading of a kernel (gram, spectral, state space) is tested on.

``@each_kernel()`` parametrises a test with ``make_kernel``, which returns a fresh expression on
`N_INPUTS` columns; ``each_kernel(spectral=True)`` keeps those that have a spectral density,
``spectral=False`` the others.
"""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Exponentiation,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
)

from skgp.kernels import SHO, ActiveDims, Cosine, LocalLinearTrend

N_INPUTS = 3
ARD = [0.7, 1.9, 1.2]

EXPRESSIONS = {
    "constant-rbf-ard": lambda: 2.0 * RBF(ARD),
    "constant-rbf-fixed": lambda: ConstantKernel(1.7, "fixed") * RBF(ARD),
    "matern12": lambda: 0.6 * Matern(ARD, nu=0.5),
    "matern32": lambda: Matern(ARD, nu=1.5),
    "matern52": lambda: 1.4 * Matern(1.1, nu=2.5),
    "matern-inf": lambda: Matern(ARD, nu=np.inf),
    "matern-fixed": lambda: 3.0 * Matern(0.9, "fixed", nu=1.5),
    "rational-quadratic": lambda: 1.8 * RationalQuadratic(1.6, alpha=0.8),
    "periodic-column": lambda: ActiveDims(ExpSineSquared(0.8, 2.3), [1]),
    "cosine-column": lambda: 0.7 * ActiveDims(Cosine(1.7), 2),
    "sho-column": lambda: 1.4 * ActiveDims(SHO(1.7, 0.9), [1]),
    "sho-fixed": lambda: ActiveDims(SHO(1.7, 0.9, "fixed") * RBF(1.1), [0]) + 0.2 * RBF(ARD),
    "bias-and-trend": lambda: RBF(ARD) + ConstantKernel(0.5),
    "additive": lambda: (
        0.8 * ActiveDims(RBF(0.6), [0])
        + ActiveDims(Matern([1.1, 2.0], nu=2.5), [2, 1])
        + 0.3 * ActiveDims(ExpSineSquared(1.4, 0.9), [0])
    ),
    "product": lambda: ActiveDims(RBF([0.9, 1.4]), (0, 2)) * Matern(ARD, nu=1.5) * 1.2,
    "quasi-periodic": lambda: ActiveDims(ExpSineSquared(0.7, 1.9) * RBF(2.2), [1]),
    "two-periods": lambda: ActiveDims(Cosine(1.3) * ExpSineSquared(1.2, 2.1), [0]),
    "product-of-sums": lambda: (RBF(ARD) + 0.5) * (0.6 * RBF(0.9) + Matern(2.0, nu=0.5)),
    "nested-dims": lambda: ActiveDims(ActiveDims(RBF(0.8), [1]) + Matern(nu=2.5), [2, 0]),
    "square-of-sum": lambda: (0.7 * Matern(nu=1.5) + 0.4) ** 2,
    # Without a spectral density.
    "exp-sine-squared": lambda: ExpSineSquared(0.9, 2.8),
    "root": lambda: Exponentiation(1.5 * RationalQuadratic(), 0.5),
    "local-linear-trend": lambda: (
        0.3 * ActiveDims(LocalLinearTrend(0.8, 0.5, 0.4, origin=-1.0), [0]) + RBF(ARD)
    ),
    "dot-product": lambda: DotProduct(1.3),
    "polynomial": lambda: 0.2 * DotProduct(0.8) ** 2,
    "linear-and-rbf": lambda: DotProduct(0.5) * RBF(ARD) + 0.6 * Matern(nu=0.5),
}
NOT_SPECTRAL = {
    "exp-sine-squared",
    "root",
    "local-linear-trend",
    "dot-product",
    "polynomial",
    "linear-and-rbf",
}


#: One of each kind of composition, for what is built on values and gradients of any kernel.
KINDS = ["matern32", "additive", "product-of-sums", "square-of-sum", "root", "linear-and-rbf"]


def each_kernel(names=EXPRESSIONS, *, spectral=None):
    """Parametrise a test with ``make_kernel``; ``spectral`` selects as the module says."""
    names = [name for name in names if spectral is None or (name not in NOT_SPECTRAL) == spectral]
    return pytest.mark.parametrize(
        "make_kernel", [pytest.param(EXPRESSIONS[name], id=name) for name in names]
    )
