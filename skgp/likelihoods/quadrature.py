r"""Expectations under a one-dimensional Gaussian by quadrature.

All functions act elementwise on tensors of means and variances: :math:`f \sim N(m, v)` becomes
:math:`f = m + \sqrt{v}\, z` with standard normal :math:`z`, so that

.. math:: E[g(f)] \approx \sum_q w_q\, g(m + \sqrt{v}\, z_q), \qquad \sum_q w_q = 1.

Gauss-Hermite nodes are exact for polynomials up to degree ``2 n_points - 1``. A variance of 0 gives
:math:`g(m)`; its gradient with respect to the variance is then 0 (not NaN), although the true one
is :math:`g''(m) / 2`.

Gauss-Hermite nodes miss a feature of g that is narrow beside :math:`\sqrt v`: for
:math:`\log(1 + e^f)`, whose singularities nearest to the real line are :math:`\pm i \pi`, 20 of
them err by 1e-9 at v = 1, by 3e-4 at v = 10 and by .03 at v = 100. `smooth_averages` therefore
leaves wide Gaussians to the trapezoidal rule in u, with :math:`f = s \sinh u` and s the size of the
feature, which sits at 0: its nodes are dense there and spread out as the distance grows. 80 of them
err by less than 1e-8 up to standard deviations of 10 s, and by 1e-7 of the value up to 100 s.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import roots_hermitenorm
from torch import Tensor
from torch.autograd.function import once_differentiable

from skgp.likelihoods.defaults import N_WIDE, NARROW, QUADRATURE_CHUNK, WIDE_REACH
from skgp.linalg.runtime import constant_like


def gauss_hermite(n_points: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""Nodes and weights for a standard normal variable.

    Both (n_points,), in the dtype and on the device of `like`; the weights sum to 1.

    Examples
    --------
    >>> import torch
    >>> gauss_hermite(3, torch.zeros((), dtype=torch.float64))[0]
    tensor([-1.7321,  0.0000,  1.7321], dtype=torch.float64)
    """
    check_n_points(n_points)
    nodes, weights = _standard_normal_rule(n_points)
    return constant_like(nodes, like), constant_like(weights, like)


def check_n_points(n_points: int) -> None:
    """Refuse with a ValueError what is not a positive integer."""
    if not isinstance(n_points, int) or n_points < 1:
        raise ValueError(f"n_points must be a positive integer such as 20; got {n_points!r}.")


def expectation(
    function: Callable[[Tensor], Tensor], mean: Tensor, var: Tensor, *, n_points: int = 20
) -> Tensor:
    r"""Expectation :math:`E_{f \sim N(m, v)}[g(f)]` (...), for g elementwise on (n_points, ...)."""
    nodes, weights = gauss_hermite(n_points, mean)
    values = function(_spread(nodes, mean, var))
    return torch.tensordot(weights, values, dims=1)


def log_expectation(
    log_function: Callable[[Tensor], Tensor], mean: Tensor, var: Tensor, *, n_points: int = 20
) -> Tensor:
    r"""Logarithm of an expectation, :math:`\log E_{f \sim N(m, v)}[\exp h(f)]`.

    Summed as logsumexp, so that densities far below the smallest float lose nothing.
    """
    nodes, weights = gauss_hermite(n_points, mean)
    log_values = log_function(_spread(nodes, mean, var))
    # Weights of far nodes underflow to 0 beyond some 200 points: their log of -inf drops them.
    log_weights = weights.log().reshape(-1, *(1 for _ in mean.shape))
    return torch.logsumexp(log_weights + log_values, dim=0)


def moments(
    conditional_mean: Callable[[Tensor], Tensor],
    conditional_var: Callable[[Tensor], Tensor],
    mean: Tensor,
    var: Tensor,
    *,
    n_points: int = 20,
) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of y when f is Gaussian, by the laws of total mean and variance.

    .. math:: E[y] = E[a(f)], \qquad V[y] = E[b(f)] + E[(a(f) - E[y])^2],

    with :math:`a(f) = E[y \mid f]` and :math:`b(f) = V[y \mid f]`. The second term is a sum of
    squares and so cannot come out negative, unlike :math:`E[a^2] - E[a]^2`.
    """
    nodes, weights = gauss_hermite(n_points, mean)
    f = _spread(nodes, mean, var)
    a = conditional_mean(f)
    mean_y = torch.tensordot(weights, a, dims=1)
    var_y = torch.tensordot(weights, conditional_var(f) + (a - mean_y) ** 2, dims=1)
    return mean_y, var_y


def smooth_averages(
    function: Callable[..., tuple[Tensor, ...]],
    mean: Tensor,
    var: Tensor,
    *columns: Tensor,
    scale: float,
    n_points: int = 20,
) -> tuple[Tensor, ...]:
    r"""Expectations :math:`E_{f \sim N(m, v)}[g(f)]` of functions that bend at 0, on a known scale.

    The function maps f (k, n) and the columns (n,) elementwise to a tuple of g(f) (k, n); `scale`
    is about the distance to 0 of the singularities of g that are nearest to the real line. Gauss-
    Hermite nodes serve up to standard deviations of 0.3 `scale`, wider rows 80 of the sinh rule.
    """

    def by_rule(rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
        def averages(mean: Tensor, var: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
            f, weights = rule(mean, var)
            return tuple((weights * values).sum(0) for values in function(f, *columns))

        return averages

    def narrow(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        nodes, weights = gauss_hermite(n_points, mean)
        return _spread(nodes, mean, var), weights[:, None]

    def wide(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return _sinh_rule(mean, var, scale)

    is_wide = var > (NARROW * scale) ** 2
    return piecewise(
        is_wide, by_rule(narrow), by_rule(wide), (mean, var, *columns), chunk=QUADRATURE_CHUNK
    )


def smooth_expectation(
    function: Callable[..., tuple[Tensor, Tensor, Tensor]],
    mean: Tensor,
    var: Tensor,
    *columns: Tensor,
    scale: float,
    n_points: int = 20,
) -> Tensor:
    r"""Expectation of one function, differentiable once in the mean and the variance.

    By the theorems of Bonnet and Price its derivatives are :math:`E[g']` and :math:`E[g''] / 2`,
    which one pass over the nodes gives together with the value, at a variance of 0 as well. As
    `smooth_averages`, of a function that returns :math:`g, g', g''`.
    """
    how: dict[str, Any] = {"scale": scale, "n_points": n_points}
    return averaged(lambda m, v: smooth_averages(function, m, v, *columns, **how), mean, var)


def averaged(averages: Callable[..., tuple[Tensor, ...]], mean: Tensor, var: Tensor) -> Tensor:
    """The first of three averages, of a function and two derivatives, as `smooth_expectation`."""
    return _Averaged.apply(mean, var, averages)


class _Averaged(torch.autograd.Function):
    """`averaged` as a function that autograd knows."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, averages: Callable[..., tuple[Tensor, ...]]
    ) -> Tensor:
        value, first, second = averages(mean.detach(), var.detach())
        ctx.save_for_backward(first, 0.5 * second)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        in_mean, in_var = ctx.saved_tensors
        return grad * in_mean, grad * in_var, None


def piecewise(
    is_second: Tensor,
    first: Callable[..., tuple[Tensor, ...]],
    second: Callable[..., tuple[Tensor, ...]],
    columns: Sequence[Tensor],
    *,
    chunk: int,
) -> tuple[Tensor, ...]:
    """Apply one of two rules to each row, some rows at a time.

    Rules map columns (n,) to a tuple of results (n,). Each sees only rows of its kind, `chunk` at
    once: no time for the rest, and no NaN gradients of it. On another device than the CPU, which
    would wait for the answer, all rows see both where no gradient is asked.
    """
    if is_second.device.type != "cpu" and not torch.is_grad_enabled():
        both = (chunked(rule, columns, chunk=chunk) for rule in (first, second))
        return tuple(torch.where(is_second, b, a) for a, b in zip(*both, strict=True))
    for applies_to_all, rule in ((not is_second.any(), first), (is_second.all(), second)):
        if applies_to_all:
            return chunked(rule, columns, chunk=chunk)
    results: list[Tensor] = []
    for mask, rule in ((~is_second, first), (is_second, second)):
        rows = chunked(rule, [column[mask] for column in columns], chunk=chunk)
        for k, values in enumerate(rows):
            if k == len(results):
                results.append(values.new_zeros(columns[0].shape))
            results[k][mask] = values
    return tuple(results)


def chunked(
    rule: Callable[..., tuple[Tensor, ...]], columns: Sequence[Tensor], *, chunk: int
) -> tuple[Tensor, ...]:
    """Apply a rule to some rows at a time, which bounds the memory of its nodes."""
    if columns[0].ndim == 1 and len(columns[0]) <= chunk:
        return rule(*columns)
    parts = zip(*(column.reshape(-1).split(chunk) for column in columns), strict=True)
    results = zip(*(rule(*rows) for rows in parts), strict=True)
    return tuple(torch.cat(values).reshape(columns[0].shape) for values in results)


@functools.lru_cache(maxsize=32)
def _standard_normal_rule(n_points: int) -> tuple[np.ndarray, np.ndarray]:
    # Against exp(-z^2 / 2), so dividing by the sum makes the weights those of N(0, 1). SciPy's rule
    # stays finite beyond 250 points, where numpy's hermgauss overflows.
    nodes, weights = roots_hermitenorm(n_points)
    return nodes, weights / weights.sum()


def _spread(nodes: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Values of f (n_points, ...) at the nodes."""
    # The square root has an infinite slope at 0, which autograd would turn into NaN.
    std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()
    return mean + std * nodes.reshape(-1, *(1 for _ in mean.shape))


def _sinh_rule(mean: Tensor, var: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Nodes f and weights (N_WIDE, n) of the trapezoidal rule in asinh(f / scale)."""
    std = var.sqrt()
    with torch.no_grad():  # the nodes are constants: the density carries the gradients
        low = torch.asinh((mean - WIDE_REACH * std) / scale)
        high = torch.asinh((mean + WIDE_REACH * std) / scale)
        share = torch.linspace(0, 1, N_WIDE, dtype=mean.dtype, device=mean.device)
        exp = torch.addcmul(low, share[:, None], high - low).exp_()
        inverse = exp.reciprocal()
        f = (exp - inverse).mul_(0.5 * scale)
        slope = exp.add_(inverse)
    weights = (-0.5 * ((f - mean) / std).square()).exp() * slope
    return f, weights / weights.sum(0)


def aligned(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Broadcast to one shape; a ValueError unless kind and dtype agree."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a floating-point tensor; got {kind}.")
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"All arguments must have one dtype; got {dtypes}. Convert them first.")
    try:
        return torch.broadcast_tensors(*tensors.values())
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"Shapes do not broadcast: {shapes}.") from error


def fails(are_right: Tensor) -> bool:
    """Whether some value is not right, NaN among them; unseen where the host had to wait for it."""
    return are_right.device.type == "cpu" and not bool(are_right.all())


def check_var(var: Tensor) -> None:
    """Raise a ValueError if a variance is negative or NaN."""
    if fails(var >= 0):
        raise ValueError(
            f"var must be non-negative and not NaN; its smallest value is {float(var.min()):.3g}. "
            "Clip rounding errors at 0 before calling."
        )


def check_positive(name: str, value: float | Tensor, remedy: str) -> None:
    """Raise a ValueError that ends with the remedy unless the value is positive and finite."""
    number = torch.as_tensor(value).detach()
    if not ((number > 0) & number.isfinite()).all():
        raise ValueError(f"{name} must be positive and finite; got {value!r}. {remedy}")


def free_parameter(
    value: float | Tensor, bounds: tuple[float, float] | None
) -> tuple[float, float, float]:
    """A value with its bounds; None keeps it."""
    value = float(value)
    return value, *((value, value) if bounds is None else bounds)


def check_finite(y: Tensor) -> None:
    """Raise a ValueError if an observation is NaN or infinite."""
    if not y.isfinite().all():
        raise ValueError("y contains NaN or inf; drop or impute those rows.")
