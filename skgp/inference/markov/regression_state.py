"""The posterior of a series with terms as what its data left: predictions, components, new rows."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.inference.markov.columns import ColumnStates, SeriesColumns, between
from skgp.inference.markov.filtering import FilterEnd, forecast_moments, running_sums
from skgp.inference.markov.posterior import Posterior, time_before
from skgp.inference.markov.regression import RegressionPosterior, RegressionSeries
from skgp.inference.markov.series import Series
from skgp.inference.markov.short_posterior import posterior_of
from skgp.inference.markov.states import SeriesState
from skgp.inference.markov.terms import Terms
from skgp.kernels.sde import Dynamics
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import constant_like, standard_normal
from skgp.linalg.small_matrices import matmul


class _Known(NamedTuple):
    dynamics: Dynamics
    process: Posterior  # of f given the coefficients at their mean
    columns: SeriesColumns
    C: Tensor  # (n, 1 + q) targets and scaled features
    found: RegressionPosterior
    states: ColumnStates
    scales: Tensor  # (q,)


@dataclass(frozen=True, kw_only=True)
class RegressionState(SeriesState):
    """Sites at the rows (n,), in the order of their times, with features: n (q + 3) numbers.

    Inputs are rows X (n, d) of all columns.
    """

    terms: Terms
    features: Tensor  # (n, q), before their scales

    @cached_property
    def posterior(self) -> _Known:
        """All that predictions need."""
        dynamics, times, weight = self.form.at(), self.times, self.weight
        scales = self._scales
        columns = SeriesColumns(dynamics, dynamics.gaps(times), weight)
        centre, Psi = centres(self.beta, weight), self.features * scales
        C = torch.cat([centre[:, None], Psi], 1)
        found = RegressionPosterior(columns, Psi, centre, weight, self.terms.sizes)
        process = posterior_of(dynamics, times, weight * (centre - Psi @ found.u), weight)
        states = found.states
        assert isinstance(states, ColumnStates)
        return _Known(dynamics, process, columns, C, found, states, scales)

    @cached_property
    def end(self) -> FilterEnd:
        """The filter after the last observation."""
        known = self.posterior
        mean = known.columns.filtered(known.C)[..., -1]
        arrays = mean, known.process.end[1], known.found.gram
        return FilterEnd(float(self.times[-1]), *(each.cpu().numpy() for each in arrays))

    def past_moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The same given what was observed before each time alone, coefficients included."""
        known, x = self.posterior, self._times(X)
        row, Psi = known.dynamics.observation_at(x), self._terms(X)
        left = torch.searchsorted(self.times, x)
        before = (left - 1).clamp(min=0)
        since = x - time_before(known.dynamics, self.times, left)
        F, _ = known.dynamics.transition(since.clamp(min=0))
        states = matmul(F, known.columns.filtered(known.C)[..., before] * (left > 0))
        cov = known.process.past(x)[1]
        mean, var = torch.empty_like(x), torch.empty_like(x)
        v, g = known.columns.whiten(known.C)
        for rows, gram in running_sums(v, g, left):
            given = states[..., rows], cov[..., rows], gram, Psi[rows]
            mean[rows], var[rows] = forecast_moments(row, *given)
        return mean + self.offset, var

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f and terms at any rows, each (n,)."""
        x = self._times(X)
        if self._is_ahead(x):
            return self._ahead(x, self.terms.features(X) * self._scales)
        known = self.posterior
        row = known.dynamics.observation_at(x)
        mean, away = self._about(X, row[None])
        var = known.process.marginals(x)[1] + away[:, 0].square().sum(1)
        return mean[:, 0] + self._terms(X) @ known.found.u + self.offset, var

    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n)."""
        away = self._apart(X)
        process = self.posterior.process.covariance(self._times(X))[1]
        return self.moments(X)[0], process + away @ away.T

    def samples(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws, (n, n_samples)."""
        known = self.posterior
        away = self._apart(X)
        noise = standard_normal((away.shape[1], n_samples), generator, X.dtype)
        process = known.process.sample(self._times(X), n_samples, generator)
        fixed = self._terms(X) @ known.found.u + self.offset
        return process + fixed[:, None] + away @ noise

    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p): of the kernel's summands, then of the terms."""
        known = self.posterior
        rows = self._summand_rows(X)
        means, away = self._about(X, rows, with_terms=False)
        var = known.process.latent(self._times(X), rows)[1] + away.square().sum(2)
        Psi, found, start = self._terms(X), known.found, 0
        columns = [means], [var]
        for size in self.terms.sizes:
            part = torch.zeros_like(Psi)
            part[:, start : start + size] = Psi[:, start : start + size]
            start += size
            columns[0].append((part @ found.u)[:, None])
            columns[1].append(found.by_root(part).square().sum(1, keepdim=True))
        mean, variance = (torch.cat(each, 1) for each in columns)
        return mean, variance

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance, (q,) and (q, q), before their scales."""
        known = self.posterior
        root = known.found.by_root(torch.diag(known.scales))
        return known.scales * known.found.u, root @ root.T

    def with_rows(self, series: Series, likelihood: Likelihood) -> "RegressionState":
        """The posterior given more rows under Gaussian noise: O(n) at the next prediction.

        ValueError of other likelihoods.
        """
        if not likelihood.is_gaussian:
            raise ValueError(
                "partial_fit with covariates goes on under Gaussian noise alone. Call fit with all "
                "rows."
            )
        assert isinstance(series, RegressionSeries) and series.features is not None
        weight = series.counts / likelihood.additive_variance()
        new = series.times, weight * (series.y - self.offset), weight, series.features
        old = self.times, self.beta, self.weight, self.features
        times, *columns = (torch.cat(pair) for pair in zip(old, new, strict=True))
        if float(series.times[0]) < float(self.times[-1]):
            times, order = times.sort(stable=True)
            self.form.at().gaps(times)  # ValueError before an origin, while all is as it was
            columns = [column[order] for column in columns]
        beta, weight, features = columns
        joined = replace(self, times=times, beta=beta, weight=weight, features=features)
        C = torch.cat([(series.y - self.offset)[:, None], series.features * self._scales], 1)
        return self._continued(joined, series.times, C, new[2])

    @property
    def _scales(self) -> Tensor:
        """Of the coefficients, (q,)."""
        return constant_like(torch.cat(self.terms.log_scales()).exp(), self.times)

    def _times(self, X: Tensor) -> Tensor:
        return X[:, self.terms.time].contiguous()

    def _terms(self, X: Tensor) -> Tensor:
        """Scaled features (n, q)."""
        return self.terms.features(X) * self.posterior.scales

    def _apart(self, X: Tensor) -> Tensor:
        """How f and terms at rows jointly depend on u, (n, q) times draws of N(0, I)."""
        row = self.posterior.dynamics.observation_at(X)
        return self.terms.apart(X, self._about(X, row[None])[1][:, 0])

    def _about(self, X: Tensor, rows: Tensor, *, with_terms: bool = True) -> tuple[Tensor, Tensor]:
        """Means (n, p) of projections (p, d) of the state, and how they and the terms depend on u.

        The latter (n, p, q) times draws of N(0, I).
        """
        known = self.posterior
        s = between(known.dynamics, self.times, known.states, self._times(X))
        projected = torch.einsum("pd,dsn->nps", rows, s)
        away = -projected[..., 1:]
        if with_terms:
            away = away + known.found.by_root(self._terms(X))[:, None]
        return projected[..., 0], away


def centres(beta: Tensor, weight: Tensor) -> Tensor:
    """Tops (n,) of sites; 0 where they have none."""
    return torch.where(weight == 0, 0.0, beta / torch.where(weight == 0, 1.0, weight))
