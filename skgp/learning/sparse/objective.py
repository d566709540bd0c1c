r"""What is minimised: the loss of the rows and :math:`\beta` times the KL divergence.

.. math:: \mathcal L = \sum_i w_i\, \ell_i + \beta\, \mathrm{KL}(q(u) \,\|\, p(u))

==============  ======================================================  =========================
objective       :math:`\ell_i`                                          computed by
==============  ======================================================  =========================
"log_loss"      :math:`-\log E_{q(f_i)}[p(y_i \mid f_i)]`, the loss      ``log_predictive``, or a
                that the prediction is judged by                        sampled gradient
"elbo"          :math:`-E_{q(f_i)}[\log p(y_i \mid f_i)]`                ``expected_log_prob``
"fitc"          --                                                      `collapsed.fitc_loss`
"square_loss"   :math:`\frac12 (\mu_i - y_i)^2`                          `collapsed.square_loss`
==============  ======================================================  =========================

``Coordinates`` stand between a state and what an optimiser moves.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.collapsed import (
    elbo_loss,
    elbo_posterior,
    fitc_loss,
    fitc_posterior,
    square_loss,
    square_posterior,
    statistics,
)
from skgp.inference.sparse import (
    FixedFeatures,
    ReferenceGaussian,
    SparseState,
    kl_from_standard_normal,
    latent_moments,
)
from skgp.kernels.scales import length_scales
from skgp.learning import defaults
from skgp.likelihoods import Likelihood
from skgp.likelihoods.log_expectation import log_expectation_loss

__all__ = ["STOCHASTIC_GRADIENTS", "Coordinates", "Objective", "Values"]

STOCHASTIC_GRADIENTS = ("bmc", "smooth_bmc", "ups")


@dataclass(frozen=True)
class Objective:
    """What to minimise and over what.

    Attributes
    ----------
    likelihood : Likelihood
        The likelihood and its free parameters.
    name : {"log_loss", "elbo", "fitc", "square_loss"}
    beta : float
        Weight of the KL divergence, not negative.
    unit : float
        Of "square_loss", the noise variance in units of the prior variance at which beta counts as
        1 (see :func:`skgp.inference.collapsed.evidence_ratio`).
    gradient : {"exact", "bmc", "smooth_bmc", "ups"}
        Of the log-expectations of "log_loss"; "exact" is a closed form or quadrature.
    n_gradient_samples : int
        Samples of the others, for each row and iteration.
    learn_kernel, learn_likelihood, learn_inducing : bool
        Whether theta, the parameters of the likelihood and Z are minimised over too.
    """

    likelihood: Likelihood
    name: str = "log_loss"
    beta: float = 1.0
    unit: float = 1.0
    gradient: str = "exact"
    n_gradient_samples: int = 10
    learn_kernel: bool = True
    learn_likelihood: bool = True
    learn_inducing: bool = True

    @property
    def stochastic(self) -> bool:
        """Whether its gradients are random."""
        return self.name == "log_loss" and self.gradient in STOCHASTIC_GRADIENTS

    @property
    def is_gaussian(self) -> bool:
        """Whether the noise is Gaussian."""
        return self.likelihood.is_gaussian

    @property
    def has_closed_form(self) -> bool:
        """Whether q(u) is known for given hyper-parameters."""
        return self.name in ("fitc", "square_loss") or (self.name == "elbo" and self.is_gaussian)

    @property
    def moves_hyperparameters(self) -> bool:
        """Whether anything but q(u) is minimised over."""
        return self.learn_kernel or self.learn_likelihood or self.learn_inducing

    @property
    def of_posterior_alone(self) -> "Objective":
        """The same over q(u) alone."""
        return replace(self, learn_kernel=False, learn_likelihood=False, learn_inducing=False)

    @property
    def elbo(self) -> "Objective":
        """The negative ELBO, beta = 1, over the same."""
        return replace(self, name="elbo", beta=1.0)

    def data_loss(
        self,
        likelihood: Likelihood,
        data: Data,
        mean: Tensor,
        var: Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Weighted sum of the losses under q(f) of moments (n, c): "log_loss" or "elbo", in nats.

        Differentiable in the moments and the parameters of the likelihood; the generator is that of
        gradients by sampling.
        """
        likelihood = likelihood.at(data.offset)
        if self.name == "elbo":
            return -data.weighted_sum(likelihood.expected_log_prob(data.y, mean, var))
        if not self.stochastic:
            return -data.weighted_sum(likelihood.log_predictive(data.y, mean, var))
        losses = log_expectation_loss(
            likelihood,
            data.y,
            mean,
            var,
            gradient=self.gradient,
            n_samples=self.n_gradient_samples,
            generator=generator,
        )
        return data.weighted_sum(losses)

    def posterior_loss(
        self,
        state: SparseState,
        data: Data,
        values: "Values",
        *,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
        features: FixedFeatures | None = None,
    ) -> Tensor:
        """The objective at a point, its rows' part multiplied by `scale`; a scalar in nats.

        `features` of the rows save their computation where kernel and inducing points do not move.
        """
        if features is not None:
            mean, var = features.moments(values.mean, values.root)
        else:
            theta, Z, q = values.theta, values.Z, (values.mean, values.root)
            mean, var = latent_moments(
                state.kernel, data.X, Z, *q, theta=theta, offset=state.offset
            )
        likelihood = self.likelihood.with_parameters(values.likelihood)
        rows = self.data_loss(likelihood, data, mean, var, generator)
        return scale * rows + self.beta * kl_from_standard_normal(values.mean, values.root)

    @torch.no_grad()
    def total(self, state: SparseState, data: Data) -> float:
        """The objective, "log_loss" or "elbo", of a state: in nats, by blocks of rows."""
        exact, rows = replace(self, gradient="exact"), 0.0
        likelihood = self.likelihood.with_parameters(state.likelihood)
        n_rows = max(1, int(defaults.BLOCK_NUMBERS / state.mean.numel()))
        for index in torch.arange(len(data)).split(n_rows):
            block = data.take(index)
            moments = latent_moments(
                state.kernel, block.X, state.Z, state.mean, state.root, offset=state.offset
            )
            rows += float(exact.data_loss(likelihood, block, *moments))
        return rows + self.beta * float(kl_from_standard_normal(state.mean, state.root))

    def collapsed_loss(self, kernel, data: Data, values: "Values") -> Tensor:
        """Least value over q(u) where that is known, a scalar; O(n M^2)."""
        noise = self.likelihood.gaussian_noise(values.likelihood)
        if self.name == "fitc":
            return fitc_loss(kernel, data, values.Z, noise, values.theta)
        sums = statistics(kernel, data, values.Z, values.theta)
        if self.name == "square_loss":
            return square_loss(sums, beta=self.ridge_beta)
        return elbo_loss(sums, noise, beta=self.least_beta)

    @torch.no_grad()
    def with_optimum(self, state: SparseState, data: Data) -> SparseState:
        """The state with the optimal q(u) for its hyper-parameters, in closed form; O(n M^2)."""
        noise = self.likelihood.gaussian_noise(state.likelihood)
        if self.name == "fitc":
            return state.with_posterior(*fitc_posterior(state.kernel, data, state.Z, noise))
        sums = statistics(state.kernel, data, state.Z)
        if self.name == "square_loss":
            return state.with_posterior(*square_posterior(sums, beta=self.ridge_beta))
        return state.with_posterior(*elbo_posterior(sums, noise, beta=self.least_beta))

    @property
    def least_beta(self) -> float:
        """Beta, at least what q(u) needs to have a variance, or the ridge a meaning."""
        return max(self.beta, defaults.LEAST_BETA)

    @property
    def ridge_beta(self) -> float:
        """Beta of "square_loss" in units of the prior variance."""
        return self.least_beta * self.unit


class Values(NamedTuple):
    """One point of the search, in the terms of the model; differentiable in the coordinates."""

    theta: Tensor  # (kernel.n_dims,)
    likelihood: Tensor  # (p,)
    Z: Tensor  # (M, d)
    mean: Tensor  # (M, c)
    root: Tensor  # (c, M, M)


class Coordinates:
    r"""Coordinates around a state, in which all directions are about equally steep.

    Inducing points are measured in length scales, the posterior from that of the state
    (:class:`~skgp.inference.sparse.ReferenceGaussian`); hyper-parameters are logarithms as they
    are. A search that moves far does well to begin anew, from coordinates around the point that it
    has reached. ``free_posterior`` is False where q(u) is the closed-form optimum for given
    hyper-parameters; X (n, d) are the training inputs.
    """

    def __init__(
        self, state: SparseState, objective: Objective, X: Tensor, *, free_posterior: bool = True
    ) -> None:
        self.state = state
        self.likelihood = objective.likelihood
        self.units = length_scales(state.kernel, X.double()).to(state.Z)
        self.theta = torch.as_tensor(state.kernel.theta).to(state.Z)
        self.reference = ReferenceGaussian(state.mean, state.root) if free_posterior else None
        self.learn_kernel = objective.learn_kernel and len(self.theta) > 0
        self.learn_likelihood = objective.learn_likelihood and len(state.likelihood) > 0
        self.learn_inducing = objective.learn_inducing

    def start(self) -> dict[str, Tensor]:
        """The coordinates of the state; empty if nothing is free."""
        start = {}
        if self.learn_kernel:
            start["theta"] = self.theta
        if self.learn_likelihood:
            start["likelihood"] = self.state.likelihood
        if self.learn_inducing:
            start["Z"] = self.state.Z / self.units
        return start | (self.reference.start() if self.reference else {})

    def bounds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bounds of the coordinates that have some."""
        bounds = {}
        if self.learn_kernel:
            low, high = torch.as_tensor(self.state.kernel.bounds).to(self.state.Z).T
            bounds["theta"] = low, high
        if self.learn_likelihood:
            bounds["likelihood"] = self.likelihood.box(self.state.Z)
        return bounds

    def values(self, parts: dict[str, Tensor]) -> Values:
        """The point in the terms of the model."""
        state = self.state
        Z = parts["Z"] * self.units if self.learn_inducing else state.Z
        mean, root = state.mean, state.root
        if self.reference:
            mean, root = self.reference.posterior(parts["alpha"], parts["triangle"])
        theta = parts.get("theta", self.theta)
        return Values(theta, parts.get("likelihood", state.likelihood), Z, mean, root)

    @torch.no_grad()
    def to_state(self, parts: dict[str, Tensor]) -> SparseState:
        """The state at the point."""
        theta, *parameters = (value.detach() for value in self.values(parts))
        kernel = self.state.kernel.clone_with_theta(theta.cpu().double().numpy())
        likelihood, Z, mean, root = parameters
        return SparseState(kernel, likelihood, Z, mean, root, self.state.offset)
