r"""The weight :math:`\beta` of the divergence, chosen by rows held out along a warm-started path.

The path begins with :math:`\beta = 1`, searched for as in a fit of that weight alone. From its best
state it goes down, each fit beginning at the best state of the last one, q(u) first and then,
"joint", everything; then, from the state of :math:`\beta = 1`, it goes up likewise. Losses of the
rows held out are smooth along the path, so that either way ends once they have risen twice in a
row; the whole path costs about as much as two to four single fits [1]_. (One way, from the greatest
weight down, would end in poorer optima: what a great weight has smoothed away does not come back.)

References
----------
.. [1] Friedman, Hastie and Tibshirani (2010), Regularization paths for generalized linear models
   via coordinate descent: the same device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from skgp.models.dlm.bound_search import start_log_loss, start_state
from skgp.models.dlm.data import SparseData, SparseState
from skgp.models.dlm.fit import (
    Callback,
    SparseFit,
    finish,
    in_units_of,
    minimise,
    of_few_iterations,
    of_posterior_alone,
)
from skgp.models.dlm.holdout import BestState, split
from skgp.models.dlm.objective import Objective
from skgp.models.dlm.settings import Settings
from skgp.training.stopping import StopRecorder

__all__ = ["BETAS", "fit_beta_path"]

#: Weights that may be tried.
BETAS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.015)
_FIRST = 1.0
_STEPS = 5  # a warm fit of the path has a fifth of the iterations of a single one
_MAX_RISES = 2


def fit_beta_path(
    kernels: list,
    data: SparseData,
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
        Of all rows, with the beta chosen as that of its objective.
    path : dict of float to float
        Mean loss of the rows held out for each beta tried, in nats (half the squared error for
        "square_loss").
    """
    recorder = StopRecorder(callback)
    history: dict[str, list[float]] = {"start": [], "solve": [], "validation": []}
    objective = replace(objective, beta=_FIRST)
    if start is None:
        begun = start_state(
            kernels, data, objective, settings, inducing, offset, generator, recorder
        )
        start, history["start"] = begun.state, begun.history
    kept, held_out = split(data, settings.validation_fraction, generator)
    state, objective = start, in_units_of(start, kept, objective)
    if objective.name == "log_loss":
        free = objective if settings.joint else of_posterior_alone(objective)
        state = start_log_loss(start, kept, free)

    def fit_at(beta: float, state: SparseState, effort: Settings) -> _Point:
        at_beta = replace(objective, beta=beta)
        watch, alone = BestState(at_beta, held_out), of_posterior_alone(at_beta)
        for stage, settings_of in ((alone, of_few_iterations(settings)), (at_beta, effort)):
            found = minimise(state, kept, stage, settings_of, watch, generator, recorder)
            history["solve"] += found.history
            state = found.state
            watch.score(state)
        return _Point(at_beta, watch)

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
    tried.sort(key=lambda point: -point.objective.beta)
    chosen = _choose(tried)
    path = {point.objective.beta: point.loss for point in tried}
    history["validation"] = list(path.values())
    fit = finish(
        chosen.state,
        data,
        chosen.objective,
        settings,
        chosen.loss,
        generator,
        recorder,
        history,
        (kept, held_out),
    )
    return fit, path


@dataclass(frozen=True)
class _Point:
    """One beta of the path: its best state, and the loss of the rows held out."""

    objective: Objective
    watch: BestState

    @property
    def loss(self) -> float:
        """Mean loss of the rows held out."""
        return self.watch.loss

    @property
    def state(self) -> SparseState:
        """The state that has them."""
        return self.watch.best_state


def _ways() -> tuple[list[float], list[float]]:
    """Weights below 1 in falling, and above in rising order."""
    return [b for b in BETAS if b < _FIRST], [b for b in reversed(BETAS) if b > _FIRST]


def _has_risen(tried: list[_Point]) -> bool:
    """Whether the loss rose twice in a row at the end of the path."""
    losses = [point.loss for point in tried[-_MAX_RISES - 1 :]]
    return len(losses) > _MAX_RISES and all(a < b for a, b in pairwise(losses))


def _choose(tried: list[_Point]) -> _Point:
    """The point of the least loss; of equals the first, most regularised."""
    return min(tried, key=lambda point: point.loss)
