r"""What is minimised, for what problem, and how predictions of held-out data are judged.

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
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.collapsed import (
    elbo_loss,
    elbo_posterior,
    fitc_loss,
    fitc_posterior,
    natural_parameters,
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
    posterior_from_precision,
)
from skgp.learning.defaults import MAX_HELD_OUT
from skgp.learning.selection import held_out_rows, stratum
from skgp.learning.sparse import defaults
from skgp.likelihoods import Likelihood
from skgp.likelihoods.log_expectation import log_expectation_loss
from skgp.optim.bfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder

STOCHASTIC_GRADIENTS = ("bmc", "smooth_bmc", "ups")


@dataclass(frozen=True)
class Objective:
    """What to minimise and over what."""

    likelihood: Likelihood
    name: str = "log_loss"  # or "elbo", "fitc", "square_loss"
    beta: float = 1.0  # weight of the KL divergence, not negative
    unit: float = 1.0  # noise over prior variance at which beta counts as 1, of "square_loss"
    gradient: str = "exact"  # or "bmc", "smooth_bmc", "ups", of the log-expectations
    n_gradient_samples: int = 10  # of each row and iteration
    learn_kernel: bool = True  # whether theta is minimised over too; likewise the next two
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
        theta: Tensor | None = None,
        *,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
        features: FixedFeatures | None = None,
    ) -> Tensor:
        """The objective of a state, its rows' part multiplied by `scale`; a scalar in nats.

        Differentiable in the state and in theta, which replaces the kernel's own values. `features`
        of the rows save their computation where kernel and inducing points do not move.
        """
        q = state.mean, state.root
        if features is not None:
            mean, var = features.moments(*q)
        else:
            mean, var = latent_moments(
                state.kernel, data.X, state.Z, *q, theta=theta, offset=state.offset
            )
        likelihood = self.likelihood.with_parameters(state.likelihood)
        rows = self.data_loss(likelihood, data, mean, var, generator)
        return scale * rows + self.beta * kl_from_standard_normal(*q)

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

    def collapsed_loss(self, state: SparseState, data: Data, theta: Tensor | None = None) -> Tensor:
        """Least value over q(u) where that is known, a scalar; O(n M^2)."""
        noise = self.likelihood.gaussian_noise(state.likelihood)
        if self.name == "fitc":
            return fitc_loss(state.kernel, data, state.Z, noise, theta)
        sums = statistics(state.kernel, data, state.Z, theta)
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


@dataclass(frozen=True)
class Problem:
    """What a sparse GP is to be fitted to, and how."""

    kernels: list  # expressions without noise: one, or several to choose from
    data: Data
    objective: Objective
    settings: "Settings"
    inducing: Callable[..., Tensor]  # (kernel, M=None): points (M, d) to begin with, in its metric
    offset: Tensor  # (c,), prior means of the latent functions
    generator: torch.Generator
    recorder: StopRecorder  # hears of every iteration, and says when to stop
    start: SparseState | None = None  # of an earlier fit, to go on from

    def prior(self, kernel, likelihood: Tensor | None = None) -> SparseState:
        """The posterior of no data, at the points to begin with."""
        if likelihood is None:
            likelihood = self.objective.likelihood.initial(self.data.X)
        return SparseState.prior(kernel, likelihood, self.inducing(kernel), self.offset)


@dataclass(frozen=True)
class Settings:
    """How long, and on which rows, a sparse model is searched for."""

    start_iter: int = 100  # of the start, by the ELBO
    max_iter: int = 200  # of the objective; pairs of steps, with minibatches
    tol: float = 1e-6  # relative fall of the objective an iteration below which a search stops
    early_stopping: bool = True  # whether rows are held out of a joint search
    validation_fraction: float = 0.1
    joint: bool = True  # whether the objective moves hyper-parameters
    few: bool = False  # whether there are at most `FEW_PER_INDUCING` rows an inducing point
    # Rows of a minibatch; None takes all up to 1e6 / M (1e7 / M for q alone), and chooses beyond.
    batch_size: int | None = None
    learning_rate: float | None = None  # of minibatches; None for the default
    # Whether the start may learn hyper-parameters by the evidence of a dense Gaussian process,
    # O(n^3) an iteration, in place of the ELBO: for few rows, as many inducing points.
    dense_start: bool = False
    # Standard deviation a priori of the log ratios of length scales in such a start, around those
    # of the kernels; None is without a prior.
    ratio_std: float | None = None
    rescales: bool = False  # whether labels left out have the last word on scales in such a start
    exact: bool = False  # whether the fit is that of a dense Gaussian process (`dense_start`)
    sizes: tuple[int, ...] = ()  # of inducing points, beyond those of the start, to try in order


def split(data: Data, fraction: float, generator: torch.Generator) -> tuple[Data, Data]:
    """Rows to learn from and held-out rows, stratified by y; equal rows of X stay together.

    Held out is this fraction of the rows, at most 4000 and at least one.
    """
    n = len(data)
    n_out = min(max(1, round(fraction * n)), MAX_HELD_OUT, n - 1)
    y, classes = stratum(data.y)
    out = torch.from_numpy(held_out_rows(y, n_out, generator, X=data.X, classes=classes))
    return data.take(~out), data.take(out)


@torch.no_grad()
def held_out_losses(state: SparseState, objective: Objective, data: Data) -> Tensor:
    """Losses (n,) of the predictions for rows that were not trained on, weighted to a mean of all.

    In nats; for "square_loss", half the squared error. Summed over several latent functions.
    """
    posterior, data = state.posterior(), data.to(torch.float64)
    if objective.name == "square_loss":
        losses = 0.5 * (posterior.mean(data.X) - data.y).square()
    else:
        likelihood = objective.likelihood.with_parameters(state.likelihood.double()).at(data.offset)
        losses = -likelihood.log_predictive(data.y, *posterior.mean_and_variance(data.X))
    losses = losses.sum(1)
    return losses if data.weight is None else losses * data.weight * len(data) / data.total


class BestState:
    """Keeps the state of a search that predicts the held-out rows best, and says when to stop.

    Every fifth iteration is scored; six scores without a new best stop. ``loss`` is the least mean
    loss, ``losses`` all of them, ``best_rows`` those of the best state by row.
    """

    best_state: SparseState
    best_rows: Tensor  # (n,)

    def __init__(self, objective: Objective, held_out: Data) -> None:
        self.objective, self.held_out = objective, held_out
        self.loss = math.inf
        self.losses: list[float] = []
        self._n_calls = self._n_worse = 0

    def __call__(self, state: Callable[[], SparseState]) -> bool:
        """Hear of an iteration; return whether to stop. `state` is called when it is time."""
        self._n_calls += 1
        return self._n_calls % defaults.SCORE_EVERY == 0 and self.score(state())

    def score(self, state: SparseState) -> bool:
        """Score a state; return whether to stop."""
        rows = held_out_losses(state, self.objective, self.held_out)
        loss = float(rows.mean())
        loss = loss if math.isfinite(loss) else math.inf
        self._n_worse += 1
        if not self.losses or loss < self.loss:
            self.best_state, self.best_rows = state, rows
            self.loss, self._n_worse = loss, 0
        self.losses.append(loss)
        return self._n_worse >= defaults.SCORE_PATIENCE


def update(
    state: SparseState, data: Data, objective: Objective, *, max_iter: int, tol: float
) -> SparseState:
    r"""The posterior after a batch, the prior of which is the posterior of the last [1]_.

    With hyper-parameters and inducing points fixed, a batch B changes q to

    .. math:: q_B = \arg\min_q \sum_{i \in B} w_i \ell_i + \gamma \beta\, \mathrm{KL}(q \,\|\,
              q_{B-1}),

    which for Gaussian noise and the objectives with closed forms gives the same posterior as all
    rows at once ("square_loss" counts as "elbo" under the noise that its variances were calibrated
    with), and otherwise one near it. That takes :math:`\gamma = 1`. Under the log-loss of numbers,
    though, the width of :math:`q_{B-1}` stands for noise and for what the model lacks, not for what
    is unknown of u: as a prior it is too weak, and a batch overrules it; there :math:`\gamma = 10`.
    Labels keep :math:`\gamma = 1`: classes may come late. The ELBO in place of the log-loss does
    far worse: it knows only the noise, which the log-loss has driven to nearly nothing.

    In coordinates around :math:`q_{B-1}` the divergence is again that from N(0, I). O(n M^2 c) an
    iteration; one where there is a closed form.
    """
    if objective.has_closed_form:
        return _conjugate(state, data, objective)
    objective = replace(objective, gradient="exact")
    reference = ReferenceGaussian(state.mean, state.root)
    likelihood = objective.likelihood.with_parameters(state.likelihood)
    weak = objective.name == "log_loss" and likelihood.is_numeric
    weight = objective.beta * (defaults.LOG_LOSS_WEIGHT if weak else 1.0)

    def loss(parts: dict[str, Tensor]) -> Tensor:
        mean, root = reference.posterior(**parts)
        moments = latent_moments(state.kernel, data.X, state.Z, mean, root, offset=state.offset)
        divergence = kl_from_standard_normal(parts["alpha"], reference.triangle(parts["triangle"]))
        return (objective.data_loss(likelihood, data, *moments) + weight * divergence) / data.total

    found = minimize_lbfgs(loss, reference.start(), max_iter=max_iter, tol=tol)
    with torch.no_grad():
        return state.with_posterior(*reference.posterior(**found.parameters))


@torch.no_grad()
def _conjugate(state: SparseState, data: Data, objective: Objective) -> SparseState:
    """Add the natural parameters of the batch to those of the posterior."""
    noise = objective.likelihood.gaussian_noise(state.likelihood)
    beta = objective.least_beta if objective.name == "elbo" else 1.0
    precision, projection = natural_parameters(
        state.kernel, data, state.Z, noise, beta=beta, fitc=objective.name == "fitc"
    )
    before = torch.cholesky_inverse(state.root[0])  # S^-1 of S = R R^T
    projection = projection + before @ state.mean
    return state.with_posterior(*posterior_from_precision(before + precision, projection))
