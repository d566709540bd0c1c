"""Between a sparse-within-sparse GP and the tensors that Adam moves."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from skgp.inference.neighbors.posterior import SWSGPState
from skgp.kernels.length_scales import length_scales
from skgp.learning.local.bound import Objective

__all__ = ["Coordinates"]

_PER_POINT = ("mean", "spread", "Z")


class Coordinates:
    """Coordinates around a state, in natural units.

    Hyper-parameters are logarithms as they are, inducing points are measured in length scales,
    means in the standard deviations of the state; variances are logarithms. Of a full root,
    the logarithms of the diagonal, and the rest of each row in its standard deviation.

    Parameters
    ----------
    state : SWSGPState
    objective : Objective
        Says what is free.
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
        return {"theta": (low, high), "likelihood": self.objective.family.box(Z)}

    def values(self, parts: Mapping[str, Tensor], active: Tensor) -> tuple[SWSGPState, Tensor]:
        """The state at coordinates as far as active points matter, differentiable but in theta.

        Parameters
        ----------
        parts : dict of str to Tensor
            Coordinates.
        active : Tensor of int64, shape (b, H)

        Returns
        -------
        SWSGPState
            With a diagonal covariance, of the b H active points alone: what is not active costs
            nothing. With a full one, of all.
        Tensor of int64, shape (b, H)
            The active points among its own.
        """
        if self.state.root is not None:
            return self._full(parts), active
        # The gradient of index_select, unlike that of indexing, adds rows without sorting them.
        flat = active.reshape(-1)
        local = {name: parts[name].index_select(0, flat) for name in _PER_POINT if name in parts}
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
        return replace(
            self.state,
            likelihood=parts.get("likelihood", self.state.likelihood),
            Z=parts["Z"] * self.units if "Z" in parts else Z,
            mean=parts["mean"] * std,
            var=parts["spread"].exp(),
        )

    def _full(self, parts: Mapping[str, Tensor]) -> SWSGPState:
        diagonal = parts["spread"].diagonal(dim1=-2, dim2=-1).exp()
        return replace(
            self.state,
            likelihood=parts.get("likelihood", self.state.likelihood),
            Z=parts["Z"] * self.units if "Z" in parts else self.state.Z,
            mean=parts["mean"] * self.std,
            root=parts["spread"].tril(-1) * self.std.T[..., None] + diagonal.diag_embed(),
        )
