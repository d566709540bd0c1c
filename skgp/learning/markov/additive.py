r"""What the hyper-parameters of additive models are judged by: evidence and ELBO of the sum.

And the interactions that such a model leaves out, by Rao's score of their variance. Where a search
ended observations are taken for Gaussian ones of f, :math:`z = f + g / W` with precisions W, of g
the derivative of the log-likelihood at the posterior mean and W its Fisher information. With
:math:`P = (\sum_j K_j + W^{-1})^{-1}` and :math:`\alpha = P z`, a process of columns i and j
together, of covariance :math:`D = \bar K_i \circ \bar K_j` and variance v, promises

.. math:: \frac{u^2}{2 (A_{vv} - A_{v \theta} A_{\theta \theta}^{-1} A_{\theta v})}, \qquad
          u = \tfrac12 (\alpha^\top D \alpha - \mathrm{tr}\, P D) > 0

nats, with the average information A of v, of the variances of all components and of the noise.
:math:`\bar K` are correlations less their means over rows, so that D has no part of one column.

A series with terms beside its process is such a sum as well: its evidence, and the parameters of
the terms as those of components.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import MAX_RATIO
from skgp.inference.markov.additive import AdditiveBound, DistinctRows, Rows
from skgp.inference.markov.additive_bins import (
    AdditivePosterior,
    AdditiveStatistics,
    Tables,
    bin_priors,
)
from skgp.inference.markov.additive_sites import RowsPosterior, condition_rows
from skgp.inference.markov.additive_states import AdditiveState, binned_state
from skgp.inference.markov.columns import columns_of
from skgp.inference.markov.regression import RegressionPosterior, RegressionSeries, centres
from skgp.inference.markov.series import Series
from skgp.inference.markov.short import DensePrior
from skgp.inference.markov.short_gaussian import ShortRegression
from skgp.inference.markov.sites import SeriesBound, SiteFit, climb, sites_mean
from skgp.inference.markov.terms import Term, Terms
from skgp.kernels import gram
from skgp.learning.markov.defaults import (
    ADDITIVE_TOL,
    ELBO_TOL,
    FISHER_RIDGE,
    INTERACTION_ENTRIES,
    INTERACTION_ROWS,
    LEAST_INFORMATION,
    LEAST_INTERACTION,
    PEAK_CHANCE,
    SITES_TOL,
)
from skgp.learning.markov.objectives import (
    ClosedForm,
    Component,
    Knots,
    Processes,
    SeriesEvidence,
    SitesElbo,
)
from skgp.learning.markov.search import Search
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import jittered_cholesky


def check_columns(kernels: Sequence[Any]) -> None:
    """Refuse kernels, one a column, that an additive model has no state space of."""
    for kernel in kernels:
        dynamics = Component.of(kernel).dynamics()
        dynamics.require_stationary("an additive model")
        if dynamics.shape_slopes:
            raise ValueError(
                f"kernel={kernel} has an SHO, which additive models do not take; use "
                "Cosine * Matern(nu=0.5), or a model of time alone."
            )


class BinnedEvidence(ClosedForm):
    """From the statistics of binned rows: exact (`joint`), or its bound by the mean field."""

    def __init__(self, statistics: AdditiveStatistics, offset: float, joint: bool) -> None:
        self.total, self._offset = statistics.weight, offset
        self._bins, self._joint = statistics.bins, joint
        self._cross = statistics.cross
        self._sums, self._squares = statistics.centred(offset)

    def _condition(
        self, dynamics: Processes, noise: float, rough: bool = False
    ) -> AdditivePosterior:
        tables = Tables(self._cross, 1 / noise, self._sums / noise)
        return AdditivePosterior(bin_priors(dynamics, self._bins.columns), tables, self._joint)

    def _misfit(self, q: AdditivePosterior, noise: float) -> float:
        return self._squares - float(q.mean @ (2 * self._sums - self._cross @ q.mean))

    def state(self, kernels: Sequence[Any], q: AdditivePosterior) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior of an evaluation."""
        return binned_state(kernels, q, self._bins, self._cross.diagonal(), self._offset)


class RowsEvidence(ClosedForm):
    """In the space of the distinct rows, in O(m^3)."""

    def __init__(self, rows: DistinctRows) -> None:
        self._rows, self.total = rows, rows.total
        # Targets less the prior mean, so that nothing cancels in their squares.
        self._y = rows.y - rows.offset
        self._linear, self._curved = rows.sums(self._y), rows.sums(torch.ones_like(rows.y))
        self._squares = float(rows.weighted(self._y**2).sum())
        self.state = rows.state

    def _condition(self, dynamics: Processes, noise: float, rough: bool = False) -> RowsPosterior:
        prior = self._rows.prior(dynamics)
        return condition_rows(prior, self._linear / noise, self._curved / noise)

    def _misfit(self, q: RowsPosterior, noise: float) -> float:
        residual = self._y - q.mean[self._rows.index]
        return float(self._rows.weighted(residual**2).sum())


class RowsElbo(SitesElbo):
    """Of an additive model.

    `tol` is that of the sites, in nats an observation, or `SITES_TOL` of that of the search, if
    that is more.
    """

    def __init__(
        self,
        rows: Rows,
        likelihood: Likelihood,
        *,
        max_iter: int = 50,
        tol: float = ADDITIVE_TOL,
        search_tol: float = 0.0,
    ) -> None:
        super().__init__(rows, likelihood, rows.weighted)
        self.rows, self.state = rows, rows.state
        self._max_iter, self._tol = max_iter, max(tol, SITES_TOL * search_tol)

    def find(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, tol: float = ELBO_TOL
    ) -> SiteFit:
        """To the tolerance of the sites."""
        bound = AdditiveBound(self.rows, dynamics, self.likelihood.with_parameters(parameters))
        return climb(bound, start=self.sites, max_iter=self._max_iter, tol=self._tol)


def rows_to_look_at(data: Data, n_components: int) -> Data:
    """Some of the rows that weigh, in main memory."""
    if data.weight is not None:
        data = data.take(data.weight > 0)
    most = min(INTERACTION_ROWS, int(math.sqrt(2 * INTERACTION_ENTRIES) / n_components))
    return data.take(torch.linspace(0, len(data) - 1, min(len(data), most)).long()).to("cpu")


def interaction_of(
    states: Sequence[AdditiveState], columns: Sequence[int], data: Data, likelihood: Likelihood
) -> tuple[int, int, float] | None:
    """Two columns that act together, of any target, as of `missed_interaction`.

    The data are those of the fit with all columns of X; `columns` are those that have a component.
    """
    if len(columns) < 2:
        return None
    some = rows_to_look_at(replace(data, y=data.y.reshape(len(data), -1)), len(columns))
    for state, y in zip(states, some.y.T, strict=True):
        rows = some.X[:, list(columns)]
        mean, at = state.mean(rows.to(state.device)).cpu(), replace(some, y=y)
        found = missed_interaction(state.kernels, at, mean, state.offset, likelihood)
        if found is not None:
            return columns[found[0]], columns[found[1]], found[2]
    return None


def missed_interaction(
    kernels: Sequence[Any], data: Data, mean: Tensor, offset: float, likelihood: Likelihood
) -> tuple[int, int, float] | None:
    """Two components that act together, and the nats per observation that this promises, if any.

    The data are few, of X (m, d) and y (m,), the posterior mean of f is (m,), and the kernels are
    of the components, each on its column of X. O(c m^3 + c^2 m^2).
    """
    m, c = len(data), len(kernels)
    K = torch.stack([gram(kernel, data.X) for kernel in kernels])  # (c, m, m)
    likelihood = likelihood.at(data.log_exposure)
    least = LEAST_INFORMATION / float(K.sum(0).diagonal().mean())
    noise = 1 / likelihood.fisher_information(mean).clamp(min=least)
    z = mean - offset + noise * likelihood.derivatives(data.y, mean)[0]
    gains = _gains(K, z, noise if data.weight is None else noise / data.weight).numpy()
    i, j = np.unravel_index(gains.argmax(), gains.shape)
    chance = math.log(c * (c - 1) / 2 / PEAK_CHANCE)
    if gains[i, j] < max(LEAST_INTERACTION * m, chance):
        return None
    return int(i), int(j), float(gains[i, j]) / m


def _gains(K: Tensor, z: Tensor, noise: Tensor) -> Tensor:
    """Of components' covariances (c, m, m) and observations (m,): nats (c, c), 0 but for i < j."""
    L = jittered_cholesky(K.sum(0) + torch.diag(noise)).factor
    P = torch.cholesky_inverse(L)
    alpha = P @ z
    alpha = alpha / max(1.0, float(z @ alpha) / len(z)) ** 0.5  # noise too small is no interaction
    known = torch.cat([(K @ alpha).T, (noise * alpha)[:, None]], 1)  # (m, c + 1), of theta
    centred = K - K.mean(1, keepdim=True) - K.mean(2, keepdim=True) + K.mean((1, 2), keepdim=True)
    spread = centred.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(K.dtype).tiny)
    centred = centred / spread[:, None, None]
    within = 0.5 * known.T @ P @ known
    within.diagonal().add_(FISHER_RIDGE)
    gains = K.new_zeros(len(K), len(K))
    for i in range(len(K) - 1):
        D = centred[i] * centred[i + 1 :]  # (c - i - 1, m, m)
        moved = (D @ alpha).T  # (m, c - i - 1)
        u = 0.5 * (alpha @ moved - (D * P).sum((1, 2)))
        turned = P @ moved
        across = 0.5 * known.T @ turned
        left = 0.5 * (moved * turned).sum(0) - (across * torch.linalg.solve(within, across)).sum(0)
        gains[i, i + 1 :] = u.clamp(min=0).square() / (2 * left)
    return gains.nan_to_num(0.0)


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

    def variances(self, theta: Tensor) -> Tensor:
        """As of `Component`: none."""
        return torch.zeros(len(self.dynamics(theta)), dtype=torch.float64)

    def pull(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Gradient in theta (t,) of a function with gradient `slope` (q,) in the log scales."""
        return slope.to(theta) @ self.term.slopes(theta)


class RegressionEvidence(SeriesEvidence):
    """Of a series with terms under Gaussian noise, exact.

    The dynamics are followed by the log scales of every term; without them those of the start are
    taken, as where kernels are compared.
    """

    series: RegressionSeries

    def __init__(self, series: RegressionSeries, terms: Terms) -> None:
        self.series, self.total, self._squares = series, series.total, 0.0
        self._start, self._centre = terms.log_scales(), series.y

    @cached_property
    def _beside(self) -> np.ndarray:  # type: ignore[override]
        Psi = self._scaled(self._start)
        return (Psi @ Psi.T).numpy()

    def _scaled(self, log_scales: Sequence[Tensor]) -> Tensor:
        """Psi (m, q)."""
        features: Any = self.series.features
        return features * torch.cat(list(log_scales)).exp()

    def sites_at(self, dynamics: Sequence, parameters: Tensor) -> Sites:
        """Sites (n,), (n,) of the rows."""
        return self.series.gaussian_sites(math.exp(float(parameters[0])))

    def assess(
        self, dynamics: Processes, noise: float, *, rough: bool = False
    ) -> tuple[float, float, Any]:
        """As of `ClosedForm`, dense where the series is short."""
        short = self._short_at(dynamics, noise)
        if short is None:
            return super().assess(dynamics, noise, rough=rough)
        return short.value, short.noise_slope, short

    def _short_at(self, dynamics: Sequence, noise: float) -> ShortRegression | None:
        process, *scales = dynamics
        lags = self.series.lags_of(process)
        if lags is None:
            return None
        Psi = self._scaled(scales or self._start).numpy()
        sizes = [len(each) for each in scales]
        try:
            found = ShortRegression(DensePrior(process, lags), Psi, self._rows.at(noise), sizes)
        except NotPositiveDefiniteError:
            return None
        return found if found.ratio <= MAX_RATIO else None

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
    """The `SeriesObjective` of a series with terms."""
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
