"""What q says of f at a row had it not learned from that row."""

from torch import Tensor

from skgp.inference.markov.natural import expectations
from skgp.likelihoods import Likelihood

__all__ = ["left_out_moments"]

# What stays of the precision of f, at least: all could go where the sites have not converged.
_LEAST_SHARE = 0.01


def left_out_moments(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Moments of f at each row, the row's own site divided out.

    Where the sites have converged, that of a row is :math:`\omega = -E_q[\partial^2 \log p]`,
    :math:`\beta = E_q[\partial \log p] + \omega m`, so that

    .. math:: v' = \frac{v}{1 - \omega v}, \qquad m' = m - v' E_q[\partial \log p].

    Hyper-parameters stay those of all rows.

    Parameters
    ----------
    likelihood : Likelihood
    y : Tensor of shape (n,)
    mean, var : Tensor of shape (n,)
        Of f under q, prior mean included.
    weight : Tensor of shape (n,), optional
        One unit of weight is left out, or what there is: a weight of 2 equals the row given twice.

    Returns
    -------
    mean, var : Tensor of shape (n,)

    Notes
    -----
    Exact leave-one-out for a site at every time, given those of the others. Of inducing states it
    takes the row to tell of f and not of their projection: the same where they are dense enough.
    """
    _, slope, curvature = expectations(likelihood, y, mean, var)
    if weight is not None:
        left = weight.clamp_max(1.0)
        slope, curvature = left * slope, left * curvature
    cavity = var / (1 + curvature * var).clamp_min(_LEAST_SHARE)
    return mean - cavity * slope, cavity
