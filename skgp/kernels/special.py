"""Special functions: of spectra and Fourier series, incomplete gammas, correlations, a series."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from skgp.linalg.runtime import namespace


class _GammaQuantile(torch.autograd.Function):
    """Quantiles of Gamma(alpha, 1), alpha a number, at levels (m, 1); gradients flow to alpha."""

    @staticmethod
    def forward(ctx, alpha, level):
        ctx.save_for_backward(alpha, level)
        return _quantile(alpha, level, 0.0)

    @staticmethod
    def backward(ctx, grad):
        alpha, level = ctx.saved_tensors
        # No closed form; a central difference of an accurate quantile is good to 1e-8.
        step = 1e-4
        rise = _quantile(alpha, level, step) - _quantile(alpha, level, -step)
        return (grad * rise).sum() / (2 * step * alpha), None


def _quantile(alpha: Tensor, level: Tensor, relative_step: float) -> Tensor:
    shape = alpha.item() * (1 + relative_step)
    quantile = special.gammaincinv(shape, level.cpu().numpy())
    # A tiny alpha sends quantiles below the smallest double; 0 would spoil the square root's slope.
    return torch.from_numpy(np.maximum(quantile, 1e-300)).to(level.device)


class _HarmonicWeight(torch.autograd.Function):
    """Weights (2 - [k = 0]) exp(-z) I_k(z) of harmonics k (m,), z a number with gradients."""

    @staticmethod
    def forward(ctx, z, harmonic):
        ctx.save_for_backward(z, harmonic)
        return torch.from_numpy(_weight_and_slope(z, harmonic)[0]).to(harmonic.device)

    @staticmethod
    def backward(ctx, grad):
        z, harmonic = ctx.saved_tensors
        slope = torch.from_numpy(_weight_and_slope(z, harmonic)[1]).to(harmonic.device)
        return (grad * slope).sum(), None


def scaled_bessel(order: np.ndarray, z: float) -> np.ndarray:
    """exp(-z) I_k(z) of orders k; above z = 1e9, where SciPy has none, by DLMF 10.40.1."""
    if z < 1e9:
        return special.ive(order, z)
    return np.exp((1 - 4.0 * order**2) / (8 * z)) / math.sqrt(2 * math.pi * z)


def _weight_and_slope(z: Tensor, harmonic: Tensor) -> tuple[np.ndarray, np.ndarray]:
    k, argument = harmonic.cpu().numpy(), z.item()
    multiple = np.where(k == 0, 1.0, 2.0)
    value = scaled_bessel(k, argument)
    # I_k' = (I_{k-1} + I_{k+1}) / 2, and I_{-1} = I_1.
    slope = (scaled_bessel(np.abs(k - 1), argument) + scaled_bessel(k + 1, argument)) / 2 - value
    return multiple * value, multiple * slope


class _LogHarmonics(torch.autograd.Function):
    """Logarithms of (2 - [j = 0]) I_j(z), j = 0..last, up to a common term; differentiable once."""

    @staticmethod
    def forward(ctx, z, last):
        j, value = np.arange(last + 2), z.item()
        bessel = scaled_bessel(j, value)
        # I_j(z) = (z/2)^j / j! (1 + ...), where it is too small for a float.
        tiny = bessel < 1e-290
        leading = j * math.log(value / 2) - special.gammaln(j + 1.0)
        log_bessel = np.where(tiny, leading, np.log(np.where(tiny, 1.0, bessel)))
        # I_j' / I_j = I_{j+1} / I_j + j / z
        slope = np.exp(np.diff(log_bessel)) + j[:-1] / value
        ctx.save_for_backward(z.new_tensor(slope))
        return z.new_tensor(log_bessel[:-1] + math.log(2) * (j[:-1] > 0))

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return (grad * slope).sum(), None


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


# ---- correlations c(r) and r c'(r) of arrays or tensors r, in place: new memory takes longer


def matern12(r: Any) -> tuple[Any, Any]:
    """Of exp(-r)."""
    e = _decay(r)
    slope = r * e
    slope *= -1.0
    return e, slope


def matern32(r: Any) -> tuple[Any, Any]:
    """Of (1 + r) exp(-r)."""
    e = _decay(r)
    re = r * e
    e += re
    re *= r
    re *= -1.0
    return e, re


def matern52(r: Any) -> tuple[Any, Any]:
    """Of (1 + r + r^2 / 3) exp(-r)."""
    e, linear, slope = _decay(r), 1 + r, r * r
    slope /= 3
    value = linear + slope
    value *= e
    slope *= linear
    slope *= e
    slope *= -1.0
    return value, slope


def rotation(r: Any) -> tuple[Any, Any]:
    """Of cos(r)."""
    xp = namespace(r)
    slope = xp.sin(r)
    slope *= r
    slope *= -1.0
    return xp.cos(r), slope


def _decay(r: Any) -> Any:
    e = -r
    return namespace(r).exp(e, out=e)


@lru_cache(maxsize=64)
def oscillator_series(rho: float) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of e^{2 rho r} Q(r) in r, and their derivatives in rho, (2, 2, 24) each.

    Q is that of the damped oscillation of shape rho (:class:`.sde_processes.Oscillator`).
    """
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


gamma_quantile, harmonic_weight = _GammaQuantile.apply, _HarmonicWeight.apply
log_harmonics = _LogHarmonics.apply
