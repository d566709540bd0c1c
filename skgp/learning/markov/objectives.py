r"""What the hyper-parameters of a series are judged by, each evaluation and its gradient in O(n).

With :math:`Z(\beta, \omega)` the normaliser of the sites (:mod:`.smoother`), the log marginal
likelihood of Gaussian noise is

.. math:: \log p(y) = \log Z - \tfrac12 \sum_i w_i [\log 2 \pi \sigma^2 + y_i^2 / \sigma^2],
          \qquad \frac{\partial \log Z}{\partial \beta_t} = m_t, \quad
          \frac{\partial \log Z}{\partial \omega_t} = -\tfrac12 (m_t^2 + v_t),

and its variational bound for other likelihoods (:mod:`.sites`) and for inducing states
(:mod:`.inducing.fit`) has, where the sites have converged, the gradient of log Z with the sites
held.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from skgp.inference.markov.inducing.fit import InducingFit, fit_inducing
from skgp.inference.markov.natural import likelihood_gradient
from skgp.inference.markov.series import Series
from skgp.inference.markov.sites import Sites, fit_sites
from skgp.inference.markov.smoother import evidence
from skgp.kernels.sde_dynamics import Dynamics
from skgp.likelihoods import Likelihood

__all__ = [
    "Evaluation",
    "GaussianEvidence",
    "Objective",
    "SharedEvidence",
    "VariationalEvidence",
    "find_sites",
]

_TOL = 1e-8  # nats an observation to which a bound is found


@dataclass(frozen=True)
class Evaluation:
    """Evidence in nats, and its gradients.

    Attributes
    ----------
    value : float
    dynamics_gradient : Tensor of shape (q,)
        In the log variances and rates of the dynamics.
    likelihood_gradient : Tensor of shape (p,)
        In the parameters of the family.
    knot_gradient : Tensor of shape (M,) or None
        In the places of the inducing states, where there are any.
    """

    value: float
    dynamics_gradient: Tensor
    likelihood_gradient: Tensor
    knot_gradient: Tensor | None = None


class Objective(Protocol):
    """The evidence of data as a function of their dynamics and their likelihood.

    Attributes
    ----------
    total : float
        Number of observations, or the sum of their weights.
    """

    total: float

    def __call__(
        self, dynamics: Dynamics, parameters: Tensor, knots: Tensor | None, *, tol: float
    ) -> Evaluation:
        """Evaluate at dynamics, parameters (p,) of the likelihood's family and knots (M,).

        A bound is good to about `tol` nats an observation.
        """


class GaussianEvidence:
    """Exact log marginal likelihood under Gaussian noise.

    Parameters
    ----------
    series : Series
    """

    def __init__(self, series: Series) -> None:
        self.series = series
        self.total = series.total
        self._centre = series.totals / series.counts
        # Within equal times; with the sites centred, little noise makes no large terms that cancel.
        deviation = series.y - series.at_rows(self._centre)
        self._scatter = float(series.sums(deviation**2).sum())

    def __call__(
        self,
        dynamics: Dynamics,
        parameters: Tensor,
        knots: Tensor | None = None,
        *,
        tol: float = _TOL,
    ) -> Evaluation:
        series, noise = self.series, float(parameters[0].exp())
        beta, omega = series.gaussian_sites(noise)
        found = evidence(dynamics, series.gaps, beta, omega, centre=self._centre)
        constant = series.total * math.log(2 * math.pi * noise) + self._scatter / noise
        misfit = (found.mean - self._centre) ** 2 + found.var
        slope = 0.5 * (float(omega @ misfit) - series.total + self._scatter / noise)
        return Evaluation(
            found.log_normalizer - 0.5 * constant,
            found.parameter_gradient,
            parameters.new_tensor([slope]),
        )


class VariationalEvidence:
    """Evidence bound of the Gaussian process nearest to the posterior, at its best.

    With knots the process is one that the states there decide. The sites of an evaluation are where
    the next one starts.

    Parameters
    ----------
    series : Series
    family : Likelihood
    offset : float
        Prior mean of f.

    Attributes
    ----------
    sites : (Tensor, Tensor) of shapes (m,) or None
        Of the last evaluation.
    """

    def __init__(self, series: Series, family: Likelihood, offset: float = 0.0) -> None:
        self.series, self.family, self.offset = series, family, offset
        self.total = series.total
        self.sites: tuple[Tensor, Tensor] | None = None

    def __call__(
        self,
        dynamics: Dynamics,
        parameters: Tensor,
        knots: Tensor | None = None,
        *,
        tol: float = _TOL,
    ) -> Evaluation:
        found = find_sites(
            dynamics,
            self.series,
            self.family.with_parameters(parameters),
            offset=self.offset,
            knots=knots,
            start=self.sites,
            tol=tol,
        )
        self.sites = found.beta, found.weight
        series = self.series
        mean, var = series.at_rows(found.mean) + self.offset, series.at_rows(found.var)
        return Evaluation(
            found.elbo,
            found.parameter_gradient,
            likelihood_gradient(self.family, parameters, (series.y, mean, var), series.sums),
            found.knot_gradient if isinstance(found, InducingFit) else None,
        )


def find_sites(
    dynamics: Dynamics,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float,
    knots: Tensor | None,
    start: tuple[Tensor, Tensor] | None = None,
    tol: float = _TOL,
) -> Sites | InducingFit:
    """The best sites of a series, for states at all times or, if given, at knots only.

    Parameters
    ----------
    dynamics : Dynamics
    series : Series
    likelihood : Likelihood
    offset : float
        Prior mean of f.
    knots : Tensor of shape (M,) or None
    start : (Tensor, Tensor) of shapes (m,), optional
        Sites of hyper-parameters nearby.
    tol : float, default=1e-8
        The search ends with a step that gains less, in nats an observation.
    """
    if knots is None:
        return fit_sites(dynamics, series, likelihood, offset=offset, start=start, tol=tol)
    if likelihood.is_gaussian:  # of which the first sites are the best
        return fit_inducing(dynamics, knots, series, likelihood, offset=offset, max_iter=1)
    return fit_inducing(dynamics, knots, series, likelihood, offset=offset, start=start, tol=tol)


class SharedEvidence:
    """Sum of the evidences of several latent processes that share dynamics and likelihood.

    Parameters
    ----------
    objectives : sequence of Objective
        Of the same rows.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self.objectives = objectives
        self.total = objectives[0].total

    def __call__(
        self,
        dynamics: Dynamics,
        parameters: Tensor,
        knots: Tensor | None = None,
        *,
        tol: float = _TOL,
    ) -> Evaluation:
        found = [objective(dynamics, parameters, knots, tol=tol) for objective in self.objectives]
        return Evaluation(
            sum(each.value for each in found),
            torch.stack([each.dynamics_gradient for each in found]).sum(0),
            torch.stack([each.likelihood_gradient for each in found]).sum(0),
            None
            if knots is None
            else torch.stack([cast(Tensor, each.knot_gradient) for each in found]).sum(0),
        )
