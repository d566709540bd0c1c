r"""Variational inference of a series under any likelihood, with one Gaussian site a time.

The posterior of f is approximated by the Gaussian process q that the prior and the sites
:math:`\exp(\beta_t f - \omega_t f^2 / 2)` give; the best q of all has this form [1]_. Its marginals
:math:`N(m_t, v_t)` and the normaliser Z of the sites take one sweep (:mod:`.smoother`), and

.. math::
    \mathcal{L} = \log Z + \sum_i w_i E_q[\log p(y_i \mid f_i)]
                  - \sum_t \big[\beta_t m_t - \tfrac12 \omega_t (m_t^2 + v_t)\big]

is a lower bound of the log evidence, which natural gradients maximise (:mod:`.natural`).

Where the sites have converged, the bound is stationary in them, so that its gradient in the
parameters of the dynamics is that of log Z with the sites held.

References
----------
.. [1] Opper and Archambeau (2009), The variational Gaussian approximation revisited.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.chunks import Dynamics
from skgp.inference.markov.dense import DensePosterior
from skgp.inference.markov.natural import Point, SiteBound, climb
from skgp.inference.markov.series import Series
from skgp.inference.markov.smoother import Evidence, dense_prior, evidence
from skgp.likelihoods import Likelihood
from skgp.linalg.exceptions import NotPositiveDefiniteError

__all__ = ["SeriesBound", "Sites", "fit_sites", "sites_mean"]

Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class Sites:
    r"""One Gaussian site a time, and the posterior that they give.

    Attributes
    ----------
    beta, weight : Tensor of shape (m,)
        :math:`\beta` and :math:`\omega` of each distinct time.
    elbo : float
        The bound, in nats; with a base, of the rows given the past.
    mean, var : Tensor of shape (m,)
        Of f less its prior mean, under q.
    parameter_gradient : Tensor of shape (q,)
        Gradient of log Z with all sites held: of the bound, where they have converged.
    n_iter : int
        Sweeps through the series.
    converged : bool
    """

    beta: Tensor
    weight: Tensor
    elbo: float
    mean: Tensor
    var: Tensor
    parameter_gradient: Tensor
    n_iter: int
    converged: bool


def fit_sites(
    dynamics: Dynamics,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float = 0.0,
    base: tuple[Tensor, Tensor] | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    max_iter: int = 50,
    tol: float = 1e-6,
    callback: Callback | None = None,
) -> Sites:
    r"""Find the Gaussian process nearest to the posterior, for fixed hyper-parameters.

    Parameters
    ----------
    dynamics : Dynamics
        Of f, from `skgp.kernels.sde`.
    series : Series
        m times and n rows.
    likelihood : Likelihood
        One that takes all rows alike: its parameters are scalars. Unimodal in f.
    offset : float, default=0.0
        Prior mean of f.
    base : (Tensor, Tensor) of shapes (m,), optional
        Sites that stand besides those sought, such as what rows of the past have left.
    start : (Tensor, Tensor) of shapes (m,), optional
        :math:`\beta` and :math:`\omega` to begin with, such as those of hyper-parameters nearby;
        left aside if they give no valid posterior. By default each row has the parabola that
        touches its log-density at the mode, or at the prior mean where there is
        none (labels, a count of 0).
    max_iter : int, default=50
        Largest number of sweeps, at least 1.
    tol : float, default=1e-6
        The search ends where steps are expected to gain less, in nats an observation.
    callback : callable, optional
        Called as ``callback(n_iter, {"loss": ..., "step": ...})`` after every sweep that raised the
        bound, the loss being its negative; returning True ends the search.

    Returns
    -------
    Sites
        With the highest bound found; `converged` tells whether the tolerance was met.

    Raises
    ------
    NonFiniteLossError
        If the bound is not finite where the search begins.
    ValueError
        If `max_iter` is less than 1, or y holds a value that the likelihood refuses.

    Notes
    -----
    O(m d^3 + n) a sweep, for d states. Labels and counts take about five sweeps where times are
    dense and ten where they are sparse; prior variances of 100 may take 50.
    """
    bound = _ExactBound(dynamics, series, likelihood, offset, base)
    end = climb(bound, start=start, max_iter=max_iter, tol=tol, callback=callback)
    point, found = end.point, end.point.found
    return Sites(
        point.beta,
        point.weight,
        point.elbo,
        found.mean,
        found.var,
        found.parameter_gradient,
        end.n_iter,
        end.converged,
    )


class SeriesBound(SiteBound):
    """The bound of a series, one site a time, whatever infers f from the sites."""

    negligible = 1e-3  # the expected gain below is rough

    def __init__(self, series: Series, likelihood: Likelihood, offset: float) -> None:
        self.series, self.likelihood = series, likelihood.at(series.log_exposure)
        self.offset = offset
        self.y, self.total = series.y, series.total

    @abstractmethod
    def infer(self, beta: Tensor, weight: Tensor) -> tuple[Any, tuple[float, ...]] | None:
        """What sites (m,), (m,) say of f; None where they leave no valid posterior.

        Returns
        -------
        found : object with ``mean`` and ``var`` (m,) of f less its prior mean
        divergence : tuple of float
            Terms that add up to that of the posterior from the prior.
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
        self._prior = dense_prior(dynamics, series.gaps)
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
