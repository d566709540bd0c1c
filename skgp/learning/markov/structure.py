r"""Trends and seasons of a default kernel of a series, where they pay.

The smooth kernel that the evidence chose competes with a :class:`~skgp.kernels.LocalLinearTrend`
and a level that wanders, the local linear trend of structural time series [1]_: a process that
returns to a mean is overconfident of a future that the data know nothing of. Either may have a
quasi-periodic process a season,

.. math:: e^{-|t| / \ell} \sum_{j=1}^J v_j \cos(2 \pi j t / p),

with the periods that the periodogram proposes (:mod:`.seasons`) over what the trend explains, one
by one, and the trend a process that is short. Of few times seasons may drift as Matern 5/2 does:
growth by a factor makes their amplitude a smooth function. Parts are chosen by the Bayesian
information criterion.

Few cycles of a stationary process say little of whether it returns to a mean: as long as both are
likely predictions are averaged over the trend and the stationary process, by their criteria. The
trend's level and slope have priors of v times the variance of the data, and v is large. The
stationary process is therefore weighed above a level of that prior, whose posterior is as wide as
its own correlations make it, and has it in predictions; of the slope :math:`\tfrac12 \log v` is
given back, as if the change over the range had the variance of the data. Periods are sought in what
covariates are not expected to add.

References
----------
.. [1] Harvey (1989), Forecasting, structural time series models and the Kalman filter, 2.3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import MAX_TIMES
from skgp.inference.markov.series import Series
from skgp.kernels.defaults import TREND_START
from skgp.kernels.sde import Dynamics, state_space
from skgp.kernels.series_parts import SeriesParts, total
from skgp.learning.markov.defaults import (
    LEAST_WEIGHT,
    SCORE_OUTLOOK,
    SEASON_LEAST_ROWS,
    STIFF_CYCLES,
    STRUCTURE_ROWS,
    TREND_LEAST_ROWS,
)
from skgp.learning.markov.objectives import Component, GaussianEvidence, Objective
from skgp.learning.markov.scoring import promised_gain, short_climb
from skgp.learning.markov.search import Search
from skgp.learning.markov.seasons import propose_seasons
from skgp.learning.markov.waves import Background
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import to_arrays


class Structure(NamedTuple):
    """Where the likelier search ended, that of another structure if it is likely, and its share."""

    best: Search
    rival: Search | None = None
    share: float = 0.0


def with_structure(
    best: Search, series: Series, objective: Objective, likelihood: Likelihood
) -> Structure:
    """A smooth kernel, and those with trend and seasons, by their criteria; see the module.

    The `series` is without what covariates are expected to add, of which the objective knows; the
    noise is Gaussian.
    """
    n, make = len(series.times), parts_of(series)
    if not (make.span and SEASON_LEAST_ROWS <= n <= STRUCTURE_ROWS):
        return Structure(best)

    def cost(part: Component) -> float:
        return 0.5 * math.log(n) * len(part.theta)

    def criterion(search: Search) -> float:
        return search.value - cost(search.components[0])

    def climb(kernel: Any, start: Tensor | None = None, least: float = -math.inf) -> Search:
        """A search that may end where the criterion will not reach the least."""
        part = Component.of(kernel)
        place = part, objective, likelihood
        try:
            return short_climb(*place, start, least + cost(part))
        except NotPositiveDefiniteError:  # digits of a process that leaves no noise
            return short_climb(*place, None, least + cost(part))

    trend = [make.trend(), make.wander()]
    trending = climb(total([make.trend(), make.steady()]))
    # A varying level and a varying slope are two maxima: a wave has to stand out over the higher.
    wandering = climb(total(trend), None, criterion(trending))
    trending = max(trending, wandering, key=criterion)
    backgrounds = Backgrounds(trending, n, likelihood)
    trending, seasons = _with_seasons(trending, trend, series, backgrounds, climb, criterion)
    if n < TREND_LEAST_ROWS:  # :mod:`.averaging` has lines beneath the process
        waves = climb(total([best.kernel, *seasons]), best.parameters) if seasons else best
        return Structure(max(best, waves, key=criterion))
    best, still = _stationary(best, seasons, series, climb, criterion)
    noise, first, short = float(trending.parameters[0].exp()), trending, make.short()
    hoped = SCORE_OUTLOOK * promised_gain(first, Component(short), objective)
    hoped += criterion(first) - cost(Component(short))
    slope = 0.5 * math.log(TREND_START)
    for part in (short, make.rough(noise)):
        least = max(criterion(trending), criterion(still) - slope)
        if hoped > least:
            found = climb(first.kernel + part, first.parameters, least)
            trending = max(trending, found, key=criterion)
    odds = criterion(trending) + slope - criterion(still)
    if abs(odds) > -math.log(LEAST_WEIGHT):
        return Structure(trending if odds > 0 else best)
    pair = (trending, still) if odds > 0 else (still, trending)
    return Structure(*pair, 1 / (1 + math.exp(abs(odds))))


def _with_seasons(
    trending: Search,
    trend: Sequence[Any],
    series: Series,
    backgrounds: "Backgrounds",
    climb: Callable[[Any], Search],
    criterion: Callable[[Search], float],
) -> tuple[Search, list[Any]]:
    """The best of a trend and of it with the seasons that the periodogram proposes, and these.

    Of few times also with seasons that drift as growth makes them, of three times the states.
    """
    make, seasons, drifts = parts_of(series), list[Any](), [0.5]
    if len(series.times) <= MAX_TIMES:
        drifts.append(2.5)
    for season in propose_seasons(series, backgrounds):
        better = seasons
        for nu in drifts:
            parts = [*seasons, make.season(season.period, season.variances, nu)]
            found = climb(total([*trend, *parts]))
            if criterion(found) > criterion(trending):
                trending, better = found, parts
        backgrounds.known, seasons = _without(found, len(parts)), better
    return trending, seasons


def _stationary(
    best: Search,
    seasons: Sequence[Any],
    series: Series,
    climb: Callable[..., Search],
    criterion: Callable[[Search], float],
) -> tuple[Search, Search]:
    """The best of a smooth kernel and of it with seasons, and the same above a level."""
    make = parts_of(series)
    still = climb(best.kernel + make.constant(), best.parameters)
    if not seasons:
        return best, still
    # What was chosen without seasons had to follow them, or may be slow beside them.
    starts = [best.components[0], Component(make.short())]
    if len(series.times) <= MAX_TIMES:
        starts.append(_slow(starts[0], make.span))
    for start in starts:
        kernel = total([start.kernel, *seasons, make.constant()])
        still = max(still, climb(kernel, still.parameters, criterion(still)), key=criterion)
    return _without(still, 1), still


@dataclass
class Backgrounds:
    """What may be no season of a series of m times: the trend fitted last, or anew, and stiff ones.

    A trend at its best may follow waves, or take them for noise; lines with a level that wanders
    as little as to leave some of them do neither.
    """

    known: Search | None
    m: int
    likelihood: Likelihood
    _stiff: list[Dynamics] | None = None  # of unit variance
    _last: tuple[Search, Dynamics] | None = None

    def __call__(self, series: Series) -> list[Background]:
        """Of the series or, where that is long, of its means in cells."""
        found, parts = self.fitted(series), parts_of(series)
        if self._stiff is None:
            make, n = replace(parts, variance=1.0), len(series.times)
            kernels = [make.line() + make.wander_to(each, n) for each in STIFF_CYCLES]
            self._stiff = [state_space(kernel).at() for kernel in kernels]
        if self._last is None or self._last[0] is not found:
            self._last = found, found.components[0].dynamics()
        stiff = [Background(each, 1.0, parts.variance) for each in self._stiff]
        return [Background(self._last[1], float(found.parameters[0].exp())), *stiff]

    def fitted(self, series: Series) -> Search:
        """The trend."""
        if self.known is not None and len(series.times) == self.m:
            return self.known
        make = parts_of(series)
        start = Component(make.trend() + make.steady())
        return short_climb(start, GaussianEvidence(series), self.likelihood)


def _without(found: Search, n_parts: int) -> Search:
    """Where a search ended, less the last addends of its kernel."""
    kernel = found.kernel
    for _ in range(n_parts):
        kernel = kernel.k1
    return replace(found, components=[Component(kernel)])


def _slow(part: Component, scale: float) -> Component:
    """A process with its length scales at one, within their bounds."""
    theta = torch.where(part.is_length_scale, math.log(scale), part.theta)
    return part.at(theta.clamp(part.low, part.high))


def parts_of(series: Series) -> SeriesParts:
    """Kernels in the units of a series."""
    times, values = to_arrays(series.times, series.totals / series.counts)
    if "gap" not in series.known:
        gaps = np.sort(np.diff(np.unique(times)))  # covariates keep rows of equal times apart
        series.known["gap"] = float(gaps[(len(gaps) - 1) // 2]) if len(gaps) else 0.0
    start, end, variance = float(times[0]), float(times[-1]), float(values.var()) or 1.0
    return SeriesParts(start, end - start, series.known["gap"], variance)
