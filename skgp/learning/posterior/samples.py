"""What every sampler of the posterior over hyper-parameters returns."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skgp.samplers import stratified_resample

__all__ = ["PosteriorSamples", "single_sample"]


@dataclass(frozen=True)
class PosteriorSamples:
    """Weighted samples of u, the logarithms of the hyper-parameters.

    Attributes
    ----------
    u : ndarray of shape (s, p)
    weights : ndarray of shape (s,)
        Of sum one.
    chain : ndarray of int, shape (s,)
        Which chain a sample belongs to; the round, for importance sampling. Chains of which more
        than a tenth of the paths diverged are left out, unless all did.
    log_posterior : ndarray of shape (s,)
        Up to the evidence, nats.
    map_ : ndarray of shape (p,)
        The mode.
    diagnostics : dict
        "sampler", "converged" and "problems", a list of sentences, empty where converged;
        "ess" (effective number of samples, the least over coordinates, bulk and tail),
        "ess_spread" (the same for variances), "n_likelihoods", "n_gradients", "n_modes" and
        "log_evidence"; for importance sampling "pareto_k" and "n_rounds"; for HMC "r_hat",
        "ess_bulk" and "ess_tail" (p,), "acceptance", "n_divergent" and "step_size" (n_chains,).
    """

    u: np.ndarray
    weights: np.ndarray
    chain: np.ndarray
    log_posterior: np.ndarray
    map_: np.ndarray
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def mean(self) -> np.ndarray:
        """Posterior mean (p,) of u."""
        return self.weights @ self.u

    def covariance(self) -> np.ndarray:
        """Posterior covariance (p, p) of u."""
        centred = self.u - self.mean()
        return (self.weights[:, None] * centred).T @ centred

    def keep(self, n_keep: int, rng: np.random.Generator) -> np.ndarray:
        """Indices (n_keep,) of samples that stand for all, equally weighted; they may repeat."""
        points = self.u if self.diagnostics.get("sampler") == "importance" else None
        return stratified_resample(self.weights, n_keep, rng, points=points)


def single_sample(u: np.ndarray, log_density: float, diagnostics: dict) -> PosteriorSamples:
    """Hyper-parameters u (p,) that stand for their posterior alone; a log-density may be NaN."""
    return PosteriorSamples(
        u[None], np.ones(1), np.zeros(1, int), np.array([log_density]), u, diagnostics
    )
