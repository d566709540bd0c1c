"""Where a state-space GP stands: its kernel and the sites that its data left."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.posterior import Posterior, posterior
from skgp.kernels.sde import state_space
from skgp.linalg.tensor_state import TensorState

__all__ = ["SeriesState"]


@dataclass(frozen=True)
class SeriesState(TensorState):
    r"""Posterior of f given one Gaussian site a time.

    Attributes
    ----------
    kernel : Kernel
        Of f, without noise.
    times : Tensor of shape (m,)
        Distinct, rising.
    beta, weight : Tensor of shape (m,)
        Sites :math:`\exp(\beta f - \omega f^2 / 2)`.
    offset : float
        Prior mean of f.

    Notes
    -----
    Pickles as 3 m numbers; what predictions need is worked out again at the first of them, in
    O(m d^3).
    """

    kernel: Any
    times: Tensor
    beta: Tensor
    weight: Tensor
    offset: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_smoothed", None)
        return state

    @property
    def posterior(self) -> Posterior:
        """The smoothed states, kept after the first call."""
        smoothed = self.__dict__.get("_smoothed")
        if smoothed is None:
            dynamics = state_space(self.kernel).at()
            smoothed = posterior(dynamics, self.times, self.beta, self.weight)
            self.__dict__["_smoothed"] = smoothed
        return smoothed

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at any times, each (n,)."""
        mean, var = self.posterior.marginals(x)
        return mean + self.offset, var

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of f at any times."""
        mean, covariance = self.posterior.covariance(x)
        return mean + self.offset, covariance

    def samples(self, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at any times, (n, n_samples)."""
        return self.posterior.sample(x, n_samples, generator) + self.offset

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p) of the kernel's p top-level summands, without the offset."""
        rows = torch.stack([row for _, row in state_space(self.kernel).summands()])
        return self.posterior.latent(x, rows)
