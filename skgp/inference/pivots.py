r"""Pivots of K, rows chosen by the prior variance that they leave, and the exact GP by these.

They are inducing points; and where noise variances D fall below eps times the prior's variance,
:math:`K + D` no longer tells observations apart that the kernel takes for one, and representer
weights of 1/D leave the mean no digits. The features :math:`\phi = L^{-1} k_Z(x)` of the r pivots Z
that leave no variance above rounding, :math:`K = \Phi \Phi^T`, have weights of posterior
:math:`N(a, R R^T)`, by least squares row by row (:mod:`skgp.linalg.cholesky`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.inference.defaults import NEARLY_EXACT, PIVOT_TOLERANCE
from skgp.inference.sparse import inducing_factor
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.linalg.cholesky import jittered_cholesky, pivoted_rows, ridge_by_rows, tri_solve
from skgp.linalg.runtime import TensorState


def greedy_variance(kernel, X: Tensor, n_points: int, *, tol: float | None = None) -> Tensor:
    """Rows of X (n, d) chosen one by one where those before leave the greatest prior variance [1]_.

    The pivots of a Cholesky decomposition of K(X, X), of which only the columns chosen are
    evaluated where these are the lesser part; fewer where the rest has no variance left, beyond
    `tol` (eps) times the largest. O(n n_points^2) time. A NotPositiveDefiniteError where a variance
    left is below 0 by more than rounding: the kernel is no covariance.

    .. [1] Burt, Rasmussen and van der Wilk (2020), Convergence of sparse variational inference in
       Gaussian processes regression, section 4.3.
    """
    eps, prior = torch.finfo(X.dtype).eps, gram_diag(kernel, X)
    least = float(prior.max()) * (eps if tol is None else tol)
    if 2 * n_points > len(X):
        chosen, left = pivoted_rows(gram(kernel, X, X), n_points, least)
    else:
        chosen, left = _greedy_rows(kernel, X, n_points, least)
    if float(left.min()) < -(eps**0.5) * float(prior.max()):
        jittered_cholesky(gram(kernel, X[[*chosen, int(left.argmin())]]))  # says what is wrong
    return torch.tensor(chosen, device=X.device, dtype=torch.int64)


def _greedy_rows(kernel, X: Tensor, n_points: int, least: float) -> tuple[list[int], Tensor]:
    """The pivots of K(X, X) above `least`, column by column, and what is left of each variance."""
    left = gram_diag(kernel, X)
    rows = X.new_empty(n_points, len(X))  # of the Cholesky factor, transposed
    chosen = list[int]()
    for i in range(n_points):
        pivot = int(left.argmax())
        if left[pivot] <= least:
            break
        column = gram(kernel, X[pivot : pivot + 1], X)[0] - rows[:i, pivot] @ rows[:i]
        rows[i] = column / left[pivot].sqrt()
        left = left - rows[i].square()
        left[pivot] = 0.0
        chosen.append(pivot)
    return chosen, left


class PivotPosterior(NamedTuple):
    r"""Posterior :math:`N(a, R R^T)` of the weights of :math:`\phi = L^{-1} k_Z(x)`."""

    Z: Tensor  # (r, d), pivots of K(X, X)
    factor: Tensor  # (r, r), L of K(Z, Z)
    mean: Tensor  # (r,), a; or (r, t)
    root: Tensor  # (r, r), R
    evidence: float  # log N(y; 0, K + D), in nats, summed over targets


def nearly_exact(kernel, X: Tensor, row_noise: Tensor) -> bool:
    """Whether an observation (n,) has so little noise that K + D has no digits left for it."""
    return float((gram_diag(kernel, X) / row_noise).max()) > NEARLY_EXACT


def pivot_posterior(kernel, X: Tensor, y: Tensor, row_noise: Tensor) -> PivotPosterior:
    r"""The exact GP of X (n, d), y (n,) or (n, t), where :math:`K + D` would lose its digits.

    Of inputs that the kernel cannot tell apart the weighted mean counts, whatever the ratio of
    noises. O(n r^2).
    """
    Z = X[greedy_variance(kernel, X, len(X), tol=PIVOT_TOLERANCE)]
    L = inducing_factor(kernel, Z, jitter=0.0)
    Phi = tri_solve(L, gram(kernel, X, Z).mT, upper=False).T  # (n, r)
    ridge = ridge_by_rows(Phi, y, row_noise)
    log_det = row_noise.log().sum() - 2 * ridge.root.diagonal().log().sum()
    n_targets = 1 if y.ndim == 1 else y.shape[1]
    volume = n_targets * (log_det + len(X) * math.log(2 * math.pi))
    evidence = -0.5 * float(ridge.misfit + volume)
    return PivotPosterior(Z, L, ridge.mean, ridge.root, evidence)


@dataclass
class PivotCovariance(TensorState):
    r"""Covariance of f whose weights of :math:`\phi = L^{-1} k_Z` have S = R R'; O(r^2 p).

    .. math:: k(x, x') + \phi(x)^T (R R^T - I) \phi(x'),

    without augmentation the part of S alone.
    """

    factor: Tensor  # (r, r), L
    root: Tensor  # (r, r), R
    augment: bool

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,)."""
        phi, spread = self._features(kernel, X, Z)
        variance = spread.square().sum(0)
        if self.augment:
            variance += (gram_diag(kernel, X) - phi.square().sum(0)).clamp_min(0.0)
        return variance

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""
        phi, spread = self._features(kernel, X, Z)
        prior = gram_tile(kernel, X, X) - phi.T @ phi if self.augment else 0.0
        return prior + spread.T @ spread

    def _features(self, kernel, X: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        phi = tri_solve(self.factor, gram(kernel, X, Z).mT, upper=False)  # (r, p)
        return phi, self.root.T @ phi
