r"""Hyper-parameters of a kernel from data, before any model is fitted.

Two objectives, both functions of ``theta``, the log hyper-parameters of a scikit-learn kernel
expression whose top-level ``WhiteKernel`` is the noise:

``marginal likelihood`` [1]_
    :math:`\log N(y; 0, K + \sigma^2 I)` of a dense GP on a random subset, by L-BFGS-B.

``leave-one-out`` by nearest neighbours [2]_, [3]_
    :math:`\frac1n \sum_i \log p(y_i \mid y_{N(i)})` where N(i) are the rows that correlate most
    with row i, itself left out: every row counts, at ``O(k^3)`` a row, by Adam on minibatches.

:func:`fit_hyperparameters` starts from the first, refines by the second and keeps whichever
predicts rows better from their neighbours; of several kernel families, the best.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. (5.8).
.. [2] Vecchia (1988), Estimation and model identification for continuous spatial processes.
.. [3] Sundararajan and Keerthi (2001), Predictive approaches for choosing hyperparameters in
   Gaussian processes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, random_rows
from skgp.inference.neighbors.search import MultiscaleSearch
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram_diag
from skgp.kernels.hyperparameters import n_dims_of, theta_of
from skgp.learning.defaults import (
    JUDGED_ROWS,
    JUDGED_TILE,
    JUDGING_NEIGHBORS,
    LEAST_EFFECT,
    LITTLE_NOISE,
    SCORED_NUMBERS,
)
from skgp.learning.evidence import leave_one_out_log_density
from skgp.learning.kernel_choice import choose_kernel, fit_families, maximise_evidence
from skgp.learning.selection import improves
from skgp.learning.starts import (
    ChoiceSettings,
    likeliest_start,
    starts,
    with_less_variance,
    with_noises,
)
from skgp.linalg.runtime import Callback
from skgp.optim.loop import Adam
from skgp.optim.stopping import StopRecorder


@dataclass(frozen=True)
class HyperparameterFit:
    """Result of a hyper-parameter search."""

    kernel: object  # with the hyper-parameters found
    #: Mean log-density of a row given its neighbours, in nats, on rows kept for comparison; NaN
    #: when it was not computed.
    score: float = math.nan
    method: str = "initial"  # or "marginal likelihood", "leave-one-out"
    history: list[float] = field(default_factory=list)  # objective an observation, by evaluation
    #: Of the rows that the dense GP saw, in nats; NaN for the other objective.
    log_marginal_likelihood: float = math.nan
    #: That of the greatest evidence of some observations, where another was found; None where not.
    of_evidence: Any = None


@dataclass(frozen=True)
class SearchSettings:
    """How long and on how many rows to search; chosen on held-out parts of training sets."""

    #: Up to which the marginal likelihood of all decides: it then takes no longer than the search
    #: by neighbours.
    exact_rows: int = 2500
    subset_size: int = 1000  # rows of the dense GP of more
    dense_max_iter: int = 40  # of L-BFGS-B
    n_neighbors: int = 48  # rows conditioned on, per row
    n_scales: int = 1  # that these come from; 1 suits predictions from the nearest alone
    batch_size: int = 256
    n_steps: int = 180  # of Adam
    learning_rate: float = 0.05  # decays linearly to zero
    averaged: float = 0.3  # share of the last iterates that are averaged
    max_candidates: int = 60_000  # rows among which neighbours are searched
    n_score_rows: int = 2048  # on which candidates are compared,
    n_compared: int | None = None  # by so many neighbours; None by `n_neighbors`
    jitter: float = 0.0  # of the model of neighbours to come, relative to the variances of f


def fit_hyperparameters(
    kernels: list,  # expressions with a top-level WhiteKernel; their theta is the start
    data: Data,  # float64; targets of about zero mean and unit variance
    *,
    generator: torch.Generator,
    settings: SearchSettings | None = None,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or choose among several families.

    Up to ``exact_rows`` the marginal likelihood decides. Beyond, every family is refined by the
    leave-one-out likelihood for a quarter of the steps, the best goes on, and whichever of all
    these predicts rows best from their neighbours is returned. Where a kernel starts matters
    little: other length scales, from the spread of the inputs to their spacing, are looked at
    (:mod:`skgp.learning.starts`). The callback is called with (step, {"loss": float}); returning
    True ends the search with what it has.
    """
    settings = settings or SearchSettings()
    n = data.X.shape[0]
    if not any(map(n_dims_of, kernels)) or data.is_one_value:
        return HyperparameterFit(kernels[0])
    callback = StopRecorder(callback)
    subset = torch.randperm(n, generator=generator, device=generator.device)[: settings.subset_size]
    if n <= settings.exact_rows:
        return _by_exact_evidence(kernels, data, subset, settings, generator, callback)
    dense = dense_fits(kernels, data.take(subset), settings, callback)
    if callback.stopped:
        return dense[0]
    comparison = _Comparison(data, settings, generator)
    short = replace(settings, n_steps=settings.n_steps // 4)
    scored = [comparison(fit) for fit in dense]
    steps = short if len(dense) > 1 else settings
    for fit in [comparison.with_best_start(fit) for fit in scored]:
        if not callback.stopped:
            scored.append(comparison(_refine(fit, comparison, steps, callback)))
    best = max(scored, key=lambda fit: fit.score)
    if len(dense) > 1 and not callback.stopped:
        longer = replace(settings, n_steps=settings.n_steps - short.n_steps)
        scored.append(comparison(_refine(best, comparison, longer, callback)))
    found = comparison.with_enough_noise(max(scored, key=lambda fit: fit.score))
    likeliest = dense[0].kernel
    return replace(found, of_evidence=None if likeliest == found.kernel else likeliest)


def _by_exact_evidence(
    kernels: list, data: Data, subset: Tensor, settings: SearchSettings, generator, callback
) -> HyperparameterFit:
    """The evidence of all observations decides; the search begins on some of many."""
    max_iter = settings.dense_max_iter
    if len(kernels) == 1:
        if len(subset) == len(data.y):
            return _likeliest(kernels[0], data, max_iter, callback)
        start = _likeliest(kernels[0], data.take(subset), max_iter, callback)
        if callback.stopped:
            return start
        return fit_marginal_likelihood(start.kernel, data, max_iter=max_iter, callback=callback)
    kernel, history = choose_kernel(
        kernels,
        data,
        generator=generator,
        settings=ChoiceSettings(max_iter=max_iter),
        callback=callback,
    )
    return HyperparameterFit(kernel, method="marginal likelihood", history=history)


def _likeliest(kernel, data: Data, max_iter: int, callback) -> HyperparameterFit:
    """The search from the kernel; or from the likeliest of other starts, if it is worth it."""
    found = fit_marginal_likelihood(kernel, data, max_iter=max_iter, callback=callback)
    other = None if callback.stopped else likeliest_start(kernel, data)
    if other is None:
        return found
    rival = fit_marginal_likelihood(other[0], data, max_iter=max_iter, callback=callback)
    gain = rival.log_marginal_likelihood - found.log_marginal_likelihood
    best = rival if gain > LEAST_EFFECT * data.total * data.n_targets else found
    return replace(best, history=found.history + rival.history)


def dense_fits(
    kernels: list, data: Data, settings: SearchSettings, callback
) -> list[HyperparameterFit]:
    """Fits of each family to some observations, the likeliest first."""
    if len(kernels) == 1:
        return [_likeliest(kernels[0], data, settings.dense_max_iter, callback)]
    found, history = fit_families(
        kernels, data, max_iter=settings.dense_max_iter, callback=callback
    )
    return [
        HyperparameterFit(kernel, method="marginal likelihood", history=history) for kernel in found
    ]


class _Comparison:
    """Scores fits of whatever kernel on the same rows, each in its own metric."""

    def __init__(self, data: Data, settings: SearchSettings, generator):
        self.data, self.settings, self.generator = data, settings, generator
        n = data.X.shape[0]
        self.rows = _draw_rows(data, min(settings.n_score_rows, n), generator)
        candidates = random_rows(len(data), settings.max_candidates, generator)
        self.candidates = candidates.to(data.X.device)

    def __call__(self, fit: HyperparameterFit) -> HyperparameterFit:
        k = self.settings.n_compared or self.settings.n_neighbors
        return replace(fit, score=float(self.densities(fit.kernel, self.rows, k).mean()))

    def densities(self, kernel, rows: Tensor, k: int) -> Tensor:
        """Of observations of these rows given k neighbours, as `leave_one_out_densities`."""
        place, s = (self.data, rows, self.candidates, k), self.settings
        return leave_one_out_densities(kernel, *place, n_scales=s.n_scales, jitter=s.jitter)

    def with_best_start(self, fit: HyperparameterFit) -> HyperparameterFit:
        """The fit, at the noise variance under which it predicts best; or at shorter length scales.

        Noises are of a coarse grid: rough kernels on a small subset explain noise as signal, and
        the gradient search takes long to find back from a noise variance of nearly zero. Length
        scales are those that all rows may show and the subset did not, taken where they predict
        better beyond noise.
        """
        signal, white = split_noise(fit.kernel)
        best, density = self._best(
            [fit.kernel, *with_noises(signal, white), *self._less(fit.kernel)]
        )
        shorter = starts(fit.kernel, self.data, known=self.settings.subset_size)
        if shorter:
            other, its_density = self._best(shorter)
            best = other if improves(-its_density, -density) else best
        return replace(fit, kernel=best)

    def with_enough_noise(self, fit: HyperparameterFit) -> HyperparameterFit:
        """The fit with as much of the little noise found as makes all observations likeliest.

        Some hundred of them rarely tell of two that are near each other and differ: without noise
        one of several thousand, from the nearest of the others, is off by hundreds of standard
        deviations.
        """
        signal, white = split_noise(fit.kernel)
        if white is None or white.hyperparameter_noise_level.fixed:
            return fit
        least, most = white.noise_level, min(10 * LITTLE_NOISE, white.noise_level_bounds[1])
        if least > LITTLE_NOISE or least >= most or len(self.candidates) < 2:
            return fit
        levels = np.geomspace(least, most, 2 + round(2 * math.log10(most / least)))
        trials = [signal + type(white)(level, white.noise_level_bounds) for level in levels]
        rows = random_rows(len(self.data), JUDGED_ROWS, self.generator).to(self.data.X.device)
        k = min(JUDGING_NEIGHBORS, len(self.candidates) - 1)
        search = MultiscaleSearch(signal, self.data.X, self.candidates, k, 1)
        place = rows, torch.cat([search.query(some) for some in rows.split(JUDGED_TILE)])
        jitter = self.settings.jitter
        means = [float(_densities(trial, self.data, *place, jitter).mean()) for trial in trials]
        best = int(np.argmax(means))
        return replace(fit, kernel=trials[best]) if means[best] > means[0] + LEAST_EFFECT else fit

    def _less(self, kernel) -> list:
        """The kernel with less variance, where its jitter exceeds its noise."""
        signal, white = split_noise(kernel)
        jitter = self.settings.jitter * float(gram_diag(signal, self.data.X).mean())
        noise = 0.0 if white is None else white.noise_level
        return with_less_variance(kernel) if jitter > noise else []

    def _best(self, kernels: list) -> tuple[Any, Tensor]:
        """The expression that predicts some rows best, and their log densities."""
        few, k = self.rows[: self.settings.batch_size], self.settings.n_neighbors
        found = [(kernel, self.densities(kernel, few, k)) for kernel in kernels]
        return max(found, key=lambda each: float(each[1].mean()))


def _refine(fit, on: _Comparison, settings: SearchSettings, callback) -> HyperparameterFit:
    return fit_leave_one_out(
        fit.kernel, on.data, settings=settings, generator=on.generator, callback=callback
    )


def fit_marginal_likelihood(
    kernel, data: Data, *, max_iter: int = 60, callback: Callback | None = None
) -> HyperparameterFit:
    """Maximise :class:`~skgp.learning.evidence.ExactEvidence` over theta, by L-BFGS-B.

    Within its bounds; the best theta seen is returned, also when `callback` stops the search.
    """
    found, history = maximise_evidence(kernel, data, max_iter=max_iter, callback=callback)
    return HyperparameterFit(
        found.kernel,
        method="marginal likelihood",
        history=history,
        log_marginal_likelihood=-found.loss * found.family.total,
    )


def leave_one_out_densities(
    kernel, data: Data, rows: Tensor, candidates: Tensor, k: int, *, n_scales=1, jitter=0.0
) -> Tensor:
    """The :func:`leave_one_out_log_density` of an observation of each of the rows (b,), in nats.

    `rows` are drawn in proportion to their weights (:func:`_draw_rows`), so that the mean is that
    of observations; their neighbours are found in the kernel's own metric.
    """
    signal, _ = split_noise(kernel)
    k = min(k, candidates.shape[0] - 1)
    search = MultiscaleSearch(signal, data.X, candidates, k, n_scales)
    neighbors = torch.cat([search.query(batch) for batch in rows.split(256)])
    return _densities(kernel, data, rows, neighbors, jitter)


@torch.no_grad()
def _densities(kernel, data: Data, rows: Tensor, neighbors: Tensor, jitter: float) -> Tensor:
    """Of one observation of each of the rows (b,) given its neighbours (b, k), tile by tile."""
    theta = data.X.new_tensor(theta_of(kernel))
    tiles = neighbor_tiles(rows, neighbors)
    return torch.cat([_density_of_one(kernel, data, *t, theta, jitter=jitter) for t in tiles])


def neighbor_tiles(rows: Tensor, neighbors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their neighbours, so many at a time that their covariances stay in a cache."""
    numbers = SCORED_NUMBERS["cuda" if rows.is_cuda else "cpu"]
    size = max(1, numbers // (neighbors.shape[1] + 1) ** 2)
    return zip(rows.split(size), neighbors.split(size), strict=True)


def _density_of_one(kernel, data: Data, rows: Tensor, *given: Tensor, jitter: float) -> Tensor:
    """The :func:`leave_one_out_log_density` of one of the observations of each of the rows (b,)."""
    density = leave_one_out_log_density(kernel, data, rows, *given, jitter=jitter) / data.n_targets
    return density if data.weight is None else density / data.weight[rows]


def fit_leave_one_out(
    kernel,
    data: Data,
    *,
    generator: torch.Generator,
    settings: SearchSettings | None = None,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Maximise the nearest-neighbour leave-one-out likelihood by Adam on minibatches.

    Neighbours are searched afresh for every batch in the metric of the moment, so ARD scales may
    move far. The learning rate falls linearly to zero and the last iterates are averaged.
    """
    settings = settings or SearchSettings()
    X, n = data.X, data.X.shape[0]
    lower, upper = X.new_tensor(kernel.bounds).T
    theta = X.new_tensor(kernel.theta).requires_grad_()
    optimizer = Adam([theta], lr=settings.learning_rate, betas=(0.9, 0.99))
    candidates = random_rows(len(X), settings.max_candidates, generator).to(X.device)
    k = min(settings.n_neighbors, candidates.shape[0] - 1)
    history: list[float] = []
    iterates: list[Tensor] = []
    for step in range(settings.n_steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / settings.n_steps)
        rows = _draw_rows(data, min(settings.batch_size, n), generator)
        current, _ = split_noise(kernel.clone_with_theta(theta.detach().cpu().numpy()))
        search = MultiscaleSearch(current, X, candidates, k, settings.n_scales)
        optimizer.zero_grad()
        total = 0.0
        for tile in neighbor_tiles(rows, search.query(rows)):
            density = _density_of_one(kernel, data, *tile, theta, jitter=settings.jitter)
            loss = -density.sum() / len(rows)
            loss.backward()
            total += loss.item()
        gradient = theta.grad
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            break  # keep the iterates up to here; the comparison of scores decides
        optimizer.step()
        with torch.no_grad():
            theta.clamp_(lower, upper)
        history.append(-total)
        iterates.append(theta.detach().clone())
        if callback is not None and callback(step + 1, {"loss": total}):
            break
    if not iterates:
        return HyperparameterFit(kernel, method="leave-one-out")
    last = iterates[-max(1, round(settings.averaged * len(iterates))) :]
    theta_mean = torch.stack(last).mean(0).cpu().numpy()
    return HyperparameterFit(
        kernel.clone_with_theta(theta_mean), method="leave-one-out", history=history
    )


def _draw_rows(data: Data, size: int, generator: torch.Generator) -> Tensor:
    """Indices (size,) of random rows; of weighted rows, in proportion to their weights.

    A row of weight w then counts by its log-density over w, which keeps the objective's gradient
    from being carried by a few rows of many replicates.
    """
    n = data.y.shape[0]
    if data.weight is None:
        drawn = torch.randint(n, (size,), generator=generator, device=generator.device)
        return drawn.to(data.y.device)
    edges = data.weight.cumsum(0)
    uniform = torch.rand(size, generator=generator, dtype=edges.dtype, device=generator.device)
    place = uniform.to(edges.device) * edges[-1]
    return torch.searchsorted(edges, place).clamp_(max=n - 1)
