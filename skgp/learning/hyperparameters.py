"""Hyper-parameters of QSGP regression (appendix I.1): one search for each noise and basis."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from skgp.data import Data
from skgp.inference.relevance.evidence import fit_relevance
from skgp.kernels.gram import split_noise
from skgp.learning.defaults import (
    RELEVANCE_HALVINGS,
    RELEVANCE_ROWS,
    RELEVANCE_SEARCH,
    RELEVANCE_TOL,
    RELEVANCE_WORTH,
)
from skgp.learning.robust import robust_hyperparameters
from skgp.learning.search import HyperparameterFit, fit_hyperparameters
from skgp.optim import sample_without_replacement
from skgp.optim.stopping import StopRecorder

__all__ = ["learn_hyperparameters", "shorten_length_scales"]

Callback = Callable[[int, dict], bool | None]


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
    if robust:
        found, scale = robust_hyperparameters(kernels, data, generator=generator, callback=callback)
        return found, scale or None  # 0 of constant targets
    recorder = StopRecorder(callback)
    if relevance and len(data) > RELEVANCE_ROWS:
        # A start is all that is needed: the evidence of the relevance vectors has the last word.
        data = data.take(torch.randperm(len(data), generator=generator)[:RELEVANCE_ROWS])
    found = fit_hyperparameters(kernels, data, generator=generator, callback=recorder)
    if relevance and not recorder.stopped:
        signal, white = split_noise(found.kernel)
        signal = shorten_length_scales(signal, rows, generator=generator, callback=callback)
        found = replace(found, kernel=signal + white)
    return found, None


def shorten_length_scales(
    kernel, data: Data, *, generator: torch.Generator, callback: Callback | None = None
):
    """Halve the length scales of a Gaussian process where the evidence gains much by it.

    A process may have length scales far beyond its inputs, and an amplitude to match: the kernels
    of all observations are one and the same constant up to small differences, which no few of them
    show. The evidence of the relevance vectors themselves, on at most 2000 observations, tells:
    halvings go on until it falls or half of the observations are vectors, and each must gain 10
    nats on the one taken before. The kernel, without noise, stays within its bounds.
    """
    free = [h for h in kernel.hyperparameters if not h.fixed]
    is_length = np.repeat(
        [h.name.endswith("length_scale") for h in free], [h.n_elements for h in free]
    )
    if not is_length.any():
        return kernel
    size = min(RELEVANCE_SEARCH, len(data))
    some = data.take(sample_without_replacement(len(data), size, generator=generator))
    recorder = StopRecorder(callback)
    best, highest, previous = kernel, -math.inf, -math.inf
    for halvings in range(RELEVANCE_HALVINGS + 1):
        theta = kernel.theta - halvings * math.log(2) * is_length
        trial = kernel.clone_with_theta(np.clip(theta, *kernel.bounds.T))
        fit = fit_relevance(trial, some.X, some.y, sample_weight=some.weight, callback=recorder)
        evidence = fit.log_evidence
        dense = len(fit.indices) > some.total / 2 and halvings > 0
        if recorder.stopped or dense or evidence < previous - RELEVANCE_TOL:
            break
        previous = evidence
        if evidence > highest + RELEVANCE_WORTH:
            best, highest = trial, evidence
    return best
