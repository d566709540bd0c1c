r"""The best Gaussian q(u) for fixed hyper-parameters: closed form or a few natural-gradient steps.

A step replaces the likelihood of each observation by a *site*, the factor
:math:`\exp(-\tfrac12 \lambda_n f_n^2 + \eta_n f_n)` in f without its prior mean, that has its
expected slope g and curvature h under the present q(f_n) = N(mu, v) [1]_,

.. math:: \lambda_n = -w_n h, \qquad \eta_n = w_n g + \lambda_n \mu, \qquad
          g = E[\partial \log p], \quad h = E[\partial^2 \log p],

moves the sites a part rho of the way and solves for q, which a *system* does
(:class:`~skgp.inference.natural.FullSystem`,
:class:`~skgp.inference.neighbors.system.LocalSystem`). Where the ELBO falls the step is cut to a
quarter: from a rate far too low, that to a huge count goes beyond all bounds. Where the steps stand
still the ELBO is stationary, but for the variances of a full S under chords, below. Gaussian noise
has the same sites whatever q: one step.

Under the prior a count seen through an exponential has the rate E[exp f], far above all counts
where the prior is wide: sites of such a precision hold q where it is, and the steps stand still.
Observations through a link therefore begin at the sites of q(f_n) = N(f, 0), f the value that each
stands for (`Likelihood.gaussian_observations`): of large counts these are nearly the last ones.

Where a likelihood is not log-concave and h is positive, the curvature is that of the parabola with
the slope g at mu and its top at the mode y of the likelihood, :math:`\lambda = w g / (y - \mu)`: of
Student-t noise the weight of the observation in the scale mixture of normals, under which a step
cannot overshoot (on protein the ELBO ended up to 150 nats higher than with :math:`\lambda = 0` for
outliers, and without cuts). Of the mean that is a fixed point of the ELBO, of a full S it is not:
once the chords have brought q near, or half the steps are gone, its sites have :math:`-w h` of
either sign, as long as the ELBO does not fall.

A q of full covariance, :math:`u = m_0 + L v` with a prior :math:`v \sim N(0, I)`, of which row n
sees :math:`f_n = b_n + \psi_n^T v` and a rest of a variance of its own, is at given sites best with

.. math:: S_v = \kappa \Big[ \sum_n \lambda_n \psi_n \psi_n^T + \kappa I \Big]^{-1}, \qquad
          m_v = \tfrac1\kappa S_v \sum_n \eta_n \psi_n .

With :math:`m_0`, L those of a posterior it is that of rows that come after it, as exact.

References
----------
.. [1] Khan and Lin (2017), Conjugate-computation variational inference.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from skgp.inference.defaults import HASTE, NEARLY_EXACT, SHORTEST_SITE_STEP, SITE_CUT
from skgp.inference.sites import Sites, full_sites
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cg import CGResult
from skgp.linalg.cholesky import log_det, reverse_cholesky, ridge_by_rows, tri_solve
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import Stopped


@dataclass(frozen=True)
class VariationalPosterior:
    """q(u) = N(mean (M, c), S): diagonal of S (M, c) and, if S is full, root root' (c, M, M)."""

    mean: Tensor
    var: Tensor
    root: Tensor | None = None


class System(Protocol):
    """What the ELBO knows of n rows beside their likelihood."""

    @property
    def is_signed(self) -> bool:
        """Whether sites may have negative precisions."""

    @property
    def weight(self) -> Tensor | None:
        """Of the rows, (n,)."""

    def solve(self, sites: Sites, **options) -> tuple[VariationalPosterior, CGResult]:
        """q for given sites."""

    def moments(self, q: VariationalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without prior means."""

    def divergence(self, q: VariationalPosterior) -> Tensor:
        """What the ELBO subtracts from the expected log-likelihood, in nats."""


@dataclass(frozen=True)
class SitesFit:
    """Where the steps arrived."""

    q: VariationalPosterior
    sites: Any  # `Sites` of the rows, or of rows in blocks their sums
    bound: float  # ELBO, in nats
    mean: Tensor  # (n, c); of f, the prior mean removed; of rows in blocks at inducing points
    #: One a step: ``loss`` (minus the ELBO), ``rate`` (rho), ``moved`` (root mean square change of
    #: the mean, over 1 + that of it), ``n_cg`` and ``cg_residual`` of the system of the mean.
    history: list[dict] = field(default_factory=list)
    converged: bool = False


def fit_natural_sites(
    system: System,  # of n rows; their weights are its own
    Y: Tensor,  # (n, c), observations
    likelihood: Likelihood,
    *,
    offset: Tensor | None = None,  # prior mean of f; broadcasts to (n, c)
    start: VariationalPosterior | None = None,  # of the first sites; without data by default
    max_iter: int = 14,  # steps at most
    tol: float = 1e-4,  # change of the ELBO, relative to itself, at which to stop
    damping: float = 0.75,  # rho, in (0, 1], of the second and later steps; the first is whole
    callback: Callback | None = None,  # told of each step its entry of the history; True stops
    **cg,
) -> SitesFit:
    """Maximise the ELBO over q(u).

    ``cg_tol`` and ``cg_max_iter`` are relative residual (1e-3) and iterations (200) of the system
    of the mean, begun at the last mean. While the ELBO rises fast, by fifty times `tol`, up to five
    times that residual will do.
    """
    offset = Y.new_zeros(Y.shape[1]) if offset is None else offset
    problem = _Problem(system, Y, likelihood, offset, **cg)
    return natural_steps(
        problem, start=start, max_iter=max_iter, tol=tol, damping=damping, callback=callback
    )


def unsettled(
    fit: SitesFit, system: System, Y: Tensor, likelihood: Likelihood, offset: Tensor
) -> float:
    """Share by which a step after `fit_natural_sites` would change the precisions of the sites.

    Near 1 the steps stand still short of q. 0 of Gaussian noise and of sites of either sign.
    """
    if likelihood.is_gaussian or not likelihood.is_log_concave:
        return 0.0
    return fit.sites.distance(_Problem(system, Y, likelihood, offset).sites(fit.q))


def natural_steps(
    problem: "SitesProblem",
    *,
    start: VariationalPosterior | None = None,
    max_iter: int = 14,
    tol: float = 1e-4,
    damping: float = 0.75,
    callback: Callback | None = None,
) -> SitesFit:
    """The steps of `fit_natural_sites`, whose arguments these are, wherever observations lie."""
    fit = problem.start(start)
    tol = max(tol, 50 * torch.finfo(fit.mean.dtype).eps)  # as far as the ELBO itself is known
    history: list[dict] = []
    likelihood = problem.likelihood
    at_once, converged = likelihood.is_gaussian, False
    haste = 1.0 if at_once else problem.haste
    rate = 1.0 if at_once or start is None else damping
    signed, ends_signed = False, problem.is_signed and not likelihood.is_log_concave
    try:
        target = problem.sites(fit.q)
        while len(history) < max_iter and (rate > SHORTEST_SITE_STEP or signed != ends_signed):
            ended = converged or rate <= SHORTEST_SITE_STEP or 2 * len(history) >= max_iter
            if ended and signed != ends_signed:
                signed = True
                converged, rate, target = False, damping, problem.sites(fit.q, signed=True)
            found, entry = problem.solved(fit.sites.towards(target, rate), fit.q.mean, haste)
            # Slack for means that are not solved for to the last digit.
            if not found.bound >= fit.bound - tol * abs(fit.bound):
                rate *= SITE_CUT
                continue
            distance = (found.mean - fit.mean).square().mean().sqrt()
            moved = float(distance / (1 + found.mean.square().mean().sqrt()))
            change, fit = abs(found.bound - fit.bound), found
            history.append(entry | {"rate": rate, "loss": -fit.bound, "moved": moved})
            # Nothing has converged that was cut short, or not solved for to the residual asked for.
            still = change <= tol * abs(fit.bound)
            converged = at_once or (still and haste == 1.0 and rate >= damping)
            haste = min(max(1.0, change / (10 * tol * abs(fit.bound))), haste)
            stops = callback is not None and callback(len(history) - 1, history[-1])
            if stops or (converged and signed == ends_signed):
                break
            rate, target = min(damping, 2 * rate), problem.sites(fit.q, signed=signed)
    except Stopped:  # within a pass over the observations: what the one before it left stands
        converged = False
    return replace(fit, history=history, converged=converged and signed == ends_signed)


class SitesProblem(Protocol):
    """What `natural_steps` ask of the observations."""

    @property
    def likelihood(self) -> Likelihood:
        """That of the observations."""

    @property
    def is_signed(self) -> bool:
        """Whether sites may have negative precisions."""

    @property
    def haste(self) -> float:
        """Times the residual asked for that will do while the ELBO rises fast."""

    def start(self, q: VariationalPosterior | None) -> SitesFit:
        """Before the first step."""

    def solved(self, sites: Any, start: Tensor | None, haste: float) -> tuple[SitesFit, dict]:
        """q and ELBO of sites, the mean to `haste` times the residual asked for."""

    def sites(self, q: VariationalPosterior, *, signed: bool = False) -> Any:
        """The sites that a full step from q goes to, with the method `Sites.towards`."""


@dataclass(frozen=True)
class _Problem:
    """What does not change from step to step."""

    system: System
    Y: Tensor  # (n, c)
    likelihood: Likelihood
    offset: Tensor
    cg_tol: float = 1e-3
    cg_max_iter: int = 200

    haste: ClassVar[float] = HASTE

    @property
    def is_signed(self) -> bool:
        """As the system has them."""
        return self.system.is_signed

    def start(self, q: VariationalPosterior | None) -> SitesFit:
        """Before the first step: with the best of no sites, those of q, and of the targets."""
        starts = [self.solved(Sites.none(self.Y), None)[0]]
        if q is not None:
            starts.append(self.solved(self.sites(q), q.mean)[0])
        if self.likelihood.has_link:
            f = self.likelihood.gaussian_observations(self.Y, self.offset)[0] - self.offset
            starts.append(self.solved(self._sites(f, torch.zeros_like(f)), None)[0])
        return max(starts, key=lambda fit: fit.bound)

    def solved(
        self, sites: Sites, start: Tensor | None, haste: float = 1.0
    ) -> tuple[SitesFit, dict]:
        """q and ELBO of sites, the mean to `haste` times the residual asked for."""
        options = {"tol": haste * self.cg_tol, "max_iter": self.cg_max_iter, "warn": False}
        try:
            q, found = self.system.solve(sites, start=start, **options)
        except NotPositiveDefiniteError:
            if not bool((sites.precision < 0).any()):
                raise
            return SitesFit(cast(VariationalPosterior, None), sites, -math.inf, sites.shift), {}
        entry = {"n_cg": found.n_iter, "cg_residual": float(found.residual.max())}
        mean, var = self.system.moments(q)
        rows = self.likelihood.expected_log_prob(self.Y, self.offset + mean, var)
        bound = float(self._weighted(rows).sum() - self.system.divergence(q))
        return SitesFit(q, sites, bound if math.isfinite(bound) else -math.inf, mean), entry

    def sites(self, q: VariationalPosterior, *, signed: bool = False) -> Sites:
        """The sites that a full step from q goes to; signed ones have no chords."""
        return self._sites(*self.system.moments(q), signed=signed)

    def _sites(self, mean: Tensor, var: Tensor, *, signed: bool = False) -> Sites:
        """The same at moments (n, c) of f, without prior means."""
        place = self.Y, self.offset, mean, var, self.system.weight
        return full_sites(self.likelihood, *place, signed=signed)

    def _weighted(self, values: Tensor) -> Tensor:
        weight = self.system.weight
        return values if weight is None else weight[:, None] * values


@dataclass(frozen=True)
class FullSystem:
    """What the ELBO knows of n rows, for a full S; its q is one of v."""

    is_signed: ClassVar[bool] = True
    features: Tensor  # (n, M); psi
    variance: Tensor  # (n,); of f given u
    kl_weight: float = 1.0  # kappa
    weight: Tensor | None = None  # (n,)
    factor: Tensor | None = None  # (M, M); L, for `unwhitened` and `whitened`

    def __len__(self) -> int:
        return len(self.features)

    def solve(self, sites: Sites, **options) -> tuple[VariationalPosterior, CGResult]:
        """q(v) by dense factors, ``O((n + M) M^2 c)``; options are of no use."""
        pairs = zip(sites.precision.T, sites.shift.T, strict=True)
        return joined_columns([self._column(*pair) for pair in pairs])

    def moments(self, q: VariationalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, c) of f, without b."""
        spread = [(self.features @ root).square().sum(1) for root in cast(Tensor, q.root)]
        return self.features @ q.mean, self.variance[:, None] + torch.stack(spread, dim=1)

    def divergence(self, q: VariationalPosterior) -> Tensor:
        """kappa times the sum of KL(q(v) || p(v)) over the latent functions, in nats."""
        return whitened_divergence(q, self.kl_weight)

    def unwhitened(self, q: VariationalPosterior) -> VariationalPosterior:
        """q of u - m_0."""
        factor = cast(Tensor, self.factor)
        root = factor @ cast(Tensor, q.root)
        return VariationalPosterior(factor @ q.mean, root.square().sum(-1).T, root)

    def whitened(self, q: VariationalPosterior) -> VariationalPosterior:
        """The way back, of a posterior of full covariance."""
        factor = cast(Tensor, self.factor)
        root = tri_solve(factor, cast(Tensor, q.root), upper=False)
        mean = tri_solve(factor, q.mean, upper=False)
        return VariationalPosterior(mean, root.square().sum(-1).T, root)

    def _column(self, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        M = self.features.shape[1]
        eye = torch.eye(M, dtype=self.features.dtype, device=self.features.device)
        if not precision.any():  # before the first step: the prior
            return torch.zeros_like(eye[0]), eye
        size = precision * self.features.square().sum(1) / self.kl_weight
        if bool((precision > 0).all()) and float(size.max()) > NEARLY_EXACT:
            noise = self.kl_weight / precision
            mean, root, _ = ridge_by_rows(self.features, shift / precision, noise)
            return mean, root
        scaled = self.features.T * precision
        return full_column(scaled @ self.features, self.features.T @ shift, self.kl_weight)


def whitened_divergence(q: VariationalPosterior, kl_weight: float) -> Tensor:
    """kappa times the sum of KL(q(v) || N(0, I)) over the latent functions, in nats."""
    root = cast(Tensor, q.root)
    quadratic = q.mean.square().sum() + root.square().sum()
    return 0.5 * kl_weight * (quadratic - q.mean.numel() - log_det(root).sum())


def full_column(data: Tensor, shift: Tensor, kl_weight: float) -> tuple[Tensor, Tensor]:
    """Mean (M,) and root of S of one latent function, of the sums (M, M) and (M,) of its sites."""
    eye = torch.eye(len(data), dtype=data.dtype, device=data.device)
    upper = reverse_cholesky(eye + data / kl_weight).factor
    root = tri_solve(upper, eye, upper=True).T  # S^-1 = U U'
    return root @ (root.T @ shift) / kl_weight, root


def joined_columns(columns: list[tuple[Tensor, Tensor]]) -> tuple[VariationalPosterior, CGResult]:
    """q of means (M,) and roots (M, M), one of each latent function, that are exact."""
    mean = torch.stack([column for column, _ in columns], dim=1)
    root = torch.stack([factor for _, factor in columns])
    exact = CGResult(mean, 0, mean.new_zeros(mean.shape[1]), True, torch.zeros_like(mean))
    return VariationalPosterior(mean, root.square().sum(-1).T, root), exact
