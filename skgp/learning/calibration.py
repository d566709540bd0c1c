r"""Class-probability calibration: moderation, and the coupling of one-vs-rest probabilities.

Moderation (MacKay, 1992): the class probability of a latent Gaussian is
:math:`E_{f \sim N(m, \kappa v)}[g(f)]`, of the mean alone for :math:`\kappa = 0` (the "plug-in"),
of the whole posterior for 1. Laplace's approximation and mean-field ones put the variance far too
high where latent functions are large, so that held-out data mostly prefer 0, and 1 seldom; where
there were few of them, hyper-parameters fit them too well, and something between does best.

Where nearly all of n labels left out are predicted right, the surest probabilities look best, by
many small gains whose standard error is as small: the wrong label that costs more than all of them
has not come yet. The choice expects one. In addition to the labels left out one is wrong, at input
i with probability proportional to :math:`1 - P(y_i)` under the whole variance, as in the rule of
succession.

Coupling: each class k is set against the rest by a latent function of its own, of probability
:math:`p_k = E[g(f_k)]`. Together they give

.. math:: P(y = k) \propto p_k (1 - p_k)^{-\lambda}.

With :math:`\lambda = 1` this is the probability that k alone claims the observation, given that
exactly one class does, were the claims independent. With :math:`\lambda = 0` the claims are divided
by their sum. Which is right depends on the data: independent claims sharpen each other, as they
should where many classes lie apart, and too much where classes overlap, as there they err together.
Held-out data tell, or each observation left out in turn (`left_out_moments`).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data, replicates
from skgp.inference.defaults import LEAST_SHARE
from skgp.inference.sites import without_site
from skgp.inference.sparse import SparsePosterior, whitened_features
from skgp.learning.defaults import (
    COUPLING_BETA,
    COUPLINGS,
    FEW_ROWS,
    FEW_ROWS_COUPLING,
    FEW_ROWS_MODERATION,
    LABEL_SHARE,
    MODERATIONS,
)
from skgp.learning.selection import choose_towards
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Bernoulli, Likelihood

_LOG_ZERO = -1e300  # mathematical: what stands for log(0)


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
    weight: Tensor | None = None,
    *,
    separately: bool = False,
    n_errors: float = 1.0,
) -> tuple[float, dict[float, Tensor]]:
    """The factor of the latent variance by held-out data, and losses (p,) in nats of every factor.

    `Y`, `mean` and `var` (p, c) as of `class_log_density`, `weight` (p,). `separately` scores every
    column by itself: for a choice of the columns of many classes. Other factors than the simplest
    have to be better by `n_errors` standard errors, one wrong label more expected.
    """

    def density(Y: Tensor, mean: Tensor, var: Tensor | None) -> Tensor:
        if separately:
            return _log_prob(likelihood, Y, mean, var).mean(-1)
        return class_log_density(likelihood, Y, mean, var)

    # All factors but 0, the mean alone, at once: of few rows a call costs more than its rows.
    none, *factors = MODERATIONS
    scaled = torch.stack([factor * var for factor in factors])
    found = density(Y.expand_as(scaled), mean.expand_as(scaled), scaled)
    losses = {none: -density(Y, mean, None), **dict(zip(factors, -found, strict=True))}
    options: dict[str, Any] = {"least_share": LABEL_SHARE, "n_errors": n_errors, "weight": weight}
    return choose_towards(_with_an_error(losses, weight), FEW_ROWS_MODERATION, **options), losses


def _with_an_error(losses: dict[float, Tensor], weight: Tensor | None) -> dict[float, Tensor]:
    """Losses (p,) in nats by moderation, with those of one wrong label of mean weight.

    It is at each row with a probability proportional to that of being wrong by the whole variance.
    """
    wrong = (-torch.expm1(-losses[MODERATIONS[-1]])).nan_to_num(0.0)
    mean = wrong.mean() if weight is None else weight @ wrong / weight.sum()
    tiny = torch.finfo(wrong.dtype).tiny
    share = wrong / (len(wrong) * mean.clamp_min(tiny))
    return {
        factor: loss - share * torch.log(-torch.expm1(-loss.clamp_min(tiny)))
        for factor, loss in losses.items()
    }


def mean_scores(losses: dict[float, Tensor], weight: Tensor) -> dict[float, float]:
    """Weighted mean log densities, in nats, of losses (p,) by candidates."""
    return {key: -float(weight @ loss / weight.sum()) for key, loss in losses.items()}


def _log_prob(likelihood: Bernoulli, Y: Tensor, mean: Tensor, var: Tensor | None) -> Tensor:
    if var is None:
        return likelihood.log_prob(Y, mean)
    return likelihood.log_predictive(Y, mean, var)


# ---- coupling


def without_own(
    X: Tensor,
    latent: Tensor,
    variance: Tensor,
    slope: Tensor,
    curvature: Tensor,
    *,
    least: float = 1e-6,  # share of the precision that stays: at a mode, all but for rounding
) -> tuple[Tensor, Tensor]:
    r"""Moments of f at each input X (n, d) without the observations there, from those with them.

    All (n, c): mean and variance of f, and the slope in f and minus the curvature of the weighted
    log-likelihood of each row; those of equal inputs are added up here and divided out as one site.
    One label of two at an input would be predicted by the other alone.
    """
    unit = torch.from_numpy(replicates(X.cpu().numpy())).to(latent.device)
    slope, curvature = (
        torch.zeros_like(part).index_add_(0, unit, part)[unit] for part in (slope, curvature)
    )
    return without_site(latent, variance, slope, curvature, least)


def left_out_moments(
    posterior: SparsePosterior, data: Data, objective: Objective, likelihood: Likelihood
) -> tuple[Tensor, Tensor]:
    r"""Moments of f at each row, as if q(u) had not learned from any of equal input.

    At the optimum of :math:`\sum_i w_i \ell_i + \beta \mathrm{KL}`, q(u) is the prior times one
    Gaussian in :math:`\phi_i^T u` a row, of slope :math:`-w_i \partial_m \ell_i / \beta` and
    precision :math:`2 w_i \partial_v \ell_i / \beta`, which is divided out of that variable.

    Hyper-parameters and inducing points stay those of all observations; one of weight w is left out
    as a whole. Both moments are (n, c), float64, on the CPU; O(c n M^2).
    """
    rows = data.to("cpu", torch.float64)
    mean, var = posterior.mean_and_variance(rows.X)
    features, _ = whitened_features(posterior.kernel, rows.X, posterior.Z, posterior.factor)
    learned = (posterior.root.mT @ features).square().sum(1).mT
    with torch.enable_grad():
        moments = mean.detach().requires_grad_(), var.detach().requires_grad_()
        loss = replace(objective, gradient="exact").data_loss(likelihood, rows, *moments)
        by_mean, by_var = torch.autograd.grad(loss / max(objective.beta, COUPLING_BETA), moments)
    mean, left = without_own(rows.X, mean, learned, -by_mean, 2 * by_var, least=LEAST_SHARE)
    return mean, var - learned + left


def best_coupling(
    likelihood: Bernoulli, Y: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None
) -> float:
    """The exponent of `COUPLINGS` that predicts left-out labels best, of equals nearest to 1/2.

    None is simpler than others, so that a gain need not exceed its standard error.

    `Y` (n, c) is +1 in the column of the class, else -1, c > 2; `mean` and `var` (n, c).
    """
    return _best_coupling(likelihood, Y, mean, var, weight)[0]


def best_calibration(
    likelihood: Bernoulli,
    Y: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    *,
    simplest: float = 1.0,
) -> tuple[float, float]:
    """Moderation and exponent of the coupling that predict left-out labels no worse than any.

    Of moderations, each with its `best_coupling`, the nearest to the simplest of equals. Shapes as
    of `best_coupling`; one column is two classes, whose exponent is 0. Fewer than `FEW_ROWS` labels
    of two classes choose none: of 150 digits, even or odd, in six orders they gained .005 nats in
    the mean, and lost .05 once.
    """
    if len(Y) < FEW_ROWS and Y.shape[1] == 1:
        return simplest, 0.0
    found = {
        factor: _best_coupling(likelihood, Y, mean, factor * var, weight) for factor in MODERATIONS
    }
    losses = _with_an_error({factor: losses for factor, (_, losses) in found.items()}, weight)
    best = choose_towards(losses, simplest, weight=weight, least_share=LABEL_SHARE)
    return best, found[best][0]


def _best_coupling(
    likelihood: Bernoulli, Y: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None
) -> tuple[float, Tensor]:
    """The exponent, and the losses (n,) of the labels with it."""
    if Y.shape[1] == 1:
        return 0.0, -likelihood.log_predictive(Y, mean, var)[:, 0]
    claims, own = _claims(likelihood, mean, var), Y.argmax(1, keepdim=True)
    losses = {each: -_coupled(*claims, each).gather(1, own)[:, 0] for each in COUPLINGS}
    options: dict[str, Any] = {"least_share": LABEL_SHARE, "n_errors": 0.0, "weight": weight}
    best = choose_towards(losses, FEW_ROWS_COUPLING, **options)
    return best, losses[best]


def coupled_log_probabilities(
    likelihood: Bernoulli, mean: Tensor, var: Tensor, coupling: float
) -> Tensor:
    """Log-probability of each class, shape (n, c), from latent moments (n, c)."""
    return _coupled(*_claims(likelihood, mean, var), coupling)


def _coupled(claimed: Tensor, refused: Tensor, coupling: float) -> Tensor:
    return (claimed - coupling * refused).log_softmax(1)


def _claims(likelihood: Bernoulli, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Logs of p_k and of 1 - p_k, shapes (n, c)."""
    ones, zero = torch.ones_like(mean), max(_LOG_ZERO, 0.1 * torch.finfo(mean.dtype).min)
    claimed, refused = (
        likelihood.log_predictive(sign * ones, mean, var).clamp_min(zero) for sign in (1, -1)
    )
    return claimed, refused
