"""How many inducing points: more of them while they predict held-out data better.

The collapsed posterior of Gaussian noise costs one pass over the data for each number of points, at
the hyper-parameters of the start. Twice as many points make every later step four times as dear, so
that their gain has to be worth it, not only beyond chance.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.sparse import SparseState
from skgp.learning import choose
from skgp.learning.sparse.holdout import held_out_losses, split
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.training import collapsed_posterior

__all__ = ["grown"]

_MAX_ROWS = 20_000  # to learn q from, and to judge it by
_WORTH = 0.02  # nats an observation below which more points are not worth their time


def grown(
    state: SparseState,
    data: Data,
    objective: Objective,
    settings: Settings,
    inducing: Callable[..., Tensor],
    generator: torch.Generator,
) -> SparseState:
    """The state with as many inducing points as pay.

    Parameters
    ----------
    state : SparseState
        Of the start.
    data, objective, settings, inducing, generator
        As for :func:`~skgp.models.dlm.fit.fit_sparse`.

    Returns
    -------
    SparseState
        Of one of ``settings.sizes``, or as it was; of Gaussian noise alone. O(n M^2) for each.
    """
    if not (settings.sizes and objective.family.is_gaussian):
        return state
    bound = replace(objective, name="elbo", beta=1.0)
    few = data.some(_MAX_ROWS, generator)
    kept, held_out = split(few, settings.validation_fraction, generator)

    def at(size: int) -> SparseState:
        Z = inducing(state.kernel, size)
        return SparseState.prior(state.kernel, state.likelihood, Z, state.offset)

    def losses(state: SparseState) -> Tensor:
        with torch.no_grad():
            state = state.with_posterior(*collapsed_posterior(state, kept, bound))
        return held_out_losses(state, bound, held_out)

    tried = [state, *map(at, settings.sizes)]
    return tried[choose([losses(each) for each in tried], least_effect=_WORTH)]
