r"""Posteriors of a series as its kernel and the sites that its data left: predictions, new rows.

With sites at all times or, doubly sparse, at knots. The posterior so far, prior times sites, is the
prior of rows that come later, hyper-parameters kept. With Gaussian noise their sites are known at
once, and the result is that of all rows together. Of other likelihoods the sites of the new rows
are sought with those of old held, as a *base* of `fit_sites` or `fit_inducing`.

New times beyond the knots get knots of their own, as far apart as those before are in the middle.
Intervals that are new have no sites yet, and the site of what was the last interval, which tells of
the state at its inner end alone, is one of the interval that follows that state now: appending
zeros is exact.

The filter at the end of a series makes forecasts in O(1), and takes new observations in O(1) each.
Beyond the last time nothing but the state filtered there matters: mean and covariance, of each of S
columns (the targets and, of a series with terms, the scaled features), and the sums
:math:`\sum_n g_n v_n v_n^\top` of :mod:`.columns`, which give the coefficients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import ADDED_ITER, ADDED_TOL, FILTERED_ROWS, PER_SCALE
from skgp.inference.markov.conditionals import Conditionals, condition
from skgp.inference.markov.exact_sites import fit_sites, posterior_of
from skgp.inference.markov.inducing import draw_jointly, fit_inducing, shortest_scale
from skgp.inference.markov.knots import Chain, PairPosterior, PairSites, infer_pairs
from skgp.inference.markov.series import Series
from skgp.kernels.sde import Dynamics, StateSpace, state_space
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import TensorState, constant_like, tile_rows


@dataclass(frozen=True)
class FilterEnd:
    """The filter after the last of some observations."""

    time: float
    mean: np.ndarray  # (d, S)
    cov: np.ndarray  # (d, d)
    gram: np.ndarray  # (S, S)

    def advanced(self, dynamics: Dynamics, times: Tensor, C: Tensor, weight: Tensor) -> "FilterEnd":
        """After more observations, not earlier (k,), of columns C (k, S) and weights (k,)."""
        gaps = times.diff(prepend=times.new_tensor([self.time]))
        F, Q = (each.movedim(-1, 0).numpy() for each in dynamics.transition(gaps.cpu()))
        H = dynamics.observation.numpy()
        m, P, gram = self.mean, self.cov, self.gram
        for F_j, Q_j, c, w in zip(F, Q, C.cpu().numpy(), weight.cpu().numpy(), strict=True):
            m, P = F_j @ m, F_j @ P @ F_j.T + Q_j
            k, v = P @ H, c - H @ m
            g = w / (1 + w * (H @ k))
            m, P = m + np.outer(k, g * v), P - g * np.outer(k, k)
            gram = gram + g * np.outer(v, v)
        return replace(self, time=float(times[-1]), mean=m, cov=P, gram=gram)

    def forecast(self, dynamics: Dynamics, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, (d, S, n) and (d, d, n), at times x (n,) not before the last observation.

        And the sums (S, S), which tell of the coefficients.
        """
        F, Q = dynamics.transition(x - self.time)
        mean, cov, gram = (torch.from_numpy(a).to(x) for a in (self.mean, self.cov, self.gram))
        moved = torch.einsum("ijn,jk,lkn->iln", F, cov, F)
        return torch.einsum("ijn,js->isn", F, mean), moved + Q, gram


def coefficients(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (..., q) and Cholesky factor (..., q, q) of the precision, from sums (..., S, S).

    The first column is of the targets.
    """
    A = gram[..., 1:, 1:] + torch.eye(gram.shape[-1] - 1, dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky(A)
    return torch.cholesky_solve(gram[..., 1:, :1], L)[..., 0], L


def forecast_moments(
    row: Tensor, mean: Tensor, cov: Tensor, gram: Tensor, Psi: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (n,) of ``row s + Psi u``, from states as of `forecast`.

    `row` (d,), scaled features Psi (n, q); the sums are (S, S), or (n, S, S).
    """
    f = torch.einsum("d,dsn->ns", row, mean)
    u, L = coefficients(gram)
    away = Psi - f[:, 1:]
    root = torch.linalg.solve_triangular(L, away[..., None], upper=False)[..., 0]
    var = torch.einsum("i,ijn,j->n", row, cov, row) + root.square().sum(-1)
    return f[:, 0] + (away * u).sum(-1), var


def running_sums(v: Tensor, g: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Sums of ``g v v'`` over the first points, as many as the counts (k,) say, part by part.

    Yields places among the counts (p,), and the sums there (p, S, S); v is (n, S), g (n,).
    """
    S = v.shape[1]
    size, total = tile_rows(8 * 3 * S * S), v.new_zeros(S, S)
    for start in range(0, len(v) + 1, size):
        rows = slice(start, start + size)
        outer = (g[rows, None] * v[rows])[:, :, None] * v[rows, None]
        sums = total + torch.cat([torch.zeros_like(total)[None], outer.cumsum(0)])
        here = ((counts >= start) & (counts < start + size)).nonzero()[:, 0]
        for places in here.split(size):
            yield places, sums[counts[places] - start]
        total = sums[-1]


class LazyState(TensorState):
    """What predictions need is worked out at the first of them and is not pickled."""

    def _lasting(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("posterior", "form")}


@dataclass(frozen=True)
class SeriesState(LazyState):
    """Posterior of f given one Gaussian site a time: 3 m numbers, worked out in O(m d^3)."""

    kernel: Any  # of f, without noise
    times: Tensor  # (m,) distinct, rising
    beta: Tensor  # (m,)
    weight: Tensor  # (m,)
    offset: float = 0.0  # prior mean of f
    tolerance: float | None = None  # of the state-space form

    @cached_property
    def form(self) -> StateSpace:
        """The kernel in state space."""
        return state_space(self.kernel, tolerance=self.tolerance)

    @cached_property
    def posterior(self) -> Any:
        """As of `posterior_of`."""
        return posterior_of(self.form.at(), self.times, self.beta, self.weight)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of f at any times, (n,)."""
        return self.moments(x)[0]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at any times, each (n,); O(n) of times that lie ahead."""
        if self._is_ahead(x):
            return self._ahead(x, x.new_empty(len(x), 0))
        mean, var = self.posterior.marginals(x)
        return mean + self.offset, var

    # ---- the filter at the end, kept by observations that come later

    @cached_property
    def end(self) -> FilterEnd:
        """The filter after the last observation."""
        m, P = (each.cpu().numpy() for each in self.posterior.end)
        return FilterEnd(float(self.times[-1]), m[:, None], P, np.zeros((1, 1)))

    def _is_ahead(self, times: Tensor) -> bool:
        """Whether the filter at the end answers for some times, and nothing else is known yet."""
        known = self.__dict__
        return "end" in known and "posterior" not in known and float(times.min()) >= self.end.time

    def _ahead(self, times: Tensor, Psi: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f and of terms of scaled features (n, q) at times ahead."""
        dynamics = self.form.at()
        forecast = self.end.forecast(dynamics, times)
        mean, var = forecast_moments(dynamics.observation_at(times), *forecast, Psi)
        return mean + self.offset, var

    def _continued(self, new: "SeriesState", times: Tensor, C: Tensor, weight: Tensor) -> Any:
        """The state with new observations, not before the last: its filter goes on from the end.

        They are columns (k, S) and weights (k,).
        """
        if len(times) <= FILTERED_ROWS and float(times[0]) >= float(self.times[-1]):
            new.__dict__["end"] = self.end.advanced(self.form.at(), times, C, weight)
        return new

    def past_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same given what was observed before each time alone."""
        m, P = self.posterior.past(x)
        row = self.form.at().observation_at(x)
        return row @ m + self.offset, torch.einsum("i,ijn,j->n", row, P, row)

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of f at any times."""
        mean, covariance = self.posterior.covariance(x)
        return mean + self.offset, covariance

    def samples(self, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at any times, (n, n_samples)."""
        return self.posterior.sample(x, n_samples, generator) + self.offset

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p) of the kernel's p top-level summands, without the offset."""
        return self.posterior.latent(x, self._summand_rows(x))

    def _summand_rows(self, x: Tensor) -> Tensor:
        """What observes the kernel's summands in the state, (p, d)."""
        return constant_like(torch.stack([row for _, row in self.form.summands()]), x)

    def with_rows(self, series: Series, likelihood: Likelihood) -> "SeriesState":
        """The posterior given more rows: sites at the union of the times, of equal ones added.

        O(m log m) for Gaussian noise, else O(m d^3) a step. NonFiniteLossError if the ELBO of the
        new rows is not finite where the search begins.
        """
        if likelihood.is_gaussian:
            return self._with_sites(series, likelihood.additive_variance())
        times, (beta, weight), new = self._union(series.times)
        index = new if series.index is None else new[series.index]
        rows = replace(series, times=times, index=index)
        base = beta, weight
        found = fit_sites(
            self.form.at(), rows, likelihood, offset=self.offset, base=base, tol=ADDED_TOL
        )
        return replace(self, times=times, beta=beta + found.beta, weight=weight + found.weight)

    def _with_sites(self, series: Series, noise: float) -> "SeriesState":
        """`with_rows` of Gaussian noise, whose sites do not depend on the posterior."""
        curved = series.counts / noise
        linear = series.totals / noise - self.offset * curved
        if float(series.times[0]) > float(self.times[-1]):
            pairs = (self.times, series.times), (self.beta, linear), (self.weight, curved)
            times, beta, weight = map(torch.cat, pairs)
        else:
            times, old, new = self._union(series.times)
            sites = zip(old, (linear, curved), strict=True)
            beta, weight = (site.index_add(0, new, added) for site, added in sites)
        joined = replace(self, times=times, beta=beta, weight=weight)
        return self._continued(joined, series.times, (linear / curved)[:, None], curved)

    def _union(self, new: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """All times (m,), rising, the sites (m,) there so far, and the places of the new times."""
        times, place = torch.unique(torch.cat([self.times, new]), return_inverse=True)
        self.form.at().gaps(times)  # ValueError before an origin, while all is as it was
        before, after = place.split([len(self.times), len(new)])
        zeros = torch.zeros_like(times)
        return times, [zeros.index_copy(0, before, s) for s in (self.beta, self.weight)], after


@dataclass(frozen=True)
class InducingState(LazyState):
    """Posterior of f given sites on the states at knots: 4 d^2 M numbers, whatever the rows."""

    kernel: Any  # of f, without noise
    knots: Tensor  # (M,) rising
    sites: PairSites
    offset: float = 0.0  # prior mean of f

    @cached_property
    def posterior(self) -> tuple[Dynamics, PairPosterior]:
        """The prior and q of the states at the knots."""
        dynamics = state_space(self.kernel).at()
        return dynamics, infer_pairs(Chain.of(dynamics, self.knots), self.sites)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of f at any times, (n,)."""
        return self.moments(x)[0]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at any times, each (n,)."""
        mean, var = self._at(x).marginals(self.posterior[1])
        return mean + self.offset, var

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of f at any times."""
        rows, pairs = self._at(x), self.posterior[1]
        return rows.marginals(pairs)[0] + self.offset, rows.covariance(pairs)

    def samples(self, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at any times, (n, n_samples); linear in n."""
        dynamics, pairs = self.posterior
        draws = draw_jointly(dynamics, self.knots, pairs, x, n_samples, generator)
        return draws + self.offset

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p) of the kernel's p top-level summands, without the offset."""
        pairs = self.posterior[1]
        rows = [constant_like(row, x) for _, row in state_space(self.kernel).summands()]
        found = [self._at(x, row).marginals(pairs) for row in rows]
        mean, var = (torch.stack(each, -1) for each in zip(*found, strict=True))
        return mean, var

    def with_rows(self, series: Series, likelihood: Likelihood) -> "InducingState":
        """The posterior given more rows, in O(M d^3) and as much a row and step; see above."""
        dynamics = state_space(self.kernel).at()
        state = self._with_knots_for(series.times, dynamics)
        found = fit_inducing(
            dynamics,
            state.knots,
            series,
            likelihood,
            offset=self.offset,
            base=state.sites,
            # Of Gaussian noise the first sites are the best.
            max_iter=1 if likelihood.is_gaussian else ADDED_ITER,
            tol=ADDED_TOL,
        )
        return replace(state, sites=found.posterior.sites)

    def _at(self, x: Tensor, observation: Tensor | None = None) -> Conditionals:
        return condition(self.posterior[0], self.knots, x, observation)

    def _with_knots_for(self, times: Tensor, dynamics: Dynamics) -> "InducingState":
        """The same posterior, with knots as far as the times (rising) reach."""
        knots = self.knots
        spacing = (
            float(knots.diff().median()) if len(knots) > 1 else shortest_scale(dynamics) / PER_SCALE
        )
        after = _beyond(times[times > knots[-1]], float(knots[-1]), spacing)
        before = -_beyond(-times[times < knots[0]].flip(0), -float(knots[0]), spacing).flip(0)
        pad = len(before), len(after)
        sites = PairSites(
            torch.nn.functional.pad(self.sites.linear, pad),
            torch.nn.functional.pad(self.sites.precision, pad),
        )
        return replace(self, knots=torch.cat([before, knots, after]), sites=sites)


def _beyond(times: Tensor, edge: float, spacing: float) -> Tensor:
    """The last of the times (rising, beyond the edge) in each cell of a width, but for close ones.

    The first cell begins at the edge. A time less than half a cell away needs no knot.
    """
    if not len(times) or not math.isfinite(spacing):
        return times[:0]
    cell = ((times - edge) / spacing).floor()
    last = torch.ones_like(cell, dtype=torch.bool)
    last[:-1] = cell.diff() != 0
    found = times[last]
    return found[found.diff(prepend=found.new_tensor([edge])) > spacing / 2]
