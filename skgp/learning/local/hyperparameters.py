r"""Hyper-parameters of a sparse-within-sparse GP, found before q(u).

Those of Gaussian noise maximise the leave-one-out likelihood given nearest neighbours
(:mod:`skgp.learning.search`), on all rows and not on M of them. Observations of other kinds
are first put on a scale where Gaussian noise is about right:

=================  ========================================================================
additive noise     the targets that are no gross outliers
                   (:mod:`skgp.learning.hyperparameters`)
counts, others     `Likelihood.gaussian_targets` less their mean: of counts
                   :math:`g^{-1}(y + \tfrac12)`, with the inverse of the link g of the rate; the
                   noise found stands for the Poisson variance
=================  ========================================================================

Labels have a search of their own (:mod:`skgp.learning.local.labels`). q(u) is cheap given these.
Without Gaussian noise the amplitude is chosen once more, by rows held out
(:mod:`skgp.learning.local.prior`), and Student-t noise learned along with q(u)
(:mod:`skgp.models.swsgp`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from skgp.data import Data
from skgp.learning.hyperparameters import robust_hyperparameters
from skgp.learning.local.defaults import FAMILY_STRIDE, SEARCH
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.likelihoods import Likelihood

Callback = Callable[[int, dict], bool | None]


def search_hyperparameters(
    kernels: list,
    data: Data,
    likelihood: Likelihood,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or of the best of several, with WhiteKernels."""
    settings = SearchSettings(**SEARCH)
    if len(data) > settings.exact_rows:
        kernels = kernels[::FAMILY_STRIDE]
    if likelihood.is_additive and not likelihood.is_gaussian:
        return robust_hyperparameters(
            kernels, data, generator=generator, settings=settings, callback=callback
        )[0]
    if not likelihood.is_additive:
        offset = None if data.offset is None else data.offset[:, 0]
        f = likelihood.at(offset).gaussian_targets(data.y)
        data = replace(data, y=f - data.weighted_sum(f) / data.total)
    return fit_hyperparameters(
        kernels, data, generator=generator, settings=settings, callback=callback
    )
