"""Training rows of state-space models, as tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.linalg.tensor_state import TensorState
from skgp.models.state_space.series import Series, make_series


@dataclass(frozen=True)
class Rows(TensorState):
    """Inputs (n, c), targets (n, t), one a latent process, and weights (n,) or None."""

    x: Tensor
    y: Tensor
    weight: Tensor | None

    def series(self) -> list[Series]:
        """One series a target."""
        return [make_series(self.x[:, 0], y, self.weight) for y in self.y.T]

    def joined(self, other: "Rows") -> "Rows":
        """These rows, then others."""
        weight = None
        if self.weight is not None or other.weight is not None:
            weight = torch.cat([rows._weights() for rows in (self, other)])
        return Rows(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), weight)

    def _weights(self) -> Tensor:
        return self.x.new_ones(len(self.x)) if self.weight is None else self.weight
