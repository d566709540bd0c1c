r"""Vecchia-Laplace approximations: labels and other observations beside Gaussian ones.

The prior of f is a Vecchia approximation with global inducing points or without, its posterior a
Gaussian about the mode, and what was a Cholesky factor is iterative [1]_, [2]_.

=====================================  ======================================================
paper                                  here
=====================================  ======================================================
[1]_ (m = 0)
B, D of Sigma^-1 = B' D^-1 B           I - B, D of `skgp.inference.vecchia.conditionals`
mode, Newton's method, (5)             `skgp.inference.vecchia.laplace.find_mode`
CG for (W + Sigma^-1) u = r, (8)       (I + R' W R): :mod:`skgp.inference.vecchia.hessian`
VADU preconditioner, section 3.2.1     P there
SLQ, (10), stochastic trace, (12)      `SparseHessian.pairs`, `EvidenceTerms`
predictive variances by simulation     `SparseHessian.spread`, draws in place of Algorithm 2
[2]_
VIF-Laplace, VIFDU preconditioner      the same with E and M
FITC preconditioner                    `skgp.inference.vecchia.hessian.InducingHessian`
=====================================  ======================================================

`fit_vecchia_classifier` takes these steps:

1. *Order* of the observations, as in :mod:`skgp.models.vecchia`.
2. *Hyper-parameters* by Laplace's evidence (:mod:`skgp.learning.vecchia_laplace`), of many labels
   by held-out ones, too, as is the number of inducing points (:mod:`skgp.learning.vecchia_labels`).
3. *Inducing points and neighbours* as the kernel found sees them.
4. *Mode* of all observations, and the posterior covariance there: of few exact, else of draws.
5. *Moderation and coupling* of the probabilities by observations left out one at a time, whose
   moments follow from mode and covariance; of many observations by some of them.

`fit_vecchia_numbers`, of counts, heavy-tailed noise and other likelihoods of a number, takes the
first four; in step 2 the likelihood's own parameters move too.

Deviations
----------
- Everything is in coordinates in which the prior is standard normal: of the same iterates, but
  with residuals in the norm of that prior.
- The control variate of the trace is of draws from the prior, weighted by row.
- Several classes are one against the rest, over one kernel.
- Negative curvatures of likelihoods that are not log-concave count as 0 in determinant and
  covariance, where they are neither the expected curvature (Fisher's) nor the curvature as it is.

References
----------
.. [1] Kuendig and Sigrist (2024), Iterative methods for Vecchia-Laplace approximations for latent
   Gaussian process models.
.. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
   Gaussian processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.vecchia.hessian import DenseHessian
from skgp.inference.vecchia.laplace import LatentMode
from skgp.inference.vecchia.latent_posterior import LatentPosterior
from skgp.inference.vecchia.neighbors import order_of
from skgp.kernels.expression import split_noise
from skgp.learning.calibration import best_coupling, choose_moderation
from skgp.learning.classification_hyperparameters import stratified_order
from skgp.learning.defaults import LEAST_PRECISION, VECCHIA_INDUCING, VECCHIA_LEFT_OUT
from skgp.learning.search import HyperparameterFit
from skgp.learning.vecchia import VecchiaSettings, choose_inducing, neighbors_of
from skgp.learning.vecchia_labels import fit_labels, inducing_by_default
from skgp.learning.vecchia_laplace import LatentEvidence, fit_latent_numbers
from skgp.linalg.runtime import Callback


@dataclass(frozen=True)
class VecchiaLaplaceFit:
    """A fitted model."""

    posterior: LatentPosterior
    kernel: Any
    log_marginal_likelihood: float  # Laplace's, of all observations and columns, in nats
    parameters: Tensor  # (p,); logarithms of the likelihood's own
    moderation: float = 1.0  # factor of the variance that probabilities average over
    coupling: float = 0.0  # of one-vs-rest probabilities; 0 of two classes
    n_iter: int = 1  # evaluations of objectives of the search
    history: list[float] = field(default_factory=list)  # log evidence an observation
    solve: list[float] = field(default_factory=list)  # minus the log joint density, by Newton step


def fit_vecchia_classifier(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    likelihood: Any,
    offset: Tensor,
    *,
    ordering: str = "random",
    n_predictive: int,
    learns: bool = True,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> VecchiaLaplaceFit:
    """Fit one kernel, or the best of several, to labels.

    Parameters
    ----------
    kernels : list of sklearn kernel expressions without WhiteKernels
    data : Data
        float64; y (n, c) of labels -1 and +1, one column a one-vs-rest problem.
    settings : VecchiaSettings
    likelihood : skgp.likelihoods.Bernoulli
    offset : Tensor of shape (c,)
        Prior means of f.
    ordering : {"random", "maximin"}
    n_predictive : int
        Neighbours of a prediction.
    learns : bool
        Whether hyper-parameters move; if not, those of the first kernel hold.
    generator : torch.Generator
        On the CPU.
    callback : callable, optional
        Of :func:`skgp.learning.vecchia_labels.fit_labels`.
    """
    kernel: Any = kernels[0]
    history, start, n_inducing = list[float](), None, inducing_by_default(settings, *data.y.shape)
    data = data.take(order_of(data.X, ordering, generator))  # step 1
    if learns:  # step 2
        found, n_inducing, start = fit_labels(
            kernels, data, settings, likelihood, offset, generator=generator, callback=callback
        )
        kernel, history = found.kernel, found.history
    settings = replace(settings, n_inducing=n_inducing)
    fit, problem, mode = _at_mode(  # steps 3 and 4
        kernel, data, settings, likelihood, offset, n_predictive, generator, start=start
    )
    moderation, coupling = calibrated(problem, mode, kernel, generator)  # step 5
    return replace(
        fit,
        moderation=moderation,
        coupling=coupling,
        n_iter=max(1, len(history)),
        history=history,
    )


def fit_vecchia_numbers(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    likelihood: Any,
    offset: Tensor,
    *,
    ordering: str = "random",
    n_predictive: int,
    learns: bool = True,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> VecchiaLaplaceFit:
    """Fit one kernel, or the best of several, and the likelihood's own parameters, to numbers.

    Parameters are those of `fit_vecchia_classifier`, but for `kernels`, which have WhiteKernels of
    the noise to begin with; `data`, of y (n, 1); and `likelihood`, of a number.
    """
    data = data.take(order_of(data.X, ordering, generator))  # step 1
    found = HyperparameterFit(split_noise(kernels[0])[0])
    parameters = likelihood.initial(data.X)
    if learns:  # step 2
        found, parameters = fit_latent_numbers(
            kernels, data, settings, likelihood, offset, generator=generator, callback=callback
        )
    fit, *_ = _at_mode(  # steps 3 and 4
        found.kernel,
        data,
        settings,
        likelihood,
        offset,
        n_predictive,
        generator,
        parameters,
    )
    return replace(fit, n_iter=max(1, len(found.history)), history=found.history)


def _at_mode(
    kernel,
    data: Data,
    settings: VecchiaSettings,
    likelihood: Any,
    offset: Tensor,
    n_predictive: int,
    generator: torch.Generator,
    parameters: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[VecchiaLaplaceFit, LatentEvidence, LatentMode]:
    """Inducing points, neighbours, mode and posterior of given hyper-parameters.

    From f (n, c) near the mode, if there is one. The first `VECCHIA_INDUCING` of more inducing
    points, which leave less and less variance, choose the neighbours.
    """
    Z = choose_inducing(kernel, data.X, settings.n_inducing or 0, generator)
    index = neighbors_of(kernel, data.X, settings.n_neighbors, Z[:VECCHIA_INDUCING])
    problem = LatentEvidence(kernel, data, index, Z, likelihood, offset, generator, start)
    parameters = likelihood.initial(data.X) if parameters is None else parameters
    solve: list[float] = []
    mode = problem.mode(
        problem.conditionals(kernel.theta),
        lambda step, info: solve.append(info["loss"]),
        parameters,
    )
    density = -mode.loss - 0.5 * mode.hessian.log_det(problem.probes(mode.root))
    posterior = problem.posterior(mode, kernel, n_predictive)
    solve = solve or [float(mode.loss.sum())]
    fit = VecchiaLaplaceFit(posterior, kernel, float(density.sum()), parameters, solve=solve)
    return fit, problem, mode


@torch.no_grad()
def calibrated(
    problem: LatentEvidence, mode: LatentMode, kernel, generator: torch.Generator
) -> tuple[float, float]:
    """Moderation and coupling by the labels of up to `VECCHIA_LEFT_OUT` points, each left out.

    Of more points and columns some stand for all, with a mode and an exact covariance of their own.
    """
    c = mode.weights.shape[1]
    n_rows = int(VECCHIA_LEFT_OUT / c**0.5)
    if len(problem.data) > n_rows:
        order = stratified_order(problem.data.y, generator)[:n_rows].sort().values
        some = problem.some(kernel, order)
        mode = some.mode(some.conditionals(kernel.theta))
    mean, var = left_out(mode)
    rows, likelihood = mode.problem, mode.likelihood
    weight = rows.row_weight[:, 0]
    moderation = choose_moderation(likelihood, rows.Y, mean, var, weight)[0]
    if c == 1:
        return moderation, 0.0
    return moderation, best_coupling(likelihood, rows.Y, mean, moderation * var, weight)


@torch.no_grad()
def left_out(mode: LatentMode) -> tuple[Tensor, Tensor]:
    r"""Moments (n, c) of f at each point without its own observation.

    Without the site of slope g and curvature W, f of posterior variance C has the variance
    :math:`v = C / (1 - C W)` and the mean :math:`\hat f - v g`.
    """
    root, (N, c) = mode.root, mode.weights.shape
    spread = DenseHessian(root, mode.curvature).spread()
    C = root.matmul(spread.reshape(N, -1)).reshape(root.n_rows, c, -1).square().sum(2)
    var = C / (1 - C * mode.curvature).clamp_min(LEAST_PRECISION)
    return mode.latent - var * mode.problem.slope(mode.latent), var
