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
Both sigmoids have their singularities, or the zeros that make singularities of their logarithms,
some 3 from 0 in the complex plane. Expectations that have no closed form are left to Gauss-Hermite
quadrature up to a latent variance of .81 and to `quadrature.smooth_averages`, told that scale, and
`adaptive.log_expectation` above it, which costs two to five times as much.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. (3.82).
"""

import math

import torch
from torch import Tensor

from skgp.likelihoods import adaptive, quadrature
from skgp.likelihoods.base import Likelihood
from skgp.likelihoods.defaults import N_SIGMOID, SIGMOID_CHUNK, SIGMOID_SCALE
from skgp.likelihoods.quadrature import fails

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
        is at most .81. Errors are below 1e-8 with the default, and for wider variances too.

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
        rule = quadrature.smooth_averages
        return self._averaged(rule, self._log_prob_and_derivatives, y, mean, var)

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        rule = quadrature.smooth_expectation
        return self._averaged(rule, self._log_prob_and_derivatives, y, mean, var)

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
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
