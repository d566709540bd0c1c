r"""Spectral densities: a stationary kernel as the mean of cos(w'(x - z)) over random frequencies w.

By Bochner's theorem k(x, z) = E[cos(w'(x - z))] for a kernel of unit variance. An expression is
first expanded to a sum of terms, each a product of constants and such kernels; frequencies of a
product add. Every kernel is sampled in two steps: ``draw`` takes all randomness, free of the
hyper-parameters, and ``frequencies`` shapes it by them, differentiably.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Exponentiation,
    ExpSineSquared,
    Matern,
    Product,
    RationalQuadratic,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from .expression import Node
from .specs import ActiveDims, Cosine, check_one_column

__all__ = ["SPECTRA", "Factor", "Term", "expand"]

Rows = Callable[[int, int, np.random.Generator], Tensor]
Draws = tuple[Tensor, ...]


class Factor(NamedTuple):
    """A stationary leaf and the columns of X that it sees."""

    node: Node
    dims: tuple[int, ...]


class Term(NamedTuple):
    """A product of constants and stationary leaves; ``variance``, of shape (), is the former's."""

    variance: Tensor | float
    factors: tuple[Factor, ...]

    def is_exact(self) -> bool:
        """Whether one frequency represents the term without error: a bias, a single Cosine."""
        return not self.factors or (
            len(self.factors) == 1 and type(self.factors[0].node.kernel) is Cosine
        )


def expand(node: Node, dims: tuple[int, ...] | None) -> list[Term]:
    """Expand a bound expression on the columns ``dims`` to a sum of terms, in a fixed order.

    With dims=None the columns are unknown: they are neither checked nor recorded.

    Raises
    ------
    ValueError
        If a part has no spectral density, naming it.
    """
    kernel, kind = node.kernel, type(node.kernel)
    if kind is Sum:
        return expand(node.children[0], dims) + expand(node.children[1], dims)
    if kind is Product:
        return _multiply(expand(node.children[0], dims), expand(node.children[1], dims))
    if kind is ActiveDims:
        return expand(node.children[0], None if dims is None else _select(kernel, dims))
    if kind is Exponentiation:
        return _power(node, dims)
    if kind is ConstantKernel:
        return [Term(node.params["constant_value"], ())]
    if kind is WhiteKernel:
        raise ValueError(
            f"kernel contains {kernel}, which has no spectral density; separate it first with "
            "skgp.kernels.split_noise."
        )
    if kind not in SPECTRA:
        raise ValueError(
            f"kernel part {kernel} has no spectral density that skgp knows; random Fourier "
            "features need RBF, Matern, RationalQuadratic, ExpSineSquared, Cosine, constants, and "
            'sums and products of these. Change the kernel or use the basis "inducing".'
        )
    if dims is not None:
        _check_columns(node, len(dims))
    return [Term(1.0, (Factor(node, dims or ()),))]


def _select(kernel: ActiveDims, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(kernel.select(np.array(dims)).tolist())


def _multiply(left: list[Term], right: list[Term]) -> list[Term]:
    return [Term(a.variance * b.variance, a.factors + b.factors) for a in left for b in right]


def _power(node: Node, dims: tuple[int, ...] | None) -> list[Term]:
    exponent = float(node.kernel.exponent)
    if not exponent.is_integer() or exponent < 1:
        raise ValueError(
            f"kernel part {node.kernel} has exponent {exponent:g}; its spectral density is known "
            "for whole exponents >= 1 only. Change the exponent."
        )
    base = expand(node.children[0], dims)
    terms = base
    for _ in range(int(exponent) - 1):
        terms = _multiply(terms, base)
    return terms


def _check_columns(node: Node, d: int) -> None:
    if type(node.kernel) in (ExpSineSquared, Cosine):
        check_one_column(type(node.kernel).__name__, d)
    scale = node.params.get("length_scale")
    if scale is not None and scale.ndim and scale.shape[0] != d:
        raise ValueError(
            f"length_scale of {node.kernel} has {scale.shape[0]} elements and X has {d} columns; "
            "they must agree, or the length scale must be one number."
        )


# Leaves: draw(node, count, d, rows, rng) and frequencies(node, draws) -> (W (count, d), weight) ---
# ``weight`` (count,) multiplies the variance that a frequency carries; None means 1.


class Spectrum(NamedTuple):
    """How one kernel class is sampled."""

    draw: Callable[[Node, int, int, Rows, np.random.Generator], Draws]
    frequencies: Callable[[Node, Draws], tuple[Tensor, Tensor | None]]


def _draw_rbf(node: Node, count: int, d: int, rows: Rows, rng: np.random.Generator) -> Draws:
    return (rows(count, d, rng),)


def _scaled_rows(node: Node, draws: Draws) -> tuple[Tensor, None]:
    """w = g / l, the spectral density of RBF; a Matern's draws hold their mixing already."""
    return draws[0] / node.params["length_scale"], None


def _draw_matern(node: Node, count: int, d: int, rows: Rows, rng: np.random.Generator) -> Draws:
    """Multivariate t with 2 nu degrees of freedom: Gaussian / sqrt(chi^2_{2 nu} / (2 nu))."""
    gaussian = rows(count, d, rng)
    nu = node.kernel.nu
    if nu == math.inf:
        return (gaussian,)
    mixing = np.sqrt(2 * nu / rng.chisquare(2 * nu, (count, 1)))
    return (gaussian * torch.from_numpy(mixing),)


def _draw_rational_quadratic(
    node: Node, count: int, d: int, rows: Rows, rng: np.random.Generator
) -> Draws:
    """Gaussian rows and the probability levels of their Gamma mixing."""
    return rows(count, d, rng), torch.from_numpy(rng.random((count, 1)))


def _rational_quadratic_frequencies(node: Node, draws: Draws) -> tuple[Tensor, None]:
    r"""w = sqrt(tau) g / l with tau ~ Gamma(alpha, rate alpha).

    It follows from (1 + r^2 / (2 alpha l^2))^{-alpha} = E[exp(-tau r^2 / (2 l^2))].
    """
    gaussian, level = draws
    alpha = node.params["alpha"]
    mixing = _GammaQuantile.apply(alpha, level) / alpha
    return gaussian * mixing.sqrt() / node.params["length_scale"], None


def _draw_cosine(node: Node, count: int, d: int, rows: Rows, rng: np.random.Generator) -> Draws:
    """Signs: in a product, cos a cos b = (cos(a + b) + cos(a - b)) / 2."""
    return (torch.from_numpy(rng.integers(0, 2, (count, 1)) * 2.0 - 1.0),)


def _cosine_frequencies(node: Node, draws: Draws) -> tuple[Tensor, None]:
    return draws[0] * (2 * math.pi / node.params["period"]), None


def _draw_exp_sine_squared(
    node: Node, count: int, d: int, rows: Rows, rng: np.random.Generator
) -> Draws:
    r"""Signed harmonics and their probabilities under the kernel's own length scale.

    .. math:: e^{-2 \sin^2(\pi r / p) / l^2} = \sum_{k \ge 0} w_k \cos(2 \pi k r / p), \qquad
              w_k = (2 - \delta_{k0}) e^{-z} I_k(z),\; z = l^{-2}.

    Systematic sampling: harmonic k comes up count w_k times, give or take one.
    """
    z = float(node.params["length_scale"]) ** -2
    # I_k(z) falls like exp(-k^2 / (2 z)) for k < z and like (z / 2)^k / k! beyond.
    n_harmonics = 40 + math.ceil(9 * math.sqrt(z))
    if n_harmonics > 10_000_000:
        raise ValueError(
            f"{node.kernel} has a spectrum of more than 10 million harmonics; "
            "length_scale must be above 1e-6."
        )
    probability = special.ive(np.arange(n_harmonics), z)
    probability[1:] *= 2
    probability /= probability.sum()
    levels = (np.arange(count) + rng.random()) / count
    harmonic = np.searchsorted(probability.cumsum(), levels).clip(max=n_harmonics - 1)
    # Shuffled, for in a product the draws of the factors must be independent row by row.
    harmonic = rng.permutation(harmonic)
    sign = rng.integers(0, 2, count) * 2.0 - 1.0
    return (
        torch.from_numpy(harmonic * sign)[:, None],
        torch.from_numpy(probability[harmonic]),
    )


def _exp_sine_squared_frequencies(node: Node, draws: Draws) -> tuple[Tensor, Tensor]:
    """Harmonics do not move with the length scale: their weights do, relative to the draw's."""
    harmonic, probability = draws
    z = node.params["length_scale"] ** -2
    weight = _HarmonicWeight.apply(z, harmonic[:, 0].abs()) / probability
    return harmonic * (2 * math.pi / node.params["periodicity"]), weight


class _GammaQuantile(torch.autograd.Function):
    """Quantile of Gamma(alpha, 1) at given levels, differentiable in alpha."""

    @staticmethod
    def forward(ctx, alpha, level):
        ctx.save_for_backward(alpha, level)
        return _gamma_quantile(alpha, level, 0.0)

    @staticmethod
    def backward(ctx, grad):
        alpha, level = ctx.saved_tensors
        # No closed form; a central difference of an accurate quantile is good to 1e-8.
        step = 1e-4
        rise = _gamma_quantile(alpha, level, step) - _gamma_quantile(alpha, level, -step)
        return (grad * rise).sum() / (2 * step * alpha), None


def _gamma_quantile(alpha: Tensor, level: Tensor, relative_step: float) -> Tensor:
    shape = alpha.item() * (1 + relative_step)
    quantile = special.gammaincinv(shape, level.cpu().numpy())
    # A tiny alpha sends quantiles below the smallest double; 0 would spoil the square root's slope.
    return torch.from_numpy(np.maximum(quantile, 1e-300)).to(level.device)


class _HarmonicWeight(torch.autograd.Function):
    """(2 - [k = 0]) exp(-z) I_k(z), differentiable in z."""

    @staticmethod
    def forward(ctx, z, harmonic):
        ctx.save_for_backward(z, harmonic)
        return torch.from_numpy(_harmonic_weight(z, harmonic)[0]).to(harmonic.device)

    @staticmethod
    def backward(ctx, grad):
        z, harmonic = ctx.saved_tensors
        slope = torch.from_numpy(_harmonic_weight(z, harmonic)[1]).to(harmonic.device)
        return (grad * slope).sum(), None


def _harmonic_weight(z: Tensor, harmonic: Tensor) -> tuple[np.ndarray, np.ndarray]:
    k, argument = harmonic.cpu().numpy(), z.item()
    multiple = np.where(k == 0, 1.0, 2.0)
    value = special.ive(k, argument)
    # I_k' = (I_{k-1} + I_{k+1}) / 2, and I_{-1} = I_1.
    slope = (special.ive(np.abs(k - 1), argument) + special.ive(k + 1, argument)) / 2 - value
    return multiple * value, multiple * slope


SPECTRA = {
    RBF: Spectrum(_draw_rbf, _scaled_rows),
    Matern: Spectrum(_draw_matern, _scaled_rows),
    RationalQuadratic: Spectrum(_draw_rational_quadratic, _rational_quadratic_frequencies),
    Cosine: Spectrum(_draw_cosine, _cosine_frequencies),
    ExpSineSquared: Spectrum(_draw_exp_sine_squared, _exp_sine_squared_frequencies),
}
