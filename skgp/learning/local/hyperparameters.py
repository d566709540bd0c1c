r"""Hyper-parameters of a sparse-within-sparse GP, found before q(u).

Those of Gaussian noise maximise the leave-one-out likelihood given nearest neighbours
(:mod:`skgp.learning.search`), on all rows and not on M of them. Observations of other kinds
are first put on a scale where Gaussian noise is about right:

=================  ========================================================================
Student-t noise    the targets that are no gross outliers
                   (:mod:`skgp.learning.robust`)
counts             :math:`g^{-1}(y + \tfrac12)` less its mean, with the inverse of the link g
                   of the rate; the noise found stands for the Poisson variance
=================  ========================================================================

Labels have a search of their own (:mod:`skgp.learning.local.labels`). q(u) is cheap given these.
Without Gaussian noise the amplitude is chosen once more, by rows held out
(:mod:`skgp.learning.local.prior`), and Student-t noise learned along with q(u)
(:mod:`skgp.models.swsgp`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.learning.local.defaults import FAMILY_STRIDE, SEARCH
from skgp.learning.robust import robust_hyperparameters
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters

Callback = Callable[[int, dict], bool | None]


def search_hyperparameters(
    kernels: list,
    data: Data,
    likelihood: str,
    *,
    link: str = "exp",
    generator: torch.Generator,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or choose among several, each with a WhiteKernel.

    likelihood is "gaussian", "student_t" or "poisson"; link, of counts, "exp" or "softplus".
    """
    settings = SearchSettings(**SEARCH)
    if len(data) > settings.exact_rows:
        kernels = kernels[::FAMILY_STRIDE]
    if likelihood == "student_t":
        return robust_hyperparameters(
            kernels, data, generator=generator, settings=settings, callback=callback
        )[0]
    if likelihood == "poisson":
        data = replace(data, y=gaussian_counts(data.y, data.weight, link, data.offset))
    return fit_hyperparameters(
        kernels, data, generator=generator, settings=settings, callback=callback
    )


def gaussian_counts(
    y: Tensor, weight: Tensor | None, link: str, offset: Tensor | None = None
) -> Tensor:
    """Counts y (n,) of log-exposures (n, 1) on the scale of the latent function, centred."""
    rate = y + 0.5 if offset is None else (y + 0.5) * (-offset[:, 0]).exp()
    f = rate.log() if link == "exp" else rate.expm1().log()
    # For large rates softplus is the identity, and expm1 infinite.
    f = torch.where(f.isfinite(), f, rate)
    weight = torch.ones_like(f) if weight is None else weight
    return f - (weight @ f) / weight.sum()
