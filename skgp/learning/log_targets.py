r"""Whether noise is rather added to log y than to y.

A Gaussian process of either scale predicts some observations, each from all others (Rasmussen and
Williams, 2006, section 5.4.2). The density of y of a process of log y is that of log y divided by
y; what it predicts is :math:`e^{m + \sigma^2 / 2}` (:mod:`skgp.estimators._log_scale`). Log y is
the more complex scale: it needs clearly better densities, and squared errors of predictions of y
that are not clearly greater.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from skgp.data import Data
from skgp.kernels.expression import split_noise
from skgp.learning import defaults
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.selection import improves
from skgp.linalg import NotPositiveDefiniteError


def logs_predict_better(kernel: Any, data: Data) -> bool:
    """Of some hundred observations, none merged, with positive y (n,); the kernel has noise.

    ``O(n^3)`` some 30 times.
    """
    if data.y.max() == data.y.min():  # as some of many may be
        return False
    try:
        (plain, error), (logs, error_of_logs) = (left_out(kernel, data, f) for f in (False, True))
    except NotPositiveDefiniteError:
        return False
    unit = error.mean() or 1.0
    options: dict[str, Any] = {"weight": data.weight, "n_errors": defaults.LOG_ERRORS}
    worse = improves(error / unit, error_of_logs / unit, **options)
    return not worse and improves(logs, plain, **options)


def left_out(kernel: Any, data: Data, of_log: bool) -> tuple[np.ndarray, np.ndarray]:
    """Minus log densities of y (n,) over its greatest size, in nats, and squared errors.

    As of observations of weight 1: what others count for is for those who average.
    """
    y = data.y.numpy() / float(data.y.abs().max())  # whose squares are numbers
    u = np.log(y) if of_log else y
    mean = np.average(u, weights=data.weight)
    scale = np.average((u - mean) ** 2, weights=data.weight) ** 0.5
    z = (u - mean) / scale
    scaled = replace(data, y=torch.from_numpy(z))
    found, _ = maximise_evidence(kernel, scaled, max_iter=defaults.LOG_ITER)
    at = found.family.at(found.theta)[2]
    white: Any = split_noise(found.kernel)[1]
    predicted, var, noise = mean + scale * (z - at.residual), at.variance, white.noise_level
    if data.weight is not None:
        var = np.maximum(var - noise / data.weight.numpy(), 0.0) + noise
    var, noise = scale**2 * var, scale**2 * noise
    loss = 0.5 * (np.log(2 * np.pi * var) + (u - predicted) ** 2 / var)
    if not of_log:
        return loss, (y - predicted) ** 2
    return loss + np.log(y), (y - np.exp(predicted + 0.5 * noise)) ** 2
