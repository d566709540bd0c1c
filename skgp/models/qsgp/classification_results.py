"""What a QSGP classification is asked for and what it gives back."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.inference.weights.posterior import ClassifierPosterior
from skgp.models.qsgp.plan import Plan


@dataclass(frozen=True)
class ClassificationOptions:
    """Parameters of the solvers, in the estimator's words.

    ``moderation`` is what is known of it beforehand, for so few rows that those left out have all
    been seen by the search for hyper-parameters; None lets them decide.
    """

    moderation: float | None = None
    n_dense_columns: int = 100
    basis_batch_size: int = 20_000
    batch_size: int = 100
    n_support: int = 200
    bound: str = "plug-in"
    augment: bool = True
    feature_map: str = "orthogonal"
    max_iter: int | None = None
    tol: float | None = None
    learning_rate: float = 0.1
    learn_hyperparameters: bool = True
    memory_budget: int = 4_000_000_000
    dtype: torch.dtype = torch.float64
    seed: int = 0


class LatentMoments(Protocol):
    """What every route ends in: moments of the c latent functions at new rows X (p, d)."""

    def mean(self, X: Tensor) -> Tensor:
        """Posterior means, shape (p, c)."""

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior means and variances, each of shape (p, c)."""


@dataclass
class ClassificationFit:
    """A fitted classification.

    Attributes
    ----------
    posterior : LatentMoments
    plan : Plan
        What was done in the end.
    kernel : sklearn kernel expression
        Of the features; the prior's is `amplitude` times it.
    amplitude : float
    moderation : float
        Factor of the posterior variance that predicts rows left out best.
    n_iter : int
    history : list of float
        Negative log joint density, or the stochastic bound, an iteration.
    scores : dict of str to dict
        Mean log density of rows left out, in nats: "amplitude", by factor of the kernel's, and
        "moderation", by factor of the posterior variance.
    log_evidence : float or None
        Laplace's, summed over the latent functions, where its determinants are at hand.
    elbo : float or None
        Of stochastic gradients: mean estimate over the last tenth of the iterations.
    relevance : Tensor of shape (r,) or None
        Rows kept by ``basis="relevance"``.
    state : LikelihoodState or None
        Of stochastic gradients, for a warm start.
    """

    posterior: LatentMoments
    plan: Plan
    kernel: Any
    amplitude: float = 1.0
    moderation: float = 0.0
    n_iter: int = 1
    history: list[float] = field(default_factory=list)
    scores: dict = field(default_factory=dict)
    log_evidence: float | None = None
    elbo: float | None = None
    relevance: Tensor | None = None
    state: Any = None


@dataclass
class LatentPosterior:
    r"""Moments of the latent functions; for inducing points with what they leave unexplained.

    The test point's own basis function (appendix G, in whitened coordinates) adds its prior
    variance :math:`a\,(k(x, x) - \phi(x)^T \phi(x))`. With one inducing point a row the variance is
    then that of Rasmussen and Williams (2006), eq. (3.24).
    """

    weights: ClassifierPosterior
    amplitude: float = 0.0

    def mean(self, X: Tensor) -> Tensor:
        """Posterior means, shape (p, c)."""
        return self.weights.mean(X)

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior means and variances, each of shape (p, c)."""
        mean, variance = self.weights.mean_and_variance(X)
        if not self.amplitude:
            return mean, variance
        unexplained = self.weights.basis.unexplained(X)  # type: ignore[attr-defined]
        return mean, variance + self.amplitude * unexplained[:, None]
