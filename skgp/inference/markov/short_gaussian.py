r"""The log marginal likelihood of a short series under Gaussian noise, as searches ask for it.

With c the means of the observations at m times, N (diagonal) the variances of their noise and
:math:`\Sigma = K + N`, :math:`\alpha = \Sigma^{-1} c`,

.. math:: \log p = -\tfrac12 c^\top \alpha - \tfrac12 \log |2 \pi \Sigma|, \qquad
          \frac{\partial \log p}{\partial \theta_i} = \tfrac12 \left(\alpha^\top \dot\Sigma_i
          \alpha - \mathrm{tr}\, \Sigma^{-1} \dot\Sigma_i\right)

but for what observations at equal times differ by. The derivatives of K are stacks of matrices: of
log variances at rates that do not move one is made once a kernel, and scaled. A search evaluates
each place once; at sixty times that takes some forty calls of NumPy, a tenth of a millisecond.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from skgp.inference.defaults import ROUGH_RATIO
from skgp.inference.markov.series import Lags, LagTable
from skgp.inference.markov.short import DensePrior, cholesky_factor
from skgp.kernels.sde import Dynamics
from skgp.kernels.sde_block import Block
from skgp.linalg import NotPositiveDefiniteError


class ShortCovariance:
    """K (m, m) of a form at the times of a short series, as a function of its log parameters (q,).

    `moving` are the places of those that move, (r,), in the order of derivatives.
    """

    def __init__(self, dynamics: Dynamics, lags: Lags) -> None:
        blocks = [block for _, block in dynamics.blocks]
        self.is_approximate = dynamics.is_approximate
        m, end = len(lags.pairs), len(blocks)
        static, known, fixed = list[int](), list[np.ndarray](), np.zeros((m, m))
        rated: list[list[tuple[int, slice, Block]]] = [[] for _ in lags.tables]
        by_rate: list[list[int]] = [[] for _ in lags.tables]
        for i, block in enumerate(blocks):
            first, end = end, end + len(block.rates)
            place = lags.table_of(block.is_stationary)
            table, (variance_moves, *rates_move) = lags.tables[place], block.moving
            if any(rates_move):
                rated[place].append((i, slice(first, end), block))
                by_rate[place] += [i] * variance_moves
                by_rate[place] += [first + j for j, moves in enumerate(rates_move) if moves]
                continue
            k = _unit_covariance(block, table)
            if variance_moves:
                static.append(i)
                known.append(k)
            else:
                fixed += block.variance * k
        self._static, self._fixed = np.array(static, dtype=int), fixed
        self._rated = [pair for pair in zip(lags.tables, rated, strict=True) if pair[1]]
        self._known = np.array(known).reshape(len(known), m * m)
        self.moving = np.array(sum(by_rate, static), dtype=int)

    def at(self, parameters: np.ndarray) -> "CovarianceAt":
        """At log parameters (q,)."""
        values = np.exp(parameters)
        scales, shape = values[self._static], self._fixed.shape
        K = self._fixed + (scales @ self._known).reshape(shape) if len(scales) else +self._fixed
        slopes = list[np.ndarray]()
        for table, members in self._rated:
            own, of_level, rest = list[np.ndarray](), list[int](), list[np.ndarray]()
            for i, places, block in members:
                rates = values[places].tolist()
                moved = Block(float(values[i]), block.primitives, rates, block.moving)
                k, by_rate, _ = moved.covariance(table.lags, table.since, table.known)
                if block.moving[0]:
                    of_level.append(len(own))
                    own.append(k)
                else:
                    rest.append(k)
                own += [each for each in by_rate if each is not None]
            of_pairs = np.array(own + rest).take(table.pairs, axis=1)  # (r + 1, m, m)
            for j in (*of_level, *range(len(own), len(of_pairs))):
                K += of_pairs[j]
            slopes.append(of_pairs[: len(own)])
        return CovarianceAt(K, self._known.reshape(-1, *shape), scales, slopes)


def _unit_covariance(block: Block, table: LagTable) -> np.ndarray:
    """Correlations (m, m) of a block of which no rate moves; they are kept with the table."""
    key = block.primitives, block.rates
    if key not in table.squares:
        unit = Block(1.0, *key, block.moving)
        k, *_ = unit.covariance(table.lags, table.since, table.known)
        table.squares[key] = k.take(table.pairs)
    return table.squares[key]


class CovarianceAt:
    """K (m, m) at some parameters, and its derivatives in those that move, (r, m, m) in parts."""

    def __init__(
        self,
        K: np.ndarray,
        known: np.ndarray,  # (s, m, m)
        scales: np.ndarray,  # (s,) of these
        slopes: Sequence[np.ndarray],  # (r_b, m, m)
    ) -> None:
        self.K, self._scales, self._parts = K, scales, [known, *slopes] if len(known) else slopes
        self.n_moving = sum(map(len, self._parts))

    def times(self, x: np.ndarray, out: np.ndarray) -> None:
        """Write derivatives times x (m,) to (r, m)."""
        end = 0
        for part in self._parts:
            first, end = end, end + len(part)
            np.matmul(part, x, out=out[first:end])
        out[: len(self._scales)] *= self._scales[:, None]

    def contract(self, bar: np.ndarray, out: np.ndarray) -> None:
        """Write sums of the products of entries with those of a matrix (m, m) to (r,)."""
        flat, end = bar.ravel(), 0
        for part in self._parts:
            first, end = end, end + len(part)
            np.matmul(part.reshape(-1, len(flat)), flat, out=out[first:end])
        out[: len(self._scales)] *= self._scales

    def derivatives(self) -> np.ndarray:
        """The stack (r, m, m)."""
        found = np.concatenate(self._parts) if self.n_moving else self.K[:0, None] * self.K
        found[: len(self._scales)] *= self._scales[:, None, None]
        return found


class ShortEvidence:
    """The value at log parameters and a noise variance, and what searches ask besides.

    Derivatives are those in the r parameters that move and then in the log noise, (r + 1,).
    """

    def __init__(
        self,
        covariance: CovarianceAt,
        noise: np.ndarray,  # (m,) variances of c
        c: np.ndarray,  # (m,)
        constant: float,  # of the log density of noise alone, and its slope in the log noise
        slope: float,
    ) -> None:
        Sigma = covariance.K.copy()
        Sigma.flat[:: len(c) + 1] += noise
        L = cholesky_factor(Sigma)
        self._covariance, self._noise, self._L, self._rest = covariance, noise, L, slope
        self.alpha = lapack.dpotrs(L, c, lower=True)[0]
        #: The log marginal likelihood, in nats.
        pivots = L.diagonal() ** 2  # variances of each given those before
        self.value = constant - 0.5 * float(c @ self.alpha + np.log(pivots / noise).sum())
        #: Of the variance to the least of these: digits that are lost.
        self.ratio = float(covariance.K.diagonal().max() / pivots.min())

    def gradient(self) -> np.ndarray:
        """(r + 1,), of the value."""
        S, trace = self.half_inverse, np.empty(self._covariance.n_moving + 1)
        self._covariance.contract(S, trace[:-1])
        trace[-1] = S.diagonal() @ self._noise - self._rest
        return 0.5 * (self._moved @ self.alpha) - trace

    @cached_property
    def half_inverse(self) -> np.ndarray:
        """Upper triangle of the inverse of Sigma with half its diagonal, (m, m), and zeros."""
        S = lapack.dpotri(self._L, lower=True)[0].T
        S.flat[:: len(S) + 1] *= 0.5
        return S

    @cached_property
    def _moved(self) -> np.ndarray:
        """Derivatives of Sigma times alpha, (r + 1, m)."""
        found = np.empty((self._covariance.n_moving + 1, len(self.alpha)))
        self._covariance.times(self.alpha, found[:-1])
        np.multiply(self._noise, self.alpha, out=found[-1])
        return found

    def information(self, slopes: np.ndarray) -> np.ndarray:
        r"""Fisher's information, (p, p), of parameters with `slopes` (p, r + 1).

        :math:`\tfrac12 \mathrm{tr}\, \Sigma^{-1} \dot\Sigma_i \Sigma^{-1} \dot\Sigma_j`; O(r m^3).
        """
        half = self.half_inverse
        S = half + half.T
        parts = np.concatenate([S @ self._covariance.derivatives(), (S * self._noise)[None]])
        turned = np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(len(parts), -1)
        found = 0.5 * parts.reshape(len(parts), -1) @ turned.T  # (r + 1, r + 1)
        return slopes @ found @ slopes.T

    def average_information(self, slopes: np.ndarray) -> np.ndarray:
        r"""The average information, (p, p), of the parameters of `information`.

        .. math:: \tfrac12 (\dot\Sigma_i \alpha)^\top \Sigma^{-1} (\dot\Sigma_j \alpha)

        is the mean of Fisher's and the observed information where :math:`\Sigma` is linear in the
        parameters: terms in :math:`\ddot\Sigma` are left out (Gilmour, Thompson and Cullis, 1995).
        O(p m^2).
        """
        half = self._whiten(slopes @ self._moved)
        return 0.5 * half.T @ half

    def _whiten(self, rows: np.ndarray) -> np.ndarray:
        """``L^-1`` of rows (k, m), (m, k)."""
        return lapack.dtrtrs(self._L, rows.T, lower=True)[0]

    def gains(self, slopes: np.ndarray, K: np.ndarray, ridge: float) -> np.ndarray:
        r"""Log evidence (g,) that other processes promise beside this one (Rao's score).

        Their covariances are K (g, m, m). With :math:`u = \partial \log p / \partial v` at
        variance :math:`v = 0` of one of them, and A the average information of v and of the p
        parameters :math:`\theta` of `information`, with a `ridge` for the latter,

        .. math:: \frac{u^2}{2 (A_{vv} - A_{v \theta} A_{\theta \theta}^{-1} A_{\theta v})},

        or 0 where u is negative: the variance is none. O(m^2 (p + g)).
        """
        moved, p = K @ self.alpha, len(slopes)
        u = 0.5 * moved @ self.alpha - K.reshape(len(K), -1) @ self.half_inverse.ravel()
        half = self._whiten(np.concatenate([slopes @ self._moved, moved]))
        A = 0.5 * half.T @ half
        across, within = A[:p, p:], A[:p, :p] + ridge * np.eye(p)
        left = A.diagonal()[p:] - (across * np.linalg.solve(within, across)).sum(0)
        squares = np.maximum(u, 0.0) ** 2  # of targets that do not differ 0, and left too
        unknown = np.where(squares > 0, math.inf, 0.0)
        return np.divide(squares, 2 * left, out=unknown, where=left > 0)


class ShortRows(NamedTuple):
    """What was observed at m times."""

    c: np.ndarray  # (m,) means
    counts: np.ndarray  # (m,) weights
    total: float  # of these
    squares: float  # weighted sum of those about the means

    def at(self, noise: float) -> tuple[np.ndarray, np.ndarray, float, float]:
        """What `ShortEvidence` takes besides a covariance."""
        scaled = self.squares / noise
        constant = self.total * math.log(2 * math.pi * noise) + scaled
        # The rest of the slope in the log noise: that of noise alone, and within equal times.
        slope = 0.5 * (len(self.c) - self.total + scaled)
        return noise / self.counts, self.c, -0.5 * constant, slope


class ShortSeries:
    """The log marginal likelihood of a form; `beside` is a covariance (m, m) that does not move."""

    def __init__(
        self, covariance: ShortCovariance, rows: ShortRows, beside: np.ndarray | None = None
    ) -> None:
        self.covariance, self._rows, self._beside = covariance, rows, beside
        self._most = math.inf if covariance.is_approximate else ROUGH_RATIO

    def __call__(self, parameters: np.ndarray, noise: float) -> "ShortEvidence | None":
        """At log parameters (q,) and a noise variance.

        None where the noise is too little for the digits of a Cholesky factor: of what is smooth.
        """
        covariance = self.covariance.at(parameters)
        if self._beside is not None:
            covariance.K += self._beside
        try:
            found = ShortEvidence(covariance, *self._rows.at(noise))
        except NotPositiveDefiniteError:
            if math.isinf(self._most):
                raise
            return None
        return found if found.ratio <= self._most else None


class ShortRegression:
    r"""The value of a series with terms at any scales of their coefficients, and its slopes.

    With :math:`\Psi` (m, q) of :mod:`.regression` :math:`\Sigma = K + \Psi \Psi^\top + N`, the mean
    of the coefficients is :math:`\hat u = \Psi^\top \alpha`, and the derivative in the log scale of
    one :math:`\hat u_k^2 - \psi_k^\top \Sigma^{-1} \psi_k`. O(m^3 + m^2 q).
    """

    def __init__(
        self,
        prior: DensePrior,
        Psi: np.ndarray,
        rows: tuple[np.ndarray, np.ndarray, float, float],  # of `ShortRows.at`
        sizes: list[int],  # features of each term
    ) -> None:
        K, none = prior.K + Psi @ Psi.T, np.empty(0)
        self._prior, self._Psi, self._sizes = prior, Psi, sizes
        self._found = ShortEvidence(CovarianceAt(K, none, none, []), *rows)
        self.value, self.ratio = self._found.value, self._found.ratio
        self._u = Psi.T @ self._found.alpha

    @property
    def noise_slope(self) -> float:
        """Derivative of the value in the log noise."""
        return float(self._found.gradient()[0])

    def gradients(self) -> list[Tensor]:
        """In the parameters of the dynamics, and in the log scales of each term."""
        half, alpha = self._found.half_inverse, self._found.alpha
        S = half + half.T
        slopes = [torch.from_numpy(self._prior.contract(alpha[:, None] * alpha - S))]
        if self._sizes:
            of_scales = self._u**2 - (self._Psi * (S @ self._Psi)).sum(0)
            slopes += torch.from_numpy(of_scales).split(self._sizes)
        return slopes

    @property
    def of_terms(self) -> Tensor:
        """Mean (m,) of what the terms add."""
        return torch.from_numpy(self._Psi @ self._u)
