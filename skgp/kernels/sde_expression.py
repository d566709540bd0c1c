r"""A kernel expression on one column as a sum of products of stationary Markov processes.

.. math:: k(t) = \sum_c v_c \prod_{i \in c} k_i(\lambda_i t)

Products of sums are multiplied out, constants are folded into the variances :math:`v_c`, and
kernels that are not Markov themselves are replaced by sums that are (Sarkka and Solin, "Applied
Stochastic Differential Equations", 2019, chapter 12):

- RBF, which is also Matern with nu=inf, by a process of six states (:mod:`.sde_rational`), with
  an error of 9.1e-6 of its variance, or of up to 16, where a `tolerance` asks for less.
- ExpSineSquared by its Fourier series,

  .. math:: e^{-z (1 - \cos \omega t)} = \sum_{j \ge 0} w_j \cos(j \omega t), \qquad
            w_j = (2 - \delta_{j0}) e^{-z} I_j(z), \quad z = \ell^{-2},

  cut where the error is within the tolerance, the weights scaled to sum to 1 (A. Solin and S.
  Sarkka, "Explicit link between periodic covariance functions and state space models", 2014).
- RationalQuadratic by four processes of six states, or six of four, at different length scales: it
  is a Gamma mixture of squared exponentials,

  .. math:: \left(1 + \frac{t^2}{2 \alpha \ell^2}\right)^{-\alpha}
            = E\left[e^{-u t^2 / 2 \ell^2}\right], \qquad u \sim \mathrm{Gamma}(\alpha, \alpha),

  here by Gauss quadrature of few nodes. In the variable u itself it (generalised Laguerre) is exact
  near t = 0 and poor in the tail, which small u decide; in
  :math:`x = \sqrt u / (\sqrt u + \sqrt c)` the greatest error over all t is 4 to 20 times less:
  1e-5 at alpha = 20, 1.1e-4 at 5, 7e-4 at 1, 5.2e-3 at 0.5 and 0.22 at 0.1.

The numbers of states and of terms are chosen for the kernel's own hyper-parameters and stay when
theta moves, so that all is differentiable; `Expansion.error` tells what that costs.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
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

from .defaults import CENTRE, LEAST_LOG, MAX_GRID, MAX_HARMONICS, TOLERANCE
from .expression import Node
from .hyperparameters import children_of
from .sde_processes import (
    INTEGRATED,
    LINE,
    MATERN12,
    MATERN32,
    MATERN52,
    OSCILLATOR,
    ROTATION,
    Primitive,
)
from .sde_rational import GAUSSIAN4, GAUSSIAN6, GAUSSIANS, Rational
from .special import log_harmonics, scaled_bessel
from .specs import SHO, ActiveDims, Cosine, LocalLinearTrend

SUPPORTED = (
    "Matern, RBF, RationalQuadratic, ConstantKernel, Cosine, ExpSineSquared, SHO, and sums, "
    "products and whole powers of these, and add LocalLinearTrend"
)
_MATERN = {0.5: MATERN12, 1.5: MATERN32, 2.5: MATERN52}  # mathematical: by nu


class Factor(NamedTuple):
    """A process of unit variance run at the rate exp(log_rate), per unit of time."""

    primitive: Primitive
    log_rate: Tensor
    log_shape: Tensor | None = None


class Component(NamedTuple):
    """A product of independent processes times the variance exp(log_variance)."""

    log_variance: Tensor
    factors: tuple[Factor, ...]


class Expansion(NamedTuple):
    """The components of a kernel, and a bound of the greatest ``abs(k - k_approximate)``."""

    components: tuple[Component, ...]
    error: float

    def variance(self) -> float:
        """k(0)."""
        return sum(math.exp(c.log_variance.item()) for c in self.components)


def expand(node: Node, tolerance: float | None) -> Expansion:
    """Expand a bound expression to its components, in the order of its summands.

    Gradients flow from the components to the parameters of the node. Their number depends on the
    kernel's own hyper-parameters alone; the `tolerance` is that of a truncated series and of RBF,
    relative to its variance; None stands for 1e-8 and for six states. ValueError if a part is not a
    function of one column or has no state-space form.
    """
    kernel, kind = node.kernel, type(node.kernel)
    parts = [expand(child, tolerance) for child in node.children]
    if kind is Sum:
        left, right = parts
        return Expansion(left.components + right.components, left.error + right.error)
    if kind is Product:
        return _multiply(*parts)
    if kind is ActiveDims:
        return parts[0]
    if kind is Exponentiation:
        return _power(parts[0], kernel)
    if kind is ExpSineSquared:
        return _exp_sine_squared(node, TOLERANCE if tolerance is None else tolerance)
    if kind is RBF or (kind is Matern and kernel.nu == math.inf):
        _check_scalar(node)
        process = gaussian(tolerance)
        only = _single(process, -node.params["length_scale"].log())
        return Expansion(only.components, process.error)
    if kind not in _LEAVES:
        raise ValueError(_no_form(kernel))
    return _LEAVES[kind](node)


def _no_form(kernel: Kernel) -> str:
    if type(kernel) is WhiteKernel:
        return (
            f"kernel contains {kernel}, which has no state-space form; separate it first with "
            "skgp.kernels.split_noise."
        )
    return f"kernel part {kernel} has no state-space form that skgp knows; use {SUPPORTED}."


def check_one_input(kernel: Kernel) -> int | None:
    """The column that all ActiveDims of an expression select, None where there are none."""
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
    for component in components:
        starts = [f for f in component.factors if not f.primitive.is_stationary]
        if starts and len(component.factors) > 1:
            raise ValueError(
                "kernel has a product with a LocalLinearTrend, which has no state-space form that "
                "skgp knows; add the trend, or multiply it by constants alone."
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
        if any(not f.primitive.is_stationary for part in parts for f in part.factors) and power > 1:
            raise ValueError(f"kernel part {kernel} is a power of a LocalLinearTrend; add it.")
        log_variance = math.log(ways) + torch.stack([p.log_variance for p in parts]).sum()
        components.append(
            Component(log_variance, tuple(factor for part in parts for factor in part.factors))
        )
    bound = base.variance()
    return Expansion(tuple(components), (bound + base.error) ** power - bound**power)


def _constant(node: Node) -> Expansion:
    return Expansion((Component(node.params["constant_value"].log(), ()),), 0.0)


def _cosine(node: Node) -> Expansion:
    return _single(ROTATION, math.log(2 * math.pi) - node.params["period"].log())


def _oscillator(node: Node) -> Expansion:
    period, decay = node.params["period"].log(), node.params["decay"].log()
    angular = math.log(2 * math.pi) - period
    factor = Factor(OSCILLATOR, angular, -decay - angular)
    return Expansion((Component(torch.zeros_like(angular), (factor,)),), 0.0)


def _local_linear_trend(node: Node) -> Expansion:
    names = {"level": (), "slope": (LINE,), "diffusion": (INTEGRATED,)}
    components = []
    for name, processes in names.items():
        log_variance = node.params[name].log()
        factors = tuple(Factor(each, torch.zeros_like(log_variance)) for each in processes)
        components.append(Component(log_variance, factors))
    return Expansion(tuple(components), 0.0)


def origin_of(kernel: Kernel) -> float | None:
    """Where the parts of an expression that are not stationary start, None where all are."""
    if type(kernel) is LocalLinearTrend:
        return float(kernel.origin)
    origins = (origin_of(child) for child in children_of(kernel))
    found = {origin for origin in origins if origin is not None}
    if len(found) > 1:
        raise ValueError(
            f"kernel={kernel} has trends that start at {sorted(found)}; give all one origin."
        )
    return found.pop() if found else None


def _matern(node: Node) -> Expansion:
    nu = node.kernel.nu
    _check_scalar(node)
    return _single(_MATERN[nu], 0.5 * math.log(2 * nu) - node.params["length_scale"].log())


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


_LEAVES: dict[type, Callable[[Node], Expansion]] = {
    ConstantKernel: _constant,
    Cosine: _cosine,
    Matern: _matern,
    RationalQuadratic: _rational_quadratic,
    SHO: _oscillator,
    LocalLinearTrend: _local_linear_trend,
}


def gaussian(tolerance: float | None) -> Rational:
    """The process of fewest states within a tolerance, or else of most."""
    fine = (each for each in GAUSSIANS if tolerance is None or each.error <= tolerance)
    return next(fine, GAUSSIANS[-1])


# Nodes and the process at each: 24 states either way. The first suits small alpha.
_MIXTURES: tuple[tuple[int, Rational], ...] = ((6, GAUSSIAN4), (4, GAUSSIAN6))  # shape


def harmonics(z: Tensor, last: int) -> tuple[Tensor, float]:
    """Logarithms of the weights of harmonics 0..last, which sum to 1, and the bound of the error.

    z is length_scale**-2; gradients flow to it. The bound is twice the mass left out: what the cut
    and the scaling can each differ by.
    """
    log_weights = log_harmonics(z, last)
    return log_weights - torch.logsumexp(log_weights, 0), 2 * _missing_mass(z.item(), last)


def last_harmonic(z: float, tolerance: float) -> int:
    """Least number of harmonics whose error is within the tolerance, 32 at most."""
    for last in range(1, MAX_HARMONICS):
        if 2 * _missing_mass(z, last) <= tolerance:
            return last
    return MAX_HARMONICS


def _missing_mass(z: float, last: int) -> float:
    # I_j(z) falls like exp(-j^2 / (2 z)) for j < z and like (z / 2)^j / j! beyond.
    j = np.arange(last + 1, last + 41 + math.ceil(9 * min(math.sqrt(z), 1e4)))
    return 2 * float(scaled_bessel(j, z).sum())


def gamma_mixture(alpha: Tensor, n_nodes: int) -> tuple[Tensor, Tensor]:
    """Logarithms of the nodes u and of their weights, (n_nodes,) each; gradients flow to alpha.

    The Gamma density on a fine grid of log u, where the trapezoid rule is exact to rounding, gives
    the recurrence of its orthogonal polynomials (Stieltjes' procedure); the nodes are eigenvalues
    of their Jacobi matrix (Golub and Welsch).
    """
    grid = alpha.new_tensor(_log_grid(alpha.item()))
    mass = torch.softmax(alpha * (grid - grid.exp()), 0)
    x = torch.sigmoid(grid / 2 - math.log(CENTRE) / 2)
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    previous, current = torch.zeros_like(x), torch.ones_like(x)
    for k in range(n_nodes):
        diagonal.append((mass * x * current**2).sum())
        following = (x - diagonal[-1]) * current - (off[-1] * previous if k else 0)
        off.append((mass * following**2).sum().sqrt())
        previous, current = current, following / off[-1]
    side = torch.stack(off[:-1])
    jacobi = torch.diag(torch.stack(diagonal)) + torch.diag(side, 1) + torch.diag(side, -1)
    nodes, vectors = torch.linalg.eigh(jacobi)
    # Beyond the rounding of eigh lie length scales of 1e13, constants for all practical purposes.
    nodes = nodes.clamp(1e-13, 1 - 1e-13)
    return 2 * torch.logit(nodes) + math.log(CENTRE), 2 * vectors[0].abs().log()


def _log_grid(alpha: float) -> np.ndarray:
    """Values of log u that hold all but 1e-17 of the mass of Gamma(alpha, alpha > 0.1)."""
    width = 9 / math.sqrt(alpha)
    low = max(-width - 42 / alpha, LEAST_LOG)
    high = min(width + 1, math.log1p(45 / alpha) + 1)
    step = 0.2 / (1 + math.sqrt(alpha))
    return np.linspace(low, high, min(MAX_GRID, math.ceil((high - low) / step)))


def mixture_error(alpha: float, n_nodes: int, process: Rational) -> float:
    """Greatest distance of the mixture from RationalQuadratic, over 1e4 length scales."""
    log_nodes, log_weights = gamma_mixture(torch.tensor(alpha, dtype=torch.float64), n_nodes)
    half_square = np.append(0.0, np.logspace(-3, 8, 400))
    r = np.sqrt(2 * half_square[:, None] * log_nodes.exp().numpy())
    value = process.correlation(np.minimum(r, process.horizon))[0] @ log_weights.exp().numpy()
    # The grid can miss the top of a ripple by this little.
    return 1.02 * float(np.abs(value - (1 + half_square / alpha) ** -alpha).max())


@lru_cache(maxsize=64)
def choose_mixture(alpha: float) -> tuple[int, Rational]:
    """Return the number of nodes and the process at each that approximate best."""
    return min(_MIXTURES, key=lambda option: mixture_error(alpha, *option))
