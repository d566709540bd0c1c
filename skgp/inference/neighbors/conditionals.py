r"""f given the values at inducing points: at the H nearest of each row, at all, and jointly.

With the active set I of a row x, :math:`k = K_{Z_I x}` and the kernel matrix :math:`K_I` of
:math:`Z_I`, its diagonal raised by the factor :math:`1 + \epsilon`,

.. math:: f(x) \mid u_I \sim N(a^T u_I,\; k_{xx} - k^T a), \qquad a = K_I^{-1} k
          \qquad \text{(eq. 13, without S).}

The jitter :math:`\epsilon` is part of the model: :math:`u_j` is :math:`f(z_j)` and a little noise
of its own. Its variance depends on :math:`z_j` alone and not on the company it is in, or else two
active sets would disagree about :math:`u_j`.

*Jointly.* With :math:`\tilde A` the sparse rows a over the union U of the active points, and
:math:`\operatorname{Cov}(u) = K_{UU} + \operatorname{diag}(\epsilon)` under the prior, the errors
:math:`f - \tilde A u` have the covariance

.. math:: J = K_{BB} - \tilde A K_{UB} - (\tilde A K_{UB})^T
              + \tilde A (K_{UU} + \operatorname{diag}(\epsilon)) \tilde A^T,

which is positive semi-definite by construction, has the variances of rows predicted one by one on
its diagonal, and is the same for two rows whatever rows come with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference.neighbors.defaults import CACHED_NUMBERS, JITTER, TILE, UNION_POINTS
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky, log_det


@dataclass(frozen=True)
class LocalConditionals:
    """f at n rows given the H inducing variables active for each."""

    active: Tensor  # (n, H) of int64; indices of inducing points
    weights: Tensor  # (n, H); a
    inverse_factor: Tensor  # (n, H, H); L^-1, lower triangular, of K_I = L L'
    variance: Tensor  # (n,); of f given u, not negative
    log_det: Tensor  # (n,); log |K_I|

    def __len__(self) -> int:
        return len(self.active)

    @property
    def precision(self) -> Tensor:
        r""":math:`K_I^{-1}`, shape (n, H, H); ``O(n H^3)``, which predictions do not need."""
        return self.inverse_factor.mT @ self.inverse_factor


def local_conditionals(kernel, X: Tensor, Z: Tensor, active: Tensor) -> LocalConditionals:
    """Condition rows X (n, d) on their points `active` (n, H) of Z (M, d), none twice.

    O(n H^2 (H + d)) time, about half of it for the kernel; O(n H^2) memory, several times over.
    """
    points = Z[active]  # (n, H, d)
    K = gram(kernel, points)
    K.diagonal(dim1=-2, dim2=-1).mul_(1 + JITTER)
    cross = gram(kernel, points, X[:, None])  # (n, H, 1)
    L = jittered_cholesky(K).factor
    # By the inverse factor rather than cholesky_inverse: faster up to H = 64, and the variance is
    # a difference of what cannot be negative by more than rounding.
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)
    half = inverse @ cross
    weights = (inverse.mT @ half)[..., 0]
    variance = gram_diag(kernel, X) - half[..., 0].square().sum(-1)
    return LocalConditionals(active, weights, inverse, variance.clamp_min(0.0), log_det(L))


def prior_variance(kernel, Z: Tensor) -> Tensor:
    """Variances (M,) of u under the prior, the jitter among them."""
    return gram_diag(kernel, Z) * (1 + JITTER)


class Tiles:
    """`LocalConditionals` of rows X (n, d) given active (n, H) of Z (M, d), tile by tile."""

    def __init__(self, kernel, X: Tensor, Z: Tensor, active: Tensor) -> None:
        self.kernel, self.X, self.Z, self.active = kernel, X, Z, active

    def __iter__(self) -> Iterator[tuple[slice, LocalConditionals]]:
        n, H = self.active.shape
        step = max(1, CACHED_NUMBERS // H**2)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield rows, local_conditionals(self.kernel, self.X[rows], self.Z, self.active[rows])


class SharedConditionals:
    """f given values at all of Z (M, d), of `noise` (M,) beside f: one factor for all rows."""

    def __init__(self, kernel, Z: Tensor, noise: Tensor) -> None:
        self.kernel, self.Z = kernel, Z
        K = gram(kernel, Z)
        K.diagonal().add_(noise)
        self.factor = jittered_cholesky(K).factor  # (M, M)

    def __call__(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (n, M) and the variance (n,) of f given the values; ``O(n M (M + d))``."""
        psi, variance = self.features(X)
        return torch.linalg.solve_triangular(self.factor.T, psi.T, upper=True).T, variance

    def features(self, X: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\psi = L^{-1} k`, (n, M), the weights of :math:`L^{-1} u`; and the variance."""
        parts = []
        for rows in X.split(max(1, TILE // len(self.Z))):
            cross = gram(self.kernel, rows, self.Z).mT  # (M, n)
            psi = torch.linalg.solve_triangular(self.factor, cross, upper=False).T
            left = gram_diag(self.kernel, rows) - psi.square().sum(1)
            parts.append((psi, left.clamp_min(0.0)))
        psi, variance = map(torch.cat, zip(*parts, strict=True))
        return psi, variance


def sparse_rows(position: Tensor, weights: Tensor, n_columns: int) -> Tensor:
    """Matrix (n, n_columns) with `weights` (n, H) in the columns `position` (n, H); sparse."""
    n, H = position.shape
    rows = torch.arange(n, device=position.device).repeat_interleave(H)
    index = torch.stack([rows, position.reshape(-1)])
    shape = (n, n_columns)
    return torch.sparse_coo_tensor(index, weights.reshape(-1), shape, check_invariants=False)


def quadratic_form(A: Tensor, diagonal: Tensor) -> Tensor:
    """A diag(v) A' (n, n), symmetric, of a sparse A (n, m) and v (m,)."""
    product = torch.sparse.mm(A, diagonal[:, None] * A.to_dense().T)
    return 0.5 * (product + product.T)


def joint_errors(kernel, X: Tensor, points: Tensor, A: Tensor, diagonal: Tensor) -> Tensor:
    """J (n, n) of rows X given `points` U (m, d), A~ sparse (n, m) and epsilon (m,); symmetric.

    O(m (m + n) (d + H) + n^2) time, O(n (m + n)) memory.
    """
    cross = torch.sparse.mm(A, gram(kernel, X, points).mT)
    inner = [torch.sparse.mm(A, gram(kernel, points, tile)) for tile in points.split(UNION_POINTS)]
    inner = torch.sparse.mm(A, torch.cat(inner, dim=1).T)
    J = gram(kernel, X) - cross - cross.T + inner + quadratic_form(A, diagonal)
    return 0.5 * (J + J.T)
