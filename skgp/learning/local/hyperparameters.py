r"""Hyper-parameters of a sparse-within-sparse GP, found before q(u).

Those of Gaussian noise maximise the leave-one-out likelihood given nearest neighbours
(:mod:`skgp.learning.search`), on all rows and not on M of them. Observations of other kinds
are first put on a scale where Gaussian noise is about right:

=================  ========================================================================
additive noise     the targets that are no gross outliers
                   (:mod:`skgp.learning.hyperparameters`)
counts, others     numbers that stand for f, of known precisions up to a factor
                   (:mod:`skgp.learning.label_scales`)
=================  ========================================================================

Small counts and those of unlike exposures resemble no such numbers: the greatest evidence of some
of them (:func:`skgp.learning.sparse.evidence.search_by_evidence`) is a rival, and alone where all
are each other's neighbours. q(u) is cheap given these.
Without Gaussian noise the amplitude is chosen once more, by rows held out
(:mod:`skgp.learning.local.prior`), and Student-t noise learned along with q(u)
(:mod:`skgp.models.swsgp`).

*Label kriging*, by which kernels are compared: labels as numbers. Few numbers are learned beside
the kernel, and confidence is earned on labels that were not seen: t, a, b and d of the link
(:mod:`skgp.inference.neighbors.posterior`) maximise the likelihood of labels left out one by one.
Copies of a row predict each other, which lets the link trust neighbours too much.

*A kernel for labels from all of them, where some rows did not show their detail.* The evidence of a
dense GP on some rows (:mod:`skgp.learning.classification_hyperparameters`) is where this begins.
From there the leave-one-out likelihood of all labels as numbers, given their nearest neighbours,
moves every length scale, of the kernel found and of another family; what kriges labels left out
best moves on. It is taken where it is better beyond chance: for length scales that are too short a
variational posterior pays more than kriging does. Begun from length scales of a dense GP of the
numbers, the same search ended at worse kernels after three times as many steps (40000 flights,
delayed or not: 0.41 to 0.54 nats a label left out, and not 0.36).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, random_rows
from skgp.inference.neighbors.posterior import KrigingModel, LabelLink, is_shared, merge_rows
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.gram import gram_diag
from skgp.kernels.scales import scale_within, with_variance
from skgp.learning.defaults import LABEL_NOISE_BOUNDS
from skgp.learning.hyperparameters import robust_hyperparameters
from skgp.learning.label_scales import search_by_numbers
from skgp.learning.local import defaults
from skgp.learning.search import (
    HyperparameterFit,
    SearchSettings,
    fit_hyperparameters,
    fit_leave_one_out,
)
from skgp.learning.selection import choose, improves, while_falling
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback, standard_normal
from skgp.optim.bfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder


def search_hyperparameters(
    kernels: list,
    data: Data,
    likelihood: Likelihood,
    *,
    generator: torch.Generator,
    jitter: float = 0.0,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or of the best of several, with WhiteKernels.

    `jitter` is that of the model that they are for: under LOCAL_JITTER a smooth function without
    noise has a far smaller amplitude than without, whose f given u errs by 1e-2 of it.
    """
    settings = SearchSettings(**defaults.SEARCH, jitter=jitter)
    if len(data) > settings.exact_rows:
        kernels = kernels[:: defaults.FAMILY_STRIDE]
    if likelihood.is_additive and not likelihood.is_gaussian:
        return robust_hyperparameters(
            kernels, data, generator=generator, settings=settings, callback=callback
        )[0]
    search: Any = fit_hyperparameters
    if not likelihood.is_additive:
        search = partial(search_by_numbers, likelihood=likelihood)
    found = search(kernels, data, generator=generator, settings=settings, callback=callback)
    if likelihood.is_gaussian and len(data) > settings.exact_rows:
        found = replace(found, kernel=_beside_jitter(found.kernel, data, jitter))
    return found


def _beside_jitter(kernel, data: Data, jitter: float):
    """The kernel with noise that is not nothing beside what `jitter` leaves open of f given u."""
    signal, white = split_noise(kernel)
    if white is None or white.hyperparameter_noise_level.fixed:
        return kernel
    least = defaults.JITTER_NOISE * jitter * float(gram_diag(signal, data.X).mean())
    least = min(least, white.noise_level_bounds[1])
    if white.noise_level >= least:
        return kernel
    return signal + WhiteKernel(least, white.noise_level_bounds)


def label_targets(labels: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """Labels 0 ... C - 1 as columns of -1 and +1: one column for two classes, else one a class."""
    if n_classes == 2:
        return 2 * labels[:, None].to(dtype) - 1
    return 2 * torch.nn.functional.one_hot(labels, n_classes).to(dtype) - 1


def label_losses(kernel, data: Data, n_neighbors: int, *, generator: torch.Generator) -> Tensor:
    """How well a kernel kriges labels that are left out, (p,) in nats; less is better.

    With the noise, of a grid, under which they are likeliest. The same some 2000 labels or fewer
    for all kernels, each times its weight over their mean.
    """
    model = _labelled(kernel, data, n_neighbors)
    left_out = _draw(model, generator, defaults.NOISE_ROWS)
    place = defaults.NOISE_RATIOS.index(defaults.NOISE_START)
    variance = float(gram_diag(model.kernel, model.X).mean())

    def losses(ratio: float, _: Any = None) -> tuple[float, Tensor]:
        return ratio, fit_link(replace(model, noise=variance * ratio), left_out)[1]

    # From the middle of the grid downhill, to less noise and to more; more noise is simpler.
    fits = [losses(defaults.NOISE_START)]
    for ratios in (defaults.NOISE_RATIOS[:place][::-1], defaults.NOISE_RATIOS[place + 1 :]):
        fits += while_falling(fits[0], ratios, losses, lambda fit: float(fit[1].mean()))[1:]
    found = [each for _, each in sorted(fits, key=lambda fit: fit[0], reverse=True)]
    return found[choose(found)]


def _labelled(kernel, data: Data, n_neighbors: int) -> KrigingModel:
    """Labels, columns (n, c) of -1 and +1, as numbers, of any noise."""
    X, targets, weight = merge_rows(data.X, data.y, data.weight)
    each = X.new_ones(len(X)) if weight is None else weight
    offset = (each[:, None] * targets).sum(0) / each.sum()
    return KrigingModel(kernel, 1.0, X, targets, weight, offset, n_neighbors)


@dataclass(frozen=True)
class _LeftOut:
    """Labels to leave out one by one."""

    row: Tensor  # (p,)
    label: Tensor  # (p,)
    weight: Tensor  # (p,); of all equal labels at the row
    unit: Tensor  # (p,); of one of them
    others: tuple[Tensor, Tensor] | None  # neighbours, influence; None where there is but one row
    frequency: Tensor  # (C,); of the classes
    lapse: float  # see `LabelLink`


def _draw(model: KrigingModel, generator: torch.Generator, n_rows: int) -> _LeftOut:
    """Labels to leave out: all of them, or `n_rows` at random; the same for equal seeds.

    At a time goes what a single label weighs: 1, or what those of its class weigh at least. Where
    classes have weights none stays that is sure of itself, and of copies of a row all but one do.
    """
    row, label, weight = _each_label(model)
    frequency = weight.new_zeros(max(model.targets.shape[1], 2)).index_add_(0, label, weight)
    frequency = (frequency + 1) / (frequency + 1).sum()
    lapse = 1 / (float(weight.sum()) + 2)
    least = torch.full_like(frequency, math.inf).scatter_reduce(0, label, weight, "amin")
    unit = torch.minimum(weight, least.clamp_min(1.0)[label])
    if len(row) > n_rows:
        generator = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        some = random_rows(len(row), n_rows, generator).to(row.device)
        row, label, weight, unit = row[some], label[some], weight[some], unit[some]
    others = None if len(model.X) < 2 else model.others(row, is_shared(weight, unit))
    return _LeftOut(row, label, weight, unit, others, frequency, lapse)


def fit_link(model: KrigingModel, labels: _LeftOut) -> tuple[LabelLink, Tensor]:
    """The link under which labels left out are likeliest, and their weighted losses (p,).

    One label is left out at a time: where equal rows were merged the others stay. Beside the
    likelihood, t and the logs of a, b and d are drawn to their start (the class frequencies, 1, the
    noise and pi / 12) by normal priors of standard deviation 3: labels that the link separates
    perfectly still give finite numbers.
    """
    frequency, lapse, weight = labels.frequency, labels.lapse, labels.weight
    start = _start(model, frequency)
    if labels.others is None:
        return LabelLink(**start, frequency=frequency, lapse=lapse), weight[:0]
    value = label_targets(labels.label, len(frequency), model.X.dtype)
    mean, var = model.leave_out(labels.row, labels.unit, value, labels.others)
    mean = mean - model.offset

    def losses(parts: dict[str, Tensor]) -> Tensor:
        link = LabelLink(**parts, frequency=frequency, lapse=lapse)
        log_p = link.log_probabilities(mean, var).gather(1, labels.label[:, None])[:, 0]
        return -log_p * weight / weight.mean()

    def objective(parts: dict[str, Tensor]) -> Tensor:
        prior = sum(
            ((parts[name] - start[name]) / defaults.LINK_PRIOR_STD).square().sum() for name in start
        )
        return 0.5 * prior / weight.sum() + losses(parts).mean()

    found = minimize_lbfgs(objective, start, max_iter=200, tol=1e-10).parameters
    return LabelLink(**found, frequency=frequency, lapse=lapse), losses(found)


def _each_label(model: KrigingModel) -> tuple[Tensor, Tensor, Tensor]:
    """Row, label and weight of every label that was seen; equal ones at a row count as one."""
    share = (model.targets + 1) / 2
    if share.shape[1] == 1:
        share = torch.cat([1 - share, share], 1)
    counts = share if model.weight is None else share * model.weight[:, None]
    row, label = (share > 1e-9).nonzero(as_tuple=True)
    return row, label, counts[row, label]


def _start(model: KrigingModel, frequency: Tensor) -> dict[str, Tensor]:
    """t and the logs of a, b and d as the simple cases of `LabelLink` have them."""
    intercept = frequency.log()
    if len(frequency) == 2:
        intercept = torch.special.ndtri(frequency[1:])
    scales = frequency.new_tensor([1.0, max(model.noise, 0.01), math.pi / 12])
    return {"intercept": intercept, "log_scales": scales.log()}


def search_label_kernel(
    found: HyperparameterFit,
    kernels: list,
    data: Data,
    *,
    n_neighbors: int,
    generator: torch.Generator,
    n_points: int | None = None,
    information: float = 2 / math.pi,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """A kernel that suits all labels better than `found` from some rows, if there is one.

    `kernels` are those among which it was found; data are float64 on the CPU, labels -1 and +1, one
    column a class, or one for two. `n_points` rows are kriged from where the model will have so
    many inducing points: length scales that suit all rows are too short for it. `information` is
    that of a label at f = 0, of a probit link by default.
    """
    starts = _starts(found.kernel, [kernel for kernel in kernels if kernel.n_dims])
    if len(data) <= defaults.SEARCHED_ROWS or not starts:
        return found
    recorder = StopRecorder(callback)
    # Inducing points know of more rows than as many rows would, and of less than all rows do.
    n = len(data)
    n_points = n if n_points is None else math.isqrt(min(n_points, n) * n)
    search = _Search(data, n_points, n_neighbors, generator, recorder, information)
    best = first = search.judged(found)
    for kernel in starts:
        if not recorder.stopped:
            # Scaled to standardised labels, with noise.
            white = WhiteKernel(defaults.KRIGED_LABEL_NOISE, LABEL_NOISE_BOUNDS)
            begun = with_variance(kernel, data.X) + white
            other = search.moved(begun, SearchSettings(**defaults.SHORT_SEARCH))
            best = min(best, other, key=lambda trial: trial.loss)
    if best is not first and not recorder.stopped:
        other = search.moved(best.start, SearchSettings(**defaults.LONG_SEARCH))
        best = min(best, other, key=lambda trial: trial.loss)
    return (
        best.fit if improves(best.losses, first.losses, n_errors=defaults.KRIGED_ERRORS) else found
    )


@dataclass(frozen=True)
class _Trial:
    """A kernel, as that of a latent function and of labels as numbers, and its losses (p,)."""

    fit: HyperparameterFit
    start: Any
    losses: Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


class _Search:
    """Moves kernels by all labels, and judges them by labels left out, the same for all."""

    def __init__(
        self, data: Data, n_points: int, n_neighbors: int, generator, callback, information: float
    ) -> None:
        # The noise of a probit link has variance 1, of another what tells as little.
        self._variance = 2 / math.pi / information
        self.generator, self.callback, self.n_points = generator, callback, n_points
        # Labels, of several columns a random combination, as standardised targets.
        y = data.y[:, 0]
        if data.y.shape[1] > 1:
            direction = standard_normal((data.y.shape[1],), generator)
            y = data.y @ direction.to(data.y.device)
        y = (y - y.mean()) / y.std().clamp_min(1e-12)
        self.numbers = replace(data, y=y).merged()
        order = torch.randperm(len(data), generator=generator, device=generator.device)
        self.labels = data.take(order[:n_points]), min(n_neighbors, defaults.COMPARED_NEIGHBORS)

    def judged(self, fit: HyperparameterFit, start: Any = None) -> _Trial:
        losses = label_losses(fit.kernel, *self.labels, generator=self.generator)
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
        # The noise of the link has a variance of its own.
        signal, white = split_noise(found.kernel)
        factor = self._variance / float(cast(WhiteKernel, white).noise_level)
        return self.judged(replace(found, kernel=scale_within(signal, factor)), found.kernel)


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
