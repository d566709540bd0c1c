r"""Binary labels in {-1, +1}, by a logit or a probit link.

With the sigmoid g of the link, :math:`p(y \mid f) = g(y f)`:

======  ======================================  ===============================================
link    g                                       :math:`P(y = 1)` under :math:`f \sim N(m, v)`
======  ======================================  ===============================================
probit  :math:`\Phi`                            :math:`\Phi(m / \sqrt{1 + v})` [1]_
logit   :math:`\sigma(f) = 1 / (1 + e^{-f})`    below
======  ======================================  ===============================================

Expectations under the logit link
---------------------------------
Gauss-Hermite nodes lie :math:`\sqrt v` apart, and :math:`\sigma` has poles at :math:`\pm i \pi`:
20 nodes err by 1e-9 at v = 1, but by 3e-4 at v = 10 and .03 at v = 100. For v > .8 the logistic
function is therefore written as an average. With logistic noise e, of density
:math:`\sigma'(e)`,

.. math:: \sigma(f) = E_e[1(f + e > 0)], \quad \log(1 + \exp f) = E_e[\max(f + e, 0)], \quad
          \sigma'(f) = E_e[\delta(f + e)],

and the expectation over f inside the brackets is a closed form in :math:`m + e` that is smooth on
the scale :math:`\sqrt v`. The integral over e that remains is left to the trapezoidal rule, whose
91 nodes err by less than 1e-10 for every v > .8.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. (3.82).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skgp.likelihoods.base import Likelihood

__all__ = ["Bernoulli"]

_LINKS = ("logit", "probit")
_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
_WIDE = 0.8  # latent variance above which the logit link leaves Gauss-Hermite quadrature
_STEP, _N_SIDE = 0.6, 45  # trapezoidal rule for logistic noise: the weight beyond is 1e-12
_CHUNK = 2**16  # values that are held with all their nodes: 50 MB a temporary


class Bernoulli(Likelihood):
    r"""Labels :math:`y \in \{-1, +1\}` with :math:`P(y = 1 \mid f) = g(f)`.

    Parameters
    ----------
    link : {"logit", "probit"}, default="logit"
        The sigmoid g.
    n_points : int, default=20
        Gauss-Hermite nodes where a Gaussian expectation has no closed form: with the logit link for
        latent variances up to .8 (error 1e-10); with the probit link for `expected_log_prob`
        and `expected_derivatives` (errors of 20 nodes: 1e-8 up to a variance of 1; of 80 nodes:
        1e-6 up to 10).

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

    def __init__(self, link: str = "logit", *, n_points: int = 20) -> None:
        super().__init__(n_points=n_points)
        if link not in _LINKS:
            raise ValueError(f"link must be one of {_LINKS}; got {link!r}.")
        self.link = link

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

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        narrow = super()._expected_log_prob
        if self.link == "probit":
            return narrow(y, mean, var)
        return _by_width(narrow, _expected_log_sigmoid, y, mean, var)

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if self.link == "probit":
            return torch.special.log_ndtr(y * mean / (1 + var).sqrt())
        return _by_width(super()._log_predictive, _log_expected_sigmoid, y, mean, var)

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        narrow = super()._expected_derivatives
        if self.link == "probit":
            return narrow(y, mean, var)

        def first(y, mean, var):
            return y * _log_expected_sigmoid(-y, mean, var).exp()

        return (
            _by_width(lambda *args: narrow(*args)[0], first, y, mean, var),
            _by_width(lambda *args: narrow(*args)[1], _expected_curvature, y, mean, var),
        )

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        positive = self._log_predictive(torch.ones_like(mean), mean, var).exp()
        negative = self._log_predictive(-torch.ones_like(mean), mean, var).exp()
        return positive - negative, 4 * positive * negative

    def _conditional_mean(self, f: Tensor) -> Tensor:
        return torch.tanh(f / 2) if self.link == "logit" else torch.erf(f / math.sqrt(2))

    def _conditional_var(self, f: Tensor) -> Tensor:
        return 1 - self._conditional_mean(f) ** 2

    def _check_targets(self, y: Tensor) -> None:
        if not (y.abs() == 1).all():
            raise ValueError("y must hold labels -1 and +1 only; encode the classes first.")


def _by_width(
    narrow: Callable[..., Tensor], wide: Callable[..., Tensor], y: Tensor, mean: Tensor, var: Tensor
) -> Tensor:
    """`narrow` where the variance is at most `_WIDE`, `wide` elsewhere, some values at a time."""
    is_wide = var > _WIDE
    out = torch.zeros_like(mean)
    for mask, rule in ((~is_wide, narrow), (is_wide, wide)):
        # Each rule sees only values of its kind: no time for the rest, and no NaN gradients of it.
        chunks = (values[mask].split(_CHUNK) for values in (y, mean, var))
        out[mask] = torch.cat([rule(*chunk) for chunk in zip(*chunks, strict=True)])
    return out


def _logistic_rule(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes e (91, 1, ...) and log-weights of the trapezoidal rule for logistic noise."""
    nodes = _STEP * torch.arange(-_N_SIDE, _N_SIDE + 1, dtype=like.dtype, device=like.device)
    nodes = nodes.reshape(-1, *(1 for _ in like.shape))
    log_sigmoid = torch.nn.functional.logsigmoid
    return nodes, math.log(_STEP) + log_sigmoid(nodes) + log_sigmoid(-nodes)


def _log_expected_sigmoid(y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    r""":math:`\log E[\sigma(y f)] = \log E_e[\Phi((y m + e) / \sqrt v)]`.

    Where :math:`y m < -v / 2` the sum would run out of nodes; there
    :math:`\sigma(f) = e^f \sigma(-f)` moves the mean to the right of :math:`-v / 2`:
    :math:`E[\sigma(f)] = \exp(m + v / 2)\, E_{N(-m - v, v)}[\sigma(f)]`.
    """
    mean = y * mean
    shift = mean + var / 2
    reflected = shift < 0
    mean = torch.where(reflected, -mean - var, mean)
    nodes, log_weights = _logistic_rule(mean)
    log_terms = log_weights + torch.special.log_ndtr((mean + nodes) / var.sqrt())
    return torch.logsumexp(log_terms, dim=0) + torch.where(reflected, shift, 0)


def _expected_log_sigmoid(y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    r""":math:`E[\log \sigma(y f)] = -E_e[E_f \max(e - y f, 0)]`."""
    nodes, log_weights = _logistic_rule(mean)
    std = var.sqrt()
    a = nodes - y * mean
    positive_part = a * torch.special.ndtr(a / std) + std * _normal_density(a / std)
    return -(log_weights.exp() * positive_part).sum(0)


def _expected_curvature(y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    r""":math:`-E[\sigma'(f)] = -E_e[N(-e; m, v)]`, whatever the label."""
    nodes, log_weights = _logistic_rule(mean)
    std = var.sqrt()
    return -(log_weights.exp() * _normal_density((mean + nodes) / std) / std).sum(0)


def _normal_density(z: Tensor) -> Tensor:
    return (-0.5 * z**2 - _LOG_ROOT_2PI).exp()
