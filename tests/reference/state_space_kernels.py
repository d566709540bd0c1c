"""Kernel expressions on one column that have a state-space form.

Every "state space equals dense" test runs over them: ``@each_series_kernel()`` parametrises a test
with ``case``, whose ``case.make()`` returns a fresh expression and whose ``case.tolerance`` is the
error in k(t), relative to k(0), that its stated approximation allows (rounding where it is exact).
``each_series_kernel(exact=True)`` keeps the exact ones, ``forgets=True`` those whose covariance
vanishes at large distances.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    ExpSineSquared,
    Kernel,
    Matern,
    RationalQuadratic,
)

from skgp.kernels import SHO, ActiveDims, Cosine

EXACT = 1e-12
FOURIER = 1e-8  # harmonics left out
SIX_STATES = 1e-5  # of an RBF
MIXTURE = 1e-3  # of six or four processes for a RationalQuadratic with alpha >= 1


class Case(NamedTuple):
    """A kernel expression and what its state-space form may be off."""

    make: Callable[[], Kernel]
    tolerance: float = EXACT
    forgets: bool = True


CASES = {
    "matern12": Case(lambda: 1.7 * Matern(0.8, nu=0.5)),
    "matern32": Case(lambda: 0.6 * Matern(1.1, nu=1.5)),
    "matern52": Case(lambda: Matern(1.9, nu=2.5)),
    "matern-fixed": Case(lambda: 3.0 * Matern(0.9, "fixed", nu=1.5)),
    "active-column": Case(lambda: ActiveDims(1.2 * Matern(0.7, nu=2.5), [0])),
    "sum-of-two": Case(lambda: 0.9 * Matern(2.5, nu=2.5) + 0.4 * Matern(0.3, nu=0.5)),
    "sum-of-three": Case(
        lambda: Matern(5.0, nu=2.5) + 0.5 * Matern(0.8, nu=1.5) + 0.1 * Matern(0.2, nu=0.5)
    ),
    "product": Case(lambda: 1.3 * Matern(0.9, nu=1.5) * Matern(2.3, nu=2.5)),
    "product-of-sums": Case(
        lambda: (Matern(0.8, nu=0.5) + 0.5 * Matern(1.5, nu=1.5)) * (Matern(3.0, nu=1.5) + 0.3)
    ),
    "square-of-sum": Case(lambda: (0.7 * Matern(1.2, nu=1.5) + 0.4 * Matern(0.5, nu=0.5)) ** 2),
    "bias": Case(lambda: Matern(0.7, nu=1.5) + ConstantKernel(0.8), forgets=False),
    "cosine": Case(lambda: 0.7 * Cosine(1.7), forgets=False),
    "cosine-and-trend": Case(lambda: 0.7 * Cosine(0.9) + 2.0 * Matern(4.0, nu=2.5), forgets=False),
    "damped-cosine": Case(lambda: 1.4 * Cosine(1.3) * Matern(2.2, nu=1.5)),
    "beats": Case(lambda: Cosine(1.1) * Cosine(0.8) * Matern(3.0, nu=0.5)),
    "periodic": Case(lambda: 1.5 * ExpSineSquared(1.3, 0.9), FOURIER, forgets=False),
    "quasi-periodic": Case(lambda: 0.8 * ExpSineSquared(2.0, 1.2) * Matern(4.0, nu=1.5), FOURIER),
    "sho": Case(lambda: 1.3 * SHO(1.7, 2.4)),
    "sho-of-one-swing": Case(lambda: 0.8 * SHO(3.0, 0.3)),
    "shos": Case(lambda: 0.5 * SHO(1.1, 9.0) + SHO(2.3, 1.2, "fixed") + Matern(4.0, nu=1.5)),
    "sho-of-products": Case(lambda: (SHO(1.3, 2.0) + 0.4) * Matern(3.0, nu=1.5) * SHO(2.9, 5.0)),
    "rbf": Case(lambda: 1.6 * RBF(1.2), SIX_STATES),
    "rbf-and-matern": Case(lambda: 2.0 * RBF(3.0) + 0.3 * Matern(0.4, nu=0.5), SIX_STATES),
    "damped-by-rbf": Case(lambda: Cosine(1.4) * RBF(2.5), SIX_STATES),
    "rational-quadratic": Case(lambda: 0.9 * RationalQuadratic(1.3, alpha=1.5), MIXTURE),
}


def each_series_kernel(*, exact=None, forgets=None):
    """Parametrise a test with ``case``; see the module."""
    chosen = {
        name: case
        for name, case in CASES.items()
        if (exact is None or (case.tolerance == EXACT) == exact)
        and (forgets is None or case.forgets == forgets)
    }
    return pytest.mark.parametrize("case", list(chosen.values()), ids=list(chosen))
