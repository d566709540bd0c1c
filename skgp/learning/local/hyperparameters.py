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

Labels have a search of their own (:mod:`skgp.learning.local.label_search`).

q(u) is cheap given these. Without Gaussian noise the amplitude is chosen once more, by rows held
out (:mod:`skgp.learning.local.prior_scale`), and Student-t noise learned along with q(u)
(:mod:`skgp.models.swsgp.fit`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.learning.robust import robust_hyperparameters
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters

__all__ = ["gaussian_counts", "search_hyperparameters"]

Callback = Callable[[int, dict], bool | None]

_SETTINGS = SearchSettings(subset_size=700, n_neighbors=32, n_score_rows=1024)
_STRIDE = 2  # of the families that are searched by neighbours: neighbours hide what lies between


def search_hyperparameters(
    kernels: list,
    data: Data,
    likelihood: str,
    *,
    link: str = "exp",
    generator: torch.Generator,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or choose among several.

    Parameters
    ----------
    kernels : list of sklearn kernel expressions
        Each with a top-level ``WhiteKernel``.
    data : Data
        Float64.
    likelihood : {"gaussian", "student_t", "poisson"}
    link : {"exp", "softplus"}
        Of counts.
    generator : torch.Generator
    callback : callable, optional
        See :func:`~skgp.learning.search.fit_hyperparameters`.

    Returns
    -------
    HyperparameterFit
    """
    if len(data.y) > _SETTINGS.exact_rows:
        kernels = kernels[::_STRIDE]
    if likelihood == "student_t":
        return robust_hyperparameters(
            kernels, data, generator=generator, settings=_SETTINGS, callback=callback
        )[0]
    if likelihood == "poisson":
        data = replace(data, y=gaussian_counts(data.y, data.weight, link, data.offset))
    return fit_hyperparameters(
        kernels, data, generator=generator, settings=_SETTINGS, callback=callback
    )


def gaussian_counts(
    y: Tensor, weight: Tensor | None, link: str, offset: Tensor | None = None
) -> Tensor:
    """Counts (n,) on the scale of the latent function, centred.

    Parameters
    ----------
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,) or None
    link : {"exp", "softplus"}
    offset : Tensor of shape (n, 1), optional
        Log-exposures.

    Returns
    -------
    Tensor of shape (n,)
    """
    rate = y + 0.5 if offset is None else (y + 0.5) * (-offset[:, 0]).exp()
    f = rate.log() if link == "exp" else rate.expm1().log()
    # For large rates softplus is the identity, and expm1 infinite.
    f = torch.where(f.isfinite(), f, rate)
    weight = torch.ones_like(f) if weight is None else weight
    return f - (weight @ f) / weight.sum()
