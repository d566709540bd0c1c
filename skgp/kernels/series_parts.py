"""Parts that default kernels of series are made of: trends, seasons, and what lies between."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern

from .defaults import LEAST_DIFFUSION, LINE_CHANGE, TREND_START, WANDER_SCALE
from .expression import summands
from .hyperparameters import children_of, n_dims_of
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
        return self._walk(0.6 * WANDER_SCALE * self.variance)

    def steady(self) -> Kernel:
        """The same to begin with little."""
        return self._walk(3e-6 * WANDER_SCALE * self.variance)

    def wander_to(self, cycles: float, n: int) -> Kernel:
        """One that follows half of a wave of so many cycles.

        In n values with noise of the variance of the series a smoother with diffusion q passes 1 /
        (1 + w^2 s / q) of a wave of angular frequency w, where s is the spectral density of the
        noise.
        """
        density = self.variance * self.span / n
        diffusion = density * (2 * math.pi * cycles / self.span) ** 2
        return self._walk(0.5 * diffusion * WANDER_SCALE * self.span)

    def _walk(self, variance: float) -> Kernel:
        return _constant(variance) * Matern(WANDER_SCALE * self.span, "fixed", nu=0.5)

    def trend(self) -> Kernel:
        """A local linear trend that wanders as a process of the range's length scale does, locally.

        The spectral density of Matern 3/2 is that of integrated Brownian motion, far above its rate
        lambda, with q = 4 v lambda^3.
        """
        return self._trend(4 * self.variance * (math.sqrt(3) / self.span) ** 3)

    def line(self) -> Kernel:
        """A trend with the least diffusion."""
        return self._trend(self._least_diffusion)

    def straight(self) -> Kernel:
        """A line of a change over the range that a line of all the variance has."""
        return self._trend(self._least_diffusion, LINE_CHANGE, diffuses=False)

    def constant(self) -> Kernel:
        """A level of the prior that a trend's has."""
        return ConstantKernel(TREND_START * self.variance, "fixed")

    def bend(self) -> Kernel:
        """What turns within a few steps about a line."""
        scale = Matern(3 * self.gap, (0.01 * self.gap, 1e3 * self.span), nu=1.5)
        return _constant(0.3 * self.variance) * scale

    @property
    def _least_diffusion(self) -> float:
        return LEAST_DIFFUSION * self.variance / self.span**3

    def _trend(
        self, diffusion: float, change: float = TREND_START, *, diffuses: bool = True
    ) -> Kernel:
        """Of a change over the range of some variance, that of the data 1."""
        span, variance = self.span, self.variance
        low, high = self._least_diffusion, 1e8 * variance / span**3
        return LocalLinearTrend(
            diffusion,
            TREND_START * variance,
            change * variance / span**2,
            diffusion_bounds=(low, high) if diffuses else "fixed",
            level_bounds="fixed",
            slope_bounds="fixed",
            origin=self.start - span,
        )

    def season(self, period: float, variances: Mapping[int, float], nu: float = 0.5) -> Kernel:
        """A season of harmonics, by order, that drift: of nu 5/2 as growth makes them."""
        harmonics = [
            _constant(max(each, 1e-5 * self.variance)) * Cosine(period / j, "fixed")
            for j, each in variances.items()
        ]
        drift = Matern(2 * self.span, (2 * period, 1e6 * self.span), nu=nu)
        return total(harmonics) * drift


def total(parts: Iterable[Kernel]) -> Kernel:
    """Their sum."""
    return reduce(add, parts)


def is_of_no_season(kernel: Kernel) -> np.ndarray:
    """Whether each element of theta is one of an addend without waves, (t,)."""
    parts = summands(kernel)
    return np.repeat([not has_waves(each) for each in parts], list(map(n_dims_of, parts)))


def has_waves(kernel: Kernel) -> bool:
    """Whether a kernel is that of a season."""
    return type(kernel) is Cosine or any(map(has_waves, children_of(kernel)))


def begun_as_freely(kernel: Kernel, other: Kernel) -> Kernel:
    """The kernel, slopes of trends that change faster than in another wider at first in proportion.

    The two are equal but for hyper-parameters.
    """
    pairs = list(zip(summands(kernel), summands(other), strict=True))
    parts = [_slope_as_wide(part, like) for part, like in pairs]
    return kernel if all(a is b for a, (b, _) in zip(parts, pairs, strict=True)) else total(parts)


def _slope_as_wide(part: Kernel, like: Kernel) -> Kernel:
    if type(part) is not LocalLinearTrend or part.diffusion <= like.diffusion:
        return part
    wide = like.slope * part.diffusion / like.diffusion
    return LocalLinearTrend(**part.get_params() | {"slope": wide})


def _constant(variance: float) -> Kernel:
    return ConstantKernel(variance, (1e-6 * variance, 1e6 * variance))
