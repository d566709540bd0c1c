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

Squared exponential processes are in :mod:`.sde_rational`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.linalg.runtime import constant_like
from skgp.linalg.small_matrices import matmul

from .special import lower_gamma, matern12, matern32, matern52, oscillator_series, rotation

_VANISHED = 800.0  # mathematical: exp(-r) is 0 in float64 from r = 746; greater r count as this


class Primitive(ABC):
    """A process of unit variance in dimensionless time; each is a constant of this module.

    `name` is that of the constant, in lower case; the state has `n_states` d. The noise (d,),
    sqrt(q) L, is 0 but for the last entry: it enters the highest derivative; a rotation has none,
    and Q = 0. From the `horizon` on F has vanished; it is inf for a process that never forgets.
    """

    horizon = _VANISHED
    is_stationary = True  # else P0 is the covariance at the origin of time
    has_shape = False  # a parameter besides the rate: `at` a number, the process
    decay = 1.0  # F(r) is exp(-decay r) times a polynomial or a rotation
    is_approximate = False  # of the covariance that is `intended`
    degree: int | None = None  # of the polynomial; None where there is none, nor `fill_lags`
    #: Of one with a shape: the process of another one, a number. In its logarithm: dQ (d, d, m) of
    #: r (m,), dP0 (d, d), and c of dF = c r F; X (d, d) that commutes with F, X P0 H' = dP0 H'; and
    #: the derivative of k(r).
    at: Any
    shape_slopes: Any
    shape_turn: Any
    shape_slope: Any
    slopes: Any  # of `covariance` in the earlier and in the later place, if not stationary

    def __init__(self, name: str, feedback: list, noise: list, stationary: list) -> None:
        self.name, self.n_states = name, len(noise)
        # A (d, d), sqrt(q) L (d,), P0 (d, d) and H (d,).
        self.feedback = torch.tensor(feedback, dtype=torch.float64)
        self.noise = torch.tensor(noise, dtype=torch.float64)
        self.is_noisy = bool(self.noise.any())
        self.stationary = torch.tensor(stationary, dtype=torch.float64)
        self.observation = torch.zeros_like(self.noise)
        self.observation[0] = 1.0

    @property
    def mirror(self) -> Tensor:
        """D, (d, d), of the state backwards in time, D s: derivatives of odd order change sign."""
        signs = (-1.0) ** torch.arange(self.n_states)
        return torch.diag(signs.to(torch.float64))

    @abstractmethod
    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        """Write F(r) and Q(r), (d, d, m), for r (m,) in [0, horizon], finite."""

    @abstractmethod
    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k(r) for r >= 0 and r k'(r), in the shape of r; a tensor of Matern ones and rotations."""

    def covariance(self, r: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k of places `start` after the origin and r later, and its slope in log rate."""
        return self.correlation(r)

    def own(self, r: np.ndarray, start: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """`covariance`, or without a start `correlation`."""
        return self.correlation(r) if start is None else self.covariance(r, start)

    def intended(self, r: np.ndarray, start: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The same of the kernel that the process stands for, which it may approximate."""
        return self.own(r, start)

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        """Write ``H F(r)`` and ``F(r)^-1 P0 H'``, (d, m) each, for r (m,) not negative.

        Of one that is not stationary the latter is ``F(r)^-1 Q(r) H'``.
        """
        raise NotImplementedError

    def __reduce__(self) -> Any:
        return self.name.upper()  # a constant of its module: pickled and copied by that name


class _Matern12(Primitive):
    """The Ornstein-Uhlenbeck process, k = exp(-r)."""

    degree = 0

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        torch.exp(-r, out=ahead[0])
        torch.reciprocal(ahead[0], out=back[0])

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        torch.exp(-r, out=F[0, 0])
        torch.expm1(-2 * r, out=Q[0, 0])
        Q.neg_()

    def correlation(self, r: Any) -> tuple[Any, Any]:
        return matern12(r)


class _Matern32(Primitive):
    """k = (1 + r) exp(-r): Q11 = P(3, 2r), Q12 = 2 r^2 e^{-2r}, Q22 = P(3, 2r) + 4 r e^{-2r}."""

    degree = 1

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        e = torch.exp(-r)
        torch.mul(r, e, out=ahead[1])
        torch.add(e, ahead[1], out=ahead[0])
        torch.sub(1.0, r, out=back[0]).div_(e)
        torch.div(r, e, out=back[1])

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

    def correlation(self, r: Any) -> tuple[Any, Any]:
        return matern32(r)


class _Matern52(Primitive):
    r"""k = (1 + r + r^2/3) exp(-r).

    With :math:`w = F L = e^{-r} (r^2/2, r - r^2/2, 1 - 2r + r^2/2)`, where each is the derivative
    of the one before, :math:`Q_{12} = q w_1^2/2`, :math:`Q_{23} = q w_2^2/2` and
    :math:`Q_{13} = q w_1 w_2 - Q_{22}`; the squares integrate to incomplete gammas.
    """

    degree = 2

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        """As of `Primitive`: ``F(-r) (1, 0, -1/3)'``."""
        e, square = torch.exp(-r), r * r
        torch.mul(square, 0.5 * e, out=ahead[2])
        torch.mul(r + square, e, out=ahead[1])
        torch.mul(1 + r + 0.5 * square, e, out=ahead[0])
        torch.sub(1 + square / 3, r, out=back[0]).div_(e)
        torch.sub(r, square, out=back[1]).div_(3 * e)
        torch.add(r - 1, square, out=back[2]).div_(3 * e)

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

    def correlation(self, r: Any) -> tuple[Any, Any]:
        return matern52(r)


class _Rotation(Primitive):
    """A pure oscillation, k = cos(r): it takes no noise and never forgets."""

    horizon, decay, degree = math.inf, 0.0, 0

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        torch.cos(r, out=ahead[0])
        torch.sin(r, out=ahead[1])
        back.copy_(ahead)

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        torch.cos(r, out=F[0, 0])
        torch.sin(r, out=F[0, 1])
        torch.neg(F[0, 1], out=F[1, 0])
        F[1, 1] = F[0, 0]
        Q.zero_()

    def correlation(self, r: Any) -> tuple[Any, Any]:
        return rotation(r)


class _Line(Primitive):
    """A line through 0 at the origin, of a slope of unit variance: no noise, not stationary."""

    horizon, is_stationary = math.inf, False
    degree, decay = 0, 0.0  # terms of `fill_lags` do not cancel

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        ahead[0], ahead[1] = 1.0, r
        back.zero_()

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        F[0, 0] = F[1, 1] = 1.0
        F[0, 1], F[1, 0] = r, 0.0
        Q.zero_()

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise ValueError("A process that is not stationary has no covariance of lags alone.")

    def covariance(self, r: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k = start * (start + r)
        return k, 2 * k

    def slopes(self, r: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return start + r, start


class _Integrated(_Line):
    """Integrated Brownian motion from 0 at the origin, to both sides: k = m^2 (3 M - m) / 6."""

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        super().fill_lags(r, ahead, back)
        torch.mul(r, r, out=back[1]).mul_(0.5)
        torch.mul(back[1], r, out=back[0]).mul_(-1 / 3)

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        super().fill(r, F, Q)
        square = r * r
        torch.mul(square, r, out=Q[0, 0]).mul_(1 / 3)
        torch.mul(square, 0.5, out=Q[0, 1])
        Q[1, 0], Q[1, 1] = Q[0, 1], r

    def covariance(self, r: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start = np.maximum(start, 0.0)  # else the two are on different sides
        k = start * start * (start / 3 + r / 2)
        return k, 3 * k

    def slopes(self, r: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start = np.maximum(start, 0.0)
        return start * (start / 2 + r), start * start / 2


MATERN12 = _Matern12("matern12", [[-1.0]], [math.sqrt(2)], [[1.0]])  # mathematical
MATERN32 = _Matern32("matern32", [[0.0, 1], [-1, -2]], [0.0, 2], [[1.0, 0], [0, 1]])  # mathematical
MATERN52 = _Matern52(  # mathematical
    "matern52",
    [[0.0, 1, 0], [0, 0, 1], [-1, -3, -3]],
    [0.0, 0, math.sqrt(16 / 3)],
    [[1, 0, -1 / 3], [0, 1 / 3, 0], [-1 / 3, 0, 1]],
)
ROTATION = _Rotation("rotation", [[0.0, 1], [-1, 0]], [0.0, 0], [[1.0, 0], [0, 1]])  # mathematical
LINE = _Line("line", [[0.0, 1], [0, 0]], [0.0, 0], [[0.0, 0], [0, 1]])  # mathematical
INTEGRATED = _Integrated(  # mathematical
    "integrated", [[0.0, 1], [0, 0]], [0.0, 1], [[0.0, 0], [0, 0]]
)


class Oscillator(Primitive):
    r"""The damped oscillation :math:`k = e^{-\rho r} (\cos r + \rho \sin r)`, of shape rho.

    Its state :math:`(x, (x' + \rho x))` turns and shrinks,

    .. math:: F = e^{-\rho r} \begin{pmatrix} \cos r & \sin r \\ -\sin r & \cos r \end{pmatrix},
              \qquad P_0 = \begin{pmatrix} 1 & \rho \\ \rho & 1 + 2 \rho^2 \end{pmatrix}, \qquad
              q = 4 \rho (1 + \rho^2),

    so that :math:`Q = q \int_0^r e^{-2 \rho u} (\sin u, \cos u)^\top (\sin u, \cos u) du`: a
    power series at small r, :math:`P_0 - F P_0 F^\top` beyond.
    """

    has_shape, degree = True, 0
    switch = 0.5  # mathematical: of r (1 + rho), where the series has lost and the rest has digits

    def __init__(self, shape: float = 1.0) -> None:
        self.shape = rho = shape
        P0 = [[1.0, rho], [rho, 1 + 2 * rho**2]]
        noise = [0.0, math.sqrt(4 * rho * (1 + rho**2))]
        super().__init__("oscillator", [[-rho, 1.0], [-1.0, -rho]], noise, P0)
        self.horizon, self.decay = self.horizon / rho, rho

    def __reduce__(self) -> Any:
        return Oscillator, (self.shape,)

    @property
    def mirror(self) -> Tensor:
        """As of `Primitive`, of the state (x, x' + rho x)."""
        return torch.tensor([[1.0, 0.0], [2 * self.shape, -1.0]], dtype=torch.float64)

    def at(self, shape: float) -> Oscillator:
        """The process of a shape."""
        return Oscillator(shape)

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        """F in closed form, Q by power series below the switch."""
        c, s = r.cos(), r.sin()
        decay = torch.exp(-self.shape * r)
        torch.mul(decay, c, out=F[0, 0])
        torch.mul(decay, s, out=F[0, 1])
        torch.neg(F[0, 1], out=F[1, 0])
        F[1, 1] = F[0, 0]
        P0 = constant_like(self.stationary, r)[..., None]
        self._at_both(r, Q, oscillator_series(self.shape)[0], P0 - _sandwich(F, P0))

    def _at_both(self, r: Tensor, out: Tensor, series: np.ndarray, far: Tensor) -> None:
        """Write e^{-2 rho r} times a power series where r is small, else what is given."""
        small = r * (1 + self.shape) < self.switch
        out.copy_(far)
        if bool(small.any()):
            near = r[small]
            powers = torch.stack([near**n for n in range(series.shape[-1])])
            decay = torch.exp(-2 * self.shape * near)
            coefficients = constant_like(series.reshape(4, -1), r)
            out[..., small] = ((coefficients @ powers) * decay).reshape(2, 2, -1)

    def fill_lags(self, r: Tensor, ahead: Tensor, back: Tensor) -> None:
        """As of `Primitive`: F(-r) (1, rho)' is (c - rho s, s + rho c) exp(rho r)."""
        c, s, decay = r.cos(), r.sin(), torch.exp(-self.shape * r)
        torch.mul(c, decay, out=ahead[0])
        torch.mul(s, decay, out=ahead[1])
        torch.sub(c, s, alpha=self.shape, out=back[0]).div_(decay)
        torch.add(s, c, alpha=self.shape, out=back[1]).div_(decay)

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As of `Primitive`."""
        rho, decay = self.shape, np.exp(-self.shape * r)
        sine = decay * np.sin(r)
        return decay * np.cos(r) + rho * sine, -r * (1 + rho**2) * sine

    def shape_slope(self, r: np.ndarray) -> np.ndarray:
        """Derivative of k(r) in the logarithm of the shape."""
        return self.shape * (np.exp(-self.shape * r) * np.sin(r) - r * self.correlation(r)[0])

    def shape_turn(self) -> Tensor:
        """As of `Primitive`."""
        rho = self.shape
        return torch.tensor([[rho, -1.0], [1.0, rho]], dtype=torch.float64) * (rho / (1 + rho**2))

    def shape_slopes(self, r: Tensor) -> tuple[Tensor, Tensor, float]:
        """As of `Primitive`."""
        rho = self.shape
        dP = torch.tensor([[0.0, rho], [rho, 4 * rho**2]], dtype=torch.float64)
        F, Q = (r.new_empty(2, 2, len(r)) for _ in range(2))
        self.fill(r, F, Q)
        P0, moved = (constant_like(each, r)[..., None] for each in (self.stationary, dP))
        # dQ = dP - F (dP - 2 rho r P0) F'
        far = moved - _sandwich(F, moved - 2 * rho * r * P0)
        series, slope = oscillator_series(rho)
        # e^{-2 rho r} falls with rho by 2 r of itself
        slope = slope.copy()
        slope[..., 1:] -= 2 * series[..., :-1]
        out = torch.empty_like(Q)
        self._at_both(r, out, rho * slope, far)
        return out, dP, -rho


def _sandwich(F: Tensor, P: Tensor) -> Tensor:
    """``F P F'``, (d, d, m)."""
    return matmul(matmul(F, P), F.transpose(0, 1))


OSCILLATOR = Oscillator()
