r"""Predictions of Vecchia's approximation averaged over samples of the hyper-parameters.

Order, neighbours of the observations and inducing points are shared; given a sample the
approximation is that of :mod:`skgp.inference.vecchia.posterior`, its neighbours of a prediction by
the sample's own distances. What is kept for each sample is the posterior of the m inducing
variables, :math:`O(m^2)`; what else predictions use is made when first asked for, and kept as far
as a budget goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.gp_mixture import GPMixture
from skgp.inference.vecchia.conditionals import Conditionals
from skgp.inference.vecchia.posterior import VecchiaPosterior, sums
from skgp.linalg.runtime import memory_budget, require_memory


class VecchiaMixture(GPMixture):
    """Vecchia's approximations over the same n observations.

    A pickle has ``8 n (H + d) + 8 S m^2`` bytes. O(n H^2 (H + d + m)) for each sample where there
    are inducing points.
    """

    def __init__(
        self,
        kernel: Any,  # with a WhiteKernel summand at the top level
        data: Data,  # ordered, float64
        group: Tensor,  # (n, H + 1); neighbours of each, the own index last and in places left
        Z: Tensor,  # (m, d); inducing points
        u: np.ndarray,  # (S, kernel.n_dims), logarithms of the hyper-parameters of each sample
        weights: np.ndarray | None = None,  # (S,), positive, in any scale; equal ones by default
        *,
        n_neighbors: int,  # of a prediction
    ) -> None:
        super().__init__(kernel, data, u, weights)
        self._group, self._Z, self._n_neighbors = group, Z, n_neighbors
        self._kept: dict[int, VecchiaPosterior] = {}
        found = [self._of_inducing(s) for s in range(len(u))]
        means, roots = zip(*found, strict=True)
        self._means, self._roots = torch.stack(means), torch.stack(roots)  # (S, m, 1), (S, m, m)

    def at(self, kernel: Any, u: np.ndarray) -> VecchiaMixture:
        """The same observations under the hyper-parameters u (kernel.n_dims,) alone."""
        return VecchiaMixture(
            kernel, self._data, self._group, self._Z, u[None], n_neighbors=self._n_neighbors
        )

    def _lasting(self) -> dict[str, Any]:
        return super()._lasting() | {"_kept": {}}

    @property
    def bytes_per_row(self) -> int:
        """What predicting a row takes."""
        size, (m, d) = 2 * self._n_neighbors, self._Z.shape
        return 64 * self.n_samples + 8 * size * (4 * size + d + m) + 64 * m

    def _component_means(self, Z: Tensor) -> Tensor:
        return torch.stack([each.mean(Z)[:, 0] for _, each in self._posteriors()])

    def _component_moments(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        found = [each.mean_and_variance(Z) for _, each in self._posteriors()]
        means, variances = zip(*found, strict=True)
        return torch.stack(means)[..., 0], torch.stack(variances)

    def _joints(
        self, Z: Tensor, samples: np.ndarray | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        for s, each in self._posteriors(samples):
            mean, covariance = each.mean_and_covariance(Z)
            yield s, mean[:, 0], covariance

    def _check_joint_memory(self, n_rows: int) -> None:
        entry = 8.0 * defaults.JOINT_COPIES["vecchia"]
        most = int((memory_budget(self._X.device) / entry) ** 0.5)
        remedy = f"Ask for fewer of them at once (there is room for {most})"
        require_memory(entry * n_rows**2, f"The joint covariance of {n_rows} rows", remedy)

    # ---- the parts

    def _of_inducing(self, s: int) -> tuple[Tensor, Tensor]:
        """gamma (m, 1) and the factor (m, m) of P under sample s."""
        if not len(self._Z):
            return self._X.new_zeros(0, 1), self._X.new_zeros(0, 0)
        noise, theta = self._row_noise(s), self._theta[s]
        parts = Conditionals(self._signal, self._X, self._group, noise, self._Z, theta)
        found = sums(parts, self._data.y[:, None])
        return found.mean, found.root

    def _posteriors(
        self, samples: np.ndarray | None = None
    ) -> Iterator[tuple[int, VecchiaPosterior]]:
        """Each sample (all by default) with its posterior of f."""
        for s in range(self.n_samples) if samples is None else samples.tolist():
            posterior = self._kept.get(s)
            if posterior is None:
                posterior = VecchiaPosterior(
                    self._signal.clone_with_theta(self._theta[s].cpu().numpy()),
                    self._X,
                    self._data.y[:, None],
                    self._row_noise(s),
                    self._Z,
                    self._means[s],
                    self._roots[s],
                    self._n_neighbors,
                )
                if len(self._kept) < self._most_kept:
                    self._kept[s] = posterior
            yield s, posterior

    @property
    def _most_kept(self) -> int:
        """Posteriors whose features (n, m) and rows the budget has room for."""
        each = 8.0 * len(self._X) * (len(self._Z) + 2 * self._X.shape[1] + 2)
        return int(min(defaults.FACTOR_BYTES, memory_budget(self._X.device)) / each)
