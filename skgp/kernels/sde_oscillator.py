"""The damped oscillation as a process of two states, whose shape is a parameter."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.linalg.runtime import constant_like
from skgp.linalg.small_matrices import matmul

from .sde_processes import Primitive


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
        self._at_both(r, Q, _series_of_oscillator(self.shape)[0], P0 - _sandwich(F, P0))

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
        series, slope = _series_of_oscillator(rho)
        # e^{-2 rho r} falls with rho by 2 r of itself
        slope = slope.copy()
        slope[..., 1:] -= 2 * series[..., :-1]
        out = torch.empty_like(Q)
        self._at_both(r, out, rho * slope, far)
        return out, dP, -rho


@lru_cache(maxsize=64)
def _series_of_oscillator(rho: float) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of e^{2 rho r} Q(r) in r, and their derivatives in rho, (2, 2, 24) each."""
    J = np.array([[0.0, 1.0], [-1.0, 0.0]])
    last, q, dq = np.diag([0.0, 1.0]), 4 * rho * (1 + rho**2), 4 + 12 * rho**2
    G, dG = [np.zeros((2, 2))], [np.zeros((2, 2))]
    for n in range(23):  # mathematical: terms to 1e-17 at the switch
        source = q * (2 * rho) ** n / math.factorial(n)
        slope = dq * (2 * rho) ** n / math.factorial(n)
        if n:
            slope += q * 2 * (2 * rho) ** (n - 1) / math.factorial(n - 1)
        G.append((J @ G[-1] + G[-1] @ J.T + source * last) / (n + 1))
        dG.append((J @ dG[-1] + dG[-1] @ J.T + slope * last) / (n + 1))
    return np.stack(G, -1), np.stack(dG, -1)


def _sandwich(F: Tensor, P: Tensor) -> Tensor:
    """``F P F'``, (d, d, m)."""
    return matmul(matmul(F, P), F.transpose(0, 1))


OSCILLATOR = Oscillator()
