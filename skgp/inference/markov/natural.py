r"""Natural-gradient ascent of an evidence bound in Gaussian sites.

The posterior of f is approximated by the Gaussian process q that the prior and the sites
:math:`\exp(\beta f - \omega f^2 / 2)` give. With :math:`N(m_i, v_i)` the marginal of q in row i,
and :math:`g_i = E_q[\partial \log p]`, :math:`h_i = E_q[\partial^2 \log p]`, the natural gradient
of the bound is the way to the targets [1]_

.. math:: \omega_i^* = -h_i, \qquad \beta_i^* = g_i + \omega_i^* m_i,

summed over the rows that share a site; a step
:math:`\lambda \leftarrow (1 - \rho) \lambda + \rho \lambda^*` of :math:`\lambda = (\beta, \omega)`
that is short enough raises the bound. :math:`\rho` is 1 unless the bound falls, when it is halved.
The targets of Gaussian noise do not depend on q: they are exact at once.

Likelihoods that are not log-concave
------------------------------------
Outliers make :math:`h_i` positive, and the optimum may have negative :math:`\omega`. Far from it
such sites leave no valid q. The first steps therefore go, in rows with positive :math:`h_i`, to the
parabola that has the slope :math:`g_i` at :math:`m_i` and its top at the mode :math:`f_i^*` of the
likelihood, :math:`\omega_i = g_i / (f_i^* - m_i) \ge 0`. For Student's t that is the
reweighted least squares of the EM algorithm. The targets above take over when the bound has nearly
settled.

References
----------
.. [1] Khan and Lin (2017), Conjugate-computation variational inference; Chang, Wilkinson, Khan and
   Solin (2020), Fast variational learning in state-space Gaussian process models.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.likelihoods import Likelihood
from skgp.optim.loop import NonFiniteLossError

__all__ = ["Ascent", "Point", "SiteBound", "climb", "expectations", "likelihood_gradient"]

Callback = Callable[[int, dict], bool | None]

_TILE = 2**16  # rows whose expectations are taken together: temporaries of 0.5 MB
_SETTLED = 1e-2  # nats an observation, gained by a step, at which caution is given up
_SHORTEST = 2.0**-10  # step at which the search is given up
_ROUNDING = 1e-12  # of the bound's terms, which cancel: what it may fall by


@dataclass(frozen=True)
class Point:
    """Sites that were tried, and what came of it.

    Attributes
    ----------
    beta, weight : Tensor of shape (m,)
    found : Any
        The posterior that they give, as the bound makes it.
    elbo : float
        The bound, in nats.
    rounding : float
        What it may be wrong by.
    mean, var : Tensor of shape (n,)
        Of f in each row, prior mean included.
    slope, curvature : Tensor of shape (n,)
        Expected derivatives of the log-density of each row.
    """

    beta: Tensor
    weight: Tensor
    found: Any
    elbo: float
    rounding: float
    mean: Tensor
    var: Tensor
    slope: Tensor
    curvature: Tensor

    @property
    def has_valley(self) -> bool:
        """Whether the log-density of some row curves upwards."""
        return bool((self.curvature > 0).any())


class SiteBound(ABC):
    """An evidence bound as a function of m sites for n rows.

    Attributes
    ----------
    likelihood : Likelihood
    y : Tensor of shape (n,)
    offset : float
        Prior mean of f.
    total : float
        Weight of all rows.
    negligible : float
        Expected gain, as a part of the tolerance, that is not worth a step.
    """

    likelihood: Likelihood
    y: Tensor
    offset: float
    total: float
    negligible: float

    @abstractmethod
    def __call__(self, beta: Tensor, weight: Tensor) -> Point | None:
        """Evaluate the bound; None where the sites leave no valid posterior."""

    @abstractmethod
    def collect(self, rows: Tensor) -> Tensor:
        """Sites (m,) of the terms of the rows, (n,)."""

    @abstractmethod
    def expected_gain(self, point: Point, beta: Tensor, weight: Tensor) -> float:
        """What a full step to sites (m,), (m,) is expected to gain, in nats."""

    def point(
        self,
        sites: tuple[Tensor, Tensor],
        found: Any,
        rows: tuple[Tensor, Tensor],
        divergence: tuple[float, ...],
    ) -> Point | None:
        """The point of valid sites; None where the bound is not finite.

        Parameters
        ----------
        sites : (Tensor, Tensor) of shapes (m,)
        found : Any
            Their posterior.
        rows : (Tensor, Tensor) of shapes (n,)
            Mean, the prior's included, and variance of f in each row.
        divergence : tuple of float
            Terms that add up to that of the posterior from the prior.
        """
        expected, slope, curvature = expectations(self.likelihood, self.y, *rows)
        fit = self.fit(expected)
        elbo = fit - sum(divergence)
        if not math.isfinite(elbo):
            return None
        rounding = _ROUNDING * (abs(fit) + sum(map(abs, divergence)))
        return Point(*sites, found, elbo, rounding, *rows, slope, curvature)

    @abstractmethod
    def fit(self, expected: Tensor) -> float:
        """Weighted sum of the rows' expected log-densities (n,)."""

    def parabolas(self) -> tuple[Tensor, Tensor]:
        """Sites that touch the rows' log-densities at their modes, or at the prior mean."""
        mode = self.likelihood.mode(self.y)
        place = torch.where(mode.isfinite(), mode, self.offset)
        slope, curvature = (d.detach() for d in self.likelihood.derivatives(self.y, place))
        return self._sites(slope, -curvature, place)

    def targets(self, point: Point, cautious: bool) -> tuple[Tensor, Tensor]:
        """Sites that the next step goes to."""
        weight = -point.curvature
        if cautious:
            to_mode = self.likelihood.mode(self.y) - point.mean
            weight = torch.where(weight >= 0, weight, point.slope / to_mode)
        return self._sites(point.slope, weight, point.mean)

    def _sites(self, slope: Tensor, weight: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Sites of f less its prior mean, from slopes and weights (n,) at places (n,) of f."""
        return self.collect(slope + weight * (place - self.offset)), self.collect(weight)


@dataclass(frozen=True)
class Ascent:
    """Outcome of :func:`climb`.

    Attributes
    ----------
    point : Point
        The highest found.
    n_iter : int
        Evaluations of the bound, the first one included.
    converged : bool
    """

    point: Point
    n_iter: int
    converged: bool


def climb(
    bound: SiteBound,
    *,
    start: tuple[Tensor, Tensor] | None = None,
    max_iter: int = 50,
    tol: float = 1e-6,
    callback: Callback | None = None,
) -> Ascent:
    """Maximise a bound by natural-gradient steps.

    Parameters
    ----------
    bound : SiteBound
    start : (Tensor, Tensor) of shapes (m,), optional
        Sites to begin with; left aside if they give no valid posterior. By default parabolas that
        touch the rows' log-densities: the optimum for Gaussian noise.
    max_iter : int, default=50
        Largest number of evaluations, at least 1.
    tol : float, default=1e-6
        The search ends where steps are expected to gain less, in nats an observation.
    callback : callable, optional
        Called as ``callback(n_iter, {"loss": ..., "step": ...})`` after every step that raised the
        bound, the loss being its negative; returning True ends the search.

    Returns
    -------
    Ascent

    Raises
    ------
    NonFiniteLossError
        If the bound is not finite where the search begins.
    ValueError
        If `max_iter` is less than 1, or y holds a value that the likelihood refuses.
    """
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1; got {max_iter}.")
    point, cautious = _first_point(bound, start)
    n_iter, step, enough = 1, 1.0, tol * bound.total

    def is_to_stop() -> bool:
        return callback is not None and bool(callback(n_iter, {"loss": -point.elbo, "step": step}))

    converged, stopped, gain = False, is_to_stop(), math.inf
    while n_iter < max_iter and step >= _SHORTEST and not (stopped or converged):
        cautious = cautious and point.has_valley
        target = bound.targets(point, cautious)
        if not cautious and bound.expected_gain(point, *target) <= bound.negligible * enough:
            converged = True
            break
        here = point.beta, point.weight
        trial = bound(*(torch.lerp(*pair, step) for pair in zip(here, target, strict=True)))
        n_iter += 1
        if trial is None or trial.elbo < point.elbo - trial.rounding:
            # Cautious targets are no ascent direction for sure: shorter steps need not help.
            step, cautious = (1.0 if cautious else 0.5 * step), False
            continue
        last, gain, point = gain, (trial.elbo - point.elbo) / step, trial
        # Gains shrink at least as fast as they did: what is to come is foretold by the last two.
        to_come = gain * min(1.0, gain / last) if 0 < last < math.inf else gain
        stopped, converged = is_to_stop(), to_come <= enough and not cautious
        cautious = cautious and gain > max(enough, _SETTLED * bound.total)
        step = min(1.0, 2 * step)
    return Ascent(point, n_iter, converged)


def _first_point(bound: SiteBound, start: tuple[Tensor, Tensor] | None) -> tuple[Point, bool]:
    """Where the search begins, and whether with caution: sites of old have no need of it."""
    point = None if start is None else bound(*start)
    if point is not None:
        return point, False
    point = bound(*bound.parabolas())
    if point is None:
        raise NonFiniteLossError(
            "The evidence bound is not finite at the start. Check for targets or inputs of extreme "
            "size, and for a kernel with a variance or length scale that is 0 or infinite.",
            iteration=0,
            parameter=None,
        )
    return point, True


def expectations(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected log-density of each row under N(mean, var), and expected derivatives in f; (n,)."""
    if len(y) <= _TILE:
        return likelihood.expected_log_prob_and_derivatives(y, mean, var)

    def tile(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = likelihood.rows(rows)
        return part.expected_log_prob_and_derivatives(y[rows], mean[rows], var[rows])

    tiles = (slice(start, start + _TILE) for start in range(0, len(y), _TILE))
    expected, slope, curvature = zip(*map(tile, tiles), strict=True)
    return torch.cat(expected), torch.cat(slope), torch.cat(curvature)


def likelihood_gradient(
    family: Likelihood,
    parameters: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    weighted: Callable[[Tensor], Tensor],
) -> Tensor:
    """Gradient of the expected log-density in the parameters (p,) of the likelihood.

    Parameters
    ----------
    family : Likelihood
    parameters : Tensor of shape (p,)
    rows : tuple of three Tensor of shape (n,)
        Targets, means and variances of f.
    weighted : callable
        Maps values of the rows (n,) to values that add up to their weighted sum.
    """
    if not parameters.numel():
        return parameters
    leaf = parameters.detach().requires_grad_()
    with torch.enable_grad():
        expected = family.with_parameters(leaf).expected_log_prob(*rows)
        return torch.autograd.grad(weighted(expected).sum(), leaf)[0]
