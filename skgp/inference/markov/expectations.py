"""What the likelihood says of each row, expected under the marginals of f."""

from collections.abc import Callable

import torch
from torch import Tensor

from skgp.inference.defaults import LEAST_SHARE, SITES_TILE
from skgp.likelihoods import Likelihood


def expectations(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected log-density of each row under N(mean, var), and expected derivatives in f; (n,)."""
    if len(y) <= SITES_TILE:
        return likelihood.expected_log_prob_and_derivatives(y, mean, var)

    def tile(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = likelihood.rows(rows)
        return part.expected_log_prob_and_derivatives(y[rows], mean[rows], var[rows])

    tiles = (slice(start, start + SITES_TILE) for start in range(0, len(y), SITES_TILE))
    expected, slope, curvature = zip(*map(tile, tiles), strict=True)
    return torch.cat(expected), torch.cat(slope), torch.cat(curvature)


def likelihood_gradient(
    likelihood: Likelihood,
    parameters: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    weighted: Callable[[Tensor], Tensor],
    log_exposure: Tensor | None,
) -> Tensor:
    """Gradient of the expected log-density in the parameters (p,) of the likelihood.

    `rows` are targets, means and variances of f, (n,) each, as `log_exposure` of counts; `weighted`
    maps values of the rows (n,) to values that add up to their weighted sum.
    """
    if not parameters.numel():
        return parameters
    leaf = parameters.detach().requires_grad_()
    with torch.enable_grad():
        expected = likelihood.with_parameters(leaf).at(log_exposure).expected_log_prob(*rows)
        return torch.autograd.grad(weighted(expected).sum(), leaf)[0]


def left_out_moments(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Moments of f at each row, the row's own site divided out.

    Where the sites have converged, that of a row is :math:`\omega = -E_q[\partial^2 \log p]`,
    :math:`\beta = E_q[\partial \log p] + \omega m`, so that

    .. math:: v' = \frac{v}{1 - \omega v}, \qquad m' = m - v' E_q[\partial \log p].

    Exact leave-one-out for a site at every time, given those of the others and the
    hyper-parameters. Of inducing states it takes the row to tell of f and not of their projection:
    the same where they are dense enough.

    `mean` and `var` (n,) are those of f under q, prior mean included. Of a `weight` (n,) one unit
    is left out, or what there is: a weight of 2 equals the row given twice.
    """
    _, slope, curvature = expectations(likelihood, y, mean, var)
    if weight is not None:
        left = weight.clamp_max(1.0)
        slope, curvature = left * slope, left * curvature
    cavity = var / (1 + curvature * var).clamp_min(LEAST_SHARE)
    return mean - cavity * slope, cavity
