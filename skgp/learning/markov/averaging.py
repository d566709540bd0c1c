r"""Hyper-parameters of a series that few rows leave open: their posterior in place of a point.

Of two to five rows a hyper-parameter the evidence has its maximum where a part of the model follows
the noise. With the priors of :mod:`skgp.learning.posterior.priors` for the process, and such about
the initial values of the terms, the posterior of their logarithms u is near a Gaussian about its
mode, :math:`N(\hat u, \Sigma)` (Laplace), and predictions are a mixture over points on the axes of
:math:`\Sigma = \sum_j \lambda_j e_j e_j^\top`,

.. math:: u_{\pm j} = \hat u \pm \sqrt{3 \lambda_j}\, e_j, \qquad
          w_{\pm j} \propto \frac{e^{3/2}}{6}
          \frac{p(u_{\pm j} \mid y)}{p(\hat u \mid y)},

beside the mode, of :math:`w_0 \propto 1`: nodes of Gauss and Hermite for each axis, whose weight
is 1/6 of the mode's where the posterior is Gaussian, less where it falls faster, and never more.
A direction that the data do not see has the width of its prior.

Of more rows a forecast beyond them still spreads with the roots of variances that the data know to
a factor only. There :math:`\hat u` is where the search ended, with the weak prior about it that
searches by scoring have, and :math:`\Sigma` the inverse of the average information or, of series
with covariates or more than some 400 times, of minus the Hessian. The d hyper-parameters of all
addends of the process but seasons move along the axes of their own part of it, the others
with them as their regression says, over :math:`\sqrt{(d + k) \lambda_j}` with weights of
:math:`1 / (2 k)` of the mode's, k = max(1, 3 - d): the nodes of the unscented transform.

Beyond the hyper-parameters predictions are averaged over two structures, where :mod:`.structure`
finds both likely; the less likely one is there with its mode alone. Of a series too short for its
trends, predictions are averaged over whether a straight line lies beneath the process, too. The
odds are the ratio of the evidences with the line and with a level in its place, of the same wide
prior; the change over the range has the variance that a line of all the variance of the data has,
12 times theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.series import Series
from skgp.kernels import LocalLinearTrend
from skgp.kernels.expression import summands
from skgp.kernels.series_parts import begun_as_freely, is_of_no_season
from skgp.learning.markov import defaults
from skgp.learning.markov.objectives import Component, SeriesObjective
from skgp.learning.markov.refinement import with_fine_form
from skgp.learning.markov.scoring import SeriesLoss, scored_climb, short_climb
from skgp.learning.markov.search import Climb, Search
from skgp.learning.markov.structure import Structure, parts_of
from skgp.learning.posterior.defaults import NOISE_SHARE, SD
from skgp.learning.posterior.log_posterior import Density
from skgp.learning.posterior.modes import bounded_inverse, hessian_by_differences, search_modes
from skgp.learning.posterior.priors import default_priors
from skgp.likelihoods import Likelihood


@dataclass(frozen=True)
class Average:
    """Where to predict: the mode first, and the weights."""

    points: tuple[Search, ...]
    weights: tuple[float, ...]  # of sum 1

    @property
    def noise(self) -> tuple[float, ...]:
        """Noise variances."""
        return tuple(float(each.parameters[0].exp()) for each in self.points)

    @property
    def mean_noise(self) -> Tensor:
        """Parameters (1,) of the likelihood, of the mean of the noise variances."""
        mean = sum(w * v for w, v in zip(self.weights, self.noise, strict=True))
        return torch.full_like(self.points[0].parameters, math.log(mean))


class SeriesPosterior(Density):
    """Log posterior of the logarithms of hyper-parameters: components first, then the noise.

    `bounds` are (p, 2), `short` evaluates the evidence of one process.
    """

    def __init__(
        self,
        components: Sequence[Component],
        objective: SeriesObjective,
        likelihood: Likelihood,
        medians: np.ndarray,  # (p,) of the priors, in logarithms
        prior_sd: np.ndarray,  # (p,)
    ) -> None:
        self._climb = Climb(components, objective, likelihood)
        moves = any(len(each.theta) for each in components[1:])
        self.short = None if moves else SeriesLoss.of(components[0], objective)
        start = self._climb.start()
        self.bounds = torch.stack(self._climb.bounds(start), 1).numpy()
        self._medians, self._sd, self._scale = medians, prior_sd, -objective.total

    def log_evidence_and_gradient(self, u: np.ndarray) -> tuple[float, np.ndarray]:
        """Without the prior, at u (p,): nats, and (p,)."""
        if self.short is not None:
            short, gradient, _ = self.short(u)
            return -short, -gradient
        loss, slope = self._climb.loss(torch.from_numpy(u.copy()))
        return self._scale * loss, self._scale * slope.numpy()

    def log_densities_and_gradients(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As of `Density`, but for a constant; minus infinity where there is no evidence."""
        return self._with_prior(x, self.log_evidence_and_gradient)

    def log_densities(self, x: np.ndarray) -> np.ndarray:
        """As of `Density`."""
        if self.short is None:
            return self.log_densities_and_gradients(x)[0]
        value = self.short.value
        return self._with_prior(x, lambda u: (value(u), 0.0))[0]

    def _with_prior(self, x: np.ndarray, evidence: Any) -> tuple[np.ndarray, np.ndarray]:
        """Log evidence and its gradient at each place (s, p), with those of the prior."""
        z = (x - self._medians) / self._sd
        values, gradients = np.full(len(x), -math.inf), -z / self._sd
        for i, u in enumerate(x):
            try:
                value, slope = evidence(u)
            except ValueError:
                continue
            values[i] = value - 0.5 * z[i] @ z[i]
            gradients[i] += slope
        return values, gradients

    def why_it_vanishes(self, u: np.ndarray) -> str:
        """For the error of a search without a start."""
        return "The covariance of the series cannot be factored at any start; scale X and y."

    def at(self, u: np.ndarray, found: Search) -> Search:
        """A search that ended at u (p,)."""
        place = torch.from_numpy(u.copy())
        thetas, _ = self._climb.thetas(place)
        pairs = zip(self._climb.components, thetas, strict=True)
        parameters = self._climb.parameters(place).clone()
        return replace(found, components=[c.at(t) for c, t in pairs], parameters=parameters)


def leaves_open(found: Search, n_rows: int) -> bool:
    """Whether so few rows leave the hyper-parameters open, of a model without a trend."""
    n_free = sum(int((each.high > each.low).sum()) for each in found.components) + 1
    trends = any(type(part) is LocalLinearTrend for part in summands(found.kernel))
    return n_rows <= defaults.AVERAGED_ROWS * n_free and not trends


def averaged(
    found: Search,
    starts: Sequence[Component],
    objective: SeriesObjective,
    likelihood: Likelihood,
    series: Series,
    rest: Series,
    structure: Structure,
) -> Average | None:
    """Points in place of the one where a search ended, if the rows leave something open.

    `starts` are the components of the terms, `rest` the series without what they add; `structure`
    has the rival of the process found.
    """
    n_rows, points, rival = len(series.times), None, structure.rival
    if leaves_open(found, n_rows):
        points = average(found, starts, objective, likelihood, series)
    elif defaults.TREND_LEAST_ROWS <= n_rows <= defaults.AROUND_ROWS:
        points = around(found, objective, likelihood)
    if defaults.LINE_LEAST_ROWS <= n_rows < defaults.TREND_LEAST_ROWS and parts_of(series).span:
        rival, share = _over_line(found, objective, likelihood, rest)
    else:
        share = structure.share
    if rival is None or share < defaults.LEAST_WEIGHT:
        return points
    points = points or Average((found,), (1.0,))

    def climb(part: Component, start: Tensor) -> Search:
        return short_climb(part, objective, likelihood, start)

    rival = with_fine_form(rival, rest, climb, asked=False)
    return _with_rival(points, found, rival, share)


def _over_line(
    found: Search, objective: SeriesObjective, likelihood: Likelihood, series: Series
) -> tuple[Search, float]:
    """The process above a line, and its share."""
    make, (process, *_) = parts_of(series), found.components
    starts = (process.kernel, found.parameters), (make.bend(), None)

    def above(part: Any) -> Search:
        searches = [
            short_climb(Component(kernel + part), objective, likelihood, parameters)
            for kernel, parameters in starts
        ]
        best = max(searches, key=lambda search: search.value)
        options = {"tol": defaults.LINE_NATS, "max_evaluations": defaults.CHOICE_ITER}
        place = best.components[0], objective, likelihood, best.parameters
        return scored_climb(*place, options=options) or best

    line = above(make.straight())
    odds = math.exp(
        min(line.value - above(make.constant()).value, -math.log(defaults.LEAST_WEIGHT))
    )
    return line, odds / (1 + odds)


def _with_rival(points: Average, found: Search, rival: Search, share: float) -> Average:
    """Those points and a rival of some share, the likelier of the two first."""
    rival = replace(rival, components=[*rival.components, *found.components[1:]])
    parts = [((rival,), (share,)), (points.points, tuple((1 - share) * w for w in points.weights))]
    (some, weights), (others, rest) = parts if share > 0.5 else parts[::-1]
    return Average(some + others, weights + rest)


def average(
    found: Search,
    starts: Sequence[Component],
    objective: SeriesObjective,
    likelihood: Likelihood,
    series: Series,
) -> Average:
    """Points of the posterior near where a search ended; `starts` are the terms' components."""
    medians, sd = _prior(found, starts, series)
    posterior = SeriesPosterior(found.components, objective, likelihood, medians, sd)
    place = torch.cat([*(each.theta for each in found.components), found.parameters]).numpy()
    mode = search_modes(posterior, [place, medians])[0]
    low, high = posterior.bounds.T
    free = np.flatnonzero(high > low)
    hessian = hessian_by_differences(posterior, mode.u)[np.ix_(free, free)]
    variances, axes = np.linalg.eigh(bounded_inverse(-hessian))
    moves = np.zeros((len(free), len(mode.u)))
    moves[:, free] = (axes * np.sqrt(variances)).T
    at_mode = replace(found, value=posterior.log_evidence_and_gradient(mode.u)[0])
    return _nodes(posterior, at_mode, mode.u, mode.log_density, moves, 3.0, 1 / 6)


def around(found: Search, objective: SeriesObjective, likelihood: Likelihood) -> Average | None:
    """Points about where the search of a series ended, if it has parts beside seasons."""
    place = np.concatenate([*(each.theta for each in found.components), found.parameters])
    sd = np.full(len(place), defaults.FISHER_RIDGE**-0.5)
    posterior = SeriesPosterior(found.components, objective, likelihood, place, sd)
    moving = posterior.bounds[:, 1] > posterior.bounds[:, 0]
    of_process = is_of_no_season(found.kernel)
    moving[: len(of_process)] &= of_process
    moving[len(of_process) :] = False
    if not moving.any():
        return None
    evidence = None if posterior.short is None else posterior.short.evidence(place)
    if posterior.short is None or evidence is None:
        top = posterior.log_density(place)
        covariance = bounded_inverse(-hessian_by_differences(posterior, place))
    else:
        top = evidence.value
        covariance = np.linalg.inv(posterior.short.information(evidence, "average_information"))
    within = covariance[np.ix_(moving, moving)]
    variances, axes = np.linalg.eigh(within)
    following = np.linalg.solve(within, covariance[moving])  # (d, p)
    moves = (axes * np.sqrt(variances)).T @ following
    d = len(moves)
    k = max(1, 3 - d)
    nodes = _nodes(posterior, found, place, top, moves, d + k, 0.5 / k)
    return replace(nodes, points=tuple(_free(each, found) for each in nodes.points))


def _nodes(
    posterior: SeriesPosterior,
    found: Search,
    mode: np.ndarray,  # (p,)
    top: float,  # log density there
    moves: np.ndarray,  # (d, p), standard deviations on the axes
    squares: float,  # of how many of these a node is away
    share: float,  # its weight beside the mode's
) -> Average:
    """The mode, and nodes on either side on each axis."""
    away = math.sqrt(squares) * moves
    points = np.concatenate([mode + away, mode - away]).clip(*posterior.bounds.T)
    falls = posterior.log_densities(points) - top + 0.5 * squares
    weights = np.append(1.0, share * np.exp(falls.clip(max=0.0)))
    weights /= weights.sum()
    kept = weights >= defaults.LEAST_WEIGHT
    u = np.concatenate([mode[None], points])[kept]
    shares = tuple((weights[kept] / weights[kept].sum()).tolist())
    return Average(tuple(posterior.at(each, found) for each in u), shares)


def _free(node: Search, found: Search) -> Search:
    """With trends that begin as freely as they change, or what lies before the data is known."""
    components = []
    for part, mode in zip(node.components, found.components, strict=True):
        kernel = begun_as_freely(part.kernel, mode.kernel)
        free = part if kernel is part.kernel else Component(kernel, part.form.tolerance)
        components.append(free)
    return replace(node, components=components)


def _prior(
    found: Search, starts: Sequence[Component], series: Series
) -> tuple[np.ndarray, np.ndarray]:
    """Medians and standard deviations (p,) of a normal prior on the log hyper-parameters.

    Of the kernel those of :func:`default_priors`, of the terms their initial values, and of the
    noise a share of the variance of the targets.
    """
    t, y = series.times.cpu().numpy()[:, None], (series.totals / series.counts).cpu().numpy()
    priors = default_priors(found.kernel, t, y)
    of_terms = [each.theta.numpy() for each in starts]
    noise = math.log(NOISE_SHARE * (float(y.var()) or 1.0))
    medians = np.concatenate([np.log([prior.median for prior in priors]), *of_terms, [noise]])
    sd = np.full(len(medians), SD)
    sd[: len(priors)] = [getattr(prior, "log_sd", SD) for prior in priors]
    return medians, sd
