r"""The periodogram of a series: what waves gain over what may be no season of it.

A background, such as a trend and a level that wanders, stands for what is no season: a process of
covariance :math:`\sigma^2 V`. Of the sum of squares :math:`q = y^\top V^{-1} y` a wave of frequency
f takes (generalised least squares of its cosine and sine)

.. math:: e_f = b^\top A^{-1} b, \qquad b = \Phi_f^\top V^{-1} y, \quad
          A = \Phi_f^\top V^{-1} \Phi_f.

A background that was fitted without the wave follows it where it can, and takes it for noise where
it cannot; either hides it. What the wave gains is therefore the ratio of the greatest likelihoods
over some backgrounds, with it and without it, in nats,

.. math:: g(f) = \max_V \left[ \ell(V) - \tfrac{n - 4}2 \log(1 - e_f / q) \right]
          - \max_V \ell(V), \qquad
          \ell(V) = -\tfrac12 \log |V| - \tfrac{n - 4}2 \log q,

where :math:`\sigma^2` is the likeliest, level and slope are free: for one V and without a wave
P(g > u) = exp(-u), and g is Lomb's and Scargle's periodogram [1]_ [2]_ if V is white and n large. A
wave over one background is weighed against the best of all without it: a series that wanders shows
no more waves for a stiff background among them. Of many points it is that of their means in cells.

Of many frequencies, a grid, it is rough where it is small: b is a Fourier transform of
:math:`V^{-1} y` and A taken for diagonal, of a trace that is smooth in the frequency.

A season of many harmonics, whose jumps the background takes for its own, stands out of the
periodogram all the same, over the median of its neighbourhood, of which the law is the same but for
slopes of the spectrum.

References
----------
.. [1] Lomb (1976), Least-squares frequency analysis of unequally spaced data.
.. [2] Scargle (1982), Studies in astronomical time series analysis II.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from skgp.inference.markov.columns import DenseColumns, SeriesColumns, columns_of
from skgp.inference.markov.series import Series
from skgp.kernels.sde import Dynamics
from skgp.learning.markov import defaults

_ROUNDING = 1e-12  # mathematical: of sums of squares


class Background(NamedTuple):
    """A process with noise of a variance, both times a scale."""

    dynamics: Dynamics
    noise: float
    scale: float = 1.0

    def columns(self, series: Series) -> SeriesColumns | DenseColumns:
        """But for the scale; those of the same process are kept with the series."""
        key = id(self.dynamics), self.noise
        if key not in series.known:
            gaps, lags = series.gaps_of(self.dynamics), series.lags_of(self.dynamics)
            found = columns_of(self.dynamics, gaps, series.counts / self.noise, lags)
            series.known[key] = found, self.dynamics  # whose id is its own while it is kept
        return series.known[key][0]


Behind = Callable[[np.ndarray, np.ndarray], tuple[Series, list[Background]]]


def gains_of(t: np.ndarray, y: np.ndarray, frequencies: np.ndarray, behind: Behind) -> np.ndarray:
    """Of waves, (f,): ratios of likelihoods at the likeliest of some backgrounds.

    Of many, which are a grid, a rough gain says which may matter.
    """
    waves = Waves(t, y, behind)
    if len(frequencies) <= defaults.FEW_WAVES:
        return waves.gains(frequencies)
    found = waves.rough_gains(frequencies)
    exact = (found > defaults.ROUGH_GAIN) | (frequencies * t[-1] <= defaults.STIFF_CYCLES[-1])
    found[exact] = waves.gains(frequencies[exact])
    return found


class Waves:
    """Values at times t since the first, and what waves gain over some backgrounds."""

    def __init__(self, t: np.ndarray, y: np.ndarray, behind: Behind) -> None:
        self._series, backgrounds = behind(t, y)
        self._since, self._half = torch.from_numpy(t), 0.5 * max(len(t) - 4, 1)
        self._given = [each.columns(self._series) for each in backgrounds]
        y_column, values, misfit, columns_of_y = self._series.y[:, None], [], [], []
        for columns, (_, noise, scale) in zip(self._given, backgrounds, strict=True):
            v, g = columns.whiten(y_column)
            fit = columns.observe(columns.smooth(v))[:, 0]  # type: ignore[arg-type]
            columns_of_y.append(self._series.counts / noise * (self._series.y - fit))
            misfit.append(float(g @ v[:, 0].square()))
            of_noise = 0.5 * len(t) * math.log(noise * scale)
            values.append(self._half * math.log(scale) - columns.half_log_det - of_noise)
        self._misfit = torch.tensor(misfit, dtype=torch.float64)  # y' V^-1 y but for scales, (b,)
        self._values = self._misfit.new_tensor(values) - self._half * self._misfit.log()
        self._solved = torch.stack(columns_of_y).numpy()  # V^-1 y, (b, n)

    def gains(self, frequencies: np.ndarray) -> np.ndarray:
        """Exact, (f,)."""
        found = [self._gain(2 * _likelihood_ratio(*part)) for part in self._products(frequencies)]
        return torch.cat(found).numpy()

    def gain_together(self, frequencies: np.ndarray) -> tuple[float, np.ndarray]:
        r"""What waves (f,) gain together, and each over that background beside the others, (f,).

        Together :math:`g` of the module, with the cosines and sines of all for :math:`\Phi`; each
        half the Wald statistic of its two weights, times n - 4 over what is left of q.
        """
        best, f = (-math.inf, np.zeros(len(frequencies))), len(frequencies)
        phase = self._since[:, None] * torch.from_numpy(2 * math.pi * frequencies)
        design = torch.cat([self._series.y[:, None], phase.cos(), phase.sin()], 1)
        for columns, misfit, value in zip(self._given, self._misfit, self._values, strict=True):
            y, W = _whitened(columns, design).split([1, 2 * f], 1)
            A, b = W.mT @ W, W.mT @ y  # (2f, 2f), (2f, 1)
            covariance = torch.linalg.inv(A + _ROUNDING * A.trace() * torch.eye(2 * f).to(A))
            weights = covariance @ b
            left = (misfit - (b * weights).sum()).clamp(min=_ROUNDING * misfit)
            gain = float(value - self._half * (left / misfit).log() - self._values.max())
            if gain > best[0]:
                pairs = torch.arange(2 * f).view(2, f).mT  # cosine and sine
                own = covariance[pairs[:, :, None], pairs[:, None, :]]  # (f, 2, 2)
                at = weights[pairs]  # (f, 2, 1)
                each = (at * torch.linalg.solve(own, at)).sum((1, 2))
                best = gain, (self._half * each / left).numpy()
        return best

    def rough_gains(self, frequencies: np.ndarray) -> np.ndarray:
        """Of a grid (f,): cosine and sine orthogonal and alike, their size between some waves'."""
        size, apart = len(frequencies), 1 / defaults.WAVES_AN_OCTAVE
        knots = np.unique(np.exp2(np.arange(0, math.log2(size), apart)).astype(int)) - 1
        knots = np.append(knots, size - 1)
        sums = [A + B for _, _, A, B, *_ in self._products(frequencies[knots])]
        log_size = (0.5 * torch.cat(sums, 1)).log().numpy()
        at = np.log(frequencies)
        between = [np.interp(at, at[knots], each) for each in log_size]
        power = np.abs(_transform(self._since.numpy(), self._solved, frequencies)) ** 2
        return self._gain(torch.from_numpy(power / np.exp(between))).numpy()

    def _gain(self, explained: Tensor) -> Tensor:
        """Nats, (f,), of what waves explain of the sums of squares over each background, (b, f)."""
        share = (explained / self._misfit[:, None]).clamp(max=1 - _ROUNDING)
        values = self._values[:, None] - self._half * torch.log1p(-share)
        return values.amax(0) - self._values.max()

    def _products(self, frequencies: np.ndarray) -> Iterator[tuple[Tensor, ...]]:
        """Those of `_likelihood_ratio`, (b, f) each, in parts."""
        size, since = max(1, defaults.WAVE_ENTRIES // len(self._since)), self._since[:, None]
        for some in torch.from_numpy(2 * math.pi * frequencies).split(size):
            phase = since * some
            waves = torch.cat([self._series.y[:, None], phase.cos(), phase.sin()], 1)
            white = torch.stack([_whitened(columns, waves) for columns in self._given])
            y, cosine, sine = white.split([1, len(some), len(some)], 2)
            products = (cosine, y), (sine, y), (cosine, cosine), (sine, sine), (cosine, sine)
            yield *((a * b).sum(1) for a, b in products), self._misfit[:, None]


def _whitened(columns: SeriesColumns | DenseColumns, waves: Tensor) -> Tensor:
    """Columns (n, p) of unit precision."""
    v, g = columns.whiten(waves)
    return v if isinstance(columns, DenseColumns) else v * g.sqrt()[:, None]


def _transform(t: np.ndarray, values: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Sums over n of values (b, n) times exp(2 pi i f t_n), on a grid of frequencies (f,), (b, f).

    A wave is that of the first of some frequencies times one of few differences from it.
    """
    turn, size = 2j * math.pi * t, math.ceil(len(frequencies) ** 0.5)
    near = np.exp(np.multiply.outer(turn, frequencies[:size] - frequencies[0]))  # (n, s)
    far = np.exp(np.multiply.outer(frequencies[::size], turn))  # (f / s, n)
    found = (values[:, None] * far) @ near  # (b, f / s, s)
    return found.reshape(len(values), -1)[:, : len(frequencies)]


def lomb(t: np.ndarray, y: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The Lomb-Scargle periodogram (f,), not normalised, of y (n,) at times t (n,)."""
    b = torch.from_numpy(_transform(t, y[None], frequencies)[0])
    twice = torch.from_numpy(_transform(t, np.ones((1, len(t))), 2 * frequencies)[0])
    A, B, C = 0.5 * (len(t) + twice.real), 0.5 * (len(t) - twice.real), 0.5 * twice.imag
    return _likelihood_ratio(b.real, b.imag, A, B, C, most=b.real.new_tensor(y @ y)).numpy()


def _likelihood_ratio(
    by: Tensor, bz: Tensor, A: Tensor, B: Tensor, C: Tensor, most: Tensor
) -> Tensor:
    """b' [[A, C], [C, B]]^-1 b / 2 of cosine and sine at each frequency, (f,)."""
    both, det = B * by**2 - 2 * C * by * bz + A * bz**2, A * B - C**2
    # At the Nyquist frequency of a regular grid the sine is 0 at every time.
    alone = det <= _ROUNDING * (A + B) ** 2
    found = torch.where(alone, (by**2 + bz**2) / (A + B), both / det)
    return 0.5 * found.nan_to_num(0.0).clamp(min=0.0).minimum(most)


def surprise(total: Any, n: int) -> Any:
    """Of sums G of n gains, those of one as improbable at least.

    G exceeds g by chance with at most exp(-(g - n - n log(g / n))) (Chernoff).
    """
    return total - n - n * np.log(np.maximum(total, n) / n)


def periodogram(
    t: np.ndarray, y: np.ndarray, step: float, behind: Behind
) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies, and what a wave of each gains, in nats."""
    span = t[-1]
    spacing, lowest = 1 / (defaults.OVERSAMPLED * span), defaults.LEAST_CYCLES / (span + step)
    if len(t) <= defaults.WAVE_ROWS:
        count = min(n_below_nyquist(spacing, step), 2 * defaults.OVERSAMPLED * len(t))
        frequencies = spacing * np.arange(1, count + 1)
        power = lomb(t, y - y.mean(), frequencies)
        waves = frequencies
    else:
        frequencies, power = _spectrum(t, y, step)
        waves = frequencies[
            : int(defaults.OVERSAMPLED * defaults.WAVE_ROWS / defaults.CELLS_A_CYCLE)
        ]
    # Over the mean of noise that has the median of the neighbourhood:
    least = np.finfo(float).eps * max(power.max(), np.finfo(float).tiny)
    gain = (power * math.log(2) / np.maximum(_background(power), least)) - defaults.UNMODELLED
    shown = frequencies >= lowest
    waves = waves[waves >= lowest]
    gain, n_waves = gain[shown], len(waves)
    if n_waves:
        gain[:n_waves] = np.maximum(gain[:n_waves], gains_of(*cell_means(t, y), waves, behind))
    return frequencies[shown], gain


def n_below_nyquist(frequency: float, step: float) -> int:
    """Multiples of a frequency below that of two steps, at which the sine is 0 but for rounding."""
    return math.ceil(0.5 / (frequency * step) - math.sqrt(_ROUNDING)) - 1


def cell_means(t: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of many points those in cells; the times and values, (m,)."""
    if len(t) <= defaults.WAVE_ROWS:
        return t, y
    cell = (t * (defaults.WAVE_ROWS / t[-1])).astype(int).clip(max=defaults.WAVE_ROWS - 1)
    sizes = np.bincount(cell, minlength=defaults.WAVE_ROWS)
    shown = sizes > 0
    x, means = (
        np.bincount(cell, each, defaults.WAVE_ROWS)[shown] / sizes[shown] for each in (t, y)
    )
    return x, means


def with_harmonics(frequencies: np.ndarray, gain: np.ndarray, periods: list[float]) -> np.ndarray:
    """Gains with those of harmonics, as improbable as one wave of that gain at least, (f,)."""
    spacing = frequencies[1] - frequencies[0]
    first, score, total = round(frequencies[0] / spacing), gain.copy(), gain.copy()
    most = n_harmonics(frequencies, periods)
    for j in range(2, int(most.max()) + 1):
        place = j * (first + np.arange(len(gain))) - first
        place = place[place < len(gain)]
        total = total[: len(place)] + ndimage.maximum_filter1d(gain, 2 * (j // 2) + 1)[place]
        many = surprise(total, j)
        many[most[: len(place)] < j] = 0
        score[: len(place)] = np.maximum(score[: len(place)], many)
    return score


def n_harmonics(frequency: np.ndarray, periods: list[float]) -> np.ndarray:
    """Of waves beside seasons found: a day that differs over the week shows about seven a week."""
    within = [np.rint(1 / (period * frequency)) for period in periods]
    within = [np.where(each <= defaults.MAX_WITHIN, each, 0.0) for each in within]
    return defaults.MAX_SEASON_HARMONICS + np.max([np.zeros_like(frequency), *within], axis=0)


def _spectrum(t: np.ndarray, y: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies of a regular grid, and the power there."""
    span = t[-1]
    cells = min(math.ceil(span / step) + 1, 2**20)  # shape
    cell = np.minimum((t * (cells - 1) / span).round().astype(int), cells - 1)
    occupied = np.bincount(cell, minlength=cells).clip(min=1)
    values = np.bincount(cell, y - y.mean(), cells) / occupied
    power = np.abs(np.fft.rfft(values, defaults.OVERSAMPLED * cells)[1:]) ** 2
    return np.arange(1, len(power) + 1) * (cells - 1) / (span * defaults.OVERSAMPLED * cells), power


def _background(power: np.ndarray) -> np.ndarray:
    """Running median, of a neighbourhood no wider than the frequency: spectra fall steeply."""
    width, found = defaults.NEIGHBOURHOOD * defaults.OVERSAMPLED, np.empty_like(power)
    while True:
        here = slice(min(len(power), 2 * width) if width > defaults.OVERSAMPLED else 0, None)
        part = ndimage.median_filter(power, 2 * width + 1, mode="nearest")
        upper = (
            min(len(power), 4 * width)
            if width < defaults.NEIGHBOURHOOD * defaults.OVERSAMPLED
            else None
        )
        found[here.start : upper] = part[here.start : upper]
        if not here.start:
            return found
        width //= 2


def threshold(n_frequencies: int) -> float:
    """That noise exceeds at one of so many frequencies with a small chance."""
    return math.log(n_frequencies / defaults.OVERSAMPLED / defaults.PEAK_CHANCE)


def stands_out(
    frequencies: np.ndarray, gain: np.ndarray, at: float, span: float, least: float
) -> bool:
    """Whether near a frequency, to the resolution, a gain is above the least."""
    near = span * np.abs(frequencies - at) <= 0.5 + math.sqrt(_ROUNDING)  # of a grid of quarters
    return bool(near.any()) and float(gain[near].max()) > least


def refined(t: np.ndarray, y: np.ndarray, peak: float, orders: list[int]) -> float:
    """The frequency, near a peak, that explains most with its harmonics."""
    some = slice(None, None, max(1, len(t) // defaults.WAVE_ROWS))
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


def _waves(t: np.ndarray, frequencies: np.ndarray, orders: list[int]) -> np.ndarray:
    """A parabola, cosines and sines of harmonics of frequencies (f,) at times (n,), (f, n, p)."""
    phase = 2 * math.pi * frequencies[:, None, None] * np.multiply.outer(t, orders)
    trend = np.broadcast_to(parabola(t), (len(phase), len(t), 3))
    return np.concatenate([trend, np.cos(phase), np.sin(phase)], 2)


def parabola(t: np.ndarray) -> np.ndarray:
    """A basis of parabolas at times (n,) since the first, (n, 3)."""
    return np.vander(2 * t / t[-1] - 1, 3)


def without_waves(
    t: np.ndarray, y: np.ndarray, frequency: float, orders: list[int]
) -> tuple[np.ndarray, list[float]]:
    """What harmonics leave of y, and the variance of each."""
    (design,) = _waves(t, np.array([frequency]), orders)
    # At the Nyquist frequency the sine is 0 but for rounding, and no weight explains noise by it.
    weights = np.linalg.lstsq(design, y, rcond=math.sqrt(_ROUNDING))[0]
    squares = (weights[3:] ** 2).reshape(2, -1).sum(0) / 2
    return y - design @ weights, squares.tolist()


def snapped(
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
            if abs(overtone / whole - frequency) < defaults.SNAP_TO_PERIOD / span:
                return 1 / whole
    whole = max(1, round(1 / (frequency * step))) * step
    if not 0 < abs(1 / whole - frequency) < defaults.SNAP_TO_STEP / span:
        return frequency
    some = slice(None, None, max(1, len(t) // defaults.WAVE_ROWS))
    free, rounded = gains_of(t[some], y[some], np.array([frequency, 1 / whole]), behind)
    return 1 / whole if free - rounded < 0.5 * math.log(len(t)) else frequency
