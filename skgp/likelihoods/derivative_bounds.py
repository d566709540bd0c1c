r"""Bounds on a likelihood and its derivatives, and the samples that biased gradients need.

Biased Monte Carlo gradients lead to a stationary point [1]_ where :math:`\phi(f) = p(y \mid f)`
obeys, with finite constants (Assumption 3),

.. math:: 0 \le \phi \le B, \qquad b' \le \phi' \le B', \qquad b'' \le \phi'' \le B''.

What Table 1 of the paper has, and what is used here
-----------------------------------------------------
====================  ==============================================================================
logistic              b'' and B'' are printed as -+1/4; attained are :math:`\mp 1 / 6 \sqrt 3`, 2.6
                      times closer. One of b', B' is 0, depending on the label.
Gaussian              As printed: attained. (The proof has :math:`\pm (c / \sigma) \sqrt e` for
                      :math:`\pm c / (\sigma \sqrt e)`, and the table leaves c out of the density.)
probit                As printed: attained; one of b', B' is 0.
Poisson, exp          The density is printed with :math:`e^{g(f)}` for :math:`e^{-g(f)}`, with which
                      nothing is bounded. For the right one the printed bounds hold but are wide:
                      18, 201, 217, 18 and 3624 times at y = 50. Used are the extrema, in closed
                      form.
Poisson, softplus     The same slip in the density; :math:`\phi' = g' (\phi_{y-1} - \phi_y)` and the
                      first term of :math:`\phi''` are printed with the opposite sign. The printed
                      bounds hold but are wide: 18, 226, 187, 1971 and 3432 times at y = 50. Used
                      are the extrema, found numerically.
Student-t             As printed: attained.
====================  ==============================================================================

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes,
   Table 1 and Corollary 5; proofs in section 3 of the supplement.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, StudentT

__all__ = ["DerivativeBounds", "derivative_bounds", "sufficient_samples"]


class DerivativeBounds(NamedTuple):
    r"""Bounds of :math:`\phi(f) = p(y \mid f)` over all f, each of the shape of y.

    Attributes
    ----------
    density_max : Tensor
        B, in the units of the density.
    slope_min, slope_max : Tensor
        b' and B' of :math:`\phi'`, per unit of f.
    curvature_min, curvature_max : Tensor
        b'' and B'' of :math:`\phi''`, per unit of f squared.
    """

    density_max: Tensor
    slope_min: Tensor
    slope_max: Tensor
    curvature_min: Tensor
    curvature_max: Tensor


@functools.singledispatch
def derivative_bounds(likelihood: Likelihood, y: Tensor) -> DerivativeBounds:
    """Bounds on p(y | f) and its first two derivatives in f.

    Parameters
    ----------
    likelihood : Bernoulli, Gaussian, Poisson or StudentT
    y : Tensor of shape (...)
        Observations.

    Returns
    -------
    DerivativeBounds
        Attained, or approached for f -> +-inf; within .1% for Poisson with the softplus link.

    Raises
    ------
    TypeError
        For other likelihoods. That of Laplace noise has a kink, hence no second derivative.

    Examples
    --------
    >>> import torch
    >>> from skgp.likelihoods import Gaussian
    >>> derivative_bounds(Gaussian(1.0), torch.zeros(1)).slope_max
    tensor([0.2420])
    """
    raise TypeError(
        f"No derivative bounds for {type(likelihood).__name__}: p(y | f) needs two bounded "
        "derivatives in f, and a function registered with derivative_bounds.register."
    )


@derivative_bounds.register
def _(likelihood: Gaussian, y: Tensor) -> DerivativeBounds:
    std = _parameter(likelihood.noise_variance, y).sqrt().expand_as(y)
    c = 1 / (math.sqrt(2 * math.pi) * std)
    slope = c / (std * math.sqrt(math.e))  # at one std from y
    # Least at y, greatest at sqrt(3) std from it.
    return DerivativeBounds(c, -slope, slope, -c / std**2, 2 * c / (std**2 * math.e**1.5))


@derivative_bounds.register
def _(likelihood: Bernoulli, y: Tensor) -> DerivativeBounds:
    likelihood.log_prob(y, torch.zeros_like(y))  # refuses what is not a label
    if likelihood.link == "logit":
        steepest, bend = 1 / 4, 1 / (6 * math.sqrt(3))
    else:
        steepest, bend = 1 / math.sqrt(2 * math.pi), 1 / math.sqrt(2 * math.pi * math.e)
    slope = y * steepest
    curvature = torch.full_like(y, bend)
    return DerivativeBounds(
        torch.ones_like(y), slope.clamp_max(0), slope.clamp_min(0), -curvature, curvature
    )


@derivative_bounds.register
def _(likelihood: StudentT, y: Tensor) -> DerivativeBounds:
    scale, df = _parameter(likelihood.scale, y), _parameter(likelihood.df, y)
    c = likelihood.log_prob(y, y).detach().exp()
    unit = c * (df + 1) / df
    # Steepest at x^2 = df / (df + 2), for x = (f - y) / scale; bends most at x = 0 and, the other
    # way, at x^2 = 3 df / (df + 2).
    slope = unit / scale * (df / (df + 2)).sqrt() * ((df + 2) / (df + 3)) ** ((df + 3) / 2)
    bend = unit / scale**2
    return DerivativeBounds(
        c, -slope, slope, -bend, 2 * bend * ((df + 2) / (df + 5)) ** ((df + 5) / 2)
    )


@derivative_bounds.register
def _(likelihood: Poisson, y: Tensor) -> DerivativeBounds:
    likelihood.log_prob(y, torch.zeros_like(y))  # refuses what is not a count
    if likelihood.link == "exp":
        return _poisson_exp(y)
    return _poisson_softplus(likelihood, y)


def _parameter(value: float | Tensor, y: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=y.dtype, device=y.device).detach()


def sufficient_samples(
    likelihood: Likelihood,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    step_size: float,
    failure_probability: float,
) -> Tensor:
    r"""Samples with which the biased gradient meets the conditions of convergence (Corollary 5).

    .. math:: L > \frac{\log(6 n / \delta_t)}{2 \gamma_t^2} \max\Big\{ \frac{B^2}{E[\phi]^2},
              \frac{(B' - b')^2}{E[\phi']^2}, \frac{(B'' - b'')^2}{E[\phi'']^2} \Big\},

    expectations under :math:`f \sim N(m, v)`, with 1 for those that are exactly 0. The relative
    error of every average is then at most :math:`\gamma_t` with probability
    :math:`1 - \delta_t`. The number is of theoretical interest: it is in the thousands for a single
    label, and unbounded where an expected derivative is nearly 0.

    Parameters
    ----------
    likelihood : Bernoulli, Gaussian, Poisson or StudentT
    y, mean, var : Tensor of shape (...)
        All n observations; means and variances of the latent values, ``var > 0``.
    step_size : float
        :math:`\gamma_t` in (0, 1/2], which is the relative error allowed, too.
    failure_probability : float
        :math:`\delta_t` in (0, 1).

    Returns
    -------
    Tensor of shape (...)
        Whole numbers, one per observation (possibly inf); the corollary asks for the largest.

    Raises
    ------
    ValueError
        If a number is out of its range.
    TypeError
        As `derivative_bounds`.
    """
    if not 0 < step_size <= 0.5:
        raise ValueError(f"step_size must be in (0, 0.5]; got {step_size!r}.")
    if not 0 < failure_probability < 1:
        raise ValueError(f"failure_probability must be in (0, 1); got {failure_probability!r}.")
    bounds = derivative_bounds(likelihood, y)
    expected = _expected_density(likelihood, y, mean, var)
    spreads = (
        bounds.density_max,
        bounds.slope_max - bounds.slope_min,
        bounds.curvature_max - bounds.curvature_min,
    )
    ratios = [
        (spread / torch.where(value == 0, 1.0, value)) ** 2
        for spread, value in zip(spreads, expected, strict=True)
    ]
    factor = math.log(6 * y.numel() / failure_probability) / (2 * step_size**2)
    return (factor * torch.stack(ratios).amax(0)).floor() + 1


def _expected_density(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expectations of phi, phi' and phi'': the derivatives of the first in the mean (Bonnet), and,
    times 2, in the variance (Price)."""
    mean, var = (t.detach().clone().requires_grad_() for t in (mean, var))
    with torch.enable_grad():
        density = likelihood.log_predictive(y, mean, var).exp()
        in_mean, in_var = torch.autograd.grad(density.sum(), (mean, var))
    return density.detach(), in_mean, 2 * in_var


# --- Poisson --------------------------------------------------------------------------------------


def _poisson_exp(y: Tensor) -> DerivativeBounds:
    r"""Extrema of :math:`\phi = \lambda^y e^{-\lambda} / y!`, :math:`\lambda = e^f`.

    .. math:: \phi' = \phi\, (y - \lambda), \qquad \phi'' = \phi\, ((y - \lambda)^2 - \lambda).

    The extrema of the first are at :math:`\lambda = y + \tfrac12 \pm \sqrt{y + \tfrac14}`, those of
    the second at :math:`\lambda = y + 1 + t` where :math:`t^3 - (3 y + 2) t - (2 y + 1) = 0`.
    """
    half_gap = (y + 0.25).sqrt()
    rate = torch.stack([y + 0.5 - half_gap, y + 0.5 + half_gap]).clamp_min(0)
    slope = _pmf(y, rate) * (y - rate)
    rate = (y + 1 + _cubic_roots(3 * y + 2, 2 * y + 1)).clamp_min(0)
    curvature = _pmf(y, rate) * ((y - rate) ** 2 - rate)
    return DerivativeBounds(
        _pmf(y, y), slope.amin(0), slope.amax(0), curvature.amin(0), curvature.amax(0)
    )


def _poisson_softplus(likelihood: Poisson, y: Tensor) -> DerivativeBounds:
    r"""Extrema over 4000 values of :math:`\lambda = \log(1 + e^f)`, widened by .1%.

    With :math:`\phi_\lambda = \phi_{y-1} - \phi_y` and
    :math:`\phi_{\lambda\lambda} = \phi_{y-2} - 2 \phi_{y-1} + \phi_y`,

    .. math:: \phi' = g' \phi_\lambda, \qquad
              \phi'' = g'' \phi_\lambda + g'^2 \phi_{\lambda\lambda},

    whose extrema solve transcendental equations. Nodes lie .005 standard deviations of
    :math:`\phi` apart: the extrema between them exceed those on them by some 1e-5.
    """
    counts, inverse = y.double().unique(return_inverse=True)
    half_width = 10 * (counts.sqrt() + 1)
    fraction = torch.linspace(0, 1, 4001, dtype=counts.dtype, device=y.device)[:, None]
    lowest = (counts - half_width).clamp_min(1e-3)
    rate = lowest + fraction * (counts + half_width - lowest)
    f = rate + (-torch.expm1(-rate)).log()
    density = likelihood.log_prob(counts, f).exp()
    first, second = likelihood.derivatives(counts, f)
    slope, curvature = density * first, density * (second + first**2)
    # Both vanish for f -> -inf and f -> inf.
    extrema = [
        1.001 * limit
        for values in (slope, curvature)
        for limit in (values.amin(0).clamp_max(0), values.amax(0).clamp_min(0))
    ]
    bounds = (_pmf(counts, counts), *extrema)
    return DerivativeBounds(*(bound[inverse].to(y) for bound in bounds))


def _pmf(count: Tensor, rate: Tensor) -> Tensor:
    return (torch.xlogy(count, rate) - rate - torch.lgamma(count + 1)).exp()


def _cubic_roots(p: Tensor, q: Tensor) -> Tensor:
    """The three real roots (3, ...) of t^3 - p t - q = 0, where p > 0 and 27 q^2 <= 4 p^3."""
    radius = 2 * (p / 3).sqrt()
    angle = (3 * q / (p * radius)).clamp(-1, 1).arccos() / 3
    return torch.stack([radius * (angle - 2 * math.pi * k / 3).cos() for k in range(3)])
