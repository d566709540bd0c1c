r"""Squared exponential processes by few states: rational approximations of their spectral density.

.. math:: e^{-r^2/2} \approx \frac{1}{2\pi} \int
          \frac{q\,(1 - \omega^2/\zeta^2)^2}{\prod_k |i\omega - p_k|^2} e^{i\omega r} d\omega,
          \qquad p_k = -a_k \pm i b_k.

The process is x + x''/zeta^2 of an all-pole process x, whose derivatives are the state. Poles and
zero were chosen to make the greatest error over all r least:

===========  ======  ============  ==================================
process      states  error         for comparison: Taylor series [1]_
===========  ======  ============  ==================================
`GAUSSIAN4`  4       4.5e-4        2.2e-2
`GAUSSIAN6`  6       9.1e-6        4.3e-3
===========  ======  ============  ==================================

Transitions at r below a switch are power series, above it sums over the poles. With
:math:`\alpha` the mean of :math:`a_k` the series

.. math:: e^{\alpha r} F(r) = \sum_n \frac{(A + \alpha)^n r^n}{n!}, \qquad
          e^{2 \alpha r} Q(r) = \sum_n G_n r^n, \quad
          (n + 1) G_{n+1} = (A + \alpha) G_n + G_n (A + \alpha)^\top
          + \frac{(2 \alpha)^n}{n!} q L L^\top

keep the leading power of each entry exactly, as the noise enters the last derivative alone.

.. [1] J. Hartikainen and S. Sarkka, "Kalman filtering and smoothing solutions to temporal Gaussian
   process regression models" (MLSP 2010), with the variance restored to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .sde_primitives import Primitive

__all__ = ["GAUSSIAN4", "GAUSSIAN6", "Rational"]


class Rational(Primitive):
    """The process of a rational spectral density with one zero on the imaginary axis.

    Parameters
    ----------
    name : str
    decays, frequencies : sequence of float
        a and b of the pairs of poles -a +- ib.
    zero : float
        Angular frequency at which the spectral density vanishes.
    error : float
        Greatest distance of the covariance from exp(-r^2 / 2).
    switch : float
        r up to which transitions are power series.

    Notes
    -----
    The state is (x, x', x'', ...), each entry scaled to unit variance. Cost of a transition:
    products of a (d^2, K) with a (K, m) matrix, K up to about 40.
    """

    def __init__(
        self,
        name: str,
        decays: Sequence[float],
        frequencies: Sequence[float],
        zero: float,
        error: float,
        switch: float,
    ) -> None:
        self.error, self.switch = error, switch
        a, b = np.array(decays), np.array(frequencies)
        self._decays, self._frequencies = a, b
        poles = np.concatenate([-a + 1j * b, -a - 1j * b])
        d = len(poles)
        moments = _moments(poles, 2 * d - 1)
        i = np.arange(d)
        P = (-1.0) ** i * moments[i[:, None] + i] * ((i[:, None] + i) % 2 == 0)
        H = np.zeros(d)
        H[0], H[2] = 1.0, zero**-2
        q = 1 / (H @ P @ H)
        scale = np.sqrt(q * np.diag(P))
        A = np.diag(np.ones(d - 1), 1)
        A[-1] = -np.poly(poles).real[:0:-1]
        A = A * scale / scale[:, None]
        noise = np.r_[np.zeros(d - 1), math.sqrt(q) / scale[-1]]
        P0 = q * P / np.outer(scale, scale)
        super().__init__(name, A.tolist(), noise.tolist(), P0.tolist())
        self.observation = torch.tensor(H * scale)
        self.horizon = self.horizon / a.min()
        self._shift = float(a.mean())
        self._series = _series(A, noise, self._shift, _n_terms(self._spread * switch, 2 * d - 1))
        self._modes = _modes(A, poles[: d // 2], P0)
        # Of the waves in k(r).
        H, P0 = self.observation.numpy(), self.stationary.numpy()
        self._weights = np.einsum("i,iju,j->u", H, self._modes[0], P0 @ H)

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, slope = np.zeros_like(r), np.zeros_like(r)
        half = len(self._decays)
        for a, b, u, v in zip(
            self._decays, self._frequencies, *np.split(self._weights, [half]), strict=True
        ):
            decay = np.exp(-a * r)
            cosine, sine = decay * np.cos(b * r), decay * np.sin(b * r)
            value += u * cosine + v * sine
            slope += (b * v - a * u) * cosine - (a * v + b * u) * sine
        return value, r * slope

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        if not len(r):
            return
        low, high = (float(v) for v in torch.aminmax(r))
        if high < self.switch:
            return self._fill_series(r, high, F, Q)
        self._fill_modes(r, F, Q)
        if low < self.switch:
            near = (r < self.switch).nonzero()[:, 0]
            small = [torch.empty(*F.shape[:2], len(near)).to(r) for _ in range(2)]
            self._fill_series(r[near], self.switch, *small)
            F[..., near], Q[..., near] = small

    def _fill_series(self, r: Tensor, high: float, F: Tensor, Q: Tensor) -> None:
        d = self.n_states
        n_terms = _n_terms(self._spread * high, 2 * d - 1)
        powers = torch.ones(n_terms, len(r)).to(r)
        for n in range(1, n_terms):
            torch.mul(powers[n - 1], r, out=powers[n])
        decay = torch.exp(-self._shift * r)
        for out, series, factor in zip((F, Q), self._series, (decay, decay * decay), strict=True):
            coefficients = torch.from_numpy(series[..., :n_terms]).to(r).reshape(d * d, -1)
            torch.mul((coefficients @ powers).reshape(out.shape), factor, out=out)

    @property
    def _spread(self) -> float:
        """Greatest distance of sums of two poles from twice their mean."""
        offset = self._decays - self._shift
        return 2 * float(np.hypot(offset, self._frequencies).max())

    def _waves(self, r: Tensor) -> Tensor:
        """exp(-a r) cos(b r), then exp(-a r) sin(b r), (d, *r.shape)."""
        column = (-1,) + (1,) * r.ndim
        a = torch.from_numpy(self._decays).to(r).reshape(column)
        b = torch.from_numpy(self._frequencies).to(r).reshape(column)
        decay, phase = torch.exp(-a * r), b * r
        return torch.cat([decay * phase.cos(), decay * phase.sin()])

    def _fill_modes(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        d = self.n_states
        waves = self._waves(r)
        modes, squares = (torch.from_numpy(m).to(r).reshape(d * d, -1) for m in self._modes)
        F.copy_((modes @ waves).reshape(F.shape))
        u, v = torch.triu_indices(d, d)
        lost = (squares @ (waves[u] * waves[v])).reshape(Q.shape)
        torch.sub(self.stationary.to(r)[..., None], lost, out=Q)


def _moments(poles: np.ndarray, count: int) -> np.ndarray:
    """Derivatives at 0 of the covariance of the all-pole process with unit noise, (count,)."""
    residues = np.array(
        [1 / (np.prod(np.delete(p - poles, k)) * np.prod(-p - poles)) for k, p in enumerate(poles)]
    )
    return np.array([(residues * poles**n).sum().real for n in range(count)])


def _n_terms(x: float, lead: int) -> int:
    """Terms of a power series in x until they are below 1e-17 of the term ``lead``."""
    n, term = lead, 1.0
    while term > 1e-17:
        n += 1
        term *= x / n
    return n + 1


def _series(A: np.ndarray, noise: np.ndarray, shift: float, n_terms: int) -> list[np.ndarray]:
    """Coefficients (d, d, n_terms) of the shifted power series of F and of Q."""
    d = len(A)
    B, source = A + shift * np.eye(d), np.outer(noise, noise)
    F, G = [np.eye(d)], [np.zeros((d, d))]
    for n in range(n_terms - 1):
        F.append(B @ F[-1] / (n + 1))
        G.append((B @ G[-1] + G[-1] @ B.T + source) / (n + 1))
        source = source * (2 * shift) / (n + 1)
    return [np.stack(terms, -1) for terms in (F, G)]


def _modes(A: np.ndarray, poles: np.ndarray, P0: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of F in the waves, (d, d, d), and of F P0 F' in their products."""
    poles = np.concatenate([poles, poles.conj()])
    scale = np.cumprod(np.r_[1.0, np.diag(A, 1)])  # eigenvectors are powers of the pole, scaled
    V = poles[None] ** np.arange(len(A))[:, None] / scale[:, None]
    half = len(A) // 2
    parts = V.T[:half, :, None] * np.linalg.inv(V)[:half, None, :]  # residue at each upper pole
    modes = np.moveaxis(np.concatenate([2 * parts.real, -2 * parts.imag]), 0, -1)
    squares = []
    for u, v in zip(*np.triu_indices(len(A)), strict=True):
        product = modes[..., u] @ P0 @ modes[..., v].T
        squares.append(product if u == v else product + product.T)
    return np.ascontiguousarray(modes), np.stack(squares, -1)


GAUSSIAN4 = Rational(
    "gaussian4",
    [1.5671277701, 1.4806180914],
    [0.6327591736, 2.0165338261],
    4.8535871093,
    4.5e-4,
    1.25,
)
GAUSSIAN6 = Rational(
    "gaussian6",
    [1.8878092714, 1.847051314, 1.7547020574],
    [0.5143257123, 1.580459293, 2.8030488056],
    5.0915963995,
    9.1e-6,
    1.25,
)
