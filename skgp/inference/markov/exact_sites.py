"""The best sites of a series, one at every time, and its posterior given them.

By the smoother, or of few times by one Cholesky factor, which keeps more digits than a filter.
"""

import math
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, from_numpy

from skgp.inference.defaults import DENSE_DRAWS, FILTER_RATIO, PREDICTED_ENTRIES
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.series import Lags, Series, few_times
from skgp.inference.markov.short import DensePosterior, DensePrior
from skgp.inference.markov.sites import SeriesBound, SiteFit, climb, sites_mean
from skgp.inference.markov.smoother import SitesEvidence, evidence
from skgp.kernels.sde import Dynamics
from skgp.kernels.sde_block import Block
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import semidefinite_root
from skgp.linalg.runtime import standard_normal


def fit_sites(
    dynamics: Dynamics,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float = 0.0,
    base: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> SiteFit:
    """Find the Gaussian process of the greatest ELBO, for fixed hyper-parameters.

    Parameters
    ----------
    dynamics : Dynamics
        The kernel: ``skgp.kernels.state_space(kernel).at()``.
    series : Series
        Of m distinct times, see :func:`.make_series`.
    likelihood : Likelihood
        The same for all observations: its parameters are scalars.
    offset : float, default=0.0
        Prior mean of f.
    base : tuple of Tensor of shape (m,), optional
        Fixed sites besides those sought, such as those of earlier observations.
    **options
        ``start`` (initial sites), ``max_iter=50`` (evaluations), ``tol=1e-6`` (expected gain in
        nats per observation below which the search ends) and ``callback``.

    Returns
    -------
    SiteFit
        ``beta`` and ``weight`` (m,), the sites; ``elbo``, in nats; ``posterior``, with ``mean`` and
        ``var`` (m,) of f less its prior mean, and ``parameter_gradient`` (q,): that of log Z with
        all sites held.

    Notes
    -----
    O(m d^3 + n) per sweep, for d states. Labels and counts take about five sweeps where times are
    dense and ten where they are sparse; prior variances of 100 may take 50.
    """
    bound = _ExactBound(dynamics, series, likelihood, offset, base)
    if bound.prior is None or base is not None:
        return climb(bound, **options)
    if options.get("start") is not None:
        options["start"] = tuple(each.numpy() for each in options["start"])
    with np.errstate(all="ignore"):  # as of tensors
        found = climb(_ShortBound(bound), **options)
    arrays: dict[str, Any] = {each.name: getattr(found, each.name) for each in fields(found)}
    arrays = {k: torch.from_numpy(v) for k, v in arrays.items() if isinstance(v, np.ndarray)}
    return replace(found, **arrays)


class _ExactBound(SeriesBound):
    """Inference by the smoother."""

    def __init__(
        self,
        dynamics: Dynamics,
        series: Series,
        likelihood: Likelihood,
        offset: float,
        base: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__(series, likelihood, offset)
        self._dynamics, self._base, self._before = dynamics, base, 0.0
        H = dynamics.observation
        self.variance = float(H @ dynamics.stationary @ H)
        lags, self._gaps = series.lags_of(dynamics), series.gaps_of(dynamics)
        self.prior = None if lags is None else DensePrior(dynamics, lags)
        if base is not None:
            self._before = evidence(dynamics, self._gaps, *base).log_normalizer

    def infer(self, beta: Tensor, weight: Tensor) -> tuple[SitesEvidence, tuple[float, ...]] | None:
        if self._base is not None:
            beta, weight = beta + self._base[0], weight + self._base[1]
        centre = self._centre(beta, weight)
        try:
            found = evidence(self._dynamics, self._gaps, beta, weight, centre, prior=self.prior)
        except NotPositiveDefiniteError:
            return None
        if not (math.isfinite(found.log_normalizer) and bool(found.mean.isfinite().all())):
            return None
        moments = found.mean, found.var
        divergence = [sites_mean(beta, weight, *moments, centre), -found.log_normalizer]
        if self._base is not None:
            # Of the posterior of all rows from that of those before.
            divergence += [self._before, -sites_mean(*self._base, *moments)]
        return found, tuple(divergence)

    def _centre(self, beta: Tensor, weight: Tensor) -> Tensor:
        """Tops of the sites that weigh more than the prior, else 0: log Z is taken from there.

        Little noise would else make terms in log Z and in what the sites expect that cancel.
        """
        return torch.where(weight * self.variance > 1, beta / weight, 0.0)


class _ShortBound(SeriesBound):
    """The same of few times, in arrays."""

    def __init__(self, exact: _ExactBound) -> None:
        self.series, self.likelihood, self.offset = exact.series, exact.likelihood, exact.offset
        self.y, self.total, self._exact = exact.y, exact.total, exact
        self._index, self._weight = (
            None if each is None else each.numpy()
            for each in (exact.series.index, exact.series.weight)
        )

    def infer(self, beta: Any, weight: Any) -> tuple[Any, tuple[float, ...]] | None:
        prior = self._exact.prior
        assert prior is not None
        if not prior.suits(weight):
            return self._exact.infer(torch.from_numpy(beta), torch.from_numpy(weight))
        centre = np.zeros_like(beta)
        np.divide(beta, weight, out=centre, where=weight * self._exact.variance > 1)
        try:
            found = DensePosterior(prior, beta, weight, centre)
        except NotPositiveDefiniteError:
            return None
        mean: Any = found.mean.numpy()
        var: Any = found.var.numpy()
        if not (math.isfinite(found.log_normalizer) and np.isfinite(mean).all()):
            return None
        return found, (sites_mean(beta, weight, mean, var, centre), -found.log_normalizer)

    def __call__(self, beta: Any, weight: Any) -> SiteFit | None:
        point = super().__call__(beta, weight)
        if point is None:
            return None
        names = ("mean", "var", "slope", "curvature")
        rows: dict[str, Any] = {name: getattr(point, name).numpy() for name in names}
        return replace(point, **rows)

    def collect(self, rows: Any) -> Any:
        rows = np.asarray(rows)
        rows = rows if self._weight is None else rows * self._weight
        if self._index is None:
            return rows
        return np.bincount(self._index, rows, len(self.series.times))

    def fit(self, expected: Any) -> float:
        return float(self.collect(expected).sum())

    def moments(self, point: SiteFit) -> tuple[Any, Any]:
        return point.posterior.mean.numpy(), point.posterior.var.numpy()


def posterior_of(dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor) -> Posterior:
    """What sites say of f at any times, by whichever route; as of `Posterior`."""
    if x.device.type == "cpu" and 0 < len(x) <= few_times(dynamics.n_states):
        lags = Lags.of(x.diff(prepend=x[:1]))
        if lags is not None and dynamics.origin is not None:
            lags = lags.after(x.numpy() - dynamics.origin)
        if lags is not None and not bool((weight < 0).any()):
            short = ShortPosterior(DensePrior(dynamics, lags), dynamics, x, beta, weight)
            if short.has_factor:
                return short
    return Posterior(dynamics, x, beta, weight)


class ShortPosterior(Posterior):
    """The same of a short series; the states alone are those of the filter.

    Of RBF it is the posterior of that process, and not of one that approximates it.
    """

    def __init__(
        self, prior: DensePrior, dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor
    ) -> None:
        self._prior = prior
        super().__init__(dynamics, x, beta, weight)

    def _prepare(self) -> None:
        """Nothing: the filter runs where it is asked for."""

    @property
    def has_factor(self) -> bool:
        """Whether there is one in spite of rounding; some 1e-14 of the variance is noise enough."""
        try:
            return self._dense is not None
        except NotPositiveDefiniteError:
            return False

    @cached_property
    def _dense(self) -> DensePosterior:
        beta, weight = self._beta.numpy(), self._weight.numpy()
        centre = np.divide(beta, weight, out=np.zeros_like(beta), where=weight > 0)
        return DensePosterior(self._prior, beta, weight, centre)

    @cached_property
    def _blocks(self) -> list[Block]:
        return [block for _, block in self._dynamics.blocks]

    def _leaves(self, x: Tensor) -> bool:
        """Whether the filter, which is quicker, predicts at so many times as well."""
        exact = not self._dynamics.is_approximate
        many = len(x) * len(self.times) > PREDICTED_ENTRIES
        return many and exact and self._prior.ratio(self._weight.numpy()) < FILTER_RATIO

    def marginals(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at times in any order, each (m,)."""
        if self._leaves(x_new):
            return super().marginals(x_new)
        return self._of_parts(x_new, self._blocks)

    def latent(self, x_new: Tensor, projections: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (m, p) of sums of blocks, which the projections (p, d) observe."""
        if self._leaves(x_new):
            return super().latent(x_new, projections)
        found = []
        for row in projections:
            parts = [block for s, block in self._dynamics.blocks if bool(row[s].any())]
            found.append(self._of_parts(x_new, parts))
        mean, var = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return mean, var

    def covariance(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (m,) and joint covariance (m, m) of f at times in any order."""
        mean, half = self._dense.given(self._across(x_new, self._blocks))
        x = x_new.numpy()
        covariance = self._prior_of(self._blocks, x[:, None], x) - half.T @ half
        covariance.diagonal().clamp_(min=0)
        return mean, covariance

    def sample(self, x_new: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at times (m,) in any order, (m, n_samples).

        Draws of the prior less what they would have the data say [1]_: O(m n S). Of an approximate
        process, up to some thousand times, by the root of the covariance.

        References
        ----------
        .. [1] Wilson et al. (2021), Pathwise conditioning of Gaussian processes, JMLR 22.
        """
        if self._dynamics.is_approximate and len(x_new) <= DENSE_DRAWS:
            mean, covariance = self.covariance(x_new)
            noise = standard_normal((len(mean), n_samples), generator, mean.dtype)
            return mean[:, None] + semidefinite_root(covariance) @ noise
        nothing, n = torch.zeros_like(self.times), len(self.times)
        prior = Posterior(self._dynamics, self.times, nothing, nothing)
        f = prior.sample(torch.cat([self.times, x_new]), n_samples, generator)
        noise = standard_normal((n, n_samples), generator, f.dtype)
        seen = self._dense.regress(f[:n], noise)  # (n, S)
        across = self._across(x_new, self._blocks)
        return f[n:] + self.marginals(x_new)[0][:, None] - across @ seen

    def _of_parts(self, x: Tensor, parts: list[Block]) -> tuple[Tensor, Tensor]:
        """Mean and variance (m,) of a sum of blocks; differentiable."""
        found = []
        for some in x.split(max(1, PREDICTED_ENTRIES // len(self.times))):
            mean, half = self._dense.given(self._across(some, parts))
            at = some.detach().numpy()
            var = self._prior_of(parts, at, at)
            if some.requires_grad:
                moving = [block for block in parts if not block.is_stationary]
                slope = 2 * self._prior_of(moving, at, at, slope=True)
                var = var + slope * (some - some.detach())
            found.append((mean, (var - half.square().sum(0)).clamp_min(0.0)))
        means, variances = zip(*found, strict=True)
        return torch.cat(means), torch.cat(variances)

    def _across(self, x: Tensor, parts: list[Block]) -> Tensor:
        """Prior covariances (k, n) of parts at times (k,) with those of the series."""
        at = x.detach()[:, None]
        pair = at.numpy(), self.times.numpy()
        k = self._prior_of(parts, *pair)
        if not x.requires_grad:
            return k
        return k + self._prior_of(parts, *pair, slope=True) * (x[:, None] - at)

    def _prior_of(
        self, parts: list[Block], x: np.ndarray, z: np.ndarray, *, slope: bool = False
    ) -> Tensor:
        """Sum over parts of their covariances at times x and z, or of the slopes of these in x."""
        found, origin = np.zeros(np.broadcast_shapes(x.shape, z.shape)), self._dynamics.origin
        for block in parts:
            found += block.between(x, z, origin or 0.0, slope=slope)
        return from_numpy(found)
