r"""Trends and seasons of a default kernel of a series, where they pay.

The smooth kernel that the evidence chose competes with a :class:`~skgp.kernels.LocalLinearTrend`
and a level that wanders, the local linear trend of structural time series [1]_: a process that
returns to a mean is overconfident of a future that the data know nothing of. Either may have a
quasi-periodic process a season,

.. math:: e^{-|t| / \ell} \sum_{j=1}^J v_j \cos(2 \pi j t / p),

with the periods that the periodogram proposes (:mod:`.seasons`), one by one, and the trend a
process that is short. All choices are by the Bayesian information criterion, in which the trend's
level, slope and start, integrated over a wide prior, do not count: of equals the trend is chosen.
Periods are sought in what covariates are not expected to add.

References
----------
.. [1] Harvey (1989), Forecasting, structural time series models and the Kalman filter, 2.3.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from skgp.inference.markov.series import Series
from skgp.kernels.series_parts import SeriesParts, total
from skgp.learning.defaults import SEASON_LEAST_ROWS, STRUCTURE_ROWS, TREND_COEFFICIENTS
from skgp.learning.markov.objectives import Component, GaussianEvidence
from skgp.learning.markov.search import Search, short_climb
from skgp.learning.markov.seasons import propose_seasons
from skgp.likelihoods import Likelihood

Climb = Callable[..., Search]  # of a component and, perhaps, parameters of the likelihood


def with_structure(best: Search, series: Series, climb: Climb, likelihood: Likelihood) -> Search:
    """The best of a smooth kernel and of those with trend and seasons; see the module.

    `climb` is a short search from a component's hyper-parameters; the noise is Gaussian.
    """
    n, make = len(series.times), parts_of(series)
    if not SEASON_LEAST_ROWS <= n <= STRUCTURE_ROWS:
        return best

    def criterion(search: Search) -> float:
        return search.value - 0.5 * math.log(n) * len(search.components[0].theta)

    trend = [make.trend(), make.wander()]
    seasons: list[Any] = []
    trending = climb(Component(total(trend)))
    for season in propose_seasons(series, partial(background, likelihood)):
        parts = [*seasons, make.season(season.period, season.variances)]
        found = climb(Component(total([*trend, *parts])))
        if criterion(found) > criterion(trending):
            trending, seasons = found, parts
    if seasons:
        found = climb(Component(total([make.smooth(), *seasons])))
        best = max(best, found, key=criterion)
    noise = float(trending.parameters[0].exp())
    starts = [trending.kernel + part for part in (make.short(), make.rough(noise))]
    more = [climb(Component(start), trending.parameters) for start in starts]
    trending = max([trending, *more], key=criterion)
    allowed = 0.5 * math.log(n) * TREND_COEFFICIENTS
    return trending if criterion(trending) + allowed >= criterion(best) else best


def background(likelihood: Likelihood, series: Series) -> Search:
    """A trend and a level that wanders, fitted to a series."""
    make = parts_of(series)
    start = Component(make.trend() + make.wander())
    return short_climb(start, GaussianEvidence(series), likelihood)


def parts_of(series: Series) -> SeriesParts:
    """Kernels in the units of a series."""
    times, values = series.times, series.totals / series.counts
    gaps = times.diff()
    gaps = gaps[gaps > 0]
    return SeriesParts(
        start=float(times[0]),
        span=float(times[-1] - times[0]),
        gap=float(gaps.median()) if len(gaps) else 0.0,
        variance=float(values.var(correction=0)) or 1.0,
    )
