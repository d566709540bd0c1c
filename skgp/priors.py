r"""Priors of positive hyper-parameters, as densities of their logarithms.

Sampling takes place in :math:`u = \log\theta`, the coordinates of scikit-learn's ``theta``; there a
density of :math:`\theta` gains the Jacobian :math:`d\theta / du = e^u`.

=============  ==============================================================
LogNormal      :math:`\theta = m e^{s z}`, z standard normal: u is Gaussian
Gamma          :math:`p(\theta) = b^a \theta^{a-1} e^{-b\theta} / \Gamma(a)`
HalfNormal     :math:`p(\theta) = \sqrt{2/\pi}\, e^{-\theta^2 / 2 s^2} / s`
=============  ==============================================================

All have ``median``, of theta, and ``log_sd``, the standard deviation of u.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from scipy.special import gammaincinv, polygamma

__all__ = ["Gamma", "HalfNormal", "LogNormal", "Prior"]


@runtime_checkable
class Prior(Protocol):
    """Density of u = log(theta) for one positive hyper-parameter theta, whose median it has."""

    @property
    def median(self) -> float:
        """Median of theta."""

    def log_density(self, u: np.ndarray) -> np.ndarray:
        """Log-density of u, in nats, elementwise; the Jacobian is included."""
        ...

    def gradient(self, u: np.ndarray) -> np.ndarray:
        """Its derivative with respect to u, elementwise."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """Log-normal prior.

    Parameters
    ----------
    median : float
    sd : float, default=1.5
        Standard deviation of the logarithm.

    Raises
    ------
    ValueError
        If either is not positive and finite.
    """

    median: float
    sd: float = 1.5  # a factor of 20 either way covers 95%

    def __post_init__(self) -> None:
        _check_positive(self, "median", "sd")

    @property
    def log_sd(self) -> float:
        """Standard deviation of u."""
        return self.sd

    def log_density(self, u):
        """Log-density of u, elementwise, in nats."""
        z = (u - math.log(self.median)) / self.sd
        return -0.5 * z**2 - math.log(self.sd) - 0.5 * math.log(2 * math.pi)

    def gradient(self, u):
        """Derivative of the log-density, elementwise."""
        return (math.log(self.median) - u) / self.sd**2


@dataclass(frozen=True)
class Gamma:
    r"""Gamma prior, of mean `shape` / `rate`.

    .. math:: \log p(u) = a u - b e^u + a \log b - \log \Gamma(a).

    Parameters
    ----------
    shape, rate : float

    Raises
    ------
    ValueError
        If either is not positive and finite.
    """

    shape: float
    rate: float

    def __post_init__(self) -> None:
        _check_positive(self, "shape", "rate")

    @property
    def median(self) -> float:
        """Median of theta."""
        return float(gammaincinv(self.shape, 0.5) / self.rate)

    @property
    def log_sd(self) -> float:
        """Standard deviation of u."""
        return math.sqrt(float(polygamma(1, self.shape)))

    def log_density(self, u):
        """Log-density of u, elementwise, in nats."""
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        return self.shape * u - self.rate * _exp(u) + constant

    def gradient(self, u):
        """Derivative of the log-density, elementwise."""
        return self.shape - self.rate * _exp(u)


@dataclass(frozen=True)
class HalfNormal:
    r"""Absolute value of a normal variable of mean 0.

    .. math:: \log p(u) = u - e^{2u} / 2 s^2 - \log s + \tfrac12 \log(2 / \pi).

    Parameters
    ----------
    scale : float
        Standard deviation of that variable.

    Raises
    ------
    ValueError
        If it is not positive and finite.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_positive(self, "scale")

    @property
    def median(self) -> float:
        """Median of theta."""
        return 0.6744897501960817 * self.scale

    @property
    def log_sd(self) -> float:
        """Standard deviation of u."""
        return math.pi / math.sqrt(8)

    def log_density(self, u):
        """Log-density of u, elementwise, in nats."""
        constant = 0.5 * math.log(2 / math.pi) - math.log(self.scale)
        return u - 0.5 * _exp(u) ** 2 / self.scale**2 + constant

    def gradient(self, u):
        """Derivative of the log-density, elementwise."""
        return 1 - _exp(u) ** 2 / self.scale**2


def _exp(u):
    """Exponential, bounded: beyond 1e130 the densities above are zero in any case."""
    return np.exp(np.minimum(u, 300.0))


def _check_positive(prior: Any, *names: str) -> None:
    for name in names:
        value = getattr(prior, name)
        if not (np.ndim(value) == 0 and 0 < value < math.inf):
            raise ValueError(
                f"{type(prior).__name__}: {name} must be a positive number, got {value!r}."
            )
