"""A kernel for labels from all of them, where some rows did not show their detail.

The evidence of a dense GP on some rows (:mod:`skgp.learning.classification_hyperparameters`) is
where this begins. From there the leave-one-out likelihood of all labels as numbers, given their
nearest neighbours, moves every length scale, of the kernel found and of another family; what
kriges labels left out best moves on. It is taken where it is better beyond chance: for length
scales that are too short a variational posterior pays more than kriging does.

Begun from length scales of a dense GP of the numbers, the same search ended at worse kernels after
three times as many steps (40000 flights, delayed or not: 0.41 to 0.54 nats a label left out, and
not 0.36).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, merge_replicates
from skgp.kernels.amplitude import amplitude_range, scale_amplitude
from skgp.kernels.expression import WhiteKernel
from skgp.kernels.gram import gram_diag, split_noise
from skgp.learning.local.label_kriging import label_codes, label_losses
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_leave_one_out
from skgp.learning.selection import improves
from skgp.optim.stopping import StopRecorder

__all__ = ["search_label_kernel"]

Callback = Callable[[int, dict], bool | None]

_SHORT = SearchSettings(n_neighbors=20, batch_size=192, n_steps=70, learning_rate=0.3)
_LONG = SearchSettings(n_neighbors=32, batch_size=192, n_steps=130, learning_rate=0.2)
_FEW_ROWS = 2_000  # which the evidence knows well enough
_NOISE, _NOISE_BOUNDS = 0.1, (1e-4, 1e1)  # of standardised labels
_COMPARED_NEIGHBORS = 32  # at most: a comparison takes the cube of it
_N_ERRORS = 2.0  # by which labels must be kriged better


def search_label_kernel(
    found: HyperparameterFit,
    kernels: list,
    data: Data,
    *,
    n_neighbors: int,
    generator: torch.Generator,
    n_points: int | None = None,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Try for a kernel that suits all labels better than the one found from some rows.

    Parameters
    ----------
    found : HyperparameterFit
    kernels : list of sklearn kernel expressions without noise
        Among which it was found.
    data : Data
        Float64, on the CPU; labels -1 and +1, one column a class, or one for two.
    n_neighbors : int
    generator : torch.Generator
    n_points : int, optional
        Rows to krige from, drawn at random, where the model will have so many inducing points;
        length scales that suit all rows are too short for it.
    callback : callable, optional
        Called with (step, {"loss": float}), in nats a label; True ends the search with the best so
        far.

    Returns
    -------
    HyperparameterFit
        `found`, or that of a leave-one-out search.
    """
    starts = _starts(found.kernel, [kernel for kernel in kernels if kernel.n_dims])
    if len(data) <= _FEW_ROWS or not starts:
        return found
    recorder = StopRecorder(callback)
    # Inducing points know of more rows than as many rows would, and of less than all rows do.
    n = len(data)
    n_points = n if n_points is None else math.isqrt(min(n_points, n) * n)
    search = _Search(data, n_points, n_neighbors, generator, recorder)
    best = first = search.judged(found)
    for kernel in starts:
        if not recorder.stopped:
            best = min(best, search.moved(_of_numbers(kernel, data.X), _SHORT), key=_mean)
    if best is not first and not recorder.stopped:
        best = min(best, search.moved(best.start, _LONG), key=_mean)
    return best.fit if improves(best.losses, first.losses, n_errors=_N_ERRORS) else found


@dataclass(frozen=True)
class _Trial:
    """A kernel, as that of a latent function and of labels as numbers, and its losses (p,)."""

    fit: HyperparameterFit
    start: Any
    losses: Tensor


def _mean(trial: _Trial) -> float:
    return float(trial.losses.mean())


class _Search:
    """Moves kernels by all labels, and judges them by labels left out, the same for all."""

    def __init__(self, data: Data, n_points: int, n_neighbors: int, generator, callback) -> None:
        self.generator, self.callback, self.n_points = generator, callback, n_points
        self.numbers = _labels_as_numbers(data, generator)
        data = data.take(torch.randperm(len(data), generator=generator)[:n_points])
        self.labels: dict[str, Any] = {
            "X": data.X,
            "labels": label_codes(data.y),
            "n_classes": max(2, data.y.shape[1]),
            "n_neighbors": min(n_neighbors, _COMPARED_NEIGHBORS),
            "weight": data.weight,
        }

    def judged(self, fit: HyperparameterFit, start: Any = None) -> _Trial:
        losses = label_losses(fit.kernel, **self.labels, generator=self.generator)
        return _Trial(fit, start, losses)

    def moved(self, start: Any, settings: SearchSettings) -> _Trial:
        """From a kernel of labels as numbers."""
        found = fit_leave_one_out(
            start,
            self.numbers,
            generator=self.generator,
            settings=replace(settings, max_candidates=min(settings.max_candidates, self.n_points)),
            callback=self.callback,
        )
        return self.judged(replace(found, kernel=_of_latent(found.kernel)), found.kernel)


def _starts(kernel, kernels: list) -> list:
    """The kernel, and another family with its hyper-parameters where it has the same."""
    own = [kernel] if kernel.n_dims else []
    others = (_moved(each, kernel) for each in reversed(kernels[:1] + kernels[1:][-1:]))
    return own + [each for each in others if each != kernel][:1]


def _moved(kernel, to):
    """The kernel at the hyper-parameters of another, if they are of the same names."""
    if _free(kernel) != _free(to):
        return kernel
    return kernel.clone_with_theta(np.clip(to.theta, *kernel.bounds.T))


def _free(kernel) -> list[tuple[str, int]]:
    return [(each.name, each.n_elements) for each in kernel.hyperparameters if not each.fixed]


def _of_numbers(kernel, X: Tensor):
    """A kernel of a latent function, scaled to that of standardised labels, with noise."""
    variance = float(gram_diag(kernel, X).mean())
    return _scaled(kernel, 1 / variance) + WhiteKernel(_NOISE, _NOISE_BOUNDS)


def _of_latent(kernel):
    """The way back: the noise of a probit link has variance 1."""
    signal, white = split_noise(kernel)
    return _scaled(signal, 1 / float(cast(WhiteKernel, white).noise_level))


def _scaled(kernel, factor: float) -> Any:
    """The kernel times a factor, as far as its bounds allow."""
    low, high = amplitude_range(kernel)
    return scale_amplitude(kernel, min(max(factor, low), high))


def _labels_as_numbers(data: Data, generator: torch.Generator) -> Data:
    """Labels, of several columns a random combination, as standardised targets."""
    y = data.y[:, 0]
    if data.y.shape[1] > 1:
        y = data.y @ torch.randn(data.y.shape[1], generator=generator, dtype=torch.float64)
    y = (y - y.mean()) / y.std().clamp_min(1e-12)
    weight = None if data.weight is None else data.weight.numpy()
    return merge_replicates(data.X.numpy(), y.numpy(), weight, torch.device("cpu"))
