r"""Minimising an objective: by L-BFGS with all rows at hand, or by Adam on minibatches.

Each round of L-BFGS begins from coordinates around the state that the last one has reached; three
short ones and a long one learn inducing points several times faster than one search in the
coordinates of the start. Hyper-parameters and inducing points that minimise the log-loss of the
training rows can make the predictive variance at those rows too small, as the ELBO cannot: it
charges the whole variance of the prior that q(u) leaves. ``BestState`` stops where the loss of
held-out rows is least, and so keeps what is gained before.

A step of Adam [1]_ estimates the objective from a set B of b of the n rows, drawn without
replacement,

.. math:: \hat{\mathcal L} = \frac nb \sum_{i \in B} w_i\, \ell_i + \beta\, \mathrm{KL}(q \,\|\, p),

whose mean over all such sets is the objective itself. It costs :math:`O(b M^2 + M^3)`, whatever n.
In these coordinates each kind of parameter has a natural unit and so a learning rate of its own
that suits most data. The rate stays while it pays, then falls linearly to 0 over as many steps
again, which averages the noise away.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse import FixedFeatures, SparseState
from skgp.learning import defaults
from skgp.learning.selection import held_out_rows
from skgp.learning.sparse.objective import Coordinates, Objective, Values
from skgp.optim import Adam, LossPlateau, TrainingLoop, sample_without_replacement
from skgp.optim.bfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder

__all__ = ["BestState", "Training", "fit_all_rows", "fit_minibatch", "held_out_losses", "split"]

Callback = Callable[[int, dict], bool | None]


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


# --------------------------------------------------------------------------------- held-out rows


def split(data: Data, fraction: float, generator: torch.Generator) -> tuple[Data, Data]:
    """Rows to learn from and held-out rows, stratified by y; equal rows of X stay together.

    Held out is this fraction of the rows, at most 4000 and at least one.
    """
    n = len(data)
    n_out = min(max(1, round(fraction * n)), defaults.MAX_HELD_OUT, n - 1)
    labels = bool((data.y.abs() == 1).all())
    y = data.y[:, 0] if data.y.shape[1] == 1 else data.y.argmax(1)
    out = torch.from_numpy(held_out_rows(y, n_out, generator, X=data.X, classes=labels))
    return data.take(~out), data.take(out)


@torch.no_grad()
def held_out_losses(state: SparseState, objective: Objective, data: Data) -> Tensor:
    """Losses (n,) of the predictions for rows that were not trained on, weighted to a mean of all.

    In nats; for "square_loss", half the squared error. Summed over several latent functions.
    """
    posterior, data = state.posterior(), data.to(torch.float64)
    if objective.name == "square_loss":
        losses = 0.5 * (posterior.mean(data.X) - data.y).square()
    else:
        likelihood = objective.likelihood.with_parameters(state.likelihood.double()).at(data.offset)
        losses = -likelihood.log_predictive(data.y, *posterior.mean_and_variance(data.X))
    losses = losses.sum(1)
    return losses if data.weight is None else losses * data.weight * len(data) / data.total


class BestState:
    """Keeps the state of a search that predicts the held-out rows best, and says when to stop.

    Every fifth iteration is scored; six scores without a new best stop. ``loss`` is the least mean
    loss, ``losses`` all of them, ``best_rows`` those of the best state by row.
    """

    best_state: SparseState
    best_rows: Tensor  # (n,)

    def __init__(self, objective: Objective, held_out: Data) -> None:
        self.objective, self.held_out = objective, held_out
        self.loss = math.inf
        self.losses: list[float] = []
        self._n_calls = self._n_worse = 0

    def __call__(self, state: Callable[[], SparseState]) -> bool:
        """Hear of an iteration; return whether to stop. `state` is called when it is time."""
        self._n_calls += 1
        return self._n_calls % defaults.SCORE_EVERY == 0 and self.score(state())

    def score(self, state: SparseState) -> bool:
        """Score a state; return whether to stop."""
        rows = held_out_losses(state, self.objective, self.held_out)
        loss = float(rows.mean())
        loss = loss if math.isfinite(loss) else math.inf
        self._n_worse += 1
        if not self.losses or loss < self.loss:
            self.best_state, self.best_rows = state, rows
            self.loss, self._n_worse = loss, 0
        self.losses.append(loss)
        return self._n_worse >= defaults.SCORE_PATIENCE


# ------------------------------------------------------------------------------ all rows: L-BFGS


def fit_all_rows(
    state: SparseState,
    data: Data,
    objective: Objective,
    *,
    max_iter: int,
    tol: float,
    watch: BestState | None = None,
    callback: Callback | None = None,
) -> Training:
    """Rounds of L-BFGS until the tolerance, the held-out rows, the callback or `max_iter`.

    Over hyper-parameters, inducing points and q(u), the latter in closed form where it has one:
    then the posterior of `state` does not matter, and that of the result is optimal. Gradients are
    exact.

    Parameters
    ----------
    state : SparseState
        To begin with.
    data : Data
    objective : Objective
    max_iter : int
    tol : float
        Relative fall of the objective in an iteration below which to stop.
    watch : BestState, optional
        Scores states on held-out rows, and stops when they no longer get better.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True stops.
    """
    recorder, closed = StopRecorder(callback), objective.has_closed_form
    total, best, converged = data.total, math.inf, False
    history: list[float] = []
    features = None
    if not (closed or objective.learn_kernel or objective.learn_inducing):
        features = FixedFeatures(state.kernel, data.X, state.Z, state.offset)

    def loss(state: SparseState, values: Values) -> Tensor:
        if closed:
            return objective.collapsed_loss(state.kernel, data, values)
        return objective.posterior_loss(state, data, values, features=features)

    def complete(state: SparseState) -> SparseState:
        # A closed-form posterior is not among the coordinates.
        return objective.with_optimum(state, data) if closed else state

    for n_steps in _rounds(max_iter):
        around = Coordinates(state, objective, data.X, free_posterior=not closed)
        start = around.start()
        if not start:
            with torch.no_grad():
                best, converged = float(loss(state, around.values({}))) / total, True
            break
        found = minimize_lbfgs(
            _by_row(around, loss, total),
            start,
            max_iter=n_steps,
            tol=tol,
            bounds=around.bounds(),
            callback=_hearing(recorder, watch, around, complete),
        )
        state, best = around.to_state(found.parameters), found.loss
        history += found.history
        converged = found.converged
        if converged or found.stopped:
            break
    return Training(complete(state), best * total, history, converged, recorder.stopped)


def _rounds(max_iter: int) -> Iterator[int]:
    """Lengths of the rounds: a few short ones, then all that remains."""
    for _ in range(defaults.SHORT_ROUNDS):
        if max_iter > 2 * defaults.SHORT_ROUND:
            yield defaults.SHORT_ROUND
            max_iter -= defaults.SHORT_ROUND
    yield max_iter


def _by_row(
    around: Coordinates, loss: Callable[[SparseState, Values], Tensor], total: float
) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss an observation as a function of the coordinates."""
    return lambda parts: loss(around.state, around.values(parts)) / total


def _hearing(
    recorder: StopRecorder,
    watch: BestState | None,
    around: Coordinates,
    complete: Callable[[SparseState], SparseState],
) -> Callback:
    """A callback that tells the recorder and, where there is one, the watch."""

    def callback(iteration: int, info: dict) -> bool:
        told = recorder(iteration, {"loss": info["loss"]})
        here = info["parameters"]
        return (watch is not None and watch(lambda: complete(around.to_state(here())))) or told

    return callback


# ------------------------------------------------------------------------------ minibatches: Adam


def fit_minibatch(
    state: SparseState,
    data: Data,
    objective: Objective,
    *,
    generator: torch.Generator,
    max_iter: int,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    tol: float = 1e-6,
    watch: BestState | None = None,
    callback: Callback | None = None,
) -> Training:
    r"""Learn q(u), and hyper-parameters with it, from minibatches or by stochastic gradients.

    :math:`O(c\,(b M^2 + M^3))` a step, and memory of O(c b M).

    Parameters
    ----------
    state : SparseState
        Where the search begins. Its posterior is also the unit of the steps: it should be near
        the optimum of its hyper-parameters.
    data : Data
    objective : Objective
        "log_loss" or "elbo", with any gradient.
    generator : torch.Generator
        Draws the minibatches, and the samples of stochastic gradients.
    max_iter : int
        Steps.
    batch_size : int, optional
        b, at most n. By default 4 M, at least 1000.
    learning_rate : float, optional
        Of the logarithms of hyper-parameters; the other rates are multiples of it. Default: .03.
    tol : float, default=1e-6
        Fall of the smoothed objective, relative to its whole fall so far, that counts as one. After
        30 steps without, the rate begins to fall; by default noise alone decides.
    watch : BestState, optional
        Hears of every fourth step, and scores the last state. Where it would stop, the rate begins
        to fall: the best state often comes then.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True stops at once.

    Returns
    -------
    Training
        Its loss is estimated from the minibatches of the last tenth of the steps; it has converged
        if the rate began to fall before half of `max_iter`.

    Raises
    ------
    NonFiniteLossError
        If the objective or its gradient is not finite.

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.likelihoods import Gaussian
    >>> X = torch.linspace(-1, 1, 300, dtype=torch.float64)[:, None]
    >>> likelihood = Gaussian(0.1, bounds=(1e-3, 1.0))
    >>> state = SparseState.prior(RBF(0.5), likelihood.initial(X), X[::30], X.new_zeros(1))
    >>> found = fit_minibatch(
    ...     state, Data(X, X.sin()), Objective(likelihood), batch_size=50, max_iter=20,
    ...     generator=torch.Generator().manual_seed(0),
    ... )
    >>> len(found.history), found.history[-1] < found.history[0]
    (20, True)
    """
    n, total = len(data), data.total
    # With fewer rows, the O(M^3) part of a step outweighs that of the rows.
    enough = max(defaults.LEAST_BATCH, defaults.BATCH_PER_INDUCING * len(state.Z))
    size = min(n, enough if batch_size is None else batch_size)
    rate = defaults.LEARNING_RATE if learning_rate is None else learning_rate
    around = Coordinates(state, objective, data.X)
    leaves = {name: value.clone().requires_grad_() for name, value in around.start().items()}
    recorder = StopRecorder(callback)

    def loss(iteration: int) -> Tensor:
        batch = data
        if size < n:
            batch = data.take(sample_without_replacement(n, size, generator=generator))
        values, scale = around.values(leaves), n / size
        estimate = objective.posterior_loss(state, batch, values, scale=scale, generator=generator)
        return estimate / total

    def here() -> SparseState:
        return around.to_state({name: leaf.detach().clone() for name, leaf in leaves.items()})

    def watching(iteration: int, loss: float) -> bool:
        return watch is not None and iteration % defaults.WATCH_EVERY == 0 and watch(here)

    loop = _BoundedAdam(leaves, loss, around.bounds(), callback=recorder)
    converged = _flat_then_falling(loop, rate, max_iter, tol, watching, recorder)
    found = here()
    if watch is not None:
        watch.score(found)
    history = loop.history["loss"]
    last = history[-(-len(history) * 9 // 10) :] or history
    return Training(found, total * sum(last) / len(last), history, converged, recorder.stopped)


class _BoundedAdam(TrainingLoop):
    """Steps of Adam, at a rate of its own for each kind of coordinate and within bounds."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        compute_loss: Callable[[int], Tensor],
        bounds: Mapping[str, tuple[Tensor, Tensor]],
        **options,
    ) -> None:
        shares = defaults.RATE_SHARES
        groups = [{"params": [leaf], "share": shares[name]} for name, leaf in parameters.items()]
        optimizer = Adam(groups, betas=defaults.SPARSE_MOMENTS)
        super().__init__(parameters, compute_loss, optimizer, **options)
        self.bounds = bounds
        self.project()

    def set_learning_rate(self, iteration: int) -> None:
        super().set_learning_rate(iteration)
        for group in self.optimizer.param_groups:
            group["lr"] *= group["share"]

    def train_step(self, iteration: int) -> float:
        loss = super().train_step(iteration)
        self.project()
        return loss

    @torch.no_grad()
    def project(self) -> None:
        """Move parameters back inside their bounds."""
        for name, (low, high) in self.bounds.items():
            self.parameters[name].clamp_(low, high)


def _flat_then_falling(
    loop: TrainingLoop,
    rate: float,
    max_iter: int,
    tol: float,
    watching: Callable[[int, float], bool],
    recorder: StopRecorder,
) -> bool:
    """Run to the end; return whether a rule, and not `max_iter`, ended the first phase."""
    patience, smoothing = defaults.SPARSE_PATIENCE, defaults.SPARSE_SMOOTHING
    plateau = LossPlateau(tol=tol, patience=patience, smoothing=smoothing)
    loop.schedule, loop.stopping = lambda iteration: rate, (plateau, watching)
    loop.run(max_iter - max_iter // 2)
    if recorder.stopped:
        return False
    converged, n_flat = loop.stopped_early, loop.n_iter
    n_falling = min(n_flat, max_iter - n_flat)
    loop.schedule = lambda iteration: rate * (1 - (iteration - n_flat) / n_falling)
    loop.stopping = (lambda iteration, loss: watching(iteration, loss) and False,)
    loop.run(n_falling)
    return converged
