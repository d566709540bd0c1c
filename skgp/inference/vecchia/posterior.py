r"""Gaussian noise inside the residual: the density of observations, and f given them.

With the conditionals of :mod:`skgp.inference.vecchia.conditionals`, noise among the variances, the
covariance of targets Y (n, c) is :math:`\tilde S + \Phi \Phi^T`. Its density needs four sums over
the rows, of D, of the contrasts e of Y and E of :math:`\Phi`,

.. math:: \log p(Y) = -\tfrac12 \Big[ c \sum_i \log D_i + c \log |P| + \sum_i |e_i|^2 / D_i
          - \operatorname{tr}(h^T P^{-1} h) + n c \log 2 \pi \Big], \qquad
          P = I + \sum_i E_i E_i^T / D_i, \quad h = \sum_i E_i e_i^T / D_i,

and :math:`\Phi u`, u ~ N(0, I), has the posterior :math:`u \sim N(P^{-1} h, P^{-1})` (Woodbury).
Sums over some rows, multiplied by n over their number, estimate those of all.

An input x has f of two parts, the global one of u, :math:`N(\gamma, P^{-1})`, and the residual
from the nearest of all observations. With neighbours N among these

.. math:: f = \phi^T u + a^T (y_N - \Phi_N u) + \epsilon, \qquad a = S_{NN}^{-1} R_{Nx}, \qquad
          E = \phi - \Phi_N^T a,

.. math:: E[f] = \phi^T \gamma + a^T (y_N - \Phi_N \gamma), \qquad
          V[f] = R_{xx} - a^T R_{Nx} + E^T P^{-1} E .

Neighbours fade as the input moves away from them (:mod:`skgp.inference.neighbors.conditionals`), so
that predictions are continuous. Where observations differ much in their noise, as many more are
the nearest of those that tell most (`informative`). *Jointly* the errors :math:`\epsilon` of two
inputs have the covariance that they have under R: it is the same for two inputs whatever others
come with them, and its diagonal is the variance above.

*Averaged over samples of the hyper-parameters* (`VecchiaMixture`) the order, the neighbours of the
observations and the inducing points are shared; neighbours of a prediction are by the sample's own
distances. What is kept for each sample is the posterior of the m inducing variables,
:math:`O(m^2)`; what else predictions use is made when first asked for, and kept as far as a budget
goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.defaults import CACHED_NUMBERS, N_GLOBAL
from skgp.inference.gp_mixture import GPMixture
from skgp.inference.neighbors.conditionals import (
    Neighborhood,
    fading_weights,
    joint_errors,
    sparse_rows,
)
from skgp.inference.vecchia.conditionals import (
    Conditionals,
    Cotangents,
    Tile,
    global_features,
    inducing_factor,
    residual_covariance,
)
from skgp.inference.vecchia.neighbors import informative
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det, tri_solve
from skgp.linalg.runtime import (
    TensorState,
    differentiable_in_rows,
    memory_budget,
    require_memory,
    tile_rows,
)
from skgp.linalg.small_matrices import gather_rows


@dataclass(frozen=True)
class Sums:
    """What the density of targets needs of some rows, and the posterior of u."""

    n: float  # observations that the sums stand for
    scale: float  # observations a row
    log_variance: Tensor  # (); sum of log D
    square: Tensor  # (); sum of |e|^2 / D
    cross: Tensor  # (m, c); h
    precision: Tensor  # (m, m); P

    @cached_property
    def root(self) -> Tensor:
        """Lower Cholesky factor (m, m) of P."""
        return jittered_cholesky(self.precision).factor

    @cached_property
    def mean(self) -> Tensor:
        """E[u], (m, c)."""
        return cho_solve(self.root, self.cross)

    def log_density(self) -> Tensor:
        """log p(Y), a scalar in nats."""
        c = self.cross.shape[1]
        of_u = c * log_det(self.root) - (self.cross * self.mean).sum()
        constant = self.n * c * math.log(2 * math.pi)
        return -0.5 * (c * self.log_variance + of_u + self.square + constant)

    def cotangents(self, Y: Tensor) -> Cotangents:
        """Derivatives of `log_density` in the conditionals of a row."""
        c, mean = self.cross.shape[1], self.mean
        inner = c * torch.cholesky_inverse(self.root) + mean @ mean.mT  # -2 d/dP

        def of_tile(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
            D, e, E = tile.variance[:, None], tile.contrast(Y), tile.features
            error = e - E @ mean  # (t, c)
            weighted = E @ inner  # (t, m)
            squares = (e * (error + error - e)).sum(1) + (weighted * E).sum(1)
            of_D = 0.5 * self.scale * (squares / D[:, 0] - c) / D[:, 0]
            of_e = -self.scale * error / D
            of_b = torch.einsum("tc,thc->th", of_e, gather_rows(Y, tile.group))
            of_E = self.scale * (e @ mean.mT - weighted) / D
            return of_D, of_b, of_E

        return of_tile


@torch.no_grad()
def sums(conditionals: Conditionals, Y: Tensor, n: float | None = None) -> Sums:
    """Sums over the rows of the conditionals, of targets Y (n, c) of all points.

    `n` is the number of observations that they are to stand for; by default that of the rows.
    """
    t, m = len(conditionals.group), len(conditionals.Z)
    log_variance, square = Y.new_zeros(2).unbind()
    cross, precision = Y.new_zeros(m, Y.shape[1]), Y.new_zeros(m, m)
    for tile in conditionals:
        root = tile.variance.rsqrt()[:, None]
        e = root * tile.contrast(Y)
        log_variance -= 2 * root.log().sum()
        square += e.square().sum()
        E = root * tile.features
        cross += E.mT @ e
        precision += E.mT @ E
    scale = 1.0 if n is None else n / t
    precision = torch.eye(m).to(precision) + scale * precision
    return Sums(scale * t, scale, scale * log_variance, scale * square, scale * cross, precision)


@dataclass(frozen=True)
class VecchiaPosterior(TensorState):
    """Predictions of f for c targets. What is derived is built when first asked for."""

    kernel: Any  # of f, without noise
    X: Tensor  # (n, d); inputs of the observations
    targets: Tensor  # (n, c)
    noises: Tensor  # (n,); variances of the noise
    Z: Tensor  # (m, d); inducing points
    mean_inducing: Tensor  # (m, c); gamma
    root: Tensor  # (m, m); Cholesky factor of P
    n_neighbors: int  # of a prediction; 1 where nothing is left to neighbours

    @cached_property
    def neighborhood(self) -> Neighborhood:
        """Which observations a prediction uses."""
        favoured = informative(self.kernel, self.X, self.noises)
        size = self.n_neighbors if bool(favoured.all()) else 2 * self.n_neighbors
        n_global = N_GLOBAL if self.n_neighbors > 1 else 0
        return Neighborhood(self.kernel, self.X, size, favoured=favoured, n_global=n_global)

    @cached_property
    @torch.no_grad()
    def factor(self) -> Tensor:
        """L (m, m)."""
        return inducing_factor(self.kernel, self.Z)

    @cached_property
    @torch.no_grad()
    def features(self) -> Tensor:
        """Phi (n, m) of the observations."""
        return global_features(self.kernel, self.X, self.Z, self.factor)

    @cached_property
    @torch.no_grad()
    def residuals(self) -> Tensor:
        """y - Phi gamma, (n, c)."""
        return self.targets - self.features @ self.mean_inducing

    @differentiable_in_rows
    def mean(self, X: Tensor) -> Tensor:
        """E[f], (n, c), of rows X (n, d)."""
        return torch.cat([self._mean(*tile[:3]) for tile in self._tiles(X)])

    @differentiable_in_rows
    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """E[f] (n, c) and V[f] (n,) of rows X (n, d); O(n H^2 (H + d + m))."""
        parts = [
            (self._mean(active, weights, phi), self._variance(active, weights, contrast, residual))
            for active, weights, phi, contrast, residual in self._tiles(X)
        ]
        mean, var = map(torch.cat, zip(*parts, strict=True))
        return mean, var

    def _variance(
        self, active: Tensor, weights: Tensor, contrast: Tensor, residual: Tensor
    ) -> Tensor:
        """V[f] (t,) or (t, c): that of the residual (t,), and what is not known of u."""
        return residual + self._unknown(active, weights, contrast).square().sum(1)

    def _unknown(self, active: Tensor, weights: Tensor, contrast: Tensor) -> Tensor:
        """A root (t, k) of the covariance of rows that the errors leave."""
        return tri_solve(self.root, contrast.mT, upper=False).mT

    @torch.no_grad()
    def mean_and_covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Joint prediction of rows X (n, d): mean (n, c) and the covariance (n, n)."""
        active, weights, phi, contrast, _ = map(torch.cat, zip(*self._tiles(X), strict=True))
        index, position = active.unique(return_inverse=True)
        A = sparse_rows(position, weights, len(index))
        # Errors under K; those under R = K - Q are E E' less.
        errors = joint_errors(self.kernel, X, self.X[index], A, self.noises[index])
        root = self._unknown(active, weights, contrast)
        covariance = errors + root @ root.mT - contrast @ contrast.mT
        return self._mean(active, weights, phi), 0.5 * (covariance + covariance.mT)

    @property
    def n_spread(self) -> int:
        """Columns of a root of the covariance of f at the observations, where they use it."""
        return 0

    @property
    def _tile_rows(self) -> int:
        size = self.neighborhood.size
        numbers = size * (size + self.X.shape[1] + len(self.Z))
        return min(max(1, CACHED_NUMBERS // numbers), tile_rows(64 * numbers))

    def _mean(self, active: Tensor, weights: Tensor, phi: Tensor) -> Tensor:
        local = torch.einsum("th,thc->tc", weights, self.residuals[active])
        return phi @ self.mean_inducing + local

    def _tiles(self, X: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        return map(self._weights, X.split(self._tile_rows))

    def _weights(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Neighbours and a (t, H), phi and E (t, m), and the residual's variance (t,)."""
        active, influence = self.neighborhood.find(X)
        points, features = (gather_rows(each, active) for each in (self.X, self.features))
        phi = global_features(self.kernel, X, self.Z, self.factor)
        K = residual_covariance(gram(self.kernel, points), features, self.noises[active])
        cross = gram(self.kernel, points, X[:, None])[..., 0] - (features @ phi[..., None])[..., 0]
        prior = gram_diag(self.kernel, X) - phi.square().sum(1)
        weights, variance = fading_weights(K, cross, prior, influence)
        contrast = phi - (weights[:, None] @ features)[:, 0]
        return active, weights, phi, contrast, variance


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
