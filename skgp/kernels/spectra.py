r"""Spectral densities: a stationary kernel as the mean of cos(w'(x - z)) over random frequencies w.

By Bochner's theorem k(x, z) = E[cos(w'(x - z))] for a kernel of unit variance. An expression is
first expanded to a sum of terms, each a product of constants and such kernels; frequencies of a
product add. Every leaf (`skgp.kernels.leaves`) is sampled in two steps: ``draw`` takes all
randomness, free of the hyper-parameters, and ``frequencies`` shapes it by them, differentiably.

Directions of frequencies are rows distributed as N(0, I_d) each (exactly so for "iid" and
"orthogonal"), in float64 from a NumPy generator given by the caller. Rows that are orthogonal in
groups of d spread more evenly, which lowers the variance of random Fourier features.

References
----------
.. [1] F. X. Yu, A. T. Suresh, K. Choromanski, D. Holtmann-Rice and S. Kumar, "Orthogonal random
   features", NIPS 2016.
.. [2] Q. Le, T. Sarlos and A. Smola, "Fastfood: approximating kernel expansions in loglinear time",
   ICML 2013.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.gaussian_process.kernels import (
    ConstantKernel,
    Exponentiation,
    ExpSineSquared,
    Kernel,
    Product,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from skgp.linalg.runtime import constant

from .defaults import MIN_HADAMARD, PHASE_PIECE, TWICE
from .expression import Node, bind, check_kernel, summands
from .leaves import LEAVES
from .specs import SHO, ActiveDims, Cosine, check_one_column


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

    With dims=None the columns are unknown: they are neither checked nor recorded. A ValueError
    names a part without spectral density.
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
    if kind not in LEAVES or not LEAVES[kind].has_spectrum:
        raise ValueError(
            f"kernel part {kernel} has no spectral density that skgp knows; random Fourier "
            "features need RBF, Matern, RationalQuadratic, ExpSineSquared, Cosine, SHO, constants, "
            'and sums and products of these. Change the kernel or use the basis "inducing".'
        )
    if dims is not None:
        _check_columns(node, len(dims))
    return [Term(1.0, (Factor(node, dims or ()),))]


def _select(kernel: ActiveDims, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(kernel.select(np.array(dims)).tolist())


def _multiply(left: list[Term], right: list[Term]) -> list[Term]:
    return [Term(a.variance * b.variance, a.factors + b.factors) for a in left for b in right]


def _power(node: Node, dims: tuple[int, ...] | None) -> list[Term]:
    """Terms of a whole power of an expression: every product of as many of its terms."""
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
    if type(node.kernel) in (ExpSineSquared, Cosine, SHO):
        check_one_column(type(node.kernel).__name__, d)
    scale = node.params.get("length_scale")
    if scale is not None and scale.ndim and scale.shape[0] != d:
        raise ValueError(
            f"length_scale of {node.kernel} has {scale.shape[0]} elements and X has {d} columns; "
            "they must agree, or the length scale must be one number."
        )


def has_spectral_density(kernel: Kernel) -> bool:
    """Whether `FourierFeatures` can represent the kernel on some number of columns.

    True for sums, products and whole powers of RBF, Matern, RationalQuadratic, ExpSineSquared,
    Cosine, SHO and constants, ActiveDims of them included.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF, DotProduct
    >>> has_spectral_density(2.0 * RBF() + 1.0), has_spectral_density(RBF() * DotProduct())
    (True, False)
    """
    check_kernel(kernel)
    node = bind(kernel, None, dtype=torch.float64)
    try:
        expand(node, None)
    except ValueError:
        return False
    return True


def split_spectral(kernel: Kernel) -> tuple[Kernel | None, Kernel | None]:
    """Separate the summands that have a spectral density from those that have none.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF, DotProduct
    >>> split_spectral(RBF() + DotProduct())
    (RBF(length_scale=1), DotProduct(sigma_0=1))
    """
    parts: dict[bool, Kernel | None] = {True: None, False: None}
    for part in summands(kernel):
        spectral = has_spectral_density(part)
        parts[spectral] = part if parts[spectral] is None else parts[spectral] + part
    return parts[True], parts[False]


# Directions ---------------------------------------------------------------------------------------


def iid_rows(count: int, d: int, rng: np.random.Generator) -> Tensor:
    """Independent Gaussian rows, shape (count, d). Cost O(count d)."""
    return torch.from_numpy(rng.standard_normal((count, d)))


def orthogonal_rows(count: int, d: int, rng: np.random.Generator) -> Tensor:
    r"""Gaussian rows that are orthogonal in groups of d, shape (count, d).

    .. math:: W = S Q, \qquad Q \sim \mathrm{Haar}(O(d)),\; S_{ii} \sim \chi_d, [1]_ section 3.

    Independent radii S make every single row exactly N(0, I). Cost O(count d^2).
    """
    if d == 1:
        return iid_rows(count, d, rng)  # the only directions are -1 and 1
    groups = -(-count // d)
    G = torch.from_numpy(rng.standard_normal((groups, d, d)))
    Q, R = torch.linalg.qr(G)
    # LAPACK leaves the signs of R's diagonal arbitrary; Q is Haar once they are positive.
    Q *= R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    radii = torch.from_numpy(np.sqrt(rng.chisquare(d, (count, 1))))
    return Q.reshape(-1, d)[:count] * radii


def hadamard_rows(count: int, d: int, rng: np.random.Generator) -> Tensor:
    r"""Nearly Gaussian rows from Hadamard matrices and signs, shape (count, d).

    .. math:: W = S H D_1 H D_2 H D_3, \qquad S_{ii} \sim \chi_D,

    H the orthonormal Hadamard matrix and D_j random signs [1]_, section 5, with the radii of [2]_.
    The size D is d padded to a power of two; columns beyond d meet zero inputs and are dropped,
    which keeps the marginals but leaves orthogonality only where d = D. Cost O(count D^1.5) in
    matrix products (see `fwht`), against O(count d^2) in factorisations, ten times slower at
    d = 784, of `orthogonal_rows`. Up to d = 32 these are returned instead, being exact.
    """
    if d <= MIN_HADAMARD:
        return orthogonal_rows(count, d, rng)
    D = 1 << (d - 1).bit_length()
    groups = -(-count // D)
    signs = torch.from_numpy(rng.integers(0, 2, (3, groups, 1, D)) * 2.0 - 1.0)
    # Row by row the product is read from the left: e_i' H, times D_1, times H, and so on.
    rows = hadamard_matrix(D) * signs[0]  # (groups, D, D)
    rows = rows.reshape(-1, D)[:count]
    group = torch.arange(count) // D
    rows = fwht(rows) * signs[1, group, 0]
    rows = fwht(rows) * signs[2, group, 0]
    radii = torch.from_numpy(np.sqrt(rng.chisquare(D, (count, 1))))
    return rows[:, :d] * radii


def hadamard_matrix(size: int) -> Tensor:
    """Orthonormal, symmetric Hadamard matrix (Sylvester's), ``size`` a power of two."""
    H = torch.ones(1, 1, dtype=torch.float64)
    base = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    while H.shape[0] < size:
        H = torch.kron(H, base)
    return H


def fwht(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform along the last axis, x (..., D), D a power of two.

    H_D is the Kronecker product of two Hadamard matrices of about sqrt(D): two matrix products do
    the work of log2(D) passes over memory, at O(sqrt(D)) an element and BLAS speed.
    """
    D = x.shape[-1]
    if D & (D - 1):
        raise ValueError(f"the last axis of x must be a power of two, got {D}; pad it with zeros.")
    b = 1 << (D.bit_length() // 2)
    Ha, Hb = (hadamard_matrix(size).to(x) for size in (D // b, b))
    folded = x.unflatten(-1, (D // b, b))
    return (Ha @ (folded @ Hb)).flatten(-2)


GAUSSIAN_ROWS: dict[str, Callable[[int, int, np.random.Generator], Tensor]] = {
    "iid": iid_rows,
    "orthogonal": orthogonal_rows,
    "hadamard": hadamard_rows,
}


class Pairs(torch.autograd.Function):
    """Features (n, 2b) of X (n, d), W (b, d) and amplitude (b,); cf. `fill_pairs`.

    Cosine and sine are each other's derivative, so the result is all that must be kept.
    """

    @staticmethod
    def forward(ctx, X, W, amplitude):
        """Features (n, 2b)."""
        out = fill_pairs(X, W, amplitude, X.new_empty(X.shape[0], 2 * W.shape[0]))
        ctx.save_for_backward(X, W, amplitude, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        """Gradients of X, W and the amplitude, from that of the features."""
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
    amplitude = amplitude[:, None].expand(-1, 2).reshape(-1)
    if twice:
        # sin(u) = cos(u - pi/2): with every frequency doubled, the second a quarter turn behind,
        # one contiguous cosine makes both.
        turn = constant([0.0, -math.pi / 2], dtype=torch.float64, device=W.device)
        turn = turn.to(W.dtype).repeat(W.shape[0])
        W = torch.cat([W[:, None].expand(-1, 2, -1).reshape(-1, d), turn[:, None]], 1)
        X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    # A product with few rows would spend its time on reading W: take d of them at least.
    step = max(1, n) if X.is_cuda else max(1, 2 * PHASE_PIECE // out.shape[1], d)
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
