r"""Gaussian sites: what stands for the likelihood of each observation, moved in and divided out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.defaults import LEAST_SHARE
from skgp.likelihoods import Likelihood


@dataclass(frozen=True)
class Sites:
    """Gaussian factors in f, one a row and latent function."""

    precision: Tensor  # (n, c); lambda, weights of the rows included
    shift: Tensor  # (n, c); eta, precision times location, the prior mean of f removed
    curvature: Tensor  # (n, c); -w h, which differs from lambda where h is positive

    @classmethod
    def none(cls, like: Tensor) -> "Sites":
        """Zero-precision sites."""
        zero = torch.zeros_like(like)
        return cls(zero, zero, zero)

    def towards(self, other: "Sites", rate: float) -> "Sites":
        """The part `rate` of the way from these to `other`."""
        return Sites(
            torch.lerp(self.precision, other.precision, rate),
            torch.lerp(self.shift, other.shift, rate),
            torch.lerp(self.curvature, other.curvature, rate),
        )

    def distance(self, other: "Sites") -> float:
        """From 0 to 1, of precisions of at least 0."""
        total = float((self.precision + other.precision).sum())
        return float((self.precision - other.precision).abs().sum()) / (total or 1.0)


def full_sites(
    likelihood: Likelihood,
    Y: Tensor,
    offset: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    *,
    signed: bool = False,
) -> Sites:
    """Sites of expected slope and curvature where f is N(offset + mean, var), each (n, c)."""
    f = offset + mean
    slope, bend = likelihood.expected_derivatives(Y, f, var)
    if likelihood.is_log_concave:
        precision = (-bend).clamp_min(0.0)  # rounding
    elif signed:
        precision = -bend
    else:
        precision = torch.where(bend > 0, slope / (likelihood.mode(Y) - f), -bend)
    found = precision, slope + precision * mean, -bend
    return Sites(*(v if weight is None else weight[:, None] * v for v in found))


def without_site(
    mean: Tensor, var: Tensor, slope: Tensor, precision: Tensor, least: float = LEAST_SHARE
) -> tuple[Tensor, Tensor]:
    r"""Moments of f ~ N(m, v), of which a Gaussian site is divided out: its cavity.

    Of a site of precision :math:`\lambda` whose logarithm has the slope g at m,

    .. math:: v' = \frac{v}{1 - \lambda v}, \qquad m' = m - v' g .

    At least the share `least` of the precision stays: sites may not have converged.
    """
    left = var / (1 - precision * var).clamp_min(least)
    return mean - left * slope, left
