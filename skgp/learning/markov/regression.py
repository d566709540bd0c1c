"""The evidence of a series with terms, and the terms' parameters as those of components."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.columns import columns_of
from skgp.inference.markov.regression import RegressionPosterior, RegressionSeries, centres
from skgp.inference.markov.series import Series
from skgp.inference.markov.sites import SeriesBound, SiteFit, climb, sites_mean
from skgp.inference.markov.terms import Term, Terms
from skgp.learning.markov.defaults import ELBO_TOL
from skgp.learning.markov.objectives import ClosedForm, Component, Knots, SitesElbo
from skgp.learning.markov.search import Search
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError

Sites = tuple[Tensor, Tensor]


class TermComponent(Component):
    """A term: in place of dynamics it has the log scales of its coefficients."""

    def __init__(self, term: Term) -> None:
        self.term, self.theta = term, term.theta
        self.low, self.high = term.bounds
        self.is_length_scale = torch.zeros(len(self.theta), dtype=torch.bool)

    @property
    def is_amplitude(self) -> Tensor:
        """The variance comes first."""
        return torch.arange(len(self.theta)) == 0

    @property
    def kernel(self) -> Term:
        """The term with these parameters."""
        return self.term

    def at(self, theta: Tensor) -> "TermComponent":
        """The term with other parameters (t,)."""
        (moved,) = Terms((self.term,), 0).at([theta]).parts
        return TermComponent(moved)

    def dynamics(self, theta: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Log scales (q,) of the coefficients."""
        return self.term.log_scales(self.theta if theta is None else theta)

    def pull(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Gradient in theta (t,) of a function with gradient `slope` (q,) in the log scales."""
        if not len(theta):
            return theta
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            scales = self.term.log_scales(theta)
            return torch.autograd.grad(scales @ slope.to(scales), theta)[0]


class RegressionEvidence(ClosedForm):
    """Of a series with terms under Gaussian noise, exact.

    The dynamics are followed by the log scales of every term; without them those of the start are
    taken, as where kernels are compared.
    """

    def __init__(self, series: RegressionSeries, terms: Terms) -> None:
        self.series, self.total, self._squares = series, series.total, 0.0
        self._start = terms.log_scales()

    def sites_at(self, dynamics: Sequence, parameters: Tensor) -> Sites:
        """Sites (n,), (n,) of the rows."""
        return self.series.gaussian_sites(math.exp(float(parameters[0])))

    def _condition(
        self, dynamics: Sequence, noise: float, rough: bool = False
    ) -> RegressionPosterior:
        weight = self.series.counts / noise
        return condition(self.series, dynamics, self._start, self.series.y, weight)

    def _misfit(self, q: RegressionPosterior, noise: float) -> float:
        return float(self.series.counts @ (q.mean - self.series.y) ** 2)


class RegressionElbo(SitesElbo):
    """Of a series with terms."""

    def __init__(
        self, series: RegressionSeries, offset: float, terms: Terms, likelihood: Likelihood
    ) -> None:
        super().__init__(series, likelihood, series.sums)
        self.series, self.offset, self._start = series, offset, terms.log_scales()

    def sites_at(self, dynamics: Sequence, parameters: Tensor) -> Sites:
        """Sites (n,), (n,) of the rows."""
        found = self.find(dynamics, parameters.to(self.series.y))
        return found.beta, found.weight

    def find(
        self, dynamics: Sequence, parameters: Tensor, knots: Knots = None, tol: float = ELBO_TOL
    ) -> SiteFit:
        """With a state at every time."""
        likelihood = self.likelihood.with_parameters(parameters)
        bound = _RegressionBound(self.series, likelihood, self.offset, dynamics, self._start)
        return climb(bound, start=self.sites, tol=tol)


class _RegressionBound(SeriesBound):
    """The ELBO as a function of the sites."""

    def __init__(
        self,
        series: RegressionSeries,
        likelihood: Likelihood,
        offset: float,
        dynamics: Sequence,
        start: Sequence[Tensor],
    ) -> None:
        super().__init__(series, likelihood, offset)
        self._dynamics, self._start = dynamics, start

    def infer(
        self, beta: Tensor, weight: Tensor
    ) -> tuple[RegressionPosterior, tuple[float, ...]] | None:
        """As of `SeriesBound`."""
        series: Any = self.series
        centre = centres(beta, weight)
        try:
            found = condition(series, self._dynamics, self._start, centre, weight)
        except NotPositiveDefiniteError:
            return None
        if not (math.isfinite(found.log_normalizer) and bool(found.mean.isfinite().all())):
            return None
        expected = sites_mean(beta, weight, found.mean, found.var, centre)
        return found, (expected, -found.log_normalizer)


def with_terms(series: Any, offset: float, terms: Terms, likelihood: Likelihood) -> Any:
    """The `Objective` of a series with terms."""
    if likelihood.is_gaussian:
        return RegressionEvidence(series, terms)
    return RegressionElbo(series, offset, terms, likelihood)


def left_by_terms(series: Series, found: Search, objective: Any) -> Series:
    """A series less what its terms, if there are any, are expected to add where a search ended."""
    if not isinstance(series, RegressionSeries):
        return series
    noise = math.exp(float(found.parameters[0]))
    dynamics = [each.dynamics() for each in found.components]
    *_, q = objective.objectives[0].assess(dynamics, noise)
    return replace(series, y=series.y - q.of_terms)


def condition(
    series: RegressionSeries,
    dynamics: Sequence,
    start: Sequence[Tensor],
    centre: Tensor,
    weight: Tensor,
) -> RegressionPosterior:
    """The posterior given sites (n,), (n,); log scales of `start` where the dynamics have none."""
    process, *scales = dynamics
    features: Any = series.features
    log_scales = torch.cat(list(scales or start)).to(features)
    columns = columns_of(process, series.gaps_of(process), weight, series.lags_of(process))
    sizes = [len(each) for each in scales]
    return RegressionPosterior(columns, features * log_scales.exp(), centre, weight, sizes)
