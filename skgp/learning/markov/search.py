"""Hyper-parameters of state-space models by their evidence: L-BFGS-B over theta and likelihood."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skgp.kernels.sde import state_space
from skgp.learning.markov.defaults import INNER, LEAST_GAP
from skgp.learning.markov.objectives import Evaluation, Objective
from skgp.likelihoods import Likelihood
from skgp.optim.bfgs import minimize_lbfgs

__all__ = ["Climb", "KernelParameters", "Search", "maximise"]

Callback = Callable[[int, dict], bool | None]

_ROUNDING = 1e-11  # mathematical: of log parameters
_LEAST = 1e-12  # mathematical: beside 1


@dataclass
class Search:
    """Where a search ended."""

    kernels: list[Any]  # one a component, with the hyper-parameters found
    parameters: Tensor  # (p,) of the likelihood
    value: float  # the evidence, in nats
    n_iter: int = 0
    history: list[float] = field(default_factory=list)  # evidence an observation, by iteration
    knots: Tensor | None = None  # (M,) inducing locations, where they end

    @property
    def kernel(self) -> Any:
        """The only one."""
        return self.kernels[0]


def maximise(
    kernels: Sequence[Any],
    objective: Objective,
    likelihood: Likelihood,
    *,
    parameters: Tensor | None = None,
    knots: Tensor | None = None,
    learn_knots: bool = False,
    amplitudes: bool = False,
    max_iter: int = 100,
    tol: float = 1e-7,
    callback: Callback | None = None,
) -> Search:
    """Climb the evidence from the kernels' own hyper-parameters, within their bounds.

    Parameters
    ----------
    kernels : sequence of Kernel
        One a component, without noise.
    objective : Objective
    likelihood : Likelihood
        Bounds of its free parameters, and start unless `parameters` are given.
    parameters : Tensor of shape (p,), optional
        Of the likelihood, to start from.
    knots : Tensor of shape (M,), optional
        Inducing locations; by default there is a state at every time.
    learn_knots : bool, default=False
        Whether they move, their order kept.
    amplitudes : bool, default=False
        Whether components may be of no use: see `_Coordinates`.
    max_iter : int, default=100
        0 evaluates only.
    tol : float, default=1e-7
        Least gain of an iteration, in nats an observation.
    callback : callable, optional

    Returns
    -------
    Search
    """
    climb = Climb(
        kernels, objective, likelihood, knots=knots, amplitudes=amplitudes, tol=INNER * tol
    )
    start = climb.start(parameters, learn_knots)
    if max_iter == 0 or not sum(len(leaf) for leaf in start.values()):
        value = climb.evaluate(start).value
        return Search(list(kernels), start["likelihood"], value, knots=knots)
    return climb.run(start, max_iter, tol, callback)


class KernelParameters:
    """A kernel, and the parameters of its state-space form as a function of theta.

    Log variances and log rates are affine functions of theta for most kernels. These are found out
    once, where torch's way through a kernel expression takes longer than the evidence of few rows.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.form = kernel, state_space(kernel)
        self.start = torch.from_numpy(kernel.theta.copy())
        self._slopes, self._level = self._affine()

    @property
    def is_amplitude(self) -> Tensor:
        """Which entries of theta, (t,), scale variances and nothing else."""
        if self._slopes is None:
            return torch.zeros(len(self.start), dtype=torch.bool)
        rates = self._slopes[len(self.form.order) :]
        return (rates.abs() < _ROUNDING).all(0)

    def parameters(self, theta: Tensor) -> Tensor:
        """Of the form, (q,), without a graph."""
        if self._slopes is None:
            return self.form.parameters(theta).detach()
        return self._level + self._slopes @ (theta - self.start)

    def pull(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Gradient in theta of a function with gradient `slope` (q,) in the parameters."""
        if self._slopes is not None:
            return slope @ self._slopes
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.form.parameters(theta) @ slope, theta)[0]

    def _affine(self) -> tuple[Tensor | None, Tensor]:
        """Slopes (q, t) where the parameters are affine in theta, and the parameters at start."""
        at = self.form.parameters
        level = at(self.start)
        steps = torch.eye(len(self.start), dtype=torch.float64)
        slopes = level.new_zeros(len(level), len(steps))
        for i, step in enumerate(steps):
            slopes[:, i] = at(self.start + step) - level
        far = torch.linspace(-0.7, 0.9, len(steps), dtype=torch.float64)
        off = at(self.start + far) - level - slopes @ far
        return (slopes if bool((off.abs() < _ROUNDING).all()) else None), level


class _Coordinates:
    r"""Where a search is: theta of all components, (t,).

    In an additive model :math:`z = \log(1 + s / s_0)` stands for an amplitude s: the evidence falls
    as :math:`s^2` with a component that it has no use for. In :math:`\log s` that is a slope that
    never ends, which L-BFGS walks down while it should attend to the others; in z, linear in s
    where s is small, it is a parabola like any other.
    """

    def __init__(self, kernels: Sequence[Any], amplitudes: bool) -> None:
        self.components = [KernelParameters(kernel) for kernel in kernels]
        self.origin = torch.cat([each.start for each in self.components])
        self._is_amplitude = torch.cat([each.is_amplitude for each in self.components])
        if not amplitudes:
            self._is_amplitude = torch.zeros_like(self._is_amplitude)
        boxes = [torch.tensor(kernel.bounds).reshape(-1, 2).double() for kernel in kernels]
        self.low, self.high = torch.cat(boxes).unbind(1)

    def of(self, theta: Tensor) -> Tensor:
        """Coordinates of theta (t,)."""
        z = torch.log1p(((theta - self.origin) / 2).exp())
        return torch.where(self._is_amplitude, z, theta)

    def theta(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Theta at coordinates (t,), and its derivatives in them."""
        z = torch.where(self._is_amplitude, place, 1.0).clamp(min=_LEAST)
        amplitude = self.origin + 2 * z.expm1().log(), 2 * z.exp() / z.expm1()
        return (
            torch.where(self._is_amplitude, amplitude[0], place),
            torch.where(self._is_amplitude, amplitude[1] * (place >= _LEAST), 1.0),
        )

    def split(self, theta: Tensor) -> tuple[Tensor, ...]:
        """The part of each component."""
        return theta.split([len(each.start) for each in self.components])

    def kernels(self, place: Tensor) -> list[Any]:
        """The kernels at coordinates (t,)."""
        theta = self.theta(place)[0].clamp(self.low, self.high)
        parts = zip(self.components, self.split(theta), strict=True)
        return [each.kernel.clone_with_theta(part.numpy()) for each, part in parts]


class Climb:
    """The evidence as a loss of tensors: ``place``, ``likelihood`` and the places of knots.

    Knots move by the first of them and the logarithms of the gaps, which keeps their order. The
    tensors are in main memory, wherever the data are.
    """

    def __init__(
        self,
        kernels: Sequence[Any],
        objective: Objective,
        likelihood: Likelihood,
        *,
        knots: Tensor | None = None,
        amplitudes: bool = False,
        tol: float = 0.0,
    ) -> None:
        self.place = _Coordinates(kernels, amplitudes)
        self.objective, self.likelihood = objective, likelihood
        self.knots, self.tol = knots, tol

    def run(
        self, start: dict[str, Tensor], max_iter: int, tol: float, callback: Callback | None = None
    ) -> Search:
        """Climb from somewhere to the top."""
        bounds = self.bounds(start)
        found = minimize_lbfgs(
            self.loss, start, max_iter=max_iter, tol=tol, bounds=bounds, callback=callback
        )
        return Search(
            self.place.kernels(found.parameters["place"]),
            found.parameters["likelihood"],
            -found.loss * self.objective.total,
            found.n_iter,
            [-value for value in found.history],
            self.knots_at(found.parameters),
        )

    def start(self, parameters: Tensor | None, learn_knots: bool) -> dict[str, Tensor]:
        """Where the search begins."""
        origin = self.place.of(self.place.origin)
        likelihood = self.likelihood.initial(origin) if parameters is None else parameters
        start = {"place": origin, "likelihood": likelihood}
        if self.knots is not None and learn_knots:
            knots = self.knots.to(origin)
            start["first"], start["log_gaps"] = knots[:1], knots.diff().log()
        return start

    def bounds(self, start: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Lower and upper bounds of what moves."""
        bounds = {
            "place": (self.place.of(self.place.low), self.place.of(self.place.high)),
            "likelihood": self.likelihood.box(start["place"]),
        }
        if "log_gaps" in start:
            # Knots that meet, or leave, would take the transitions between them to a limit.
            first, gaps = start["first"], start["log_gaps"]
            span = float(gaps.exp().sum())
            ends = (math.log(part * span) for part in (LEAST_GAP, 2.0))
            low, high = (torch.full_like(gaps, end) for end in ends)
            bounds |= {"first": (first - span, first + span), "log_gaps": (low, high)}
        return bounds

    def knots_at(self, leaves: dict[str, Tensor]) -> Tensor | None:
        """The knots (M,), where the data are."""
        if self.knots is None or "first" not in leaves:
            return self.knots
        first, log_gaps = leaves["first"].detach(), leaves["log_gaps"].detach()
        return torch.cat([first, first + log_gaps.exp().cumsum(0)]).to(self.knots)

    @torch.no_grad()
    def evaluate(self, leaves: dict[str, Tensor]) -> Evaluation:
        """Evidence, and what its gradients are made of."""
        theta, _ = self.place.theta(leaves["place"])
        parts = zip(self.place.components, self.place.split(theta), strict=True)
        dynamics = [each.form.at(each.parameters(part)) for each, part in parts]
        likelihood = leaves["likelihood"].detach()
        return self.objective(dynamics, likelihood, self.knots_at(leaves), tol=self.tol)

    def loss(self, leaves: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Negative evidence an observation, and its gradients."""
        found, (theta, slope) = self.evaluate(leaves), self.place.theta(leaves["place"].detach())
        parts = zip(self.place.components, self.place.split(theta), found.gradients(), strict=True)
        pulled = torch.cat([each.pull(part, bar.to(part)) for each, part, bar in parts])
        slopes = {"place": pulled * slope, "likelihood": found.likelihood_gradient}
        if "first" in leaves and found.knot_gradient is not None:
            knots = found.knot_gradient.to(theta)
            # A gap moves all knots behind it.
            behind = knots[1:].flip(0).cumsum(0).flip(0)
            slopes["first"] = knots.sum()[None]
            slopes["log_gaps"] = behind * leaves["log_gaps"].detach().exp()
        scale = -1 / self.objective.total
        return scale * found.value, {name: scale * slope for name, slope in slopes.items()}
