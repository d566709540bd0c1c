r"""Rows held out: when to stop learning hyper-parameters by the log-loss.

Hyper-parameters and inducing points that minimise the log-loss of the training rows can make the
predictive variance at those rows too small, as the evidence bound cannot: it charges the whole
variance of the prior that q(u) leaves. Stopping where the loss of rows held out is least keeps
what is gained before.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.sparse import SparseState
from skgp.learning import held_out_rows
from skgp.learning.sparse.objective import Objective

__all__ = ["BestState", "held_out_losses", "split"]

_MAX_ROWS = 4000


def split(data: Data, fraction: float, generator: torch.Generator) -> tuple[Data, Data]:
    """Rows to learn from and rows held out, stratified by y; equal rows of X stay together.

    Parameters
    ----------
    data : Data
    fraction : float
        Of the rows to hold out, at most 4000 and at least one.
    generator : torch.Generator

    Returns
    -------
    kept, held_out : Data
    """
    n = len(data)
    n_out = min(max(1, round(fraction * n)), _MAX_ROWS, n - 1)
    labels = bool((data.y.abs() == 1).all())
    y = data.y[:, 0] if data.y.shape[1] == 1 else data.y.argmax(1)
    out = torch.from_numpy(held_out_rows(y, n_out, generator, X=data.X, classes=labels))
    return data.take(~out), data.take(out)


def held_out_losses(state: SparseState, objective: Objective, data: Data) -> Tensor:
    """Losses (n,) of the predictions for rows that were not trained on, weighted to a mean of all.

    In nats; for "square_loss", half the squared error. Summed over several latent functions.
    """
    with torch.no_grad():
        posterior = state.posterior()
        data = data.to(torch.float64)
        y = data.y
        if objective.name == "square_loss":
            losses = 0.5 * (posterior.mean(data.X.double()) - y).square()
        else:
            likelihood = objective.family.with_parameters(state.likelihood.double()).at(data.offset)
            losses = -likelihood.log_predictive(y, *posterior.mean_and_variance(data.X.double()))
        losses = losses.sum(1)
        return losses if data.weight is None else losses * data.weight * len(data) / data.total


class BestState:
    """Keeps the state of a search that predicts the rows held out best, and says when to stop.

    Parameters
    ----------
    objective : Objective
    held_out : Data
    every : int, default=5
        Iterations between two scores.
    patience : int, default=6
        Scores without a new best after which to stop.

    Attributes
    ----------
    loss : float
        The least mean loss; infinite before the first score.
    losses : list of float
        All of them.
    """

    def __init__(
        self, objective: Objective, held_out: Data, *, every: int = 5, patience: int = 6
    ) -> None:
        self.objective, self.held_out = objective, held_out
        self.every, self.patience = every, patience
        self.loss = math.inf
        self.losses: list[float] = []
        self._best: tuple[SparseState, Tensor] | None = None
        self._n_calls = self._n_worse = 0

    def __call__(self, state: Callable[[], SparseState]) -> bool:
        """Hear of an iteration; return whether to stop. `state` is called when it is time."""
        self._n_calls += 1
        return self._n_calls % self.every == 0 and self.score(state())

    def score(self, state: SparseState) -> bool:
        """Score a state; return whether to stop."""
        rows = held_out_losses(state, self.objective, self.held_out)
        loss = float(rows.mean())
        loss = loss if math.isfinite(loss) else math.inf
        self.losses.append(loss)
        self._n_worse += 1
        if self._best is None or loss < self.loss:
            self._best, self.loss, self._n_worse = (state, rows), loss, 0
        return self._n_worse >= self.patience

    @property
    def best_state(self) -> SparseState:
        """The state of the least loss."""
        return self._scored()[0]

    @property
    def best_rows(self) -> Tensor:
        """Its `held_out_losses`."""
        return self._scored()[1]

    def _scored(self) -> tuple[SparseState, Tensor]:
        if self._best is None:
            raise RuntimeError("No state was scored yet; call score(state) first.")
        return self._best
