"""Where direct loss minimisation begins: the best kernel, points and q(u) by the ELBO.

Hyper-parameters, inducing points and q(u) maximise the ELBO; of few rows, hyper-parameters maximise
the evidence of a dense process (:mod:`skgp.learning.sparse.evidence`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse import SparseState, whitened_features
from skgp.learning.defaults import LEAST_EFFECT
from skgp.learning.selection import choose
from skgp.learning.sparse import defaults
from skgp.learning.sparse.evidence import other_starts
from skgp.learning.sparse.few_rows import optimal_posterior, start_of_few
from skgp.learning.sparse.objective import Objective, Problem, Settings, held_out_losses, split
from skgp.learning.sparse.search import Training, fit_all_rows
from skgp.linalg.cholesky import jittered_cholesky


def start_state(problem: Problem) -> Training:
    """The best kernel, and the points and q(u) that maximise the ELBO for it."""
    data, settings, recorder = problem.data, problem.settings, problem.recorder
    objective, generator = problem.objective, problem.generator
    bound = objective if objective.name == "elbo" else objective.elbo
    if settings.dense_start:
        return start_of_few(problem, bound)

    def maximise(state: SparseState, few: Data, max_iter: int) -> Training:
        if not bound.has_closed_form:
            state = optimal_posterior(state, few, bound)
        return fit_all_rows(
            state, few, bound, max_iter=max_iter, tol=settings.tol, callback=recorder
        )

    if len(problem.kernels) == 1:
        state = full = problem.prior(problem.kernels[0])
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
    for other, penalty in other_starts(problem, full.kernel, begun.loss / few.total):
        likelihood = objective.likelihood.initial(data.X)
        begins = SparseState.prior(other, likelihood, state.Z, problem.offset)
        rival = maximise(begins, few, min(defaults.FAMILY_ITER, settings.start_iter))
        history = begun.history + rival.history
        if rival.loss + penalty < begun.loss - LEAST_EFFECT * few.total:
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


def start_log_loss(
    state: SparseState, data: Data, objective: Objective, settings: Settings
) -> SparseState:
    """Posterior of `data` under the ELBO, as wide as the log-loss asks for, if it is minimised."""
    if objective.name != "log_loss":
        return state
    if objective.is_gaussian:
        state = optimal_posterior(state, data, objective.elbo)
    return broadened(state, data, objective if settings.joint else objective.of_posterior_alone)


def with_floor(state: SparseState, objective: Objective) -> Objective:
    """The objective with Gaussian noise no less than `NOISE_FLOOR`, or that of `state` if less.

    Where uncertainty of f takes the place of noise, the log-loss of the training rows drives the
    noise to nothing. The ELBO, at whose optimum `state` is, finds little noise only where there is
    little.
    """
    if objective.name == "elbo" or not (objective.is_gaussian and objective.learn_likelihood):
        return objective
    noise = float(objective.likelihood.gaussian_noise(state.likelihood))
    least = objective.likelihood.with_least_noise(min(defaults.NOISE_FLOOR, noise))
    return replace(objective, likelihood=least)


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
        for likelihood in less_noise(state, objective):
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


def less_noise(state: SparseState, objective: Objective) -> list[Tensor]:
    """Parameters of the likelihood with the variance of the noise, the first, made smaller."""
    if not (objective.learn_likelihood and len(state.likelihood)):
        return [state.likelihood]
    low, high = objective.likelihood.box(state.likelihood)
    first = torch.eye(len(state.likelihood), dtype=low.dtype, device=low.device)[0]
    candidates = [state.likelihood + math.log(factor) * first for factor in defaults.LESS_NOISE]
    return [candidate.clamp(low, high) for candidate in candidates]


def with_noise_that_pays(
    state: SparseState, noisier: list[Tensor], held_out: Data, objective: Objective
) -> SparseState:
    """The state with the most noise, of that of the ELBO or less, that held-out rows let pass.

    Under the log-loss uncertainty of f, which differs from place to place, takes the place of
    noise. It is learned from the few rows near an inducing point, and where none of these is far
    off it says that none ever will be: one gross error there costs hundreds of nats. Noise is what
    may happen anywhere. `noisier` are the parameters of `less_noise`.
    """
    if not (objective.likelihood.is_additive and len(state.likelihood)):
        return state
    rest = state.likelihood[1:]
    levels = [noise[:1] for noise in noisier if noise[0] > state.likelihood[0]]
    tried = [replace(state, likelihood=torch.cat([level, rest])) for level in levels] + [state]
    return tried[choose([held_out_losses(each, objective, held_out) for each in tried])]
