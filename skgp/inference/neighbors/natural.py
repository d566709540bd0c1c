r"""The best q(u) for fixed hyper-parameters: closed form or a few natural-gradient steps.

A step replaces the likelihood of each row by the site that has its expected slope g and curvature h
under the present q(f_n) = N(mu, v) [1]_,

.. math:: \lambda_n = -w_n h, \qquad \eta_n = w_n g + \lambda_n \mu, \qquad
          g = E[\partial \log p], \quad h = E[\partial^2 \log p],

moves the sites a part rho of the way and solves for q (:mod:`skgp.inference.neighbors.system`); it
is halved where the bound falls. Where the steps stand still the bound is stationary. Gaussian noise
has the same sites whatever q: one step.

Student-t noise is not log-concave, and h positive for outliers. The system of the mean then takes
the slope of the chord from mu to y, :math:`\lambda = w g / (y - \mu)`, where that is more than
:math:`-w h`: the weight of the row in the scale mixture of normals, under which a step cannot
overshoot (on protein the bound ended up to 150 nats higher than with :math:`\lambda = 0` for
outliers, and without halvings). S takes h as it is. Where the steps stand still both are right.

References
----------
.. [1] Khan and Lin (2017), Conjugate-computation variational inference.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skgp.inference.neighbors.defaults import HASTE, N_HALVINGS
from skgp.inference.neighbors.system import FullSystem, LocalSystem, Posterior, Sites
from skgp.likelihoods.base import Likelihood

Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class SitesFit:
    """Where the steps arrived."""

    q: Posterior
    sites: Sites  # of the rows, (n, c)
    bound: float  # evidence lower bound, in nats; that of the paper for a KL weight of 1
    #: One a step: ``loss`` (the bound with the sign changed), ``rate`` (rho), ``n_cg`` and
    #: ``cg_residual`` of the system of the mean.
    history: list[dict] = field(default_factory=list)
    #: Whether the bound stood still; not if no step was uphill that should have been.
    converged: bool = False


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
    callback : callable, optional
        Called after each step with its number and its entry of the history; True stops.

    Returns
    -------
    SitesFit
        A step costs O((n H + nnz Q) c) an iteration of conjugate gradients and, where there are no
        closed forms, quadrature for n c rows.
    """
    offset = Y.new_zeros(Y.shape[1]) if offset is None else offset
    options = {"tol": cg_tol, "max_iter": cg_max_iter, "warn": False}
    problem = _Problem(system, Y, likelihood, offset, options)
    fit = problem.start(start)
    tol = max(tol, 50 * torch.finfo(Y.dtype).eps)  # as far as the bound itself is known
    history: list[dict] = []
    at_once, converged = likelihood.is_gaussian, False
    haste = 1.0 if at_once else HASTE
    for i in range(max_iter):
        rate = 1.0 if at_once or (i == 0 and start is None) else damping
        found = problem.improve(fit, rate, slack=tol, haste=haste)
        if found is None:
            break
        change, (fit, entry) = found[0].bound - fit.bound, found
        haste = min(max(1.0, abs(change) / (10 * tol * abs(fit.bound))), haste)
        history.append(entry | {"loss": -fit.bound})
        converged = at_once or abs(change) <= tol * abs(fit.bound)
        if (callback is not None and callback(i, history[-1])) or converged:
            break
    return replace(fit, history=history, converged=converged)


@dataclass(frozen=True)
class _Problem:
    """What does not change from step to step."""

    system: LocalSystem | FullSystem
    Y: Tensor  # (n, c)
    likelihood: Likelihood
    offset: Tensor
    options: dict  # of the system of the mean

    def start(self, q: Posterior | None) -> SitesFit:
        """Before the first step: without data, or with the sites of q."""
        if q is None:
            return self._solved(Sites.none(self.Y), None)[0]
        return self._solved(self._sites(q), q.mean)[0]

    def improve(
        self, fit: SitesFit, rate: float, slack: float, haste: float
    ) -> tuple[SitesFit, dict] | None:
        """A step that does not lower the bound by more than `slack` of it; None if there is none.

        The slack allows for means that are not solved for to the last digit, but to `haste` times
        the residual asked for.
        """
        target = self._sites(fit.q)
        for _ in range(N_HALVINGS + 1):
            sites = fit.sites.towards(target, rate)
            found, entry = self._solved(sites, fit.q.mean, haste)
            if found.bound >= fit.bound - slack * abs(fit.bound):
                return found, entry | {"rate": rate}
            rate /= 2
        return None

    def _solved(
        self, sites: Sites, start: Tensor | None, haste: float = 1.0
    ) -> tuple[SitesFit, dict]:
        options = self.options | {"tol": haste * self.options["tol"]}
        q, found = self.system.solve(sites, start=start, **options)
        entry = {"n_cg": found.n_iter, "cg_residual": float(found.residual.max())}
        rows = self.likelihood.expected_log_prob(self.Y, *self._moments(q))
        bound = float(self._weighted(rows).sum() - self.system.divergence(q))
        return SitesFit(q, sites, bound), entry

    def _sites(self, q: Posterior) -> Sites:
        mean, var = self._moments(q)
        slope, bend = self.likelihood.expected_derivatives(self.Y, mean, var)
        curvature = -bend
        precision = curvature.clamp_min(0.0)  # rounding, where log p is concave
        if not self.likelihood.is_log_concave:
            away = self.likelihood.mode(self.Y) - mean
            chord = torch.where(away == 0, 0.0, slope / torch.where(away == 0, 1.0, away))
            precision = torch.maximum(precision, chord)
        curvature, precision = self._weighted(curvature), self._weighted(precision)
        shift = self._weighted(slope) + precision * (mean - self.offset)
        return Sites(precision, shift, curvature)

    def _moments(self, q: Posterior) -> tuple[Tensor, Tensor]:
        mean, var = self.system.moments(q)
        return self.offset + mean, var

    def _weighted(self, values: Tensor) -> Tensor:
        weight = self.system.weight
        return values if weight is None else weight[:, None] * values
