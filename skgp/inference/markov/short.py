r"""Inference of a short series from Gaussian sites by one Cholesky factor, in O(m^3).

With weights :math:`\omega \ge 0`, the sites of :mod:`.smoother` have

.. math::
    B = I + \Omega^{1/2} K \Omega^{1/2}, \quad S = \Omega^{1/2} B^{-1} \Omega^{1/2}, \quad
    V = K - K S K, \quad m = V \beta, \quad \frac{\partial \log Z}{\partial K}
    = \tfrac12 \left(\alpha \alpha^\top - S\right), \quad \alpha = \beta - \Omega m.

Up to two hundred times this takes some forty calls of NumPy, where a sweep takes 1000 of torch
however short the series. It keeps fewer digits where the weights are large (see
`DensePrior.suits`).
"""

import math
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from skgp.inference.defaults import MAX_RATIO, ROUGH_RATIO
from skgp.inference.markov.series import Lags
from skgp.kernels.sde import Dynamics
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import constant_like

_Slope = tuple[int, np.ndarray | None]


class DensePrior:
    """The covariance K (m, m) of a short series, made once for whatever sites it is given."""

    def __init__(self, dynamics: Dynamics, lags: Lags) -> None:
        self._lags, values = lags, list[Any]([None] * len(lags.tables))
        by_variance, by_rate, by_shape = list[_Slope](), list[_Slope](), list[_Slope]()
        for _, block in dynamics.blocks:
            i = lags.table_of(block.is_stationary)
            table = lags.tables[i]
            k, rates, shapes = block.covariance(table.lags, table.since, table.known)
            values[i] = k if values[i] is None else values[i] + k
            by_variance.append((i, k if block.moving[0] else None))
            by_rate += [(i, each) for each in rates]
            by_shape += [(i, each) for each in shapes]
        #: Of each parameter, the derivative of k and its table; None where it does not move.
        self._slopes = by_variance + by_rate + by_shape
        pairs = zip(values, self._lags.tables, strict=True)
        of_tables = (k.take(table.pairs) for k, table in pairs if k is not None)
        self.K = reduce(np.add, of_tables)  # (m, m)
        self._most, self._rough = MAX_RATIO, ROUGH_RATIO
        if dynamics.is_approximate:  # the other route loses more
            self._most = self._rough = math.inf

    def suits(self, weight: np.ndarray, *, rough: bool = False) -> bool:
        """Whether weights (m,) are neither negative nor large; larger where `rough` values do."""
        most = self._rough if rough else self._most
        return bool(weight.min() >= 0 and self.ratio(weight) <= most)

    def ratio(self, weight: np.ndarray) -> float:
        """Of the greatest weight to the least prior precision."""
        return float(weight.max() * self.K.diagonal().max())

    def contract(self, bar: np.ndarray) -> np.ndarray:
        """``<bar, dK/dp> / 2``, (q,), of a symmetric matrix (m, m): its upper half is read.

        0 in a parameter that does not move.
        """
        upper = bar.take(self._lags.places)
        upper[self._lags.pairs.diagonal()] *= 0.5  # the others stand for both triangles
        sums = [table.fold(upper) for table in self._lags.tables]
        return np.array([0.0 if slope is None else slope @ sums[i] for i, slope in self._slopes])

    @property
    def covariance(self) -> Tensor:
        """K."""
        return torch.from_numpy(self.K)

    def pull(self, bar: Tensor) -> Tensor:
        """`contract`, of a tensor."""
        return torch.from_numpy(self.contract(bar.numpy()))


class DevicePrior:
    """The covariance (m, m) of f at a few times (m,) of a device, by the transitions there."""

    def __init__(self, dynamics: Dynamics, times: Tensor) -> None:
        m = len(times)
        row, column = torch.tril_indices(m, m, device=times.device)
        self._dynamics, self._pairs = dynamics, (row, column)
        self._lags = times[row] - times[column]  # (p,), p = m (m + 1) / 2
        H, P0 = dynamics.observation_at(times), dynamics.prior_at(times)
        self._slope = torch.outer(H, P0 @ H)[..., None]  # (d, d, 1), of k in F
        F, _ = dynamics.transition(self._lags)
        self._parts = [
            (self._slope[s, s] * F[s, s]).sum((0, 1)) for s, _ in dynamics.blocks
        ]  # (p,) of each block
        self.covariance = times.new_empty(m, m)
        self.covariance[row, column] = self.covariance[column, row] = sum(self._parts)

    def pull(self, bar: Tensor) -> Tensor:
        """As of `DensePrior`."""
        row, column = self._pairs
        upper = torch.where(row == column, 0.5, 1.0) * bar[row, column]
        F_bar = self._slope * upper
        gradient = self._dynamics.transition_gradient(self._lags, F_bar, torch.zeros_like(F_bar))
        by_variance = torch.stack([part @ upper for part in self._parts])
        gradient[: len(by_variance)] += by_variance
        H, F = self._dynamics.observation_at(bar), None
        for i, (_, dP, _) in enumerate(reversed(self._dynamics.shape_slopes), 1):
            F = self._dynamics.transition(self._lags)[0] if F is None else F
            slope = torch.outer(H, constant_like(dP, bar) @ H)[..., None]
            gradient[-i] += (slope * F).sum((0, 1)) @ upper
        return gradient


Prior = DensePrior | DevicePrior


def cholesky_factor(A: np.ndarray) -> np.ndarray:
    """Lower factor of a symmetric matrix, which it overwrites; NotPositiveDefiniteError if none."""
    L, failed = lapack.dpotrf(A.T, lower=True, overwrite_a=True)
    if failed:
        raise NotPositiveDefiniteError("The covariance of a series is not finite or indefinite.")
    return L


class DenseFactor:
    """The factor L of B, given weights (m,), and what it tells of any centres."""

    def __init__(self, prior: DensePrior, weight: np.ndarray) -> None:
        self._prior, self._root = prior, np.sqrt(weight)
        B = self._root[:, None] * prior.K  # (m, m)
        B *= self._root
        B.flat[:: len(weight) + 1] += 1.0
        self._L = cholesky_factor(B)
        self.half_log_det = float(np.log(self._L.diagonal()).sum())

    @cached_property
    def var(self) -> Tensor:
        """(m,) of f given sites of these weights."""
        K = self._prior.K
        half, _ = lapack.dtrtrs(self._L, self._root[:, None] * K, lower=True)
        return torch.from_numpy(np.maximum(K.diagonal() - np.einsum("ij,ij->j", half, half), 0.0))

    @cached_property
    def _inverse(self) -> np.ndarray:
        """Lower triangle of that of B."""
        return lapack.dpotri(self._L, lower=True)[0]

    @property
    def _upper(self) -> np.ndarray:
        """Upper triangle of S (m, m), which is the lower one of its transpose."""
        return self._root[:, None] * self._inverse.T * self._root


class DensePosterior(DenseFactor):
    r"""Log normaliser of sites (m,), its slopes, and the marginals of f; see `Evidence`.

    Of sites divided by their values at c, the `centre` (m,) of `evidence`, which leaves
    :math:`\beta' = \beta - \omega c`, in terms of :math:`e = c - K \beta'`:

    .. math:: \log Z = -\tfrac12 e^\top S e - \beta'^\top c + \tfrac12 \beta'^\top K \beta'
              - \tfrac12 \log |B|, \qquad \alpha = \beta' + S e, \qquad m = K \alpha.
    """

    def __init__(
        self, prior: DensePrior, beta: np.ndarray, w: np.ndarray, centre: np.ndarray | None
    ) -> None:
        super().__init__(prior, w)
        c = np.zeros_like(beta) if centre is None else centre
        rest = beta - w * c
        K_rest = prior.K @ rest
        e = c - K_rest
        Se = self._root * lapack.dpotrs(self._L, self._root * e, lower=True)[0]
        value = -0.5 * (e @ Se) - rest @ c + 0.5 * (rest @ K_rest)
        self._alpha = rest + Se
        self.log_normalizer = float(value) - self.half_log_det

    @cached_property
    def mean(self) -> Tensor:
        """(m,)."""
        return torch.from_numpy(self._prior.K @ self._alpha)

    @property
    def spread(self) -> float:
        """The trace of V Omega, which is that of I - B^-1."""
        return float((1.0 - self._inverse.diagonal()).sum())

    def given(self, across: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (k,) of f at places of covariances (k, m), and the root (m, k) of what is known."""
        L, root, alpha = map(torch.from_numpy, (self._L, self._root, self._alpha))
        return across @ alpha, torch.linalg.solve_triangular(L, (across * root).T, upper=False)

    def regress(self, f: Tensor, noise: Tensor) -> Tensor:
        """``Sigma^-1 (f + N^(1/2) z)`` (m, S), of draws f and standard normal z."""
        L, root = torch.from_numpy(self._L), torch.from_numpy(self._root)[:, None]
        return root * torch.cholesky_solve(root * f + noise, L)

    def misfit(self, centre: Tensor) -> float:
        """As of `Evidence`."""
        residual = self._prior.K @ self._alpha - centre.numpy()
        return float((self._root * residual) @ (self._root * residual))

    def gradients(self) -> list[Tensor]:
        """As of `Evidence`."""
        return [self.parameter_gradient]

    @property
    def parameter_gradient(self) -> Tensor:
        """(q,)."""
        return torch.from_numpy(self.slopes)

    @cached_property
    def slopes(self) -> np.ndarray:
        """The same, an array (q,)."""
        return self._prior.contract(self._slope)

    @cached_property
    def _slope(self) -> np.ndarray:
        """Twice the derivative of the log normaliser in K (m, m), of which the upper half holds."""
        return self._alpha[:, None] * self._alpha - self._upper
