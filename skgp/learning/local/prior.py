r"""How a sparse-within-sparse GP is fitted, and its prior without Gaussian noise, by rows held out.

Hyper-parameters from a small subset or from labels taken as numbers say how f correlates, and less
well how large it is: more rows support a larger f. And where every row is an inducing point, the
divergence of weight M / H restrains q more than predictions need. Both are one-dimensional and
cheap to vary, for :math:`k \to s k` leaves a, the largest part of the work, as it is:

.. math:: K_n^{-1} \to K_n^{-1} / s, \qquad v \to s v, \qquad
          \log |K_n| \to \log |K_n| + H \log s,

and a factor of kappa multiplies the divergence. First kappa falls by factors of ten, then the
amplitude moves by factors of three, while predictions improve; of what was tried, the nearest to
the start is chosen that is no worse than the best, beyond two standard errors and one
(:mod:`skgp.learning.selection`). Classes, each against the rest, are coupled as suits each
trial best (:mod:`skgp.learning.calibration`): the less the divergence holds q, the more its classes
repeat each other, and judged uncoupled it would be held less than predictions need.

Rows held out must not be inducing points: a point without data of its own, but right at the row
that is predicted, is what no prediction later has. Where enough rows are none, the inducing points
stay as they are, and the system of all rows comes with that of the rows learned from. Where every
row is one, points are left out, and all is computed again for all rows.
"""

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.natural import VariationalPosterior, fit_natural_sites
from skgp.inference.neighbors.assembly import compressed_rows
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.search import active_sets
from skgp.inference.neighbors.system import LocalSystem, RowWeights, nested_systems, row_weights
from skgp.kernels.scales import amplitude_range, scale_amplitude
from skgp.learning.calibration import best_coupling, coupled_log_probabilities
from skgp.learning.defaults import FEW_ROWS, MAX_HELD_OUT
from skgp.learning.local import defaults
from skgp.learning.selection import choose, held_out_rows, improves, stratum, while_falling
from skgp.likelihoods import Bernoulli
from skgp.likelihoods.base import Likelihood
from skgp.linalg.runtime import Callback


@dataclass(frozen=True)
class Settings:
    """How to fit."""

    n_neighbors: int = 32  # H; all inducing points where there are fewer
    kl_weight: float | None = None  # None is M / H, or less without Gaussian noise where it pays
    covariance: str = "diagonal"  # of q(u), or "full"
    learn_inducing: bool = False  # whether the inducing points move
    polish_inducing: bool = False  # whether they do in a polish in any case
    learn_hyperparameters: bool = True  # whether anything of kernel or likelihood may change
    neighbors: str = "auto"  # see `NeighborSearch`
    solver: str = "auto"  # "adam" is Algorithm 1, "natural" sites; "auto" these where they apply
    polish: bool = False
    #: Natural-gradient steps, 14 by default, or steps of Adam: by default until the bound stands
    #: still, 6000 at most, and 400 of a polish.
    max_iter: int | None = None
    tol: float = 1e-4  # relative change of the bound at which the former stop
    learning_rate: float | None = None  # of Adam
    batch_size: int = 256  # of Adam
    validation_fraction: float = 0.1  # of rows held out; no fewer than 500 or a third
    rival: Any = None  # a kernel that is taken if it predicts rows held out better

    @property
    def moves_inducing(self) -> bool:
        """Whether steps of Adam come after the natural ones in any case."""
        return self.solver == "adam" or self.learn_inducing


def split_rows(
    y: Tensor, settings: Settings, generator: torch.Generator, preferred: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows to learn from and rows held out, each increasing; stratified by y (n, c).

    Rows that are `preferred` (n,) are held out rather than others.
    """
    n = len(y)
    least = min(n // 3, defaults.MIN_HELD_OUT)
    n_out = min(max(round(settings.validation_fraction * n), least), MAX_HELD_OUT, n - 1)
    target, classes = stratum(y.cpu())
    first = torch.ones(n, dtype=torch.bool) if preferred is None else preferred.cpu()
    held_out = torch.zeros(n, dtype=torch.bool)
    for part in (first, ~first):
        rows, size = part.nonzero()[:, 0], n_out - int(held_out.sum())
        if size >= len(rows):
            held_out[rows] = True
        elif size > 0:
            chosen = held_out_rows(target[rows], size, generator, classes=classes)
            held_out[rows[torch.from_numpy(chosen)]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


class LeftOut(NamedTuple):
    """Observations, and the moments of f that the others tell."""

    Y: Tensor  # (p, c)
    mean: Tensor  # (p, c)
    var: Tensor  # (p, c)
    weight: Tensor | None  # (p,)


@dataclass(frozen=True)
class Prior:
    """The prior found, and what a fit of all rows may begin with."""

    kernel: Any
    kl_weight: float | None  # None is M / H
    data: Data  # all rows, perhaps in another order
    held_out: LeftOut | None = None  # if any were
    system: LocalSystem | None = None  # of `data` under this prior
    start: VariationalPosterior | None = None  # of the inducing points
    history: list[float] = field(default_factory=list)  # scores of the rows held out, in nats


def find_prior(
    kernel,
    likelihood: Likelihood,
    data: Data,
    Z: Tensor,
    position: Tensor,
    offset: Tensor,
    settings: Settings,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> Prior:
    """Choose amplitude and KL weight; the prior given where there is nothing to choose.

    And the kernel, where `settings` name a rival. Arguments as of
    :func:`~skgp.models.swsgp.fit_swsgp`; the callback is called after each trial, and True ends the
    search.
    """
    likelihood = likelihood.with_parameters(likelihood.initial(Z))
    learn, rival = settings.learn_hyperparameters, settings.rival
    learn_kl = learn and settings.kl_weight is None and settings.n_neighbors < len(Z)
    low, high = amplitude_range(kernel) if learn else (1.0, 1.0)
    free = learn_kl or high > low or data.y.shape[1] > 1 or rival is not None
    if likelihood.is_gaussian or not free or len(data) < FEW_ROWS:
        return Prior(kernel, settings.kl_weight, data)
    kept, left_out = split_rows(data.y, settings, generator, position < 0)
    data, own = data.take(torch.cat([kept, left_out])), position[left_out.to(position.device)]
    others = torch.isin(torch.arange(len(Z), device=own.device), own, invert=True)
    split = _Split(data, len(kept), Z[others], bool(others.all()), settings, learn_kl)
    model = likelihood, offset, callback
    found, everything, rows, kl_weight = split.tried(kernel, *model)
    if rival is not None:
        other = split.tried(rival, *model)
        if improves(other[0].losses, found.losses, weight=split.held_out.weight):
            kernel, (found, everything, rows, kl_weight) = rival, other
    factors = found.amplitude, found.kl_factor
    asked = found.kl_factor * len(Z) / min(settings.n_neighbors, len(Z))
    return Prior(
        scale_amplitude(kernel, found.amplitude) if found.amplitude != 1 else kernel,
        asked if settings.kl_weight is None else kl_weight,
        data,
        LeftOut(split.held_out.y, found.mean, found.var, split.held_out.weight),
        None if everything is None else rescaled(everything, *factors),
        found.q if split.keeps_points else _of_all_points(found, rows, own, others, offset),
        found.history,
    )


@dataclass(frozen=True)
class _Split:
    """Rows to learn from, and then those held out, for which priors of several kernels compete."""

    data: Data
    n_learned: int
    points: Tensor  # (M', d), inducing points that no row held out is
    keeps_points: bool  # whether these are all
    settings: Settings
    learn_kl: bool

    @property
    def held_out(self) -> Data:
        return self.data.take(slice(self.n_learned, None))

    def tried(
        self, kernel, likelihood: Likelihood, offset: Tensor, callback: Callback | None
    ) -> tuple["Trial", LocalSystem | None, RowWeights, float]:
        """The prior chosen; the system of all rows, if any; A of those held out; the KL weight."""
        data, points, settings = self.data, self.points, self.settings
        how, kl_weight = (settings.n_neighbors, settings.neighbors), settings.kl_weight
        active = active_sets(kernel, data.X, points, *how)
        kl_weight = len(points) / active.shape[1] if kl_weight is None else kl_weight
        parts = slice(self.n_learned), slice(self.n_learned, None)
        tiles = [Tiles(kernel, data.X[part], points, active[part]) for part in parts]
        system, everything, rows = _systems(tiles, data, kl_weight, self.keeps_points)
        found = choose_prior(
            system,
            data.take(parts[0]),
            rows,
            self.held_out,
            likelihood,
            offset,
            amplitudes=amplitude_range(kernel) if settings.learn_hyperparameters else (1.0, 1.0),
            kl_weight=kl_weight if self.learn_kl else 1.0,
            callback=callback,
        )
        return found, everything, rows, kl_weight


def _systems(
    tiles: list[Tiles], data: Data, kl_weight: float, keeps_points: bool
) -> tuple[LocalSystem, LocalSystem | None, RowWeights]:
    """Of the rows that are learned from; of all, if they keep the points; A of those held out."""
    n, n_out = (len(each.X) for each in tiles)
    if keeps_points:
        system, everything = nested_systems(tiles, kl_weight=kl_weight, weight=data.weight)
        return system, everything, everything.rows.last(n_out)
    weight = None if data.weight is None else data.weight[:n]
    (system,) = nested_systems(tiles[:1], kl_weight=kl_weight, weight=weight)
    return system, None, row_weights(tiles[1])


def _of_all_points(
    found: "Trial", rows: RowWeights, own: Tensor, others: Tensor, offset: Tensor
) -> VariationalPosterior:
    """q(u) of all inducing points: as learned at `others` (M,), as predicted at those left out.

    `own` are the inducing points that the rows held out are, -1 for none.
    """
    mean = found.q.mean.new_empty(len(others), offset.numel())
    var, out = torch.empty_like(mean), own >= 0
    mean[others], var[others] = found.q.mean, found.q.var
    mean[own[out]] = (found.mean - offset)[out]
    var[own[out]] = rows.project_squares(found.q.var)[out]
    return VariationalPosterior(mean, var)


@dataclass(frozen=True)
class Trial:
    """A prior, by its factors of what there was, and what its fit says of the rows held out."""

    amplitude: float  # of the kernel
    kl_factor: float
    q: VariationalPosterior  # learned from the other rows
    mean: Tensor  # (p, c); of f at the rows held out
    var: Tensor  # (p, c)
    losses: Tensor  # (p,); negative log predictive densities, in nats
    score: float  # their weighted mean
    history: list[float] = field(default_factory=list)  # all scores, in the order tried


def choose_prior(
    system: LocalSystem,
    data: Data,
    rows: RowWeights,
    held_out: Data,
    likelihood: Likelihood,
    offset: Tensor,
    *,
    amplitudes: tuple[float, float] = (0.0, float("inf")),
    kl_weight: float = 1.0,
    callback: Callback | None = None,
) -> Trial:
    """Choose amplitude and KL weight for a system of `data`, by rows held out of weights `rows`.

    `amplitudes` are the least and greatest factor of the kernel; the KL weight may fall to the
    paper's, 1. The callback is called after each fit; True ends the walk.
    """
    search = _Search(system, data, rows, held_out, likelihood, offset, callback)
    factors = _ladder(defaults.KL_STEP, 1 / kl_weight)
    search.walk([(1.0, factor) for factor in factors], n_errors=defaults.KL_ERRORS)
    kl_factor = search.trial.kl_factor
    low, high = amplitudes
    ups = [(amplitude, kl_factor) for amplitude in _ladder(defaults.AMPLITUDE_STEP, high)]
    downs = [(amplitude, kl_factor) for amplitude in _ladder(1 / defaults.AMPLITUDE_STEP, low)]
    if not search.walk(ups):
        search.walk(downs)
    return replace(search.trial, history=search.history)


def _ladder(step: float, end: float) -> list[float]:
    """Some powers of `step`, of which none is beyond `end`; and `end` if that is near."""
    end = min(max(end, step**-20), step**20) if step > 1 else min(max(end, step**20), step**-20)
    length = math.log(end) / math.log(step)
    if length < 1e-9:
        return []
    rungs = [step**i for i in range(1, defaults.MOST_STEPS + 1) if i <= length + 1e-9]
    return (
        rungs if len(rungs) == defaults.MOST_STEPS or length - len(rungs) < 1e-9 else [*rungs, end]
    )


class _Search:
    """Fits for one prior after another, each from where the best so far ended."""

    def __init__(self, system, data, rows, held_out, likelihood, offset, callback) -> None:
        self.system, self.data, self.rows, self.held_out = system, data, rows, held_out
        self.likelihood, self.offset, self.callback = likelihood, offset, callback
        self.trial = self._fit(1.0, 1.0, None)
        self.history = [self.trial.score]
        self.stopped = False

    def walk(self, priors: list[tuple[float, float]], n_errors: float = 1.0) -> bool:
        """Try one after another while predictions improve; whether any but the first is chosen."""

        def tried(prior: tuple[float, float], last: Trial) -> Trial | None:
            if self.stopped:
                return None
            trial = self._fit(*prior, last.q)
            self.history.append(trial.score)
            if self.callback is not None:
                self.stopped = bool(self.callback(len(self.history), {"loss": trial.score}))
            return trial

        trials = while_falling(self.trial, priors, tried, lambda trial: trial.score)
        losses = [trial.losses.double() for trial in trials]
        chosen = choose(losses, weight=self.held_out.weight, n_errors=n_errors)
        self.trial = trials[chosen]
        return chosen > 0

    def _fit(self, amplitude: float, kl_factor: float, start: VariationalPosterior | None) -> Trial:
        fit = fit_natural_sites(
            rescaled(self.system, amplitude, kl_factor),
            self.data.y,
            self.likelihood.at(self.data.offset),
            offset=self.offset,
            start=start,
            max_iter=defaults.FIRST_TRIAL_ITER if start is None else defaults.TRIAL_ITER,
            **defaults.TRIAL,
        )
        mean = self.offset + self.rows.project(fit.q.mean)
        var = amplitude * self.rows.variance[:, None] + self.rows.project_squares(fit.q.var)
        judge, weight = self.likelihood.at(self.held_out.offset), self.held_out.weight
        coupling = 0.0
        if self.data.y.shape[1] > 1:
            Y, m, v = (each.double() for each in (self.held_out.y, mean, var))
            w = None if weight is None else weight.double()
            coupling = best_coupling(cast(Bernoulli, judge), Y, m, v, w)  # others have one column
        losses = negative_log_score(judge, self.held_out.y, mean, var, coupling)
        weight = torch.ones_like(losses) if weight is None else weight
        score = float((weight @ losses) / weight.sum())
        return Trial(amplitude, kl_factor, fit.q, mean, var, losses, score)


def negative_log_score(
    likelihood: Likelihood, Y: Tensor, mean: Tensor, var: Tensor, coupling: float = 0.0
) -> Tensor:
    """Negative log predictive density of each row (n,), in nats.

    Of several columns, each a class against the rest, that of the true class, the classes coupled
    by this exponent.
    """
    if Y.shape[1] == 1:
        return -likelihood.log_predictive(Y, mean, var)[:, 0]
    log_p = coupled_log_probabilities(cast(Bernoulli, likelihood), mean, var, coupling)
    return -log_p.gather(1, Y.argmax(1, keepdim=True))[:, 0]


def rescaled(system: LocalSystem, amplitude: float, kl_factor: float) -> LocalSystem:
    """The system for a kernel times `amplitude` and a KL weight times `kl_factor`; shares A."""
    prior, factor = system.prior, kl_factor / amplitude
    Q = prior.matrix
    matrix = compressed_rows(Q.crow_indices(), Q.col_indices(), Q.values() * factor, Q.shape)
    rows = copy.copy(system.rows)
    rows.variance = amplitude * rows.variance
    return replace(
        system,
        rows=rows,
        prior=replace(
            prior,
            matrix=matrix,
            diagonal=prior.diagonal * factor,
            mass=prior.mass * kl_factor,
            constant=kl_factor * (prior.constant + prior.mass.sum() * math.log(amplitude)),
            variance=amplitude * prior.variance,
        ),
    )
