r"""Trends and seasons of a default kernel of a series, where they pay.

The smooth kernel that the evidence chose competes with a :class:`~skgp.kernels.LocalLinearTrend`
and a level that wanders, the local linear trend of structural time series [1]_: a process that
returns to a mean is overconfident of a future that the data know nothing of. Either may have a
quasi-periodic process a season,

.. math:: e^{-|t| / \ell} \sum_{j=1}^J v_j \cos(2 \pi j t / p),

with the periods that the periodogram (:mod:`.waves`) shows over what the trend explains, one by
one, and the trend a process that is short. Of few times seasons may drift as Matern 5/2 does:
growth by a factor makes their amplitude a smooth function. Parts are chosen by the Bayesian
information criterion.

Few cycles of a stationary process say little of whether it returns to a mean: as long as both are
likely predictions are averaged over the trend and the stationary process, by their criteria. The
trend's level and slope have priors of v times the variance of the data, and v is large. The
stationary process is therefore weighed above a level of that prior, whose posterior is as wide as
its own correlations make it, and has it in predictions; of the slope :math:`\tfrac12 \log v` is
given back, as if the change over the range had the variance of the data. Periods are sought in what
covariates are not expected to add.

The strongest peak of the periodogram, its harmonics counted, is fitted with those of them that
stand out as well and taken away, and the rest is looked at again (`propose_seasons`). A period that
might as well be a whole multiple of one found before, or of the step, is one. Where no multiple of
the first stands out, the waves of each, as of a week of few days and weekends, are looked at
together. A season that begins late may be hidden over all times: where a wave shows, but not enough
to be one, the later half is looked at.

References
----------
.. [1] Harvey (1989), Forecasting, structural time series models and the Kalman filter, 2.3.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import MAX_TIMES
from skgp.inference.markov.series import Series, make_series
from skgp.kernels.defaults import LEAST_SPAN, TREND_START
from skgp.kernels.expression import summands
from skgp.kernels.scales import far_apart
from skgp.kernels.sde import Dynamics, state_space
from skgp.kernels.series_parts import SeriesParts, total
from skgp.learning.markov import defaults
from skgp.learning.markov.objectives import Component, GaussianEvidence, SeriesObjective
from skgp.learning.markov.scoring import promised_gain, short_climb
from skgp.learning.markov.search import Search
from skgp.learning.markov.waves import (
    Background,
    Behind,
    Waves,
    cell_means,
    gains_of,
    n_below_nyquist,
    n_harmonics,
    parabola,
    periodogram,
    refined,
    snapped,
    stands_out,
    surprise,
    threshold,
    with_harmonics,
    without_waves,
)
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import to_arrays


class Structure(NamedTuple):
    """Where the likelier search ended, that of another structure if it is likely, and its share."""

    best: Search
    rival: Search | None = None
    share: float = 0.0


def with_structure(
    best: Search, series: Series, objective: SeriesObjective, likelihood: Likelihood
) -> Structure:
    """A smooth kernel, and those with trend and seasons, by their criteria; see the module.

    The `series` is without what covariates are expected to add, of which the objective knows; the
    noise is Gaussian.
    """
    n, make = len(series.times), parts_of(series)
    if not (make.span and defaults.SEASON_LEAST_ROWS <= n <= defaults.STRUCTURE_ROWS):
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
    place = trending, trend, make, _among_most(series)
    trending, seasons = _with_seasons(*place, backgrounds, climb, criterion)
    if n < defaults.TREND_LEAST_ROWS:  # :mod:`.averaging` has lines beneath the process
        waves = climb(total([best.kernel, *seasons]), best.parameters) if seasons else best
        return Structure(max(best, waves, key=criterion))
    best, still = _stationary(best, seasons, trending.parameters, make, n, climb, criterion)
    noise, first = float(trending.parameters[0].exp()), trending
    short = Component(make.short())
    hoped = defaults.SCORE_OUTLOOK * promised_gain(first, short, objective)
    hoped += criterion(first) - cost(short)
    slope = 0.5 * math.log(TREND_START)
    for part in (short.kernel, make.rough(noise)):
        least = max(criterion(trending), criterion(still) - slope)
        if hoped > least:
            found = climb(first.kernel + part, first.parameters, least)
            trending = max(trending, found, key=criterion)
    odds = criterion(trending) + slope - criterion(still)
    if abs(odds) > -math.log(defaults.LEAST_WEIGHT):
        return Structure(trending if odds > 0 else best)
    pair = (trending, still) if odds > 0 else (still, trending)
    return Structure(*pair, 1 / (1 + math.exp(abs(odds))))


def _with_seasons(
    trending: Search,
    trend: Sequence[Any],
    make: SeriesParts,
    series: Series,
    backgrounds: "Backgrounds",
    climb: Callable[[Any], Search],
    criterion: Callable[[Search], float],
) -> tuple[Search, list[Any]]:
    """The best of a trend and of it with the seasons that the periodogram proposes, and these.

    Of few times also with seasons that drift as growth makes them, of three times the states.
    """
    seasons, drifts = list[Any](), [0.5]
    if len(series.times) <= MAX_TIMES:
        drifts.append(2.5)
    for season in _of_all_or_later(series, backgrounds):
        better = seasons
        for nu in drifts:
            parts = [*seasons, make.season(season.period, season.variances, nu)]
            found = climb(total([*trend, *parts]))
            if criterion(found) > criterion(trending):
                trending, better = found, summands(found.kernel)[len(trend) :]
        backgrounds.known, seasons = _without(found, len(parts)), better
    return trending, seasons


def _of_all_or_later(series: Series, backgrounds: "Backgrounds") -> Iterator["Season"]:
    """Seasons of all times, or of the later half where these only hint at one."""
    is_hinted = yield from propose_seasons(series, backgrounds)
    if is_hinted:
        middle = series.times[len(series.times) // 2]
        later = series.rows((series.at_rows(series.times) >= middle).nonzero()[:, 0])
        its_own = Backgrounds(None, len(later.times), backgrounds.likelihood)
        yield from propose_seasons(later, its_own)


def _stationary(
    best: Search,
    seasons: Sequence[Any],
    parameters: Tensor,
    make: SeriesParts,
    n: int,
    climb: Callable[..., Search],
    criterion: Callable[[Search], float],
) -> tuple[Search, Search]:
    """The best of a smooth kernel and of it with seasons, and the same above a level.

    Seasons are where they are likely beside a trend, with `parameters` of the likelihood.
    """
    still = None
    if seasons:
        # What was chosen without seasons had to follow them, or may be slow beside them.
        starts = [make.short(), best.kernel]
        if n <= MAX_TIMES:
            part = best.components[0]
            theta = torch.where(part.is_length_scale, math.log(make.span), part.theta)  # slow
            starts.append(part.at(theta.clamp(part.low, part.high)).kernel)
        for start in starts:
            kernel = total([start, *seasons, make.constant()])
            found = climb(kernel, parameters, -math.inf if still is None else criterion(still))
            still = found if still is None else max(still, found, key=criterion)
    if still is None or criterion(still) <= criterion(best):  # which a level makes less likely
        level = climb(best.kernel + make.constant(), best.parameters)
        if still is None or criterion(still) <= criterion(level):
            return best, level
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
            kernels = [make.line() + make.wander_to(each, n) for each in defaults.STIFF_CYCLES]
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


def _among_most(series: Series) -> Series:
    """The series without times far from all others, whose range has no resolution for a period."""
    kept = torch.from_numpy(~far_apart(series.times.cpu().numpy())).to(series.times.device)
    return series if bool(kept.all()) else series.rows(series.at_rows(kept).nonzero()[:, 0])


def parts_of(series: Series) -> SeriesParts:
    """Kernels in the units of a series."""
    times, totals, counts = to_arrays(series.times, series.totals, series.counts)
    if "gap" not in series.known:
        gaps = np.sort(np.diff(np.unique(times)))  # covariates keep rows of equal times apart
        series.known["gap"] = float(gaps[(len(gaps) - 1) // 2]) if len(gaps) else 0.0
    start, span, values = float(times[0]), float(times[-1] - times[0]), totals / counts
    middle = np.average(values, weights=counts)
    variance = float(np.average((values - middle) ** 2, weights=counts)) or 1.0
    # A unit in which the diffusion of a trend, per cube of time, is no number has none.
    return SeriesParts(start, span if span > LEAST_SPAN else 0.0, series.known["gap"], variance)


@dataclass(frozen=True)
class Season:
    """A period, and the variance that each of its harmonics explains, by order."""

    period: float
    variances: dict[int, float]


def propose_seasons(
    series: Series, backgrounds: Callable[[Series], list[Background]]
) -> Generator[Season, None, bool]:
    """Periods that stand out, the strongest first; none of short series.

    `backgrounds` are what may be no season of a series. Returns whether, where none stands out, one
    would as a harmonic.
    """
    times = series.times.cpu().numpy()
    y = (series.totals / series.counts).cpu().numpy()
    if len(times) < defaults.SEASON_LEAST_ROWS or not y.std():
        return False
    t = times - times[0]

    def behind(x: np.ndarray, rest: np.ndarray) -> tuple[Series, list[Background]]:
        """Some values at times since the first, and their backgrounds."""
        values = torch.from_numpy(rest)
        whole = len(x) == len(t) and series.times.device == values.device
        at = series.with_values(values) if whole else None
        part = at or make_series(torch.from_numpy(x + times[0]), values)
        return part, backgrounds(part)

    gaps = np.diff(t)
    step = float(np.median(gaps[gaps > 0]))
    design = parabola(t)
    rest, found = y - design @ np.linalg.lstsq(design, y, rcond=None)[0], list[Season]()
    floor = defaults.LEAST_EXPLAINED * rest.var()
    for _ in range(defaults.MAX_SEASONS):
        known = [season.period for season in found]
        shown, most_nats = _strongest(t, rest, known, step, behind)
        if len(known) == 1 and not (shown and _is_multiple(1 / shown[0], known[0], t[-1])):
            shown = _longer(t, rest, known[0], step, behind) or shown
        if shown is None:
            return not found and most_nats > -math.log(defaults.PART_CHANCE)
        frequency, orders = shown
        most = int(n_harmonics(np.array([frequency]), known)[0])
        most = min(most, n_below_nyquist(frequency, step))
        orders = _with_hidden(t, rest, frequency, orders, most, behind)
        rest, variances = without_waves(t, rest, frequency, orders)
        if sum(variances) < floor:
            break
        found.append(Season(1 / frequency, dict(zip(orders, variances, strict=True))))
        yield found[-1]
    return False


def _strongest(
    t: np.ndarray, rest: np.ndarray, known: list[float], step: float, behind: Behind
) -> tuple[tuple[float, list[int]] | None, float]:
    """Frequency and orders of the season that stands out most, None where none does; its nats."""
    frequencies, gain = periodogram(t, rest, step, behind)
    if len(gain) < 2:
        return None, -math.inf
    score = with_harmonics(frequencies, gain, known)
    most = float(score.max())
    if most < threshold(len(gain)):
        return None, most
    peak = frequencies[score.argmax()]
    # The strongest may be a harmonic itself, of what two tests may show.
    least, whole = -math.log(defaults.PART_CHANCE), [peak / m for m in (3, 2)]
    whole = [f for f in whole if stands_out(frequencies, gain, f, t[-1], least)]
    frequency = next(iter(whole), peak)
    orders = [1]
    for j in range(2, int(n_harmonics(np.array([frequency]), known)[0]) + 1):
        if stands_out(frequencies, gain, j * frequency, t[-1], least):
            orders.append(j)
    frequency = refined(t, rest, frequency, orders)
    return (snapped(t, rest, frequency, known, step, behind), orders), most


def _is_multiple(period: float, of: float, span: float) -> bool:
    """Whether a period is a few of another, to the resolution."""
    whole = round(period / of)
    return (
        2 <= whole <= defaults.MAX_WITHIN
        and abs(1 / period - 1 / (whole * of)) < defaults.SNAP_TO_PERIOD / span
    )


def _longer(
    t: np.ndarray, rest: np.ndarray, period: float, step: float, behind: Behind
) -> tuple[float, list[int]] | None:
    """Frequency and orders of a season of a few of a period, whose waves stand out together.

    One after the other they would not: the background follows the step from workdays to weekends.
    Together they have to be as improbable as a peak, one of them too, at the price of a parameter.
    """
    waves, found = Waves(*cell_means(t, rest), behind), None
    best = math.log((defaults.MAX_WITHIN - 1) / defaults.PEAK_CHANCE)
    least = max(-math.log(defaults.PART_CHANCE), 0.5 * math.log(len(t)))
    most = min(defaults.MAX_WITHIN, int((t[-1] + step) / (defaults.LEAST_CYCLES * period)))
    for whole in range(2, most + 1):
        orders = np.arange(1, whole)  # those below the first of the period
        gain, each = waves.gain_together(orders / (whole * period))
        score = surprise(gain, len(orders))
        if score > best and each.max() > least:
            best, found = score, (1 / (whole * period), orders[each > least].tolist())
    return found


def _with_hidden(
    t: np.ndarray, y: np.ndarray, frequency: float, orders: list[int], most: int, behind: Behind
) -> list[int]:
    """Harmonics found, and those that stand out of what these leave: beside them they were small.

    Of many points only those that cells show.
    """
    if len(t) > defaults.WAVE_ROWS:
        most = min(most, int(defaults.WAVE_ROWS / (defaults.CELLS_A_CYCLE * frequency * t[-1])))
    others = [j for j in range(2, most + 1) if j not in orders]
    if not others:
        return orders
    left = without_waves(t, y, frequency, orders)[0]
    gain = gains_of(*cell_means(t, left), frequency * np.array(others), behind)
    more = [
        j for j, each in zip(others, gain, strict=True) if each > -math.log(defaults.PART_CHANCE)
    ]
    return sorted(orders + more)
