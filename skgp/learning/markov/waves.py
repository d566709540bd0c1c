r"""What waves gain over what may be no season of a series.

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

References
----------
.. [1] Lomb (1976), Least-squares frequency analysis of unequally spaced data.
.. [2] Scargle (1982), Studies in astronomical time series analysis II.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.columns import DenseColumns, SeriesColumns, columns_of
from skgp.inference.markov.series import Series
from skgp.kernels.sde import Dynamics
from skgp.learning.markov.defaults import (
    FEW_WAVES,
    ROUGH_GAIN,
    STIFF_CYCLES,
    WAVE_ENTRIES,
    WAVES_AN_OCTAVE,
)

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
    if len(frequencies) <= FEW_WAVES:
        return waves.gains(frequencies)
    found = waves.rough_gains(frequencies)
    exact = (found > ROUGH_GAIN) | (frequencies * t[-1] <= STIFF_CYCLES[-1])
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
        size, apart = len(frequencies), 1 / WAVES_AN_OCTAVE
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
        size, since = max(1, WAVE_ENTRIES // len(self._since)), self._since[:, None]
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
