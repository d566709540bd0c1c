"""Where a state-space GP on knots stands, and what it predicts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.inducing.conditionals import Conditionals, condition
from skgp.inference.markov.inducing.draws import draw_jointly
from skgp.inference.markov.inducing.pair_sites import Chain, PairPosterior, PairSites, infer_pairs
from skgp.kernels.sde import state_space
from skgp.kernels.sde_dynamics import Dynamics
from skgp.linalg.tensor_state import TensorState

__all__ = ["InducingState"]


@dataclass(frozen=True)
class InducingState(TensorState):
    """Posterior of f given sites on the states at knots.

    Attributes
    ----------
    kernel : sklearn kernel expression
        Of f, without noise.
    knots : Tensor of shape (M,)
        Rising.
    sites : PairSites
    offset : float
        Prior mean of f.

    Notes
    -----
    Pickles as about 4 d^2 M numbers, whatever the number of rows; what predictions need is worked
    out again at the first of them, in O(M d^3).
    """

    kernel: Any
    knots: Tensor
    sites: PairSites
    offset: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_inferred", None)
        return state

    @property
    def posterior(self) -> tuple[Dynamics, PairPosterior]:
        """Dynamics and moments of the pairs, kept after the first call."""
        inferred = self.__dict__.get("_inferred")
        if inferred is None:
            dynamics = state_space(self.kernel).at()
            inferred = dynamics, infer_pairs(Chain.of(dynamics, self.knots), self.sites)
            self.__dict__["_inferred"] = inferred
        return inferred

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at any times, each (n,)."""
        mean, var = self._at(x).marginals(self.posterior[1])
        return mean + self.offset, var

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of f at any times."""
        rows, pairs = self._at(x), self.posterior[1]
        return rows.marginals(pairs)[0] + self.offset, rows.covariance(pairs)

    def samples(self, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at any times, (n, n_samples); linear in n (:mod:`.draws`)."""
        dynamics, pairs = self.posterior
        draws = draw_jointly(dynamics, self.knots, pairs, x, n_samples, generator)
        return draws + self.offset

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p) of the kernel's p top-level summands, without the offset."""
        pairs = self.posterior[1]
        rows = [row for _, row in state_space(self.kernel).summands()]
        found = [self._at(x, row).marginals(pairs) for row in rows]
        mean, var = (torch.stack(each, -1) for each in zip(*found, strict=True))
        return mean, var

    def _at(self, x: Tensor, observation: Tensor | None = None) -> Conditionals:
        return condition(self.posterior[0], self.knots, x, observation)
