r"""Algorithm 1: the bound of eq. 11 maximised by steps of Adam [1]_ on minibatches; and a polish.

A step estimates the bound from a set B of b of the n rows, drawn without replacement,

.. math:: \hat{\mathcal L} = \frac nb \sum_{i \in B} w_i \left( E_{q(f_i)}[\log p(y_i \mid f_i)]
    - \frac{\kappa}{N} \mathrm{KL}_i \right),

whose mean over all such sets, or over the sets of a partition, is the bound itself. It costs
:math:`O(b H^3)` whatever M, but for passes over the vectors that Adam keeps.

The rate stays flat, then
falls linearly to 0, which averages the noise of the minibatches away.

Unwhitened means are strongly coupled, and Adam is slow to learn them where H is large. It does
best what the closed forms cannot: hyper-parameters and inducing points together with q(u), from
where those arrive. The bound grows with hyper-parameters and inducing points that fit the training
rows; whether the predictions gain is for other rows to say (`polish`).

The coordinates (`Coordinates`) are hyper-parameters, inducing points and q(u) in natural units.
Directions of these are about equally steep: a search by L-BFGS is well conditioned, and one
learning rate for each kind of coordinate suits most data. Near the optimum the ELBO an observation
has a curvature of about 1 / N in the coordinates of q(u), N the number of observations, and a
gradient at x standard deviations from its optimum is x / N. With :math:`\epsilon` = rate / N Adam's
step is there x, that of Newton. The usual :math:`10^{-8}` makes steps of whole rates of gradients
that are rounding alone, as they are where a closed form has found the means: data that differed by
1e-14 had other predictions. Of minibatches the noise, far above rounding, would count as well, and
steps become slow: the greater :math:`\epsilon` is for gradients without noise.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.inference.neighbors.search import NeighborSearch
from skgp.kernels.scales import length_scales
from skgp.learning.defaults import LEARNING_RATE
from skgp.learning.local.bound import LocalObjective, bound, latent_moments
from skgp.learning.local.defaults import (
    FALLING,
    LOCAL_RATE_SHARES,
    PLATEAU_GAIN,
    PLATEAU_WINDOW,
    REFRESH_EVERY,
    REPORT_EVERY,
)
from skgp.learning.selection import improves
from skgp.linalg import warn_caller
from skgp.linalg.runtime import Callback
from skgp.optim import BoundedAdam, NonFiniteLossError, sample_without_replacement
from skgp.optim.stopping import StopRecorder

Parts = Mapping[str, Tensor]


class Coordinates(ABC):
    """Coordinates around a state of some posterior; a subclass adds those of q(u).

    Hyper-parameters are logarithms as they are, inducing points are measured in length scales. A
    search that moves far does well to begin anew, from coordinates around the point reached.
    """

    def __init__(self, state: Any, objective: Any, X: Tensor) -> None:
        self.state, self.likelihood = state, objective.likelihood
        self.units = length_scales(state.kernel, X.double()).to(state.Z)
        self.learn_kernel = objective.learn_kernel and state.kernel.n_dims > 0
        self.learn_likelihood = objective.learn_likelihood and len(state.likelihood) > 0
        self.learn_inducing = objective.learn_inducing

    @abstractmethod
    def start_of_q(self) -> dict[str, Tensor]:
        """The coordinates of q(u) that are free."""

    @abstractmethod
    def posterior(self, parts: Parts) -> dict[str, Tensor]:
        """Fields of the state that say q(u), differentiable in the coordinates."""

    def start(self) -> dict[str, Tensor]:
        """The coordinates of the state; empty if nothing is free."""
        start = {}
        if self.learn_kernel:
            start["theta"] = torch.as_tensor(self.state.kernel.theta).to(self.state.Z)
        if self.learn_likelihood:
            start["likelihood"] = self.state.likelihood
        if self.learn_inducing:
            start["Z"] = self.state.Z / self.units
        return start | self.start_of_q()

    def bounds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bounds of the coordinates that have some."""
        bounds = {}
        if self.learn_kernel:
            low, high = torch.as_tensor(self.state.kernel.bounds).to(self.state.Z).T
            bounds["theta"] = low, high
        if self.learn_likelihood:
            bounds["likelihood"] = self.likelihood.box(self.state.Z)
        return bounds

    def values(self, parts: Parts) -> Any:
        """The state at coordinates, differentiable; theta is left to the caller."""
        return replace(
            self.state,
            likelihood=parts.get("likelihood", self.state.likelihood),
            Z=parts["Z"] * self.units if "Z" in parts else self.state.Z,
            **self.posterior(parts),
        )

    @torch.no_grad()
    def to_state(self, parts: Parts) -> Any:
        """The state at coordinates, theta in its kernel; shares no memory with them."""
        parts = {name: part.detach().clone() for name, part in parts.items()}
        state = self.values(parts)
        if "theta" not in parts:
            return state
        theta = parts["theta"].cpu().double().numpy()
        return replace(state, kernel=state.kernel.clone_with_theta(theta))


#: ``search(kernel, Z) -> active``: the (n, H) inducing points nearest to each of n rows.
Search = Callable[..., Tensor]
#: ``find(kernel, Z) -> near``, and ``near(rows, X) -> active``, (b, H) of the rows of numbers (b,)
#: and inputs X (b, d).
Finder = Callable[..., Callable[[Tensor, Tensor], Tensor]]
_OF_Q = ("mean", "spread")


def polish(
    state: SWSGPState,
    data: Data,
    search: Search,
    objective: LocalObjective,
    *,
    held_out: Data,
    held_out_search: Search,
    **options,
) -> tuple[SWSGPState, bool, list[float]]:
    """Algorithm 1 from a state, kept only if rows held out, of no use before, are predicted better.

    Returns the state, whether it is a polished one, and the losses of the steps.
    """

    def losses(each: SWSGPState) -> Tensor:
        active = held_out_search(each.kernel, each.Z)
        return negative_log_predictive(each, held_out, active, objective)

    try:
        found, history = fit_minibatch(state, data, of_all(search), objective, **options)
    except NonFiniteLossError as error:
        warn_caller(f"The joint polish was not kept. {error}", RuntimeWarning)
        return state, False, []
    kept = improves(losses(found), losses(state), weight=held_out.weight)
    return found if kept else state, kept, history


@torch.no_grad()
def negative_log_predictive(
    state: SWSGPState, data: Data, active: Tensor, objective: LocalObjective
) -> Tensor:
    """-log p(y) of each row, summed over the latent functions, in nats; shape (n,)."""
    likelihood = data.likelihood(objective.likelihood.with_parameters(state.likelihood))
    mean, var = latent_moments(state, data.X, active)
    return -likelihood.log_predictive(data.y, mean, var).sum(1)


def of_all(search: Search) -> Finder:
    """Finds the active sets of all rows at once, and keeps them."""

    def find(kernel, Z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        active = search(kernel, Z)
        return lambda rows, X: active[rows.to(active.device)]

    return find


def of_minibatches(n_neighbors: int, method: str) -> Finder:
    """Finds the active sets of the rows of a minibatch when it comes; keeps none."""

    def find(kernel, Z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        search = NeighborSearch(kernel, Z, method)
        return lambda rows, X: search.query(X, min(n_neighbors, len(Z))).sort(1).values

    return find


def fit_minibatch(
    state: SWSGPState,
    data: Data | MappedBlocks,  # n rows, or what reads them
    find: Finder,  # `of_all` or `of_minibatches`; called once where neither kernel nor Z moves
    objective: LocalObjective,
    *,
    generator: torch.Generator,
    max_iter: int,  # steps
    batch_size: int = 256,  # b; n if that is less
    learning_rate: float = LEARNING_RATE,  # of logarithms of hyper-parameters; others are multiples
    settle: bool = False,  # keep the rate until the bound stands still, then let it fall
    callback: Callback | None = None,
) -> tuple[SWSGPState, list[float]]:
    r"""Learn q(u), and what `objective` lets free, from minibatches.

    With `settle` the rate falls over half as many steps as it was kept for, at most `max_iter` in
    all. The history is minus the estimated bound of each step, in nats per observation; the
    callback hears of the mean since the last call. A NonFiniteLossError refuses a bound or gradient
    that is not finite.

    O(b H^2 (H + d + c) + M (c + d)) a step, of which the second part is one fused pass over the
    vectors; O(c M (b H^2 + M)) more with a full covariance.
    """
    around = LocalCoordinates(state, objective)
    leaves = {name: value.clone().requires_grad_() for name, value in around.start().items()}
    size = min(batch_size, len(data))
    loss = _MinibatchLoss(around, objective, leaves, data, find, size, generator)
    eps = LOCAL_RATE_SHARES["mean"] * learning_rate / data.total if size == len(data) else 1e-8
    loop = BoundedAdam(
        leaves,
        loss,
        around.bounds(),
        shares=LOCAL_RATE_SHARES,
        eps=dict.fromkeys(_OF_Q, eps),
        callback=_Reports(callback),
    )
    if settle:
        loop.flat_then_falling(learning_rate, max_iter, share=0.5, stopping=[_Plateau()])
    else:
        n_falling = max(1, round(FALLING * max_iter))
        loop.run(max_iter, lambda i: learning_rate * min(1.0, (max_iter - i) / n_falling))
    return around.to_state(leaves), loop.history


class LocalCoordinates(Coordinates):
    """Coordinates around a state: of q(u), means are measured in standard deviations of the state.

    Variances are logarithms. Of a full root, the logarithms of the diagonal, and the rest of each
    row in its standard deviation.
    """

    def __init__(self, state: SWSGPState, objective: LocalObjective) -> None:
        super().__init__(state, objective, state.Z)
        self.std = state.variance().sqrt()  # (M, c)

    def start_of_q(self) -> dict[str, Tensor]:
        """Coordinates of q(u)."""
        root, start = self.state.root, {"mean": self.state.mean / self.std}
        if root is None:
            return start | {"spread": 2 * self.std.log()}
        below = root.tril(-1) / self.std.T[..., None]
        return start | {"spread": below + root.diagonal(dim1=-2, dim2=-1).log().diag_embed()}

    def posterior(self, parts: Parts) -> dict[str, Tensor]:
        """Mean, and variance or root, of coordinates."""
        spread, mean = parts["spread"], parts["mean"] * self.std
        if self.state.root is None:
            return {"mean": mean, "var": spread.exp()}
        diagonal = spread.diagonal(dim1=-2, dim2=-1).exp().diag_embed()
        return {"mean": mean, "root": spread.tril(-1) * self.std.T[..., None] + diagonal}

    def active_values(self, parts: Parts, active: Tensor) -> tuple[SWSGPState, Tensor]:
        """As `values`, and `active` (b, H) among its points.

        With a diagonal covariance it has the b H active points alone: what is not active costs
        nothing.
        """
        if self.state.root is not None:
            return self.values(parts), active
        # The gradient of index_select, unlike that of indexing, adds rows without sorting them.
        flat, some = active.reshape(-1), copy.copy(self)
        local = {k: parts[k].index_select(0, flat) for k in ("mean", "spread", "Z") if k in parts}
        some.state, some.std = replace(self.state, Z=self.state.Z[flat]), self.std[flat]
        here = some.values({**parts, **local})
        return here, torch.arange(len(flat), device=flat.device).view(active.shape)


class _MinibatchLoss:
    """Minus the bound estimated from a new minibatch, in nats per observation."""

    def __init__(
        self,
        around: LocalCoordinates,
        objective: LocalObjective,
        leaves: Mapping[str, Tensor],
        data: Data | MappedBlocks,
        find: Finder,
        batch_size: int,
        generator: torch.Generator,
    ) -> None:
        self.around, self.objective, self.leaves = around, objective, leaves
        self.data, self.find = data, find
        self.batch_size, self.generator = batch_size, generator
        self.moves = "theta" in leaves or "Z" in leaves
        self.total = data.total
        self.near = find(around.state.kernel, around.state.Z)

    def __call__(self, step: int) -> Tensor:
        if self.moves and step and step % REFRESH_EVERY == 0:
            here = self.around.to_state(self.leaves)
            self.near = self.find(here.kernel, here.Z)
        n, b = len(self.data), self.batch_size
        rows = sample_without_replacement(n, b, generator=self.generator)
        theta, batch = self.leaves.get("theta"), self.data.take(rows)
        here, active = self.around.active_values(self.leaves, self.near(rows, batch.X))
        value = bound(here, batch, active, self.objective, theta=theta, total=self.total)
        log_prior = self.objective.likelihood.log_prior(here.likelihood)
        return -(value * (n / b) + log_prior) / self.total


class _Plateau:
    """Stops where the mean loss of some steps is no less than that of as many before.

    Less by the standard error of a mean, or by what nobody would notice, is no less; twice.
    """

    def __init__(self) -> None:
        self._windows: list[Tensor] = []
        self._losses: list[float] = []
        self._n_still = 0

    def __call__(self, iteration: int, loss: float) -> bool:
        self._losses.append(loss)
        if len(self._losses) < PLATEAU_WINDOW:
            return False
        self._windows.append(torch.tensor(self._losses))
        self._losses = []
        if len(self._windows) > 1:
            before, after = self._windows[-2:]
            error = float((before.var() + after.var()).sqrt()) / PLATEAU_WINDOW**0.5
            still = float(before.mean() - after.mean()) < max(error, PLATEAU_GAIN)
            self._n_still = self._n_still + 1 if still else 0
        return self._n_still == 2


class _Reports(StopRecorder):
    """Passes the mean loss of every few steps on."""

    def __init__(self, callback: Callback | None) -> None:
        super().__init__(callback)
        self.losses: list[float] = []

    def __call__(self, iteration: int, info: Mapping[str, float]) -> bool:
        self.losses.append(info["loss"])
        if self.callback is not None and len(self.losses) == REPORT_EVERY:
            mean = sum(self.losses) / REPORT_EVERY
            self.stopped = bool(self.callback(iteration + 1, {"loss": mean}))
            self.losses.clear()
        return self.stopped
