r"""Periods of a series, proposed by its periodogram.

A background, such as a trend and a level that wanders, stands for what is no season; what a wave
gains over some of them says :mod:`.waves`.

A season of many harmonics, whose jumps the background takes for its own, stands out of the
periodogram all the same, over the median of its neighbourhood, of which the law is the same but for
slopes of the spectrum. The strongest peak, its harmonics counted, is fitted with those of them that
stand out as well and taken away, and the rest is looked at again. A period that might as well be a
whole multiple of one found before, or of the step, is one. Where no multiple of the first stands
out, the waves of each, as of a week of few days and weekends, are looked at together.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import ndimage

from skgp.inference.markov.series import Series, make_series
from skgp.learning.markov.defaults import (
    CELLS_A_CYCLE,
    LEAST_CYCLES,
    LEAST_EXPLAINED,
    MAX_SEASON_HARMONICS,
    MAX_SEASONS,
    MAX_WITHIN,
    NEIGHBOURHOOD,
    OVERSAMPLED,
    PART_CHANCE,
    PEAK_CHANCE,
    SEASON_LEAST_ROWS,
    SNAP_TO_PERIOD,
    SNAP_TO_STEP,
    UNMODELLED,
    WAVE_ROWS,
)
from skgp.learning.markov.waves import Background, Behind, Waves, gains_of, lomb

_ROUNDING = 1e-12  # mathematical: of sums of squares


@dataclass(frozen=True)
class Season:
    """A period, and the variance that each of its harmonics explains, by order."""

    period: float
    variances: dict[int, float]


def propose_seasons(
    series: Series, backgrounds: Callable[[Series], list[Background]]
) -> Iterator[Season]:
    """Periods that stand out, the strongest first; none of short series.

    `backgrounds` are what may be no season of a series.
    """
    times = series.times.cpu().numpy()
    y = (series.totals / series.counts).cpu().numpy()
    if len(times) < SEASON_LEAST_ROWS or not y.std():
        return
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
    design = _parabola(t)
    rest, found = y - design @ np.linalg.lstsq(design, y, rcond=None)[0], list[Season]()
    floor = LEAST_EXPLAINED * rest.var()
    for _ in range(MAX_SEASONS):
        known = [season.period for season in found]
        shown = _strongest(t, rest, known, step, behind)
        if len(known) == 1 and not (shown and _is_multiple(1 / shown[0], known[0], t[-1])):
            shown = _longer(t, rest, known[0], step, behind) or shown
        if shown is None:
            return
        frequency, orders = shown
        most = int(_n_harmonics(np.array([frequency]), known)[0])
        most = min(most, math.ceil(0.5 / (frequency * step)) - 1)
        orders = _with_hidden(t, rest, frequency, orders, most, behind)
        rest, variances = _without(t, rest, frequency, orders)
        if sum(variances) < floor:
            return
        found.append(Season(1 / frequency, dict(zip(orders, variances, strict=True))))
        yield found[-1]


def _strongest(
    t: np.ndarray, rest: np.ndarray, known: list[float], step: float, behind: Behind
) -> tuple[float, list[int]] | None:
    """Frequency and orders of the season that stands out most; None where none does."""
    frequencies, gain = _periodogram(t, rest, step, behind)
    if len(gain) < 2:
        return None
    score = _with_harmonics(frequencies, gain, known)
    if score.max() < _threshold(len(gain)):
        return None
    peak = frequencies[score.argmax()]
    # The strongest may be a harmonic itself, of what two tests may show.
    least, whole = -math.log(PART_CHANCE), [peak / m for m in (3, 2)]
    whole = [f for f in whole if _stands_out(frequencies, gain, f, t[-1], least)]
    frequency = next(iter(whole), peak)
    orders = [1]
    for j in range(2, int(_n_harmonics(np.array([frequency]), known)[0]) + 1):
        if _stands_out(frequencies, gain, j * frequency, t[-1], least):
            orders.append(j)
    frequency = _refined(t, rest, frequency, orders)
    return _snapped(t, rest, frequency, known, step, behind), orders


def _is_multiple(period: float, of: float, span: float) -> bool:
    """Whether a period is a few of another, to the resolution."""
    whole = round(period / of)
    return 2 <= whole <= MAX_WITHIN and abs(1 / period - 1 / (whole * of)) < SNAP_TO_PERIOD / span


def _longer(
    t: np.ndarray, rest: np.ndarray, period: float, step: float, behind: Behind
) -> tuple[float, list[int]] | None:
    """Frequency and orders of a season of a few of a period, whose waves stand out together.

    One after the other they would not: the background follows the step from workdays to weekends.
    Together they have to be as improbable as a peak, one of them too, at the price of a parameter.
    """
    waves, found = Waves(*_means(t, rest), behind), None
    best = math.log((MAX_WITHIN - 1) / PEAK_CHANCE)
    least = max(-math.log(PART_CHANCE), 0.5 * math.log(len(t)))
    most = min(MAX_WITHIN, int((t[-1] + step) / (LEAST_CYCLES * period)))
    for whole in range(2, most + 1):
        orders = np.arange(1, whole)  # those below the first of the period
        gain, each = waves.gain_together(orders / (whole * period))
        score = _surprise(gain, len(orders))
        if score > best and each.max() > least:
            best, found = score, (1 / (whole * period), orders[each > least].tolist())
    return found


def _surprise(total: Any, n: int) -> Any:
    """Of sums G of n gains, those of one as improbable at least.

    G exceeds g by chance with at most exp(-(g - n - n log(g / n))) (Chernoff).
    """
    return total - n - n * np.log(np.maximum(total, n) / n)


def _periodogram(
    t: np.ndarray, y: np.ndarray, step: float, behind: Behind
) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies, and what a wave of each gains, in nats."""
    span = t[-1]
    spacing, lowest = 1 / (OVERSAMPLED * span), LEAST_CYCLES / (span + step)
    if len(t) <= WAVE_ROWS:
        # Below the Nyquist frequency, at which the sine is 0.
        count = min(math.ceil(0.5 / step / spacing) - 1, 2 * OVERSAMPLED * len(t))
        frequencies = spacing * np.arange(1, count + 1)
        power = lomb(t, y - y.mean(), frequencies)
        waves = frequencies
    else:
        frequencies, power = _spectrum(t, y, step)
        waves = frequencies[: int(OVERSAMPLED * WAVE_ROWS / CELLS_A_CYCLE)]
    gain = _over_neighbours(power) - UNMODELLED
    shown = frequencies >= lowest
    waves = waves[waves >= lowest]
    gain, n_waves = gain[shown], len(waves)
    if n_waves:
        gain[:n_waves] = np.maximum(gain[:n_waves], gains_of(*_means(t, y), waves, behind))
    return frequencies[shown], gain


def _means(t: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of many points those in cells; the times and values, (m,)."""
    if len(t) <= WAVE_ROWS:
        return t, y
    cell = (t * (WAVE_ROWS / t[-1])).astype(int).clip(max=WAVE_ROWS - 1)
    sizes = np.bincount(cell, minlength=WAVE_ROWS)
    shown = sizes > 0
    x, means = (np.bincount(cell, each, WAVE_ROWS)[shown] / sizes[shown] for each in (t, y))
    return x, means


def _with_hidden(
    t: np.ndarray, y: np.ndarray, frequency: float, orders: list[int], most: int, behind: Behind
) -> list[int]:
    """Harmonics found, and those that stand out of what these leave: beside them they were small.

    Of many points only those that cells show.
    """
    if len(t) > WAVE_ROWS:
        most = min(most, int(WAVE_ROWS / (CELLS_A_CYCLE * frequency * t[-1])))
    others = [j for j in range(2, most + 1) if j not in orders]
    if not others:
        return orders
    left = _without(t, y, frequency, orders)[0]
    gain = gains_of(*_means(t, left), frequency * np.array(others), behind)
    more = [j for j, each in zip(others, gain, strict=True) if each > -math.log(PART_CHANCE)]
    return sorted(orders + more)


def _with_harmonics(frequencies: np.ndarray, gain: np.ndarray, periods: list[float]) -> np.ndarray:
    """Gains with those of harmonics, as improbable as one wave of that gain at least, (f,)."""
    spacing = frequencies[1] - frequencies[0]
    first, score, total = round(frequencies[0] / spacing), gain.copy(), gain.copy()
    most = _n_harmonics(frequencies, periods)
    for j in range(2, int(most.max()) + 1):
        place = j * (first + np.arange(len(gain))) - first
        place = place[place < len(gain)]
        total = total[: len(place)] + ndimage.maximum_filter1d(gain, 2 * (j // 2) + 1)[place]
        many = _surprise(total, j)
        many[most[: len(place)] < j] = 0
        score[: len(place)] = np.maximum(score[: len(place)], many)
    return score


def _n_harmonics(frequency: np.ndarray, periods: list[float]) -> np.ndarray:
    """Of waves beside seasons found: a day that differs over the week shows about seven a week."""
    within = [np.rint(1 / (period * frequency)) for period in periods]
    within = [np.where(each <= MAX_WITHIN, each, 0.0) for each in within]
    return MAX_SEASON_HARMONICS + np.max([np.zeros_like(frequency), *within], axis=0)


def _spectrum(t: np.ndarray, y: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies of a regular grid, and the power there."""
    span = t[-1]
    cells = min(math.ceil(span / step) + 1, 2**20)  # shape
    cell = np.minimum((t * (cells - 1) / span).round().astype(int), cells - 1)
    occupied = np.bincount(cell, minlength=cells).clip(min=1)
    values = np.bincount(cell, y - y.mean(), cells) / occupied
    power = np.abs(np.fft.rfft(values, OVERSAMPLED * cells)[1:]) ** 2
    return np.arange(1, len(power) + 1) * (cells - 1) / (span * OVERSAMPLED * cells), power


def _over_neighbours(power: np.ndarray) -> np.ndarray:
    """Power over the mean of noise that has the median of the neighbourhood."""
    least = np.finfo(float).eps * max(power.max(), np.finfo(float).tiny)
    return power * math.log(2) / np.maximum(_background(power), least)


def _background(power: np.ndarray) -> np.ndarray:
    """Running median, of a neighbourhood no wider than the frequency: spectra fall steeply."""
    width, found = NEIGHBOURHOOD * OVERSAMPLED, np.empty_like(power)
    while True:
        here = slice(min(len(power), 2 * width) if width > OVERSAMPLED else 0, None)
        part = ndimage.median_filter(power, 2 * width + 1, mode="nearest")
        upper = min(len(power), 4 * width) if width < NEIGHBOURHOOD * OVERSAMPLED else None
        found[here.start : upper] = part[here.start : upper]
        if not here.start:
            return found
        width //= 2


def _threshold(n_frequencies: int) -> float:
    """That noise exceeds at one of so many frequencies with a small chance."""
    return math.log(n_frequencies / OVERSAMPLED / PEAK_CHANCE)


def _stands_out(
    frequencies: np.ndarray, gain: np.ndarray, at: float, span: float, least: float
) -> bool:
    near = np.abs(frequencies - at) <= 0.5 / span
    return bool(near.any()) and float(gain[near].max()) > least


def _refined(t: np.ndarray, y: np.ndarray, peak: float, orders: list[int]) -> float:
    """The frequency, near a peak, that explains most with its harmonics."""
    some = slice(None, None, max(1, len(t) // WAVE_ROWS))
    for width in (0.5, 0.05):  # mathematical: of the resolution
        grid = peak + width / t[-1] * np.linspace(-1, 1, 21)
        grid = grid[grid > 0]
        designs = _waves(t[some], grid, orders)  # (f, n, p)
        across = designs.transpose(0, 2, 1)
        A, b = across @ designs, across @ (y[some] - y[some].mean())
        A += _ROUNDING * len(t) * np.eye(A.shape[1])  # at the Nyquist frequency the sine is 0
        explained = (b * np.linalg.solve(A, b[..., None])[..., 0]).sum(1)
        best = int(np.argmax(explained))
        peak = float(grid[best])
    if 0 < best < len(grid) - 1:  # the parabola through three
        below, at, above = explained[best - 1 : best + 2]
        peak += 0.5 * float((grid[1] - grid[0]) * (above - below) / (2 * at - below - above))
    return peak


def _snapped(
    t: np.ndarray,
    y: np.ndarray,
    frequency: float,
    periods: list[float],
    step: float,
    behind: Behind,
) -> float:
    """That of a whole multiple of another period, or of the step, if it might as well be.

    Half a week is no whole number of days, but an overtone of the week is seen before the week.
    Of steps a wave must be as likely, by Schwarz's penalty: few cycles with little noise tell.
    """
    span = t[-1]
    for period in periods:
        for overtone in (1, 2, 3):
            whole = max(1, round(overtone / (frequency * period))) * period
            if abs(overtone / whole - frequency) < SNAP_TO_PERIOD / span:
                return 1 / whole
    whole = max(1, round(1 / (frequency * step))) * step
    if not 0 < abs(1 / whole - frequency) < SNAP_TO_STEP / span:
        return frequency
    some = slice(None, None, max(1, len(t) // WAVE_ROWS))
    free, rounded = gains_of(t[some], y[some], np.array([frequency, 1 / whole]), behind)
    return 1 / whole if free - rounded < 0.5 * math.log(len(t)) else frequency


def _waves(t: np.ndarray, frequencies: np.ndarray, orders: list[int]) -> np.ndarray:
    """A parabola, cosines and sines of harmonics of frequencies (f,) at times (n,), (f, n, p)."""
    phase = 2 * math.pi * frequencies[:, None, None] * np.multiply.outer(t, orders)
    trend = np.broadcast_to(_parabola(t), (len(phase), len(t), 3))
    return np.concatenate([trend, np.cos(phase), np.sin(phase)], 2)


def _parabola(t: np.ndarray) -> np.ndarray:
    """A basis of parabolas at times (n,) since the first, (n, 3)."""
    return np.vander(2 * t / t[-1] - 1, 3)


def _without(
    t: np.ndarray, y: np.ndarray, frequency: float, orders: list[int]
) -> tuple[np.ndarray, list[float]]:
    """What harmonics leave of y, and the variance of each."""
    (design,) = _waves(t, np.array([frequency]), orders)
    weights = np.linalg.lstsq(design, y, rcond=None)[0]
    squares = (weights[3:] ** 2).reshape(2, -1).sum(0) / 2
    return y - design @ weights, squares.tolist()
