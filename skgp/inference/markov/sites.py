r"""Variational inference under any likelihood by Gaussian sites: natural gradients.

The posterior of f is approximated by the Gaussian process q that the prior and the sites
:math:`\exp(\beta f - \omega f^2 / 2)` give; with one at every time, the best q of all has this
form [1]_. With Z the normaliser of the sites and :math:`N(m_i, v_i)` the marginal of q in row i,

.. math::
    \mathcal{L} = \log Z + \sum_i w_i E_q[\log p(y_i \mid f_i)]
                  - \sum_t \big[\beta_t m_t - \tfrac12 \omega_t (m_t^2 + v_t)\big]

is the ELBO. With :math:`g_i = E_q[\partial \log p]` and :math:`h_i = E_q[\partial^2 \log p]` its
natural gradient is the way to the targets [2]_

.. math:: \omega_i^* = -h_i, \qquad \beta_i^* = g_i + \omega_i^* m_i,

summed over the rows that share a site; a step
:math:`\lambda \leftarrow (1 - \rho) \lambda + \rho \lambda^*` of :math:`\lambda = (\beta, \omega)`
that is short enough raises the ELBO. :math:`\rho` is 1 unless the ELBO falls, when it is halved.
Whole steps to targets without negative weights are mixed (:mod:`skgp.optim.scoring`), in the norm
whose half square is what they promise to gain were the times independent; a mixed step that does
not raise the ELBO is left for the plain one.
The targets of Gaussian noise do not depend on q: they are exact at once. Where the sites have
converged, the ELBO is stationary in them, so that its gradient in the parameters of the dynamics is
that of log Z with the sites held.

Likelihoods that are not log-concave
------------------------------------
Outliers make :math:`h_i` positive, and the optimum may have negative :math:`\omega`. Far from it
such sites leave no valid q. The first steps therefore go, in rows with positive :math:`h_i`, to the
parabola that has the slope :math:`g_i` at :math:`m_i` and its top at the mode :math:`f_i^*` of the
likelihood, :math:`\omega_i = g_i / (f_i^* - m_i) \ge 0`. For Student's t that is the
reweighted least squares of the EM algorithm. The targets above take over when the ELBO has nearly
settled.

References
----------
.. [1] Opper and Archambeau (2009), The variational Gaussian approximation revisited.
.. [2] Khan and Lin (2017), Conjugate-computation variational inference; Chang, Wilkinson, Khan and
   Solin (2020), Fast variational learning in state-space Gaussian process models.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.markov.series import Series
from skgp.inference.sites import without_site
from skgp.kernels.sde import Dynamics
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback, namespace
from skgp.optim.loop import NonFiniteLossError
from skgp.optim.scoring import AndersonMixing


def prior_mean(
    likelihood: Likelihood, offset: float, process: Dynamics
) -> tuple[float, list[float]]:
    """Mean of f at which y has the mean a priori that it has at the offset.

    And its slopes in the log variances of the blocks. A level or a trend, which the data decide
    about, is left out.
    """
    variances = [block.variance if block.primitives else 0.0 for _, block in process.blocks]
    if process.origin is not None:
        return offset, [0.0 for _ in variances]
    mean, slope = likelihood.centred(offset, sum(variances))
    return mean, [slope * variance for variance in variances]


def expectations(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected log-density of each row under N(mean, var), and expected derivatives in f; (n,)."""
    if len(y) <= defaults.SITES_TILE:
        return likelihood.expected_log_prob_and_derivatives(y, mean, var)

    def tile(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = likelihood.rows(rows)
        return part.expected_log_prob_and_derivatives(y[rows], mean[rows], var[rows])

    tiles = (
        slice(start, start + defaults.SITES_TILE) for start in range(0, len(y), defaults.SITES_TILE)
    )
    expected, slope, curvature = zip(*map(tile, tiles), strict=True)
    return torch.cat(expected), torch.cat(slope), torch.cat(curvature)


def likelihood_gradient(
    likelihood: Likelihood,
    parameters: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    weighted: Callable[[Tensor], Tensor],
    log_exposure: Tensor | None,
) -> Tensor:
    """Gradient of the expected log-density in the parameters (p,) of the likelihood.

    `rows` are targets, means and variances of f, (n,) each, as `log_exposure` of counts; `weighted`
    maps values of the rows (n,) to values that add up to their weighted sum.
    """
    if not parameters.numel():
        return parameters
    leaf = parameters.detach().requires_grad_()
    with torch.enable_grad():
        expected = likelihood.with_parameters(leaf).at(log_exposure).expected_log_prob(*rows)
        return torch.autograd.grad(weighted(expected).sum(), leaf)[0]


def left_out_moments(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Moments of f at each row, the row's own site divided out.

    Where the sites have converged, that of a row has the precision
    :math:`-E_q[\partial^2 \log p]`, and the slope :math:`E_q[\partial \log p]` at m. Exact
    leave-one-out for a site at every time, given those of the others and the hyper-parameters. Of
    inducing states it takes the row to tell of f and not of their projection: the same where they
    are dense enough.

    `mean` and `var` (n,) are those of f under q, prior mean included. Of a `weight` (n,) one unit
    is left out, or what there is: a weight of 2 equals the row given twice.
    """
    _, slope, curvature = expectations(likelihood, y, mean, var)
    if weight is not None:
        left = weight.clamp_max(1.0)
        slope, curvature = left * slope, left * curvature
    return without_site(mean, var, slope, -curvature)


@dataclass(frozen=True)
class SiteFit:
    """Sites that were tried, and what came of it; the best ones, where a search has ended."""

    beta: Tensor  # (m,)
    weight: Tensor  # (m,)
    posterior: Any  # that they give, as the bound makes it
    elbo: float  # in nats; given sites of the past, of the rows given those
    rounding: float  # what it may be wrong by
    mean: Tensor  # (n,) of f in each row, prior mean included
    var: Tensor  # (n,)
    slope: Tensor  # (n,) expected derivatives of the log-density of each row
    curvature: Tensor  # (n,)
    n_iter: int = 1  # evaluations of the ELBO, the first one included
    converged: bool = False


class SiteBound(ABC):
    """An ELBO as a function of m sites for n rows."""

    likelihood: Likelihood
    y: Tensor  # (n,)
    offset: float  # prior mean of f
    total: float  # weight of all rows
    negligible: float  # expected gain, as a part of the tolerance, that is not worth a step

    @abstractmethod
    def __call__(self, beta: Tensor, weight: Tensor) -> SiteFit | None:
        """Evaluate the bound; None where the sites leave no valid posterior."""

    @abstractmethod
    def collect(self, rows: Tensor) -> Tensor:
        """Sites (m,) of the terms of the rows, (n,)."""

    @abstractmethod
    def expected_gain(self, point: SiteFit, beta: Tensor, weight: Tensor) -> float:
        """What a full step to sites (m,), (m,) is expected to gain, in nats."""

    @abstractmethod
    def moments(self, point: SiteFit) -> tuple[Tensor, Tensor]:
        """Mean, less the prior's, and variance of f at each site, (m,)."""

    def whitened(self, point: SiteFit, changes: Tensor) -> Tensor:
        """Changes of the sites (k, 2, m), of norms whose half squares are nats; (k, 2m).

        To second order, what they add to the ELBO were f independent from site to site.
        """
        mean, var = self.moments(point)
        push, rise = changes[:, 0], changes[:, 1]
        parts = (push - rise * mean) * var**0.5, rise * (math.sqrt(0.5) * var)
        return namespace(changes).concatenate(parts, 1)

    def point(
        self,
        sites: tuple[Tensor, Tensor],
        posterior: Any,
        rows: tuple[Tensor, Tensor],
        divergence: tuple[float, ...],
    ) -> SiteFit | None:
        """The point of valid sites with their posterior; None where the ELBO is not finite.

        `rows` are mean, the prior's included, and variance of f in each row (n,); `divergence`
        terms that add up to that of the posterior from the prior.
        """
        expected, slope, curvature = expectations(self.likelihood, self.y, *rows)
        fit = self.fit(expected)
        elbo = fit - sum(divergence)
        if not math.isfinite(elbo):
            return None
        rounding = defaults.ROUNDING * (abs(fit) + sum(map(abs, divergence)))
        return SiteFit(*sites, posterior, elbo, rounding, *rows, slope, curvature)

    @abstractmethod
    def fit(self, expected: Tensor) -> float:
        """Weighted sum of the rows' expected log-densities (n,)."""

    def parabolas(self) -> tuple[Tensor, Tensor]:
        """Sites that touch the rows' log-densities at their modes, or at the prior mean."""
        mode = self.likelihood.mode(self.y)
        place = torch.where(mode.isfinite(), mode, self.offset)
        slope, curvature = (d.detach() for d in self.likelihood.derivatives(self.y, place))
        return self._sites(slope, -curvature, place)

    def targets(self, point: SiteFit, cautious: bool) -> tuple[Tensor, Tensor]:
        """Sites that the next step goes to."""
        weight = -point.curvature
        if cautious:
            to_mode = namespace(weight).asarray(self.likelihood.mode(self.y)) - point.mean
            weight = namespace(weight).where(weight >= 0, weight, point.slope / to_mode)
        return self._sites(point.slope, weight, point.mean)

    def _sites(self, slope: Tensor, weight: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Sites of f less its prior mean, from slopes and weights (n,) at places (n,) of f."""
        return self.collect(slope + weight * (place - self.offset)), self.collect(weight)


def climb(
    bound: SiteBound,
    *,
    start: tuple[Tensor, Tensor] | None = None,  # sites (m,), (m,) to begin with
    max_iter: int = 50,  # evaluations, at least 1
    tol: float = 1e-6,  # expected gain, in nats per observation, below which the search ends
    callback: Callback | None = None,  # told "loss", minus the ELBO, and "step" after a rise
) -> SiteFit:
    """Maximise an ELBO by natural-gradient steps, and return the highest found.

    A start that gives no valid posterior is left aside. By default it is parabolas that touch the
    rows' log-densities at their modes, or at the prior mean where there is none (labels, a count of
    0): the optimum for Gaussian noise. A NonFiniteLossError says that the ELBO is not finite where
    the search begins, a ValueError that the likelihood refuses a value of y.
    """
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1; got {max_iter}.")
    point, cautious = _first_point(bound, start)
    n_iter, step, enough, mixing = 1, 1.0, tol * bound.total, AndersonMixing()

    def is_to_stop() -> bool:
        return callback is not None and bool(callback(n_iter, {"loss": -point.elbo, "step": step}))

    converged, stopped, settled, gain = False, is_to_stop(), False, math.inf
    while n_iter < max_iter and step >= defaults.SHORTEST and not (stopped or converged):
        cautious = cautious and bool((point.curvature > 0).any())
        target = bound.targets(point, cautious)
        # A mixed step may gain little by chance: what the next one promises is to be little, too.
        little = defaults.SETTLED_MIX if settled else bound.negligible
        if not cautious and bound.expected_gain(point, *target) <= little * enough:
            converged = True
            break
        mixes = step == 1.0 and not cautious and bool((target[1] >= 0).all())
        if mixes:
            trial = bound(*_mixed(mixing, bound, point, target))
        else:
            mixing.restart()
            pairs = zip((point.beta, point.weight), target, strict=True)
            trial = bound(*(at + step * (to - at) for at, to in pairs))
        n_iter += 1
        if trial is None or trial.elbo < point.elbo - trial.rounding:
            if len(mixing) < 2:
                # Cautious targets are no ascent direction for sure: shorter steps need not help.
                step, cautious = (1.0 if cautious else 0.5 * step), False
            mixing.restart()
            continue
        last, gain, point = gain, (trial.elbo - point.elbo) / step, trial
        # Gains shrink at least as fast as they did: what is to come is foretold by the last two.
        to_come = gain * min(1.0, gain / last) if 0 < last < math.inf else gain
        stopped, settled = is_to_stop(), to_come <= enough and not cautious
        converged = settled and not mixes
        cautious = cautious and gain > max(enough, defaults.SETTLED * bound.total)
        step = min(1.0, 2 * step)
    return replace(point, n_iter=n_iter, converged=converged)


def _first_point(bound: SiteBound, start: tuple[Tensor, Tensor] | None) -> tuple[SiteFit, bool]:
    """Where the search begins, and whether with caution: sites of old have no need of it."""
    point = None if start is None else bound(*start)
    if point is not None:
        return point, False
    point = bound(*bound.parabolas())
    if point is None:
        raise NonFiniteLossError(
            "The ELBO is not finite at the start. Check for targets or inputs of extreme "
            "size, and for a kernel with a variance or length scale that is 0 or infinite.",
            iteration=0,
            parameter=None,
        )
    return point, True


def _mixed(
    mixing: AndersonMixing, bound: SiteBound, point: SiteFit, target: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Sites mixed from those so far; of their targets where a weight would become negative."""
    xp = namespace(target[0])
    image, whiten = xp.stack(target), partial(bound.whitened, point)
    sites = mixing(xp.stack([point.beta, point.weight]), image, whiten)
    beta, weight = xp.where(sites[1] < 0, image, sites)
    return beta, weight


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

    def __call__(self, beta: Tensor, weight: Tensor) -> SiteFit | None:
        """Evaluate the bound; None where the sites leave no valid posterior."""
        inferred = self.infer(beta, weight)
        if inferred is None:
            return None
        found, divergence = inferred
        rows = self.series.at_rows(found.mean) + self.offset, self.series.at_rows(found.var)
        return self.point((beta, weight), found, rows, divergence)

    def collect(self, rows: Tensor) -> Tensor:
        """Sums at each time, (m,)."""
        return self.series.sums(rows)

    def fit(self, expected: Tensor) -> float:
        """Weighted sum of the rows' expected log-densities (n,)."""
        return float(self.series.sums(expected).sum())

    def moments(self, point: SiteFit) -> tuple[Tensor, Tensor]:
        """At each time."""
        return point.posterior.mean, point.posterior.var

    def expected_gain(self, point: SiteFit, beta: Tensor, weight: Tensor) -> float:
        """What a full step gains if the times were independent, to second order; in nats."""
        change = namespace(beta).stack([beta - point.beta, weight - point.weight])
        return 0.5 * float((self.whitened(point, change[None]) ** 2).sum())


def sites_mean(
    beta: Tensor, weight: Tensor, mean: Tensor, var: Tensor, centre: Tensor | float = 0.0
) -> float:
    """Mean of the logarithm of sites (m,), (m,), less that at the centre, under N(mean, var)."""
    away = mean - centre
    return float((beta - weight * centre) @ away - 0.5 * (weight @ (away**2 + var)))
