r"""f given observations through a likelihood, by Laplace's approximation under a Vecchia prior.

An input depends on f at its neighbours and on u as in :mod:`skgp.inference.vecchia.posterior`, and
these are now uncertain themselves: with C a root of their posterior covariance, exact up to some
thousand points (`LATENT_CUBES`) and k posterior draws of more,

.. math:: E[f] = o + \phi^T \hat u + a^T (\hat f_N - \Phi_N \hat u), \qquad
          V[f] = R_{xx} - a^T R_{Nx} + \big| a^T C_N + E^T C_u \big|^2 .

The draws are fixed, so that predictions are a continuous function of x and equal for a row whatever
rows come with it; the variance that they estimate has a relative standard error of
:math:`(2 / k)^{1/2}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import LATENT_CUBES, LATENT_DRAWS, LEAST_DRAWS, MOST_DRAWN
from skgp.inference.vecchia.conditionals import Conditionals
from skgp.inference.vecchia.hessian import hessian, probes
from skgp.inference.vecchia.posterior import VecchiaPosterior
from skgp.inference.vecchia.root import VecchiaRoot
from skgp.linalg.rows import gather_rows
from skgp.linalg.runtime import tile_rows


@dataclass(frozen=True)
class LatentPosterior(VecchiaPosterior):
    """Predictions of c latent functions; `targets` are the modes, `root` that of no precision."""

    offset: Tensor  # (c,); o
    group: Tensor  # (n, H + 1) of int32; neighbours and, last, the point itself
    curvature: Tensor  # (n, c); W
    seed: int  # of the draws
    most_draws: int = LATENT_DRAWS

    def _lasting(self) -> dict[str, Any]:
        return {name: value for name, value in super()._lasting().items() if name != "spread"}

    @cached_property
    @torch.no_grad()
    def spread(self) -> tuple[Tensor, Tensor]:
        """Roots of the posterior covariance of f at the points (n, c k), and of u (m, c k)."""
        group = self.group.long()
        root = VecchiaRoot(Conditionals(self.kernel, self.X, group, self.noises, self.Z))
        return self._drawn(root, hessian(root, self.curvature, dense=self._is_dense))

    def draw(self, root: VecchiaRoot, H: Any) -> None:
        """Make the draws by root and Hessian of the mode, where they are at hand."""
        if not self._is_dense:
            self.__dict__["spread"] = self._drawn(root, H)

    def _drawn(self, root: VecchiaRoot, H: Any) -> tuple[Tensor, Tensor]:
        numbers = probes(root, self._n_draws, torch.Generator().manual_seed(self.seed))
        found = H.spread(numbers).flatten(1)
        return root.matmul(found), found[: len(self.Z)].contiguous()

    @property
    def n_spread(self) -> int:
        """Columns c k of `spread`."""
        k = len(self.X) + len(self.Z) if self._is_dense else self._n_draws
        return len(self.offset) * k

    @property
    def _n_draws(self) -> int:
        """Fewer of many points."""
        numbers = len(self.offset) * (len(self.X) + len(self.Z))
        return max(LEAST_DRAWS, min(self.most_draws, MOST_DRAWN // numbers))

    @property
    def _is_dense(self) -> bool:
        return len(self.offset) * (len(self.X) + len(self.Z)) ** 3 <= LATENT_CUBES

    @property
    def _tile_rows(self) -> int:
        return min(super()._tile_rows, tile_rows(16 * self.neighborhood.size * self.n_spread))

    def _mean(self, active: Tensor, weights: Tensor, phi: Tensor) -> Tensor:
        return self.offset + super()._mean(active, weights, phi)

    def _variance(
        self, active: Tensor, weights: Tensor, contrast: Tensor, residual: Tensor
    ) -> Tensor:
        unknown = self._unknown(active, weights, contrast)
        each = unknown.reshape(len(unknown), len(self.offset), -1)
        return residual[:, None] + each.square().sum(2)

    def _unknown(self, active: Tensor, weights: Tensor, contrast: Tensor) -> Tensor:
        at_points, of_u = self.spread
        known = (weights[:, None] @ gather_rows(at_points, active))[:, 0]
        return known + contrast @ of_u  # (t, c k)
