"""Incomplete gamma functions of whole order, to full relative accuracy."""

import math

import torch
from torch import Tensor


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
