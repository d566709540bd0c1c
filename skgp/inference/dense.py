r"""The exact Gaussian process given its covariance matrices, whatever the inputs are.

With A the covariance of n observations, noise included, L its Cholesky factor and Y (n, t) the
observations of t targets that share it (Rasmussen and Williams, 2006, Algorithm 2.1):

.. math:: E[f_*] = K_*\, \alpha, \quad \alpha = A^{-1} Y, \qquad
          V[f_*] = K_{**} - V^T V, \quad V = L^{-1} K_*^T .

Arrays are NumPy's: the kernel may be one of strings or graphs. Larger ones pass through torch.
"""

import numpy as np
import torch
from scipy.linalg.blas import dtrsm

from skgp.inference.defaults import DENSE_ENTRIES, SOLVED_ENTRIES
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve


def condition(A: np.ndarray, Y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L (n, n), lower, and alpha, of the shape of Y: (n,) or (n, t). ``O(n^3)``.

    L is in C order, in which triangular systems take a tenth less time than in LAPACK's. A
    NotPositiveDefiniteError where A (n, n) has no factor.
    """
    if A.size <= DENSE_ENTRIES:
        few = jittered_cholesky(A, max_jitter=0.0).factor  # type: ignore[arg-type]
        return few, cho_solve(few, Y)  # type: ignore[arg-type,return-value]
    L = jittered_cholesky(_tensor(A), max_jitter=0.0).factor
    return np.ascontiguousarray(L.numpy()), cho_solve(L, _tensor(Y)).numpy()


def posterior_mean(K_new: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Posterior means given K_* (p, n), of the shape of alpha: (p,) or (p, t)."""
    if K_new.size <= SOLVED_ENTRIES:
        return K_new @ alpha
    return (_tensor(K_new) @ _tensor(alpha)).numpy()


def variance(L: np.ndarray, K_new: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Posterior variances (p,) given K_* (p, n) and the prior ones; ``O(n^2 p)``. May round < 0."""
    V = _whitened(L, K_new)
    return prior - np.einsum("ij,ij->j", V, V)


def variance_and_weights(
    L: np.ndarray, K_new: np.ndarray, prior: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`variance`, and :math:`A^{-1} K_*^T` (n, p): minus half its derivative in K_*."""
    V = _whitened(L, K_new)
    variance = prior - np.einsum("ij,ij->j", V, V)
    if K_new.size > SOLVED_ENTRIES:
        return variance, tri_solve(_tensor(L).T, _tensor(V), upper=True).numpy()
    if L.flags.f_contiguous:
        return variance, dtrsm(1.0, L, V, lower=1, trans_a=1)
    return variance, dtrsm(1.0, L.T, V)


def covariance(L: np.ndarray, K_new: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Posterior covariance (p, p) given K_* (p, n) and K_** (p, p)."""
    V = _whitened(L, K_new)
    return prior - V.T @ V


def _whitened(L: np.ndarray, K_new: np.ndarray) -> np.ndarray:
    """V (n, p)."""
    if K_new.size <= SOLVED_ENTRIES:
        if L.flags.f_contiguous:  # either way nothing is copied
            return dtrsm(1.0, L, K_new.T, lower=1)
        return dtrsm(1.0, L.T, K_new.T, trans_a=1)
    return tri_solve(_tensor(L), _tensor(K_new.T), upper=False).numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Without a copy, but of memory that is not to be written to."""
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
