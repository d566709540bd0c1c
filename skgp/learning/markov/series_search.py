"""The search for the hyper-parameters of a series with a kernel chosen, and what follows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from skgp.inference.markov.series import Series
from skgp.inference.markov.terms import Terms
from skgp.learning.defaults import LEAST_EFFECT
from skgp.learning.markov.averaging import Average, averaged
from skgp.learning.markov.defaults import CHOICE_ITER, CHOICE_TOL, FAR_SCORED
from skgp.learning.markov.minibatch import MinibatchElbo, fit_minibatches
from skgp.learning.markov.objectives import (
    Component,
    GaussianEvidence,
    SharedEvidence,
    VariationalEvidence,
)
from skgp.learning.markov.refinement import with_fine_form
from skgp.learning.markov.regression import TermComponent, left_by_terms, with_terms
from skgp.learning.markov.scoring import settle, short_climb
from skgp.learning.markov.search import Search, maximise
from skgp.learning.markov.starts import likeliest_starts
from skgp.learning.markov.structure import Structure
from skgp.likelihoods import Likelihood
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
        if found is None:
            found = maximise([component, *self._others], self.objective, likelihood, **options)
        self._others = found.components[1:]
        return found

    def _is_scored(self, component: Component) -> bool:
        """Whether scoring ends where L-BFGS does: from near there, or with one process alone."""
        alone = self.problem.terms is None and len(component.theta) <= FAR_SCORED
        return self.near or alone

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
