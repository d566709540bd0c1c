r"""Hyper-parameters, inducing points and q(u) in natural units, and steps of Adam in these.

Directions of these coordinates are about equally steep: a search by L-BFGS is well conditioned, and
one learning rate for each kind of coordinate suits most data. Near the optimum the ELBO an
observation has a curvature of about 1 / N in the coordinates of q(u), N the number of observations,
and a gradient at x standard deviations from its optimum is x / N. With :math:`\epsilon` = rate / N
Adam's step [1]_ is there x, that of Newton. The usual :math:`10^{-8}` makes steps of whole rates of
gradients that are rounding alone, as they are where a closed form has found the means: data that
differed by 1e-14 had other predictions. Of minibatches the noise, far above rounding, would count
as well, and steps become slow: the greater :math:`\epsilon` is for gradients without noise.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skgp.kernels.scales import length_scales
from skgp.learning.defaults import ADAM_MOMENTS
from skgp.linalg import NotPositiveDefiniteError
from skgp.optim import Adam, NonFiniteLossError, TrainingLoop
from skgp.optim.loop import StoppingRule

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


class BoundedAdam(TrainingLoop):
    """Steps of Adam, each kind of coordinate at its own rate and within its bounds.

    ``shares`` are the rates of each kind in units of that of the schedule, ``eps`` epsilon of the
    kinds that have one of their own.
    """

    def __init__(
        self,
        parameters: Parts,
        compute_loss: Callable[[int], Tensor],
        bounds: Mapping[str, tuple[Tensor, Tensor]],
        *,
        shares: Mapping[str, float],
        eps: Mapping[str, float],
        **options,
    ) -> None:
        groups = [
            {"params": [leaf], "share": shares[name], "eps": eps.get(name, 1e-8)}
            for name, leaf in parameters.items()
        ]
        super().__init__(parameters, compute_loss, Adam(groups, betas=ADAM_MOMENTS), **options)
        self.bounds = bounds
        self.project()

    def set_learning_rate(self, iteration: int) -> None:
        """Give each kind of coordinate its share of the rate."""
        super().set_learning_rate(iteration)
        for group in self.optimizer.param_groups:
            group["lr"] *= group["share"]

    def train_step(self, iteration: int) -> float:
        """Take a step and return to the bounds."""
        try:
            loss = super().train_step(iteration)
        except NotPositiveDefiniteError as error:
            self.restore_snapshot()
            raise NonFiniteLossError(
                f"The loss could not be computed at iteration {iteration}; the parameters were "
                f"put back to earlier ones. Lower learning_rate. {error}",
                iteration=iteration,
                parameter=None,
            ) from error
        self.project()
        return loss

    def check_finite(self, iteration: int, loss: Tensor) -> None:
        """Refuse a loss or gradients that are not finite."""
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

    def flat_then_falling(
        self,
        rate: float,
        max_iter: int,
        *,
        share: float,
        stopping: Sequence[StoppingRule] = (),
        while_falling: Sequence[StoppingRule] = (),
    ) -> bool:
        """Run at one rate while rules let it, then at rates that fall linearly to 0.

        The second phase, which averages the noise of minibatches away, takes `share` as many steps
        as the first; both take `max_iter` at most. The callback, which has the attribute `stopped`,
        ends both. Returns whether a rule ended the first.
        """
        self.schedule, self.stopping = lambda iteration: rate, tuple(stopping)
        self.run(max_iter - int(max_iter * share / (1 + share)))
        if self.callback.stopped:  # type: ignore[union-attr]
            return False
        by_rule, begin = self.stopped_early, self.n_iter
        n_falling = min(int(share * begin), max_iter - begin)
        self.schedule = lambda iteration: rate * (1 - (iteration - begin) / n_falling)
        self.stopping = tuple(while_falling)
        self.run(n_falling)
        return by_rule
