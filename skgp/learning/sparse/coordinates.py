"""Between a sparse model and the tensors that an optimiser moves."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.inference.sparse.reference import ReferenceGaussian
from skgp.inference.sparse.sparse import SparseState
from skgp.kernels.length_scales import length_scales
from skgp.learning.sparse.objective import Objective

__all__ = ["Coordinates", "Values"]


@dataclass(frozen=True)
class Values:
    """One point of the search, in the terms of the model; differentiable in the coordinates.

    Attributes
    ----------
    theta : Tensor of shape (kernel.n_dims,)
    likelihood : Tensor of shape (p,)
    Z : Tensor of shape (M, d)
    mean : Tensor of shape (M, c)
    root : Tensor of shape (c, M, M)
    """

    theta: Tensor
    likelihood: Tensor
    Z: Tensor
    mean: Tensor
    root: Tensor


class Coordinates:
    r"""Coordinates around a state, in which all directions are about equally steep.

    Inducing points are measured in length scales, the posterior from that of the state
    (:mod:`skgp.inference.sparse.reference`); hyper-parameters are logarithms as they are. A
    search that moves far does well to begin anew, from coordinates around the point that it has
    reached.

    Parameters
    ----------
    state : SparseState
    objective : Objective
        Says what is free.
    X : Tensor of shape (n, d)
        Training rows.
    free_posterior : bool, default=True
        False where q(u) is the closed-form optimum for given hyper-parameters.
    """

    def __init__(
        self, state: SparseState, objective: Objective, X: Tensor, *, free_posterior: bool = True
    ) -> None:
        self.state = state
        self.family = objective.family
        self.units = length_scales(state.kernel, X.double()).to(state.Z)
        self.theta = torch.as_tensor(state.kernel.theta).to(state.Z)
        self.reference = ReferenceGaussian(state.mean, state.root) if free_posterior else None
        self.learn_kernel = objective.learn_kernel and len(self.theta) > 0
        self.learn_likelihood = objective.learn_likelihood and len(state.likelihood) > 0
        self.learn_inducing = objective.learn_inducing

    def start(self) -> dict[str, Tensor]:
        """The coordinates of the state; empty if nothing is free."""
        start = {}
        if self.learn_kernel:
            start["theta"] = self.theta
        if self.learn_likelihood:
            start["likelihood"] = self.state.likelihood
        if self.learn_inducing:
            start["Z"] = self.state.Z / self.units
        return start | (self.reference.start() if self.reference else {})

    def bounds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bounds of the coordinates that have some."""
        bounds = {}
        if self.learn_kernel:
            low, high = torch.as_tensor(self.state.kernel.bounds).to(self.state.Z).T
            bounds["theta"] = low, high
        if self.learn_likelihood:
            bounds["likelihood"] = self.family.box(self.state.Z)
        return bounds

    def values(self, parts: dict[str, Tensor]) -> Values:
        """The point in the terms of the model."""
        state = self.state
        Z = parts["Z"] * self.units if self.learn_inducing else state.Z
        mean, root = state.mean, state.root
        if self.reference:
            mean, root = self.reference.posterior(parts["alpha"], parts["triangle"])
        theta = parts.get("theta", self.theta)
        return Values(theta, parts.get("likelihood", state.likelihood), Z, mean, root)

    def to_state(self, parts: dict[str, Tensor]) -> SparseState:
        """The state at the point."""
        with torch.no_grad():
            values = self.values(parts)
            return replace(
                self.state,
                kernel=self.state.kernel.clone_with_theta(values.theta.cpu().double().numpy()),
                likelihood=values.likelihood.detach(),
                Z=values.Z.detach(),
                mean=values.mean.detach(),
                root=values.root.detach(),
            )
