r"""Hyper-parameters by the joint likelihood of a Vecchia approximation.

The log marginal likelihood of :mod:`skgp.inference.vecchia.posterior` with fixed neighbours and
inducing points is a smooth function of theta, which L-BFGS-B maximises. Both are chosen anew
between the stages of a search, as length scales move.

1. *Start.* Each family of kernels by the dense evidence of some observations; and, at other noises
   and shorter length scales (:mod:`skgp.learning.starts`), where the joint likelihood is greater.
2. *Family.* Each a few iterations by the density of some rows given their neighbours among all
   observations, without inducing points, whose sum over a random subset is an unbiased estimate of
   the whole; of many observations, whose neighbours know what few do not show, in rounds as long
   as the likeliest gains, whose hyper-parameters others go on from, if likelier. The likeliest goes
   on of those that predict held-out observations as well as any, half of them single ones and half
   in blocks (`held_out_densities`): where a kernel fits badly at some scale, the likelihood weighs
   the spacing of the inputs, and predictions across gaps do not.
3. *Stages* on more rows, each with its own neighbours and inducing points.

Up to `SearchSettings.exact_rows` observations the exact evidence decides
(:mod:`skgp.learning.search`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.pathwise import greedy_variance
from skgp.inference.vecchia.conditionals import Conditionals, global_features, inducing_factor
from skgp.inference.vecchia.neighbors import earlier_neighbors, informative, order_of
from skgp.inference.vecchia.posterior import Sums, VecchiaPosterior, sums
from skgp.kernels.expression import split_noise, theta_places
from skgp.kernels.gram import gram_diag
from skgp.learning import defaults
from skgp.learning.search import HyperparameterFit, SearchSettings, dense_fits, fit_hyperparameters
from skgp.learning.selection import choose, held_out_densities, noises_of, rows_in_blocks
from skgp.learning.starts import loss_or_infinity, starts, with_noises
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_within
from skgp.optim.stopping import LossRecorder


@dataclass(frozen=True)
class VecchiaSettings:
    """The approximation, and how long and on how many rows hyper-parameters are searched for."""

    n_neighbors: int = 20  # H
    n_inducing: int | None = 0  # m; None for none or some, as observations are likelier
    most_inducing: int = defaults.VECCHIA_INDUCING  # of these
    exact_rows: int = 0  # observations up to which all are, and none has neighbours
    n_rows: int | None = 10_000  # of a stage; None for all
    n_stages: int = 3  # at most
    max_iter: int = 30  # of L-BFGS-B, a stage
    tol: float = 1e-6  # relative fall of the loss in an iteration below which a stage ends
    rescales: bool = False  # of few labels: whether those left out correct a search's scales
    scale_std: float = math.inf  # of labels: as of `ClassificationSettings`


class VecchiaEvidence:
    """Minus the log marginal likelihood an observation, in nats, at many theta.

    ``O(t H^2 (H + d + m) + p m^2)`` an evaluation, p <= n the number of points that take part.
    """

    def __init__(
        self,
        kernel,  # with a top-level WhiteKernel
        data: Data,  # in their order; y (n,) or (n, c)
        rows: Tensor,  # (t,), those that stand for all
        index: Tensor,  # (t, H), their neighbours; the own index in places left
        Z: Tensor,  # (m, d), inducing points
    ) -> None:
        group = torch.cat([index, rows[:, None]], 1)
        used, self.group = slice(None), group
        if len(rows) < len(data):  # else all take part
            used, self.group = group.unique(return_inverse=True)
        self.kernel, self.rows, self.Z = kernel, rows, Z
        self._signal = split_noise(kernel)[0]
        self._places, self._noise_place, self._noise = theta_places(kernel)
        self.data, self._some = data, data.take(used)
        self._Y = self._some.y.reshape(len(self._some), -1)
        self._total = data.total * data.n_targets

    def conditionals(self, theta: np.ndarray) -> Conditionals:
        """Of the rows, at theta (n_theta,) of the whole expression."""
        X, noise = self._some.X, self._some.row_noise(self._noise_at(theta))
        own = X.new_tensor(theta[self._places])
        return Conditionals(self._signal, X, self.group, noise, self.Z, own)

    def sums(self, conditionals: Conditionals) -> Sums:
        """Estimates of the sums over all observations; those of all rows themselves."""
        return sums(conditionals, self._Y, n=len(self.data))

    def value(self, theta: np.ndarray) -> float:
        """The loss alone."""
        return -self._density(theta, self.sums(self.conditionals(theta))) / self._total

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss and its gradient (n_theta,)."""
        conditionals = self.conditionals(theta)
        found = self.sums(conditionals)
        of_signal, of_noises = conditionals.gradient(found.cotangents(self._Y))
        gradient = np.zeros(len(theta))
        gradient[self._places] = of_signal.cpu().numpy()
        if self._noise_place is not None:
            gradient[self._noise_place] = float((of_noises * conditionals.noise).sum())
            gradient[self._noise_place] += float(self.data.log_power_slope(self._noise_at(theta)))
        return -self._density(theta, found) / self._total, -gradient / self._total

    def log_density(self, theta: np.ndarray) -> float:
        """Log marginal likelihood of all observations, in nats."""
        return -self.value(theta) * self._total

    def log_density_and_gradient(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """The same and its gradient (n_theta,)."""
        loss, gradient = self(theta)
        return -loss * self._total, -gradient * self._total

    def posterior(self, theta: np.ndarray, n_neighbors: int) -> tuple[VecchiaPosterior, float]:
        """Of f, from all rows; and the log marginal likelihood. `n_neighbors` of a prediction."""
        found = self.sums(self.conditionals(theta))
        data, signal = self.data, self._signal.clone_with_theta(theta[self._places])
        Y, noise = data.y.reshape(len(data), -1), data.row_noise(self._noise_at(theta))
        of_points = self.Z, found.mean, found.root
        posterior = VecchiaPosterior(signal, data.X, Y, noise.contiguous(), *of_points, n_neighbors)
        return posterior, self._density(theta, found)

    def _noise_at(self, theta: np.ndarray) -> Tensor:
        place = self._noise_place
        level = self._noise if place is None else math.exp(theta[place])
        return self._some.X.new_tensor(level)

    def _density(self, theta: np.ndarray, found: Sums) -> float:
        """In nats, what merged replicates lost included."""
        power = self.data.log_power(self._noise_at(theta))
        return float(found.log_density() + power.sum())


def choose_inducing(signal, X: Tensor, n_inducing: int, generator: torch.Generator) -> Tensor:
    """Inducing points (m, d), m at most n: rows of X (n, d) that leave the least prior variance.

    One by one, among `VECCHIA_GREEDY_ROWS` at random.
    """
    if not n_inducing:
        return X[:0]
    order = torch.randperm(len(X), generator=generator, device=generator.device)
    n_rows = max(defaults.VECCHIA_GREEDY_ROWS, 2 * n_inducing)
    some = X[order[:n_rows].sort().values.to(X.device)]
    return some[greedy_variance(signal, some, min(n_inducing, len(some)))]


def ordered(kernel, data: Data, ordering: str, generator: torch.Generator) -> Data:
    """Observations in the order of an approximation: last those of so much noise that tell little.

    At random or spread evenly, as `order_of` has it.
    """
    data = data.take(order_of(data.X, ordering, generator))
    last = ~informative(split_noise(kernel)[0], data.X, noises_of(kernel, data))
    return data.take(last.to(torch.uint8).argsort(stable=True))


def evidence_of(
    kernel, data: Data, rows: Tensor, settings: VecchiaSettings, generator: torch.Generator
) -> VecchiaEvidence:
    """That of some rows, with neighbours and inducing points as the kernel sees them."""
    signal, X = split_noise(kernel)[0], data.X
    Z = choose_inducing(signal, X, settings.n_inducing or 0, generator)
    index = neighbors_of(signal, X, settings.n_neighbors, Z, rows, noises_of(kernel, data))
    return VecchiaEvidence(kernel, data, rows, index, Z)


def approximation(
    kernel, data: Data, settings: VecchiaSettings, generator: torch.Generator
) -> VecchiaEvidence:
    """That of all observations, with neighbours and inducing points as the kernel sees them.

    By default all of up to `exact_rows` observations are inducing points, which is exact and needs
    no neighbours; of more, or where rounding may outweigh the noise, `most_inducing`, fewer for
    many rows, where they make `n_rows` observations likelier, or none: of two approximations of one
    process that which gives its observations the greater density on average has the smaller
    Kullback-Leibler divergence from it.
    """
    n, chooses = len(data), settings.n_inducing is None
    if chooses and n <= settings.exact_rows and _outweighs_rounding(kernel, data):
        settings, chooses = replace(settings, n_inducing=n, n_neighbors=0), False
    search, sizes = _Search(data, settings, generator, None), [settings.n_inducing or 0]
    if chooses:
        sizes.append(min(settings.most_inducing, n, defaults.VECCHIA_FEATURES // n))
    else:
        settings = replace(settings, n_rows=None)
    trials = [search.evidence(kernel, replace(settings, n_inducing=m)) for m in sizes]
    found = trials[0]
    if len(trials) > 1:
        without, beside = (loss_or_infinity(trial.value, kernel.theta) for trial in trials)
        least = defaults.VECCHIA_GAIN if sizes[1] < n else -defaults.VECCHIA_GAIN
        found = trials[beside < without - least]
    if len(found.rows) == n:
        return found
    rows = torch.arange(n, device=data.X.device)
    signal, noise = split_noise(kernel)[0], noises_of(kernel, data)
    index = neighbors_of(signal, data.X, settings.n_neighbors, found.Z, noise=noise)
    return VecchiaEvidence(kernel, data, rows, index, found.Z)


def _outweighs_rounding(kernel, data: Data) -> bool:
    """Whether the noise of all observations is beyond what the jitter of features may change."""
    variance = gram_diag(split_noise(kernel)[0], data.X)
    return bool((noises_of(kernel, data) > defaults.VECCHIA_ROUNDED * variance).all())


def neighbors_of(
    signal,
    X: Tensor,
    n_neighbors: int,
    Z: Tensor,
    rows: Tensor | None = None,
    noise: Tensor | None = None,  # (n,), variances
) -> Tensor:
    """Neighbours (t, H) of some rows, or all, before them, beside inducing points Z (m, d)."""
    features = global_features(signal, X, Z, inducing_factor(signal, Z))
    return earlier_neighbors(signal, X, n_neighbors, features, rows, noise)


def fit_joint_likelihood(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    *,
    generator: torch.Generator,
    start: Any = None,
    known: Any = None,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or of the best of several, with WhiteKernels.

    From `start`, where given, and of its family alone; `known` is one more to begin from, with as
    many hyper-parameters as all others. `data` are float64, in the order of the
    approximation, of about zero mean and unit variance. The callback is called with
    (evaluation, {"loss": nats per observation}); True ends the search with what it has.
    """
    if all(kernel.n_dims == 0 for kernel in kernels) or len(data) <= SearchSettings().exact_rows:
        return fit_hyperparameters(kernels, data, generator=generator, callback=callback)
    search = _Search(data, settings, generator, callback)
    best = _Trial(start, math.inf) if start is not None else search.best_family(kernels, known)
    for _ in range(settings.n_stages):
        before = best.kernel.theta
        best = search.climb(best.kernel, settings)
        if (
            search.recorder.stopped
            or np.abs(best.kernel.theta - before).max() < defaults.VECCHIA_MOVED
        ):
            break
    return HyperparameterFit(
        best.kernel, method="joint likelihood", history=search.recorder.history
    )


@dataclass(frozen=True)
class _Trial:
    """A kernel and its loss."""

    kernel: Any
    loss: float


class _Search:
    """Climbs that share data, random numbers and a recorder."""

    def __init__(self, data: Data, settings: VecchiaSettings, generator, callback) -> None:
        self.data, self.settings, self.generator = data, settings, generator
        self.recorder = LossRecorder(callback)
        order = torch.randperm(len(data), generator=generator, device=generator.device)
        self._order = order.to(data.X.device)

    def best_family(self, kernels: list, known: Any) -> _Trial:
        """Each from its dense fit to some observations, by few iterations on some thousand."""
        some = self.data.some(defaults.VECCHIA_START_ROWS, self.generator)
        dense = dense_fits(kernels, some, SearchSettings(), self.recorder)
        size: dict[str, Any] = {
            "n_rows": defaults.VECCHIA_FAMILY_ROWS,
            "max_iter": defaults.VECCHIA_FAMILY_ITER,
        }
        few = replace(self.settings, n_inducing=0, **size)
        trials = [self.climb(fit.kernel, few, from_starts=True) for fit in dense]
        trials += [] if known is None else [self.climb(known, few)]
        for _ in range(defaults.VECCHIA_ROUNDS if len(self.data) > defaults.JOINT_ROWS else 0):
            leader = min(trials, key=lambda trial: trial.loss)
            trials = [self.climb(self._nearer(trial, leader, few), few) for trial in trials]
            gained = leader.loss - min(trial.loss for trial in trials)
            if self.recorder.stopped or not gained >= defaults.VECCHIA_ROUND_GAIN:
                break
        return self.best(trials)

    def _nearer(self, trial: _Trial, leader: _Trial, settings: VecchiaSettings) -> Any:
        """The kernel of a trial, or the same with the leader's hyper-parameters, if likelier."""
        if self.recorder.stopped or len(leader.kernel.theta) != len(trial.kernel.theta):
            return trial.kernel
        theta = np.clip(leader.kernel.theta, *trial.kernel.bounds.T)
        there = trial.kernel.clone_with_theta(theta)
        loss = loss_or_infinity(self.evidence(there, settings).value, theta)
        return there if loss < trial.loss else trial.kernel

    def climb(self, kernel, settings: VecchiaSettings, *, from_starts: bool = False) -> _Trial:
        """L-BFGS-B from the kernel, or from the likeliest of other starts of its form."""
        if self.recorder.stopped:
            return _Trial(kernel, math.inf)
        if from_starts:
            others = [
                *with_noises(*split_noise(kernel)),
                *starts(kernel, self.data, known=defaults.VECCHIA_START_ROWS),
            ]
            value = self.evidence(
                kernel, replace(settings, n_rows=defaults.VECCHIA_START_ROWS)
            ).value
            kernel = min([kernel, *others], key=lambda each: loss_or_infinity(value, each.theta))
        evidence = self.evidence(kernel, settings)
        theta, loss = minimize_within(
            evidence,
            kernel.theta,
            kernel.bounds,
            max_iter=settings.max_iter,
            tol=settings.tol,
            tell=self.recorder.tell,
        )
        return _Trial(kernel.clone_with_theta(theta), loss)

    def best(self, trials: list[_Trial]) -> _Trial:
        """The likeliest of those that predict held-out observations no worse than the best."""
        trials = sorted(trials, key=lambda trial: trial.loss)
        if len(trials) == 1 or self.recorder.stopped:
            return trials[0]
        held = rows_in_blocks(self.data.X, self._order)
        found = [held_out_densities(trial.kernel, self.data, *held) for trial in trials]
        return trials[choose(-torch.stack(found))]

    def evidence(self, kernel, settings: VecchiaSettings) -> VecchiaEvidence:
        """With neighbours and inducing points as this kernel sees them; of the same rows always."""
        rows = self._order[: settings.n_rows].sort().values
        return evidence_of(kernel, self.data, rows, settings, self.generator)
