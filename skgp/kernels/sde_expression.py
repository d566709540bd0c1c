r"""A kernel expression on one column as a sum of products of stationary Markov processes.

.. math:: k(t) = \sum_c v_c \prod_{i \in c} k_i(\lambda_i t)

Products of sums are multiplied out, constants are folded into the variances :math:`v_c`, and
kernels that are not Markov themselves are replaced by sums that are:

- RBF, which is also Matern with nu=inf, by a process of six states (``sde_rational.py``), with an
  error of 9.1e-6 of its variance;
- RationalQuadratic by a mixture of four such, or six of four states, at different length scales
  (``sde_mixtures.py``); its error depends on alpha: 1e-5 at 20, 1.1e-4 at 5, 7e-4 at 1,
  5.2e-3 at 0.5 and 0.22 at 0.1;
- ExpSineSquared by a constant and the cosines of its Fourier series (``sde_mixtures.py``), cut
  where the error is within the tolerance.

The numbers of states and of terms are chosen for the kernel's own hyper-parameters and stay when
theta moves, so that all is differentiable; `Expansion.error` tells what that costs.

Source: S. Sarkka and A. Solin, "Applied Stochastic Differential Equations" (2019), chapter 12.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Exponentiation,
    ExpSineSquared,
    Kernel,
    Matern,
    Product,
    RationalQuadratic,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from .expression import Node, children_of
from .sde_mixtures import (
    choose_mixture,
    gamma_mixture,
    harmonics,
    last_harmonic,
    mixture_error,
)
from .sde_primitives import MATERN12, MATERN32, MATERN52, ROTATION, Primitive
from .sde_rational import GAUSSIAN6
from .specs import ActiveDims, Cosine

__all__ = ["Component", "Factor", "expand"]

SUPPORTED = (
    "Matern, RBF, RationalQuadratic, ConstantKernel, Cosine, ExpSineSquared, and sums, products "
    "and whole powers of these"
)
_MATERN = {0.5: MATERN12, 1.5: MATERN32, 2.5: MATERN52}


class Factor(NamedTuple):
    """A process of unit variance run at the rate exp(log_rate), per unit of time."""

    primitive: Primitive
    log_rate: Tensor


class Component(NamedTuple):
    """A product of independent processes times the variance exp(log_variance)."""

    log_variance: Tensor
    factors: tuple[Factor, ...]


class Expansion(NamedTuple):
    """The components of a kernel and how far their sum is from it.

    ``error`` bounds the greatest ``abs(k - k_approximate)``.
    """

    components: tuple[Component, ...]
    error: float

    def variance(self) -> float:
        """k(0)."""
        return sum(math.exp(c.log_variance.item()) for c in self.components)


def expand(node: Node, tolerance: float) -> Expansion:
    """Expand a bound expression to its components, in the order of its summands.

    Parameters
    ----------
    node : Node
        Of `bind`; gradients flow from the components to its parameters. The number of components
        depends on the kernel's own hyper-parameters alone.
    tolerance : float
        Of a truncated series, relative to its variance.

    Raises
    ------
    ValueError
        If a part is not a function of one column or has no state-space form.
    """
    kernel, kind = node.kernel, type(node.kernel)
    if kind is Sum:
        left, right = (expand(child, tolerance) for child in node.children)
        return Expansion(left.components + right.components, left.error + right.error)
    if kind is Product:
        left, right = (expand(child, tolerance) for child in node.children)
        return _multiply(left, right)
    if kind is ActiveDims:
        return expand(node.children[0], tolerance)
    if kind is Exponentiation:
        return _power(expand(node.children[0], tolerance), kernel)
    if kind is ConstantKernel:
        return Expansion((Component(node.params["constant_value"].log(), ()),), 0.0)
    if kind is Cosine:
        return _single(ROTATION, math.log(2 * math.pi) - node.params["period"].log())
    if kind is Matern and kernel.nu in _MATERN:
        _check_scalar(node)
        rate = 0.5 * math.log(2 * kernel.nu) - node.params["length_scale"].log()
        return _single(_MATERN[kernel.nu], rate)
    if kind is RBF or (kind is Matern and kernel.nu == math.inf):
        return _squared_exponential(node)
    if kind is RationalQuadratic:
        return _rational_quadratic(node)
    if kind is ExpSineSquared:
        return _exp_sine_squared(node, tolerance)
    raise ValueError(_no_form(kernel))


def _no_form(kernel: Kernel) -> str:
    if type(kernel) is WhiteKernel:
        return (
            f"kernel contains {kernel}, which has no state-space form; separate it first with "
            "skgp.kernels.split_noise."
        )
    return f"kernel part {kernel} has no state-space form that skgp knows; use {SUPPORTED}."


def check_one_input(kernel: Kernel, column: int | None = None) -> int | None:
    """Return the column that all ActiveDims of an expression select, None where there are none.

    Raises
    ------
    ValueError
        If they select several.
    """
    if type(kernel) is ActiveDims:
        columns = kernel.columns()
        inner = check_one_input(kernel.kernel)
        if len(columns) != 1 or inner not in (None, 0):
            raise ValueError(f"kernel part {kernel} must see one column, for a state-space form.")
        return int(columns[0])
    seen = (check_one_input(child) for child in children_of(kernel))
    found = {column for column in seen if column is not None}
    if len(found) > 1:
        raise ValueError(
            f"kernel={kernel} sees the columns {sorted(found)}; a state-space form is of one."
        )
    return found.pop() if found else None


def _check_scalar(node: Node) -> None:
    if node.params["length_scale"].ndim:
        raise ValueError(
            f"length_scale of {node.kernel} has {node.params['length_scale'].numel()} elements; a "
            "state-space form is of one column, give it one number."
        )


def _single(primitive: Primitive, log_rate: Tensor) -> Expansion:
    return Expansion((Component(torch.zeros_like(log_rate), (Factor(primitive, log_rate),)),), 0.0)


def _multiply(left: Expansion, right: Expansion) -> Expansion:
    components = tuple(
        Component(a.log_variance + b.log_variance, a.factors + b.factors)
        for a in left.components
        for b in right.components
    )
    # a b - a' b' = (a - a') b + a' (b - b'), and no covariance exceeds its variance.
    error = left.error * (right.variance() + right.error) + left.variance() * right.error
    return Expansion(components, error)


def _power(base: Expansion, kernel: Exponentiation) -> Expansion:
    """Expand the power of a sum, equal products collected with their multinomial coefficient."""
    exponent = float(kernel.exponent)
    if not exponent.is_integer() or exponent < 1:
        raise ValueError(
            f"kernel part {kernel} has exponent {exponent:g}; it has a state-space form for whole "
            "exponents >= 1 only. Change the exponent."
        )
    power = int(exponent)
    components = []
    for choice in itertools.combinations_with_replacement(range(len(base.components)), power):
        ways = math.factorial(power)
        for repeats in Counter(choice).values():
            ways //= math.factorial(repeats)
        parts = [base.components[i] for i in choice]
        log_variance = math.log(ways) + torch.stack([p.log_variance for p in parts]).sum()
        components.append(
            Component(log_variance, tuple(factor for part in parts for factor in part.factors))
        )
    bound = base.variance()
    return Expansion(tuple(components), (bound + base.error) ** power - bound**power)


def _squared_exponential(node: Node) -> Expansion:
    _check_scalar(node)
    only = _single(GAUSSIAN6, -node.params["length_scale"].log())
    return Expansion(only.components, GAUSSIAN6.error)


def _exp_sine_squared(node: Node, tolerance: float) -> Expansion:
    own = float(np.ravel(node.kernel.length_scale)[0]) ** -2
    last = last_harmonic(own, tolerance)
    log_weights, error = harmonics(node.params["length_scale"] ** -2, last)
    base = math.log(2 * math.pi) - node.params["periodicity"].log()
    components = [Component(log_weights[0], ())]
    components += [
        Component(log_weights[j], (Factor(ROTATION, base + math.log(j)),))
        for j in range(1, last + 1)
    ]
    return Expansion(tuple(components), error)


def _rational_quadratic(node: Node) -> Expansion:
    alpha = node.params["alpha"]
    n_nodes, process = choose_mixture(float(np.ravel(node.kernel.alpha)[0]))
    log_nodes, log_weights = gamma_mixture(alpha, n_nodes)
    # u scales squared distances.
    log_rates = log_nodes / 2 - node.params["length_scale"].log()
    components = [
        Component(weight, (Factor(process, rate),))
        for weight, rate in zip(log_weights, log_rates, strict=True)
    ]
    return Expansion(tuple(components), mixture_error(alpha.item(), n_nodes, process))
