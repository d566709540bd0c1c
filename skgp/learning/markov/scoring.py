"""Short searches for the hyper-parameters of a series, by scoring where the series is short [1]_.

Steps are by the inverse of Fisher's information at the start, and from there on of the average
information, the mean of Fisher's and the observed one, which is O(m^2) for each hyper-parameter.
Where L-BFGS takes 10 to 15 evaluations these are 6 to 10, and they end nearer to the maximum.

References
----------
.. [1] Gilmour, Thompson and Cullis (1995), Average information REML, Biometrics 51.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.short_gaussian import ShortEvidence, ShortSeries
from skgp.learning.markov import defaults
from skgp.learning.markov.objectives import Component, SeriesObjective
from skgp.learning.markov.search import Search, maximise
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_within
from skgp.optim.defaults import N_PAIRS
from skgp.optim.scoring import Scored, minimize_scored

#: Of a search that is short.
_SHORT = {"max_evaluations": defaults.CHOICE_ITER, "tol": defaults.CHOICE_NATS}


def short_climb(
    component: Component,
    objective: SeriesObjective,
    likelihood: Likelihood,
    parameters: Tensor | None = None,
    worth: float = -math.inf,
) -> Search:
    """A search that is short, for comparison; shorter where it will not reach what is `worth`."""
    found = scored_climb(component, objective, likelihood, parameters, worth)
    return found or plain_climb(component, objective, likelihood, parameters)


def plain_climb(
    component: Component,
    objective: SeriesObjective,
    likelihood: Likelihood,
    parameters: Tensor | None = None,
) -> Search:
    """A short search by L-BFGS."""
    tol, loss = (
        max(defaults.CHOICE_TOL, defaults.CHOICE_NATS / objective.total),
        SeriesLoss.of(component, objective),
    )
    options: dict[str, Any] = {"max_iter": defaults.CHOICE_ITER, "tol": tol}
    if loss is None:
        return maximise([component], objective, likelihood, parameters=parameters, **options)
    start, bounds = loss.start(likelihood, parameters)
    options |= {"gtol": 1e-8, "refuse_far": False, "strict": True, "n_pairs": N_PAIRS}
    x, least = minimize_within(loss.an_observation, start, bounds, **options)
    return loss.search(x, -least * objective.total)


def scored_climb(
    component: Component,
    objective: SeriesObjective,
    likelihood: Likelihood,
    parameters: Tensor | None,
    worth: float = -math.inf,
    callback: Callback | None = None,
    options: Mapping[str, Any] = MappingProxyType(_SHORT),
) -> Search | None:
    """The same by scoring; None where the information is not known in closed form.

    It ends where a step is expected to gain less than a hundredth of a nat, and where some times
    (`OUTLOOK`) the greater of the last two gains would not reach the log evidence `worth`.
    """
    loss, values = SeriesLoss.of(component, objective), list[float]()
    if loss is None or not len(component.theta):
        return None
    start, bounds = loss.start(likelihood, parameters)
    first = loss(start)
    if first[-1] is None:
        return None
    known = [first]

    def function(x: np.ndarray) -> Scored:
        """The loss, its gradient, and its information matrix."""
        try:
            found = known.pop() if known else loss(x)
        except ValueError:
            return math.inf, np.zeros_like(x), None
        value, gradient, evidence = found
        kind = "information" if found is first else "average_information"
        information = None if evidence is None else partial(loss.information, evidence, kind)
        return value, gradient, information

    def ends(least: float) -> bool:
        values.append(-least)
        if callback is not None and callback(len(values), {"loss": least / objective.total}):
            return True
        risen = list(dict.fromkeys(values))  # steps that fell short gain nothing, and say nothing
        if len(risen) < 3:
            return False
        first, second, third = risen[-3:]
        return third + defaults.OUTLOOK * max(second - first, third - second) < worth

    x, least = minimize_scored(function, start, bounds, tell=ends, **options)
    return loss.search(x, -least, values)


def settle(
    component: Component,
    objective: SeriesObjective,
    likelihood: Likelihood,
    parameters: Tensor | None,
    *,
    max_iter: int,
    tol: float,
    callback: Callback,
) -> Search | None:
    """`scored_climb` from near the maximum, to `tol` nats per observation."""
    options: dict[str, Any] = {"tol": tol * objective.total, "max_evaluations": max_iter}
    found = scored_climb(
        component, objective, likelihood, parameters, callback=callback, options=options
    )
    if found is not None and not found.n_iter:  # it began there
        found.n_iter, found.history = 1, [found.value / objective.total]
        callback(1, {"loss": -found.history[0]})
    return found


class SeriesLoss:
    """Minus the log evidence of one series under Gaussian noise, at x (t + 1,).

    That is theta and the log noise, in NumPy: torch's overhead is more than the evidence of few
    rows takes.
    """

    def __init__(self, component: Component, evidence: Any) -> None:
        self._component, self._evidence, self._total = component, evidence, evidence.total
        self._short: ShortSeries | None = evidence.short(component)
        slopes = cast(Tensor, component.slopes).T.numpy()  # (t, q) of the dynamics
        self._slopes = slopes
        if self._short is not None:
            moving = self._short.covariance.moving
            self._slopes = np.zeros((len(slopes) + 1, len(moving) + 1))
            self._slopes[:-1, :-1], self._slopes[-1, -1] = slopes[:, moving], 1.0

    @staticmethod
    def of(component: Component, objective: SeriesObjective) -> "SeriesLoss | None":
        """None where the evidence has no closed form, or the dynamics are not affine in theta."""
        evidence = single(objective)
        if not hasattr(evidence, "assess") or component.slopes is None:
            return None
        return SeriesLoss(component, evidence)

    def start(
        self, likelihood: Likelihood, parameters: Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where a search starts, and the bounds (t + 1, 2)."""
        component = self._component
        free = np.log([*likelihood.free_parameters()])
        bounds = np.concatenate([component.form.bounds, free[:, 1:]])
        begin = free[:, 0] if parameters is None else parameters.numpy()
        start = np.concatenate([component.theta.numpy(), begin])
        return np.minimum(np.maximum(start, bounds[:, 0]), bounds[:, 1]), bounds

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray, ShortEvidence | None]:
        """The loss, its gradient (t + 1,), and what else is known of a short series."""
        found = self.evidence(x)
        if found is not None:
            return -found.value, -(self._slopes @ found.gradient()), found
        theta = torch.from_numpy(x[:-1])
        dynamics = self._component.affine_dynamics(x[:-1])
        value, slope, q = self._evidence.assess([dynamics], math.exp(x[-1]), rough=True)
        gradient = np.append(self._component.pull(theta, q.gradients()[0]).numpy(), slope)
        return -value, -gradient, None

    def value(self, x: np.ndarray) -> float:
        """The log evidence alone."""
        found = self.evidence(x)
        return -self(x)[0] if found is None else found.value

    def evidence(self, x: np.ndarray) -> ShortEvidence | None:
        """What is known at x of a short series, but for very little noise."""
        if self._short is None:
            return None
        return self._short(self._component.affine(x[:-1]), math.exp(x[-1]))

    def information(self, found: ShortEvidence, kind: str) -> np.ndarray:
        """Information of that kind, (t + 1, t + 1), plus a ridge: a weak normal prior of x."""
        information = getattr(found, kind)(self._slopes)
        information.flat[:: len(information) + 1] += defaults.FISHER_RIDGE
        return information

    def gains(self, x: np.ndarray, other: Component, thetas: np.ndarray) -> np.ndarray | None:
        """Nats that another process at thetas (g, t) promises beside that at x, (g,).

        By `ShortEvidence.gains`; None where that is not known.
        """
        found, part = self.evidence(x), self._evidence.short(other)
        if found is None or part is None:
            return None
        K = np.stack([part.covariance.at(other.affine(theta)).K for theta in thetas])
        return found.gains(self._slopes, K, defaults.FISHER_RIDGE)

    def an_observation(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss an observation, and its gradient."""
        loss, gradient, _ = self(x)
        return loss / self._total, gradient / self._total

    def search(self, x: np.ndarray, value: float, values: Sequence[float] = ()) -> Search:
        """A search that ended at x, and had some values on its way."""
        noise, (low, high) = torch.from_numpy(x[-1:].copy()), self._component.form.bounds.T
        moved = self._component.at(torch.from_numpy(np.minimum(np.maximum(x[:-1], low), high)))
        history = [each / self._total for each in values]
        return Search([moved], noise, value, len(values), history)


def promised_gain(found: Search, part: Component, objective: SeriesObjective) -> float:
    """Nats that a process beside those where a search ended promises, whatever its length scale.

    By `ShortEvidence.gains`; infinite where that is not known.
    """
    component, loss = found.components[0], SeriesLoss.of(found.components[0], objective)
    if loss is None or part.slopes is None:
        return math.inf
    low, high = part.low[part.is_length_scale], part.high[part.is_length_scale]
    thetas = part.theta.repeat(defaults.N_SCORED, 1)
    share = torch.linspace(0, 1, defaults.N_SCORED + 2, dtype=torch.float64)[1:-1, None]
    thetas[:, part.is_length_scale] = low + share * (high - low)
    gains = loss.gains(np.append(component.theta, found.parameters), part, thetas.numpy())
    return math.inf if gains is None else float(gains.max())


def single(objective: Any) -> Any:
    """The evidence of the only latent process, else None."""
    objectives = getattr(objective, "objectives", [objective])
    return objectives[0] if len(objectives) == 1 else None
