r"""What the hyper-parameters of state-space models are judged by, with gradients in closed form.

With :math:`Z(\beta, \omega)` the normaliser of the sites (:mod:`skgp.inference.markov.smoother`),
the log marginal likelihood of a series under Gaussian noise is

.. math:: \log p(y) = \log Z - \tfrac12 \sum_i w_i [\log 2 \pi \sigma^2 + y_i^2 / \sigma^2],
          \qquad \frac{\partial \log Z}{\partial \beta_t} = m_t, \quad
          \frac{\partial \log Z}{\partial \omega_t} = -\tfrac12 (m_t^2 + v_t),

and the ELBO, for other likelihoods (:mod:`~skgp.inference.markov.sites`) and for inducing states
(:mod:`~skgp.inference.markov.inducing`), has, where the sites have converged, the gradient of log Z
with the sites held. An evaluation of a series is O(n). Those of additive models, with the sum of
the components for f, are in :mod:`.additive`.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.inducing import find_sites
from skgp.inference.markov.series import Series
from skgp.inference.markov.short import DensePosterior, DensePrior
from skgp.inference.markov.short_gaussian import ShortCovariance, ShortRows, ShortSeries
from skgp.inference.markov.sites import SiteFit, likelihood_gradient, prior_mean
from skgp.inference.markov.smoother import SitesEvidence, evidence
from skgp.kernels.hyperparameters import with_theta
from skgp.kernels.sde import Dynamics, StateSpace, state_space
from skgp.learning.markov.defaults import ELBO_TOL, LOST_NATS
from skgp.likelihoods import Likelihood
from skgp.linalg import NotPositiveDefiniteError

Processes = Sequence[Dynamics]  # one a component
Knots = Tensor | None  # (M,) inducing locations


@dataclass(frozen=True)
class Evaluation:
    """Evidence or ELBO in nats, and its gradients."""

    value: float
    posterior: Any
    likelihood_gradient: Tensor  # (p,) in the parameters of the likelihood
    gradients: Callable[[], list[Tensor]]  # (q_j,) in the parameters of each component's dynamics
    knot_gradient: Tensor | None = None  # (M,) in the inducing locations, where there are any


class SeriesObjective(Protocol):
    """The evidence of data as a function of their dynamics and their likelihood.

    An ELBO is good to about `tol` nats per observation, where the objective heeds it.
    """

    total: float  # number of observations, or the sum of their weights

    def __call__(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, *, tol: float = ELBO_TOL
    ) -> Evaluation:
        """Evaluate at dynamics, one a component, its parameters (p,), and knots (M,)."""


_ROUNDING = 1e-11  # mathematical: of log parameters


class Component:
    """A kernel on one column, and the parameters of its state-space form as a function of theta.

    Log variances and log rates are affine functions of theta for most kernels. These are found out
    once, where torch's way through a kernel expression takes longer than the evidence of few rows.
    """

    def __init__(self, kernel: Any, tolerance: float | None = None) -> None:
        self.kernel, self.form = kernel, state_space(kernel, tolerance=tolerance)
        self.theta = torch.from_numpy(self.form.theta)  # (t,)
        self.low, self.high = torch.from_numpy(self.form.bounds).unbind(1)
        self.is_length_scale = torch.from_numpy(self.form.is_length_scale)  # (t,)
        self._level = self.form.parameters().detach().numpy()
        known = self.form.slopes
        self.slopes = (
            _find_slopes(self.form) if known is None else torch.from_numpy(known)
        )  # (q, t)
        self._affine = None if self.slopes is None else self.slopes.numpy()
        self._centre = self.form.theta
        self._moving = None if self._affine is None else (self._affine != 0).any(1).tolist()

    @staticmethod
    def of(kernel: Any) -> "Component":
        """Of a kernel, or what has been one already."""
        return kernel if isinstance(kernel, Component) else Component(kernel)

    def at(self, theta: Tensor) -> "Component":
        """The component with other hyper-parameters."""
        if self.slopes is None:  # the form may need other states there
            return Component(with_theta(self.kernel, theta.numpy()), self.form.tolerance)
        other = copy.copy(self)
        other.__dict__.pop("kernel", None)  # made when asked for
        other.theta, other._centre = theta, theta.numpy()
        other._level = self.affine(other._centre)
        return other

    @cached_property
    def kernel(self) -> Any:
        """The expression, with these hyper-parameters."""
        return with_theta(self.form.kernel, self.theta.numpy())

    @property
    def is_amplitude(self) -> Tensor:
        """Which entries of theta, (t,), scale variances and nothing else."""
        if self.slopes is None:
            return torch.zeros(len(self.theta), dtype=torch.bool)
        rates = self.slopes[len(self.form.order) :]
        return (rates.abs() < _ROUNDING).all(0)

    def parameters(self, theta: Tensor) -> Tensor:
        """Of the form, (q,), without a graph."""
        if self.slopes is None:
            return self.form.parameters(theta).detach()
        return torch.from_numpy(self.affine(theta.numpy()))

    def affine(self, theta: np.ndarray) -> np.ndarray:
        """The same in NumPy, (q,), where they are affine."""
        return self._level + cast(np.ndarray, self._affine) @ (theta - self._centre)

    def dynamics(self, theta: Tensor | None = None) -> Dynamics:
        """The form at theta (t,), by default the component's own."""
        parameters = self.parameters(self.theta if theta is None else theta)
        return self.form.at(parameters, self._moving)

    def affine_dynamics(self, theta: np.ndarray) -> Dynamics:
        """The same in NumPy, where the parameters are affine."""
        return self.form.at(self.affine(theta), self._moving)

    def pull(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Gradient in theta of a function with gradient `slope` (q,) in the parameters."""
        if self.slopes is not None:
            return torch.from_numpy(slope.numpy() @ self.slopes.numpy())
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.form.parameters(theta) @ slope, theta)[0]

    def scaled(self, factors: Tensor) -> Tensor:
        """Theta with the length scales multiplied by factors (k,), within their bounds; (k, t)."""
        moved = factors.log()[:, None] * self.is_length_scale
        return (self.theta + moved).clamp(self.low, self.high)

    def with_length_scale_of(self, other: "Component") -> "Component":
        """With length scales of the geometric mean that those of another have.

        Where the other has the greater variance, those are beyond what the data show, their slopes:
        it is these that are taken over.
        """
        mine, theirs = self.theta[self.is_length_scale], other.theta[other.is_length_scale]
        if not (len(mine) and len(theirs)):
            return self
        factor = (theirs.mean() - mine.mean()).exp()
        factor /= max(1.0, other.variance / self.variance) ** 0.5
        return self.at(self.scaled(factor[None])[0])

    def variances(self, theta: Tensor) -> Tensor:
        """Of the parts that return to a mean, in place of their log variances, (q,); the rest 0."""
        parameters = self.parameters(theta)
        found = torch.zeros_like(parameters)
        for i, part in enumerate(self.form.primitives):
            if part and all(each.is_stationary for each in part):
                found[i] = parameters[i].exp()
        return found

    @property
    def variance(self) -> float:
        """Prior variance."""
        return float(self.parameters(self.theta)[: len(self.form.order)].exp().sum())


def _find_slopes(form: StateSpace) -> Tensor | None:
    """Slopes (q, t) of a form's parameters in theta where they are affine, or None."""
    at, theta = form.parameters, torch.from_numpy(form.theta)
    level, steps = at(theta), torch.eye(len(theta), dtype=torch.float64)
    slopes = level.new_zeros(len(level), len(steps))
    for i, step in enumerate(steps):
        slopes[:, i] = at(theta + step) - level
    far = torch.linspace(-0.7, 0.9, len(steps), dtype=torch.float64)
    off = at(theta + far) - level - slopes @ far
    return slopes if bool((off.abs() < _ROUNDING).all()) else None


# ---- series ----------------------------------------------------------------------------------


class ClosedForm:
    """Log marginal likelihood under Gaussian noise."""

    total: float
    _squares: float  # weighted sum of those of y less the prior mean, or where sites are centred

    def __call__(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, *, tol: float = ELBO_TOL
    ) -> Evaluation:
        """As of `SeriesObjective`, exact."""
        value, slope, q = self.assess(dynamics, math.exp(float(parameters[0])))
        return Evaluation(value, q, parameters.new_tensor([slope]), q.gradients)

    def assess(
        self, dynamics: Processes, noise: float, *, rough: bool = False
    ) -> tuple[float, float, Any]:
        """The value, its derivative in the log noise, and the posterior; `rough` for a choice."""
        q = self._condition(dynamics, noise, rough)
        constant = -0.5 * (self.total * math.log(2 * math.pi * noise) + self._squares / noise)
        slope = 0.5 * (self._misfit(q, noise) / noise + q.spread - self.total)
        return q.log_normalizer + constant, slope, q

    def short(self, component: Component) -> ShortSeries | None:
        """The same value as a function of the form's parameters, of a short series."""
        return None

    def _condition(self, dynamics: Processes, noise: float, rough: bool = False) -> Any:
        """The posterior."""
        raise NotImplementedError

    def _misfit(self, q: Any, noise: float) -> float:
        """Weighted sum of the squares of y less the posterior mean."""
        raise NotImplementedError


class SeriesEvidence(ClosedForm):
    """Of one series."""

    series: Series
    _centre: Tensor  # (m,) means of what was observed at each time
    _beside: np.ndarray | None = None  # (m, m) covariance of what is beside the process, and stays

    @cached_property
    def _rows(self) -> ShortRows:
        arrays = self._centre.numpy(), self.series.counts.numpy()
        return ShortRows(*arrays, self.total, self._squares)

    @cached_property
    def _made(self) -> dict[StateSpace, ShortSeries | None]:
        return {}

    def short(self, component: Component) -> ShortSeries | None:
        """As of `ClosedForm`; made once for a form, whose values of what is fixed it holds."""
        if component.form not in self._made:
            process, made = component.dynamics(), None
            lags = self.series.lags_of(process)
            shapes = (p.has_shape for _, block in process.blocks for p in block.primitives)
            if lags is not None and not any(shapes):
                made = ShortSeries(ShortCovariance(process, lags), self._rows, self._beside)
            self._made[component.form] = made
        return self._made[component.form]


class GaussianEvidence(SeriesEvidence):
    """Without terms, exact."""

    def __init__(self, series: Series) -> None:
        self.series, self.total = series, series.total
        self._centre = series.totals / series.counts
        # Within equal times; with the sites centred, little noise makes no large terms that cancel.
        deviation = series.y - series.at_rows(self._centre)
        self._squares = float(series.sums(deviation**2).sum())

    def _condition(self, dynamics: Processes, noise: float, rough: bool = False) -> SitesEvidence:
        process, *_ = dynamics
        lags = self.series.lags_of(process)
        prior = None if lags is None else DensePrior(process, lags)
        if prior is not None:
            totals, counts, centre = self._arrays
            weight = counts / noise
            if prior.suits(weight, rough=rough):
                return DensePosterior(prior, totals / noise, weight, centre)
        sites, gaps = self.series.gaussian_sites(noise), self.series.gaps_of(process)
        found = evidence(process, gaps, *sites, self._centre, prior=prior)
        if found.log_normalizer > LOST_NATS * self.total:  # it is the logarithm of a probability
            raise NotPositiveDefiniteError(
                f"The noise, of variance {noise:.3g}, is too little beside the variance of the "
                "process for the digits of a filter. Give the noise a greater lower bound, the "
                "variance or the length scale a lower upper bound, or a Matern kernel."
            )
        return found

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Weighted sums of y, weights and means of each time, (m,), of a series in main memory."""
        return tuple(t.numpy() for t in (self.series.totals, self.series.counts, self._centre))

    def _misfit(self, q: SitesEvidence, noise: float) -> float:
        return noise * q.misfit(self._centre) + self._squares


class SitesElbo(ABC):
    """ELBO of the Gaussian nearest to the posterior, for any likelihood, at its best.

    The sites of an evaluation are where the next one starts.
    """

    def __init__(
        self, rows: Any, likelihood: Likelihood, weighted: Callable[[Tensor], Tensor]
    ) -> None:
        self.likelihood, self.total = likelihood, rows.total
        self.sites: tuple[Tensor, Tensor] | None = None  # (m,), of the last evaluation
        self.mean = 0.0  # that f was less there
        self._y, self._log_exposure, self._weighted = rows.y, rows.log_exposure, weighted

    def __call__(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, *, tol: float = ELBO_TOL
    ) -> Evaluation:
        """The ELBO at its best over the sites."""
        parameters = parameters.to(self._y)
        found = self.find(dynamics, parameters, knots, tol)
        # What rounding leaves of an ELBO may be the best of all: a search is to turn back there.
        lost = found.rounding > LOST_NATS * self.total
        q, value = found.posterior, (-math.inf if lost else found.elbo)
        if value > -math.inf:
            self.sites, self.mean = (found.beta, found.weight), self.mean_of(dynamics)
        rows = self._y, found.mean, found.var
        place = rows, self._weighted, self._log_exposure
        slope = likelihood_gradient(self.likelihood, parameters, *place)
        of_knots = None if knots is None else q.knot_gradient
        return Evaluation(value, q, slope, self.gradients_of(found, dynamics), of_knots)

    def gradients_of(self, found: SiteFit, dynamics: Processes) -> Callable[[], list[Tensor]]:
        """Those of `Evaluation`."""
        return found.posterior.gradients

    @abstractmethod
    def find(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, tol: float = ELBO_TOL
    ) -> SiteFit:
        """The best sites."""

    def mean_of(self, dynamics: Processes) -> float:
        """Prior mean of f that the sites do not know of."""
        return 0.0


class VariationalEvidence(SitesElbo):
    """Of a series; with knots of a process that the states there decide."""

    def __init__(self, series: Series, likelihood: Likelihood, offset: float = 0.0) -> None:
        super().__init__(series, likelihood, series.sums)
        self.series, self.offset = series, offset

    def find(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, tol: float = ELBO_TOL
    ) -> SiteFit:
        """As of `find_sites`."""
        likelihood, mean = self.likelihood.with_parameters(parameters), self.mean_of(dynamics)
        place, start = (self.series, likelihood, mean, knots), self.sites_about(mean)
        return find_sites(dynamics[0], *place, start=start, tol=tol)

    def mean_of(self, dynamics: Processes) -> float:
        """As of `prior_mean`."""
        return prior_mean(self.likelihood, self.offset, dynamics[0])[0]

    def sites_about(self, mean: float) -> tuple[Tensor, Tensor] | None:
        """The sites of the last evaluation as those of f less another mean."""
        if self.sites is None:
            return None
        beta, weight = self.sites
        return beta - weight * (mean - self.mean), weight

    def gradients_of(self, found: SiteFit, dynamics: Processes) -> Callable[[], list[Tensor]]:
        """With what the prior mean adds."""
        of_sites = found.posterior.gradients
        _, slopes = prior_mean(self.likelihood, self.offset, dynamics[0])
        if not any(slopes):
            return of_sites
        rise = float(self._weighted(found.slope).sum())

        def gradients() -> list[Tensor]:
            (gradient,) = of_sites()
            gradient = gradient.clone()
            gradient[: len(slopes)] += rise * gradient.new_tensor(slopes)
            return [gradient]

        return gradients


class SharedEvidence:
    """Sum of the evidences of several latent processes that share dynamics and likelihood."""

    def __init__(self, objectives: Sequence[SeriesObjective]) -> None:
        self.objectives = objectives
        self.total = objectives[0].total

    def __call__(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, *, tol: float = ELBO_TOL
    ) -> Evaluation:
        """Of all of them."""
        found = [objective(dynamics, parameters, knots, tol=tol) for objective in self.objectives]
        if len(found) == 1:
            return found[0]
        return Evaluation(
            sum(each.value for each in found),
            [each.posterior for each in found],
            torch.stack([each.likelihood_gradient for each in found]).sum(0),
            lambda: [
                sum(parts) for parts in zip(*(each.gradients() for each in found), strict=True)
            ],
            None
            if knots is None
            else torch.stack([cast(Tensor, each.knot_gradient) for each in found]).sum(0),
        )
