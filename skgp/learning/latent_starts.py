"""Where the search for a latent function's kernel starts beside the kernel given.

Labels and counts resemble the latent function f where they are many: numbers in their place
(`Likelihood.gaussian_targets`) have a log marginal likelihood in closed form, and what was learned
about kernels of numbers holds for f. From them come

length scales
    the likeliest of other lengths (:mod:`skgp.learning.starts`);
their structure
    one for all columns, one for the relevant ones and one for the others, each its own, as
    leave-one-out predictions choose (:mod:`skgp.learning.kernel_choice`). The posterior mode hides
    it where one length scale for all explains nothing: there the evidence is flat.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from skgp.data import Data
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.hyperparameters import bounds_of, sizes_of, theta_of, with_theta
from skgp.kernels.scales import length_scale_places, with_variance
from skgp.learning.defaults import LATENT_START_ROWS, NOISE_GRID
from skgp.learning.kernel_choice import choose_kernel
from skgp.learning.kernel_family import ChoiceSettings, ratio_penalty
from skgp.learning.starts import likeliest_start
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import Callback


def _with_noise(kernel):
    """The kernel of standardised numbers."""
    return kernel + WhiteKernel(NOISE_GRID[-1], (NOISE_GRID[0], 1.0))


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
    data = data.take(slice(None, None, -(-len(data) // LATENT_START_ROWS)))
    data = data.to("cpu", torch.float64)
    offset = None if data.offset is None else data.offset.mT
    f = likelihood.at(offset).gaussian_targets(data.y.reshape(len(data), -1).mT)  # (c, n)
    f = torch.arange(1.0, len(f) + 1, dtype=f.dtype) @ f
    f = f - data.weighted_sum(f) / data.total
    scale = float((data.weighted_sum(f.square()) / data.total).sqrt()) or 1.0
    numbers = replace(data, y=f / scale)
    if data.weight is not None:  # as rows given so often
        scatter = torch.zeros_like(data.weight) if data.scatter is None else data.scatter
        numbers = replace(numbers, scatter=scatter / scale**2)
    return numbers


def latent_structure(
    kernel,
    data: Data,
    likelihood,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
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
