r"""Algorithm 1: the bound of eq. 11 maximised by steps of Adam [1]_ on minibatches; and a polish.

A step estimates the bound from a set B of b of the n rows, drawn without replacement,

.. math:: \hat{\mathcal L} = \frac nb \sum_{i \in B} w_i \left( E_{q(f_i)}[\log p(y_i \mid f_i)]
    - \frac{\kappa}{N} \mathrm{KL}_i \right),

whose mean over all such sets, or over the sets of a partition, is the bound itself. It costs
:math:`O(b H^3)` whatever M, but for passes over the vectors that Adam keeps.

The steps are taken in coordinates of natural units (`Coordinates`). The rate stays flat, then falls
linearly to 0, which averages the noise of the minibatches away. In these units the bound an
observation has a curvature of about 1 / N in q(u), and a gradient at x standard deviations from
its optimum is x / N. With :math:`\epsilon` = rate / N Adam's step is there x, that of Newton, where
a batch holds all observations. The usual :math:`10^{-8}` makes steps of whole rates of gradients
that are rounding alone, as they are where a closed form has found the means: data that differed by
1e-14 had other predictions.

Unwhitened means are strongly coupled, and Adam is slow to learn them where H is large. It does
best what the closed forms cannot: hyper-parameters and inducing points together with q(u), from
where those arrive. The bound grows with hyper-parameters and inducing points that fit the training
rows; whether the predictions gain is for other rows to say (`polish`).

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.kernels.scales import length_scales
from skgp.learning.local.bound import Objective, bound, latent_moments
from skgp.learning.local.defaults import (
    ADAM_MOMENTS,
    FALLING,
    LEARNING_RATE,
    LEAST_GAIN,
    PLATEAU_WINDOW,
    RATE_SHARES,
    REFRESH_EVERY,
    REPORT_EVERY,
)
from skgp.learning.selection import improves
from skgp.linalg import NotPositiveDefiniteError
from skgp.optim import Adam, NonFiniteLossError, TrainingLoop, sample_without_replacement

Callback = Callable[[int, dict], bool | None]
#: ``search(kernel, Z) -> active``: the (n, H) inducing points nearest to each of n rows.
Search = Callable[..., Tensor]
_OF_Q = ("mean", "spread")


def polish(
    state: SWSGPState,
    data: Data,
    search: Search,
    objective: Objective,
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
        found, history = fit_minibatch(state, data, search, objective, **options)
    except NonFiniteLossError as error:
        warnings.warn(f"The joint polish was not kept. {error}", RuntimeWarning, stacklevel=2)
        return state, False, []
    kept = improves(losses(found), losses(state), weight=held_out.weight)
    return found if kept else state, kept, history


@torch.no_grad()
def negative_log_predictive(
    state: SWSGPState, data: Data, active: Tensor, objective: Objective
) -> Tensor:
    """-log p(y) of each row, summed over the latent functions, in nats; shape (n,)."""
    likelihood = objective.likelihood.with_parameters(state.likelihood).at(data.offset)
    mean, var = latent_moments(state, data.X, active)
    return -likelihood.log_predictive(data.y, mean, var).sum(1)


def fit_minibatch(
    state: SWSGPState,
    data: Data,
    search: Search,
    objective: Objective,
    *,
    generator: torch.Generator,
    max_iter: int,
    batch_size: int = 256,
    learning_rate: float = LEARNING_RATE,
    settle: bool = False,
    callback: Callback | None = None,
) -> tuple[SWSGPState, list[float]]:
    r"""Learn q(u), and what `objective` lets free, from minibatches.

    Parameters
    ----------
    state : SWSGPState
        Where to begin.
    data : Data
        n rows.
    search : callable
        ``search(kernel, Z) -> active (n, H)``. Called once where neither the kernel nor Z moves.
    objective : Objective
    generator : torch.Generator
        Draws the minibatches.
    max_iter : int
        Steps.
    batch_size : int, default=256
        b; n if that is less.
    learning_rate : float, default=0.03
        Of the logarithms of hyper-parameters; the other rates are multiples of it.
    settle : bool, default=False
        Keep the rate until the bound stands still, then let it fall over half as many steps;
        `max_iter` is the most that this may take.
    callback : callable, optional
        ``callback(step, {"loss": float})`` with the mean loss since the last call; True stops.

    Returns
    -------
    state : SWSGPState
    history : list of float
        Minus the estimated bound of each step, in nats an observation.

    Raises
    ------
    NonFiniteLossError
        If the bound or its gradient is not finite.

    Notes
    -----
    O(b H^2 (H + d + c) + M (c + d)) a step, of which the second part is one fused pass over the
    vectors; O(c M (b H^2 + M)) more with a full covariance.
    """
    around = Coordinates(state, objective)
    leaves = {name: value.clone().requires_grad_() for name, value in around.start().items()}
    loss = _MinibatchLoss(around, leaves, data, search, min(batch_size, len(data)), generator)
    # Of minibatches the noise, far above rounding, would count as well, and steps become slow.
    whole = batch_size >= len(data)
    eps = RATE_SHARES["mean"] * learning_rate / data.total if whole else 1e-8
    loop = _Steps(leaves, loss, around.bounds(), eps, callback=_Reports(callback))
    if settle:
        loop.settle(max_iter, learning_rate)
    else:
        n_falling = max(1, round(FALLING * max_iter))
        loop.schedule = lambda step: learning_rate * min(1.0, (max_iter - step) / n_falling)
        loop.run(max_iter)
    return around.to_state(leaves), loop.history["loss"]


class Coordinates:
    """Coordinates around a state, in natural units.

    Hyper-parameters are logarithms as they are, inducing points are measured in length scales,
    means in the standard deviations of the state; variances are logarithms. Of a full root,
    the logarithms of the diagonal, and the rest of each row in its standard deviation.
    """

    def __init__(self, state: SWSGPState, objective: Objective) -> None:
        self.state, self.objective = state, objective
        self.units = length_scales(state.kernel, state.Z.double()).to(state.Z)
        self.std = state.variance().sqrt()  # (M, c)

    def start(self) -> dict[str, Tensor]:
        """Coordinates of the state."""
        state, objective = self.state, self.objective
        theta = torch.as_tensor(state.kernel.theta).to(state.Z)
        start = {"mean": state.mean / self.std}
        if state.root is None:
            start["spread"] = 2 * self.std.log()
        else:
            root = state.root.tril(-1) / self.std.T[..., None]
            start["spread"] = root + state.root.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        if objective.learn_kernel and len(theta):
            start["theta"] = theta
        if objective.learn_likelihood and len(state.likelihood):
            start["likelihood"] = state.likelihood
        if objective.learn_inducing:
            start["Z"] = state.Z / self.units
        return start

    def bounds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bounds of the coordinates that have some."""
        Z = self.state.Z
        low, high = torch.as_tensor(self.state.kernel.bounds).reshape(-1, 2).to(Z).T
        return {"theta": (low, high), "likelihood": self.objective.likelihood.box(Z)}

    def values(self, parts: Mapping[str, Tensor], active: Tensor) -> tuple[SWSGPState, Tensor]:
        """The state at coordinates, and `active` (b, H) among its points; differentiable.

        With a diagonal covariance it has the b H active points alone: what is not active costs
        nothing. theta is left to the caller.
        """
        if self.state.root is not None:
            return self._full(parts), active
        # The gradient of index_select, unlike that of indexing, adds rows without sorting them.
        flat = active.reshape(-1)
        local = {k: parts[k].index_select(0, flat) for k in ("mean", "spread", "Z") if k in parts}
        here = self._diagonal({**parts, **local}, self.std[flat], self.state.Z[flat])
        return here, torch.arange(len(flat), device=flat.device).view(active.shape)

    @torch.no_grad()
    def to_state(self, parts: Mapping[str, Tensor]) -> SWSGPState:
        """The state at coordinates, theta in its kernel; shares no memory with them."""
        parts = {name: part.detach().clone() for name, part in parts.items()}
        if self.state.root is None:
            values = self._diagonal(parts, self.std, self.state.Z)
        else:
            values = self._full(parts)
        if "theta" not in parts:
            return values
        theta = parts["theta"].cpu().double().numpy()
        return replace(values, kernel=values.kernel.clone_with_theta(theta))

    def _diagonal(self, parts: Mapping[str, Tensor], std: Tensor, Z: Tensor) -> SWSGPState:
        """Of points whose starting standard deviations and places are given."""
        return replace(self._common(parts, std, Z), var=parts["spread"].exp())

    def _full(self, parts: Mapping[str, Tensor]) -> SWSGPState:
        diagonal = parts["spread"].diagonal(dim1=-2, dim2=-1).exp()
        root = parts["spread"].tril(-1) * self.std.T[..., None] + diagonal.diag_embed()
        return replace(self._common(parts, self.std, self.state.Z), root=root)

    def _common(self, parts: Mapping[str, Tensor], std: Tensor, Z: Tensor) -> SWSGPState:
        return replace(
            self.state,
            likelihood=parts.get("likelihood", self.state.likelihood),
            Z=parts["Z"] * self.units if "Z" in parts else Z,
            mean=parts["mean"] * std,
        )


class _MinibatchLoss:
    """Minus the bound estimated from a new minibatch, in nats an observation."""

    def __init__(
        self,
        around: Coordinates,
        leaves: Mapping[str, Tensor],
        data: Data,
        search: Search,
        batch_size: int,
        generator: torch.Generator,
    ) -> None:
        self.around, self.leaves, self.data, self.search = around, leaves, data, search
        self.batch_size, self.generator = batch_size, generator
        self.moves = "theta" in leaves or "Z" in leaves
        self.total = data.total
        self.active = search(around.state.kernel, around.state.Z)

    def __call__(self, step: int) -> Tensor:
        if self.moves and step and step % REFRESH_EVERY == 0:
            here = self.around.to_state(self.leaves)
            self.active = self.search(here.kernel, here.Z)
        n, b = len(self.data), self.batch_size
        rows = sample_without_replacement(n, b, generator=self.generator).to(self.active.device)
        here, active = self.around.values(self.leaves, self.active[rows])
        theta, batch = self.leaves.get("theta"), self.data.take(rows)
        value = bound(here, batch, active, self.around.objective, theta=theta, total=self.total)
        return value * (-n / (b * self.total))


class _Steps(TrainingLoop):
    """Steps of Adam, each kind of coordinate at its own rate and within its bounds."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        compute_loss: Callable[[int], Tensor],
        bounds: Mapping[str, tuple[Tensor, Tensor]],
        eps: float,
        **options,
    ) -> None:
        groups = [
            {"params": [leaf], "share": RATE_SHARES[k], "eps": eps if k in _OF_Q else 1e-8}
            for k, leaf in parameters.items()
        ]
        adam = Adam(groups, betas=ADAM_MOMENTS)
        super().__init__(parameters, compute_loss, adam, **options)
        self.bounds = {name: box for name, box in bounds.items() if name in parameters}
        self.project()

    def set_learning_rate(self, iteration: int) -> None:
        super().set_learning_rate(iteration)
        for group in self.optimizer.param_groups:
            group["lr"] *= group["share"]

    def train_step(self, iteration: int) -> float:
        try:
            loss = super().train_step(iteration)
        except NotPositiveDefiniteError as error:
            self.restore_snapshot()
            raise NonFiniteLossError(
                f"The bound could not be computed at iteration {iteration}; the parameters were "
                f"put back to earlier ones. Lower learning_rate. {error}",
                iteration=iteration,
                parameter=None,
            ) from error
        self.project()
        return loss

    def check_finite(self, iteration: int, loss: Tensor) -> None:
        # A sum is one pass where isfinite is several, a time that shows for many points. Finite
        # gradients keep parameters finite; a sum that overflows is left to the exact check.
        gradients = [leaf.grad.sum() for leaf in self.parameters.values() if leaf.grad is not None]
        if not all(torch.isfinite(each) for each in (loss, *gradients)):
            super().check_finite(iteration, loss)

    @torch.no_grad()
    def project(self) -> None:
        """Move parameters back inside their bounds."""
        for name, (low, high) in self.bounds.items():
            self.parameters[name].clamp_(low, high)

    def settle(self, max_iter: int, learning_rate: float) -> None:
        """Run at one rate while the loss falls, then at rates that fall to 0."""
        plateau = _Plateau()
        self.schedule, self.stopping = lambda step: learning_rate, (plateau,)
        self.run(max(1, 2 * max_iter // 3))
        if plateau.reached or not self.stopped_early:  # and not stopped by the callback
            begin, n_falling = self.n_iter, max(1, self.n_iter // 2)
            self.schedule = lambda step: learning_rate * (1 - (step - begin) / n_falling)
            self.stopping = ()
            self.run(n_falling)


class _Plateau:
    """Stops where the mean loss of some steps is no less than that of as many before.

    Less by the standard error of a mean, or by what nobody would notice, is no less; twice.
    """

    def __init__(self) -> None:
        self.reached = False
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
            still = float(before.mean() - after.mean()) < max(error, LEAST_GAIN)
            self._n_still = self._n_still + 1 if still else 0
        self.reached = self._n_still == 2
        return self.reached


class _Reports:
    """Passes the mean loss of every few steps on, and remembers an order to stop."""

    def __init__(self, callback: Callback | None) -> None:
        self.callback, self.stopped = callback, False
        self.losses: list[float] = []

    def __call__(self, iteration: int, info: Mapping[str, float]) -> bool:
        self.losses.append(info["loss"])
        if self.callback is not None and len(self.losses) == REPORT_EVERY:
            mean = sum(self.losses) / REPORT_EVERY
            self.stopped = bool(self.callback(iteration + 1, {"loss": mean}))
            self.losses.clear()
        return self.stopped
