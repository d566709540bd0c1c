r"""The weight :math:`\beta` of the KL divergence, by held-out data along a path of warm starts.

Three parts of the data are held out, each for a purpose of its own, as a loss that was chosen by is
too low to choose by or to report: one says when each fit stops, and which of its states is kept;
one chooses beta; one is scored once, by the fit that was chosen. A single fit of all the data with
that beta follows.

The path begins with :math:`\beta = 1`, searched for as in a fit of that weight alone. From its best
state it goes down, each fit beginning at the best state of the last one, q(u) first and then,
"joint", everything; then, from the state of :math:`\beta = 1`, it goes up likewise. Losses are
smooth along the path, so that either way ends once they have risen twice in a row; the whole path
costs about as much as two to four single fits [1]_. (One way, from the greatest weight down, would
end in poorer optima: what a great weight has smoothed away does not come back.) Of the weights that
predict equally well, within a standard error, the nearest to 1 is chosen
(:mod:`skgp.learning.selection`).

References
----------
.. [1] Friedman, Hastie and Tibshirani (2010), Regularization paths for generalized linear models
   via coordinate descent: the same device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.sparse import SparseState
from skgp.learning import choose
from skgp.learning.sparse.bound_search import start_log_loss, start_state
from skgp.learning.sparse.holdout import BestState, held_out_losses, split
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.models.dlm.fit import (
    Callback,
    SparseFit,
    finish,
    fit_sparse,
    in_units_of,
    minimise,
    of_few_iterations,
    of_posterior_alone,
)
from skgp.optim.stopping import StopRecorder

__all__ = ["BETAS", "fit_beta_path"]

#: Weights that may be tried.
BETAS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.015)
_FIRST = 1.0
_STEPS = 5  # a warm fit of the path has a fifth of the iterations of a single one
_MAX_RISES = 2
_FEWEST = 30  # observations: fewer cannot be split by their purposes, and beta stays 1
_MOST_HELD_OUT = 0.2


def fit_beta_path(
    kernels: list,
    data: Data,
    objective: Objective,
    settings: Settings,
    *,
    inducing: Callable[..., Tensor],
    offset: Tensor,
    generator: torch.Generator,
    start: SparseState | None = None,
    callback: Callback | None = None,
) -> tuple[SparseFit, dict[float, float]]:
    r"""Fit with the :math:`\beta` that predicts rows held out best.

    Parameters
    ----------
    kernels, data, settings, inducing, offset, generator, start, callback
        As for :func:`~skgp.models.dlm.fit.fit_sparse`.
    objective : Objective
        Its beta is without effect.

    Returns
    -------
    fit : SparseFit
        Of all rows, with the beta chosen as that of its objective. Its ``held_out_loss`` is of rows
        that neither stopped nor chose.
    path : dict of float to float
        Mean loss, of the part that chooses, for each beta tried, in nats (half the squared error
        for "square_loss"); empty below 30 rows, which beta = 1 is for.
    """
    objective = replace(objective, beta=_FIRST)
    fit_all = partial(
        fit_sparse,
        data=data,
        settings=settings,
        inducing=inducing,
        offset=offset,
        generator=generator,
        start=start,
    )
    if len(data) < _FEWEST:
        return fit_all(kernels, objective=objective, callback=callback), {}
    recorder = StopRecorder(callback)
    history: dict[str, list[float]] = {"start": [], "solve": [], "validation": []}
    parts = _Parts.of(data, settings.validation_fraction, generator)
    kept = parts.training
    if start is None:
        begun = start_state(
            kernels, kept, objective, settings, inducing, offset, generator, recorder
        )
        start, history["start"] = begun.state, begun.history
    state, objective = start, in_units_of(start, kept, objective)
    if objective.name == "log_loss":
        free = objective if settings.joint else of_posterior_alone(objective)
        state = start_log_loss(start, kept, free)

    def fit_at(beta: float, state: SparseState, effort: Settings) -> _Point:
        at_beta = replace(objective, beta=beta)
        watch, alone = BestState(at_beta, parts.stopping), of_posterior_alone(at_beta)
        for stage, settings_of in ((alone, of_few_iterations(settings)), (at_beta, effort)):
            found = minimise(state, kept, stage, settings_of, watch, generator, recorder)
            history["solve"] += found.history
            state = found.state
            watch.score(state)
        best = watch.best_state
        return _Point(at_beta, best, held_out_losses(best, at_beta, parts.choosing))

    tried = [fit_at(_FIRST, state, settings)]
    warm = replace(settings, max_iter=max(1, settings.max_iter // _STEPS))
    for betas in _ways():
        way = tried[:1]
        for beta in betas:
            if _has_risen(way) or recorder.stopped:
                break
            # Hyper-parameters that overfit must not be passed on: it is the best state that is.
            way.append(fit_at(beta, way[-1].state, warm))
        tried += way[1:]
    chosen = _choose(tried)
    path = {point.objective.beta: point.loss for point in sorted(tried, key=_descending)}
    history["validation"] = list(path.values())
    reported = float(held_out_losses(chosen.state, chosen.objective, parts.reporting).mean())
    if recorder.stopped:
        return finish(
            chosen.state,
            data,
            chosen.objective,
            settings,
            reported,
            generator,
            recorder,
            history,
            (kept, parts.stopping),
        ), path
    of_beta = replace(objective, beta=chosen.objective.beta)
    fit = fit_all([chosen.state.kernel], objective=of_beta, callback=recorder)
    n_iter = max(recorder.n_longest, fit.n_iter)
    history = {name: history[name] + fit.history[name] for name in ("start", "solve")} | {
        "validation": history["validation"]
    }
    return replace(fit, held_out_loss=reported, n_iter=n_iter, history=history), path


@dataclass(frozen=True)
class _Parts:
    """What each part of the data is for."""

    training: Data
    stopping: Data
    choosing: Data
    reporting: Data

    @classmethod
    def of(cls, data: Data, fraction: float, generator: torch.Generator) -> "_Parts":
        """Three parts of this fraction of all, at most a fifth each, and the rest."""
        fraction = min(fraction, _MOST_HELD_OUT)
        rest, stopping = split(data, fraction, generator)
        both, reporting = split(rest, fraction / (1 - fraction), generator)
        training, choosing = split(both, fraction / (1 - 2 * fraction), generator)
        return cls(training, stopping, choosing, reporting)


@dataclass(frozen=True)
class _Point:
    """One beta of the path: its best state, and the losses (n,) of the part that chooses."""

    objective: Objective
    state: SparseState
    losses: Tensor

    @property
    def loss(self) -> float:
        """Their mean."""
        return float(self.losses.mean())


def _descending(point: _Point) -> float:
    return -point.objective.beta


def _from_one(point: _Point) -> tuple[float, float]:
    """How far beta is from 1; of equals the greater first, which regularises more."""
    return abs(math.log(point.objective.beta)), -point.objective.beta


def _ways() -> tuple[list[float], list[float]]:
    """Weights below 1 in falling, and above in rising order."""
    return [b for b in BETAS if b < _FIRST], [b for b in reversed(BETAS) if b > _FIRST]


def _has_risen(tried: list[_Point]) -> bool:
    """Whether the loss rose twice in a row at the end of the path."""
    losses = [point.loss for point in tried[-_MAX_RISES - 1 :]]
    return len(losses) > _MAX_RISES and all(a < b for a, b in pairwise(losses))


def _choose(tried: list[_Point]) -> _Point:
    """The point nearest to the beta of Bayes' rule that is no worse than the best."""
    ordered = sorted(tried, key=_from_one)
    return ordered[choose([point.losses for point in ordered])]
