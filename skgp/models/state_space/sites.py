r"""Variational inference of a series under any likelihood, with one Gaussian site a time.

The posterior of f is approximated by the Gaussian process q that the prior and the sites
:math:`\exp(\beta_t f - \omega_t f^2 / 2)` give; the best q of all has this form [1]_. Its marginals
:math:`N(m_t, v_t)` and the normaliser Z of the sites take one sweep (:mod:`.smoother`), and

.. math::
    \mathcal{L} = \log Z + \sum_i w_i E_q[\log p(y_i \mid f_i)]
                  - \sum_t \big[\beta_t m_t - \tfrac12 \omega_t (m_t^2 + v_t)\big]

is a lower bound of the log evidence. With :math:`g_i = E_q[\partial \log p]` and
:math:`h_i = E_q[\partial^2 \log p]` its natural gradient is the way to the targets [2]_

.. math:: \omega_t^* = -\sum_{i : x_i = t} w_i h_i, \qquad
          \beta_t^* = \sum_{i : x_i = t} w_i g_i + \omega_t^* m_t,

and a step :math:`\lambda \leftarrow (1 - \rho) \lambda + \rho \lambda^*` of
:math:`\lambda = (\beta, \omega)` that is short enough raises the bound. :math:`\rho` is 1 unless
the bound falls, when it is halved. The targets of Gaussian noise do not depend on q: they are exact
at once.

Where the sites have converged, the bound is stationary in them, so that its gradient in the
parameters of the dynamics is that of log Z with the sites held.

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
.. [1] Opper and Archambeau (2009), The variational Gaussian approximation revisited.
.. [2] Khan and Lin (2017), Conjugate-computation variational inference; Chang, Wilkinson, Khan and
   Solin (2020), Fast variational learning in state-space Gaussian process models.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.likelihoods import Likelihood
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.models.state_space.chunks import Dynamics
from skgp.models.state_space.series import Series
from skgp.models.state_space.smoother import Evidence, evidence
from skgp.training.loop import NonFiniteLossError

__all__ = ["Sites", "fit_sites"]

Callback = Callable[[int, dict], bool | None]

_TILE = 2**16  # rows whose expectations are taken together: temporaries of 0.5 MB
_SETTLED = 1e-2  # nats an observation, gained by a step, at which caution is given up
_SHORTEST = 2.0**-10  # step at which the search is given up
_ROUNDING = 1e-12  # of the bound's terms, which cancel: what it may fall by
_NEGLIGIBLE = 1e-3  # of the tolerance: expected gain, were times independent, not worth a sweep


@dataclass(frozen=True)
class Sites:
    r"""One Gaussian site a time, and the posterior that they give.

    Attributes
    ----------
    beta, weight : Tensor of shape (m,)
        :math:`\beta` and :math:`\omega` of each distinct time.
    elbo : float
        The bound, in nats.
    mean, var : Tensor of shape (m,)
        Of f less its prior mean, under q.
    parameter_gradient : Tensor of shape (q,)
        Gradient of log Z with the sites held: of the bound, where they have converged.
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
    start : (Tensor, Tensor) of shapes (m,), optional
        :math:`\beta` and :math:`\omega` to begin with, such as those of hyper-parameters nearby;
        left aside if they give no valid posterior. By default each row has the parabola that
        touches its log-density at the mode, or at f = 0 where there is none (labels, a count of 0).
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
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1; got {max_iter}.")
    bound = _Bound(dynamics, series, likelihood, offset)
    point, cautious = _first_point(bound, start)
    n_iter, step, enough = 1, 1.0, tol * series.total

    def is_to_stop() -> bool:
        return callback is not None and bool(callback(n_iter, {"loss": -point.elbo, "step": step}))

    converged, stopped, gain = False, is_to_stop(), math.inf
    while n_iter < max_iter and step >= _SHORTEST and not (stopped or converged):
        cautious = cautious and point.has_valley
        beta, weight = bound.targets(point, cautious)
        if not cautious and point.expected_gain(beta, weight) <= _NEGLIGIBLE * enough:
            converged = True
            break
        trial = bound(torch.lerp(point.beta, beta, step), torch.lerp(point.weight, weight, step))
        n_iter += 1
        if trial is None or trial.elbo < point.elbo - trial.rounding:
            # Cautious targets are no ascent direction for sure: shorter steps need not help.
            step, cautious = (1.0 if cautious else 0.5 * step), False
            continue
        last, gain, point = gain, (trial.elbo - point.elbo) / step, trial
        # Gains shrink at least as fast as they did: what is to come is foretold by the last two.
        to_come = gain * min(1.0, gain / last) if 0 < last < math.inf else gain
        stopped, converged = is_to_stop(), to_come <= enough and not cautious
        cautious = cautious and gain > max(enough, _SETTLED * series.total)
        step = min(1.0, 2 * step)
    return point.sites(n_iter, converged)


@dataclass(frozen=True)
class _Point:
    """Sites that were tried, and what came of it; rows (n,) have slope and curvature."""

    beta: Tensor
    weight: Tensor
    found: Evidence
    elbo: float
    rounding: float
    slope: Tensor
    curvature: Tensor

    @property
    def has_valley(self) -> bool:
        """Whether the log-density of some row curves upwards."""
        return bool((self.curvature > 0).any())

    def expected_gain(self, beta: Tensor, weight: Tensor) -> float:
        """What a full step gains if the times were independent, to second order; in nats."""
        rise, mean, var = weight - self.weight, self.found.mean, self.found.var
        push = beta - self.beta - rise * mean
        return 0.5 * float((push**2 * var + 0.5 * (rise * var) ** 2).sum())

    def sites(self, n_iter: int, converged: bool) -> Sites:
        found = self.found
        return Sites(
            self.beta,
            self.weight,
            self.elbo,
            found.mean,
            found.var,
            found.parameter_gradient,
            n_iter,
            converged,
        )


class _Bound:
    """The evidence bound as a function of the sites."""

    def __init__(
        self, dynamics: Dynamics, series: Series, likelihood: Likelihood, offset: float
    ) -> None:
        self.dynamics, self.series = dynamics, series
        self.likelihood, self.offset = likelihood, offset

    def __call__(self, beta: Tensor, weight: Tensor) -> _Point | None:
        """Evaluate the bound; None where the sites leave no valid posterior."""
        centre = self._centre(beta, weight)
        try:
            found = evidence(self.dynamics, self.series.gaps, beta, weight, centre)
        except NotPositiveDefiniteError:
            return None
        mean, var = found.mean, found.var
        if not (math.isfinite(found.log_normalizer) and bool(mean.isfinite().all())):
            return None
        expected, slope, curvature = _expectations(
            self.likelihood,
            self.series.y,
            self.series.at_rows(mean) + self.offset,
            self.series.at_rows(var),
        )
        fit = float(self.series.sums(expected).sum())
        away = mean - centre
        of_sites = float((beta - weight * centre) @ away - 0.5 * (weight @ (away**2 + var)))
        elbo = found.log_normalizer + fit - of_sites
        if not math.isfinite(elbo):
            return None
        rounding = _ROUNDING * (abs(found.log_normalizer) + abs(fit) + abs(of_sites))
        return _Point(beta, weight, found, elbo, rounding, slope, curvature)

    def _centre(self, beta: Tensor, weight: Tensor) -> Tensor:
        """Tops of the sites that weigh more than the prior, else 0: log Z is taken from there.

        Little noise would else make terms in log Z and in what the sites expect that cancel.
        """
        H = self.dynamics.observation
        heavy = weight * float(H @ self.dynamics.stationary @ H) > 1
        return torch.where(heavy, beta / weight, 0.0)

    def targets(self, point: _Point, cautious: bool) -> tuple[Tensor, Tensor]:
        """Sites (m,), (m,) that the next step goes to."""
        mean = self.series.at_rows(point.found.mean)
        weight = -point.curvature
        if cautious:
            to_mode = self.likelihood.mode(self.series.y) - self.offset - mean
            weight = torch.where(weight >= 0, weight, point.slope / to_mode)
        return self.series.sums(point.slope + weight * mean), self.series.sums(weight)


def _first_point(bound: _Bound, start: tuple[Tensor, Tensor] | None) -> tuple[_Point, bool]:
    """Where the search begins, and whether with caution: sites of old have no need of it."""
    point = None if start is None else bound(*start)
    if point is not None:
        return point, False
    point = bound(*_start(bound.series, bound.likelihood, bound.offset))
    if point is None:
        raise NonFiniteLossError(
            "The evidence bound is not finite at the start. Check for targets or times of extreme "
            "size, and for a kernel with a variance or length scale that is 0 or infinite.",
            iteration=0,
            parameter=None,
        )
    return point, True


def _start(series: Series, likelihood: Likelihood, offset: float) -> tuple[Tensor, Tensor]:
    """Sites of the parabolas that touch the rows' log-densities at their modes."""
    mode = likelihood.mode(series.y)
    place = torch.where(mode.isfinite(), mode, 0.0)
    slope, curvature = likelihood.derivatives(series.y, place)
    beta = series.sums(slope.detach() - curvature.detach() * (place - offset))
    return beta, -series.sums(curvature.detach())


def _expectations(
    likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected log-density of each row under q, and expected derivatives in f, each (n,).

    One pass serves all three: by the theorems of Bonnet and Price the expected derivatives are
    those of the expectation in the mean and, twice, in the variance.
    """

    def tile(y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = mean.detach().requires_grad_(), var.detach().requires_grad_()
        with torch.enable_grad():
            expected = likelihood.expected_log_prob(y, mean, var)
            in_mean, in_var = torch.autograd.grad(expected.sum(), (mean, var))
        return expected.detach(), in_mean, 2 * in_var

    tiles = zip(y.split(_TILE), mean.split(_TILE), var.split(_TILE), strict=True)
    expected, slope, curvature = zip(*(tile(*rows) for rows in tiles), strict=True)
    return torch.cat(expected), torch.cat(slope), torch.cat(curvature)
