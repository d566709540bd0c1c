r"""Hyper-parameters of regression (appendix I.1 of QSGP): one search for each noise and basis.

Gaussian noise is that of :mod:`skgp.learning.search`. Leaving out single observations among near
neighbours tells nothing of long ranges: where predictions may cross gaps, in few columns, or come
from neighbours, of many observations, the kernel of the greatest joint likelihood
(:mod:`skgp.learning.vecchia`) is the other candidate.

A few observations far off make normal noise explain signal as noise. Laplace noise first finds
these, in two rounds:

1. an observation is judged by the median of its neighbours, in the metric of columns scaled by
   their spreads, which needs no hyper-parameters;
2. with the kernel found, by the Gaussian process prediction from its neighbours, itself left out;
   searched again only if that changes the verdict on more than 1% of them.

One whose residual is beyond 5 robust standard deviations is left out of the search. (To keep it
with a small weight would not do: its noise is that of the others over its weight, which holds the
noise up where the others have none.) The standard deviation comes from the 85% quantile of the
absolute residuals, out of reach of up to 15% of wrong targets.

Whether noise is rather added to log y than to y (`logs_predict_better`) is told by processes of
either scale, each of which predicts some observations from all others (Rasmussen and Williams,
2006, section 5.4.2). The density of y of a process of log y is that of log y divided by y; what it
predicts is :math:`e^{m + \sigma^2 / 2}`. Log y is the more complex scale: it needs clearly better
densities, and squared errors of predictions of y that are not clearly greater.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, random_rows, replicates
from skgp.inference.neighbors.search import CandidateSearch
from skgp.inference.relevance.evidence import RelevanceFit, fit_relevance
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram
from skgp.kernels.scales import inverse_length_scales, length_scale_places
from skgp.learning import defaults
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.learning.selection import choose, held_out_densities, improves, rows_in_blocks
from skgp.learning.vecchia import VecchiaSettings, fit_joint_likelihood, ordered
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import cho_solve, jittered_cholesky
from skgp.linalg.runtime import Callback
from skgp.optim import sample_without_replacement
from skgp.optim.stopping import StopRecorder

#: Of |z|, z ~ N(0, 1).
_MEDIAN_OF_NORMAL = 0.6744897501960817  # mathematical


def learn_hyperparameters(
    kernels: list,
    data: Data,
    rows: Data,
    *,
    robust: bool,
    relevance: bool,
    generator: torch.Generator,
    callback: Callback,
) -> tuple[HyperparameterFit, float | None]:
    """The best kernel, noise included; with Laplace noise (`robust`) also where b may start.

    `rows` are the observations that relevance vectors are found among, none merged; `data` serves
    everything else.
    """
    settings = SearchSettings(**defaults.GLOBAL_SEARCH)
    if robust:
        found, scale = robust_hyperparameters(
            kernels, data, generator=generator, settings=settings, callback=callback
        )
        return found, scale or None  # 0 of constant targets
    recorder = StopRecorder(callback)
    if relevance:
        # A start is all that is needed: the evidence of the relevance vectors has the last word.
        data = data.take(random_rows(len(data), defaults.RELEVANCE_ROWS, generator))
    found = fit_hyperparameters(
        kernels, data, generator=generator, settings=settings, callback=recorder
    )
    in_few_columns = data.X.shape[1] <= defaults.JOINT_COLUMNS and len(data) > settings.exact_rows
    several = found.method != "initial" and not (relevance or recorder.stopped)
    if several and (in_few_columns or len(data) > defaults.JOINT_ROWS):
        found = _with_joint_candidate(found, kernels, data, generator, recorder)
    if relevance and not recorder.stopped:
        signal, white = split_noise(found.kernel)
        signal = shorten_length_scales(signal, rows, generator=generator, callback=callback)
        found = replace(found, kernel=signal + white)
    return found, None


def _with_joint_candidate(
    found: HyperparameterFit,
    kernels: list,
    data: Data,
    generator: torch.Generator,
    callback: StopRecorder,
) -> HyperparameterFit:
    """The kernel of the greatest joint likelihood, where it predicts held-out observations better.

    Half of these are held out one by one, half in blocks. Of kernels that fall with one scaled
    distance: others have no neighbours, or take n^2 correlations to find them. In more than
    `JOINT_COLUMNS` columns from the kernel found, too, and then from where that ends: the evidence
    of few observations may begin too far, and the kernel found in a basin that holds it.
    """
    kernels = [kernel for kernel in kernels if _falls_with_distance(kernel, data.X)]
    if not kernels:
        return found
    order, fits = ordered(kernels[0], data, "random", generator), [found]

    def joint(n_stages: int, **begin: Any) -> None:
        settings = VecchiaSettings(n_stages=n_stages)
        told: dict = {"generator": generator, "callback": callback, **begin}
        rival = fit_joint_likelihood(kernels, order, settings, **told)
        history = fits[-1].history + rival.history
        fits.append(replace(rival, history=history, of_evidence=found.of_evidence))

    if data.X.shape[1] > defaults.JOINT_COLUMNS and _falls_with_distance(found.kernel, data.X):
        joint(1, start=found.kernel)
    joint(VecchiaSettings.n_stages, known=fits[1].kernel if len(fits) > 1 else None)
    random = torch.randperm(len(data), generator=generator, device=generator.device)
    held = rows_in_blocks(data.X, random.to(data.X.device))
    losses = [
        -held_out_densities(fit.kernel, data, *held, defaults.JOINT_NEIGHBORS) for fit in fits
    ]
    return fits[choose(losses)]


def _falls_with_distance(kernel, X: Tensor) -> bool:
    inverse = inverse_length_scales(split_noise(kernel)[0], X[:1])  # (d,)
    return inverse is not None and bool(inverse.any())


def shorten_length_scales(
    kernel, data: Data, *, generator: torch.Generator, callback: Callback | None = None
):
    """Length scales of a Gaussian process at which few of the observations are vectors.

    A process may have length scales far beyond its inputs, and an amplitude to match: the kernels
    of all observations are one and the same constant up to small differences, which no few of them
    show. The evidence of the relevance vectors themselves, on at most 2000 observations, tells:
    length scales are halved until it falls or half of the observations are vectors, and each
    halving must gain 10 nats on the one taken before. It is undone where a fifth held out is
    predicted better without, by a standard error: the evidence gives an observation far off the
    others a vector and a variance of its own. The kernel, without noise, stays within its bounds.

    Where half are vectors at once, the scales are first doubled until they are not: vectors at most
    observations give each a variance of its own, which has a great evidence whatever the targets,
    and know nothing between them.
    """
    if not length_scale_places(kernel).any():
        return kernel
    size = min(defaults.RELEVANCE_SEARCH, len(data))
    some = data.take(sample_without_replacement(len(data), size, generator=generator))
    recorder = StopRecorder(callback)
    first = _relevance(kernel, some, recorder)
    if _is_dense(first, some) and not recorder.stopped:
        longer = (_scaled(kernel, 2.0**k) for k in range(1, defaults.RELEVANCE_DOUBLINGS + 1))
        trials = ((trial, _relevance(trial, some, recorder)) for trial in longer)
        sparse = (trial for trial in trials if not _is_dense(trial[1], some))
        kernel, first = next(sparse, (kernel, first))
    taken, highest = [kernel], first.log_evidence
    previous = highest
    for halvings in range(1, defaults.RELEVANCE_HALVINGS + 1):
        if recorder.stopped:
            break
        trial = _scaled(kernel, 0.5**halvings)
        fit = _relevance(trial, some, recorder)
        evidence = fit.log_evidence
        if recorder.stopped or _is_dense(fit, some) or evidence < previous - defaults.RELEVANCE_TOL:
            break
        previous = evidence
        if evidence > highest + defaults.RELEVANCE_WORTH:
            taken, highest = [trial, *taken], evidence
    if len(taken) == 1 or recorder.stopped:
        return taken[0]
    order = torch.randperm(size, generator=generator, device=generator.device).to(some.X.device)
    held_out, rest = some.take(order[: size // 5]), some.take(order[size // 5 :])
    losses = [_losses(_relevance(each, rest, recorder), held_out) for each in taken]
    return taken[choose(losses, weight=held_out.weight)]


def _losses(fit: RelevanceFit, data: Data) -> Tensor:
    """Minus log densities (p,) of observations, of replicates the mean, in nats."""
    mean, variance = fit.posterior.mean_and_variance(data.X)
    variance, square = variance + fit.noise_variance, (data.y - mean).square()
    if data.scatter is not None and data.weight is not None:
        square = square + data.scatter / data.weight
    return 0.5 * (square / variance + (2 * math.pi * variance).log())


def _scaled(kernel, factor: float):
    """The kernel with its length scales times a factor, within their bounds."""
    theta = kernel.theta + math.log(factor) * length_scale_places(kernel)
    return kernel.clone_with_theta(np.clip(theta, *kernel.bounds.T))


def _relevance(kernel, data: Data, callback: Callback) -> RelevanceFit:
    return fit_relevance(kernel, data.X, data.y, sample_weight=data.weight, callback=callback)


def _is_dense(fit: RelevanceFit, data: Data) -> bool:
    return len(fit.indices) > data.total / 2


def robust_hyperparameters(
    kernels: list,
    data: Data,
    *,
    generator: torch.Generator,
    settings: SearchSettings | None = None,
    callback: Callback | None = None,
) -> tuple[HyperparameterFit, float]:
    """Learn hyper-parameters, noise included, from targets of which some may be grossly wrong.

    Each kernel has a top-level ``WhiteKernel``. Targets are standardised by
    :func:`robust_location_scale`; those of equal inputs are better not merged before: the mean of
    an outlier and a good one is another outlier. Good ones are, for one left out is known from the
    others of its input, whatever the length scales. Returned is the fit, whose noise level is that
    of the observations that are no outliers, and the mean absolute residual of all given their
    neighbours, in the units of y: where to start the scale of Laplace noise. At most two searches,
    of which the second starts from the kernel of the first, and ``O(n (n d + k^3))`` for the
    neighbours of all (k = 24), among at most ``settings.max_candidates`` of them.
    """
    settings = settings or SearchSettings()
    recorder = StopRecorder(callback)
    everyone = torch.arange(data.y.shape[0], device=data.y.device)
    candidates = random_rows(len(data), settings.max_candidates, generator).to(data.y.device)
    residual = _median_residual(data, candidates)
    if len(everyone) < 2 or all(kernel.n_dims == 0 for kernel in kernels):
        return HyperparameterFit(kernels[0]), float(data.weighted_mean(residual.abs()))
    good = _inliers(residual, data.weight)
    for _ in range(defaults.OUTLIER_ROUNDS):
        kept = everyone[good]
        told: dict = {"generator": generator, "settings": settings, "callback": recorder}
        fit = fit_hyperparameters(kernels, _merged(data.take(kept)), **told)
        some = random_rows(len(kept), settings.max_candidates, generator)
        candidates = kept[some.to(kept.device)]
        residual = _left_out_residual(fit.kernel, data, candidates)
        before, good = good, _inliers(residual, data.weight)
        if recorder.stopped or (good != before).double().mean() <= defaults.OUTLIER_CHANGED:
            break
        kernels = [fit.kernel]
    return fit, float(data.weighted_mean(residual.abs()))


def _merged(data: Data) -> Data:
    """Observations (n,), those of equal inputs merged."""
    distinct = np.unique(replicates(data.X.cpu().numpy()))
    return data if len(distinct) == len(data) else data.merged()


def robust_location_scale(y: Tensor, weight: Tensor | None = None) -> tuple[float, float]:
    """Mean and standard deviation of the targets (n,) that are no gross outliers.

    Those are within `OUTLIER_CUTOFF` standard deviations of the median, judged by the median
    distance from it. Targets standardised by these suit the bounds and the start of a kernel; by
    the plain mean and standard deviation 5% of errors shrink the signal to a third. A row of
    positive weight 2 counts as the same row twice. Where more than half are equal, the scale is the
    median distance of the others from these; of constant targets it is 1.
    """
    weight = torch.ones_like(y) if weight is None else weight
    median = _quantile(y, weight, 0.5)
    distance = (y - median).abs()
    rounding = 10 * torch.finfo(y.dtype).eps * median.abs()
    reach = defaults.OUTLIER_CUTOFF * _quantile(distance, weight, 0.5) / _MEDIAN_OF_NORMAL
    kept = distance <= torch.maximum(reach, rounding)
    inner, share = y[kept], weight[kept] / weight[kept].sum()
    location = float(share @ inner)
    if reach > rounding:
        return location, float(share @ (inner - location).square()) ** 0.5
    return location, 1.0 if kept.all() else float(_quantile(distance[~kept], weight[~kept], 0.5))


def _quantile(values: Tensor, weight: Tensor, level: float) -> Tensor:
    """Least of the values (n,) that at least `level` of the weight does not exceed, shape ()."""
    ordered, order = values.sort()
    below = weight[order].cumsum(0)
    # Sums of weights are rounded; a level that one of them meets must not fall short of it.
    index = torch.searchsorted(below, below[-1] * level * (1 - 1e-12))
    return ordered[index]


def _inliers(residual: Tensor, weight: Tensor | None = None) -> Tensor:
    """Which rows (n,) are no gross errors."""
    size = residual.abs()
    weight = torch.ones_like(size) if weight is None else weight
    std = _quantile(size, weight, defaults.OUTLIER_QUANTILE) / defaults.OUTLIER_QUANTILE_OF_NORMAL
    # Most of the rows may be predicted perfectly, e.g. constant targets.
    return size <= defaults.OUTLIER_CUTOFF * std.clamp_min(math.sqrt(torch.finfo(size.dtype).eps))


def _median_residual(data: Data, candidates: Tensor) -> Tensor:
    """Difference of each row to the median of its neighbours, shape (n,)."""
    search = CandidateSearch(None, data.X, candidates)
    k = max(1, min(defaults.MEDIAN_NEIGHBORS, len(candidates) - 1))
    residual = torch.empty_like(data.y)
    for rows in torch.arange(data.y.shape[0], device=data.y.device).split(defaults.OUTLIER_BATCH):
        nearest = search.query(rows, k)
        residual[rows] = data.y[rows] - data.y[nearest].median(1).values
    return residual


def _left_out_residual(kernel, data: Data, candidates: Tensor) -> Tensor:
    r"""Difference of each row to its prediction from its neighbours, shape (n,).

    .. math:: r_i = y_i - k(x_i, X_N) (K_N + \operatorname{diag}(\sigma^2 / W_N))^{-1} y_N.
    """
    signal, white = split_noise(kernel)
    noise = data.row_noise(data.y.new_tensor(white.noise_level if white is not None else 0.0))
    k = min(defaults.PREDICTING_NEIGHBORS, len(candidates) - 1)
    search = CandidateSearch(signal, data.X, candidates)
    residual = torch.empty_like(data.y)
    for rows in torch.arange(data.y.shape[0], device=data.y.device).split(defaults.OUTLIER_BATCH):
        neighbors = search.query(rows, k)
        group = torch.cat([neighbors, rows[:, None]], dim=1)
        K = gram(signal, data.X[group], method="expand")
        among = K[:, :-1, :-1] + torch.diag_embed(noise[neighbors])
        factor = jittered_cholesky(among).factor
        solved = cho_solve(factor, data.y[neighbors])
        residual[rows] = data.y[rows] - (K[:, -1, :-1] * solved).sum(1)
    return residual


def logs_predict_better(kernel: Any, data: Data) -> bool:
    """Of some hundred observations, none merged, with positive y (n,); the kernel has noise.

    ``O(n^3)`` some 30 times.
    """
    if data.y.max() == data.y.min():  # as some of many may be
        return False
    try:
        (plain, error), (logs, error_of_logs) = (left_out(kernel, data, f) for f in (False, True))
    except NotPositiveDefiniteError:
        return False
    unit = error.mean() or 1.0
    options: dict[str, Any] = {"weight": data.weight, "n_errors": defaults.LOG_ERRORS}
    worse = improves(error / unit, error_of_logs / unit, **options)
    return not worse and improves(logs, plain, **options)


def left_out(kernel: Any, data: Data, of_log: bool) -> tuple[np.ndarray, np.ndarray]:
    """Minus log densities of y (n,) over its greatest size, in nats, and squared errors.

    As of observations of weight 1: what others count for is for those who average.
    """
    y = data.y.numpy() / float(data.y.abs().max())  # whose squares are numbers
    u = np.log(y) if of_log else y
    mean = np.average(u, weights=data.weight)
    scale = np.average((u - mean) ** 2, weights=data.weight) ** 0.5
    z = (u - mean) / scale
    scaled = replace(data, y=torch.from_numpy(z))
    found, _ = maximise_evidence(kernel, scaled, max_iter=defaults.LOG_ITER)
    at = found.family.at(found.theta)[2]
    white: Any = split_noise(found.kernel)[1]
    predicted, var, noise = mean + scale * (z - at.residual), at.variance, white.noise_level
    if data.weight is not None:
        var = np.maximum(var - noise / data.weight.numpy(), 0.0) + noise
    var, noise = scale**2 * var, scale**2 * noise
    loss = 0.5 * (np.log(2 * np.pi * var) + (u - predicted) ** 2 / var)
    if not of_log:
        return loss, (y - predicted) ** 2
    return loss + np.log(y), (y - np.exp(predicted + 0.5 * noise)) ** 2
