r"""Vecchia approximations with global inducing points: from a kernel and observations to f.

The joint density of n observations as a product of the densities of each given a few of those
before it [1]_, of a process whose large scales are taken out by m inducing points first [2]_
(VIF). A joint density: it compares kernels, numbers of neighbours and of inducing points by the
likelihood of all observations, and knows of ranges far beyond the neighbours. With labels, counts
and heavy-tailed noise the product is the prior of f, its posterior a Gaussian about the mode
(Laplace), and what was a Cholesky factor is iterative [2]_, [5]_.

=====================================  ======================================================
paper                                  here
=====================================  ======================================================
[1]_, [3]_ (m = 0)
y_i given y_c(i)                       b_i, D_i of `skgp.inference.vecchia.conditionals`
ordering, conditioning sets            :mod:`skgp.inference.vecchia.neighbors`; ``ordering``, H
U of Sigma^-1 = U U'                   (I - B)' D^-1/2
response or latent vectors             observations, noise among the variances D
[2]_
m inducing points, Sigma_m, Sigma_mn   Z, K_mm = L L', Phi = K_nm L^-T
Vecchia for Sigma - Sigma_mn' ..       B, D of S = K - Phi Phi' + noise
correlation-based neighbours           `earlier_neighbors`, by conditional variances [4]_
Sigma_vif, marginal likelihood, (5)    :mod:`skgp.inference.vecchia.posterior`; M there is P
gradients, appendix                    `Conditionals.gradient`, `Sums.cotangents`
predictions, proposition 2.1           :mod:`skgp.inference.vecchia.posterior`
VIF-Laplace, VIFDU preconditioner      as of [5]_, with E and M
FITC preconditioner                    `skgp.inference.vecchia.hessian.InducingHessian`
[5]_ (m = 0)
B, D of Sigma^-1 = B' D^-1 B           I - B, D of `skgp.inference.vecchia.conditionals`
mode, Newton's method, (5)             `skgp.inference.vecchia.laplace.find_mode`
CG for (W + Sigma^-1) u = r, (8)       (I + R' W R): :mod:`skgp.inference.vecchia.hessian`
VADU preconditioner, section 3.2.1     P there
SLQ, (10), stochastic trace, (12)      `SparseHessian.pairs`, `EvidenceTerms`
predictive variances by simulation     `SparseHessian.spread`, draws in place of Algorithm 2
=====================================  ======================================================

The steps of a fit:

1. *Order.* Observations in random order, or in one that spreads every prefix evenly; with Gaussian
   noise those whose noise leaves them little information come last (`informative`).
2. *Hyper-parameters* by the joint likelihood (:mod:`skgp.learning.vecchia`), on some of many rows;
   without Gaussian noise by Laplace's evidence (:mod:`skgp.learning.vecchia_laplace`), in which
   parameters of the likelihood move too; of many labels also by held-out ones, as the number of
   inducing points (:mod:`skgp.learning.vecchia_labels`).
3. *Inducing points and neighbours* as the kernel found sees them; none of the former where
   observations are likelier so (`approximation`).
4. *Sums* over all observations: the log marginal likelihood and the posterior of u. Or the *mode*,
   and the posterior covariance there: of few observations exact, else of draws.
5. Of labels, *moderation and coupling* of the probabilities by observations left out one at a time,
   whose moments follow from mode and covariance; of many observations by some of them, or by those
   held out in step 2 where these are more.

Deviations
----------
- Of three times as many nearest by scaled distance those are neighbours that, one by one, leave the
  least conditional variance [4]_. [2]_ takes the nearest in a cover tree of correlations: points
  that tell the same are taken all the same.
- Inducing points minimise the prior variance that is left, greedily, in place of k-means++.
- Predictions condition on observations alone, as the default of [2]_ does, and neighbours fade with
  their distance: they are continuous in x, and of two rows jointly the same whatever rows come
  along.
- About a mode everything is in coordinates in which the prior is standard normal: of the same
  iterates, but with residuals in the norm of that prior. The control variate of the trace is of
  draws from the prior, weighted by row.
- Several classes are one against the rest, over one kernel.
- Negative curvatures of likelihoods that are not log-concave count as 0 in determinant and
  covariance, where they are neither the expected curvature (Fisher's) nor the curvature as it is.

References
----------
.. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes,
   Journal of the Royal Statistical Society B 50.
.. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
   Gaussian processes.
.. [3] Katzfuss and Guinness (2021), A general framework for Vecchia approximations of Gaussian
   processes, Statistical Science 36.
.. [4] Huan, Guinness, Katzfuss, Owhadi and Schaefer (2023), Sparse inverse Cholesky factorization
   of dense kernel matrices by greedy conditional selection.
.. [5] Kuendig and Sigrist (2024), Iterative methods for Vecchia-Laplace approximations for latent
   Gaussian process models.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.vecchia.hessian import DenseHessian
from skgp.inference.vecchia.laplace import LatentMode
from skgp.inference.vecchia.neighbors import order_of
from skgp.kernels.expression import split_noise, theta_places
from skgp.learning.calibration import best_calibration, choose_moderation, without_own
from skgp.learning.classification_hyperparameters import stratified_order
from skgp.learning.defaults import (
    FEW_ROWS_MODERATION,
    VECCHIA_INDUCING,
    VECCHIA_LEFT_OUT,
)
from skgp.learning.search import HyperparameterFit
from skgp.learning.vecchia import (
    VecchiaSettings,
    approximation,
    choose_inducing,
    fit_joint_likelihood,
    neighbors_of,
    ordered,
)
from skgp.learning.vecchia_labels import LabelFit, fit_labels, inducing_by_default
from skgp.learning.vecchia_laplace import LatentEvidence, fit_latent_numbers
from skgp.linalg.runtime import Callback


@dataclass(frozen=True)
class VecchiaFit:
    """A fitted model."""

    posterior: Any  # `VecchiaPosterior`, or `LatentPosterior` without Gaussian noise
    kernel: Any  # Gaussian noise included
    log_marginal_likelihood: float  # of all observations and columns, in nats; or Laplace's
    noise: float = 0.0  # Gaussian: variance of an observation of weight 1
    parameters: Tensor | None = None  # (p,); logarithms of the likelihood's own
    moderation: float = 1.0  # factor of the variance that probabilities average over
    coupling: float = 0.0  # of one-vs-rest probabilities; 0 of two classes
    history: list[float] = field(default_factory=list)  # log-density an observation, by evaluation
    solve: list[float] = field(default_factory=list)  # minus the log joint density, by Newton step

    @property
    def n_iter(self) -> int:
        """Evaluations of objectives of the search."""
        return max(1, len(self.history))


def fit_vecchia(
    kernels: list,  # sklearn expressions with WhiteKernels; the best of several is taken
    data: Data,  # float64, inputs distinct; y (n,) or (n, c), of about zero mean and unit variance
    settings: VecchiaSettings,
    *,
    ordering: str = "random",  # or "maximin"
    n_predictive: int,  # neighbours of a prediction
    learns: bool = True,  # whether hyper-parameters move; if not, those of the first kernel hold
    generator: torch.Generator,  # on the CPU
    callback: Callback | None = None,  # of the search
) -> VecchiaFit:
    """Fit to observations with Gaussian noise; columns of y share the kernel."""
    kernel, history = kernels[0], []
    data = ordered(kernel, data, ordering, generator)  # step 1
    if learns:  # step 2
        found = fit_joint_likelihood(
            kernels, data, settings, generator=generator, callback=callback
        )
        kernel, history = found.kernel, found.history
    evidence = approximation(kernel, data, settings, generator)  # step 3
    if evidence.group.shape[1] == 1:  # nothing is left to neighbours
        n_predictive = 1
    posterior, density = evidence.posterior(kernel.theta, n_predictive)  # step 4
    level = theta_places(kernel)[2]
    return VecchiaFit(posterior, kernel, density, level, history=history)


def fit_vecchia_classifier(
    kernels: list,  # without WhiteKernels
    data: Data,  # float64; y (n, c) of labels -1 and +1, one column a one-vs-rest problem
    settings: VecchiaSettings,
    likelihood: Any,  # a Bernoulli
    offset: Tensor,  # (c,), prior means of f
    *,
    ordering: str = "random",
    n_predictive: int,
    learns: bool = True,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> VecchiaFit:
    """Fit to labels; arguments not described here as of `fit_vecchia`."""
    learned = LabelFit(HyperparameterFit(kernels[0]), inducing_by_default(settings, *data.y.shape))
    data = data.take(order_of(data.X, ordering, generator))  # step 1
    if learns:  # step 2
        learned = fit_labels(
            kernels, data, settings, likelihood, offset, generator=generator, callback=callback
        )
    kernel, model = learned.found.kernel, (likelihood, offset, generator)
    settings = replace(settings, n_inducing=learned.n_inducing)
    fit, problem, mode = _at_mode(  # steps 3 and 4
        kernel, data, settings, model, n_predictive, start=learned.latent
    )
    found = learned.calibration or calibrated(problem, mode, kernel, generator)  # step 5
    return replace(fit, moderation=found[0], coupling=found[1], history=learned.found.history)


def fit_vecchia_numbers(
    kernels: list,  # with WhiteKernels of the noise to begin with
    data: Data,  # float64; y (n, 1)
    settings: VecchiaSettings,
    likelihood: Any,  # of a number, whose own parameters are learned too
    offset: Tensor,  # (1,)
    *,
    ordering: str = "random",
    n_predictive: int,
    learns: bool = True,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> VecchiaFit:
    """Fit to counts and other numbers; arguments not described here as of `fit_vecchia`."""
    data = data.take(order_of(data.X, ordering, generator))  # step 1
    kernel: Any = split_noise(kernels[0])[0]
    parameters, history = likelihood.initial(data.X), list[float]()
    if learns:  # step 2
        found, parameters = fit_latent_numbers(
            kernels, data, settings, likelihood, offset, generator=generator, callback=callback
        )
        kernel, history = found.kernel, found.history
    model = likelihood, offset, generator
    fit, *_ = _at_mode(kernel, data, settings, model, n_predictive, parameters)  # steps 3 and 4
    return replace(fit, history=history)


def _at_mode(
    kernel,
    data: Data,
    settings: VecchiaSettings,
    model: tuple[Any, Tensor, torch.Generator],  # likelihood, offset and generator
    n_predictive: int,
    parameters: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[VecchiaFit, LatentEvidence, LatentMode]:
    """Inducing points, neighbours, mode and posterior of given hyper-parameters.

    From f (n, c) near the mode, if there is one. The first `VECCHIA_INDUCING` of more inducing
    points, which leave less and less variance, choose the neighbours; all observations leave none.
    """
    likelihood, _, generator = model
    Z = choose_inducing(kernel, data.X, settings.n_inducing or 0, generator)
    n_neighbors = settings.n_neighbors if len(Z) < len(data) else 0
    index = neighbors_of(kernel, data.X, n_neighbors, Z[:VECCHIA_INDUCING])
    n_predictive = n_predictive if index.shape[1] else 1
    problem = LatentEvidence(kernel, data, index, Z, *model, start)
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
    fit = VecchiaFit(posterior, kernel, float(density.sum()), parameters=parameters, solve=solve)
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
        order = stratified_order(problem.data, generator)[:n_rows].sort().values
        problem = problem.some(kernel, order)
        mode = problem.mode(problem.conditionals(kernel.theta))
    mean, var = left_out(mode, problem.data.X)
    rows, likelihood = mode.problem, mode.likelihood
    weight = rows.row_weight[:, 0]
    if c == 1:
        return choose_moderation(likelihood, rows.Y, mean, var, weight)[0], 0.0
    moments = mean, var
    return best_calibration(likelihood, rows.Y, *moments, weight, simplest=FEW_ROWS_MODERATION)


@torch.no_grad()
def left_out(mode: LatentMode, X: Tensor) -> tuple[Tensor, Tensor]:
    """Moments (n, c) of f at each point X (n, d) without the observations there."""
    root, (N, c) = mode.root, mode.weights.shape
    spread = DenseHessian(root, mode.curvature).spread()
    C = root.matmul(spread.reshape(N, -1)).reshape(root.n_rows, c, -1).square().sum(2)
    return without_own(X, mode.latent, C, mode.problem.slope(mode.latent), mode.curvature)
