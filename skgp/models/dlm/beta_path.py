r"""The weight :math:`\beta` of the divergence, chosen by rows held out along a warm-started path.

From large to small :math:`\beta` every fit begins at the best state of the last one, q(u) first and
then, "joint", everything. Losses of the rows held out are smooth along the path, so it may stop
once they have risen twice in a row; the whole path costs about as much as two or three fits [1]_.

References
----------
.. [1] Friedman, Hastie and Tibshirani (2010), Regularization paths for generalized linear models
   via coordinate descent: the same device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from skgp.models.dlm.data import SparseData, SparseState
from skgp.models.dlm.fit import (
    Callback,
    Settings,
    SparseFit,
    finish,
    in_units_of,
    minimise,
    of_posterior_alone,
    start_log_loss,
    start_state,
)
from skgp.models.dlm.holdout import BestState, clearly_worse, split
from skgp.models.dlm.objective import Objective
from skgp.training.stopping import StopRecorder

__all__ = ["BETAS", "fit_beta_path"]

#: Weights tried, in this order.
BETAS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.015)
_STEPS = 5  # a fit of the path has a fifth of the iterations of a single one
_MAX_RISES = 2


def fit_beta_path(
    kernels: list,
    data: SparseData,
    objective: Objective,
    settings: Settings,
    *,
    inducing: Callable[[Any], Tensor],
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
    kept, held_out = split(data, settings.validation_fraction, generator)
    if start is None:
        first = replace(objective, beta=1.0)
        begun = start_state(kernels, data, first, settings, inducing, offset, generator, recorder)
        start, history["start"] = begun.state, begun.history
    objective = in_units_of(start, data, objective)
    state = start
    if objective.name == "log_loss":
        free = objective if settings.joint else of_posterior_alone(objective)
        state = start_log_loss(start, kept, free)
    short = replace(settings, max_iter=max(1, settings.max_iter // _STEPS))
    tried: list[_Point] = []
    for beta in BETAS:
        at_beta = replace(objective, beta=beta)
        watch = BestState(at_beta, held_out)
        for stage in (of_posterior_alone(at_beta), at_beta):
            found = minimise(state, kept, stage, short, watch, generator, recorder)
            history["solve"] += found.history
            state = found.state
            watch.score(state)
        # Hyper-parameters that overfit must not be passed on.
        state = watch.best_state
        tried.append(_Point(at_beta, watch))
        if _has_risen(tried) or recorder.stopped:
            break
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
    )
    return fit, path


@dataclass(frozen=True)
class _Point:
    """One beta of the path: its best state, and the losses of the rows held out."""

    objective: Objective
    watch: BestState

    @property
    def loss(self) -> float:
        """Mean of the losses."""
        return self.watch.loss

    @property
    def rows(self) -> Tensor:
        """The losses, one a row."""
        return self.watch.best_rows

    @property
    def state(self) -> SparseState:
        """The state that has them."""
        return self.watch.best_state


def _has_risen(tried: list[_Point]) -> bool:
    """Whether the loss rose twice in a row at the end of the path."""
    losses = [point.loss for point in tried[-_MAX_RISES - 1 :]]
    return len(losses) > _MAX_RISES and all(a < b for a, b in pairwise(losses))


def _choose(tried: list[_Point]) -> _Point:
    """The first, most regularised point that is not clearly worse than the best."""
    best = min(tried, key=lambda point: point.loss)
    return next(point for point in tried if not clearly_worse(point.rows, best.rows))
