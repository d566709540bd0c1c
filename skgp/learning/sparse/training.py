r"""Minimising the objectives with all rows at hand, by L-BFGS in rounds.

Each round begins from coordinates around the state that the last one has reached
(:mod:`skgp.learning.sparse.coordinates`); three short ones and a long one learn inducing points
several times faster than one search in the coordinates of the start.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.collapsed import (
    elbo_loss,
    elbo_posterior,
    fitc_loss,
    fitc_posterior,
    statistics,
)
from skgp.inference.sparse.reference import kl_from_standard_normal
from skgp.inference.sparse.sparse import FixedFeatures, SparseState, latent_moments
from skgp.inference.sparse.square_loss import square_loss, square_posterior
from skgp.learning.sparse.coordinates import Coordinates, Values
from skgp.learning.sparse.holdout import BestState
from skgp.learning.sparse.objective import Objective, data_loss
from skgp.optim.lbfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder

__all__ = [
    "LEAST_BETA",
    "Training",
    "collapsed_posterior",
    "fit_collapsed",
    "fit_posterior",
    "posterior_loss",
    "total_loss",
]

Callback = Callable[[int, dict], bool | None]
Loss = Callable[[Values], Tensor]

#: Stands for a smaller beta where q(u) would have no variance, or the ridge no meaning.
LEAST_BETA = 1e-8
_SHORT_ROUNDS, _SHORT_ROUND = 3, 15
_BLOCK_NUMBERS = 1e7  # entries of an n x M matrix held at once


@dataclass(frozen=True)
class Training:
    """Where a search ended.

    Attributes
    ----------
    state : SparseState
    loss : float
        The objective, in nats (squared units of y for the square loss), summed over the rows.
    history : list of float
        The same an observation, after each iteration.
    converged, stopped : bool
        Whether the tolerance, or the callback, ended the search.
    """

    state: SparseState
    loss: float
    history: list[float] = field(default_factory=list)
    converged: bool = False
    stopped: bool = False


def fit_collapsed(
    state: SparseState,
    data: Data,
    objective: Objective,
    *,
    max_iter: int,
    tol: float,
    watch: BestState | None = None,
    callback: Callback | None = None,
) -> Training:
    """Learn hyper-parameters where q(u) is at its optimum: "elbo" of Gaussian noise, "fitc",
    "square_loss".

    Parameters
    ----------
    state : SparseState
        To begin with; its posterior does not matter.
    data : Data
        Of one column of targets.
    objective : Objective
    max_iter : int
    tol : float
        Relative fall of the objective in an iteration below which to stop.
    watch : BestState, optional
        Scores states on rows held out, and stops when they no longer get better.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True stops.

    Returns
    -------
    Training
        With the optimal posterior.
    """

    def loss(values: Values) -> Tensor:
        return _collapsed_loss(state.kernel, data, objective, values)

    result = _search(state, data, objective, loss, False, max_iter, tol, watch, callback)
    with torch.no_grad():
        posterior = collapsed_posterior(result.state, data, objective)
    return Training(
        result.state.with_posterior(*posterior),
        result.loss,
        result.history,
        result.converged,
        result.stopped,
    )


def _collapsed_loss(kernel, data: Data, objective: Objective, values: Values) -> Tensor:
    noise = objective.family.gaussian_noise(values.likelihood)
    if objective.name == "fitc":
        return fitc_loss(kernel, data, values.Z, noise, values.theta)
    sums = statistics(kernel, data, values.Z, values.theta)
    beta = max(objective.beta, LEAST_BETA)
    if objective.name == "square_loss":
        return square_loss(sums, beta=beta * objective.unit)
    return elbo_loss(sums, noise, beta=beta)


def collapsed_posterior(
    state: SparseState, data: Data, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Optimal mean (M, 1) and root (1, M, M) for the hyper-parameters of a state; O(n M^2)."""
    noise = objective.family.gaussian_noise(state.likelihood)
    if objective.name == "fitc":
        return fitc_posterior(state.kernel, data, state.Z, noise)
    sums = statistics(state.kernel, data, state.Z)
    beta = max(objective.beta, LEAST_BETA)
    if objective.name == "square_loss":
        return square_posterior(sums, beta=beta * objective.unit)
    return elbo_posterior(sums, noise, beta=beta)


def fit_posterior(
    state: SparseState,
    data: Data,
    objective: Objective,
    *,
    max_iter: int,
    tol: float,
    watch: BestState | None = None,
    callback: Callback | None = None,
) -> Training:
    """Learn q(u), and hyper-parameters with it, where there is no closed form.

    Parameters
    ----------
    state, data, max_iter, tol, watch, callback
        As for `fit_collapsed`; the posterior of the state is where the search begins.
    objective : Objective
        "log_loss" or "elbo", with exact gradients.

    Returns
    -------
    Training
    """

    features = None
    if not (objective.learn_kernel or objective.learn_inducing):
        features = FixedFeatures(state.kernel, data.X, state.Z, state.offset)

    def loss(values: Values) -> Tensor:
        return posterior_loss(state, data, objective, values, features=features)

    return _search(state, data, objective, loss, True, max_iter, tol, watch, callback)


def posterior_loss(
    state: SparseState,
    data: Data,
    objective: Objective,
    values: Values,
    *,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
    features: FixedFeatures | None = None,
) -> Tensor:
    """The objective at a point, its rows' part multiplied by `scale`; a scalar in nats.

    `features` of the rows save their computation where kernel and inducing points do not move.
    """
    if features is not None:
        mean, var = features.moments(values.mean, values.root)
    else:
        mean, var = latent_moments(
            state.kernel,
            data.X,
            values.Z,
            values.mean,
            values.root,
            theta=values.theta,
            offset=state.offset,
        )
    likelihood = objective.family.with_parameters(values.likelihood)
    rows = data_loss(objective, likelihood, data, mean, var, generator)
    return scale * rows + objective.beta * kl_from_standard_normal(values.mean, values.root)


def total_loss(state: SparseState, data: Data, objective: Objective) -> float:
    """The objective, "log_loss" or "elbo", of a state: in nats, by blocks of rows."""
    objective = replace(objective, gradient="exact")
    n_rows = max(1, int(_BLOCK_NUMBERS / state.mean.numel()))
    rows = 0.0
    with torch.no_grad():
        likelihood = objective.family.with_parameters(state.likelihood)
        for index in torch.arange(len(data)).split(n_rows):
            block = data.take(index)
            moments = latent_moments(
                state.kernel, block.X, state.Z, state.mean, state.root, offset=state.offset
            )
            rows += float(data_loss(objective, likelihood, block, *moments))
        return rows + objective.beta * float(kl_from_standard_normal(state.mean, state.root))


def _search(
    state: SparseState,
    data: Data,
    objective: Objective,
    loss: Loss,
    free_posterior: bool,
    max_iter: int,
    tol: float,
    watch: BestState | None,
    callback: Callback | None,
) -> Training:
    """Rounds of L-BFGS until the tolerance, the rows held out, the callback or `max_iter`."""
    recorder = StopRecorder(callback)
    total, best, converged = data.total, math.inf, False
    history: list[float] = []

    def complete(state: SparseState) -> SparseState:
        if free_posterior:
            return state
        with torch.no_grad():  # a closed-form posterior is not among the coordinates
            return state.with_posterior(*collapsed_posterior(state, data, objective))

    def hear(around: Coordinates) -> Callback:
        def callback(iteration: int, info: dict) -> bool:
            told = recorder(iteration, {"loss": info["loss"]})
            here = info["parameters"]
            return (watch is not None and watch(lambda: complete(around.to_state(here())))) or told

        return callback

    for n_steps in _rounds(max_iter):
        around = Coordinates(state, objective, data.X, free_posterior=free_posterior)
        start = around.start()
        if not start:
            with torch.no_grad():
                return Training(state, float(loss(around.values({}))), [], True)
        found = minimize_lbfgs(
            _at(around, loss, total),
            start,
            max_iter=n_steps,
            tol=tol,
            bounds=around.bounds(),
            callback=hear(around),
        )
        state, best = around.to_state(found.parameters), found.loss
        history += found.history
        converged = found.converged
        if converged or found.stopped:
            break
    return Training(state, best * total, history, converged, recorder.stopped)


def _at(around: Coordinates, loss: Loss, total: float) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss an observation as a function of the coordinates."""
    return lambda parts: loss(around.values(parts)) / total


def _rounds(max_iter: int) -> Iterator[int]:
    """Lengths of the rounds: a few short ones, then all that remains."""
    for _ in range(_SHORT_ROUNDS):
        if max_iter > 2 * _SHORT_ROUND:
            yield _SHORT_ROUND
            max_iter -= _SHORT_ROUND
    yield max_iter
