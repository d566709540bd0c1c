r"""Hyper-parameters of a Vecchia classifier, and its inducing points.

A dense Laplace approximation of up to 1000 observations chooses the kernel
(:mod:`skgp.learning.classification_hyperparameters`), and up to `SearchSettings.exact_rows`
observations it decides alone. A subset shows no detail below the distances of its points, and its
evidence favours small amplitudes. What the model itself predicts of held-out labels, from all
others near them, decides about

1. *inducing points*: none, unless they predict better;
2. *the kernel*: that of the subset, or what all labels as numbers say of several length scales
   (:func:`skgp.learning.local.hyperparameters.search_label_kernel`), which kriging alone would take
   for worse models, too;
3. *amplitude and length scales*: the least loss on a grid of steps, beside a wide prior. No place
   there is simpler than another, and none has to be better by a standard error: held to that, the
   kernel of the subset stays, which is too smooth;
4. *moderation and coupling*, where fewer labels of many classes could be left out of each other in
   turn. These are farther apart than new observations are from all: by them 5000 and 20000 images
   of ten digits had a log-loss of .134 and .092 on others, beside .125 and .086.

Laplace's evidence of some observations may move amplitude and a common factor of the length scales
before (``max_iter``), by default it does not: of 2000 it moves them by less than a hundredth, and
where each moves by it the mean log-loss of 10000 rows of kin40k above the median rises from .203 to
.223.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import LEAST_DRAWS
from skgp.inference.neighbors.search import NeighborSearch
from skgp.kernels.hyperparameters import sizes_of
from skgp.learning import defaults
from skgp.learning.calibration import best_calibration, choose_moderation
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    directions,
    fit_classification_hyperparameters,
    stratified_order,
)
from skgp.learning.label_scales import likeliest_scales, moved
from skgp.learning.local.defaults import COMPARED_NEIGHBORS
from skgp.learning.local.hyperparameters import search_label_kernel
from skgp.learning.search import HyperparameterFit, SearchSettings
from skgp.learning.selection import choose, held_out_rows, stratum
from skgp.learning.vecchia import VecchiaSettings, choose_inducing, neighbors_of
from skgp.learning.vecchia_laplace import LatentEvidence, staged
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import LossRecorder


@dataclass(frozen=True)
class LabelFit:
    """What labels taught."""

    found: HyperparameterFit
    n_inducing: int  # of the fit to all; fewer were tried
    latent: Tensor | None = None  # (n, c), f near the mode, if held-out labels were predicted
    calibration: tuple[float, float] | None = None  # moderation and coupling, by held-out labels


def fit_labels(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    likelihood: Any,
    offset: Tensor,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> LabelFit:
    """Learn the hyper-parameters of one kernel, or of the best of several; and inducing points.

    `data` are float64, in the order of the approximation, y (n, c) of -1 and 1. The callback is
    called with (evaluation, {"loss": nats per observation}); True ends the search with what it has.
    Where the dense approximation decides alone, amplitude and length scales are those by which it
    predicts labels left out best, if the settings say so (:mod:`skgp.learning.label_scales`).
    """
    recorder = LossRecorder(callback)
    alone = len(data) <= SearchSettings.exact_rows
    rescales = settings.rescales and alone
    dense = ClassificationSettings(rescales=rescales, scale_std=settings.scale_std)
    shared: dict[str, Any] = {"generator": generator, "callback": recorder}
    model = likelihood, offset, generator
    found = fit_classification_hyperparameters(
        kernels, data, offset=offset, likelihood=likelihood, settings=dense, **shared
    )
    n_inducing = inducing_by_default(settings, *data.y.shape)
    if recorder.stopped or alone:
        return LabelFit(found, n_inducing)
    recorder.history, held_out = list(found.history), dict[str, Any]()
    n_few = min(n_inducing, settings.most_inducing)
    few = replace(settings, n_inducing=n_few)
    kernels_found = [_by_evidence(found.kernel, data, few, model, recorder)]
    if settings.n_neighbors and not recorder.stopped and max(sizes_of(found.kernel), default=0) > 1:
        shared |= {"n_neighbors": COMPARED_NEIGHBORS, "information": likelihood.information}
        other = search_label_kernel(found, kernels, data, **shared)
        kernels_found += [] if other is found else [other.kernel]
    if not recorder.stopped:
        sizes = [n_inducing] if settings.n_inducing is not None else [0, n_few]
        held = _HeldOut(data, settings, model, recorder)
        best = held.best(kernels_found, sizes)
        kernels_found[0], n_inducing = best.kernel, n_inducing if best.n_inducing else 0
        held_out = {"latent": held.latent(best), "calibration": held.calibration(best)}
    found = replace(found, kernel=kernels_found[0], history=recorder.history)
    return LabelFit(found, n_inducing, **held_out)


def _by_evidence(
    kernel: Any, data: Data, settings: VecchiaSettings, model: tuple, recorder: LossRecorder
):
    """Amplitude and common length scale by Laplace's evidence of ``n_rows`` observations."""
    if not settings.max_iter or not kernel.n_dims:
        return kernel
    order = stratified_order(data, model[2])[: settings.n_rows]
    some, none = data.take(order.sort().values), data.X.new_zeros(0)
    return staged(kernel, none, some, model, settings, recorder, directions(kernel, max_free=1))[0]


def inducing_by_default(settings: VecchiaSettings, n: int, c: int) -> int:
    """Inducing points, of n observations and c columns, where nothing decides on them."""
    if settings.n_inducing is not None:
        return settings.n_inducing
    quick = math.isqrt(defaults.VECCHIA_LABEL_PRODUCTS // (n * c))
    most = min(max(settings.most_inducing, quick), defaults.VECCHIA_LABEL_INDUCING)
    return min(most, n, defaults.VECCHIA_FEATURES // n)


@dataclass(frozen=True)
class _Trial:
    """A kernel, and losses (p,) of held-out labels."""

    kernel: Any
    problem: LatentEvidence  # with the neighbours and inducing points of this kernel or one near it
    losses: Tensor
    loss: float  # weighted mean at the best moderation
    mean: Tensor  # (p, c), of f there
    var: Tensor  # (p, c)

    @property
    def n_inducing(self) -> int:
        return len(self.problem.Z)


class _HeldOut:
    """Labels held out, and what predicts them from others near them."""

    def __init__(
        self,
        data: Data,
        settings: VecchiaSettings,
        model: tuple[Any, Tensor, torch.Generator],
        recorder: LossRecorder,
    ) -> None:
        self.settings, self.model, self.recorder = settings, model, recorder
        target, classes = stratum(data.y)
        n_out = min(defaults.VECCHIA_HELD_LABELS, len(data) // 5)
        out = held_out_rows(target, n_out, model[2], X=data.X, classes=classes)
        self._held = held = torch.from_numpy(out).to(data.X.device)
        self.rows, self.rest = data.take(held), data.take(~held)
        # The same draws in every trial, whose losses are compared.
        self._seed = int(torch.randint(2**31, (), generator=model[2]))

    def best(self, kernels: list, sizes: list[int]) -> _Trial:
        """Of kernels and sizes, the simplest first, and of kernels nearby."""
        found = self._chosen([self._trial(self._problem(kernels[0], m)) for m in sizes])
        for kernel in kernels[1:]:
            others = [self._problem(kernel, m) for m in sizes if m <= found.n_inducing]
            found = self._chosen([found, *map(self._trial, others)])
        return self._rescaled(found)

    def _rescaled(self, start: _Trial) -> _Trial:
        """That of the amplitude and common factor of the length scales of the least loss."""
        trials = {(0, 0): start}

        def loss(place: tuple[int, int]) -> float:
            kernel = moved(start.kernel, place)
            if kernel is None or self.recorder.stopped:
                return math.inf
            if place not in trials:
                trials[place] = self._trial(start.problem, kernel)
            return trials[place].loss

        return trials[likeliest_scales(loss, self.rows.total)]

    def latent(self, trial: _Trial) -> Tensor | None:
        """f (n, c) of all observations, as predicted and at the mode of the others, if of all."""
        at_others = trial.problem.start
        if at_others is None or len(at_others) < len(self.rest):
            return None
        f = trial.mean.new_empty(len(self._held), trial.mean.shape[1])
        f[self._held], f[~self._held] = trial.mean, at_others
        return f

    def calibration(self, trial: _Trial) -> tuple[float, float] | None:
        """Moderation and coupling; None where more labels can be left out in turn."""
        y, moments = self.rows.y, (trial.mean, trial.var)
        if len(y) < defaults.VECCHIA_LEFT_OUT / y.shape[1] ** 0.5:
            return None
        simplest = defaults.FEW_ROWS_MODERATION
        return best_calibration(self.model[0], y, *moments, self.rows.weight, simplest=simplest)

    def _chosen(self, trials: list[_Trial]) -> _Trial:
        losses, weight = [trial.losses for trial in trials], self.rows.weight
        return trials[choose(losses, weight=weight, least_share=defaults.LABEL_SHARE)]

    def _problem(self, kernel, n_inducing: int) -> LatentEvidence:
        """That of the other observations, or of those of many that are near held-out ones."""
        rest, (likelihood, offset, generator) = self.rest, self.model
        if len(rest) > defaults.VECCHIA_TRIAL_ROWS:
            near = NeighborSearch(kernel, rest.X).query(self.rows.X, defaults.VECCHIA_NEAR_LABELS)
            rest = rest.take(near.unique())
        Z = choose_inducing(kernel, rest.X, n_inducing, generator)
        index = neighbors_of(kernel, rest.X, self.settings.n_neighbors, Z)
        return LatentEvidence(kernel, rest, index, Z, likelihood, offset, generator)

    @torch.no_grad()
    def _trial(self, problem: LatentEvidence, kernel: Any = None) -> _Trial:
        """At the kernel of the problem by default."""
        kernel = problem.kernel if kernel is None else kernel
        likelihood, rows, H = self.model[0], self.rows, self.settings.n_neighbors
        with warnings.catch_warnings():  # a search may pass through hyper-parameters of no use
            warnings.simplefilter("ignore", NumericalWarning)
            mode = problem.mode(problem.conditionals(kernel.theta), tol=defaults.VECCHIA_TRIAL_TOL)
            posterior = problem.posterior(
                mode, kernel, max(1, H), self._seed, most_draws=LEAST_DRAWS
            )
            posterior.draw(mode.root, mode.hessian)
            mean, var = posterior.mean_and_variance(rows.X)
        moderation, losses = choose_moderation(likelihood, rows.y, mean, var, rows.weight)
        # Of all moderations: the choice of one, by standard errors, jumps from kernel to kernel.
        loss = min(float(rows.weighted_mean(each)) for each in losses.values())
        self.recorder.tell(loss)
        return _Trial(kernel, problem, losses[moderation], loss, mean, var)
