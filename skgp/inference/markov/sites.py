"""Inference of a series under any likelihood, with one Gaussian site a time (:mod:`.natural`)."""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.defaults import LEAST_SHARE
from skgp.inference.markov.dense import DensePosterior, DensePrior
from skgp.inference.markov.natural import Point, SiteBound, SiteFit, climb, expectations
from skgp.inference.markov.series import Series
from skgp.inference.markov.smoother import Evidence, evidence
from skgp.kernels.sde_dynamics import Dynamics
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError

__all__ = ["SeriesBound", "fit_sites", "left_out_moments", "sites_mean"]


def fit_sites(
    dynamics: Dynamics,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float = 0.0,
    base: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> SiteFit:
    r"""Find the Gaussian process nearest to the posterior, for fixed hyper-parameters.

    O(m d^3 + n) a sweep, for d states. Labels and counts take about five sweeps where times are
    dense and ten where they are sparse; prior variances of 100 may take 50.

    Parameters
    ----------
    dynamics : Dynamics
        Of f, from `skgp.kernels.state_space`.
    series : Series
        m times and n rows.
    likelihood : Likelihood
        One that takes all rows alike: its parameters are scalars. Unimodal in f.
    offset : float, default=0.0
        Prior mean of f.
    base : (Tensor, Tensor) of shapes (m,), optional
        Sites that stand besides those sought, such as what rows of the past have left.
    **options
        ``start``, ``max_iter``, ``tol`` and ``callback`` of `climb`.

    Returns
    -------
    SiteFit
        Its posterior has ``mean`` and ``var`` (m,) of f less its prior mean, and
        ``parameter_gradient`` (q,): of log Z with all sites held.
    """
    return climb(_ExactBound(dynamics, series, likelihood, offset, base), **options)


class SeriesBound(SiteBound):
    """The ELBO of a series, one site a time, whatever infers f from the sites."""

    negligible = 1e-3  # the expected gain below is rough

    def __init__(self, series: Series, likelihood: Likelihood, offset: float) -> None:
        self.series, self.likelihood = series, likelihood.at(series.log_exposure)
        self.offset = offset
        self.y, self.total = series.y, series.total

    @abstractmethod
    def infer(self, beta: Tensor, weight: Tensor) -> tuple[Any, tuple[float, ...]] | None:
        """What sites (m,), (m,) say of f; None where they leave no valid posterior.

        Returns an object with ``mean`` and ``var`` (m,) of f less its prior mean, and terms that
        add up to the divergence of the posterior from the prior.
        """

    def __call__(self, beta: Tensor, weight: Tensor) -> Point | None:
        inferred = self.infer(beta, weight)
        if inferred is None:
            return None
        found, divergence = inferred
        rows = self.series.at_rows(found.mean) + self.offset, self.series.at_rows(found.var)
        return self.point((beta, weight), found, rows, divergence)

    def collect(self, rows: Tensor) -> Tensor:
        return self.series.sums(rows)

    def fit(self, expected: Tensor) -> float:
        return float(self.series.sums(expected).sum())

    def expected_gain(self, point: Point, beta: Tensor, weight: Tensor) -> float:
        """What a full step gains if the times were independent, to second order; in nats."""
        rise, mean, var = weight - point.weight, point.found.mean, point.found.var
        push = beta - point.beta - rise * mean
        return 0.5 * float((push**2 * var + 0.5 * (rise * var) ** 2).sum())


def sites_mean(
    beta: Tensor, weight: Tensor, mean: Tensor, var: Tensor, centre: Tensor | float = 0.0
) -> float:
    """Mean of the logarithm of sites (m,), (m,), less that at the centre, under N(mean, var)."""
    away = mean - centre
    return float((beta - weight * centre) @ away - 0.5 * (weight @ (away**2 + var)))


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
        self._variance = float(H @ dynamics.stationary @ H)
        self._prior = DensePrior.of(dynamics, series.gaps)
        if base is not None:
            self._before = evidence(dynamics, series.gaps, *base).log_normalizer

    def infer(
        self, beta: Tensor, weight: Tensor
    ) -> tuple[Evidence | DensePosterior, tuple[float, ...]] | None:
        if self._base is not None:
            beta, weight = beta + self._base[0], weight + self._base[1]
        centre = self._centre(beta, weight)
        try:
            found = evidence(
                self._dynamics, self.series.gaps, beta, weight, centre, prior=self._prior
            )
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
        return torch.where(weight * self._variance > 1, beta / weight, 0.0)


def left_out_moments(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Moments of f at each row, the row's own site divided out.

    Where the sites have converged, that of a row is :math:`\omega = -E_q[\partial^2 \log p]`,
    :math:`\beta = E_q[\partial \log p] + \omega m`, so that

    .. math:: v' = \frac{v}{1 - \omega v}, \qquad m' = m - v' E_q[\partial \log p].

    Exact leave-one-out for a site at every time, given those of the others and the
    hyper-parameters. Of inducing states it takes the row to tell of f and not of their projection:
    the same where they are dense enough.

    Parameters
    ----------
    likelihood : Likelihood
    y : Tensor of shape (n,)
    mean, var : Tensor of shape (n,)
        Of f under q, prior mean included.
    weight : Tensor of shape (n,), optional
        One unit of weight is left out, or what there is: a weight of 2 equals the row given twice.

    Returns
    -------
    mean, var : Tensor of shape (n,)
    """
    _, slope, curvature = expectations(likelihood, y, mean, var)
    if weight is not None:
        left = weight.clamp_max(1.0)
        slope, curvature = left * slope, left * curvature
    cavity = var / (1 + curvature * var).clamp_min(LEAST_SHARE)
    return mean - cavity * slope, cavity
