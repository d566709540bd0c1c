"""Kernels of labels, by labels that they have not seen: the start of classifiers of few rows.

The evidence alone overfits many length scales (on digits, 64 columns and 400 labels, the log-loss
of new ones is half as much again as with one length scale for all), and prefers functions smoother
than those that predict best (:mod:`skgp.learning.label_scales`).
"""

from dataclasses import replace
from typing import cast

import torch

from skgp.kernels.hyperparameters import sizes_of
from skgp.learning.calibration import choose_moderation
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    rows_of,
    stratified_order,
)
from skgp.learning.defaults import LABEL_SHARE
from skgp.learning.label_scales import capped, rescale_few
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.learning.selection import choose
from skgp.learning.sparse.evidence import Evidence, best_evidence
from skgp.learning.sparse.objective import Problem
from skgp.likelihoods import Bernoulli


def best_of_labels(problem: Problem) -> Evidence:
    """The kernel of the greatest evidence, its complexity and scales as left-out labels prefer."""
    data = capped(problem.data.to(torch.float64))
    problem = replace(problem, data=data, offset=problem.offset.double())
    found = best_evidence(replace(problem, kernels=kernels_that_predict(problem)))
    if problem.recorder.stopped:
        return found
    likelihood = cast(Bernoulli, problem.objective.likelihood)
    size = rows_of(ClassificationSettings.screen_size, data.y.shape[1])
    few = data.take(stratified_order(data.y, problem.generator)[:size])
    better = rescale_few(
        found.kernel, few, data, likelihood, problem.offset, callback=problem.recorder
    )
    return found if better is None else found._replace(kernel=better[0])


def kernels_that_predict(problem: Problem) -> list:
    """The kernels with one length scale, or those with one a column if a third held out says so.

    All of them where there are none of one kind, or too few labels to hold any out.
    """
    shared: list = []
    separate: list = []
    for kernel in problem.kernels:
        (separate if max(sizes_of(kernel), default=0) > 1 else shared).append(kernel)
    data, likelihood = problem.data, cast(Bernoulli, problem.objective.likelihood)
    if not (shared and separate) or len(data) <= ClassificationSettings.few_rows:
        return problem.kernels
    order = stratified_order(data.y, problem.generator)
    n_kept = 2 * len(data) // 3
    kept, held_out = data.take(order[:n_kept]), data.take(order[n_kept:])
    losses = []
    for kernels in (shared, separate):
        kernel = best_evidence(replace(problem, kernels=kernels, data=kept)).kernel
        evidence = LaplaceEvidence(
            kernel,
            kept.X,
            kept.y,
            likelihood=likelihood,
            offset=problem.offset,
            row_weight=kept.weight,
        )
        moments = laplace_predict(evidence.fit(kernel.theta), kernel, kept.X, held_out.X)
        best, of_moderations = choose_moderation(likelihood, held_out.y, *moments, held_out.weight)
        losses.append(of_moderations[best])
    return (shared, separate)[choose(losses, weight=held_out.weight, least_share=LABEL_SHARE)]
