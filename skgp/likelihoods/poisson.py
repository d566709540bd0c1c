r"""Counts 0, 1, 2, ... whose rate is a positive function of the latent value.

.. math:: p(y \mid f) = \lambda(f)^y e^{-\lambda(f)} / y!

=========  =====================  =================================================
link       :math:`\lambda(f)`     closed forms under :math:`f \sim N(m, v)`
=========  =====================  =================================================
exp        :math:`e^f`            :math:`E[\lambda] = e^{m + v / 2}`, and with it
                                  :math:`E[\log p]`, its derivatives and the moments of y
softplus   :math:`\log(1 + e^f)`  none; quadrature for all of them
=========  =====================  =================================================

An offset o of an observation is the logarithm of its exposure, of the time, the area or the number
of persons that the count is of. The exposure multiplies the rate: :math:`e^o \lambda(f)`, with the
exp link :math:`\lambda(f + o)`.

Both likelihoods are log-concave, and `adaptive.log_expectation` gives their log-predictives.

The predictive count
--------------------
A count is at most y where the unit Poisson process, run up to time :math:`\lambda`, has its event
number y + 1 later: :math:`P(Y \le y) = P(\lambda(f) < \Lambda)` with
:math:`\Lambda \sim \operatorname{Gamma}(y + 1)` independent of f. Of the two random variables the
one whose spread is narrower is integrated by quadrature and the other in closed form:

.. math:: P(Y \le y) = E_\Lambda\big[\Phi\big((\lambda^{-1}(\Lambda) - m) / \sqrt v\big)\big]
                     = E_f\big[Q(y + 1, \lambda(f))\big]

with the regularised upper incomplete gamma function Q. So means of 1e6, where the noise of the
count is a step in f of width 1e-3, need no more nodes than means of 1.
"""

import abc
import math

import torch
from torch import Tensor

from skgp.likelihoods import adaptive, defaults, quadrature
from skgp.likelihoods.base import NumericLikelihood


class Poisson(NumericLikelihood):
    r"""Counts with :math:`P(y \mid f) = \lambda(f)^y e^{-\lambda(f)} / y!`.

    Parameters
    ----------
    link : {"exp", "softplus"}, default="exp"
        The rate :math:`\lambda(f)`. With softplus it grows linearly, which is kinder to outlying
        counts and to large latent variances.
    n_points : int, default=20
        Gauss-Hermite nodes for expectations of the softplus link at latent variances up to .81;
        wider ones take 80 nodes of another rule (errors below 1e-8 in both cases).
    offset : Tensor, optional
        Log-exposures, which broadcast with y, f, mean and var; see `at`.

    Raises
    ------
    ValueError
        If the link is unknown or `n_points` is not a positive integer; by the methods, if y holds
        anything but 0, 1, 2, ...

    Notes
    -----
    With the exp link a log-rate above 319 in double precision (40 in single) counts as that value,
    continued linearly in `log_prob`, so that neither rates nor their squares overflow.

    Examples
    --------
    >>> import torch
    >>> mean, var = torch.tensor([[0.0, 2.0], [1.0, 0.25]], dtype=torch.float64)
    >>> Poisson().predictive_moments(mean, var)[0]
    tensor([1.6487, 8.3729], dtype=torch.float64)
    >>> Poisson().quantile(torch.full_like(mean, 0.9), mean, var)
    tensor([ 4., 15.], dtype=torch.float64)
    """

    is_count = True
    _bend = defaults.SOFTPLUS_SCALE

    def __init__(
        self, link: str = "exp", *, n_points: int = 20, offset: Tensor | None = None
    ) -> None:
        super().__init__(n_points=n_points)
        if link not in _LINKS:
            raise ValueError(f"link must be one of {tuple(_LINKS)}; got {link!r}.")
        self.link, self.offset = link, offset
        self.has_log_link = link == "exp"

    def at(self, offset: Tensor | None) -> "Poisson":
        """Counts of these log-exposures."""
        return Poisson(self.link, n_points=self.n_points, offset=offset)

    def rows(self, index: slice | Tensor) -> "Poisson":
        """Counts of some of the log-exposures."""
        return self if self.offset is None else self.at(self.offset[index])

    @property
    def _link(self) -> "_Link":
        return _LINKS[self.link]

    def _with_offset(self, y: Tensor) -> Tensor:
        """Targets y + i o, which rules that take some observations at a time take apart as one."""
        return y if self.offset is None else torch.complex(y, self._offset_like(y).expand_as(y))

    def _offset_like(self, like: Tensor) -> Tensor:
        return like.new_zeros(()) if self.offset is None else self.offset.to(like)

    def _taken_apart(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Counts and offsets of targets with or without their offset."""
        return (y.real, y.imag) if y.is_complex() else (y, self._offset_like(y))

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y, o = self._taken_apart(y)
        return y * self._link.log_rate(f, o) - self._link.rate(f, o) - torch.lgamma(y + 1)

    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        y, o = self._taken_apart(y)
        _, first, second = self._link.log_prob_and_derivatives(y, f, o)
        return first, second

    def _log_prob_and_derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, o = self._taken_apart(y)
        value, first, second = self._link.log_prob_and_derivatives(y, f, o)
        return value - torch.lgamma(y + 1), first, second

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if self.link == "exp":
            mean = mean + self._offset_like(mean)
            return y * mean - self._link.rate(mean + 0.5 * var) - torch.lgamma(y + 1)
        given = self._with_offset(y), mean, var
        return self._averaged(quadrature.smooth_expectation, self._log_prob_and_derivatives, *given)

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        if self.link == "exp":
            return self._derivatives(y, mean + 0.5 * var)
        given = self._with_offset(y), mean, var
        return self._averaged(quadrature.smooth_averages, self._derivatives, *given)

    def expected_log_prob_and_derivatives(
        self, y: Tensor, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As of `Likelihood`; of rates exp(f) in closed form."""
        if self.link != "exp":
            return super().expected_log_prob_and_derivatives(y, mean, var)
        return self.expected_log_prob(y, mean, var), *self._expected_derivatives(y, mean, var)

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if self.link == "exp":
            return adaptive.log_expectation(self.at(None), y, mean + self._offset_like(mean), var)
        return adaptive.log_expectation(self, self._with_offset(y), mean, var)

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        if self.link == "exp":
            mean = mean + self._offset_like(mean)
            mean_y = _bounded_exp(mean + 0.5 * var)
            # V[rate] = e^(2m + v) (e^v - 1), in a form whose exponent is bounded as a whole.
            return mean_y, mean_y + _bounded_exp(2 * (mean + var)) * -torch.expm1(-var)
        at_mean = self._link.rate(mean)

        def powers(f: Tensor, at_mean: Tensor) -> tuple[Tensor, Tensor]:
            excess = self._link.rate(f) - at_mean  # taken off lest the squares cancel
            return excess, excess**2

        first, second = quadrature.smooth_averages(
            powers, mean, var, at_mean, scale=self._bend, n_points=self.n_points
        )
        exposure = self._offset_like(mean).exp()
        mean_y = exposure * (at_mean + first)
        return mean_y, mean_y + exposure**2 * (second - first**2).clamp_min(0)

    def _cdf(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        shape = y.floor().clamp_min(0) + 1
        offset = self._offset_like(mean).expand_as(mean)
        centre = self._link.inverse(shape, offset)
        # Standard deviation of log rate(f) against that of log Gamma(y + 1).
        is_wide = var * self._link.log_slope(centre) ** 2 * shape > defaults.NARROW_COUNT
        columns = (shape, mean, var, offset)
        (value,) = quadrature.piecewise(
            is_wide, self._cdf_over_f, self._cdf_over_time, columns, chunk=defaults.COUNT_CHUNK
        )
        return torch.where(y < 0, torch.zeros_like(value), value)

    def _cdf_over_f(
        self, shape: Tensor, mean: Tensor, var: Tensor, offset: Tensor
    ) -> tuple[Tensor]:
        def below(f: Tensor) -> Tensor:
            return torch.special.gammaincc(shape.expand_as(f), self._link.rate(f, offset))

        return (quadrature.expectation(below, mean, var, n_points=self.n_points),)

    def _cdf_over_time(
        self, shape: Tensor, mean: Tensor, var: Tensor, offset: Tensor
    ) -> tuple[Tensor]:
        log_time, weights = adaptive.log_gamma_rule(shape, defaults.N_TIMES)
        threshold = self._link.inverse(shape * log_time.exp(), offset)
        return ((weights * torch.special.ndtr((threshold - mean) / var.sqrt())).sum(0),)

    def _quantile(self, q: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        low, high = self._bracket(q, mean, var)  # P(Y <= low) < q <= P(Y <= high)
        everywhere = self.at(self._offset_like(mean).expand_as(mean))
        for _ in range(defaults.MAX_BISECTIONS):
            # The geometric mean finds the magnitude, the arithmetic one the digits.
            geometric = ((low + 2) * (high + 2)).sqrt() - 2
            middle = torch.where(high > 4 * low + 16, geometric, 0.5 * (low + high)).floor()
            is_open = (middle > low) & (middle < high)
            if not bool(is_open.any()):
                break
            is_below = torch.zeros_like(is_open)
            rows = (middle[is_open], mean[is_open], var[is_open])
            is_below[is_open] = everywhere.rows(is_open)._cdf(*rows) < q[is_open]
            low = torch.where(is_open & is_below, middle, low)
            high = torch.where(is_open & ~is_below, middle, high)
        return high

    def _bracket(self, q: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Integers on either side of the quantile, by halves of the probability.

        Y > y needs an f above its quantile or, at that f, a Poisson variable that exceeds y; the
        tails of the latter are bounded by Bernstein's inequality, and so below.
        """
        std, miss = var.sqrt(), 1 - q
        offset = self._offset_like(mean)
        upper = self._link.rate(mean - std * torch.special.ndtri(0.5 * miss), offset)
        lower = self._link.rate(mean + std * torch.special.ndtri(0.5 * q), offset)
        nats_up, nats_down = -(0.5 * miss).log(), -(0.5 * q).log()
        room = nats_up / 3 + (nats_up**2 / 9 + 2 * upper * nats_up).sqrt()
        high = (upper + room).ceil() + 1
        low = (lower - (2 * lower * nats_down).sqrt()).floor() - 1
        return low.clamp_min(-1), high

    def _sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        rate = self._conditional_mean(f)
        counts = torch.poisson(rate.clamp_max(defaults.MAX_EXACT_RATE), generator=generator)
        if not bool((rate > defaults.MAX_EXACT_RATE).any()):
            return counts
        noise = torch.empty_like(f).normal_(generator=generator)
        return torch.where(
            rate > defaults.MAX_EXACT_RATE, (rate + rate.sqrt() * noise).round(), counts
        )

    def gaussian_targets(self, y: Tensor) -> Tensor:
        """Inverse of the link at y + 1/2."""
        return self._link.inverse(y + 0.5, self._offset_like(y))

    def _mode(self, y: Tensor) -> Tensor:
        return self._link.inverse(*self._taken_apart(y))

    def _conditional_mean(self, f: Tensor) -> Tensor:
        return self._link.rate(f, self._offset_like(f))

    def _conditional_var(self, f: Tensor) -> Tensor:
        return self._conditional_mean(f)

    def _check_targets(self, y: Tensor) -> None:
        super()._check_targets(y)
        is_bad = (y < 0) | (y != y.floor())
        if bool(is_bad.any()):
            raise ValueError(
                f"y must hold counts 0, 1, 2, ...; got {float(y[is_bad][0]):g}. Round fractions, "
                "drop negative values, or use a likelihood for real numbers, such as Gaussian."
            )


class _Link(abc.ABC):
    """Rate as a function of the latent value and the log-exposure o; all elementwise."""

    @abc.abstractmethod
    def rate(self, f: Tensor, o: Tensor | float = 0.0) -> Tensor:
        """The rate, differentiable."""

    @abc.abstractmethod
    def log_rate(self, f: Tensor, o: Tensor | float = 0.0) -> Tensor:
        """Its logarithm, differentiable and without underflow."""

    @abc.abstractmethod
    def log_slope(self, f: Tensor) -> Tensor:
        """Derivative of the log-rate."""

    @abc.abstractmethod
    def inverse(self, rate: Tensor, o: Tensor | float = 0.0) -> Tensor:
        """Latent value of a rate; -inf at 0."""

    @abc.abstractmethod
    def log_prob_and_derivatives(
        self, y: Tensor, f: Tensor, o: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``y log rate - rate`` and its derivatives in f; not for autograd."""


class _Exp(_Link):
    """exp(f + o); beyond the largest float's logarithm the rate goes on as a straight line."""

    def rate(self, f: Tensor, o: Tensor | float = 0.0) -> Tensor:
        f = f + o
        largest = _largest_log_rate(f)
        return f.clamp_max(largest).exp() * (1 + (f - largest).clamp_min(0))

    def log_rate(self, f: Tensor, o: Tensor | float = 0.0) -> Tensor:
        return f + o

    def log_slope(self, f: Tensor) -> Tensor:
        return torch.ones_like(f)

    def inverse(self, rate: Tensor, o: Tensor | float = 0.0) -> Tensor:
        return rate.log() - o

    def log_prob_and_derivatives(
        self, y: Tensor, f: Tensor, o: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        f = f + o
        rate = f.clamp_max(_largest_log_rate(f)).exp()
        return y * f - rate, y - rate, -rate


class _Softplus(_Link):
    """exp(o) log(1 + exp(f)): linear in f where f is large."""

    _LOW = -36.0  # below, the log-rate is f to machine precision

    def rate(self, f: Tensor, o: Tensor | float = 0.0) -> Tensor:
        return _exp(o) * torch.nn.functional.softplus(f, threshold=40)

    def log_rate(self, f: Tensor, o: Tensor | float = 0.0) -> Tensor:
        return o + torch.where(f < self._LOW, f, self.rate(f.clamp_min(self._LOW)).log())

    def log_slope(self, f: Tensor) -> Tensor:
        f = f.clamp_min(self._LOW)
        return torch.sigmoid(f) / self.rate(f)

    def inverse(self, rate: Tensor, o: Tensor | float = 0.0) -> Tensor:
        rate = rate * _exp(-o)
        return rate + (-torch.expm1(-rate)).log()

    def log_prob_and_derivatives(
        self, y: Tensor, f: Tensor, o: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        floored = f.clamp_min(self._LOW)
        rate, up = self.rate(floored), torch.sigmoid(floored)
        down, share = 1 - up, y * (up / rate)
        exposure = _exp(o)
        value = y * (rate.log() + (f - floored) + o) - exposure * rate
        return (value, share - exposure * up, share * (down - up / rate) - exposure * up * down)


_LINKS: dict[str, _Link] = {"exp": _Exp(), "softplus": _Softplus()}


def _exp(o: Tensor | float) -> Tensor | float:
    return o.exp() if isinstance(o, Tensor) else math.exp(o)


def _largest_log_rate(like: Tensor) -> float:
    """A log-rate with room for the square of the rate: 319, or 40 in single precision."""
    return 0.45 * math.log(torch.finfo(like.dtype).max)


def _bounded_exp(exponent: Tensor) -> Tensor:
    """Exponential, constant from 1e277 on (1e34 in single precision)."""
    return exponent.clamp_max(0.9 * math.log(torch.finfo(exponent.dtype).max)).exp()
