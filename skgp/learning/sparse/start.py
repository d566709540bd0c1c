r"""Where direct loss minimisation begins: the best kernel, points and q(u) by the ELBO.

Hyper-parameters, inducing points and q(u) maximise the ELBO; of few rows, hyper-parameters maximise
the evidence of a dense process. With an inducing point at every row the ELBO is the evidence
itself. While rows are not many more than inducing points, the evidence costs less to maximise, a
function of some hyper-parameters alone, than the ELBO, whose q(u) has :math:`O(c M^2)` numbers:

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

With an inducing point at every distinct input and Gaussian noise (``dense_start``) nothing is
approximated: hyper-parameters are found as for every dense process (:mod:`skgp.learning.search`),
and "log_loss" has nothing to correct. What it gains over the ELBO is that variances adapt to where
a sparse posterior errs.
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
from skgp.inference.sparse import SparseState, natural_gradients, whitened_features
from skgp.kernels.expression import WhiteKernel
from skgp.kernels.gram import split_noise
from skgp.learning import defaults
from skgp.learning.evidence import ExactEvidence
from skgp.learning.laplace_evidence import LaplaceEvidence
from skgp.learning.search import SearchSettings, fit_hyperparameters
from skgp.learning.selection import choose
from skgp.learning.sparse.objective import (
    Objective,
    Problem,
    Settings,
    held_out_losses,
    split,
)
from skgp.learning.sparse.search import Training, fit_all_rows
from skgp.learning.starts import latent_start
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import jittered_cholesky
from skgp.optim.bfgs import minimize_lbfgs


def start_state(problem: Problem) -> Training:
    """The best kernel, and the points and q(u) that maximise the ELBO for it."""
    data, settings, recorder = problem.data, problem.settings, problem.recorder
    objective, generator = problem.objective, problem.generator
    bound = objective if objective.name == "elbo" else objective.elbo
    if settings.dense_start and has_evidence(objective, problem.kernels):
        found = best_evidence(problem)
        state = problem.prior(found.kernel, found.likelihood.to(data.X))
        # Few steps: what follows searches for q(u) anyway.
        state = optimal_posterior(state, data, bound, max_iter=defaults.FEW_STEPS)
        loss, history = found.loss * data.total, list(found.history)
        return Training(state, loss, history, stopped=recorder.stopped)

    def maximise(state: SparseState, few: Data, max_iter: int) -> Training:
        if not bound.has_closed_form:
            state = optimal_posterior(state, few, bound)
        return fit_all_rows(
            state, few, bound, max_iter=max_iter, tol=settings.tol, callback=recorder
        )

    if len(problem.kernels) == 1:
        state = problem.prior(problem.kernels[0])
    else:
        few = data.some(defaults.FAMILY_ROWS, generator)
        full, best = _best_family(problem, lambda begun: maximise(begun, few, defaults.FAMILY_ITER))
        if recorder.stopped and len(best.state.Z) == len(full.Z):
            return best
        # Of more points, hyper-parameters learned with few of them are a poor start.
        state = best.state if len(best.state.Z) == len(full.Z) else full

    def rows(state: SparseState, per_inducing: int) -> Data:
        least = int(defaults.START_NUMBERS / state.mean.numel())
        return data.some(max(per_inducing * len(state.Z), least), generator)

    few = rows(state, defaults.START_PER_INDUCING)
    begun = maximise(state, few, settings.start_iter)
    other = _other_start(problem)
    if other is not None:
        likelihood = objective.likelihood.initial(data.X)
        begins = SparseState.prior(other, likelihood, state.Z, problem.offset)
        rival = maximise(begins, few, min(defaults.FAMILY_ITER, settings.start_iter))
        history = begun.history + rival.history
        if rival.loss < begun.loss - defaults.LEAST_EFFECT * few.total:
            begun = maximise(rival.state, few, settings.start_iter)
            history = history + begun.history
        begun = replace(begun, history=history)
    if not _wants_more_rows(begun.state, data, objective) or recorder.stopped:
        return begun
    few = rows(begun.state, defaults.MORE_PER_INDUCING)
    more = maximise(begun.state, few, max(1, settings.start_iter // 2))
    return replace(more, history=begun.history + more.history)


def _best_family(
    problem: Problem, fit: Callable[[SparseState], Training]
) -> tuple[SparseState, Training]:
    """The prior of the kernel of least loss, and its fit from fewer points."""
    tried = []
    for kernel in problem.kernels:
        if not problem.recorder.stopped:
            full = problem.prior(kernel)
            tried.append((full, fit(_thinned(full))))
    return min(tried, key=lambda each: each[1].loss)


def _thinned(state: SparseState) -> SparseState:
    """The prior with at most 200 of the inducing points."""
    every = -(-len(state.Z) // defaults.FAMILY_POINTS)
    return SparseState.prior(state.kernel, state.likelihood, state.Z[::every], state.offset)


def _wants_more_rows(state: SparseState, data: Data, objective: Objective) -> bool:
    """Whether a longer start pays: minibatches improve points and hyper-parameters slowly.

    The other objectives go on by closed forms, or have none here.
    """
    M = len(state.Z)
    fewest = max(defaults.START_PER_INDUCING * M, defaults.START_NUMBERS / M)
    many = min(len(data), defaults.MORE_PER_INDUCING * M) > fewest
    return many and objective.name == "log_loss" and objective.is_gaussian


def grown(state: SparseState, problem: Problem) -> SparseState:
    """The state with as many inducing points as pay, of Gaussian noise alone; O(n M^2) each.

    The collapsed posterior costs one pass over the data for each number of points, at the
    hyper-parameters of the start. Twice as many points make every later step four times as dear, so
    that their gain has to be worth it, not only beyond chance.
    """
    settings, objective = problem.settings, problem.objective.elbo
    if not (settings.sizes and objective.is_gaussian):
        return state
    few = problem.data.some(defaults.MAX_SIZE_ROWS, problem.generator)
    kept, held_out = split(few, settings.validation_fraction, problem.generator)

    def at(size: int) -> SparseState:
        Z = problem.inducing(state.kernel, size)
        return SparseState.prior(state.kernel, state.likelihood, Z, state.offset)

    tried = [state, *map(at, settings.sizes)]
    losses = [
        held_out_losses(objective.with_optimum(each, kept), objective, held_out) for each in tried
    ]
    return tried[choose(losses, least_effect=defaults.POINTS_WORTH)]


def optimal_posterior(
    state: SparseState, data: Data, bound: Objective, *, max_iter: int = 10
) -> SparseState:
    """The state with the q(u) that maximises the ELBO, or is near it after `max_iter` steps."""
    if bound.has_closed_form:
        return bound.with_optimum(state, data)
    made = bound.likelihood.with_parameters(state.likelihood)
    return natural_gradients(state, data, made, beta=bound.beta, max_iter=max_iter)


def start_log_loss(
    state: SparseState, data: Data, objective: Objective, settings: Settings
) -> SparseState:
    """Posterior of `data` under the ELBO, as wide as the log-loss asks for, if it is minimised."""
    if objective.name != "log_loss":
        return state
    if objective.is_gaussian:
        state = optimal_posterior(state, data, objective.elbo)
    return broadened(state, data, objective if settings.joint else objective.of_posterior_alone)


@torch.no_grad()
def broadened(state: SparseState, data: Data, objective: Objective) -> SparseState:
    r"""The state, at the optimum of the ELBO, moved towards the log-loss; its mean stays.

    Its optimum has less noise and a wider q(u): uncertainty of f takes the place of noise, for it
    can differ from place to place. Among

    .. math:: S_\tau = \big(I + (S^{-1} - I) / \tau\big)^{-1}, \qquad \sigma^2 \leftarrow \nu
              \sigma^2,

    the best pair :math:`(\tau, \nu)` of a grid is taken, on at most 4000 rows; that costs one
    eigenvalue decomposition, where a gradient search would need many iterations.
    """
    n, objective = len(data), replace(objective, gradient="exact")
    some = data.take(torch.arange(0, n, -(-n // defaults.GRID_ROWS)))
    share = data.total / some.total
    Phi, unexplained = whitened_features(state.kernel, some.X, state.Z)
    mean = state.offset + Phi.mT @ state.mean
    # S^-1 - I = V diag(gain) V^T for each latent function.
    variances, vectors = torch.linalg.eigh(state.root @ state.root.mT)
    gain = 1 / variances.clamp_min(torch.finfo(Phi.dtype).tiny) - 1  # (c, M)
    squares = (vectors.mT @ Phi).square()  # (c, M, n)
    best, width, chosen = math.inf, 1.0, state.likelihood
    for tau in defaults.WIDTHS:
        narrowed = 1 / (1 + gain / tau)  # (c, M)
        var = (unexplained + (narrowed[:, None] @ squares)[:, 0]).mT
        divergence = 0.5 * (narrowed - 1 - narrowed.log()).sum()
        for likelihood in _less_noise(state, objective):
            made = objective.likelihood.with_parameters(likelihood)
            rows = share * objective.data_loss(made, some, mean, var)
            loss = float(rows + objective.beta * divergence)
            if loss < best:
                best, width, chosen = loss, tau, likelihood
    root = state.root
    if width != 1.0:
        covariance = (vectors / (1 + gain / width)[:, None]) @ vectors.mT
        root = jittered_cholesky(covariance).factor
    return replace(state, likelihood=chosen, root=root)


def _less_noise(state: SparseState, objective: Objective) -> list[Tensor]:
    """Parameters of the likelihood with the variance of the noise, the first, made smaller."""
    if not (objective.learn_likelihood and len(state.likelihood)):
        return [state.likelihood]
    low, high = objective.likelihood.box(state.likelihood)
    first = torch.eye(len(state.likelihood), dtype=low.dtype, device=low.device)[0]
    candidates = [state.likelihood + math.log(factor) * first for factor in defaults.LESS_NOISE]
    return [candidate.clamp(low, high) for candidate in candidates]


# ------------------------------------------------------------------------- few rows: the evidence


class _Evidence(NamedTuple):
    """Hyper-parameters, and minus the log evidence and the log prior of the ratios, by row."""

    kernel: Any
    likelihood: Tensor  # (p,), float64
    loss: float = math.inf
    history: tuple[float, ...] = ()


def _other_start(problem: Problem) -> Any:
    """The likeliest of other length scales of the only kernel, if it is learned; or None."""
    kernels, objective = problem.kernels, problem.objective
    if len(kernels) > 1 or not objective.learn_kernel or problem.recorder.stopped:
        return None
    return latent_start(kernels[0], problem.data, objective.likelihood)


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


def best_evidence(problem: Problem) -> _Evidence:
    """The best kernel: each on at most 100 rows, from where the last one ended, the best on all."""
    data, recorder = problem.data, problem.recorder
    centre = problem.kernels[0]
    last = best = _Evidence(centre, problem.objective.likelihood.initial(data.X.double()))
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
    other = _other_start(problem)
    if other is None:
        return found
    brief = replace(problem, settings=replace(problem.settings, start_iter=defaults.FEW_STEPS))
    rival = _fit_evidence(last._replace(kernel=other), data, other, brief)
    history = found.history + rival.history
    if rival.loss > found.loss - defaults.LEAST_EFFECT:
        return found._replace(history=history)
    best = _fit_evidence(rival, data, other, problem)
    return best._replace(history=history + best.history)


def _fit_evidence(start: _Evidence, data: Data, centre, problem: Problem) -> _Evidence:
    """L-BFGS from `start`, ratios drawn towards those of the kernel `centre`."""
    likelihood, settings = problem.objective.likelihood, problem.settings
    whole = start.kernel
    if likelihood.is_gaussian:
        whole = whole + white_kernel(likelihood, start.likelihood)
    theta = torch.as_tensor(whole.theta)
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

    low, high = torch.as_tensor(whole.bounds).to(theta).T
    found = minimize_lbfgs(
        loss,
        {"theta": theta},
        max_iter=settings.start_iter,
        tol=settings.tol,
        bounds={"theta": (low, high)},
        callback=lambda i, info: problem.recorder(i, {"loss": info["loss"]}),
    )
    whole = whole.clone_with_theta(found.parameters["theta"].numpy())
    if not likelihood.is_gaussian:
        return _Evidence(whole, start.likelihood, found.loss, tuple(found.history))
    noise = start.likelihood.new_tensor([whole.k2.noise_level]).log()
    return _Evidence(whole.k1, noise, found.loss, tuple(found.history))


def white_kernel(likelihood: Likelihood, noise: Tensor) -> WhiteKernel:
    """The noise of a Gaussian likelihood, as a kernel; fixed where its bounds are equal."""
    low, high = (float(end.exp()) for end in likelihood.box(noise))
    return WhiteKernel(float(noise.exp()), (low, high) if low < high else "fixed")


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
    exposure = None if data.offset is None else data.offset[:, 0]
    likelihood = likelihood.with_parameters(offset[:0]).at(exposure)
    laplace = LaplaceEvidence(
        kernel, data.X, data.y, likelihood=likelihood, offset=offset, row_weight=data.weight
    )

    def summed(theta: np.ndarray) -> tuple[float, np.ndarray]:
        values, gradient = laplace(theta)
        return float(values.sum()), gradient

    return summed


def _log_prior(centre, ratio_std: float | None) -> LogDensity:
    """Of the ratios in a vector of length scales to those of `centre`, up to a constant."""
    start, vectors, end = centre.theta, [], 0
    for hyper in centre.hyperparameters if ratio_std is not None else ():
        if not hyper.fixed:
            begin, end = end, end + hyper.n_elements
            if hyper.n_elements > 1:
                vectors.append(slice(begin, end))

    def log_prior(theta: np.ndarray) -> tuple[float, np.ndarray]:
        deviation = np.zeros_like(theta)
        for part in vectors:
            moved = theta[part] - start[part]
            deviation[part] = (moved - moved.mean()) / ratio_std
        return -0.5 * float(deviation @ deviation), -deviation / (ratio_std or 1.0)

    return log_prior


# ------------------------------------------------------------------- an inducing point at every row


def is_conjugate(objective: Objective) -> bool:
    """Whether the posterior of a dense process is known in closed form, at least up to beta."""
    by_bayes = objective.name == "log_loss" and objective.beta == 1.0 and not objective.stochastic
    return objective.is_gaussian and (by_bayes or objective.name != "log_loss")


def of_bayes_rule(objective: Objective) -> Objective:
    """The objective whose optimum is the posterior of a dense process.

    Hyper-parameters stay where :func:`dense_start` chose them, unless another objective moves them.
    """
    if objective.beta != 1.0 or objective.name == "square_loss":
        return objective
    return replace(objective.of_posterior_alone, name="elbo")


def dense_start(problem: Problem) -> Training:
    """Hyper-parameters of the greatest evidence, an inducing point at every distinct input.

    Of the prior, in float64: the posterior is in closed form. O(n^3) an iteration; the search
    begins with the hyper-parameters of an earlier fit, where there is one.
    """
    data, likelihood, begun = (
        problem.data.to(torch.float64),
        problem.objective.likelihood,
        problem.start,
    )
    noise = likelihood.initial(data.X) if begun is None else begun.likelihood.double()
    kernels = problem.kernels if begun is None else [begun.kernel]
    kernel, history, search = kernels[0], list[float](), SearchSettings(**defaults.GLOBAL_SEARCH)
    if problem.objective.learn_kernel:
        white = white_kernel(likelihood, noise)
        most = min(problem.settings.max_iter, search.dense_max_iter)
        found = fit_hyperparameters(
            [kernel + white for kernel in kernels],
            merged_column(data),
            generator=problem.generator,
            settings=replace(search, dense_max_iter=most),
            callback=problem.recorder,
        )
        kernel, learned = split_noise(found.kernel)
        noise = noise.new_tensor([learned.noise_level if learned else 0.0]).log()
        history = [-value for value in found.history]
    Z, offset = problem.inducing(kernel).double(), problem.offset.double()
    state, loss = SparseState.prior(kernel, noise, Z, offset), history[-1] if history else 0.0
    return Training(state, loss, history, stopped=problem.recorder.stopped)
