r"""The best q(u) for fixed hyper-parameters: closed form or a few natural-gradient steps.

A step replaces the likelihood of each row by the site that has its expected slope g and curvature h
under the present q(f_n) = N(mu, v) [1]_,

.. math:: \lambda_n = -w_n h, \qquad \eta_n = w_n g + \lambda_n \mu, \qquad
          g = E[\partial \log p], \quad h = E[\partial^2 \log p],

moves the sites a part rho of the way and solves for q (:mod:`skgp.inference.neighbors.system`).
Where the steps stand still the bound is stationary. Gaussian noise has the same sites whatever q:
one step.

Student-t noise is not log-concave, and h positive for outliers. The system of the mean then takes
the slope of the chord from mu to y, :math:`\lambda = w g / (y - \mu)`, where that is more than
:math:`-w h`: the weight of the row in the scale mixture of normals, under which a step cannot
overshoot (on protein the bound ended up to 150 nats higher than with :math:`\lambda = 0` for
outliers, and without halvings). S takes h as it is. Where the steps stand still both are right.

A step after which the bound is lower is halved.

Noise
-----
The bound depends on the variance of Gaussian noise through
:math:`-\tfrac12 \sum w [\log \sigma^2 + ((y - \mu)^2 + v) / \sigma^2]`, largest at the weighted
mean of :math:`(y - \mu)^2 + v`. Alternated with q, it climbs to a stationary point of both.

References
----------
.. [1] Khan and Lin (2017), Conjugate-computation variational inference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skgp.inference.neighbors.full_system import FullSystem
from skgp.inference.neighbors.system import LocalSystem, Posterior, Sites
from skgp.likelihoods import Gaussian, StudentT
from skgp.likelihoods.base import Likelihood

__all__ = ["SitesFit", "fit_sites"]

Callback = Callable[[int, dict], bool | None]

_N_HALVINGS = 4
_HASTE = 5.0


@dataclass(frozen=True)
class SitesFit:
    """Where the steps arrived.

    Attributes
    ----------
    q : Posterior
    sites : Sites
        Of the rows, (n, c).
    likelihood : Likelihood
        That given, or Gaussian with the noise found.
    bound : float
        Evidence lower bound, in nats; that of the paper for a KL weight of 1.
    history : list of dict
        One a step: ``loss`` (the bound with the sign changed), ``rate`` (rho), ``n_cg`` and
        ``cg_residual`` of the system of the mean.
    converged : bool
        Whether the bound stood still; not if no step was uphill that should have been.
    """

    q: Posterior
    sites: Sites
    likelihood: Likelihood
    bound: float
    history: list[dict] = field(default_factory=list)
    converged: bool = False

    @property
    def mean(self) -> Tensor:
        """m, shape (M, c)."""
        return self.q.mean

    @property
    def var(self) -> Tensor:
        """Diagonal of S, shape (M, c)."""
        return self.q.var


def fit_sites(
    system: LocalSystem | FullSystem,
    Y: Tensor,
    likelihood: Likelihood,
    *,
    offset: Tensor | None = None,
    start: Posterior | None = None,
    damping: float = 0.75,
    max_iter: int = 14,
    tol: float = 1e-4,
    cg_tol: float = 1e-3,
    cg_max_iter: int = 200,
    learn_noise: bool = False,
    noise_bounds: tuple[float, float] = (1e-6, math.inf),
    callback: Callback | None = None,
) -> SitesFit:
    """Maximise the bound over q(u).

    Parameters
    ----------
    system : LocalSystem or FullSystem
        Of n rows; their weights are its own.
    Y : Tensor of shape (n, c)
        Observations.
    likelihood : Likelihood
    offset : Tensor that broadcasts to (n, c), optional
        Prior mean of f.
    start : Posterior, optional
        Where to look up the first sites; without data by default.
    damping : float
        rho of the second and later steps, in (0, 1]. The first goes all the way.
    max_iter : int
        Steps at most.
    tol : float
        Change of the bound, relative to itself, at which to stop.
    cg_tol, cg_max_iter : float, int
        Relative residual and iterations of the system of the mean, begun at the last mean. While
        the bound rises fast, by fifty times `tol`, up to five times that residual will do.
    learn_noise : bool
        Find the variance of Gaussian noise too.
    noise_bounds : (float, float)
        In the units of y squared.
    callback : callable, optional
        Called after each step with its number and its entry of the history; True stops.

    Returns
    -------
    SitesFit
        A step costs ``O((n H + nnz Q) c)`` an iteration of conjugate gradients and, where there
        are no closed forms, quadrature for n c rows.

    Raises
    ------
    ValueError
        If shapes do not fit, a number is out of range, or `learn_noise` is asked of a likelihood
        that is not Gaussian.
    """
    _check(system, Y, likelihood, damping, max_iter, learn_noise)
    offset = Y.new_zeros(Y.shape[1]) if offset is None else offset
    problem = _Problem(system, Y, offset, {"tol": cg_tol, "max_iter": cg_max_iter, "warn": False})
    fit = problem.start(likelihood, start)
    tol = max(tol, 50 * torch.finfo(Y.dtype).eps)  # as far as the bound itself is known
    history: list[dict] = []
    is_gaussian, converged = isinstance(likelihood, Gaussian), False
    haste = 1.0 if is_gaussian else _HASTE
    for i in range(max_iter):
        rate = 1.0 if is_gaussian or (i == 0 and start is None) else damping
        found = problem.improve(fit, rate, slack=tol, haste=haste)
        if found is None:
            break
        change, (fit, entry) = found[0].bound - fit.bound, found
        haste = min(max(1.0, abs(change) / (10 * tol * abs(fit.bound))), haste)
        if learn_noise:
            fit = problem.with_noise(fit, noise_bounds)
        history.append(entry | {"loss": -fit.bound})
        converged = (is_gaussian and not learn_noise) or abs(change) <= tol * abs(fit.bound)
        if (callback is not None and callback(i, history[-1])) or converged:
            break
    return replace(fit, history=history, converged=converged)


@dataclass(frozen=True)
class _Problem:
    """What does not change from step to step."""

    system: LocalSystem | FullSystem
    Y: Tensor
    offset: Tensor
    options: dict

    def start(self, likelihood: Likelihood, q: Posterior | None) -> SitesFit:
        """Before the first step: without data, or with the sites of q."""
        if q is None:
            return self._solved(likelihood, Sites.none(self.Y), None)[0]
        return self._solved(likelihood, self._sites(likelihood, q), q.mean)[0]

    def improve(
        self, fit: SitesFit, rate: float, slack: float, haste: float
    ) -> tuple[SitesFit, dict] | None:
        """A step that does not lower the bound by more than `slack` of it; None if there is none.

        The slack allows for means that are not solved for to the last digit, but to `haste` times
        the residual asked for.
        """
        target = self._sites(fit.likelihood, fit.q)
        for _ in range(_N_HALVINGS + 1):
            sites = fit.sites.towards(target, rate)
            found, entry = self._solved(fit.likelihood, sites, fit.q.mean, haste)
            if found.bound >= fit.bound - slack * abs(fit.bound):
                return found, entry | {"rate": rate}
            rate /= 2
        return None

    def with_noise(self, fit: SitesFit, bounds: tuple[float, float]) -> SitesFit:
        """The same q with the variance of the noise that is best for it."""
        mean, var = self._moments(fit.q)
        squares = self._weighted((self.Y - mean).square() + var)
        noise = (squares.sum() / self._weighted(torch.ones_like(self.Y)).sum()).clamp(*bounds)
        likelihood = Gaussian(noise)
        return replace(fit, likelihood=likelihood, bound=self._bound(likelihood, fit.q))

    def _solved(
        self, likelihood: Likelihood, sites: Sites, start: Tensor | None, haste: float = 1.0
    ) -> tuple[SitesFit, dict]:
        options = self.options | {"tol": haste * self.options["tol"]}
        q, found = self.system.solve(sites, start=start, **options)
        entry = {"n_cg": found.n_iter, "cg_residual": float(found.residual.max())}
        return SitesFit(q, sites, likelihood, self._bound(likelihood, q)), entry

    def _sites(self, likelihood: Likelihood, q: Posterior) -> Sites:
        mean, var = self._moments(q)
        slope, bend = likelihood.expected_derivatives(self.Y, mean, var)
        curvature = -bend
        precision = curvature.clamp_min(0.0)  # rounding, where log p is concave
        if isinstance(likelihood, StudentT):
            away = self.Y - mean
            chord = torch.where(away == 0, 0.0, slope / torch.where(away == 0, 1.0, away))
            precision = torch.maximum(precision, chord)
        curvature, precision = self._weighted(curvature), self._weighted(precision)
        shift = self._weighted(slope) + precision * (mean - self.offset)
        return Sites(precision, shift, curvature)

    def _bound(self, likelihood: Likelihood, q: Posterior) -> float:
        rows = likelihood.expected_log_prob(self.Y, *self._moments(q))
        return float(self._weighted(rows).sum() - self.system.divergence(q))

    def _moments(self, q: Posterior) -> tuple[Tensor, Tensor]:
        mean, var = self.system.moments(q)
        return self.offset + mean, var

    def _weighted(self, values: Tensor) -> Tensor:
        weight = self.system.weight
        return values if weight is None else weight[:, None] * values


def _check(system, Y: Tensor, likelihood, damping: float, max_iter: int, learn_noise: bool) -> None:
    if Y.ndim != 2 or len(Y) != len(system):
        raise ValueError(
            f"Y must have the shape ({len(system)}, c) of the rows of the system; "
            f"got {tuple(Y.shape)}."
        )
    if not 0 < damping <= 1:
        raise ValueError(f"damping must be in (0, 1]; got {damping!r}. 0.75 is a good value.")
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1; got {max_iter!r}.")
    if learn_noise and not isinstance(likelihood, Gaussian):
        raise ValueError(
            f"learn_noise needs Gaussian noise; got {type(likelihood).__name__}. Its parameters "
            "are learned with the hyper-parameters."
        )
