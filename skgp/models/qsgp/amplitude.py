r"""The amplitude of a classifier's kernel, and its moderation, by rows not trained on.

Hyper-parameters are learned on a subset, and more rows support a larger amplitude. The features
stay as they are while the amplitude a of the prior :math:`w \sim N(0, a I)` varies, so that
several amplitudes are fitted at once, as columns that share every pass over the features
(:func:`.newton.fit_newton`). They are judged, and so is the use of the posterior
variance (:mod:`skgp.learning.moderation`), by log densities of rows left out:

held out
    some rows have weight 0 in the fit;
leave one out
    where the Hessian is cheap, of every row at the mode, by one Newton step away from it,

    .. math:: f_{-i} \approx \hat f_i - \frac{v_i\, \ell'_i}{1 - c_i v_i}, \qquad
              V_{-i} \approx \frac{v_i}{1 - c_i v_i}, \qquad v_i = \phi_i^T H^{-1} \phi_i

    (Opper and Winther, 2000; Rad and Maleki, 2020), with :math:`\ell'_i` and :math:`-c_i` the
    derivatives of the weighted log-likelihood of row i.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.laplace import laplace_covariance
from skgp.inference.newton import fit_newton, laplace_curvature
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.posterior import ClassifierPosterior
from skgp.learning import LABEL_SHARE, choose
from skgp.learning.moderation import choose_moderation, mean_scores
from skgp.likelihoods import Bernoulli
from skgp.linalg.cholesky import jittered_cholesky
from skgp.models.qsgp.classification_results import LatentPosterior
from skgp.optim.stopping import StopRecorder

__all__ = [
    "Choice",
    "Problem",
    "by_held_out_rows",
    "by_leaving_one_out",
    "leave_one_out_moments",
    "some_columns",
]

#: Amplitudes tried, as multiples of the one learned on the subset.
FACTORS = (0.25, 1.0, 4.0, 16.0, 64.0)
#: Columns of a problem of many classes that take part in the choice of the amplitude.
MAX_COLUMNS = 3


@dataclass(frozen=True)
class Problem:
    """What is fitted: features, labels and weights of the rows.

    Attributes
    ----------
    design : StreamedDesign
    Y : Tensor of shape (n, c)
        In {-1, +1}.
    X : Tensor of shape (n, d)
        The rows of `design`, in float64.
    likelihood : Bernoulli
    offset : Tensor of shape (c,)
    weight : Tensor of shape (n,)
    """

    design: StreamedDesign
    X: Tensor
    Y: Tensor
    likelihood: Bernoulli
    offset: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Choice:
    """An amplitude, and the part of the posterior variance that predictions should average over.

    Attributes
    ----------
    prior_variance : float
    moderation : float
    amplitude_scores : dict of float to float
        Mean log density of the rows left out, in nats, for each amplitude tried.
    moderation_scores : dict of float to float
        The same at the amplitude chosen for each factor of the variance.
    weights : Tensor of shape (m, c) or None
        The mode at that amplitude, to start from.
    """

    prior_variance: float
    moderation: float
    amplitude_scores: dict[float, float]
    moderation_scores: dict[float, float]
    weights: Tensor | None = None


def by_held_out_rows(
    problem: Problem,
    held_out: Tensor,
    factors: tuple[float, ...] = FACTORS,
    *,
    covariance: str,
    n_dense_columns: int,
    kernel=None,
    generator: torch.Generator,
    callback=None,
) -> Choice:
    """Choose by rows that the fits give no weight.

    Parameters
    ----------
    problem : Problem
    held_out : Tensor of shape (p,)
        Indices of rows.
    factors : tuple of float
        Amplitudes to try.
    covariance, n_dense_columns
        As `laplace_covariance` takes them.
    kernel : sklearn kernel expression, optional
        Of inducing points that are augmented at the rows predicted.
    generator : torch.Generator
    callback : callable, optional

    Returns
    -------
    Choice

    Notes
    -----
    One fit of ``len(factors)`` times the columns, and one `laplace_covariance`.
    """
    columns = some_columns(problem.Y)
    training = problem.weight.clone()
    training[held_out] = 0.0
    k = len(columns)
    amplitudes = torch.tensor(factors, dtype=torch.float64).repeat_interleave(k)
    fit = fit_newton(
        problem.design,
        problem.Y[:, columns].repeat(1, len(factors)),
        problem.likelihood,
        offset=problem.offset[columns].repeat(len(factors)),
        prior_variance=amplitudes,
        row_weight=training,
        loss_tol=1e-4,
        generator=generator,
        callback=callback,
    )
    Y, weight = problem.Y[held_out][:, columns], problem.weight[held_out]
    latent = fit.latent[held_out].unflatten(1, (len(factors), k))
    densities = problem.likelihood.log_prob(Y[:, None].expand_as(latent), latent).mean(2)
    losses = dict(zip(factors, (-densities).unbind(1), strict=True))
    amplitude = _choose_amplitude(losses, weight)
    best = factors.index(amplitude)
    chosen = slice(best * k, (best + 1) * k)
    mean, variance = _held_out_moments(
        problem,
        columns,
        held_out,
        (fit.weights[:, chosen], fit.latent[:, chosen], training),
        amplitude,
        covariance,
        n_dense_columns,
        kernel,
    )
    whole = k == problem.Y.shape[1]
    moderation, moderated = choose_moderation(
        problem.likelihood, Y, mean, variance, weight, separately=not whole
    )
    return Choice(
        amplitude,
        moderation,
        mean_scores(losses, weight),
        mean_scores(moderated, weight),
        fit.weights[:, chosen] if whole else None,
    )


def _choose_amplitude(losses: dict[float, Tensor], weight: Tensor) -> float:
    """The amplitude nearest to 1 that predicts no worse than the best, by losses (p,) of each."""
    ordered = sorted(losses, key=lambda a: abs(math.log(a)))
    tried = [losses[a] for a in ordered]
    return ordered[choose(tried, weight=weight, least_share=LABEL_SHARE)]


def _held_out_moments(
    problem: Problem,
    columns: Tensor,
    held_out: Tensor,
    mode: tuple[Tensor, Tensor, Tensor],
    amplitude: float,
    covariance: str,
    n_dense_columns: int,
    kernel,
) -> tuple[Tensor, Tensor]:
    """Moments of the latent functions at the rows held out, each of shape (p, k)."""
    weights, latent, training = mode
    Y = problem.Y[:, columns]
    curvature = laplace_curvature(problem.likelihood, Y, latent, training[:, None].expand_as(Y))
    q = laplace_covariance(
        problem.design,
        curvature,
        prior_variance=amplitude,
        kind=covariance,
        n_dense_columns=n_dense_columns,
    )
    posterior = ClassifierPosterior(problem.design.basis, weights, problem.offset[columns], q)
    latent_posterior = LatentPosterior(posterior, 0.0 if kernel is None else amplitude)
    return latent_posterior.mean_and_variance(problem.X[held_out])


def by_leaving_one_out(
    problem: Problem,
    factors: tuple[float, ...] = FACTORS,
    *,
    generator: torch.Generator,
    callback: StopRecorder,
) -> Choice:
    """Choose by the approximate leave-one-out log density of every row.

    Parameters
    ----------
    problem : Problem
    factors : tuple of float
        Amplitudes to try; one alone leaves the moderation to be chosen.
    generator : torch.Generator
    callback : StopRecorder
        True leaves the amplitudes that have not been tried.

    Returns
    -------
    Choice

    Notes
    -----
    ``O(c n m^2)`` for each amplitude.
    """
    found: dict[float, tuple[float, dict[float, Tensor], Tensor]] = {}
    weight = problem.weight
    start = None
    for a in factors:
        fit = fit_newton(
            problem.design,
            problem.Y,
            problem.likelihood,
            offset=problem.offset,
            prior_variance=a,
            row_weight=problem.weight,
            start=start,
            generator=generator,
            callback=callback,
        )
        start = fit.weights
        mean, variance = leave_one_out_moments(problem, fit.latent, a)
        choice = choose_moderation(problem.likelihood, problem.Y, mean, variance, weight)
        found[a] = *choice, fit.weights
        if callback.stopped:
            break
    losses = {a: losses[moderation] for a, (moderation, losses, _) in found.items()}
    best = _choose_amplitude(losses, weight)
    moderation, moderated, weights = found[best]
    return Choice(
        best, moderation, mean_scores(losses, weight), mean_scores(moderated, weight), weights
    )


def leave_one_out_moments(
    problem: Problem, latent: Tensor, prior_variance: float
) -> tuple[Tensor, Tensor]:
    """Approximate moments of f at each row without that row, each of shape (n, c).

    Parameters
    ----------
    problem : Problem
    latent : Tensor of shape (n, c)
        At the mode.
    prior_variance : float
    """
    Y, weight = problem.Y, problem.weight[:, None].expand_as(problem.Y)
    slope = weight * problem.likelihood.derivatives(Y, latent)[0]
    curvature = laplace_curvature(problem.likelihood, Y, latent, weight)
    blocks = range(problem.design.basis.n_blocks)
    Phi = problem.design.columns(blocks).double()
    variance = torch.empty_like(latent)
    for j in range(Y.shape[1]):
        H = problem.design.curvature_gram(curvature[:, [j]])[0]
        H.diagonal().add_(1 / prior_variance)
        L = jittered_cholesky(H).factor
        variance[:, j] = torch.linalg.solve_triangular(L, Phi.mT, upper=False).square().sum(0)
    # c_i v_i < 1 but for rounding: it is the share of row i in its own fit.
    left = (1 - curvature * variance).clamp_min(1e-6)
    return latent - variance * slope / left, variance / left


def some_columns(Y: Tensor) -> Tensor:
    """Indices of all columns, or of a few whose base rates are spread over all of them."""
    c = Y.shape[1]
    if c <= MAX_COLUMNS:
        return torch.arange(c)
    order = Y.mean(0).argsort(stable=True)
    return order[torch.linspace(0, c - 1, MAX_COLUMNS + 2).round().long()[1:-1]].unique()
