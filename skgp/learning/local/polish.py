"""Algorithm 1 on top of a fitted state, taken back unless rows held out are predicted better.

The bound grows with hyper-parameters and inducing points that fit the training rows; whether the
predictions gain is for other rows to say.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.learning.local.bound import Objective, latent_moments
from skgp.learning.local.minibatch import Search, fit_minibatch
from skgp.learning.selection import improves
from skgp.optim import NonFiniteLossError

__all__ = ["Polished", "negative_log_predictive", "polish"]


@dataclass(frozen=True)
class Polished:
    """What `polish` returns.

    Attributes
    ----------
    state : SWSGPState
        The polished one if it was kept, otherwise the one it began with.
    kept : bool
    before, after : float
        Mean negative log predictive density of the rows held out, in nats; `after` is NaN if the
        fit diverged.
    history : list of float
        See `MinibatchFit`.
    stopped : bool
    """

    state: SWSGPState
    kept: bool
    before: float
    after: float
    history: list[float]
    stopped: bool


def polish(
    state: SWSGPState,
    data: Data,
    search: Search,
    objective: Objective,
    *,
    held_out: Data,
    held_out_search: Search,
    **options,
) -> Polished:
    """Run Algorithm 1 from a state and keep the result only if rows held out are predicted better.

    Parameters
    ----------
    state, data, search, objective
        As in `fit_minibatch`.
    held_out : Data
        Rows that neither `state` nor the polish learns from.
    held_out_search : callable
        ``held_out_search(kernel, Z) -> active``, of the rows held out.
    **options
        Of `fit_minibatch`.

    Returns
    -------
    Polished

    Warns
    -----
    RuntimeWarning
        If the fit diverged; the state is then the one it began with.
    """

    def losses(each: SWSGPState) -> Tensor:
        active = held_out_search(each.kernel, each.Z)
        return negative_log_predictive(each, held_out, active, objective)

    def mean(rows: Tensor) -> float:
        return float(held_out.weighted_sum(rows)) / held_out.total

    rows = losses(state)
    before = mean(rows)
    try:
        found = fit_minibatch(state, data, search, objective, **options)
    except NonFiniteLossError as error:
        warnings.warn(f"The joint polish was not kept. {error}", RuntimeWarning, stacklevel=2)
        return Polished(state, False, before, math.nan, [], False)
    polished = losses(found.state)
    after, kept = mean(polished), improves(polished, rows, weight=held_out.weight)
    return Polished(
        found.state if kept else state, kept, before, after, found.history, found.stopped
    )


@torch.no_grad()
def negative_log_predictive(
    state: SWSGPState, data: Data, active: Tensor, objective: Objective
) -> Tensor:
    """-log p(y) of each row, summed over the latent functions, in nats; shape (n,)."""
    likelihood = objective.family.make(state.likelihood).at(data.offset)
    mean, var = latent_moments(state, data.X, active)
    return -likelihood.log_predictive(data.y, mean, var).sum(1)
