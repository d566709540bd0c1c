r"""Minimising an objective: by L-BFGS with all rows at hand, by Adam on minibatches.

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
The coordinates are those of :mod:`skgp.learning.local.minibatch`. The rate stays while it pays,
then falls linearly to 0 over as many steps again, which averages the noise away.

After minibatches of the log-loss the mean may move to that of least squares (`choose_blend`).

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.collapsed import evidence_ratio, square_loss_path, statistics
from skgp.inference.sparse import FixedFeatures, ReferenceGaussian, SparseState, whitened_features
from skgp.learning.defaults import LEARNING_RATE
from skgp.learning.local.minibatch import Coordinates, Parts
from skgp.learning.selection import choose
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import BestState, Objective, held_out_losses
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.runtime import Callback
from skgp.optim import BoundedAdam, LossPlateau, sample_without_replacement
from skgp.optim.bfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder, settled


@dataclass(frozen=True)
class Training:
    """Where a search ended."""

    state: SparseState
    loss: float  # the objective, in nats (squared units of y for the square loss), of all rows
    history: list[float] = field(default_factory=list)  # the same an observation
    converged: bool = False  # whether the tolerance ended the search
    stopped: bool = False  # whether the callback did


class SparseCoordinates(Coordinates):
    """Coordinates around a state, q(u) measured from that of the state (`ReferenceGaussian`).

    ``free_posterior`` is False where q(u) is the closed-form optimum for given hyper-parameters; X
    (n, d) are the training inputs.
    """

    def __init__(
        self, state: SparseState, objective: Objective, X: Tensor, *, free_posterior: bool = True
    ) -> None:
        super().__init__(state, objective, X)
        self.reference = ReferenceGaussian(state.mean, state.root) if free_posterior else None

    def start_of_q(self) -> dict[str, Tensor]:
        """Coordinates of q(u), if it is free."""
        return self.reference.start() if self.reference else {}

    def posterior(self, parts: Parts) -> dict[str, Tensor]:
        """Mean and root of coordinates."""
        if self.reference is None:
            return {}
        mean, root = self.reference.posterior(parts["alpha"], parts["triangle"])
        return {"mean": mean, "root": root}


def fit_all_rows(
    state: SparseState,  # to begin with
    data: Data,
    objective: Objective,
    *,
    max_iter: int,
    tol: float,  # relative fall of the objective in an iteration below which to stop
    watch: BestState | None = None,  # scores states on held-out rows, stops when they get no better
    callback: Callback | None = None,
) -> Training:
    """Rounds of L-BFGS until the tolerance, the held-out rows, the callback or `max_iter`.

    Over hyper-parameters, inducing points and q(u), the latter in closed form where it has one:
    then the posterior of `state` does not matter, and that of the result is optimal. Gradients are
    exact.
    """
    recorder, closed = StopRecorder(callback), objective.has_closed_form
    total, best, converged = data.total, math.inf, False
    history: list[float] = []
    features = None
    if not (closed or objective.learn_kernel or objective.learn_inducing):
        features = FixedFeatures(state.kernel, data.X, state.Z, state.offset)

    around = SparseCoordinates(state, objective, data.X, free_posterior=not closed)

    def loss(parts: Parts) -> Tensor:
        here, theta = around.values(parts), parts.get("theta")
        if closed:
            return objective.collapsed_loss(here, data, theta) / total
        value = objective.posterior_loss(here, data, theta, features=features)
        return (value - objective.likelihood.log_prior(here.likelihood)) / total

    def complete(state: SparseState) -> SparseState:
        # A closed-form posterior is not among the coordinates.
        return objective.with_optimum(state, data) if closed else state

    def tell(iteration: int, info: dict) -> bool:
        stop, here = recorder(iteration, {"loss": info["loss"]}), info["parameters"]
        return (watch is not None and watch(lambda: complete(around.to_state(here())))) or stop

    for n_steps in _rounds(max_iter):
        around = SparseCoordinates(state, objective, data.X, free_posterior=not closed)
        start = around.start()
        if not start:
            with torch.no_grad():
                best, converged = float(loss({})), True
            break
        box = around.bounds()
        found = minimize_lbfgs(loss, start, max_iter=n_steps, tol=tol, bounds=box, callback=tell)
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


def fit_minibatch(
    state: SparseState,  # near the optimum of its hyper-parameters: it is the unit of the steps
    data: Data,
    objective: Objective,  # "log_loss" or "elbo", with any gradient
    *,
    generator: torch.Generator,
    max_iter: int,  # steps
    batch_size: int | None = None,  # b, at most n; 4 M by default, at least 1000
    learning_rate: float | None = None,  # of logarithms of hyper-parameters; others are multiples
    tol: float = 1e-6,  # fall of the smoothed objective, relative to its whole fall so far
    watch: BestState | None = None,  # hears of every fourth step, and scores the last state
    callback: Callback | None = None,
) -> Training:
    r"""Learn q(u), and hyper-parameters with it, from minibatches or by stochastic gradients.

    :math:`O(c\,(b M^2 + M^3))` a step, and memory of O(c b M).

    After 30 steps without a fall of `tol`, or where `watch` would stop, the rate begins to fall:
    the best state often comes then. The loss returned is estimated from the minibatches of the last
    tenth of the steps; the search has converged if the rate began to fall before half of
    `max_iter`. A NonFiniteLossError refuses an objective or gradient that is not finite.
    """
    n, total = len(data), data.total
    # With fewer rows, the O(M^3) part of a step outweighs that of the rows.
    enough = max(defaults.LEAST_BATCH, defaults.BATCH_PER_INDUCING * len(state.Z))
    size = min(n, enough if batch_size is None else batch_size)
    rate = LEARNING_RATE if learning_rate is None else learning_rate
    around = SparseCoordinates(state, objective, data.X)
    leaves = {name: value.clone().requires_grad_() for name, value in around.start().items()}
    recorder = StopRecorder(callback)

    def loss(iteration: int) -> Tensor:
        batch = data
        if size < n:
            batch = data.take(sample_without_replacement(n, size, generator=generator))
        how: dict[str, Any] = {"scale": n / size, "generator": generator}
        values = around.values(leaves)
        value = objective.posterior_loss(values, batch, leaves.get("theta"), **how)
        return (value - objective.likelihood.log_prior(values.likelihood)) / total

    def watching(iteration: int, loss: float) -> bool:
        due = watch is not None and iteration % defaults.WATCH_EVERY == 0
        return due and watch(lambda: around.to_state(leaves))  # type: ignore[misc]

    patience, smoothing = defaults.SPARSE_PATIENCE, defaults.SPARSE_SMOOTHING
    plateau = LossPlateau(tol=tol, patience=patience, smoothing=smoothing)
    # The usual epsilon: that of the curvature changed objectives and held-out losses of whole
    # batches by less than 4e-4 (labels and counts, 400 observations, 60 to 240 steps; q(u) starts
    # far from its optimum).
    loop = BoundedAdam(
        leaves, loss, around.bounds(), shares=defaults.RATE_SHARES, eps={}, callback=recorder
    )
    converged = loop.flat_then_falling(
        rate,
        max_iter,
        share=1.0,
        stopping=[plateau, watching],
        while_falling=[lambda iteration, loss: watching(iteration, loss) and False],
    )
    found, history = around.to_state(leaves), loop.history
    if watch is not None:
        watch.score(found)
    return Training(found, total * settled(history), history, converged, recorder.stopped)


@dataclass(frozen=True)
class Blend:
    r"""Means of the log-loss moved towards those of least squares: :math:`a_s = (1 - s) a + s a_t`.

    The log-loss weighs the squared error of a row by its predictive precision, and so gives up on
    rows of great variance; steps on minibatches leave noise in the mean besides. With Gaussian
    noise the mean of least squares is known, :math:`a_t = (G + t I)^{-1} b`. Between it and the
    mean that was found the log-loss is flat while the error falls fast, as it does for averages of
    predictions that err independently.
    """

    share: float  # s
    ratio: float  # t in units of the mean prior variance


@torch.no_grad()
def choose_blend(state: SparseState, kept: Data, held_out: Data, objective: Objective) -> Blend:
    """The blend that held-out rows prefer, for a posterior of the log-loss; O(n M^2 + M^3).

    By the sum of the log-loss and of the squared error in units of twice its mean at s = 0, which
    is the log-loss of the same means under a single variance: means should be good whatever
    variances go with them.
    """
    sums = statistics(state.kernel, kept, state.Z)
    ratios = evidence_ratio(sums) * sums.gram.new_tensor(defaults.BLEND_RIDGES)
    means = list(square_loss_path(sums, ratios).split(1, dim=1))  # (M, 1) each
    square = replace(objective, name="square_loss")

    def half_squares(mean: Tensor) -> Tensor:
        return held_out_losses(replace(state, mean=mean), square, held_out)

    found = half_squares(state.mean)
    unit = 2 * found.mean().clamp_min(torch.finfo(found.dtype).tiny)
    best = choose([half_squares(mean) / unit for mean in means])

    def losses(share: float) -> Tensor:
        moved = replace(state, mean=(1 - share) * state.mean + share * means[best])
        return held_out_losses(moved, objective, held_out) + half_squares(moved.mean) / unit

    shares = defaults.BLEND_SHARES
    return Blend(shares[choose([losses(share) for share in shares])], ratios.tolist()[best])


@torch.no_grad()
def blended(state: SparseState, data: Data, blend: Blend) -> SparseState:
    """The state with its mean moved towards the least squares of `data`; O(n M^2 + M^3)."""
    if blend.share == 0:
        return state
    sums = statistics(state.kernel, data, state.Z)
    mean = square_loss_path(sums, sums.gram.new_tensor([blend.ratio]))
    return replace(state, mean=(1 - blend.share) * state.mean + blend.share * mean)


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
