r"""Stationary processes that are a linear stochastic differential equation, in dimensionless time.

.. math:: ds = A s\,dr + \sqrt{q} L\,d\beta, \qquad f = H s, \qquad r = \lambda t, \qquad
          F(r) = e^{A r}, \qquad Q(r) = \int_0^r F(u) q L L^\top F(u)^\top du = P_0 - F P_0 F^\top.

The state of a Matern process holds :math:`f^{(j)} / \lambda^j`, so that A, q and the stationary
covariance :math:`P_0` are fixed numbers and :math:`k(t) = H F(\lambda t) P_0 H^\top`. A transition
is computed for many r at once: matrices are (d, d, m) with the batch last and contiguous.

The difference :math:`P_0 - F P_0 F^\top` loses all digits at small r. The Matern processes have
closed forms in the regularised incomplete gamma function P(k, 2r) (see `lower_gamma`) whose other
terms do not cancel. Entry (i, j) of Q is accurate relative to :math:`\sqrt{Q_{ii} Q_{jj}}` at every
r.

Squared exponential processes have few states by a rational approximation of their spectral density,

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

Their transitions at r below a switch are power series, above it sums over the poles. With
:math:`\alpha` the mean of :math:`a_k` the series

.. math:: e^{\alpha r} F(r) = \sum_n \frac{(A + \alpha)^n r^n}{n!}, \qquad
          e^{2 \alpha r} Q(r) = \sum_n G_n r^n, \quad
          (n + 1) G_{n+1} = (A + \alpha) G_n + G_n (A + \alpha)^\top
          + \frac{(2 \alpha)^n}{n!} q L L^\top

keep the leading power of each entry exactly, as the noise enters the last derivative alone.

References
----------
.. [1] J. Hartikainen and S. Sarkka, "Kalman filtering and smoothing solutions to temporal Gaussian
   process regression models" (MLSP 2010), with the variance restored to 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skgp.linalg.runtime import constant_like

__all__ = [
    "GAUSSIAN4",
    "GAUSSIAN6",
    "MATERN12",
    "MATERN32",
    "MATERN52",
    "Primitive",
    "ROTATION",
    "Rational",
    "lower_gamma",
]

# mathematical: exp(-r) is 0 in float64 from r = 746; all greater r are evaluated here
_VANISHED = 800.0  # mathematical


class Primitive(ABC):
    """A process of unit variance in dimensionless time; each is a constant of this module.

    `name` is that of the constant, in lower case. The noise (d,), sqrt(q) L, is 0 but for the last
    entry: it enters the highest derivative; a rotation has none, and Q = 0. From the `horizon` on F
    has vanished; it is inf for a process that never forgets.
    """

    horizon = _VANISHED

    def __init__(self, name: str, feedback: list, noise: list, stationary: list) -> None:
        self.name = name
        # A (d, d), sqrt(q) L (d,), P0 (d, d) and H (d,).
        self.feedback = torch.tensor(feedback, dtype=torch.float64)
        self.noise = torch.tensor(noise, dtype=torch.float64)
        self.is_noisy = bool(self.noise.any())
        self.stationary = torch.tensor(stationary, dtype=torch.float64)
        self.observation = torch.zeros_like(self.noise)
        self.observation[0] = 1.0

    @property
    def n_states(self) -> int:
        """Dimension d of the state."""
        return len(self.noise)

    @abstractmethod
    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        """Write F(r) and Q(r), (d, d, m), for r (m,) in [0, horizon], finite."""

    @abstractmethod
    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k(r) for r >= 0 and its derivative in log r, each in the shape of r."""

    def __reduce__(self) -> str:
        return self.name.upper()  # a constant of its module: pickled and copied by that name


class _Matern12(Primitive):
    """The Ornstein-Uhlenbeck process, k = exp(-r)."""

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        torch.exp(-r, out=F[0, 0])
        torch.expm1(-2 * r, out=Q[0, 0])
        Q.neg_()

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = np.exp(-r)
        return e, -r * e


class _Matern32(Primitive):
    """k = (1 + r) exp(-r): Q11 = P(3, 2r), Q12 = 2 r^2 e^{-2r}, Q22 = P(3, 2r) + 4 r e^{-2r}."""

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        e = torch.exp(-r)
        re = r * e
        torch.add(e, re, out=F[0, 0])
        F[0, 1] = re
        torch.neg(re, out=F[1, 0])
        torch.sub(e, re, out=F[1, 1])
        p3 = lower_gamma(3, 2 * r, e * e, out=Q[0, 0])
        torch.mul(re, re, out=Q[0, 1]).mul_(2)
        Q[1, 0] = Q[0, 1]
        torch.addcmul(p3, re, e, value=4, out=Q[1, 1])

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = np.exp(-r)
        re = r * e
        return e + re, -r * re


class _Matern52(Primitive):
    r"""k = (1 + r + r^2/3) exp(-r).

    With :math:`w = F L = e^{-r} (r^2/2, r - r^2/2, 1 - 2r + r^2/2)`, where each is the derivative
    of the one before, :math:`Q_{12} = q w_1^2/2`, :math:`Q_{23} = q w_2^2/2` and
    :math:`Q_{13} = q w_1 w_2 - Q_{22}`; the squares integrate to incomplete gammas.
    """

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        e = torch.exp(-r)
        re = r * e
        half = r * re / 2  # r^2 e / 2
        w2 = re - half
        torch.add(e + re, half, out=F[0, 0])
        torch.add(re, half, alpha=2, out=F[0, 1])
        F[0, 2] = half
        torch.neg(half, out=F[1, 0])
        torch.sub(e + re, half, alpha=2, out=F[1, 1])
        F[1, 2] = w2
        torch.neg(w2, out=F[2, 0])
        torch.sub(2 * half, re, alpha=3, out=F[2, 1])
        torch.sub(e + half, re, alpha=2, out=F[2, 2])
        e2 = e * e
        p5 = lower_gamma(5, 2 * r, e2, out=Q[0, 0])
        torch.mul(half, half, out=Q[0, 1]).mul_(8 / 3)
        torch.mul(w2, w2, out=Q[1, 2]).mul_(8 / 3)
        cube = re * half  # r^3 e^2 / 2
        rest = 1 - r  # shared by the polynomials below
        # Q22 = P5 / 3 + e^2 (16 r^3 - 4 r^4) / 9, Q13 = -P5 / 3 + 8 e^2 (r^3 - r^4) / 9
        torch.mul(cube, 4 - r, out=Q[1, 1]).mul_(8 / 9).add_(p5, alpha=1 / 3)
        torch.mul(cube, rest, out=Q[0, 2]).mul_(16 / 9).sub_(p5, alpha=1 / 3)
        # Q33 = P5 + 16 e^2 (r - r^2 + r^3) / 3, whose polynomial is r (1 - r) + r^3 > 0
        torch.mul(e2 * r, rest, out=Q[2, 2]).add_(cube, alpha=2).mul_(16 / 3).add_(p5)
        Q[1, 0], Q[2, 1], Q[2, 0] = Q[0, 1], Q[1, 2], Q[0, 2]

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e, third = np.exp(-r), r * r / 3
        return (1 + r + third) * e, -third * (1 + r) * e


class _Rotation(Primitive):
    """A pure oscillation, k = cos(r): it takes no noise and never forgets."""

    horizon = math.inf

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        torch.cos(r, out=F[0, 0])
        torch.sin(r, out=F[0, 1])
        torch.neg(F[0, 1], out=F[1, 0])
        F[1, 1] = F[0, 0]
        Q.zero_()

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.cos(r), -r * np.sin(r)


def lower_gamma(k: int, x: Tensor, decay: Tensor, *, out: Tensor | None = None) -> Tensor:
    r"""Regularised lower incomplete gamma function P(k, x) of a whole k, to full relative accuracy.

    .. math:: P(k, x) = 1 - e^{-x} \sum_{j < k} \frac{x^j}{j!}
                      = e^{-x} \frac{x^k}{k!} \sum_{j \ge 0} \frac{k!\,x^j}{(k + j)!}.

    For x (m,) not negative and finite, with its `decay` exp(-x). The second form serves small x,
    where the first would cancel: up to P = 0.02 or so. O(k m) where all x are large, and up to 14
    terms of the series (k = 3; 19 for k = 5) where they are not.
    """
    out = torch.empty_like(x) if out is None else out
    if not len(x):
        return out
    low, high = (float(v) for v in torch.aminmax(x))
    switch = 0.6 * max(1, k - 2)
    if high < switch:
        return _gamma_series(k, x, decay, high, out)
    large = _horner(x, [1 / math.factorial(j) for j in range(k)], torch.empty_like(x))
    large.mul_(decay).neg_().add_(1)
    if low >= switch:
        return out.copy_(large)
    small = _gamma_series(k, x.clamp(max=switch), decay, switch, torch.empty_like(x))
    return torch.where(x < switch, small, large, out=out)


def _gamma_series(k: int, x: Tensor, decay: Tensor, high: float, out: Tensor) -> Tensor:
    coefficients = [1 / math.factorial(k)]
    term = 1.0
    while term > 3e-17:  # of the largest x, relative to the first term
        coefficients.append(coefficients[-1] / (k + len(coefficients)))
        term *= high / (k + len(coefficients) - 1)
    total = _horner(x, coefficients, out).mul_(decay)
    for _ in range(k):
        total.mul_(x)
    return total


def _horner(x: Tensor, coefficients: list[float], out: Tensor) -> Tensor:
    out.fill_(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out.mul_(x).add_(c)
    return out


class Rational(Primitive):
    """The process of a rational spectral density with one zero on the imaginary axis.

    Its pairs of poles are -a +- ib, of `decays` a and `frequencies` b; `zero` is the angular
    frequency at which the density vanishes, `error` the greatest distance of the covariance from
    exp(-r^2 / 2). The state is (x, x', x'', ...), each entry scaled to unit variance. Cost of a
    transition: products of a (d^2, K) with a (K, m) matrix, K up to about 40.
    """

    switch = 1.25  # mathematical: r up to which transitions are power series, at equal digits

    def __init__(
        self,
        name: str,
        decays: Sequence[float],
        frequencies: Sequence[float],
        zero: float,
        error: float,
    ) -> None:
        self.error = error
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
        self._series = _series(
            A, noise, self._shift, _n_terms(self._spread * self.switch, 2 * d - 1)
        )
        self._modes = _modes(A, poles[: d // 2], P0)
        # Of the waves in k(r).
        H, P0 = self.observation.numpy(), self.stationary.numpy()
        self._weights = np.einsum("i,iju,j->u", H, self._modes[0], P0 @ H)

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As of `Primitive`: waves of some decays a and frequencies b, with weights u and v."""
        a, b, (u, v) = self._decays, self._frequencies, self._weights.reshape(2, -1)
        decay = np.exp(np.multiply.outer(-a, r))
        phase = torch.from_numpy(np.multiply.outer(b, r))
        waves = np.concatenate([decay * phase.cos().numpy(), decay * phase.sin().numpy()])
        value = np.tensordot(self._weights, waves, 1)
        return value, r * np.tensordot(np.append(b * v - a * u, -a * v - b * u), waves, 1)

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        """By power series below the switch, by waves above it."""
        if not len(r):
            return
        low, high = (float(v) for v in torch.aminmax(r))
        if high < self.switch:
            return self._fill_series(r, high, F, Q)
        self._fill_modes(r, F, Q)
        if low < self.switch:
            near = (r < self.switch).nonzero()[:, 0]
            small = [r.new_empty(*F.shape[:2], len(near)) for _ in range(2)]
            self._fill_series(r[near], self.switch, *small)
            F[..., near], Q[..., near] = small

    def _fill_series(self, r: Tensor, high: float, F: Tensor, Q: Tensor) -> None:
        d = self.n_states
        n_terms = _n_terms(self._spread * high, 2 * d - 1)
        powers = r.new_ones(n_terms, len(r))
        for n in range(1, n_terms):
            torch.mul(powers[n - 1], r, out=powers[n])
        decay = torch.exp(-self._shift * r)
        for out, series, factor in zip((F, Q), self._series, (decay, decay * decay), strict=True):
            coefficients = constant_like(series[..., :n_terms], r).reshape(d * d, -1)
            torch.mul((coefficients @ powers).reshape(out.shape), factor, out=out)

    @property
    def _spread(self) -> float:
        """Greatest distance of sums of two poles from twice their mean."""
        offset = self._decays - self._shift
        return 2 * float(np.hypot(offset, self._frequencies).max())

    def _fill_modes(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        d = self.n_states
        a, b = (constant_like(v, r)[:, None] for v in (self._decays, self._frequencies))
        decay, phase = torch.exp(-a * r), b * r
        waves = torch.cat([decay * phase.cos(), decay * phase.sin()])  # (d, m)
        modes, squares = (constant_like(m, r).reshape(d * d, -1) for m in self._modes)
        F.copy_((modes @ waves).reshape(F.shape))
        u, v = torch.triu_indices(d, d, device=r.device)
        lost = (squares @ (waves[u] * waves[v])).reshape(Q.shape)
        torch.sub(constant_like(self.stationary, r)[..., None], lost, out=Q)


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


MATERN12 = _Matern12("matern12", [[-1.0]], [math.sqrt(2)], [[1.0]])  # mathematical
MATERN32 = _Matern32("matern32", [[0.0, 1], [-1, -2]], [0.0, 2], [[1.0, 0], [0, 1]])  # mathematical
MATERN52 = _Matern52(  # mathematical
    "matern52",
    [[0.0, 1, 0], [0, 0, 1], [-1, -3, -3]],
    [0.0, 0, math.sqrt(16 / 3)],
    [[1, 0, -1 / 3], [0, 1 / 3, 0], [-1 / 3, 0, 1]],
)
ROTATION = _Rotation("rotation", [[0.0, 1], [-1, 0]], [0.0, 0], [[1.0, 0], [0, 1]])  # mathematical
_A4, _B4 = [1.5671277701, 1.4806180914], [0.6327591736, 2.0165338261]  # mathematical
_A6, _B6 = (
    [1.8878092714, 1.847051314, 1.7547020574],
    [0.5143257123, 1.580459293, 2.8030488056],
)  # mathematical
GAUSSIAN4 = Rational("gaussian4", _A4, _B4, 4.8535871093, 4.5e-4)  # mathematical
GAUSSIAN6 = Rational("gaussian6", _A6, _B6, 5.0915963995, 9.1e-6)  # mathematical
