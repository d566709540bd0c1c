"""Parts that default kernels of series are made of: trends, seasons, and what lies between."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern

from .defaults import TREND_START
from .hyperparameters import children_of
from .specs import Cosine, LocalLinearTrend

__all__ = ["SeriesParts", "longest", "total"]


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

    def smooth(self) -> Kernel:
        """A slow process about the mean, and a short one."""
        span = self.span
        slow = Matern(0.2 * span, (1e-3 * span, 1e3 * span), nu=1.5)
        return _constant(self.variance) * slow + self.short()

    def between(self) -> Kernel:
        """A smooth process between a trend and what is short."""
        bounds = 1e-3 * self.span, self.span
        return _constant(0.01 * self.variance) * Matern(0.03 * self.span, bounds, nu=1.5)

    def trend(self, long: Kernel) -> Kernel:
        """A local linear trend that wanders as a process of a long length scale does, locally.

        The spectral density of Matern 3/2 is that of integrated Brownian motion, far above its rate
        lambda, with q = 4 v lambda^3.
        """
        span, variance = self.span, self.variance
        rate = math.sqrt(3) / _length_scale(long)
        diffusion = 4 * float(long.diag(np.zeros((1, 1)))[0]) * rate**3
        low, high = 1e-8 * variance / span**3, 1e8 * variance / span**3
        return LocalLinearTrend(
            min(max(diffusion, low), high),
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


def longest(parts: Iterable[Kernel], least: float) -> Kernel | None:
    """The part, seasons aside, of the longest length scale, if that is above the least."""
    smooth = [part for part in parts if not any(type(each) is Cosine for each in _leaves(part))]
    long = max(smooth, key=_length_scale, default=None)
    return long if long is not None and _length_scale(long) > least else None


def _length_scale(kernel: Kernel) -> float:
    found = (each.get_params().get("length_scale", 0.0) for each in _leaves(kernel))
    return max(float(np.max(each)) for each in found)


def _leaves(kernel: Kernel) -> list[Kernel]:
    children = children_of(kernel)
    return [leaf for child in children for leaf in _leaves(child)] if children else [kernel]


def _constant(variance: float) -> Kernel:
    return ConstantKernel(variance, (1e-6 * variance, 1e6 * variance))
