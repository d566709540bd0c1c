r"""What the H inducing points nearest to an input say about it.

With the active set I of a row x, :math:`k = K_{Z_I x}` and the kernel matrix :math:`K_I` of
:math:`Z_I`, its diagonal raised by the factor :math:`1 + \epsilon`,

.. math:: f(x) \mid u_I \sim N(a^T u_I,\; k_{xx} - k^T a), \qquad a = K_I^{-1} k
          \qquad \text{(eq. 13, without S).}

The jitter :math:`\epsilon` is part of the model: :math:`u_j` is :math:`f(z_j)` and a little noise
of its own. Its variance depends on :math:`z_j` alone and not on the company it is in, or else two
active sets would disagree about :math:`u_j`. Its size bounds the condition number of a K_I of
equal variances by :math:`H / \epsilon`, some :math:`10^6`: float32 can factor that, and duplicated
inducing points do no harm.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky, log_det

__all__ = [
    "JITTER",
    "SHARED_JITTER",
    "LocalConditionals",
    "Tiles",
    "local_conditionals",
    "prior_variance",
    "tile_rows",
]

JITTER = 1e-4
#: Where one factor, in float64, serves all rows: with a point a row, u is f and this noise besides
#: that of the observations, and next to little noise 1e-8 is not nothing.
SHARED_JITTER = 1e-12
_BUDGET = 2e9  # bytes of conditionals that are kept; those of more rows are computed anew
_TILE_ENTRIES = 2**18  # 2 MB in float64: the kernel's temporaries stay in the cache


@dataclass(frozen=True)
class LocalConditionals:
    """f at n rows given the H inducing variables active for each.

    Attributes
    ----------
    active : Tensor of int64, shape (n, H)
        Indices of inducing points.
    weights : Tensor of shape (n, H)
        a, the mean of f being ``(weights * u[active]).sum(1)``.
    inverse_factor : Tensor of shape (n, H, H)
        :math:`L^{-1}`, lower triangular, of :math:`K_I = L L^T`.
    variance : Tensor of shape (n,)
        Of f given u; not negative.
    log_det : Tensor of shape (n,)
        :math:`\\log |K_I|`.
    """

    active: Tensor
    weights: Tensor
    inverse_factor: Tensor
    variance: Tensor
    log_det: Tensor

    def __len__(self) -> int:
        return len(self.active)

    @property
    def precision(self) -> Tensor:
        r""":math:`K_I^{-1}`, shape (n, H, H); ``O(n H^3)``, which predictions do not need."""
        return self.inverse_factor.mT @ self.inverse_factor


def local_conditionals(
    kernel,
    X: Tensor,
    Z: Tensor,
    active: Tensor,
    *,
    theta: Tensor | None = None,
    jitter: float = JITTER,
) -> LocalConditionals:
    """Condition every row on its active inducing points.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    Z : Tensor of shape (M, d)
    active : Tensor of int64, shape (n, H)
        No index twice in a row.
    theta : Tensor, optional
        Log hyper-parameters in place of the kernel's own.
    jitter : float
        Relative to the variance at each inducing point.

    Returns
    -------
    LocalConditionals
        Differentiable in `X`, `Z` and `theta`.

    Notes
    -----
    ``O(n H^2 (H + d))`` time, about half of it for the kernel. ``O(n H^2)`` memory, several times
    over: more rows than `tile_rows` are better taken in turns, see `Tiles`.
    """
    points = Z[active]  # (n, H, d)
    K = gram(kernel, points, theta=theta)
    if K.requires_grad:
        K = K.clone()  # the kernel's backward pass needs its own
    K.diagonal(dim1=-2, dim2=-1).mul_(1 + jitter)
    cross = gram(kernel, points, X[:, None], theta=theta)  # (n, H, 1)
    L = jittered_cholesky(K).factor
    # By the inverse factor rather than cholesky_inverse: faster up to H = 64, and the variance is
    # a difference of what cannot be negative by more than rounding.
    inverse = torch.linalg.solve_triangular(L, _eye_like(L), upper=False)
    half = inverse @ cross
    weights = (inverse.mT @ half)[..., 0]
    variance = gram_diag(kernel, X, theta) - half[..., 0].square().sum(-1)
    return LocalConditionals(active, weights, inverse, variance.clamp_min(0.0), log_det(L))


def prior_variance(kernel, Z: Tensor, *, jitter: float = JITTER) -> Tensor:
    """Variances (M,) of u under the prior, the jitter among them."""
    return gram_diag(kernel, Z) * (1 + jitter)


def tile_rows(n_neighbors: int) -> int:
    """Number of rows to condition at once.

    At H = 64, 2048 rows at once take twice the time a row of 64 at once, for want of cache.
    """
    return max(1, _TILE_ENTRIES // n_neighbors**2)


class Tiles:
    """Conditionals of all rows, a tile at a time; kept after the first pass where memory allows.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    Z : Tensor of shape (M, d)
    active : Tensor of int64, shape (n, H)
    rows : int, optional
        Rows of a tile; `tile_rows` by default.
    budget : float
        Bytes; beyond, tiles are computed anew in every pass. 0 keeps nothing.
    """

    def __init__(
        self,
        kernel,
        X: Tensor,
        Z: Tensor,
        active: Tensor,
        *,
        rows: int | None = None,
        budget: float = _BUDGET,
    ) -> None:
        self.kernel, self.X, self.Z, self.active = kernel, X, Z, active
        n, H = active.shape
        step = tile_rows(H) if rows is None else rows
        self.slices = [slice(start, min(start + step, n)) for start in range(0, n, step)]
        self._keeps = n * H * (H + 2) * X.element_size() <= budget
        self._kept: dict[int, LocalConditionals] = {}

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[tuple[slice, LocalConditionals]]:
        for i, rows in enumerate(self.slices):
            local = self._kept.get(i)
            if local is None:
                local = local_conditionals(self.kernel, self.X[rows], self.Z, self.active[rows])
                if self._keeps:
                    self._kept[i] = local
            yield rows, local


def _eye_like(L: Tensor) -> Tensor:
    return torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
