r"""Mixtures of Gaussian processes, one for each sample of the hyper-parameters.

Given a sample :math:`u_s` f is a Gaussian process, so that predictions average over the S samples
kept, of weights :math:`w_s`:

.. math:: p(f_* \mid y) \approx \sum_s w_s N(f_*; m_s, v_s).

A kind of process (:mod:`skgp.inference.mixture`, :mod:`skgp.inference.vecchia.mixture`) says what
the moments of one are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.gaussian_mixture import mixture_moments
from skgp.linalg.cholesky import semidefinite_root
from skgp.linalg.runtime import TensorState, to_arrays

RNG = np.random.Generator | np.random.RandomState


class GPMixture(TensorState):
    """What all have; of `_X` (n, d), `_shares` (S,) and the attributes that stand here."""

    weights: np.ndarray  # (S,), of sum one
    noise: np.ndarray  # (S,), variances
    _X: Tensor
    _shares: Tensor  # the weights

    def _component_means(self, Z: Tensor) -> Tensor:
        """Mean (S, t) of f at the rows of Z (t, d) under each sample."""
        raise NotImplementedError

    def _component_moments(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, (S, t) each; differentiable in Z where it asks for gradients."""
        raise NotImplementedError

    def _joints(
        self, Z: Tensor, samples: np.ndarray | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each sample (all by default) with mean (t,) and covariance (t, t) of f at Z (t, d)."""
        raise NotImplementedError

    def _check_joint_memory(self, n_rows: int) -> None:
        """Refuse the joint covariance of rows for which there is no room."""
        raise NotImplementedError

    def at(self, kernel: Any, u: np.ndarray) -> GPMixture:
        """The same rows under the hyper-parameters u (kernel.n_dims,) alone."""
        raise NotImplementedError

    @property
    def n_samples(self) -> int:
        """S, of different samples."""
        return len(self.weights)

    @property
    def bytes_per_row(self) -> int:
        """What predicting a row takes."""
        return 64 * self.n_samples

    def _rows(self, X: np.ndarray) -> Tensor:
        return torch.tensor(X, dtype=self._X.dtype, device=self._X.device)

    def component_means(self, X: np.ndarray) -> np.ndarray:
        """Mean (S, t) of f at the rows of X (t, d) under each sample."""
        return self._component_means(self._rows(X)).cpu().numpy()

    def component_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of f, (S, t) each, at the rows of X (t, d) under each sample."""
        mean, var = to_arrays(*self._component_moments(self._rows(X)))
        return mean, var

    def mean(self, X: np.ndarray) -> np.ndarray:
        """Mean (t,) of f at the rows of X (t, d)."""
        return self.weights @ self.component_means(X)

    def moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (t,) of f at the rows of X (t, d)."""
        return mixture_moments(self.weights, *self.component_moments(X))

    def mean_and_variance(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """As `moments` of a tensor Z (t, d), differentiable in it where it asks for gradients."""
        mean, var = self._component_moments(Z)
        centre = self._shares @ mean
        return centre, self._shares @ (var + (mean - centre).square())

    def covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean (t,) and covariance (t, t) of f at the rows of X (t, d)."""
        Z = self._rows(X)
        self._check_joint_memory(len(Z))
        means = self._X.new_empty(self.n_samples, len(Z))
        total = self._X.new_zeros(len(Z), len(Z))
        for s, mean, covariance in self._joints(Z):
            means[s] = mean
            total.add_(covariance, alpha=float(self.weights[s]))
        weights = self._shares
        centred = means - weights @ means
        total.addmm_(centred.T * weights, centred)
        found = to_arrays(weights @ means, total)
        return found[0], found[1]

    def draws(self, X: np.ndarray, n_samples: int, rng: RNG, *, noise: bool = False) -> np.ndarray:
        """Joint draws (t, n_samples) of f at the rows of X (t, d), or of observations.

        Each takes a sample of the hyper-parameters first.
        """
        Z = self._rows(X)
        chosen = rng.choice(self.n_samples, size=n_samples, p=self.weights)
        parts = list(self._draws(Z, np.bincount(chosen, minlength=self.n_samples), rng))
        out = np.empty((len(Z), n_samples))
        out[:, np.argsort(chosen, kind="stable")] = torch.cat(parts, 1).cpu().numpy()
        if noise:
            out += np.sqrt(self.noise[chosen]) * rng.standard_normal(out.shape)
        return out

    def _draws(self, Z: Tensor, counts: np.ndarray, rng: RNG) -> Iterator[Tensor]:
        """Draws (t, k) of f under each sample that has a count k; O(t^3) each."""
        self._check_joint_memory(len(Z))
        for s, mean, covariance in self._joints(Z, np.flatnonzero(counts)):
            # A covariance without noise is singular up to rounding: the jitter has its size.
            root = semidefinite_root(covariance)
            normal = Z.new_tensor(rng.standard_normal((len(Z), int(counts[s]))))
            yield mean[:, None] + root @ normal
