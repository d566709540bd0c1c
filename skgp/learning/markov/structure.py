r"""Trends and seasons of a default kernel of a series, where they pay.

The smooth kernel that the evidence chose competes with a sum of a long and a short process and of a
quasi-periodic process a season,

.. math:: e^{-|t| / \ell} \sum_{j=1}^J v_j \cos(2 \pi j t / p),

with the periods that the periodogram proposes (:mod:`.seasons`). A process whose length scale is
of the order of the range of the times cannot be told from a trend, and returns to a mean that the
data know nothing of: a :class:`~skgp.kernels.LocalLinearTrend` takes its place, which may cost the
evidence what two hyper-parameters do by the Bayesian information criterion, for level and slope
that are integrated over a wide prior. A trend is then asked whether a process of years, as it were,
comes between it and what is short. Otherwise the choice is Akaike's, as among smooth kernels.
"""

import math
from collections.abc import Callable

from skgp.inference.markov.series import Series
from skgp.kernels.expression import summands
from skgp.kernels.series_parts import SeriesParts, longest, total
from skgp.learning.defaults import SEASON_LEAST_ROWS, STRUCTURE_ROWS, TREND_SCALE
from skgp.learning.markov.objectives import Component
from skgp.learning.markov.search import Search
from skgp.learning.markov.seasons import propose_seasons

Climb = Callable[..., Search]  # of a component and, perhaps, parameters of the likelihood


def with_structure(best: Search, series: Series, climb: Climb) -> Search:
    """The best of a smooth kernel and of those with trend and seasons; see the module.

    `climb` is a short search from a component's hyper-parameters, under Gaussian noise.
    """
    n, make = len(series.times), parts_of(series)
    if not SEASON_LEAST_ROWS <= n <= STRUCTURE_ROWS:
        return best
    seasons = []
    for season in propose_seasons(series):
        seasons.append(make.season(season.period, season.variances))
        found = climb(Component(total([make.smooth(), *seasons])))
        best = max(best, found, key=criterion)
    parts = summands(best.kernel)
    long = longest(parts, TREND_SCALE * make.span)
    if long is None:
        return best
    rest = [part for part in parts if part is not long] or [make.short()]
    found = climb(Component(total([make.trend(long), *rest])), best.parameters)
    if found.value < best.value - math.log(n):
        return best
    between = climb(Component(found.kernel + make.between()), found.parameters)
    return max(found, between, key=criterion)


def criterion(search: Search) -> float:
    """Akaike's: the evidence less a nat for every hyper-parameter."""
    return search.value - len(search.components[0].theta)


def parts_of(series: Series) -> SeriesParts:
    """Kernels in the units of a series."""
    times, values = series.times, series.totals / series.counts
    return SeriesParts(
        start=float(times[0]),
        span=float(times[-1] - times[0]),
        gap=float(times.diff().median()) if len(times) > 1 else 0.0,
        variance=float(values.var(correction=0)) or 1.0,
    )
