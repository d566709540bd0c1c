r"""Periods of a series, proposed by its periodogram.

Lomb's and Scargle's periodogram [1]_ [2]_ of the values less a parabola, or on many points that of
the values in cells of a regular grid. A peak counts where it stands out from the median of its
neighbourhood, noise there being exponential: P(power > u median / log 2) = exp(-u). The strongest
is fitted with those of its harmonics that stand out too and taken away, and the rest is looked at
again. A period that might as well be a whole multiple of one found before, or of the step, is one.

References
----------
.. [1] Lomb (1976), Least-squares frequency analysis of unequally spaced data.
.. [2] Scargle (1982), Studies in astronomical time series analysis II.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import ndimage, signal

from skgp.inference.markov.series import Series
from skgp.learning.defaults import (
    LEAST_CYCLES,
    LEAST_EXPLAINED,
    LOMB_ROWS,
    MAX_SEASON_HARMONICS,
    MAX_SEASONS,
    NEIGHBOURHOOD,
    PART_CHANCE,
    PEAK_CHANCE,
    SEASON_LEAST_ROWS,
    SNAP_TO_PERIOD,
    SNAP_TO_STEP,
)

_OVERSAMPLED = 4  # mathematical: frequencies a resolution


@dataclass(frozen=True)
class Season:
    """A period, and the variance that each of its harmonics explains, by order."""

    period: float
    variances: dict[int, float]


def propose_seasons(series: Series) -> list[Season]:
    """Periods that stand out, the strongest first; none of short series."""
    t = series.times.cpu().numpy()
    y = (series.totals / series.counts).cpu().numpy()
    if len(t) < SEASON_LEAST_ROWS or not y.std():
        return []
    t = t - t[0]
    step = float(np.median(np.diff(t)))
    design = np.vander(2 * t / t[-1] - 1, 3)
    rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    floor, found = LEAST_EXPLAINED * rest.var(), list[Season]()
    for _ in range(MAX_SEASONS):
        frequencies, ratio = _periodogram(t, rest, step)
        if not len(ratio) or ratio.max() < _threshold(len(ratio)):
            break
        peak = frequencies[ratio.argmax()]
        # The strongest may be a harmonic itself, of what two tests may show.
        least, whole = -math.log(PART_CHANCE), [peak / m for m in (3, 2)]
        whole = [f for f in whole if _stands_out(frequencies, ratio, f, t[-1], least)]
        peak = next(iter(whole), peak)
        frequency = _refined(t, rest, peak)
        frequency = _snapped(frequency, [season.period for season in found], step, t[-1])
        # A day that differs over the week shows about seven times the frequency of the week.
        within = max((round(1 / (season.period * frequency)) for season in found), default=0)
        orders = [1]
        for j in range(2, within + MAX_SEASON_HARMONICS + 1):
            if _stands_out(frequencies, ratio, j * frequency, t[-1], least):
                orders.append(j)
        rest, variances = _without(t, rest, frequency, orders)
        if sum(variances) < floor:
            break
        found.append(Season(1 / frequency, dict(zip(orders, variances, strict=True))))
    return found


def _periodogram(t: np.ndarray, y: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies, and the power there over that of the neighbourhood."""
    span, highest = t[-1], 0.5 / step
    spacing = 1 / (_OVERSAMPLED * span)
    if len(t) <= LOMB_ROWS:
        count = min(int(highest / spacing), 2 * _OVERSAMPLED * len(t))
        frequencies = spacing * np.arange(1, count + 1)
        power = signal.lombscargle(t, y - y.mean(), 2 * math.pi * frequencies)
    else:
        cells = min(math.ceil(span / step) + 1, 2**20)  # shape
        cell = np.minimum((t * (cells - 1) / span).round().astype(int), cells - 1)
        occupied = np.bincount(cell, minlength=cells).clip(min=1)
        values = np.bincount(cell, y - y.mean(), cells) / occupied
        power = np.abs(np.fft.rfft(values, _OVERSAMPLED * cells)[1:]) ** 2
        frequencies = np.arange(1, len(power) + 1) * (cells - 1) / (span * _OVERSAMPLED * cells)
    background = _background(power)
    keep = frequencies >= LEAST_CYCLES / span
    least = np.finfo(float).eps * max(power.max(), np.finfo(float).tiny)
    return frequencies[keep], (power * math.log(2) / np.maximum(background, least))[keep]


def _background(power: np.ndarray) -> np.ndarray:
    """Running median, of a neighbourhood no wider than the frequency: spectra fall steeply."""
    width, found = NEIGHBOURHOOD * _OVERSAMPLED, np.empty_like(power)
    while True:
        here = slice(min(len(power), 2 * width) if width > _OVERSAMPLED else 0, None)
        part = ndimage.median_filter(power, 2 * width + 1, mode="nearest")
        upper = min(len(power), 4 * width) if width < NEIGHBOURHOOD * _OVERSAMPLED else None
        found[here.start : upper] = part[here.start : upper]
        if not here.start:
            return found
        width //= 2


def _threshold(n_frequencies: int) -> float:
    """That noise exceeds at one of so many frequencies with a small chance."""
    return math.log(n_frequencies / _OVERSAMPLED / PEAK_CHANCE)


def _stands_out(
    frequencies: np.ndarray, ratio: np.ndarray, at: float, span: float, least: float
) -> bool:
    near = np.abs(frequencies - at) <= 0.5 / span
    return bool(near.any()) and float(ratio[near].max()) > least


def _refined(t: np.ndarray, y: np.ndarray, peak: float) -> float:
    """The frequency, near a peak, whose wave explains most."""
    some = slice(None, None, max(1, len(t) // LOMB_ROWS))
    for width in (0.5, 0.05):  # mathematical: of the resolution
        grid = peak + width / t[-1] * np.linspace(-1, 1, 21)
        grid = grid[grid > 0]
        left = [_without(t[some], y[some], f, [1])[0].var() for f in grid]
        peak = float(grid[int(np.argmin(left))])
    return peak


def _snapped(frequency: float, periods: list[float], step: float, span: float) -> float:
    """That of a whole multiple of another period, or of the step, if it might as well be.

    Half a week is no whole number of days, but an overtone of the week is seen before the week.
    """
    for period in periods:
        for overtone in (1, 2, 3):
            whole = max(1, round(overtone / (frequency * period))) * period
            if abs(overtone / whole - frequency) < SNAP_TO_PERIOD / span:
                return 1 / whole
    whole = max(1, round(1 / (frequency * step))) * step
    return 1 / whole if abs(1 / whole - frequency) < SNAP_TO_STEP / span else frequency


def _without(
    t: np.ndarray, y: np.ndarray, frequency: float, orders: list[int]
) -> tuple[np.ndarray, list[float]]:
    """What harmonics leave of y, and the variance of each."""
    phase = 2 * math.pi * frequency * np.multiply.outer(t, orders)
    design = np.hstack([np.ones((len(t), 1)), np.cos(phase), np.sin(phase)])
    weights = np.linalg.lstsq(design, y, rcond=None)[0]
    squares = (weights[1:] ** 2).reshape(2, -1).sum(0) / 2
    return y - design @ weights, squares.tolist()
