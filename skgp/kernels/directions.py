r"""Matrices whose rows are standard Gaussian vectors: independent, orthogonal or structured.

Each function returns ``count`` rows in float64, every row distributed as N(0, I_d) by itself
(exactly so for "iid" and "orthogonal"), from a NumPy generator given by the caller. Rows that are
orthogonal in groups of d spread more evenly, which lowers the variance of random Fourier features.

References
----------
.. [1] F. X. Yu, A. T. Suresh, K. Choromanski, D. Holtmann-Rice and S. Kumar, "Orthogonal random
   features", NIPS 2016.
.. [2] Q. Le, T. Sarlos and A. Smola, "Fastfood: approximating kernel expansions in loglinear time",
   ICML 2013.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["GAUSSIAN_ROWS", "fwht", "hadamard_rows", "iid_rows", "orthogonal_rows"]

# Fewer signs than this give too few directions to pass for Gaussian ones, and save nothing.
MIN_HADAMARD = 32


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
