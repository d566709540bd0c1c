"""Cosines and sines of the phases w'x: in pieces that stay in the cache, and with a gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Pairs", "fill_pairs", "within_reach"]

# Elements of a piece of the projection that stay in a core's cache through all its passes.
PIECE = 2**16
# Radians, beyond which rows are not told apart.
_LARGEST_PHASE = 1e8
# Up to this many columns a second matrix product costs less than writing in strides.
TWICE = 32


def within_reach(X: Tensor, W: Tensor) -> Tensor:
    """Rows of X (n, d), where phases under W (b, d) are too large moved nearer."""
    # The mean of the roots stands for heavy tails and for columns that few frequencies see.
    typical = W.detach().abs().sqrt().mean(0).square().to(X)
    phase = X.detach().abs() @ typical
    if not len(phase) or float(phase.max()) <= _LARGEST_PHASE:
        return X
    return X * (_LARGEST_PHASE / phase).clamp_max_(1.0)[:, None]


class Pairs(torch.autograd.Function):
    """Features (n, 2b) of X (n, d), W (b, d) and amplitude (b,); cf. `fill_pairs`.

    Cosine and sine are each other's derivative, so the result is all that must be kept.
    """

    @staticmethod
    def forward(ctx, X, W, amplitude):
        out = fill_pairs(X, W, amplitude, X.new_empty(X.shape[0], 2 * W.shape[0]))
        ctx.save_for_backward(X, W, amplitude, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        X, W, amplitude, out = ctx.saved_tensors
        cosine, sine = out[:, 0::2], out[:, 1::2]
        grad_cosine, grad_sine = grad[:, 0::2], grad[:, 1::2]
        grad_phase = grad_sine * cosine - grad_cosine * sine  # (n, b)
        grad_X = grad_phase @ W if ctx.needs_input_grad[0] else None
        grad_W = grad_phase.mT @ X if ctx.needs_input_grad[1] else None
        grad_amplitude = None
        if ctx.needs_input_grad[2]:
            # Features are linear in the amplitude; where it underflowed to 0 so did they.
            total = (grad * out).sum(0).unflatten(0, (-1, 2)).sum(1)
            grad_amplitude = torch.where(amplitude > 0, total / amplitude, 0)
        return grad_X, grad_W, grad_amplitude


def fill_pairs(X: Tensor, W: Tensor, amplitude: Tensor, out: Tensor) -> Tensor:
    """Write the features to ``out`` (n, 2b), piece by piece, each small enough for the cache."""
    n, d = X.shape
    twice = d <= TWICE
    amplitude = amplitude.repeat_interleave(2)
    if twice:
        # sin(u) = cos(u - pi/2): with every frequency doubled, the second a quarter turn behind,
        # one contiguous cosine makes both.
        turn = W.new_tensor([0.0, -math.pi / 2]).repeat(W.shape[0])
        W = torch.cat([W.repeat_interleave(2, 0), turn[:, None]], 1)
        X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    # A product with few rows would spend its time on reading W: take d of them at least.
    step = max(1, n) if X.is_cuda else max(1, 2 * PIECE // out.shape[1], d)
    for start in range(0, n, step):
        rows, piece = X[start : start + step], out[start : start + step]
        if twice:
            torch.mm(rows, W.T, out=piece).cos_()
        else:
            phase = rows @ W.T
            torch.cos(phase, out=piece[:, 0::2])
            torch.sin(phase, out=piece[:, 1::2])
        piece.mul_(amplitude)
    return out
