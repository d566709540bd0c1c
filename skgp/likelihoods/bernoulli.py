r"""Binary labels in {-1, +1}, by a logit or a probit link.

With the sigmoid g of the link, :math:`p(y \mid f) = g(y f)`:

======  ======================================  ===============================================
link    g                                       :math:`P(y = 1)` under :math:`f \sim N(m, v)`
======  ======================================  ===============================================
probit  :math:`\Phi`                            :math:`\Phi(m / \sqrt{1 + v})` [1]_
logit   :math:`\sigma(f) = 1 / (1 + e^{-f})`    below
======  ======================================  ===============================================

Expectations
------------
The logistic sigmoid is a mixture of probits, with the density k of Kolmogorov's distribution [2]_,

.. math:: \sigma(f) = \int_0^\infty \Phi\Big(\frac f{2x}\Big) k(x)\, dx, \qquad
          k(x) = 8 x \sum_{j \ge 1} (-1)^{j + 1} j^2 e^{-2 j^2 x^2},

of which the trapezoidal rule in log x leaves 1e-11 with 20 nodes. Under N(m, v) the expected
logarithm of :math:`\sigma(f)` and its derivatives are then sums of closed forms, with
:math:`s = 1 / \sqrt{4 x^2 + v}`,

.. math:: -\Big[\frac{\phi(s m)} s - m \Phi(-s m)\Big], \qquad \Phi(-s m), \qquad
          -s\, \phi(s m).

Both sigmoids have their singularities, or the zeros that make singularities of their logarithms,
some 3 from 0 in the complex plane. Other expectations without a closed form are left to Gauss-
Hermite quadrature up to a latent variance of .81 and to `quadrature.smooth_averages`, told that
scale, and `adaptive.log_expectation` above it, which costs two to five times as much.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. (3.82).
.. [2] Andrews and Mallows (1974), Scale mixtures of normal distributions, JRSS B 36.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

from skgp.likelihoods import adaptive, quadrature
from skgp.likelihoods.base import Likelihood
from skgp.likelihoods.defaults import (
    N_PROBITS,
    N_SIGMOID,
    PROBITS_REACH,
    QUADRATURE_CHUNK,
    SIGMOID_CHUNK,
    SIGMOID_SCALE,
)
from skgp.likelihoods.quadrature import fails
from skgp.linalg.runtime import constant_like, namespace

_LINKS = ("logit", "probit")
# The latent variance above which Gauss-Hermite is left
_WIDE = (quadrature.NARROW * SIGMOID_SCALE) ** 2  # mathematical


class Bernoulli(Likelihood):
    r"""Labels :math:`y \in \{-1, +1\}` with :math:`P(y = 1 \mid f) = g(f)`.

    Parameters
    ----------
    link : {"logit", "probit"}, default="logit"
        The sigmoid g.
    n_points : int, default=20
        Gauss-Hermite nodes where a Gaussian expectation has no closed form and the latent variance
        is at most .81. Errors are below 1e-8 with the default, and for wider variances too. Of the
        logit link only `log_predictive` has none.

    Raises
    ------
    ValueError
        If the link is unknown or `n_points` is not a positive integer; by the methods, if y holds
        anything but -1 and +1.

    Examples
    --------
    >>> import torch
    >>> mean, var = torch.tensor([[0.0, 2.0], [1.0, 4.0]], dtype=torch.float64)
    >>> Bernoulli(link="probit").prob(mean, var)
    tensor([0.5000, 0.8145], dtype=torch.float64)
    """

    _bend = SIGMOID_SCALE

    def __init__(self, link: str = "logit", *, n_points: int = 20) -> None:
        super().__init__(n_points=n_points)
        if link not in _LINKS:
            raise ValueError(f"link must be one of {_LINKS}; got {link!r}.")
        self.link = link
        self.information = 0.25 if link == "logit" else 2 / math.pi  # at f = 0

    def prob(self, mean: Tensor, var: Tensor) -> Tensor:
        r"""Probability of the label +1, :math:`E_{f \sim N(m, v)}[g(f)]`.

        Parameters
        ----------
        mean, var : Tensor of shapes that broadcast to (...)
            Mean and variance of the latent values, ``var >= 0``.

        Returns
        -------
        Tensor of shape (...)
            Small probabilities keep their relative precision.

        Raises
        ------
        ValueError
            If the shapes or dtypes differ, or a variance is negative.
        """
        return self.log_predictive(torch.ones_like(mean), mean, var).exp()

    def centred(self, f: float, variance: float) -> tuple[float, float]:
        """In closed form for the probit link."""
        root = math.sqrt(1 + variance)
        if self.link == "probit" or f == 0:
            return f * root, 0.5 * f / root
        squares, weights = _probits()
        scale, wrong = np.sqrt(squares + variance), float(special.expit(-f))

        def excess(mean: float) -> float:
            return float(weights @ special.ndtr(-mean / scale)) - wrong

        mean = float(optimize.brentq(excess, f, f * root, xtol=1e-9)) if variance else f
        density = weights * np.exp(-0.5 * (mean / scale) ** 2) / scale
        return mean, 0.5 * mean * float((density / scale**2).sum() / density.sum())

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        if self.link == "logit":
            return torch.nn.functional.logsigmoid(y * f)
        return torch.special.log_ndtr(y * f)

    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        if self.link == "logit":
            first = y * torch.sigmoid(-y * f)
            return first, -torch.sigmoid(f) * torch.sigmoid(-f)
        # phi / Phi, by erfcx, which neither underflows nor cancels in the left tail.
        hazard = math.sqrt(2 / math.pi) / torch.special.erfcx(-y * f / math.sqrt(2))
        return y * hazard, -hazard * (hazard + y * f)

    def _log_prob_and_derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.link == "probit":
            return super()._log_prob_and_derivatives(y, f)
        margin = y * f
        wrong = torch.sigmoid(-margin)
        second = (-wrong).mul_(torch.sigmoid(margin))
        return torch.nn.functional.logsigmoid(margin), y * wrong, second

    def skewness(self, y: Tensor, f: Tensor) -> Tensor:
        """In closed form for the logit link."""
        return torch.tanh(f / 2) if self.link == "logit" else super().skewness(y, f)

    def _mode(self, y: Tensor) -> Tensor:
        return y * math.inf

    def expected_log_prob_and_derivatives(
        self, y: Tensor, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All three by one rule."""
        if self.link == "logit":
            value, first, second = _by_probits(y * mean, var)
            return value, y * first, second
        rule = quadrature.smooth_averages
        return self._averaged(rule, self._log_prob_and_derivatives, y, mean, var)

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if self.link == "logit":
            return quadrature.averaged(_by_probits, y * mean, var)
        rule = quadrature.smooth_expectation
        return self._averaged(rule, self._log_prob_and_derivatives, y, mean, var)

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        if self.link == "logit":
            return self.expected_log_prob_and_derivatives(y, mean, var)[1:]
        return self._averaged(quadrature.smooth_averages, self._derivatives, y, mean, var)

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if self.link == "probit":
            return torch.special.log_ndtr(y * mean / (1 + var).sqrt())

        def narrow(y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor]:
            return (super(Bernoulli, self)._log_predictive(y, mean, var),)

        def wide(y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor]:
            return (adaptive.log_expectation(self, y, mean, var, n_points=N_SIGMOID),)

        return quadrature.piecewise(var > _WIDE, narrow, wide, (y, mean, var), chunk=SIGMOID_CHUNK)[
            0
        ]

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        positive = self._log_predictive(torch.ones_like(mean), mean, var).exp()
        negative = self._log_predictive(-torch.ones_like(mean), mean, var).exp()
        return positive - negative, 4 * positive * negative

    def _conditional_mean(self, f: Tensor) -> Tensor:
        return torch.tanh(f / 2) if self.link == "logit" else torch.erf(f / math.sqrt(2))

    def _conditional_var(self, f: Tensor) -> Tensor:
        return 1 - self._conditional_mean(f) ** 2

    def _check_targets(self, y: Tensor) -> None:
        if fails(y.abs() == 1):
            raise ValueError("y must hold labels -1 and +1 only; encode the classes first.")


def _by_probits(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expected log sigma(f) and its two derivatives, given means and variances of f; (...)."""
    chunk = QUADRATURE_CHUNK
    return quadrature.chunked(_mixture, (mean, var), chunk=chunk)  # type: ignore[return-value]


def _mixture(mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    """The same of some rows (n,); by NumPy, in a quarter of torch's time, where that will do."""
    if mean.device.type == "cpu" and not (mean.requires_grad or var.requires_grad):
        found = _sums(special, _probits(), mean.double().numpy(), var.double().numpy())
        return tuple(torch.from_numpy(each).to(mean.dtype) for each in found)
    return _sums(torch.special, [constant_like(each, mean) for each in _probits()], mean, var)


def _sums(special: Any, probits: Sequence[Any], mean: Any, var: Any) -> tuple[Any, Any, Any]:
    """The same of arrays or tensors, with the module that has their `ndtr`."""
    xp, (squares, weights) = namespace(mean), probits
    densities = weights * (2 * math.pi) ** -0.5
    scale = xp.sqrt(squares[:, None] + var)  # 1 / s, (k, n)
    z = mean / scale
    first, density = weights @ special.ndtr(-z), xp.exp(-0.5 * z * z)
    return mean * first - densities @ (density * scale), first, -densities @ (density / scale)


@lru_cache(maxsize=1)
def _probits() -> tuple[np.ndarray, np.ndarray]:
    """Squares of the scales 2x of the probits of a sigmoid, and their weights, (k,) each."""
    x, j = np.geomspace(*PROBITS_REACH, N_PROBITS), np.arange(1, 40)[:, None]
    terms = (-1.0) ** (j + 1) * j**2 * np.exp(-2 * (j * x) ** 2)  # underflow to 0 by far
    weights = x**2 * terms.sum(0)  # x, as the step is one in log x
    return 4 * x**2, weights / weights.sum()
