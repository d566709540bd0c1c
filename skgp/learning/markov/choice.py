r"""The choice of a kernel for a series by the evidence, and hyper-parameters that are shared.

Of several kernels for a series the evidence chooses. The first of them finds the length scale: of
many rows on some 2000, once spread evenly (which shows slow motion) and once in stretches of
consecutive ones (which shows quick motion), and all rows say which is right. From there the kernels
compete on some 20000 rows of that kind. Few rows tell less, and labels less than numbers: scales
far below the gaps between them are not tried, nor are kernels of many hyper-parameters.

Of an additive model columns may have hyper-parameters in common (`CommonClimb`). Few rows tell
little of each of many columns: with a variance and a length scale of its own each the sum follows
the noise, even at the maximum of a posterior of these. Here all variances have one factor
:math:`e^a`, and all length scales one :math:`e^b`, beside what they begin with,

.. math:: -\log p = -\log p(y \mid a, b, \sigma^2) + \frac{a^2 + b^2}{2 c^2}
          + \frac{1}{2} \log^2 \frac{\sigma^2}{\sigma_0^2} .

The maximum is a model of its own, that of ridge regression where functions are lines, and where the
prior of columns that differ is centred.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.series import Series
from skgp.kernels.hyperparameters import n_dims_of
from skgp.learning.markov import defaults
from skgp.learning.markov.objectives import Component, SeriesObjective
from skgp.learning.markov.scoring import SeriesLoss, short_climb
from skgp.learning.markov.search import Climb, Search, maximise
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback


def choose_kernel(
    kernels: Sequence[Any],
    make_objective: Callable[[Sequence[Series]], SeriesObjective],
    processes: Sequence[Series],
    likelihood: Likelihood,
    callback: Callback | None = None,
) -> Search:
    """Choose among kernels by the evidence, for `maximise` to go on; the first finds the scale.

    The kernels have to forget: stretches of rows stand apart. `make_objective` makes the objective
    of the series of all latent processes; the callback is called after every kernel, and True ends
    the choice.
    """
    n_rows, whole = len(processes[0].y), make_objective(processes)
    told = processes[0].total * min(1.0, likelihood.information)
    first, *others = map(Component, _affordable(kernels, told, likelihood))
    if n_rows <= 2 * defaults.SERIES_SCALE_ROWS:
        kind, objective = "all", whole
        best = _search_scale(first, whole, likelihood, processes[0], climbs=bool(others))
        if not others:  # the climb is the caller's
            return best
    else:
        found = {}
        for each in _PARTS:
            some = _part(processes, each, defaults.SERIES_SCALE_ROWS)
            found[each] = _search_scale(first, make_objective(some), likelihood, some[0])
        kind, best = max(found.items(), key=lambda pair: evidence_at(pair[1], whole, likelihood))
        objective = make_objective(_part(processes, kind, defaults.CHOICE_ROWS))
    searches: list[Search] = []

    def cost(component: Component) -> float:
        """Akaike's, a nat for every hyper-parameter; that of few rows, beyond the first kernel."""
        is_first, n_dims = component.form.kernel is first.form.kernel, len(component.theta)
        return n_dims + defaults.FEW_NATS * (not is_first and not _tell(told, n_dims))

    def criterion(search: Search) -> float:
        return search.value - cost(search.components[0])

    for number, component in enumerate([best.components[0], *others]):
        if _is_past_the_best(component, searches):
            continue
        if kind == "all" and not number:  # it has climbed there
            searches.append(best)
        else:
            # Noise that a rough kernel explains away is not there for a smooth one to begin with.
            start = component.with_length_scale_of(best.components[0]) if number else component
            parameters = None if number else best.parameters
            worth = max(map(criterion, searches), default=-math.inf) + cost(start)
            searches.append(short_climb(start, objective, likelihood, parameters, worth))
        if callback is not None and callback(number, {"loss": -searches[-1].value}):
            break
    return max(searches, key=criterion)


def _is_past_the_best(component: Component, searches: Sequence[Search]) -> bool:
    """Whether kernels of as many hyper-parameters got worse on the way to its smoothness.

    The evidence rises and falls once with the number of states.
    """
    peers = [
        (each.components[0].form.n_states, each.value)
        for each in searches
        if len(each.components[0].theta) == len(component.theta)
    ]
    own = component.form.n_states
    return any(
        (own - a) * (a - b) > 0 and of_b > of_a + defaults.PAST_NATS
        for a, of_a in peers
        for b, of_b in peers
    )


#: Ways to take some rows of many.
_PARTS: dict[str, Callable[[Series, int], Series]] = {
    "spread": lambda series, n_rows: series.thinned(n_rows),
    "stretches": lambda series, n_rows: series.stretches(n_rows, n_rows // defaults.N_STRETCHES),
}


def _part(processes: Sequence[Series], kind: str, most: int) -> list[Series]:
    """So many rows of each process, in one of the ways of `_PARTS`; few rows are all taken."""
    few = len(processes[0].y) <= 2 * most
    return list(processes) if few else [_PARTS[kind](series, most) for series in processes]


def _affordable(kernels: Sequence[Any], n_rows: float, likelihood: Likelihood) -> list[Any]:
    """The first kernel, and those whose hyper-parameters so many rows can tell.

    Fewer numbers tell by many nats, without noise, a kernel of as many hyper-parameters.
    """
    first, *others = kernels
    most = n_dims_of(first) if likelihood.is_gaussian and n_rows >= defaults.FEWEST_ROWS else 0
    pairs = [(each, n_dims_of(each)) for each in others]
    return [first, *(each for each, n_dims in pairs if n_dims <= most or _tell(n_rows, n_dims))]


def _tell(n_rows: float, n_dims: int) -> bool:
    """Whether so many rows tell the hyper-parameters."""
    return defaults.ROWS_A_PARAMETER * n_dims <= n_rows


def evidence_at(search: Search, objective: SeriesObjective, likelihood: Likelihood) -> float:
    """Evidence, maybe of other data, at the hyper-parameters that a search found."""
    options: dict[str, Any] = {"parameters": search.parameters, "max_iter": 0}
    return maximise(search.components, objective, likelihood, **options).value


def _search_scale(
    component: Component,
    objective: SeriesObjective,
    likelihood: Likelihood,
    series: Series,
    *,
    climbs: bool = True,
) -> Search:
    """The best of several multiples of the length scales, or where a climb from it ends."""
    parameters = likelihood.initial(component.theta)
    thetas = component.scaled(_telling_scales(component, series))
    loss = SeriesLoss.of(component, objective)
    values = [
        loss.value(np.append(theta, parameters))
        if loss is not None
        else objective(
            [component.dynamics(theta)], parameters, tol=defaults.INNER * defaults.START_TOL
        ).value
        for theta in thetas
    ]
    best = int(np.argmax(values))
    found = Search([component.at(thetas[best])], parameters, values[best])
    return short_climb(found.components[0], objective, likelihood) if climbs else found


def _telling_scales(component: Component, series: Series) -> Tensor:
    """Multiples of the length scales that are not all noise between the rows."""
    gaps, own = series.gaps[1:], component.theta[component.is_length_scale]
    gaps = gaps[gaps.isfinite() & (gaps > 0)]  # covariates keep rows of equal times apart
    scales = torch.tensor(defaults.SCALES, dtype=torch.float64)
    if not (len(gaps) and len(own)):
        return scales[1:2]
    short = float(gaps.kthvalue(1 + len(gaps) // 10).values)
    telling = own.mean().exp() * scales >= defaults.LEAST_SCALE * short
    return scales[: max(2, int(telling.sum()))]


class CommonClimb(Climb):
    """The evidence as a loss at a place: a, b and the parameters of the likelihood."""

    def __init__(
        self, kernels: Sequence[Any], objective: SeriesObjective, likelihood: Likelihood
    ) -> None:
        super().__init__(kernels, objective, likelihood)
        groups = [(each.is_amplitude, each.is_length_scale) for each in self.components]
        self._groups = torch.stack([torch.cat(group) for group in zip(*groups, strict=True)])

    def start(self, parameters: Tensor | None = None) -> Tensor:
        """The likelier of the kernels as they are and of long ones, whose functions are lines."""
        if parameters is None:
            parameters = self.likelihood.initial(self._origin)
        starts = [
            torch.cat([torch.tensor(ab), parameters]) for ab in ((0.0, 0.0), defaults.LONG_START)
        ]
        return min(starts, key=lambda place: self.loss(place)[0])

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

    def loss_of(self, found: Any, place: Tensor) -> tuple[float, Tensor]:
        """Negative evidence an observation, and its gradient."""
        value, whole = super().loss_of(found, place)
        shared = self._groups.double() @ whole[: len(self._origin)]
        z = place - torch.cat([place.new_zeros(2), self.likelihood.initial(self._origin)])
        precision = torch.full_like(z, defaults.NOISE_LOG_SD**-2)
        precision[:2] = defaults.COMMON_LOG_SD**-2
        scale = 1 / self.objective.total
        value += 0.5 * scale * float(precision @ z.square())
        return value, torch.cat([shared, whole[self._likelihood]]) + scale * precision * z


def climb_columns(
    kernels: Sequence[Any],
    objective: SeriesObjective,
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
    together = common_columns(objective, likelihood, prior, **ends)
    if together is not None:
        prior = together.components
        if ends["callback"].stopped:
            return together
    if parameters is None and together is not None:
        kernels, parameters = together.components, together.parameters
    elif parameters is None:
        parameters = likelihood.initial(torch.empty(0, dtype=torch.float64))
        parameters += math.log(defaults.PRIOR_START_NOISE) * likelihood.is_gaussian
    options: dict[str, Any] = {"parameters": parameters, "amplitudes": True, **ends}
    apart = maximise(kernels, objective, likelihood, prior=prior, **options)
    return apart_if_likelier(apart, together, objective, likelihood)


def common_columns(
    objective: SeriesObjective, likelihood: Likelihood, prior: Sequence[Any], **ends: Any
) -> Search | None:
    """The maximum of common factors of the kernels of a `prior`; None of many rows."""
    if objective.total > defaults.FEW_ADDITIVE_ROWS:
        return None
    climb = CommonClimb(prior, objective, likelihood)
    return climb.run(climb.start(), **ends)


def apart_if_likelier(
    apart: Search, together: Search | None, objective: SeriesObjective, likelihood: Likelihood
) -> Search:
    r"""Hyper-parameters of each column, or common ones where these do not gain enough.

    k of c columns, those with a hundredth of the variance or more, have to gain some nats each and
    :math:`\log(c / k)`, which says which of the columns they are; or a nat for each of the c.
    """
    if together is None:
        return apart
    gain = evidence_at(apart, objective, likelihood) - evidence_at(together, objective, likelihood)
    blocks = [[pair[1] for pair in each.dynamics().blocks] for each in apart.components]
    variances = np.array([sum(float(block.variance) for block in each) for each in blocks])
    n_kept = int((variances >= defaults.LEAST_SHARE * variances.sum()).sum())
    n_columns = len(variances)
    least = n_kept * (defaults.COLUMN_NATS + math.log(n_columns / max(n_kept, 1)))
    return apart if gain >= min(least, n_columns) else together
