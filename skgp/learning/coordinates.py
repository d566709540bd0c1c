r"""Hyper-parameters, inducing points and q(u) in natural units, those of the steps of Adam.

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
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skgp.kernels.scales import length_scales

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
