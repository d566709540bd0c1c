"""What a QSGP regression is asked for and what it gives back; posteriors from sums over rows."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.stochastic.state import SGDState
from skgp.inference.weights.gram import StreamingGram, log_marginal_likelihood, refit_noise
from skgp.inference.weights.posterior import (
    AugmentedPosterior,
    LinearWeightsPosterior,
    gram_posterior,
)
from skgp.models.qsgp.plan import PRECONDITIONER_RANK, Plan


@dataclass(frozen=True)
class Options:
    """Parameters of the solvers, in the estimator's words and with its defaults."""

    n_dense_columns: int = 100
    basis_batch_size: int = 10_000
    batch_size: int = 500
    n_support: int = 500
    augment: bool = True
    feature_map: str = "orthogonal"
    max_iter: int | None = None
    tol: float | None = None
    learning_rate: float = 0.1
    early_stopping: bool = False
    validation_fraction: float = 0.1
    learn_hyperparameters: bool = True
    refit_noise: bool = True
    n_samples: int = 63
    n_prior_features: int = 32_768
    preconditioner_rank: int = PRECONDITIONER_RANK
    memory_budget: float = 8e9
    dtype: torch.dtype = torch.float64
    seed: int = 0


class Posterior(Protocol):
    """What every route ends in: moments of f at new rows X (p, d), uncalibrated."""

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean, shape (p,)."""

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance, shapes (p,), (p,)."""

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance, shape (p, p)."""


@dataclass
class Fit:
    """A fitted regression.

    Attributes
    ----------
    posterior : Posterior
    plan : Plan
        What was done in the end.
    kernel : sklearn kernel expression without noise
    noise : float
    calibration : float
        What variances, that of the noise included, are to be multiplied by; 1 where all targets
        are 0, from which nothing can be learnt about it.
    n_iter : int
    residual : float
        True relative residual of the linear system, where there is one.
    log_marginal_likelihood : float or None
    likelihood_scale : float or None
        b of Laplace noise, whose variance `noise` then is; None for Gaussian noise.
    elbo : float or None
        Of Laplace noise.
    relevance : Tensor of int64 or None
        Rows that are relevance vectors, increasing.
    history : list of float
    validation : list of float
        Mean squared error of the rows held out for early stopping, at every 50th iteration.
    statistics : StreamingGram or None
        Sufficient statistics, which ``partial_fit`` adds rows to.
    state : SGDState or None
        For a warm start.
    """

    posterior: Posterior
    plan: Plan
    kernel: object
    noise: float
    calibration: float = 1.0
    n_iter: int = 1
    residual: float = 0.0
    log_marginal_likelihood: float | None = None
    likelihood_scale: float | None = None
    elbo: float | None = None
    relevance: Tensor | None = None
    history: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    statistics: StreamingGram | None = None
    state: SGDState | None = None


def fit_statistics(
    statistics: StreamingGram,
    plan: Plan,
    kernel,
    noise: float,
    options: Options,
    generator: torch.Generator,
    *,
    refit: bool,
) -> Fit:
    """Posterior of the weights from the sufficient statistics of all rows seen.

    With `refit` the noise variance is set to the one of largest evidence: what the truncated basis
    leaves unexplained counts as noise.
    """
    statistics = statistics.counting_weights()
    if refit and statistics.sum_square > 0:
        noise = refit_noise(statistics, noise)
    m = statistics.basis.n_features
    n_dense = {"diagonal": 0, "chevron": min(options.n_dense_columns, m)}.get(plan.covariance, m)
    weights = gram_posterior(statistics, noise, n_dense_columns=n_dense)
    if plan.covariance == "samples":
        draws = weights.sample_weights(options.n_samples, generator)
        mean = weights.mean_weights
        weights = LinearWeightsPosterior.from_deviations(
            statistics.basis, mean, draws - mean[:, None]
        )
    augmented = plan.basis == "inducing" and options.augment
    posterior = AugmentedPosterior(weights) if augmented else weights
    return Fit(
        posterior,
        plan,
        kernel,
        noise,
        log_marginal_likelihood=float(log_marginal_likelihood(statistics, noise)),
        statistics=statistics,
    )
