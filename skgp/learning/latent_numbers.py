r"""Hyper-parameters of f from numbers that stand for it, with noise of their own variances.

Large counts and other observations of f through a link are nearly Gaussian ones: of
:math:`g^{-1}(y)`, with the inverse of the link g, and the Fisher information I of one observation
as precision (`Likelihood.gaussian_observations`); for a log link :math:`\log y` and y. The noise
of number i is :math:`\sigma^2 \bar I / I_i`, its scale :math:`\sigma^2` learned: more than Poisson
where counts are overdispersed. Small counts are not Gaussian, and the precisions of their own
values would be largest of those that are large by chance: I is taken at

.. math:: \mu + \frac{w}{w + c / s^2} (g^{-1}(y) - \mu),

w the precision at the number itself, :math:`\mu, s^2` mean and variance of all, weighted by w,
and c = 16.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.scales import with_variance
from skgp.learning.defaults import NUMBERS_NOISE, NUMBERS_NOISE_BOUNDS, NUMBERS_SHRUNK
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback


def search_by_numbers(
    kernels: list,
    data: Data,
    likelihood: Likelihood,
    *,
    generator: torch.Generator,
    settings: SearchSettings,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn a kernel of f, or the best of several, with a WhiteKernel: the noise of a mean number.

    The noise that the kernels have, if any, is replaced; y is (n,).
    """
    numbers = latent_numbers(data, likelihood)
    variance = float(numbers.weighted_sum(numbers.y.square()) / numbers.total) or 1.0
    return fit_hyperparameters(
        [_of_variance(kernel, numbers.X, variance) for kernel in kernels],
        numbers,
        generator=generator,
        settings=settings,
        callback=callback,
    )


def latent_numbers(data: Data, likelihood: Likelihood) -> Data:
    """Numbers of weighted mean 0 that stand for f, weighted by their precisions; y (n,).

    A weight is that of the observation times its precision over the mean of these.
    """
    made = likelihood.at(None if data.offset is None else data.offset[:, 0])
    f, precision = made.gaussian_observations(data.y)
    share = precision / _mean(precision, data)
    mean = _mean(share * f, data)
    spread = _mean(share * (f - mean).square(), data)
    shrunk = mean + (f - mean) * precision / (precision + NUMBERS_SHRUNK / spread)
    information = made.fisher_information(torch.where(spread > 0, shrunk, f))
    weight = information / _mean(information, data)
    weight = weight if data.weight is None else weight * data.weight
    data = replace(data, weight=weight, offset=None)
    return replace(data, y=f - _mean(f, data))


def _mean(values: Tensor, data: Data) -> Tensor:
    return data.weighted_sum(values) / data.total


def _of_variance(kernel, X: Tensor, variance: float) -> Any:
    """The kernel with this variance, as far as its bounds allow, and noise of a share of it."""
    low, high = NUMBERS_NOISE_BOUNDS
    white = WhiteKernel(NUMBERS_NOISE * variance, (low * variance, high * variance))
    return with_variance(split_noise(kernel)[0], X, variance) + white
