r"""Hyper-parameters that the columns of an additive model have in common.

Few rows tell little of each of many columns: with a variance and a length scale of its own each the
sum follows the noise, even at the maximum of a posterior of these. Here all variances have one
factor :math:`e^a`, and all length scales one :math:`e^b`, beside what they begin with,

.. math:: -\log p = -\log p(y \mid a, b, \sigma^2) + \frac{a^2 + b^2}{2 c^2}
          + \frac{1}{2} \log^2 \frac{\sigma^2}{\sigma_0^2} .

The maximum is a model of its own, that of ridge regression where functions are lines, and where the
prior of columns that differ is centred.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skgp.learning.markov.choice import evidence_at
from skgp.learning.markov.defaults import (
    COLUMN_NATS,
    COMMON_LOG_SD,
    FEW_ADDITIVE_ROWS,
    LONG_START,
    NOISE_LOG_SD,
    PRIOR_START_NOISE,
)
from skgp.learning.markov.objectives import Objective
from skgp.learning.markov.search import Climb, Search, maximise
from skgp.likelihoods import Likelihood


class CommonClimb(Climb):
    """The evidence as a loss at a place: a, b and the parameters of the likelihood."""

    def __init__(
        self, kernels: Sequence[Any], objective: Objective, likelihood: Likelihood
    ) -> None:
        super().__init__(kernels, objective, likelihood)
        groups = [(each.is_amplitude, each.is_length_scale) for each in self.components]
        self._groups = torch.stack([torch.cat(group) for group in zip(*groups, strict=True)])

    def start(self, parameters: Tensor | None = None) -> Tensor:
        """The likelier of the kernels as they are and of long ones, whose functions are lines."""
        if parameters is None:
            parameters = self.likelihood.initial(self._origin)
        starts = [torch.cat([torch.tensor(ab), parameters]) for ab in ((0.0, 0.0), LONG_START)]
        return min(starts, key=lambda place: self.loss({"place": place})[0])

    def bounds(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of a place: those of all kernels hold."""
        low, high = (
            torch.cat([getattr(each, end) - each.theta for each in self.components])
            for end in ("low", "high")
        )
        boxes = self.likelihood.box(self._origin)
        return (
            torch.cat([torch.stack([low[group].max() for group in self._groups]), boxes[0]]),
            torch.cat([torch.stack([high[group].min() for group in self._groups]), boxes[1]]),
        )

    def thetas(self, place: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Theta of each component."""
        theta = self._origin + place[:2] @ self._groups.double()
        return [theta[part] for part in self._parts], None

    def parameters(self, place: Tensor) -> Tensor:
        """Of the likelihood, (p,)."""
        return place[2:]

    def knots(self, place: Tensor) -> None:
        """There are none."""

    def loss_of(self, found: Any, place: Tensor) -> tuple[float, dict[str, Tensor]]:
        """Negative evidence an observation, and its gradient."""
        value, slope = super().loss_of(found, place)
        whole = slope["place"]
        shared = self._groups.double() @ whole[: len(self._origin)]
        z = place - torch.cat([place.new_zeros(2), self.likelihood.initial(self._origin)])
        precision = torch.full_like(z, NOISE_LOG_SD**-2)
        precision[:2] = COMMON_LOG_SD**-2
        scale = 1 / self.objective.total
        value += 0.5 * scale * float(precision @ z.square())
        gradient = torch.cat([shared, whole[self._likelihood]]) + scale * precision * z
        return value, {"place": gradient}


def climb_columns(
    kernels: Sequence[Any],
    objective: Objective,
    likelihood: Likelihood,
    prior: Sequence[Any],
    parameters: Tensor | None = None,
    **ends: Any,
) -> Search:
    """Hyper-parameters of the columns of an additive model, in common where few rows tell no more.

    The search of those of each column has a prior (:class:`Climb`) about the common ones, or about
    the `prior` of many rows. It starts from these, or from the kernels with `parameters` of the
    likelihood where these are given. `ends` are ``max_iter``, ``tol`` and a ``callback`` that tells
    if it has `stopped`.
    """
    together = None
    if objective.total <= FEW_ADDITIVE_ROWS:
        climb = CommonClimb(prior, objective, likelihood)
        together = climb.run(climb.start(), **ends)
        prior = together.components
        if ends["callback"].stopped:
            return together
    if parameters is None and together is not None:
        kernels, parameters = together.components, together.parameters
    elif parameters is None:
        parameters = likelihood.initial(torch.empty(0, dtype=torch.float64))
        parameters += math.log(PRIOR_START_NOISE) * likelihood.is_gaussian
    options: dict[str, Any] = {"parameters": parameters, "amplitudes": True, **ends}
    apart = maximise(kernels, objective, likelihood, prior=prior, **options)
    if together is None:
        return apart
    gain = evidence_at(apart, objective, likelihood) - evidence_at(together, objective, likelihood)
    return apart if gain >= COLUMN_NATS * len(kernels) else together
