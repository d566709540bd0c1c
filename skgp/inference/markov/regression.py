r"""A series with terms, f beside features with Gaussian coefficients, and its posterior.

.. math:: \eta = f + \Psi u, \quad u \sim N(0, I), \qquad c = \eta + N(0, \Omega^{-1}),

with the scales of the coefficients in :math:`\Psi = \Phi S^{1/2}` (:mod:`.terms`). With V of
:mod:`.columns`, :math:`A = I + \Psi^\top V^{-1} \Psi`, :math:`\hat u = A^{-1} \Psi^\top V^{-1} c`
and :math:`e = c - \Psi \hat u`,

.. math:: \log N(c; 0, V + \Psi \Psi^\top) = -\tfrac12 \big( e^\top V^{-1} e + \hat u^\top \hat u
          + \log |A| + \log |2 \pi V| \big),

.. math:: \partial = \tfrac12 \alpha^\top \partial V \alpha
          - \tfrac12 \operatorname{tr} V^{-1} \partial V
          + \tfrac12 \sum_j a_j^\top \partial V a_j, \qquad
          \frac{\partial}{\partial \log s_k} = \hat u_k^2 - 1 + (A^{-1})_{kk},

:math:`\alpha = V^{-1} e`, and :math:`a_j` the columns of :math:`V^{-1} \Psi A^{-1/2}`. Wide scales
make it, but for a constant, the restricted likelihood of a diffuse prior [1]_. Wherever
:math:`k_* = \operatorname{cov}(f_*, f)`,

.. math:: E \eta_* = k_*^\top \alpha + \psi_*^\top \hat u, \quad
          V \eta_* = V[f_* \mid u] + w_*^\top A^{-1} w_*, \quad w_* = \psi_* - \Psi^\top V^{-1} k_*,

O(n (1 + q) d^2 + n q^2) after one run of the smoother. Rows of equal times stay apart, as their
features differ.

References
----------
.. [1] de Jong (1991), The diffuse Kalman filter.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.inference.markov.columns import ColumnStates, DenseColumns, SeriesColumns, between
from skgp.inference.markov.exact_sites import posterior_of
from skgp.inference.markov.posterior import Posterior, time_before
from skgp.inference.markov.series import Series
from skgp.inference.markov.states import FilterEnd, SeriesState, forecast_moments, running_sums
from skgp.inference.markov.terms import Terms
from skgp.kernels.sde import Dynamics
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import constant_like, standard_normal
from skgp.linalg.small_matrices import matmul


@dataclass(frozen=True)
class RegressionSeries(Series):
    """Rows in the order of their times, equal ones apart, with features."""

    features: Tensor | None = None  # (n, q), before their scales

    def rows(self, rows: Tensor, breaks: Tensor | None = None) -> "RegressionSeries":
        """The series of some rows (k,), rising; `breaks` are positions among them."""
        columns = self.weight, self.log_exposure, self.features
        weight, exposure, features = (None if c is None else c[rows] for c in columns)
        return RegressionSeries(
            self.times[rows], None, self.y[rows], weight, breaks, exposure, features
        )


def make_regression_series(
    x: Tensor,
    y: Tensor,
    features: Tensor,
    weight: Tensor | None = None,
    log_exposure: Tensor | None = None,
) -> RegressionSeries:
    """Sort rows (n,) with features (n, q) by time."""
    x, order = x.double().sort(stable=True)
    weight, exposure = (None if c is None else c[order] for c in (weight, log_exposure))
    return RegressionSeries(x, None, y[order], weight, None, exposure, features[order])


class RegressionPosterior:
    """What sites at centres c (n,) with weights (n,) say of f and u; see the module.

    NotPositiveDefiniteError if negative weights leave no proper posterior.
    """

    def __init__(
        self,
        columns: SeriesColumns | DenseColumns,
        Psi: Tensor,
        centre: Tensor,
        weight: Tensor,
        sizes: list[int],
    ) -> None:
        self._columns, self._Psi, self._weight, self._sizes = columns, Psi, weight, sizes
        white, g = columns.whiten(torch.cat([centre[:, None], Psi], 1))
        self.gram = gram = white.T @ (g[:, None] * white)  # (1 + q, 1 + q)
        A = gram[1:, 1:] + torch.eye(Psi.shape[1], dtype=Psi.dtype, device=Psi.device)
        self.L, failed = torch.linalg.cholesky_ex(A)
        if int(failed) or not bool(self.L.isfinite().all()):
            raise NotPositiveDefiniteError(
                "The precision of the coefficients of the terms is not finite or indefinite."
            )
        self.u = torch.cholesky_solve(gram[1:, :1], self.L)[:, 0]  # (q,)
        residual = white[:, 0] - white[:, 1:] @ self.u
        quadratic = float(g @ residual.square() + self.u @ self.u)
        half_log_det = columns.half_log_det + float(self.L.diagonal().log().sum())
        self.log_normalizer = -0.5 * quadratic - half_log_det
        # Those of e, then of Psi A^-1/2.
        self._white = torch.cat([residual[:, None], self.by_root(white[:, 1:])], 1)

    def by_root(self, features: Tensor) -> Tensor:
        """Scaled features (n, q) times ``A^-1/2``: their squares sum to variances."""
        return torch.linalg.solve_triangular(self.L, features.T, upper=False).T

    @cached_property
    def states(self) -> ColumnStates | Tensor:
        """Of the columns e and ``Psi A^-1/2``."""
        return self._columns.smooth(self._white)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (n,) of f + Psi u."""
        smoothed = self._columns.observe(self.states)  # type: ignore[arg-type]
        away = self.by_root(self._Psi) - smoothed[:, 1:]
        return smoothed[:, 0] + self.of_terms, self._columns.var + away.square().sum(1)

    @property
    def of_terms(self) -> Tensor:
        """Mean (n,) of Psi u."""
        return self._Psi @ self.u

    @property
    def mean(self) -> Tensor:
        """(n,)."""
        return self.moments[0]

    @property
    def var(self) -> Tensor:
        """(n,)."""
        return self.moments[1]

    @property
    def spread(self) -> float:
        """Sum of weight * var."""
        return float(self._weight @ self.var)

    def gradients(self) -> list[Tensor]:
        """Of the log normaliser in the dynamics' parameters, and in the log scales of each term.

        As many terms, of as many features, as `sizes` says.
        """
        pulled = self._columns.pull(self.states)  # type: ignore[arg-type]
        identity = torch.eye(len(self.L), dtype=self.L.dtype, device=self.L.device)
        slopes = self.u.square() - 1 + self.by_root(identity).square().sum(1)
        found = pulled - self._columns.half_trace
        return [found, *slopes.split(self._sizes)] if self._sizes else [found]


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
