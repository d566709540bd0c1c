"""Training rows of state-space models, as tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.markov.series import Series, make_series
from skgp.linalg.tensor_state import TensorState


@dataclass(frozen=True)
class Rows(TensorState):
    """Inputs (n, c), targets (n, t), weights and log-exposures (n,) or None."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    log_exposure: Tensor | None = None

    def series(self) -> list[Series]:
        """One series a target."""
        return [make_series(self.x[:, 0], y, self.weight, self.log_exposure) for y in self.y.T]

    def joined(self, other: "Rows") -> "Rows":
        """These rows, then others."""
        return Rows(
            torch.cat([self.x, other.x]),
            torch.cat([self.y, other.y]),
            self._joined(self.weight, other, other.weight, 1.0),
            self._joined(self.log_exposure, other, other.log_exposure, 0.0),
        )

    def _joined(
        self, mine: Tensor | None, other: "Rows", others: Tensor | None, default: float
    ) -> Tensor | None:
        """A column of both, `default` where one has none; None where neither has."""
        if mine is None and others is None:
            return None
        mine = self.x.new_full((len(self.x),), default) if mine is None else mine
        others = other.x.new_full((len(other.x),), default) if others is None else others
        return torch.cat([mine, others])
