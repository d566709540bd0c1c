"""Relevance vectors as a route of QSGP regression: from a plan to a posterior over f."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from skgp.data import Data
from skgp.inference.relevance.evidence import fit_relevance
from skgp.inference.relevance.stochastic import fit_relevance_stochastic
from skgp.inference.stochastic.basis import take_rows
from skgp.models.qsgp.plan import Plan
from skgp.models.qsgp.results import Fit, Options
from skgp.optim import sample_without_replacement
from skgp.optim.stopping import StopRecorder

Callback = Callable[[int, dict], bool | None]

_STEPS, _TOL = 10_000, 1e-3  # of the sequential algorithm
_ITERATIONS = 1_000  # of the stochastic
_SEARCH_ROWS = 2_000
_SHORTEST = 6  # halvings
_WORTH = 10.0  # nats; shorter length scales take more vectors


def shorten_length_scales(
    kernel,
    data: Data,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
):
    """Halve the length scales of a Gaussian process where the evidence gains much by it.

    A process may have length scales far beyond its inputs, and an amplitude to match: the kernels
    of all rows are one and the same constant up to small differences, which no few of them show.
    The evidence of the relevance vectors themselves, on at most 2000 rows, tells: halvings go on
    until it falls or half of the rows are vectors, and each must gain 10 nats on the one taken
    before.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    data : Data
        Rows as they came.
    generator : torch.Generator
        To draw rows.
    callback : callable, optional
        As of :func:`~skgp.inference.relevance.evidence.fit_relevance`; True ends the search.

    Returns
    -------
    sklearn kernel expression
        Within its bounds.
    """
    free = [h for h in kernel.hyperparameters if not h.fixed]
    is_length = np.repeat(
        [h.name.endswith("length_scale") for h in free], [h.n_elements for h in free]
    )
    if not is_length.any():
        return kernel
    rows = sample_without_replacement(
        len(data.y), min(_SEARCH_ROWS, len(data.y)), generator=generator
    )
    X, y = (take_rows(A, rows, torch.float64) for A in (data.X, data.y))
    weight = None if data.weight is None else data.weight[rows]
    total = float(len(y) if weight is None else weight.sum())
    recorder = StopRecorder(callback)
    best, highest, previous = kernel, -math.inf, -math.inf
    for halvings in range(_SHORTEST + 1):
        theta = kernel.theta - halvings * math.log(2) * is_length
        trial = kernel.clone_with_theta(np.clip(theta, *kernel.bounds.T))
        fit = fit_relevance(trial, X, y, sample_weight=weight, callback=recorder)
        evidence = fit.log_evidence
        dense = len(fit.indices) > total / 2 and halvings > 0
        if recorder.stopped or dense or evidence < previous - _TOL:
            break
        previous = evidence
        if evidence > highest + _WORTH:
            best, highest = trial, evidence
    return best


def fit_relevance_vectors(
    kernel,
    data: Data,
    noise: float,
    plan: Plan,
    options: Options,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> Fit:
    """Find relevance vectors, their weights and the noise, for a fixed kernel.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
        Its amplitude is without effect.
    data : Data
        Rows as they came, none merged: `relevance` counts them.
    noise : float
        Noise variance, kept where ``options.refit_noise`` is False and else without effect: the
        evidence of a sparse model has its own maximum.
    plan : Plan
        Of :func:`~skgp.models.qsgp.plan.resolve_relevance`.
    options : Options
    generator : torch.Generator
    callback : callable, optional

    Returns
    -------
    Fit
        With `relevance`.
    """
    common: dict[str, Any] = {
        "noise_variance": None if options.refit_noise else noise,
        "learn_noise": options.refit_noise,
        "candidates": None if plan.n_basis is None else min(plan.n_basis, len(data.y)),
        "generator": generator,
        "callback": callback,
    }
    if plan.solver == "sgd":
        fit = fit_relevance_stochastic(
            kernel,
            data.X,
            data.y,
            batch_size=options.batch_size,
            basis_batch_size=options.basis_batch_size,
            n_support=options.n_support,
            learning_rate=options.learning_rate,
            max_iter=_ITERATIONS if options.max_iter is None else options.max_iter,
            **common,
        )
    else:
        fit = fit_relevance(
            kernel,
            data.X,
            data.y,
            sample_weight=data.weight,
            max_iter=_STEPS if options.max_iter is None else options.max_iter,
            tol=_TOL if options.tol is None else options.tol,
            **common,
        )
    evidence = fit.log_evidence
    return Fit(
        fit.posterior,
        replace(plan, n_basis=len(fit.indices)),
        kernel,
        fit.noise_variance,
        n_iter=max(1, fit.n_iter),
        log_marginal_likelihood=None if math.isnan(evidence) else evidence,
        relevance=fit.indices,
        history=[loss if plan.solver == "sgd" else -loss for loss in fit.history],
    )
