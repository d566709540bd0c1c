r"""Expectations under a one-dimensional Gaussian by Gauss-Hermite quadrature.

All functions act elementwise on tensors of means and variances: :math:`f \sim N(m, v)` becomes
:math:`f = m + \sqrt{v}\, z` with standard normal :math:`z`, so that

.. math:: E[g(f)] \approx \sum_q w_q\, g(m + \sqrt{v}\, z_q), \qquad \sum_q w_q = 1,

which is exact for polynomials up to degree ``2 n_points - 1``. A variance of 0 gives :math:`g(m)`;
its gradient with respect to the variance is then 0 (not NaN), although the true one is
:math:`g''(m) / 2`.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import roots_hermitenorm
from torch import Tensor

__all__ = ["check_n_points", "expectation", "gauss_hermite", "log_expectation", "moments"]


def gauss_hermite(n_points: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""Nodes and weights for a standard normal variable.

    Parameters
    ----------
    n_points : int
        Number of nodes, at least 1.
    like : Tensor
        Gives the dtype and the device.

    Returns
    -------
    nodes, weights : Tensor of shape (n_points,)
        The weights sum to 1.

    Raises
    ------
    ValueError
        If `n_points` is not a positive integer.

    Examples
    --------
    >>> import torch
    >>> gauss_hermite(3, torch.zeros((), dtype=torch.float64))[0]
    tensor([-1.7321,  0.0000,  1.7321], dtype=torch.float64)
    """
    check_n_points(n_points)
    nodes, weights = _standard_normal_rule(n_points)
    return like.new_tensor(nodes), like.new_tensor(weights)


def check_n_points(n_points: int) -> None:
    """Refuse with a ValueError what is not a positive integer."""
    if not isinstance(n_points, int) or n_points < 1:
        raise ValueError(f"n_points must be a positive integer such as 20; got {n_points!r}.")


def expectation(
    function: Callable[[Tensor], Tensor], mean: Tensor, var: Tensor, *, n_points: int = 20
) -> Tensor:
    r"""Expectation :math:`E_{f \sim N(m, v)}[g(f)]`.

    Parameters
    ----------
    function : callable
        Maps f of shape (n_points, ...) elementwise to g(f) of the same shape; other arguments
        of g must broadcast from the right.
    mean, var : Tensor of the same shape (...)
        Parameters of the Gaussian; ``var >= 0``.
    n_points : int, default=20
        Number of nodes.

    Returns
    -------
    Tensor of shape (...)
        :math:`O(n\_points)` calls of g per element.
    """
    nodes, weights = gauss_hermite(n_points, mean)
    values = function(_spread(nodes, mean, var))
    return torch.tensordot(weights, values, dims=1)


def log_expectation(
    log_function: Callable[[Tensor], Tensor], mean: Tensor, var: Tensor, *, n_points: int = 20
) -> Tensor:
    r"""Logarithm of an expectation, :math:`\log E_{f \sim N(m, v)}[\exp h(f)]`.

    Summed as logsumexp, so that densities far below the smallest float lose nothing.

    Parameters
    ----------
    log_function : callable
        Maps f of shape (n_points, ...) elementwise to h(f), in nats.
    mean, var : Tensor of the same shape (...)
        Parameters of the Gaussian; ``var >= 0``.
    n_points : int, default=20
        Number of nodes.

    Returns
    -------
    Tensor of shape (...)
        In nats.
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

    Parameters
    ----------
    conditional_mean, conditional_var : callable
        Map f of shape (n_points, ...) elementwise to a(f) and b(f).
    mean, var : Tensor of the same shape (...)
        Parameters of the Gaussian; ``var >= 0``.
    n_points : int, default=20
        Number of nodes.

    Returns
    -------
    mean_y, var_y : Tensor of shape (...)
        In the units of y and of y squared.
    """
    nodes, weights = gauss_hermite(n_points, mean)
    f = _spread(nodes, mean, var)
    a = conditional_mean(f)
    mean_y = torch.tensordot(weights, a, dims=1)
    var_y = torch.tensordot(weights, conditional_var(f) + (a - mean_y) ** 2, dims=1)
    return mean_y, var_y


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
