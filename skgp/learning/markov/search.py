"""Hyper-parameters of state-space models by their evidence: L-BFGS-B over theta and likelihood."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from skgp.learning.markov.defaults import (
    FISHER_RIDGE,
    INNER,
    LEAST_GAP,
    NOISE_LOG_SD,
    PRIOR_LOG_SD,
)
from skgp.learning.markov.objectives import Component, Evaluation, SeriesObjective
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import LBFGSResult, minimize_lbfgs

_LEAST = 1e-12  # mathematical: beside 1


@dataclass
class Search:
    """Where a search ended."""

    components: list[Component]  # with the hyper-parameters found
    parameters: Tensor  # (p,) of the likelihood
    value: float  # the evidence, in nats
    n_iter: int = 0
    history: list[float] = field(default_factory=list)  # evidence an observation, by iteration
    knots: Tensor | None = None  # (M,) inducing locations, where they end

    @property
    def kernels(self) -> list[Any]:
        """One a component."""
        return [each.kernel for each in self.components]

    @property
    def kernel(self) -> Any:
        """The only one."""
        return self.components[0].kernel


def maximise(
    kernels: Sequence[Any],  # or `Component`s: one each, without noise
    objective: SeriesObjective,
    likelihood: Likelihood,  # bounds of its free parameters, and start unless these are given
    *,
    parameters: Tensor | None = None,  # (p,) of the likelihood, to start from
    max_iter: int = 100,  # 0 evaluates only
    tol: float = 1e-7,  # least gain of an iteration, in nats per observation
    callback: Callback | None = None,
    **options: Any,  # ``knots``, ``learn_knots``, ``amplitudes`` and ``prior`` of `Climb`
) -> Search:
    """Climb the evidence from the kernels' own hyper-parameters, within their bounds."""
    climb = Climb(kernels, objective, likelihood, **options)
    climb.tol = INNER * tol
    start = climb.start(parameters)
    if max_iter and len(start):
        return climb.run(start, max_iter, tol, callback)
    value = climb.evaluate(climb.thetas(start)[0], start).value
    return Search(climb.components, climb.parameters(start), value, knots=climb.knots(start))


class Climb:
    r"""The evidence as a loss at a place: theta of all components, the likelihood, the knots.

    Where `amplitudes` may vanish, as those of an additive model's components, :math:`z = \log(1 +
    s / s_0)` stands in the place for an amplitude s: the evidence falls as :math:`s^2` with a
    component that it has no use for. In :math:`\log s` that is a slope that never ends, which
    L-BFGS walks down while it should attend to the others; in z, linear in s where s is small, it
    is a parabola like any other.

    The evidence of an additive model of many columns and few rows is greatest where their sum
    follows the noise. With a `prior` of kernels (variances :math:`s_0^2`, scales :math:`\ell_0`)
    and of the likelihood's initial parameters :math:`\sigma_0^2` the loss has besides

    .. math:: \sum_j \Big( \sqrt 2\, \frac{s_j}{s_{0j}} + \frac{1}{2 c^2} \log^2
              \frac{\ell_j}{\ell_{0j}} \Big)
              + \frac{1}{2 c_0^2} \log^2 \frac{\sigma^2}{\sigma_0^2} :

    amplitudes are exponential with mean square :math:`s_0^2`, so that the components' variances sum
    to that of the data if the :math:`s_0^2` do; the rest is log-normal.

    Where f is the log rate of counts, of which its mean leaves the mean as it is, more of them are
    zero the wider it is: rare ones are likeliest without bounds. There its standard deviation is
    half-normal.

    Without `knots` (M,), the inducing locations, there is a state at every time. Those that are
    learned move by the first of them and the logarithms of the gaps, which keeps their order. A
    place is in main memory, wherever the data are.
    """

    tol = 0.0  # of an ELBO

    def __init__(
        self,
        kernels: Sequence[Any],
        objective: SeriesObjective,
        likelihood: Likelihood,
        knots: Tensor | None = None,
        learn_knots: bool = False,
        amplitudes: bool = False,
        prior: Sequence[Any] | None = None,
    ) -> None:
        self.components = [Component.of(kernel) for kernel in kernels]
        self.objective, self.likelihood = objective, likelihood
        self._fixed_knots, self._moves = knots, learn_knots and knots is not None
        self._origin = torch.cat([each.theta for each in self.components])
        self._is_amplitude = (
            torch.cat([each.is_amplitude for each in self.components]) if amplitudes else None
        )
        ends = accumulate((len(each.theta) for each in self.components), initial=0)
        self._parts = [slice(*pair) for pair in pairwise(ends)]
        n_theta = len(self._origin)
        self._medians: Tensor | None = None  # of theta and the likelihood, (t + p,)
        if prior is not None:
            thetas = [Component.of(kernel).theta for kernel in prior]
            self._medians = torch.cat([*thetas, likelihood.initial(self._origin)])
        self._likelihood = slice(n_theta, n_theta + len(likelihood.free_parameters()))
        initial = likelihood.initial(self._origin).requires_grad_()
        # That of `prior`, where there is one, holds for the likelihood, too.
        self._likelihood_has_prior = prior is None and likelihood.log_prior(initial).requires_grad

    # ---- places ----------------------------------------------------------------------------------

    def start(self, parameters: Tensor | None = None) -> Tensor:
        """Where the search begins."""
        if parameters is None:
            parameters = self.likelihood.initial(self._origin)
        start = [self._place(self._origin), parameters.to(self._origin)]
        if self._moves:
            knots = cast(Tensor, self._fixed_knots).to(self._origin)
            start += [knots[:1], knots.diff().log()]
        return torch.cat(start)

    def bounds(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of a place."""
        low, high = (
            [self._place(torch.cat(theta)), parameters]
            for theta, parameters in zip(
                zip(*((each.low, each.high) for each in self.components), strict=True),
                self.likelihood.box(self._origin),
                strict=True,
            )
        )
        if self._moves:
            # Knots that meet, or leave, would take the transitions between them to a limit.
            first, log_gaps = start[self._likelihood.stop :].tensor_split([1])
            span = float(log_gaps.exp().sum())
            low += [first - span, torch.full_like(log_gaps, math.log(LEAST_GAP * span))]
            high += [first + span, torch.full_like(log_gaps, math.log(2.0 * span))]
        return torch.cat(low), torch.cat(high)

    def _place(self, theta: Tensor) -> Tensor:
        if self._is_amplitude is None:
            return theta
        z = torch.log1p(((theta - self._origin) / 2).exp())
        return torch.where(self._is_amplitude, z, theta)

    def thetas(self, place: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Theta of each component, and the derivatives of all, (t,), in the place; None for 1."""
        theta, slope = place[: self._likelihood.start], None
        if self._is_amplitude is not None:
            z = torch.where(self._is_amplitude, theta, 1.0).clamp(min=_LEAST)
            slope = 2 * z.exp() / z.expm1() * (theta >= _LEAST)
            slope = torch.where(self._is_amplitude, slope, 1.0)
            theta = torch.where(self._is_amplitude, self._origin + 2 * z.expm1().log(), theta)
        return [theta[part] for part in self._parts], slope

    def parameters(self, place: Tensor) -> Tensor:
        """Of the likelihood, (p,)."""
        return place[self._likelihood]

    def knots(self, place: Tensor) -> Tensor | None:
        """The knots (M,), where the data are."""
        if not self._moves:
            return self._fixed_knots
        first, log_gaps = place[self._likelihood.stop :].tensor_split([1])
        return torch.cat([first, first + log_gaps.exp().cumsum(0)]).to(self._fixed_knots)

    # ---- the search ------------------------------------------------------------------------------

    def run(
        self, start: Tensor, max_iter: int, tol: float, callback: Callback | None = None
    ) -> Search:
        """Climb from somewhere to the top.

        The first step is the gradient. That of an observation may be too short to gain anything,
        as of rare labels; a search that ends with it goes on with that of all.
        """
        found = self._minimise(start, max_iter, tol, callback)
        if found.converged and found.n_iter == 1 < max_iter:
            total, (first,) = self.objective.total, found.history
            tol *= max(1.0, abs(first)) * total / max(1.0, abs(first) * total)
            more = self._minimise(found.parameters["place"], max_iter - 1, tol, callback, total)
            if more.loss < found.loss:
                more.n_iter, more.history = 1 + more.n_iter, [first, *more.history]
                found = more
        return self.ended(found.parameters["place"], found.loss, found.n_iter, found.history)

    def _minimise(
        self,
        start: Tensor,
        max_iter: int,
        tol: float,
        callback: Callback | None,
        scale: float = 1.0,  # of the loss while it is minimised
    ) -> LBFGSResult:
        def loss(leaves: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
            value, slope = self.loss(leaves["place"])
            return scale * value, {"place": scale * slope}

        def told(iteration: int, info: dict[str, Any]) -> bool:
            return bool(callback and callback(iteration, {**info, "loss": info["loss"] / scale}))

        place, bounds = {"place": start}, {"place": self.bounds(start)}
        found = minimize_lbfgs(
            loss, place, max_iter=max_iter, tol=tol, bounds=bounds, callback=told
        )
        found.loss, found.history = found.loss / scale, [each / scale for each in found.history]
        return found

    def ended(self, place: Tensor, loss: float, n_iter: int, losses: list[float]) -> Search:
        """The search of some losses an observation that ended at a place, and at one of them."""
        thetas = zip(self.components, self.thetas(place)[0], strict=True)
        return Search(
            [each.at(theta.clamp(each.low, each.high)) for each, theta in thetas],
            self.parameters(place).clone(),
            -loss * self.objective.total,
            n_iter,
            [-value for value in losses],
            self.knots(place),
        )

    def evaluate(self, thetas: list[Tensor], place: Tensor) -> Evaluation:
        """Evidence, and what its gradients are made of."""
        pairs = list(zip(self.components, thetas, strict=True))
        dynamics = [each.dynamics(theta) for each, theta in pairs]
        found = self.objective(dynamics, self.parameters(place), self.knots(place), tol=self.tol)
        if not self.likelihood.has_log_link:
            return found
        losses = [0.5 * FISHER_RIDGE * each.variances(theta) for each, theta in pairs]

        def gradients() -> list[Tensor]:
            return [g - loss.to(g) for g, loss in zip(found.gradients(), losses, strict=True)]

        value = found.value - float(torch.cat(losses).sum())
        return replace(found, value=value, gradients=gradients)

    def loss(self, place: Tensor) -> tuple[float, Tensor]:
        """Negative evidence an observation, and its gradient."""
        place = place.detach()
        return self.loss_of(self.evaluate(self.thetas(place)[0], place), place)

    def loss_of(self, found: Evaluation, place: Tensor) -> tuple[float, Tensor]:
        """The same where the evidence has been evaluated."""
        thetas, slope = self.thetas(place)
        *bars, of_likelihood, of_knots = _beside(
            place,
            *found.gradients(),
            found.likelihood_gradient,
            place[:0] if found.knot_gradient is None else found.knot_gradient,
        )
        pairs = zip(self.components, thetas, bars, strict=True)
        slopes = [each.pull(theta, bar) for each, theta, bar in pairs]
        value, gradient = found.value, torch.cat([*slopes, of_likelihood])
        if self._medians is not None:
            log_prior, in_theta = self._log_prior(torch.cat([*thetas, self.parameters(place)]))
            value, gradient = value + log_prior, gradient + in_theta
        if self._likelihood_has_prior:
            at = self.parameters(place).clone().requires_grad_()
            of_prior = self.likelihood.log_prior(at)
            value = value + float(of_prior.detach())
            gradient[self._likelihood] += torch.autograd.grad(of_prior, at)[0]
        if slope is not None:
            gradient[: len(slope)] *= slope
        if self._moves:
            # A gap moves all knots behind it.
            behind = of_knots[1:].flip(0).cumsum(0).flip(0)
            gaps = place[self._likelihood.stop + 1 :].exp()
            gradient = torch.cat([gradient, of_knots.sum()[None], behind * gaps])
        scale = -1 / self.objective.total
        return scale * value, scale * gradient

    def _log_prior(self, at: Tensor) -> tuple[float, Tensor]:
        """Log-density, but for a constant, of theta and the likelihood's (t + p,); its gradient."""
        log_ratio = at - cast(Tensor, self._medians)
        is_amplitude = torch.zeros_like(at, dtype=torch.bool)
        if self._is_amplitude is not None:
            is_amplitude[: len(self._is_amplitude)] = self._is_amplitude
        of_amplitude = math.sqrt(2) * (log_ratio / 2).exp()
        sd = torch.full_like(at, PRIOR_LOG_SD)
        sd[self._likelihood] = NOISE_LOG_SD
        z = log_ratio / sd
        loss = torch.where(is_amplitude, of_amplitude, 0.5 * z.square()).sum()
        return -float(loss), -torch.where(is_amplitude, 0.5 * of_amplitude, z / sd)


def _beside(place: Tensor, *vectors: Tensor) -> list[Tensor]:
    """Vectors on the device and in the dtype of a place; of another device, in one transfer."""
    if all(each.device == place.device and each.dtype == place.dtype for each in vectors):
        return list(vectors)
    far = [each for each in vectors if each.device != place.device]
    moved = iter(torch.cat(far).to(place).split([len(each) for each in far]) if far else ())
    return [each.to(place) if each.device == place.device else next(moved) for each in vectors]
