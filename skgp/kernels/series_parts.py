"""Parts that default kernels of series are made of: trends, seasons, and what lies between."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern

from .defaults import TREND_START, WANDER_SCALE
from .specs import Cosine, LocalLinearTrend


@dataclass(frozen=True)
class SeriesParts:
    """Kernels in the units of a series: where it starts, its range, its median gap and variance."""

    start: float
    span: float
    gap: float
    variance: float

    def short(self) -> Kernel:
        """What wanders about trend and season."""
        scale = min(max(10 * self.gap, 1e-3 * self.span), self.span)
        bounds = 0.1 * min(self.gap, scale), 10 * self.span
        return _constant(0.1 * self.variance) * Matern(scale, bounds, nu=0.5)

    def rough(self, noise: float) -> Kernel:
        """What takes after noise of some variance, but for a few steps."""
        gap = self.gap or 1e-3 * self.span
        return _constant(noise) * Matern(3 * gap, (0.1 * gap, 10 * self.span), nu=0.5)

    def smooth(self) -> Kernel:
        """A slow process about the mean, and a short one."""
        span = self.span
        slow = Matern(0.2 * span, (1e-3 * span, 1e3 * span), nu=1.5)
        return _constant(self.variance) * slow + self.short()

    def wander(self) -> Kernel:
        """A level that wanders: Brownian motion, but for a return that no forecast sees."""
        scale = WANDER_SCALE * self.span
        return _constant(0.03 * WANDER_SCALE * self.variance) * Matern(scale, "fixed", nu=0.5)

    def trend(self) -> Kernel:
        """A local linear trend that wanders as a process of the range's length scale does, locally.

        The spectral density of Matern 3/2 is that of integrated Brownian motion, far above its rate
        lambda, with q = 4 v lambda^3.
        """
        span, variance = self.span, self.variance
        diffusion = 4 * variance * (math.sqrt(3) / span) ** 3
        low, high = 1e-8 * variance / span**3, 1e8 * variance / span**3
        return LocalLinearTrend(
            diffusion,
            TREND_START * variance,
            TREND_START * variance / span**2,
            diffusion_bounds=(low, high),
            level_bounds="fixed",
            slope_bounds="fixed",
            origin=self.start - span,
        )

    def season(self, period: float, variances: Mapping[int, float]) -> Kernel:
        """A season of harmonics, by order, that drift."""
        harmonics = [
            _constant(max(each, 1e-5 * self.variance)) * Cosine(period / j, "fixed")
            for j, each in variances.items()
        ]
        drift = Matern(2 * self.span, (2 * period, 1e3 * self.span), nu=0.5)
        return total(harmonics) * drift


def total(parts: Iterable[Kernel]) -> Kernel:
    """Their sum."""
    return reduce(add, parts)


def _constant(variance: float) -> Kernel:
    return ConstantKernel(variance, (1e-6 * variance, 1e6 * variance))
