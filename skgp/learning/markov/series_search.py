"""The search for the hyper-parameters of a series with a kernel chosen, and what follows it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from skgp.data import Data
from skgp.inference.gp_mixture import AveragedState
from skgp.inference.markov.inducing import find_sites
from skgp.inference.markov.regression import (
    RegressionSeries,
    RegressionState,
    make_regression_series,
)
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.inference.markov.terms import Terms
from skgp.kernels.sde_expression import check_one_input
from skgp.learning.defaults import LEAST_EFFECT, SERIES_START_ROWS
from skgp.learning.label_scales import latent_start
from skgp.learning.markov.additive import TermComponent, left_by_terms, with_terms
from skgp.learning.markov.averaging import Average, averaged
from skgp.learning.markov.defaults import (
    CHOICE_ITER,
    CHOICE_TOL,
    ELBO_TOL,
    FAR_SCORED,
    WORKING_ROWS,
)
from skgp.learning.markov.minibatch import MinibatchElbo, fit_minibatches
from skgp.learning.markov.objectives import (
    Component,
    GaussianEvidence,
    SharedEvidence,
    VariationalEvidence,
)
from skgp.learning.markov.refinement import with_fine_form
from skgp.learning.markov.scoring import settle, short_climb
from skgp.learning.markov.search import Search, maximise
from skgp.learning.markov.structure import Structure, with_structure
from skgp.learning.sparse.evidence import white_kernel
from skgp.learning.starts import likeliest_start
from skgp.likelihoods import Gaussian, Likelihood
from skgp.linalg import NotPositiveDefiniteError


@dataclass
class Problem:
    """Latent processes that share kernel and likelihood, and the terms beside them."""

    processes: Sequence[Series]
    likelihood: Likelihood
    offsets: Sequence[float]
    terms: Terms | None = None

    def evidence(
        self, processes: Sequence[Series] | None = None, *, sparse: bool = False
    ) -> SharedEvidence:
        """The evidence of these processes or some of their rows, or the ELBO."""
        processes = self.processes if processes is None else processes
        pairs, likelihood = zip(processes, self.offsets, strict=True), self.likelihood
        if self.terms is not None:
            return SharedEvidence([with_terms(*pair, self.terms, likelihood) for pair in pairs])
        if likelihood.is_gaussian and not sparse:
            return SharedEvidence([GaussianEvidence(series) for series in processes])
        return SharedEvidence([VariationalEvidence(s, likelihood, offset) for s, offset in pairs])


def evidence_near(problem: Problem, kernel: Any, parameters: Tensor) -> float:
    """Log evidence where a short search from there ends; minus infinity where there is none.

    Of one latent process with Gaussian noise, terms as they are.
    """
    try:
        part = Component.of(kernel)
        return short_climb(part, problem.evidence(), problem.likelihood, parameters).value
    except NotPositiveDefiniteError:
        return -math.inf


@dataclass
class SeriesSearch:
    """From a kernel, with or without inducing states, by the evidence or the ELBO."""

    problem: Problem
    knots: Tensor | None  # (M,) inducing locations
    max_iter: int  # 0 evaluates only
    ends: dict[str, Any]  # when to end: ``tol`` and ``callback`` of `maximise`
    near: bool = False  # whether starts are where a choice among kernels ended
    learn_knots: bool = False
    minibatches: tuple[Any, ...] | None = None
    objective: SharedEvidence = field(init=False)
    of_terms: list[Component] = field(init=False)  # where they start

    def __post_init__(self) -> None:
        terms = self.problem.terms
        self.objective = self.problem.evidence(sparse=self.knots is not None)
        self.of_terms = [] if terms is None else list(map(TermComponent, terms.parts))
        self._others = list(self.of_terms)

    def climb(self, kernel: Any, start: Tensor | None, *, moves: bool = True) -> Search:
        """From the kernel's hyper-parameters and those of the likelihood (p,), or there alone."""
        likelihood, callback = self.problem.likelihood, self.ends["callback"]
        options: dict[str, Any] = {"parameters": start, "knots": self.knots, **self.ends}
        options |= {"learn_knots": self.learn_knots, "amplitudes": self.problem.terms is not None}
        options["max_iter"] = self.max_iter if moves and not callback.stopped else 0
        if options["max_iter"] and self.minibatches is not None and self.knots is not None:  # 3.4
            return self._by_minibatches(kernel, options)
        component, found = Component.of(kernel), None
        if self.knots is None and options["max_iter"] and self._is_scored(component):
            ends = {"tol": 1e-7, **self.ends, "max_iter": self.max_iter}
            found = settle(component, self.objective, likelihood, start, **ends)
            if found is not None:
                found.components += self._others
        if found is None:
            found = maximise([component, *self._others], self.objective, likelihood, **options)
        self._others = found.components[1:]
        return found

    def _is_scored(self, component: Component) -> bool:
        """Whether scoring ends where L-BFGS does: from near there, or with one process alone.

        Terms that move are not scored.
        """
        alone = self.problem.terms is None and len(component.theta) <= FAR_SCORED
        return (self.near or alone) and not any(len(each.theta) for each in self._others)

    def at_working(self, kernel: Any, start: Tensor) -> Search:
        """A kernel that working observations chose, as they leave it.

        Only with parameters of the likelihood, which had taken for noise what it explains, the
        search goes on: the amplitude of a season that separates labels has no end.
        """
        moves = len(self.problem.likelihood.free_parameters()) > 0
        return self.climb(kernel, start, moves=moves)

    def _by_minibatches(self, kernel: Any, options: dict[str, Any]) -> Search:
        processes, likelihood = self.problem.processes, self.problem.likelihood
        rows = MinibatchElbo(processes, likelihood, self.problem.offsets, *self.minibatches or ())
        few = fit_minibatches(kernel, rows, likelihood, **options)
        options |= {"parameters": few.parameters, "knots": few.knots, "max_iter": 0}
        found = maximise([few.kernel], self.objective, likelihood, **options)
        return replace(found, n_iter=few.n_iter, history=few.history)

    def from_likeliest_start(self, found: Search, kernel: Any) -> Search:
        """The search found, or one from a start that is likelier than where that ended."""
        series, likelihood = self.problem.processes[0], self.problem.likelihood
        few = 0 if likelihood.is_gaussian else CHOICE_ITER  # scales of other noise start anywhere
        ends: dict[str, Any] = {"knots": self.knots, "max_iter": few, "tol": CHOICE_TOL}
        for start, parameters in likeliest_starts(kernel, series, likelihood):
            objective = self.problem.evidence(sparse=self.knots is not None)
            near = maximise([start], objective, likelihood, parameters=parameters, **ends)
            if near.value > found.value + LEAST_EFFECT * series.total:
                found = self.climb(near.kernel, near.parameters)
        return found

    def finished(
        self, found: Search, structure: Structure | None, *, asked: bool
    ) -> tuple[Search, Average | None]:
        """With a form that is fine enough, and points of the posterior, under Gaussian noise.

        `structure` is that of a default kernel; see `with_fine_form` for `asked`.
        """
        series, likelihood = self.problem.processes[0], self.problem.likelihood
        rest = left_by_terms(series, found, self.objective)
        found = with_fine_form(found, rest, self.climb, asked=asked)
        if structure is None:
            return found, None
        place = self.of_terms, self.objective, likelihood, series, rest
        return found, averaged(found, *place, structure)


def averaged_state(
    points: Average,
    series: Series,
    likelihood: Likelihood,
    offset: float,
    objective: Any,
    terms: Terms | None,
) -> AveragedState:
    """The posterior averaged over hyper-parameters."""
    given = series, likelihood, offset, objective, terms
    states: Any = tuple(state_of(each, *given) for each in points.points)
    return AveragedState(states, points.weights, points.noise)


def state_of(
    found: Search,
    series: Series,
    likelihood: Likelihood,
    offset: float,
    objective: Any,
    terms: Terms | None,
) -> SeriesState | InducingState:
    """The posterior of a series under the hyper-parameters found."""
    if terms is not None:
        return _with_terms(found, series, likelihood, offset, objective, terms)
    if found.knots is None and likelihood.is_gaussian:  # 2.3
        sites = series.gaussian_sites(float(found.parameters[0].exp()))
        tolerance = found.components[0].form.tolerance
        return SeriesState(found.kernel, series.times, *sites, offset, tolerance)
    dynamics = found.components[0].dynamics()
    likelihood = likelihood.with_parameters(found.parameters)
    offset = objective.mean_of([dynamics])
    start = objective.sites_about(offset)
    place = series, likelihood, offset, found.knots
    last = find_sites(dynamics, *place, start=start, tol=ELBO_TOL)  # eqs. 17-20
    if found.knots is None:
        return SeriesState(found.kernel, series.times, last.beta, last.weight, offset)
    return InducingState(found.kernel, found.knots, last.posterior.sites, offset)


def _with_terms(
    found: Search,
    series: Any,
    likelihood: Likelihood,
    offset: float,
    objective: Any,
    terms: Terms,
) -> RegressionState:
    """The same of a series with terms."""
    terms = terms.at([component.theta for component in found.components[1:]])
    dynamics = [component.dynamics() for component in found.components]
    beta, weight = objective.sites_at(dynamics, found.parameters)
    features = series.features
    tolerance = found.components[0].form.tolerance
    return RegressionState(
        found.kernel, series.times, beta, weight, offset, tolerance, terms=terms, features=features
    )


def likeliest_starts(
    kernel: Any, series: Series, likelihood: Likelihood
) -> Iterator[tuple[Any, Tensor]]:
    """Kernels with parameters (p,) of the likelihood; none where no length scale moves.

    From a length scale far above that of the data a search ends where the function is noise. The
    grid of :mod:`skgp.learning.starts` is looked at on few rows, once spread evenly and once in a
    stretch of consecutive ones; all rows say which of these starts is worth a search.
    """
    start, size = likelihood.initial(series.y).cpu(), SERIES_START_ROWS  # a place of a search
    few = len(series.y) <= 2 * size
    for some in [series] if few else [series.thinned(size), series.stretches(size, size)]:
        x = some.at_rows(some.times)
        offset = None if some.log_exposure is None else some.log_exposure[:, None]
        data = Data(x[:, None], some.y, some.weight, offset=offset).to("cpu")
        if not likelihood.is_gaussian:
            signal = latent_start(kernel, data, likelihood)
            if signal is not None:
                yield signal, start
            continue
        found = likeliest_start(kernel + white_kernel(likelihood, start), data)
        if found is not None:
            whole = found[0]
            yield whole.k1, start.new_tensor([whole.k2.noise_level]).log()


def column_starts(kernels: Sequence[Any], data: Data, likelihood: Likelihood) -> list:
    """Kernels, one a column of X (n, c), each the likeliest where its column alone is seen."""
    found = []
    for kernel, x in zip(kernels, data.X.mT, strict=True):
        width = 1 + (check_one_input(kernel) or 0)  # what ActiveDims selects is there, too
        column = replace(data, X=x[:, None].expand(-1, width))
        found.append(latent_start(kernel, column, likelihood) or kernel)
    return found


def with_structure_of_sites(
    found: Search, problem: Problem, objective: Any, search: Callable[[Any, Any], Search]
) -> Search:
    r"""Where a search ended, or `search` with trend and seasons if that is likelier.

    Under noise that is not Gaussian, by working observations (McCullagh and Nelder, 1989,
    Generalized linear models, 2.5).

    Where a search ended with a smooth kernel its sites :math:`e^{\beta_n f_n - \omega_n f_n^2 / 2}`
    are observations :math:`\beta_n / \omega_n` of f with Gaussian noise of variance
    :math:`1 / \omega_n`: those of counts on a logarithmic scale, those of outliers of next to no
    weight. They choose trend and seasons as Gaussian observations do (:mod:`.structure`), but for a
    scale of their noise. The kernel chosen is kept if the ELBO of the observations themselves, by
    the Bayesian information criterion, is higher. They fit parameters of the likelihood, but no
    more of the kernel: of 60 labels with a period the log-loss between is .17, and .23 where the
    ELBO moves the amplitude, to thousands where the season separates labels (.20 without a season);
    of counts the rates are the same.
    """
    if len(problem.processes[0].times) > WORKING_ROWS:
        return found
    each = objective.objectives[0]
    place = problem.processes[0], problem.likelihood, problem.offsets[0], each, problem.terms
    state: Any = state_of(found, *place)
    if not bool((state.weight > 0).any()):  # of labels that f tells without a doubt
        return found
    working, noise = _working(problem.processes[0], state)
    gaussian = Gaussian(noise)
    whole = Problem([working], gaussian, [0.0], problem.terms).evidence()
    near = short_climb(found.components[0], whole, gaussian)
    best = with_structure(near, left_by_terms(working, near, whole), whole, gaussian).best
    if best is near:
        return found

    def criterion(trial: Search) -> float:
        return trial.value - 0.5 * math.log(len(state.times)) * len(trial.components[0].theta)

    trial = search(best.components[0], found.parameters)
    if criterion(trial) > criterion(found):
        return trial
    each.sites, each.mean = (state.beta, state.weight), state.offset  # where those of the fit begin
    return found


def _working(series: Series, state: Any) -> tuple[Series, float]:
    """Working observations, of weights about 1, and the variance of their noise."""
    seen = state.weight > 0
    weight, y = state.weight[seen], state.beta[seen] / state.weight[seen]
    scale = float(weight.median())
    if isinstance(series, RegressionSeries) and series.features is not None:
        place = state.times[seen], y, series.features[seen]
        return make_regression_series(*place, weight / scale), 1 / scale
    return make_series(state.times[seen], y, weight / scale), 1 / scale
