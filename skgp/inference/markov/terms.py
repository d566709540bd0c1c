r"""Terms of a series beside its process: features with Gaussian coefficients.

.. math:: y = f(t) + \sum_j \phi_j(x_j)^\top \beta_j + \varepsilon, \qquad
          \beta_{jk} \sim N(0, s_{jk}^2(\theta_j)) .

Scales that are wide and fixed leave a coefficient to the data (polynomials of time, slopes); those
of the levels of a category share one that is learned; a smooth function of a column is a slope and
the first functions of a Hilbert space on an interval beyond its values [1]_, whose scales are the
spectral density of a squared exponential kernel, of variance and length scale learned:

.. math:: \phi_k(z) = L^{-1/2} \sin(w_k (z + L)), \quad w_k = \frac{\pi k}{2 L}, \qquad
          s_k^2 = \sigma^2 \ell \sqrt{2 \pi}\, e^{-\ell^2 w_k^2 / 2},

z being x scaled to [-1, 1] over the training rows. Beyond these the function goes on as a straight
line. Features are about their means over the training rows, save polynomials of time.

References
----------
.. [1] Solin and Sarkka (2020), Hilbert space methods for reduced-rank Gaussian process regression;
   Riutort-Mayol et al. (2023) for the number of functions and the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.linalg.runtime import TensorState, constant_like


@dataclass(frozen=True)
class Term(TensorState):
    """Features of one column, and the scales of their coefficients as a function of theta."""

    name: str
    place: int  # of the column in X
    wide: float  # standard deviation of coefficients left to the data
    centre: Tensor | None = None  # (q,) weighted means of the features over the training rows
    theta: Tensor = torch.empty(0, dtype=torch.float64)  # (t,), in logarithms

    @classmethod
    def of(cls, x: Tensor, *place: Any, weight: Tensor | None = None, **options: Any) -> Any:
        """The term of a training column x (n,), its features about their weighted means there."""
        term = cls(*place, **options)
        return replace(term, centre=_mean(term.raw(x), weight))

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Of theta, (t,) each."""
        return self.theta, self.theta

    def raw(self, x: Tensor) -> Tensor:
        """Features (n, q) of values x (n,)."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """The same about their means."""
        raw = self.raw(x)
        return raw if self.centre is None else raw - constant_like(self.centre, x)

    def log_scales(self, theta: Tensor) -> Tensor:
        """Log standard deviations (q,) of the coefficients; of one, left to the data."""
        return self._wide(1)

    def slopes(self, theta: Tensor) -> Tensor:
        """Derivatives (q, t) of the log scales in theta."""
        return theta.new_zeros(len(self.log_scales(theta)), 0)

    def apart(self, x: Tensor, effects: Tensor) -> Tensor:
        """Loadings (n, q) of values x (n,) on draws of N(0, I), where unlike values share none."""
        return effects

    def _wide(self, count: int) -> Tensor:
        return torch.full((count,), math.log(self.wide), dtype=torch.float64)


@dataclass(frozen=True)
class Polynomial(Term):
    """Of time: Legendre polynomials over the range of the training rows."""

    degree: int = 0
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def over(cls, times: Tensor, degree: int, wide: float, *, place: int) -> "Polynomial":
        """Of the range of some times (n,)."""
        low, high = float(times.min()), float(times.max())
        high = high if high > low else low + 1.0
        return cls("trend", place, wide, degree=degree, low=low, high=high)

    def raw(self, x: Tensor) -> Tensor:
        """Features (n, q) of values x (n,); constant where their squares would overflow."""
        z = 2 * (x - self.low) / (self.high - self.low) - 1
        z = z.clamp(-defaults.BEYOND_TREND, defaults.BEYOND_TREND)
        powers = [torch.ones_like(z), z, 1.5 * z * z - 0.5]
        return torch.stack(powers[: self.degree + 1], 1)

    def log_scales(self, theta: Tensor) -> Tensor:
        """Log standard deviations (q,) of the coefficients."""
        return self._wide(self.degree + 1)


@dataclass(frozen=True)
class Step(Term):
    """A level that changes at one of the times."""

    at: float = 0.0

    def raw(self, x: Tensor) -> Tensor:
        """Features (n, q) of values x (n,)."""
        return (x >= self.at).to(x)[:, None]


@dataclass(frozen=True)
class Linear(Term):
    """A slope, in standard deviations of the column; of flags, the step."""

    scale: float = 1.0

    @classmethod
    def of(cls, x: Tensor, *place: Any, weight: Tensor | None = None, **options: Any) -> Any:
        """The term of a training column x (n,)."""
        # That of equal values is a rounding error, not always 0.
        spread = float(_mean((x - _mean(x, weight)).square(), weight)) ** 0.5
        scale = spread if float(x.max()) > float(x.min()) else 1.0
        return super().of(x, *place, weight=weight, scale=scale, **options)

    def raw(self, x: Tensor) -> Tensor:
        """Features (n, q) of values x (n,)."""
        return x[:, None] / self.scale


@dataclass(frozen=True)
class Categorical(Term):
    """An effect of each level, coded 0, 1, ...; the last is of a level that is new.

    Training rows, which have no new level, leave it its prior: unlike ones are draws from that.
    """

    theta: Tensor = torch.tensor([math.log(defaults.TERM_VARIANCE)], dtype=torch.float64)
    n_levels: int = 1

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Of theta, (t,) each."""
        return tuple(self.theta.new_tensor([math.log(v)]) for v in defaults.TERM_VARIANCES)  # type: ignore

    def raw(self, x: Tensor) -> Tensor:
        """Features (n, q) of values x (n,)."""
        levels = torch.arange(self.n_levels + 1, dtype=x.dtype, device=x.device)
        return (x[:, None].clamp(max=self.n_levels) == levels).to(x)

    def apart(self, x: Tensor, effects: Tensor) -> Tensor:
        """Loadings (n, q + k - 1) of values x (n,), of which k are new levels."""
        new = x[x >= self.n_levels].unique()
        return torch.cat([effects[:, :-1], effects[:, -1:] * (x[:, None] == new)], 1)

    def log_scales(self, theta: Tensor) -> Tensor:
        """Log standard deviations (q,) of the coefficients."""
        return (0.5 * theta[0]).expand(self.n_levels + 1)

    def slopes(self, theta: Tensor) -> Tensor:
        """Derivatives (q, t) of the log scales in theta."""
        return theta.new_full((self.n_levels + 1, 1), 0.5)


@dataclass(frozen=True)
class Smooth(Term):
    """A slope and a Gaussian process of one column."""

    theta: Tensor = torch.tensor(
        [defaults.TERM_VARIANCE, defaults.SMOOTH_SCALES[1]], dtype=torch.float64
    ).log()
    middle: float = 0.0
    half: float = 1.0

    @classmethod
    def of(cls, x: Tensor, *place: Any, weight: Tensor | None = None, **options: Any) -> Any:
        """The term of a training column x (n,)."""
        low, high = float(x.min()), float(x.max())
        options |= {"middle": (low + high) / 2, "half": (high - low) / 2 or 1.0}
        return super().of(x, *place, weight=weight, **options)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Of theta, (t,) each."""
        low, _, high = defaults.SMOOTH_SCALES
        pairs = zip(defaults.TERM_VARIANCES, (low, high), strict=True)
        return tuple(self.theta.new_tensor(pair).log() for pair in pairs)  # type: ignore

    def raw(self, x: Tensor) -> Tensor:
        """Features (n, q) of values x (n,)."""
        z = (x - self.middle) / self.half
        w = constant_like(self._frequencies, x)
        waves = (
            w * (z.clamp(-1, 1)[:, None] + defaults.SMOOTH_INTERVAL)
        ).sin() / defaults.SMOOTH_INTERVAL**0.5
        return torch.cat([z[:, None], waves], 1)

    def log_scales(self, theta: Tensor) -> Tensor:
        """Log standard deviations (q,) of the coefficients."""
        level = theta.sum() + 0.5 * math.log(2 * math.pi)
        waves = 0.5 * (level - 0.5 * (theta[1].exp() * self._frequencies) ** 2)
        return torch.cat([self._wide(1), waves])

    def slopes(self, theta: Tensor) -> Tensor:
        """Derivatives (q, t) of the log scales in theta."""
        found = theta.new_full((1 + len(self._frequencies), 2), 0.5)
        found[1:, 1] -= 0.5 * (theta[1].exp() * self._frequencies) ** 2
        found[0] = 0.0
        return found

    @property
    def _frequencies(self) -> Tensor:
        k = torch.arange(1, defaults.SMOOTH_FUNCTIONS + 1, dtype=torch.float64)
        return math.pi * k / (2 * defaults.SMOOTH_INTERVAL)


@dataclass(frozen=True)
class Terms(TensorState):
    """All terms of a model."""

    parts: tuple[Term, ...]
    time: int  # place of the times among the columns of X

    def features(self, X: Tensor) -> Tensor:
        """Those of rows (n, d), before their scales, (n, q)."""
        return torch.cat([part.features(X[:, part.place]) for part in self.parts], 1)

    def apart(self, X: Tensor, effects: Tensor) -> Tensor:
        """Loadings (n, q) of rows (n, d) on draws of N(0, I), where unlike new levels share none.

        Those of coefficients that training rows know nothing of are not mixed with others.
        """
        blocks = zip(self.parts, effects.split(self.sizes, 1), strict=True)
        return torch.cat([part.apart(X[:, part.place], block) for part, block in blocks], 1)

    def log_scales(self) -> list[Tensor]:
        """Of each term, (q_j,)."""
        return [part.log_scales(part.theta) for part in self.parts]

    @property
    def sizes(self) -> list[int]:
        """Number of features of each term."""
        return [len(scales) for scales in self.log_scales()]

    def at(self, thetas: Sequence[Tensor]) -> "Terms":
        """The terms with other parameters, (t_j,) each."""
        pairs = zip(self.parts, thetas, strict=True)
        return replace(self, parts=tuple(replace(part, theta=theta) for part, theta in pairs))


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Of values (n, ...) of rows of some weights (n,)."""
    if weight is None:
        return values.mean(0)
    return torch.tensordot(weight, values, dims=1) / weight.sum()
