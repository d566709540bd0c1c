r"""Hyper-parameters of a sparse-within-sparse GP, found before q(u).

Those of Gaussian noise maximise the leave-one-out likelihood given nearest neighbours
(:mod:`skgp.models.hyperparameters`), on all rows and not on M of them. Observations of other kinds
are first put on a scale where Gaussian noise is about right:

=================  ========================================================================
Student-t noise    the targets that are no gross outliers
                   (:mod:`skgp.models.qsgp.robust.robust_hyperparameters`)
counts             :math:`g^{-1}(y + \tfrac12)` less its mean, with the inverse of the link g
                   of the rate; the noise found stands for the Poisson variance
=================  ========================================================================

Labels have two searches: the evidence of a dense GP on some rows
(:mod:`skgp.models.classification_hyperparameters`), and the leave-one-out likelihood of all labels
as numbers, which sees detail that some rows cannot show. The kernel that kriges labels left out
best is taken.

q(u) is cheap given these. Without Gaussian noise the amplitude is chosen once more, by rows held
out (:mod:`skgp.models.swsgp.prior_scale`), and Student-t noise learned along with q(u)
(:mod:`skgp.models.swsgp.fit`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.kernels.amplitude import amplitude_range, scale_amplitude
from skgp.kernels.expression import WhiteKernel
from skgp.kernels.gram import gram_diag, split_noise
from skgp.models.dlm.data import SparseData
from skgp.models.hyperparameters import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.models.qsgp.robust.robust_hyperparameters import robust_hyperparameters
from skgp.models.replicates import Replicates, merge_replicates
from skgp.models.swsgp.label_kriging import label_loss

__all__ = ["gaussian_counts", "search_hyperparameters", "search_label_kernel"]

Callback = Callable[[int, dict], bool | None]

_SETTINGS = SearchSettings(subset_size=700, n_neighbors=32, n_score_rows=1024)
_LABEL_SETTINGS = replace(_SETTINGS, n_steps=300, learning_rate=0.1)
_LABEL_ROWS = 2_000  # above which labels are searched as numbers too
_NOISE, _NOISE_BOUNDS = 0.1, (1e-4, 1e1)  # of standardised labels


def search_hyperparameters(
    kernels: list,
    data: Replicates,
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
    data : Replicates
        Float64.
    likelihood : {"gaussian", "student_t", "poisson"}
    link : {"exp", "softplus"}
        Of counts.
    generator : torch.Generator
    callback : callable, optional
        See :func:`~skgp.models.hyperparameters.fit_hyperparameters`.

    Returns
    -------
    HyperparameterFit
    """
    if likelihood == "student_t":
        return robust_hyperparameters(
            kernels, data, generator=generator, settings=_SETTINGS, callback=callback
        )[0]
    if likelihood == "poisson":
        data = replace(data, y=gaussian_counts(data.y, data.weight, link))
    return fit_hyperparameters(
        kernels, data, generator=generator, settings=_SETTINGS, callback=callback
    )


def search_label_kernel(
    found: HyperparameterFit,
    kernels: list,
    data: SparseData,
    *,
    n_neighbors: int,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Try for a kernel that suits all labels better than the one found from some rows.

    Parameters
    ----------
    found : HyperparameterFit
    kernels : list of sklearn kernel expressions without noise
        To choose among; the first and the last are tried.
    data : SparseData
        Float64, on the CPU; labels -1 and +1, one column a class, or one for two.
    n_neighbors : int
    generator : torch.Generator
    callback : callable, optional

    Returns
    -------
    HyperparameterFit
        `found`, or that of the leave-one-out search.
    """
    free = [kernel for kernel in kernels if kernel.n_dims]
    if len(data) <= _LABEL_ROWS or not free:
        return found
    starts = [_of_numbers(kernel, data.X) for kernel in (free[0], free[-1])[: len(free)]]
    other = fit_hyperparameters(
        starts,
        _labels_as_numbers(data, generator),
        generator=generator,
        settings=_LABEL_SETTINGS,
        callback=callback,
    )
    signal, white = split_noise(other.kernel)
    noise = _NOISE if white is None else float(white.noise_level)
    # The noise of a probit link has variance 1.
    low, high = amplitude_range(signal)
    amplitude = min(max(1 / noise, low), high)
    other = replace(other, kernel=scale_amplitude(signal, amplitude), score=math.nan)
    codes = (data.y[:, 0] > 0).long() if data.y.shape[1] == 1 else data.y.argmax(1)

    def loss(fit: HyperparameterFit) -> float:
        return label_loss(
            fit.kernel,
            data.X,
            codes,
            n_classes=max(2, data.y.shape[1]),
            n_neighbors=n_neighbors,
            weight=data.weight,
            generator=generator,
        )

    return min(found, other, key=loss)


def _of_numbers(kernel, X: Tensor):
    """A kernel of a latent function, scaled to that of standardised labels, with noise."""
    low, high = amplitude_range(kernel)
    scale = min(max(1 / float(gram_diag(kernel, X).mean()), low), high)
    return scale_amplitude(kernel, scale) + WhiteKernel(_NOISE, _NOISE_BOUNDS)


def _labels_as_numbers(data: SparseData, generator: torch.Generator) -> Replicates:
    """Labels, of several columns a random combination, as standardised targets."""
    y = data.y[:, 0]
    if data.y.shape[1] > 1:
        y = data.y @ torch.randn(data.y.shape[1], generator=generator, dtype=torch.float64)
    y = (y - y.mean()) / y.std().clamp_min(1e-12)
    weight = None if data.weight is None else data.weight.numpy()
    return merge_replicates(data.X.numpy(), y.numpy(), weight, torch.device("cpu"))


def gaussian_counts(y: Tensor, weight: Tensor | None, link: str) -> Tensor:
    """Counts (n,) on the scale of the latent function, centred.

    Parameters
    ----------
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,) or None
    link : {"exp", "softplus"}

    Returns
    -------
    Tensor of shape (n,)
    """
    f = (y + 0.5).log() if link == "exp" else (y + 0.5).expm1().log()
    # For large counts softplus is the identity, and expm1 infinite.
    f = torch.where(f.isfinite(), f, y + 0.5)
    weight = torch.ones_like(f) if weight is None else weight
    return f - (weight @ f) / weight.sum()
