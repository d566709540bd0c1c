r"""Gaussian noise, and Laplace noise for robust regression: every computation in closed form.

For :math:`f \sim N(m, v)` Gaussian noise of variance :math:`\sigma^2` has

.. math::

    E[\log p(y \mid f)] = \log N(y \mid m, \sigma^2) - \frac{v}{2 \sigma^2}, \qquad
    \log E[p(y \mid f)] = \log N(y \mid m, v + \sigma^2)

and Laplace noise of scale b, with :math:`r = y - m` and :math:`s = \sqrt v` (Evans and Nair (2020),
"Quadruply stochastic Gaussian processes", appendix H.2):

.. math::

    E[\log p(y \mid f)] &= -\log 2b - \tfrac1b \Big( s \sqrt{2 / \pi}\, e^{-r^2 / 2v}
                           + r \operatorname{erf}\frac{r}{s \sqrt 2} \Big) \\
    E[p(y \mid f)] &= \frac{1}{2b} \big( T(r) + T(-r) \big), \qquad
    T(r) = e^{v / 2b^2 - r / b}\, \Phi\Big(\frac{r}{s} - \frac{s}{b}\Big) \\
    P(Y \le y) &= \Phi(r / s) - \tfrac12 T(r) + \tfrac12 T(-r) \\
    E\Big[\frac{d \log p}{df}\Big] &= \frac1b \operatorname{erf}\frac{r}{s \sqrt 2}, \qquad
    E\Big[\frac{d^2 \log p}{df^2}\Big] = -\frac2b\, N(y; m, v)
"""

import math

import torch
from torch import Tensor

from skgp.likelihoods.base import NumericLikelihood
from skgp.likelihoods.defaults import MIN_STD, QUANTILE_MAX_NEWTON
from skgp.likelihoods.quadrature import check_positive, free_parameter
from skgp.linalg.runtime import constant_like

_ROOT_2 = math.sqrt(2)  # mathematical


class Gaussian(NumericLikelihood):
    r"""Additive Gaussian noise, :math:`p(y \mid f) = N(y \mid f, \sigma^2)`.

    Parameters
    ----------
    noise_variance : float or Tensor broadcastable to the observations
        :math:`\sigma^2 > 0` in the units of y squared; a tensor may require a gradient. One value
        per observation expresses known noise or sample weights (:math:`\sigma^2 / weight`).
    bounds : (float, float), optional
        Within which the variance is learned; by default it is kept.

    Raises
    ------
    ValueError
        If a noise variance is not positive and finite.

    Examples
    --------
    >>> import torch
    >>> y, mean, var = torch.tensor([[1.0], [0.0], [3.0]], dtype=torch.float64)
    >>> Gaussian(noise_variance=1.0).log_predictive(y, mean, var)
    tensor([-1.7371], dtype=torch.float64)
    """

    is_gaussian = is_additive = True

    def __init__(
        self, noise_variance: float | Tensor, *, bounds: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        remedy = "For nearly noise-free data use a small positive value such as 1e-6."
        check_positive("noise_variance", noise_variance, remedy)
        self.noise_variance, self.bounds = noise_variance, bounds
        self._within: float | Tensor = 0.0

    def of_means(self, within: Tensor | None) -> "Gaussian":
        """The likelihood of means, whose expectations are those of an observation."""
        if within is None:
            return self
        found = Gaussian(self.noise_variance, bounds=self.bounds)
        found._within = within
        return found

    def free_parameters(self) -> tuple[tuple[float, float, float], ...]:
        """The variance."""
        return (free_parameter(self.noise_variance, self.bounds),)

    def with_parameters(self, parameters: Tensor) -> "Gaussian":
        """The likelihood at the logarithm of the variance."""
        return Gaussian(self.gaussian_noise(parameters))

    def with_least_noise(self, variance: float) -> "Gaussian":
        """The same, a variance that is learned being at least this."""
        if self.bounds is None or self.bounds[0] == self.bounds[1]:
            return self
        low, high = self.bounds
        return Gaussian(self.noise_variance, bounds=(min(max(low, variance), high), high))

    def gaussian_noise(self, parameters: Tensor) -> Tensor:
        """Variance of the noise."""
        return parameters[0].exp()

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        return _log_normal(y - f, self._noise(f))

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        noise = self._noise(mean)
        return _log_normal(y - mean, noise) - 0.5 * (var + self._within) / noise

    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        precision = 1 / self._noise(f)
        first = (y - f) * precision
        return first, -precision.expand_as(first)

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return self._derivatives(y, mean)  # linear in f

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        spread = var + self._noise(mean)
        return _log_normal(y - mean, spread) - 0.5 * self._within / spread

    def _cdf(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.special.ndtr((y - mean) / (var + self._noise(mean)).sqrt())

    def _quantile(self, q: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return mean + (var + self._noise(mean)).sqrt() * torch.special.ndtri(q)

    def _sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f + self._noise(f).sqrt() * torch.empty_like(f).normal_(generator=generator)

    def _mode(self, y: Tensor) -> Tensor:
        return y

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return mean, var + self._noise(mean)

    def _conditional_mean(self, f: Tensor) -> Tensor:
        return f

    def _conditional_var(self, f: Tensor) -> Tensor:
        return self._noise(f)

    def _noise(self, like: Tensor) -> Tensor:
        return constant_like(self.noise_variance, like)


def _log_normal(residual: Tensor, var: Tensor) -> Tensor:
    return -0.5 * (residual**2 / var + var.log() + math.log(2 * math.pi))


class Laplace(NumericLikelihood):
    r"""Additive Laplace noise, :math:`p(y \mid f) = \exp(-|y - f| / b) / 2b`.

    Parameters
    ----------
    scale : float or Tensor broadcastable to the observations
        :math:`b > 0` in the units of y; a tensor may require a gradient. The standard deviation of
        the noise is :math:`\sqrt 2\, b`.
    bounds : (float, float), optional
        Within which the scale is learned; by default it is kept.

    Raises
    ------
    ValueError
        If a scale is not positive and finite.

    Notes
    -----
    The second derivative of the log-density is a delta function at the observation: `derivatives`
    gives 0, its value almost everywhere, and `expected_derivatives` the expectation of the delta.

    Examples
    --------
    >>> import torch
    >>> y, mean, var = torch.tensor([[1.0], [0.0], [3.0]], dtype=torch.float64)
    >>> Laplace(scale=1.0).log_predictive(y, mean, var)
    tensor([-1.7956], dtype=torch.float64)
    """

    is_additive = has_heavy_tails = True
    is_smooth = False

    def __init__(self, scale: float | Tensor, *, bounds: tuple[float, float] | None = None) -> None:
        super().__init__()
        remedy = "For nearly noise-free data use a small positive value such as 1e-3."
        check_positive("scale", scale, remedy)
        self.scale, self.bounds = scale, bounds

    def free_parameters(self) -> tuple[tuple[float, float, float], ...]:
        """The scale."""
        return (free_parameter(self.scale, self.bounds),)

    def with_parameters(self, parameters: Tensor) -> "Laplace":
        """The likelihood at the logarithm of the scale."""
        return Laplace(parameters[0].exp())

    def _cdf(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        r, scale = y - mean, self._scale(mean)
        lower = _log_cdf(-r.abs(), _std(var, scale), scale).exp()
        return torch.where(r > 0, 1 - lower, lower)

    def _quantile(self, q: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = self._scale(mean)
        # The predictive is symmetric about its mean; the lower half keeps tail precision.
        r = _lower_quantile(torch.minimum(q, 1 - q), _std(var, scale), scale)
        return mean + torch.where(q < 0.5, r, -r)

    def _sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        first, second = f.new_empty(2, *f.shape).exponential_(generator=generator)
        return f + self._scale(f) * (first - second)

    def _mode(self, y: Tensor) -> Tensor:
        return y

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        scale = self._scale(f)
        return -(2 * scale).log() - (y - f).abs() / scale

    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.sign(y - f) / self._scale(f)
        return first, torch.zeros_like(first)

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = self._scale(mean)
        return -(2 * scale).log() - expected_absolute_residual(y, mean, var) / scale

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        scale = self._scale(mean)
        std = _std(var, scale)
        z = (y - mean) / std
        density = (-0.5 * z**2).exp() / (std * math.sqrt(2 * math.pi))
        return torch.erf(z / _ROOT_2) / scale, -2 * density / scale

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = self._scale(mean)
        std, r = _std(var, scale), y - mean
        both = torch.logaddexp(_log_tilted(r, std, scale), _log_tilted(-r, std, scale))
        return both - (2 * scale).log()

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return mean, var + 2 * self._scale(mean) ** 2

    def _conditional_mean(self, f: Tensor) -> Tensor:
        return f

    def _conditional_var(self, f: Tensor) -> Tensor:
        return 2 * self._scale(f) ** 2

    def _scale(self, like: Tensor) -> Tensor:
        return constant_like(self.scale, like)


def expected_absolute_residual(y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    r"""Mean of a folded normal variable, :math:`E_{f \sim N(m, v)} |y - f|`.

    Shape (...), of y, mean and var >= 0 that broadcast to it. Its average over the rows is the
    scale of Laplace noise that maximises the expected log-likelihood.
    """
    std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()
    z = (y - mean) / std
    return std * math.sqrt(2 / math.pi) * (-0.5 * z**2).exp() + (y - mean) * torch.erf(z / _ROOT_2)


def _std(var: Tensor, scale: Tensor) -> Tensor:
    return torch.maximum(var, (MIN_STD * scale) ** 2).sqrt()


def _log_tilted(r: Tensor, std: Tensor, scale: Tensor) -> Tensor:
    r""":math:`\log T(r)`, in whichever of two forms adds no large numbers of opposite sign.

    With :math:`x = s / b - r / s`, :math:`\Phi(-x) = \tfrac12 e^{-x^2 / 2}
    \operatorname{erfcx}(x / \sqrt 2)` turns the exponent into :math:`-r^2 / 2v` for x > 0.
    """
    x = std / scale - r / std
    scaled = -0.5 * (r / std) ** 2 + (0.5 * torch.special.erfcx(x.clamp_min(0) / _ROOT_2)).log()
    # The value where x > 0 is not used, but its gradient must be finite.
    ratio = torch.where(x > 0, torch.zeros_like(x), std / scale)
    direct = 0.5 * ratio**2 - r / scale + torch.special.log_ndtr(-x.clamp_max(0))
    return torch.where(x > 0, scaled, direct)


def _log_cdf(r: Tensor, std: Tensor, scale: Tensor) -> Tensor:
    r""":math:`\log F(r)` for :math:`r \le 0`.

    Both :math:`\Phi(r / s)` and T(r) then are :math:`e^{-r^2 / 2v}` times an erfcx, of which the
    first is the larger: their difference loses at most one bit.
    """
    u = -r / (std * _ROOT_2)
    erfcx = torch.special.erfcx
    difference = erfcx(u) - 0.5 * erfcx(u + std / (scale * _ROOT_2))
    log_normal_part = -(u**2) + (0.5 * difference).log()
    return torch.logaddexp(log_normal_part, _log_tilted(-r, std, scale) - math.log(2))


def _lower_quantile(q: Tensor, std: Tensor, scale: Tensor) -> Tensor:
    r"""Quantile r <= 0 of a centred predictive for q <= 1/2.

    The predictive density is log-concave, hence so is its distribution function, and Newton's
    method on :math:`\log F = \log q` from a point below the root converges monotonically.
    """
    # Y < -(a + c) needs f < -a or noise < -c: q / 2 each, so the start lies below the root.
    r = std * torch.special.ndtri(q / 2) + scale * q.log()
    log_q = q.log()
    tolerance = 4 * torch.finfo(q.dtype).eps
    for _ in range(QUANTILE_MAX_NEWTON):
        log_cdf = _log_cdf(r, std, scale)
        log_density = torch.logaddexp(_log_tilted(r, std, scale), _log_tilted(-r, std, scale))
        log_slope = log_density - (2 * scale).log() - log_cdf
        step = (log_q - log_cdf) * (-log_slope).exp()
        r = (r + step).clamp_max(0)
        if bool((step.abs() <= tolerance * (r.abs() + std + scale)).all()):
            break
    return r
