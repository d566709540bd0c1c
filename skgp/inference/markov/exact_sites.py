"""The best sites of a series, one at every time, by the smoother or of few times densely."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.series import Series
from skgp.inference.markov.short import DensePosterior, DensePrior
from skgp.inference.markov.sites import SeriesBound, SiteFit, climb, sites_mean
from skgp.inference.markov.smoother import SitesEvidence, evidence
from skgp.kernels.sde import Dynamics
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError


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
        """As of `SeriesBound`."""
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
        """Evaluate the bound."""
        point = super().__call__(beta, weight)
        if point is None:
            return None
        names = ("mean", "var", "slope", "curvature")
        rows: dict[str, Any] = {name: getattr(point, name).numpy() for name in names}
        return replace(point, **rows)

    def collect(self, rows: Any) -> Any:
        """Sums at each time, (m,)."""
        rows = np.asarray(rows)
        rows = rows if self._weight is None else rows * self._weight
        if self._index is None:
            return rows
        return np.bincount(self._index, rows, len(self.series.times))

    def fit(self, expected: Any) -> float:
        """Weighted sum of the rows' expected log-densities (n,)."""
        return float(self.collect(expected).sum())

    def moments(self, point: SiteFit) -> tuple[Any, Any]:
        """At each time."""
        return point.posterior.mean.numpy(), point.posterior.var.numpy()
