r"""Evidence of a dense process of few rows: what hyper-parameters of a sparse one begin with.

================  ======================================================================
likelihood        evidence
================  ======================================================================
Gaussian          exact (:mod:`skgp.learning.evidence`)
labels, counts    Laplace's approximation (:mod:`skgp.learning.laplace_evidence`), summed over
                  the latent functions
================  ======================================================================

Few rows say little of many length scales, and their ratios overfit. On the logarithm of each ratio
to those of the kernel to begin with lies a normal prior, as in
:mod:`skgp.learning.classification_hyperparameters`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.collapsed import merged_column
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.hyperparameters import bounds_of, sizes_of, theta_of, with_theta
from skgp.learning.defaults import GLOBAL_SEARCH, LEAST_EFFECT
from skgp.learning.evidence import ExactEvidence
from skgp.learning.label_scales import latent_start, latent_structure, search_by_numbers
from skgp.learning.laplace_evidence import LaplaceEvidence
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import Objective, Problem, Settings
from skgp.learning.starts import ChoiceSettings, of_pure_noise
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder


class Evidence(NamedTuple):
    """Hyper-parameters, and minus the log evidence and the log prior of the ratios, by row."""

    kernel: Any
    likelihood: Tensor  # (p,), float64
    loss: float = math.inf
    history: tuple[float, ...] = ()


def has_evidence(objective: Objective, kernels: list) -> bool:
    """Whether the evidence is the start of an objective: what is known, and free.

    With Gaussian noise it does not choose among kernels: rough ones, which explain noise as signal,
    seem the best for few rows.
    """
    if not objective.learn_kernel or (objective.name == "elbo" and objective.beta != 1.0):
        return False
    if objective.is_gaussian:
        return objective.learn_likelihood and len(kernels) == 1
    newton = objective.likelihood.is_log_concave and objective.likelihood.is_smooth
    return newton and not objective.likelihood.free_parameters()


def best_evidence(problem: Problem) -> Evidence:
    """The best kernel: each on at most 100 rows, from where the last one ended, the best on all."""
    data, recorder = problem.data, problem.recorder
    centre = problem.kernels[0]
    last = best = Evidence(centre, problem.objective.likelihood.initial(data.X.double()))
    if len(problem.kernels) > 1:
        few = data.some(defaults.SCREEN_ROWS, problem.generator)
        for kernel in problem.kernels:
            # Hyper-parameters of the last one, where these are as many.
            theta = last.kernel.theta
            begun = kernel.clone_with_theta(theta) if len(theta) == kernel.n_dims else kernel
            last = _fit_evidence(last._replace(kernel=begun), few, kernel, problem)
            if last.loss < best.loss:
                best, centre = last, kernel
            if recorder.stopped:
                return best
    found = _fit_evidence(best, data, centre, problem)
    found = found._replace(history=best.history + found.history)
    brief = replace(problem, settings=replace(problem.settings, start_iter=defaults.FEW_STEPS))
    for other, penalty in other_starts(problem, centre):
        rival = _fit_evidence(last._replace(kernel=other), data, other, brief)
        history = found.history + rival.history
        if rival.loss + penalty / data.total < found.loss - LEAST_EFFECT:
            found = _fit_evidence(rival, data, other, problem)
            history = history + found.history
        found = found._replace(history=history)
    return found


def search_by_evidence(
    kernels: list,  # without noise: one, or several to choose from
    data: Data,  # y (n,) or (n, c)
    likelihood: Likelihood,
    offset: Tensor,  # (c,), prior means
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> HyperparameterFit | None:
    """Learn a kernel of f, or the best of several, by the evidence of at most DENSE_ROWS rows.

    None where that is not known (`has_evidence`), and of Gaussian noise, which is learned along.
    """
    objective = Objective(likelihood, "elbo")
    if likelihood.is_gaussian or not has_evidence(objective, kernels):
        return None
    some = data.some(defaults.DENSE_ROWS, generator)
    some = replace(some, y=some.y.reshape(len(some), -1))
    recorder = StopRecorder(callback)
    settings, points = Settings(), (lambda kernel, M=None: some.X)
    problem = Problem(kernels, some, objective, settings, points, offset, generator, recorder)
    found = best_evidence(problem)
    return HyperparameterFit(found.kernel, history=list(found.history))


def _fit_evidence(start: Evidence, data: Data, centre, problem: Problem) -> Evidence:
    """L-BFGS from `start`, ratios drawn towards those of the kernel `centre`."""
    likelihood, settings = problem.objective.likelihood, problem.settings
    whole = start.kernel
    if likelihood.is_gaussian:
        whole = whole + white_kernel(likelihood, start.likelihood)
    theta = torch.as_tensor(theta_of(whole))
    if len(theta) == 0:
        return start
    if likelihood.is_gaussian:
        evidence = _gaussian_evidence(whole, data)
    else:
        evidence = _laplace_evidence(whole, data, likelihood, problem.offset.double())
    prior = _log_prior(centre, settings.ratio_std)

    def loss(parts: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        at = parts["theta"].detach().numpy()
        (value, slope), (of_prior, slope_of_prior) = evidence(at), prior(at)
        gradient = torch.as_tensor(slope + slope_of_prior) / -data.total
        return -(value + of_prior) / data.total, {"theta": gradient}

    low, high = torch.as_tensor(bounds_of(whole)).to(theta).T
    found = minimize_lbfgs(
        loss,
        {"theta": theta},
        max_iter=settings.start_iter,
        tol=settings.tol,
        bounds={"theta": (low, high)},
        callback=lambda i, info: problem.recorder(i, {"loss": info["loss"]}),
    )
    whole = with_theta(whole, found.parameters["theta"].numpy())
    if not likelihood.is_gaussian:
        return Evidence(whole, start.likelihood, found.loss, tuple(found.history))
    noise = start.likelihood.new_tensor([whole.k2.noise_level]).log()
    return Evidence(whole.k1, noise, found.loss, tuple(found.history))


def white_kernel(likelihood: Likelihood, parameters: Tensor) -> WhiteKernel:
    """Noise as a kernel, of the variance that comes first; fixed where its bounds are equal."""
    low, high = (float(end[0].exp()) for end in likelihood.box(parameters))
    return WhiteKernel(float(parameters[0].exp()), (low, high) if low < high else "fixed")


LogDensity = Callable[[np.ndarray], tuple[float, np.ndarray]]  # and the gradient


def _gaussian_evidence(whole, data: Data) -> LogDensity:
    """Log evidence of a kernel with noise; O(n^3)."""
    data = data.to(torch.float64)
    scatter = None if data.weight is None else torch.zeros_like(data.weight)
    exact = ExactEvidence(whole, replace(data, y=data.y[:, 0], scatter=scatter))
    return lambda theta: exact(theta)[:2]


def _laplace_evidence(kernel, data: Data, likelihood: Likelihood, offset: Tensor) -> LogDensity:
    """Log evidence summed over the latent functions; O(c n^3)."""
    data = data.to(torch.float64)
    likelihood = likelihood.with_parameters(offset[:0]).at(data.log_exposure)
    laplace = LaplaceEvidence.of(kernel, data, likelihood, offset)

    def summed(theta: np.ndarray) -> tuple[float, np.ndarray]:
        values, gradient = laplace(theta)
        return float(values.sum()), gradient

    return summed


def _log_prior(centre, ratio_std: float | None) -> LogDensity:
    """Of the ratios in a vector of length scales to those of `centre`, up to a constant."""
    start, vectors, end = theta_of(centre), [], 0
    for size in sizes_of(centre) if ratio_std is not None else ():
        begin, end = end, end + size
        if size > 1:
            vectors.append(slice(begin, end))

    def log_prior(theta: np.ndarray) -> tuple[float, np.ndarray]:
        deviation = np.zeros_like(theta)
        for part in vectors:
            moved = theta[part] - start[part]
            deviation[part] = (moved - moved.mean()) / ratio_std
        return -0.5 * float(deviation @ deviation), -deviation / (ratio_std or 1.0)

    return log_prior


def other_starts(problem: Problem, kernel, loss: float = -math.inf) -> list[tuple[Any, float]]:
    """Kernels beside this one to begin at, each with the nats by which it has to be likelier.

    None where the kernel is not learned. It at the likeliest of other length scales, where it is
    the only one, and at those of a regression on numbers that resemble f
    (:mod:`skgp.learning.label_scales`).

    With Gaussian noise and inducing points, that of a dense process of some observations: where few
    of many columns may matter, since points spread over all columns see little of f, and where
    `loss`, what the search found, in nats per observation, is hardly less than that of noise alone.
    Of fewer than EXACT_ROWS it would take several times as long as the search itself, so that the
    second alone is asked.

    Of observations of f through a link, such as counts, the best kernel of numbers that stand for
    f: at the kernels given large counts are far less likely than under noise alone.
    """
    kernels, objective, data = problem.kernels, problem.objective, problem.data
    if not objective.learn_kernel or problem.recorder.stopped:
        return []
    likelihood = objective.likelihood
    told: dict = {"generator": problem.generator, "callback": problem.recorder}
    if likelihood.has_link:
        some = data.some(defaults.DENSE_ROWS, problem.generator).to(torch.float64)
        few = replace(some, y=some.y[:, 0])
        search = SearchSettings(**GLOBAL_SEARCH)
        fit = search_by_numbers(kernels, few, likelihood, settings=search, **told)
        return [(split_noise(fit.kernel)[0], 0.0)]
    other = latent_start(kernel, data, likelihood) if len(kernels) == 1 else None
    found = [] if other is None else [(other, 0.0)]
    structure = None
    if not objective.is_gaussian:
        structure = latent_structure(kernel, data, likelihood, **told)
    elif not problem.settings.dense_start and (
        (data.X.shape[1] > defaults.MANY_COLUMNS and len(data) > defaults.EXACT_ROWS)
        or loss > of_pure_noise(data) - ChoiceSettings.weak
    ):
        some = data.some(defaults.FAMILY_ROWS, problem.generator).to(torch.float64)
        noise = likelihood.initial(some.X)
        fit = dense_fit(problem, some, kernels, noise, SearchSettings(**GLOBAL_SEARCH))
        structure = split_noise(fit.kernel)[0], 0.0
    return found if structure is None or problem.recorder.stopped else [*found, structure]


def dense_fit(
    problem: Problem, data: Data, kernels: list, noise: Tensor, search: SearchSettings
) -> HyperparameterFit:
    """Of a dense process of Gaussian noise, from kernels and the parameters of the likelihood."""
    white = white_kernel(problem.objective.likelihood, noise)
    return fit_hyperparameters(
        [kernel + white for kernel in kernels],
        merged_column(data),
        generator=problem.generator,
        settings=search,
        callback=problem.recorder,
    )
