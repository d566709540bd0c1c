r"""Steps of the level of a series, which a process that wanders follows late and lastingly.

A step at :math:`\tau` is a term of the series, 1 from there on. Of a process of covariance V with
its noise, what a coefficient left to the data gains is, in nats,

.. math:: g(\tau) = \tfrac12 \frac{b_\tau^2}{A_\tau}, \qquad
          b_\tau = \sum_{t \ge \tau} (V^{-1} y)_t, \quad
          A_\tau = \sum_{s, t \ge \tau} (V^{-1})_{st}

(the score test of [1]_). A is evaluated at some times, between which it is smooth, and where g is
greatest. A process that has to follow the step explains it in part; the evidence decides, of all
hyper-parameters found anew beside the step.

A level that has made a step may make another. Of that the process without the step is the law, as
it had to wander as far, and predictions are averaged with it.

References
----------
.. [1] de Jong and Penzer (1998), Diagnosing shocks in time series, JASA 93.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.gp_mixture import AveragedState
from skgp.inference.markov.regression import make_regression_series
from skgp.inference.markov.series import Series
from skgp.inference.markov.terms import Step, Terms
from skgp.learning.markov import defaults
from skgp.learning.markov.search import Search
from skgp.learning.markov.series_search import Problem
from skgp.learning.markov.waves import Background, threshold


def least_gain(series: Series) -> float:
    """Nats that a step has to gain: by chance one of all times does with `PEAK_CHANCE`."""
    return threshold(defaults.OVERSAMPLED * len(series.times))


def with_step(found: Search, rest: Series, problem: Problem) -> Problem | None:
    """The problem with the step that gains most beside the process where a search ended.

    None where it gains too little, or there are many. `rest` is the series without its terms.
    """
    parts = () if problem.terms is None else problem.terms.parts
    many = sum(isinstance(part, Step) for part in parts) >= defaults.MAX_STEPS
    if many or not defaults.TREND_LEAST_ROWS <= len(rest.times) <= defaults.STRUCTURE_ROWS:
        return None
    at, gain = likeliest_step(found, rest)
    if gain < least_gain(rest):
        return None
    (series,), time = problem.processes, 0 if problem.terms is None else problem.terms.time
    times = series.at_rows(series.times)
    step = Step.of(times, f"step at {at:g}", time, defaults.STEP_SD, weight=series.weight, at=at)
    features = [step.features(times)]
    if problem.terms is not None:
        features.insert(0, series.features)  # type: ignore[attr-defined]
    rows = times, series.y, torch.cat(features, 1), series.weight, series.log_exposure
    terms = Terms((*parts, step), time)
    return Problem([make_regression_series(*rows)], problem.likelihood, problem.offsets, terms)


def likeliest_step(found: Search, series: Series) -> tuple[float, float]:
    """Time of the step that gains most, and the gain."""
    noise, n = float(found.parameters[0].exp()), len(series.times)
    columns = Background(found.components[0].dynamics(), noise).columns(series)
    y, new = series.totals / series.counts, series.times.diff(prepend=series.times[:1] - 1) > 0
    before = new.cumsum(0) - 1  # distinct times, as covariates keep rows of equal ones apart
    sides = torch.minimum(before, before[-1] + 1 - before)
    places = (new & (sides >= defaults.STEP_MARGIN)).nonzero()[:, 0]
    if not len(places):
        return math.nan, 0.0
    v, g = columns.whiten(y[:, None])
    fit = columns.observe(columns.smooth(v))[:, 0]  # type: ignore[arg-type]
    solved = series.counts / noise * (y - fit)  # V^-1 y
    b = solved.flip(0).cumsum(0).flip(0)[places]

    def precision(some: Tensor) -> Tensor:
        """A of steps at some places (k,)."""
        steps = torch.arange(n)[:, None] >= some
        return g @ columns.whiten(steps.to(y))[0].square()

    few = torch.linspace(0, len(places) - 1, defaults.STEP_KNOTS).long().unique()
    between = np.interp(places, places[few], precision(places[few]))
    best = (b.square() / torch.from_numpy(between)).topk(min(len(b), defaults.STEP_KNOTS)).indices
    gain = 0.5 * b[best].square() / precision(places[best])
    return float(series.times[places[best[gain.argmax()]]]), float(gain.max())


def beside_its_like(after: AveragedState, before: AveragedState) -> AveragedState:
    """The posterior with a step, averaged with that of the process that had to follow it."""
    first: Any
    (first, *_), (old, *_), scale = after.states, before.states, after.noise[0] / before.noise[0]
    known = () if before.terms is None else before.terms.parts
    others = [replace(part, wide=defaults.NO_STEP) for part in first.terms.parts[len(known) :]]
    rival = replace(
        first,
        kernel=old.kernel,
        beta=scale * first.beta,
        weight=scale * first.weight,
        tolerance=old.tolerance,
        terms=Terms((*known, *others), after.terms.time),
    )
    weights = [(1 - defaults.STEP_AHEAD) * weight for weight in after.weights]
    noise = *after.noise, before.noise[0]
    return AveragedState((*after.states, rival), (*weights, defaults.STEP_AHEAD), noise)
