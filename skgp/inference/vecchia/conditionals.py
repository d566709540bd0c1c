r"""A Gaussian process by global features and conditionals of the residual, and their derivatives.

Of m inducing points Z, with :math:`K_{mm} = L L^T` and :math:`\Phi = K_{nm} L^{-T}` (n, m), x has
the covariance

.. math:: \operatorname{Cov}(x) = \Phi \Phi^T + \tilde S, \qquad
          S = K - \Phi \Phi^T + \operatorname{diag}(v),

and :math:`\tilde S` is the approximation of S by Vecchia [1]_: a row given those before it depends
on its neighbours N alone (:mod:`skgp.inference.vecchia.neighbors`),

.. math:: B_i = S_{iN} S_{NN}^{-1}, \qquad D_i = S_{ii} - B_i S_{Ni}, \qquad
          \tilde S^{-1} = (I - B)^T D^{-1} (I - B).

With noise variances v, x are observations; with none, it is f (a jitter replaces them). m = 0 is
Vecchia's approximation, full-scale or "VIF" approximations are any m [2]_, and no neighbours FITC.

Everything is a function of the rows :math:`b_i = (-B_i, 1)` over (N, i), the contrasts
:math:`e_i = b_i y_{(N, i)}`, :math:`E_i = b_i \Phi_{(N, i)}` and of D_i. From their cotangents
follow those of :math:`A = S_{(N, i)(N, i)}` and of the features without the derivative of a
factorisation:

.. math:: dD_i = b_i^T dA\, b_i, \qquad db_N = -A_{NN}^{-1} [dA\, b_i]_N, \qquad
          \bar A = w b^T, \quad w = \bar D b - (A_{NN}^{-1} \bar b_N, 0).

References
----------
.. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes.
.. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
   Gaussian processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.defaults import CACHED_NUMBERS, RESIDUAL_ROUNDING, SHARED_JITTER
from skgp.kernels.gradients import weighted_gradient
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve
from skgp.linalg.runtime import tile_rows
from skgp.linalg.small_matrices import gather_rows
from skgp.linalg.sparse_triangular import UnitLower


@dataclass(frozen=True)
class Tile:
    """Conditionals of t rows given their neighbours."""

    rows: slice  # which of the rows these are
    group: Tensor  # (t, H + 1) of int64; neighbours and, last, the row itself
    b: Tensor  # (t, H + 1); (-B, 1), 0 in places left
    variance: Tensor  # (t,); D
    features: Tensor  # (t, m); E
    basis: Tensor  # (t, H + 1, m); Phi of the group
    factor: Tensor  # (t, H + 1, H + 1); of A, the identity in places left

    @property
    def places_left(self) -> Tensor:
        """Which places (t, H) hold no neighbour."""
        return self.group[:, :-1] == self.group[:, -1:]

    def contrast(self, values: Tensor) -> Tensor:
        """b_i applied to values (n, c) of the points: (t, c)."""
        return torch.einsum("th,thc->tc", self.b, gather_rows(values, self.group))


#: Of a tile, the cotangents of D (t,), of b (t, H + 1) and of E (t, m).
Cotangents = Callable[[Tile], tuple[Tensor, Tensor, Tensor]]


def inducing_factor(kernel, Z: Tensor, theta: Tensor | None = None) -> Tensor:
    """L (m, m) of K_mm = L L', its diagonal raised by a factor; differentiable in theta."""
    if not len(Z):
        return Z.new_zeros(0, 0)
    K = gram(kernel, Z, theta=theta)
    raised = (1 + SHARED_JITTER) * K.diagonal()
    return jittered_cholesky(K.diagonal_scatter(raised)).factor


def global_features(kernel, X: Tensor, Z: Tensor, L: Tensor, theta: Tensor | None = None) -> Tensor:
    """Phi (n, m) of rows X (n, d): K(X, Z) L^-T; differentiable."""
    if not len(Z):
        return X.new_zeros(len(X), 0)
    K = gram(kernel, X, Z, theta)  # with the origin of Z, whatever rows X holds
    return tri_solve(L, K.mT, upper=False).mT


def residual_covariance(K: Tensor, basis: Tensor, noise: Tensor) -> Tensor:
    """S (t, H, H) of kernel matrices K, features Phi (t, H, m) and noise variances (t, H).

    Beside features the noise is at least what rounding leaves of the prior variance.
    """
    variance = K.diagonal(dim1=1, dim2=2)
    if not basis.shape[2]:
        return K.diagonal_scatter(variance + noise, dim1=1, dim2=2)
    A = K - basis @ basis.mT
    A.diagonal(dim1=1, dim2=2).add_(_beside_features(variance, noise))
    return A


def residual_diagonal(variance: Tensor, features: Tensor, noise: Tensor) -> Tensor:
    """Diagonal (n,) of the same, of prior variances (n,) and features (n, m)."""
    if not features.shape[1]:
        return variance + noise
    return variance - features.square().sum(1) + _beside_features(variance, noise)


def _beside_features(variance: Tensor, noise: Tensor) -> Tensor:
    return noise.maximum(RESIDUAL_ROUNDING * torch.finfo(noise.dtype).eps * variance)


class Conditionals:
    """The conditionals of some rows at one theta, tile by tile.

    O(t H^2 (H + d + m) + n m^2) time. Memory of n m numbers beside that of a tile.
    """

    def __init__(
        self,
        kernel,  # without noise
        X: Tensor,  # (n, d), the points, float64
        # (t, H + 1), int64: neighbours of each row; last the row itself, which fills places left
        group: Tensor,
        noise: Tensor,  # (n,), v
        Z: Tensor | None = None,  # (m, d), inducing points
        theta: Tensor | None = None,  # (kernel.n_dims,), in logarithms; the kernel's by default
    ) -> None:
        self.kernel, self.X, self.group, self.noise = kernel, X, group, noise
        self.Z = X[:0] if Z is None else Z
        self.theta = X.new_tensor(kernel.theta) if theta is None else theta.detach()
        with torch.no_grad():
            self.factor = inducing_factor(kernel, self.Z, self.theta)  # L
            self.features = global_features(kernel, X, self.Z, self.factor, self.theta)  # Phi

    def __iter__(self) -> Iterator[Tile]:
        for rows in self._slices():
            yield self._tile(rows, self._covariance(self.group[rows], self.theta))

    def gradient(self, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
        """Pull cotangents back to theta (n_theta,) and to the noise variances (n,).

        Tiles are computed anew, in the same order as by iteration.
        """
        of_theta, of_noise = torch.zeros_like(self.theta), torch.zeros_like(self.noise)
        of_features, m = torch.zeros_like(self.features), len(self.Z)
        for rows in self._slices():
            theta = self.theta.clone().requires_grad_()
            with torch.enable_grad():
                K = self._covariance(self.group[rows], theta)
            tile = self._tile(rows, K.detach())
            of_variance, of_b, of_contrast = cotangents(tile)
            if m:  # E = b Phi
                of_b = of_b + (tile.basis @ of_contrast[..., None])[..., 0]
            w = of_variance[:, None] * tile.b
            w[:, :-1] -= _solved(tile.factor[:, :-1, :-1], of_b[:, :-1]).masked_fill_(
                tile.places_left, 0.0
            )
            W = w[:, :, None] * tile.b[:, None, :]
            if K.requires_grad:
                of_theta += torch.autograd.grad((W * K).sum(), theta)[0]
            index = tile.group.reshape(-1)
            of_noise.index_add_(0, index, (w * tile.b).reshape(-1))
            if m:
                each = self._of_features(tile, w, of_contrast)
                of_features.index_add_(0, index, each.reshape(len(index), -1))
        if m:
            of_theta += self._of_inducing(of_features)
        return of_theta, of_noise

    def _slices(self) -> Iterator[slice]:
        t, size = self.group.shape
        numbers = size * (size + len(self.Z))
        step = min(max(1, CACHED_NUMBERS // numbers), tile_rows(64 * numbers))
        return (slice(start, min(start + step, t)) for start in range(0, t, step))

    def _covariance(self, group: Tensor, theta: Tensor) -> Tensor:
        """K (t, H + 1, H + 1) of the points of each row, without noise; differentiable."""
        return gram(self.kernel, gather_rows(self.X, group), theta=theta)

    def _tile(self, rows: slice, K: Tensor) -> Tile:
        group = self.group[rows]
        basis = gather_rows(self.features, group)
        A = residual_covariance(K, basis, self.noise[group])
        left = group == group[:, -1:]  # places without a neighbour
        left[:, -1] = False
        if left.any():
            A.masked_fill_(left[:, :, None] | left[:, None, :], 0.0)
            A.diagonal(dim1=1, dim2=2).masked_fill_(left, 1.0)
        try:
            L = jittered_cholesky(A).factor
        except NotPositiveDefiniteError:
            jittered_cholesky(K)  # where the kernel is no covariance, its error says so
            raise
        last = L[:, -1, :-1, None]  # L_NN^-1 A_Ni
        B = tri_solve(L[:, :-1, :-1].mT, last, upper=True)[..., 0]
        b = (
            torch.cat([-B, torch.ones_like(B[:, :1])], 1)
            if B.shape[1]
            else torch.ones_like(L[:, 0])
        )
        return Tile(rows, group, b, L[:, -1, -1].square(), (b[:, None] @ basis)[:, 0], basis, L)

    def _of_features(self, tile: Tile, w: Tensor, of_contrast: Tensor) -> Tensor:
        """Cotangents (t, H + 1, m) of the features of the group: through E and through A."""
        through = of_contrast - (w[:, None] @ tile.basis)[:, 0]
        return through[:, None] * tile.b[..., None] - w[..., None] * tile.features[:, None]

    def _of_inducing(self, of_features: Tensor) -> Tensor:
        """Pull the cotangent (n, m) of Phi = K_nm L^-T back to theta."""
        L = self.factor
        of_cross = torch.linalg.solve_triangular(L, of_features, upper=False, left=False)  # (n, m)
        of_L = -(of_cross.mT @ self.features).tril()
        found = weighted_gradient(self.kernel, self.X, self.Z, of_cross, self.theta)
        theta = self.theta.clone().requires_grad_()
        with torch.enable_grad():
            total = (inducing_factor(self.kernel, self.Z, theta) * of_L).sum()
        if total.requires_grad:
            found = found + torch.autograd.grad(total, theta)[0]
        return found


def _solved(L: Tensor, v: Tensor) -> Tensor:
    """(L L')^-1 v of a batch of factors (t, H, H) and vectors (t, H)."""
    if not L.shape[1]:
        return v
    half = tri_solve(L, v[..., None], upper=False)
    return tri_solve(L.mT, half, upper=True)[..., 0]


class VecchiaRoot:
    r"""A root R of the prior covariance of f, as a design of n rows and N = m + n features.

    With the conditionals, which jitter makes regular, f is a function of independent standard
    normal numbers :math:`\omega = (u, e)`,

    .. math:: f = R\, \omega, \qquad R = [\Phi, \; (I - B)^{-1} D^{1/2}] \quad (n, m + n), \qquad
              (I - B) R = [E, \; D^{1/2}],

    so that latent models are generalised linear ones with R for features
    (:mod:`skgp.inference.newton`), and no matrix of the n points is ever inverted but I - B, by
    substitution. The conditionals are of all points in order.
    """

    is_weighted = False

    @torch.no_grad()
    def __init__(self, conditionals: Conditionals) -> None:
        # A tile's basis and factor, H times as large as what is kept, go with it.
        parts = [(tile.b, tile.variance, tile.features) for tile in conditionals]
        b, variance, self.contrasts = map(torch.cat, zip(*parts, strict=True))  # E, (n, m)
        self.std = variance.sqrt()  # D^1/2, (n,)
        self.features = conditionals.features  # Phi, (n, m)
        prior = gram_diag(conditionals.kernel, conditionals.X, conditionals.theta)
        self.residual = residual_diagonal(prior, self.features, conditionals.noise)  # S_ii, (n,)
        self._unit = UnitLower(conditionals.group[:, :-1], -b[:, :-1])
        self.n_rows, self.n_inducing = self.features.shape
        self.n_features = self.n_rows + self.n_inducing
        self.device = b.device

    def matmul(self, V: Tensor) -> Tensor:
        """R V, (n, k)."""
        m = self.n_inducing
        local = self._unit.solve(self.std[:, None] * V[m:])
        return local + self.features @ V[:m] if m else local

    def rmatmul(self, F: Tensor) -> Tensor:
        """R' F, (N, k)."""
        local = self.std[:, None] * self._unit.rsolve(F)
        return torch.cat([self.features.mT @ F, local]) if self.n_inducing else local

    def local_matmul(self, F: Tensor) -> Tensor:
        """(I - B)^-1 D (I - B)^-T F, (n, k): R R' F without what inducing points explain."""
        return self._unit.solve(self.std.square()[:, None] * self._unit.rsolve(F))

    @cached_property
    def matrix(self) -> Tensor:
        """R itself, (n, N), for few points."""
        return self.matmul(torch.eye(self.n_features, dtype=self.std.dtype, device=self.device))

    @cached_property
    def scaled(self) -> Tensor:
        """D^-1/2 E, (n, m)."""
        return self.contrasts / self.std[:, None]

    @cached_property
    def factor(self) -> Tensor:
        """Cholesky factor (m, m) of P = I + E' D^-1 E, the precision of u given f."""
        P = self.scaled.mT @ self.scaled
        P.diagonal().add_(1.0)
        return jittered_cholesky(P).factor

    def expected(self, V: Tensor) -> Tensor:
        """The numbers (N, k) that make the same f as V, with u at its mean given f."""
        m = self.n_inducing
        if not m:
            return V
        local = V[m:] + self.scaled @ V[:m]
        u = cho_solve(self.factor, self.scaled.mT @ local)
        return torch.cat([u, local - self.scaled @ u])
