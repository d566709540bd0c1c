r"""Class densities, and how much of the latent variance they should average over.

The class probability of a latent Gaussian is :math:`E_{f \sim N(m, \kappa v)}[g(f)]`: of the mean
alone for :math:`\kappa = 0` (the "plug-in"), of the whole posterior for 1. Laplace's approximation
and mean-field ones put the variance far too high where latent functions are large, so that rows
left out mostly prefer 0, and 1 seldom; where few rows were to be had, hyper-parameters fit them too
well, and something between does best.
"""

import torch
from torch import Tensor

from skgp.learning import LABEL_SHARE, choose
from skgp.learning.defaults import FEW_ROWS_MODERATION, MODERATIONS
from skgp.likelihoods import Bernoulli

__all__ = ["choose_moderation", "class_codes", "class_log_density", "mean_scores"]

# The simplest is what is taken without data, and then what is near it.
_FROM_SIMPLEST = sorted(MODERATIONS, key=lambda factor: abs(factor - FEW_ROWS_MODERATION))


def class_codes(Y: Tensor) -> Tensor:
    """A number for the class of each row of Y (n, c) in {-1, +1}, shape (n,)."""
    return Y[:, 0] if Y.shape[1] == 1 else Y.argmax(1)


def class_log_density(
    likelihood: Bernoulli, Y: Tensor, mean: Tensor, var: Tensor | None = None
) -> Tensor:
    """Log-probability of the class of each row, shape (...), in nats.

    `Y` (..., c) in {-1, +1}: one column for two classes, else one a class, +1 at the row's; `mean`
    and `var` (..., c) of the latent functions, None taking them at their mean. Of several classes
    one-vs-rest probabilities are divided by their sum.
    """
    if Y.shape[-1] == 1:
        return _log_prob(likelihood, Y, mean, var)[..., 0]
    log_proba = _log_prob(likelihood, torch.ones_like(Y), mean, var)
    own = log_proba.gather(-1, Y.argmax(-1, keepdim=True))[..., 0]
    return own - log_proba.logsumexp(-1)


def choose_moderation(
    likelihood: Bernoulli,
    Y: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    *,
    separately: bool = False,
) -> tuple[float, dict[float, Tensor]]:
    """The factor of the latent variance by held-out data, and losses (p,) in nats of every factor.

    `Y`, `mean` and `var` (p, c) as of `class_log_density`, `weight` (p,). `separately` scores every
    column by itself: for a choice of the columns of many classes.
    """
    losses = {}
    for factor in MODERATIONS:
        scaled = factor * var if factor else None
        if separately:
            losses[factor] = -_log_prob(likelihood, Y, mean, scaled).mean(1)
        else:
            losses[factor] = -class_log_density(likelihood, Y, mean, scaled)
    ordered = [losses[factor] for factor in _FROM_SIMPLEST]
    best = choose(ordered, weight=weight, least_share=LABEL_SHARE)
    return _FROM_SIMPLEST[best], losses


def mean_scores(losses: dict[float, Tensor], weight: Tensor) -> dict[float, float]:
    """Weighted mean log densities, in nats, of losses (p,) by candidates."""
    return {key: -float(weight @ loss / weight.sum()) for key, loss in losses.items()}


def _log_prob(likelihood: Bernoulli, Y: Tensor, mean: Tensor, var: Tensor | None) -> Tensor:
    if var is None:
        return likelihood.log_prob(Y, mean)
    return likelihood.log_predictive(Y, mean, var)
