"""Posteriors of f where a search of hyper-parameters has ended."""

from typing import Any

from skgp.inference.markov.averaged import AveragedState
from skgp.inference.markov.regression_state import RegressionState
from skgp.inference.markov.series import Series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.inference.markov.terms import Terms
from skgp.learning.markov.averaging import Average
from skgp.learning.markov.objectives import find_sites
from skgp.learning.markov.search import Search
from skgp.likelihoods import Likelihood


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
    start = getattr(objective, "sites", None)
    if found.knots is None and likelihood.is_gaussian:  # 2.3
        sites = series.gaussian_sites(float(found.parameters[0].exp()))
        tolerance = found.components[0].form.tolerance
        return SeriesState(found.kernel, series.times, *sites, offset, tolerance)
    dynamics = found.components[0].dynamics()
    likelihood = likelihood.with_parameters(found.parameters)
    last = find_sites(dynamics, series, likelihood, offset, found.knots, start=start)  # eqs. 17-20
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
