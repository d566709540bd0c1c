"""Hyper-parameters of an additive model by its evidence: all components and the noise at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.additive.state import AdditiveState, Outcome
from skgp.kernels.sde import state_space
from skgp.kernels.sde_dynamics import Dynamics
from skgp.learning.markov.additive_objectives import Objective
from skgp.learning.markov.kernel_parameters import KernelParameters
from skgp.likelihoods import Likelihood
from skgp.optim.lbfgs import LBFGSResult, minimize_lbfgs

__all__ = ["AdditiveSearch"]

Callback = Callable[[int, dict], bool | None]

_LEAST = 1e-12  # beside 1


@dataclass(frozen=True)
class AdditiveSearch:
    """L-BFGS on the evidence with the posterior at its best.

    Attributes
    ----------
    kernels : sequence of Kernel
        One a component; where the search starts.
    family : Likelihood
        Of the likelihood.
    parameters : Tensor of shape (p,) or None
        Of the likelihood, to start from.
    optimise : bool
        Whether to search at all.
    max_iter : int
    tol : float
        Least gain of an iteration, in nats a row.
    callback : callable or None
    """

    kernels: Sequence[Any]
    family: Likelihood
    parameters: Tensor | None
    optimise: bool
    max_iter: int
    tol: float
    callback: Callback | None

    def __call__(self, objective: Objective, like: Tensor) -> AdditiveState:
        """Climb an objective; `like` gives the dtype and the device of the parameters."""
        components = [KernelParameters(kernel) for kernel in self.kernels]
        theta = torch.cat([each.start for each in components])
        likelihood = self.family.initial(like) if self.parameters is None else self.parameters
        kernels, n_iter, history = list(self.kernels), 0, []
        if self.optimise and self.max_iter and len(theta) + len(likelihood):
            place = _Coordinates(components, self.kernels)
            found = self._climb(objective, place, theta, likelihood, self.callback)
            theta, likelihood = place.ends(found)
            n_iter, history = found.n_iter, [-loss for loss in found.history]
            kernels = [
                kernel.clone_with_theta(part.numpy())
                for kernel, part in zip(kernels, place.split(theta), strict=True)
            ]
        forms = [state_space(kernel) for kernel in kernels]
        with torch.no_grad():
            last = objective([form.at() for form in forms], likelihood)
        noise = self.family.with_parameters(likelihood).additive_variance()
        outcome = Outcome(likelihood, noise, last.value, n_iter, history)
        return objective.state(kernels, last.posterior, outcome)

    def _climb(
        self,
        objective: Objective,
        place: "_Coordinates",
        theta: Tensor,
        likelihood: Tensor,
        callback: Callback | None,
    ) -> LBFGSResult:
        return minimize_lbfgs(
            lambda leaves: _loss(leaves, place, objective),
            {"place": place.of(theta), "likelihood": likelihood},
            max_iter=self.max_iter,
            tol=self.tol,
            bounds={
                "place": (place.of(place.low), place.of(place.high)),
                "likelihood": self.family.box(likelihood),
            },
            callback=callback,
        )


class _Coordinates:
    r"""Where a search is: theta, but :math:`z = \log(1 + s / s_0)` for an amplitude s.

    The evidence falls as :math:`s^2` with a component that it has no use for. In :math:`\log s`
    that is a slope that never ends, which L-BFGS walks down while it should attend to the others;
    in z, linear in s where s is small, it is a parabola like any other.
    """

    def __init__(self, components: Sequence[KernelParameters], kernels: Sequence[Any]) -> None:
        self.components = components
        self._start = torch.cat([each.start for each in components])
        self._is_amplitude = torch.cat([each.is_amplitude for each in components])
        boxes = [torch.tensor(kernel.bounds).reshape(-1, 2).double() for kernel in kernels]
        self.low, self.high = torch.cat(boxes).unbind(1)

    def of(self, theta: Tensor) -> Tensor:
        """Coordinates of theta (t,)."""
        z = torch.log1p(((theta - self._start) / 2).exp())
        return torch.where(self._is_amplitude, z, theta)

    def theta(self, place: Tensor) -> Tensor:
        """Theta at coordinates (t,), differentiable."""
        # The entries that are no amplitudes are kept from overflow, whose gradient is NaN.
        z = torch.where(self._is_amplitude, place, 1.0).clamp(min=_LEAST)
        return torch.where(self._is_amplitude, self._start + 2 * z.expm1().log(), place)

    def split(self, theta: Tensor) -> tuple[Tensor, ...]:
        """The part of each component."""
        return theta.split([len(each.start) for each in self.components])

    def dynamics(self, theta: Tensor) -> list[Dynamics]:
        """Of each component."""
        parts = zip(self.components, self.split(theta), strict=True)
        return [each.form.at(each.parameters(part)) for each, part in parts]

    def pull(self, theta: Tensor, slopes: Sequence[Tensor]) -> Tensor:
        """Gradient in theta from those in the parameters of each component."""
        parts = zip(self.components, self.split(theta), slopes, strict=True)
        return torch.cat([each.pull(part, slope) for each, part, slope in parts])

    def ends(self, found: LBFGSResult) -> tuple[Tensor, Tensor]:
        """Theta and the likelihood's parameters of a search."""
        theta = self.theta(found.parameters["place"]).clamp(self.low, self.high)
        return theta, found.parameters["likelihood"]


def _loss(leaves: dict[str, Tensor], place: _Coordinates, objective: Objective) -> Tensor:
    """Negative evidence a row, with its gradient as a plane in torch's graph."""
    theta, likelihood = place.theta(leaves["place"]), leaves["likelihood"]
    at = theta.detach()
    with torch.no_grad():
        found = objective(place.dynamics(at), likelihood.detach())
        slope = place.pull(at, found.posterior.gradients())
    plane = (likelihood - likelihood.detach()) @ found.likelihood_gradient + (theta - at) @ slope
    return -(found.value + plane) / objective.total
