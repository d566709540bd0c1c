"""Gaussian observation noise; every computation in closed form."""

import math

import torch
from torch import Tensor

from skgp.likelihoods.base import NumericLikelihood, check_positive, free_parameter

__all__ = ["Gaussian"]


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

    Notes
    -----
    The closed forms, for :math:`f \sim N(m, v)`:

    .. math::

        E[\log p(y \mid f)] &= \log N(y \mid m, \sigma^2) - \frac{v}{2 \sigma^2} \\
        \log E[p(y \mid f)] &= \log N(y \mid m, v + \sigma^2)

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

    def free_parameters(self) -> tuple[tuple[float, float, float], ...]:
        return (free_parameter(self.noise_variance, self.bounds),)

    def with_parameters(self, parameters: Tensor) -> "Gaussian":
        return Gaussian(self.gaussian_noise(parameters))

    def gaussian_noise(self, parameters: Tensor) -> Tensor:
        return parameters[0].exp()

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        return _log_normal(y - f, self._noise(f))

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        noise = self._noise(mean)
        return _log_normal(y - mean, noise) - 0.5 * var / noise

    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        precision = 1 / self._noise(f)
        first = (y - f) * precision
        return first, -precision.expand_as(first)

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return self._derivatives(y, mean)  # linear in f

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return _log_normal(y - mean, var + self._noise(mean))

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
        return torch.as_tensor(self.noise_variance, dtype=like.dtype, device=like.device)


def _log_normal(residual: Tensor, var: Tensor) -> Tensor:
    return -0.5 * (residual**2 / var + var.log() + math.log(2 * math.pi))
