r"""Where the search for a latent function's kernel starts beside the kernel given.

Labels and counts resemble the latent function f where they are many: numbers in their place
(`Likelihood.gaussian_targets`) have a log marginal likelihood in closed form, and what was learned
about kernels of numbers holds for f. From them come

length scales
    the likeliest of other lengths (:mod:`skgp.learning.starts`);
their structure
    one for all columns, one for the relevant ones and one for the others, each its own, as
    leave-one-out predictions choose (:mod:`skgp.learning.kernel_choice`). The posterior mode hides
    it where one length scale for all explains nothing: there the evidence is flat.

Large counts and other observations of f through a link g are nearly Gaussian ones, of
:math:`g^{-1}(y)` with the Fisher information I of one observation as precision
(`Likelihood.gaussian_observations`), for a log link :math:`\log y` and y; `search_by_numbers` has
a kernel learned from them. The noise of number i is :math:`\sigma^2 \bar I / I_i`, its scale
:math:`\sigma^2` learned: more than Poisson where counts are overdispersed. Small counts are not
Gaussian, and the precisions of their own values would be largest of those that are large by chance:
I is taken at

.. math:: \mu + \frac{w}{w + c / s^2} (g^{-1}(y) - \mu),

w the precision at the number itself, :math:`\mu, s^2` mean and variance of all, weighted by w,
and c = 16.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.hyperparameters import bounds_of, sizes_of, theta_of, with_theta
from skgp.kernels.scales import length_scale_places, with_variance
from skgp.learning import defaults
from skgp.learning.kernel_choice import choose_kernel
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.learning.starts import ChoiceSettings, likeliest_start, ratio_penalty
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import Callback


def _with_noise(kernel):
    """The kernel of standardised numbers."""
    return kernel + WhiteKernel(defaults.NOISE_GRID[-1], (defaults.NOISE_GRID[0], 1.0))


def latent_start(kernel, data: Data, likelihood):
    """The likeliest start of a latent function, for a kernel without noise; None without starts.

    By numbers that resemble f (:func:`_standardised`). The amplitude is 1.
    """
    found = likeliest_start(_with_noise(kernel), _standardised(data, likelihood))
    return None if found is None else split_noise(found[0])[0]


def _standardised(data: Data, likelihood) -> Data:
    """Standardised numbers that resemble f (`Likelihood.gaussian_targets`), at some observations.

    Of several latent functions, columns of y, a sum of them.
    """
    data = data.take(slice(None, None, -(-len(data) // defaults.LATENT_START_ROWS)))
    data = data.to("cpu", torch.float64)
    offset = None if data.offset is None else data.offset.mT
    f = likelihood.at(offset).gaussian_targets(data.y.reshape(len(data), -1).mT)  # (c, n)
    f = torch.arange(1.0, len(f) + 1, dtype=f.dtype) @ f
    f = f - data.weighted_mean(f)
    scale = float(data.weighted_mean(f.square()).sqrt()) or 1.0
    numbers = replace(data, y=f / scale)
    if data.weight is not None:  # as rows given so often
        scatter = torch.zeros_like(data.weight) if data.scatter is None else data.scatter
        numbers = replace(numbers, scatter=scatter / scale**2)
    return numbers


def latent_structure(
    kernel, data: Data, likelihood, *, generator: torch.Generator, callback: Callback | None = None
) -> tuple[Any, float] | None:
    """The kernel, its separate length scales as those of numbers that resemble f.

    And minus the log prior of these, in nats, by which the evidence of f has to be greater. None
    where one length scale for all columns predicts the numbers as well, or there are no others. The
    amplitude stays.
    """
    if max(sizes_of(kernel), default=0) < 2 or len(data) < 2:
        return None
    theta, numbers = theta_of(kernel), _standardised(data, likelihood)
    unit = _with_noise(with_variance(kernel, numbers.X))
    try:
        found, _ = choose_kernel([unit], numbers, generator=generator, callback=callback)
    except NotPositiveDefiniteError:
        return None
    places = length_scale_places(kernel)
    moved = theta_of(split_noise(found)[0])[places] - theta[places]
    if np.ptp(moved) < 1e-6:
        return None
    theta[places] += moved
    kernel = with_theta(kernel, theta.clip(*bounds_of(kernel).T))
    return kernel, ratio_penalty(moved, ChoiceSettings())[0]


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
    variance = float(numbers.weighted_mean(numbers.y.square())) or 1.0
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
    made = likelihood.at(data.log_exposure)
    f, precision = made.gaussian_observations(data.y)
    share = precision / data.weighted_mean(precision)
    mean = data.weighted_mean(share * f)
    spread = data.weighted_mean(share * (f - mean).square())
    shrunk = mean + (f - mean) * precision / (precision + defaults.NUMBERS_SHRUNK / spread)
    information = made.fisher_information(torch.where(spread > 0, shrunk, f))
    weight = information / data.weighted_mean(information)
    weight = weight if data.weight is None else weight * data.weight
    data = replace(data, weight=weight, offset=None)
    return replace(data, y=f - data.weighted_mean(f))


def _of_variance(kernel, X: Tensor, variance: float) -> Any:
    """The kernel with this variance, as far as its bounds allow, and noise of a share of it."""
    low, high = defaults.NUMBERS_NOISE_BOUNDS
    white = WhiteKernel(defaults.NUMBERS_NOISE * variance, (low * variance, high * variance))
    return with_variance(split_noise(kernel)[0], X, variance) + white
