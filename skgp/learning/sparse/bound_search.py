"""Steps 1 and 2 of a fit (:mod:`skgp.models.dlm.fit`): the best kernel, and where q(u) begins.

Hyper-parameters, inducing points and q(u) maximise the evidence bound; of few rows, the evidence of
a dense process (:mod:`skgp.learning.sparse.evidence`). ``start_log_loss`` goes from there towards
the log-loss.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.sparse import SparseState
from skgp.learning.sparse.evidence import EvidenceSearch, has_evidence
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.starts import broadened, natural_gradients
from skgp.learning.sparse.training import (
    Training,
    collapsed_posterior,
    fit_collapsed,
    fit_posterior,
)
from skgp.optim.stopping import StopRecorder

__all__ = ["start_log_loss", "start_state"]

# That choose among families of kernels; more points would not rank them otherwise.
_FAMILY_ROWS, _FAMILY_POINTS, _FAMILY_ITER = 1000, 200, 30
_FEW_STEPS = 3  # of natural gradients with few rows: what follows searches for q(u) anyway
_START_NUMBERS = 8e5  # entries of the n x M matrix
_START_PER_INDUCING, _MORE_PER_INDUCING = 8, 20  # rows, at least: of the start, and of its end


def start_state(
    kernels: list,
    data: Data,
    objective: Objective,
    settings: Settings,
    inducing: Callable[..., Tensor],
    offset: Tensor,
    generator: torch.Generator,
    recorder: StopRecorder,
) -> Training:
    """Steps 1 and 2: the best kernel, and what maximises the evidence bound.

    Parameters
    ----------
    kernels, data, objective, settings, inducing, offset, generator
        As for :func:`~skgp.models.dlm.fit.fit_sparse`.
    recorder : StopRecorder
        Hears of every iteration, and says when to stop.

    Returns
    -------
    Training
        With the optimal q(u) for its hyper-parameters.
    """
    bound = objective if objective.name == "elbo" else replace(objective, name="elbo", beta=1.0)
    if settings.dense_start and has_evidence(objective, kernels):
        return _by_evidence(kernels, data, bound, settings, inducing, offset, generator, recorder)

    def prior(kernel) -> SparseState:
        return SparseState.prior(kernel, objective.family.initial(data.X), inducing(kernel), offset)

    if len(kernels) == 1:
        state = prior(kernels[0])
    else:
        few = data.some(_FAMILY_ROWS, generator)
        tried = [
            (
                full,
                _maximise_bound(_thinned(full), few, bound, _FAMILY_ITER, settings.tol, recorder),
            )
            for full in map(prior, kernels)
            if not recorder.stopped
        ]
        full, best = min(tried, key=lambda each: each[1].loss)
        if recorder.stopped and len(best.state.Z) == len(full.Z):
            return best
        # Of more points, hyper-parameters learned with few of them are a poor start.
        state = best.state if len(best.state.Z) == len(full.Z) else full

    def search(state: SparseState, per_inducing: int, max_iter: int) -> Training:
        n_rows = max(per_inducing * len(state.Z), int(_START_NUMBERS / state.mean.numel()))
        few = data.some(n_rows, generator)
        return _maximise_bound(state, few, bound, max_iter, settings.tol, recorder)

    begun = search(state, _START_PER_INDUCING, settings.start_iter)
    if not _wants_more_rows(begun.state, data, objective) or recorder.stopped:
        return begun
    more = search(begun.state, _MORE_PER_INDUCING, max(1, settings.start_iter // 2))
    return replace(more, history=begun.history + more.history)


def _by_evidence(
    kernels: list,
    data: Data,
    bound: Objective,
    settings: Settings,
    inducing: Callable[..., Tensor],
    offset: Tensor,
    generator: torch.Generator,
    recorder: StopRecorder,
) -> Training:
    """Steps 1 and 2 of few rows."""
    search = EvidenceSearch(
        bound.family,
        offset,
        ratio_std=settings.ratio_std,
        max_iter=settings.start_iter,
        tol=settings.tol,
        callback=recorder,
    )
    found = search.choose(kernels, data, generator)
    likelihood = found.likelihood.to(data.X)
    state = SparseState.prior(found.kernel, likelihood, inducing(found.kernel), offset)
    state = _optimal_posterior(state, data, bound, max_iter=_FEW_STEPS)
    loss = found.loss * data.total
    return Training(state, loss, found.history, stopped=recorder.stopped)


def _thinned(state: SparseState) -> SparseState:
    """The prior with at most 200 of the inducing points."""
    every = -(-len(state.Z) // _FAMILY_POINTS)
    return SparseState.prior(state.kernel, state.likelihood, state.Z[::every], state.offset)


def _wants_more_rows(state: SparseState, data: Data, objective: Objective) -> bool:
    """Whether a longer start pays: minibatches improve points and hyper-parameters slowly.

    On kin40k, M = 500, 15 iterations of the collapsed bound on 20 M rows gained more than 200 steps
    of Adam, in half the time. The other objectives go on by closed forms, or have none here.
    """
    M = len(state.Z)
    many = min(len(data), _MORE_PER_INDUCING * M) > max(_START_PER_INDUCING * M, _START_NUMBERS / M)
    return many and objective.name == "log_loss" and objective.family.is_gaussian


def _maximise_bound(
    state: SparseState,
    data: Data,
    bound: Objective,
    max_iter: int,
    tol: float,
    recorder: StopRecorder,
) -> Training:
    if bound.family.is_gaussian:
        return fit_collapsed(state, data, bound, max_iter=max_iter, tol=tol, callback=recorder)
    state = _optimal_posterior(state, data, bound)
    return fit_posterior(state, data, bound, max_iter=max_iter, tol=tol, callback=recorder)


def _optimal_posterior(
    state: SparseState, data: Data, bound: Objective, *, max_iter: int = 10
) -> SparseState:
    """The state with the q(u) that maximises the bound, or is near it after `max_iter` steps."""
    with torch.no_grad():
        if bound.family.is_gaussian:
            return state.with_posterior(*collapsed_posterior(state, data, bound))
        return natural_gradients(state, data, bound, max_iter=max_iter)


def start_log_loss(state: SparseState, data: Data, objective: Objective) -> SparseState:
    """Posterior of `data` under the evidence bound, as wide as the log-loss wants it."""
    if objective.family.is_gaussian:
        bound = replace(objective, name="elbo", beta=1.0)
        state = _optimal_posterior(state, data, bound)
    with torch.no_grad():
        return broadened(state, data, objective)
