r"""Laplace's approximation under a Vecchia prior: solves, log-determinants and draws.

In the coordinates of :mod:`skgp.inference.vecchia.conditionals` the posterior precision of column j
is

.. math:: H_j = I + R^T W_j R, \qquad |H_j| = |I + \Sigma W_j|,

:math:`W_j` the curvatures of its log-likelihood. Conjugate gradients solve with it, two sparse
substitutions an iteration, preconditioned by the approximation that :math:`(I - B)^{-1} \approx I`
where W stands, in the coordinates of f the "VADU" preconditioner
:math:`(I - B)^T (D^{-1} + W) (I - B)` of [1]_, and with inducing points that of [2]_:

.. math:: P_j = I + \tilde R^T W_j \tilde R, \quad \tilde R = (I - B) R = [E, D^{1/2}], \qquad
          |P_j| = |M_j| \prod_i (1 + D_i W_i), \quad
          M_j = I + E^T \frac{W_j}{1 + D W_j} E .

From probes :math:`z = \epsilon + \tilde R^T W^{1/2} \epsilon' \sim N(0, P)` come an unbiased
:math:`\log |P^{-1} H|` (:mod:`skgp.linalg.cg`) and pairs :math:`x = H^{-1} z`,
:math:`y = P^{-1} z` of which :math:`E[x y^T] = H^{-1}`.

Beside inducing points a system of the n points takes a third to a tenth of the iterations:

.. math:: H_j^{-1} = I - R^T W_j^{1/2} B_j^{-1} W_j^{1/2} R, \quad
          B_j = I + W_j^{1/2} R R^T W_j^{1/2}, \quad |H_j| = |B_j|,

preconditioned by the FITC approximation of [2]_, :math:`P_j = I + W_j^{1/2} (\Phi \Phi^T +
\operatorname{diag} S) W_j^{1/2}`; the difference :math:`B_j - P_j`, of covariances between
neighbours, takes no product with :math:`\Phi`. Up to some hundred points a dense Cholesky factor
takes their place, and everything is exact.

A likelihood that is not log-concave has negative curvatures where an observation is far from f. W
is 0 there, so that H is positive definite: the posterior's covariance is that of the other
observations. At a mode the Hessian of the joint density is positive definite with the curvatures as
they are; Newton's steps and the motion of the mode are solved with these (`signed`). Where that
fails, far from a mode, steps take their absolute values, whose eigenvectors of negative curvature
lead down too.

References
----------
.. [1] Kuendig and Sigrist (2024), Iterative methods for Vecchia-Laplace approximations for latent
   Gaussian process models.
.. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
   Gaussian processes.
"""

from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skgp.inference.defaults import DRAW_NUMBERS, DRAW_TOL, LATENT_CG, LATENT_DENSE, PROBE_TOL
from skgp.inference.newton_steps import Direction
from skgp.inference.vecchia.conditionals import VecchiaRoot
from skgp.inference.weights.design import add_gram
from skgp.linalg.cg import CGResult, block_cg, log_quadrature
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det, tri_solve


class Pairs(NamedTuple):
    r"""Vectors of which the sums :math:`\sum_s x_s y_s^T` are the inverse Hessians of c columns.

    There are k for each column, one column after the other. `prior` are the :math:`\epsilon` of the
    probes, N(0, I), for a control variate; None where the sums are exact.
    """

    log_det: Tensor  # (c,), log |H|
    x: Tensor  # (N, c k)
    y: Tensor  # (N, c k)
    prior: Tensor | None  # (N, c k)
    scale: float  # by which x_s y_s' is multiplied: 1 / k of probes


class DenseHessian:
    """The Hessians of c columns of curvatures W (n, c), not negative, by Cholesky factors.

    O(c (m + n)^3).
    """

    def __init__(self, root: VecchiaRoot, curvature: Tensor) -> None:
        self.root = root
        self._factors = [jittered_cholesky(each).factor for each in self._hessians(curvature)]

    def _hessians(self, curvature: Tensor) -> Tensor:
        """(c, N, N)."""
        R = self.root.matrix
        H = R.mT @ (curvature.mT[:, :, None] * R)
        H.diagonal(dim1=1, dim2=2).add_(1.0)
        return H

    def solve(
        self, B: Tensor, tol: float | Tensor = 0.0, signed: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """H^-1 B (N, c k), k columns for each H, and iterations: 0, for factors are exact.

        `signed` (n, c) are curvatures in place of W, which may be negative; where H is not
        positive definite with them, W stays.
        """
        factors = list(self._factors)
        if signed is not None:
            found, failed = torch.linalg.cholesky_ex(self._hessians(signed))
            factors = [
                L if bad else other
                for L, other, bad in zip(factors, found, failed.tolist(), strict=True)
            ]
        parts = B.chunk(len(factors), 1)
        return torch.cat([cho_solve(L, p) for L, p in zip(factors, parts, strict=True)], 1), 0

    def log_det(self, probes: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """log |H|, (c,)."""
        return _log_dets(self._factors)

    def pairs(self, probes: tuple[Tensor, Tensor]) -> Pairs:
        """The exact ones."""
        identity = torch.eye(len(self._factors[0])).to(self._factors[0])
        y = identity.repeat(1, len(self._factors))
        return Pairs(self.log_det(), self.solve(y)[0], y, None, 1.0)

    def spread(self, probes: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Roots (N, c, N) of the inverses."""
        identity = torch.eye(len(self._factors[0])).to(self._factors[0])
        return torch.stack([tri_solve(L.mT, identity, upper=True) for L in self._factors], 1)


class SparseHessian:
    """The Hessians of c columns by conjugate gradients; parameters as of `DenseHessian`."""

    def __init__(self, root: VecchiaRoot, curvature: Tensor) -> None:
        self.root, self.curvature = root, curvature
        weighted = root.std[:, None] * curvature.sqrt()  # (D W)^1/2, (n, c)
        self._weighted, self._share = weighted, 1 / (1 + weighted.square())

    @cached_property
    def _factors(self) -> list[Tensor]:
        return _inner_factors(self.root.contrasts, self.curvature * self._share)

    def solve(
        self, B: Tensor, tol: float | Tensor, signed: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """H^-1 B, (N, c k), to a relative residual, and iterations; as of the dense one."""
        options: dict = {"preconditioner": self._precondition, "tol": tol, "max_iter": LATENT_CG}
        n_iter = 0
        if signed is not None:
            found = block_cg(partial(self._matmul, curvature=signed), B, warn=False, **options)
            exact = found.residual <= 2 * torch.as_tensor(tol)
            if bool((exact & ((B * found.solution).sum(0) >= 0)).all()):
                return found.solution, found.n_iter
            n_iter = found.n_iter
        found = block_cg(self._matmul, B, **options)
        return found.solution, n_iter + found.n_iter

    def log_det(self, probes: tuple[Tensor, Tensor]) -> Tensor:
        """An estimate of log |H|, (c,)."""
        return self.pairs(probes).log_det

    def pairs(self, probes: tuple[Tensor, Tensor]) -> Pairs:
        """Estimates from random numbers of :func:`probes`."""
        prior, other = self._repeated(probes)
        z = prior + self._image_of_noise(other)
        y = self._precondition(z)
        found = block_cg(
            self._matmul, z, preconditioner=self._precondition, tol=PROBE_TOL, max_iter=LATENT_CG
        )
        c = self.curvature.shape[1]
        dets = _log_dets(self._factors) - self._share.log().sum(0) + _quadratures(found, z, y, c)
        return Pairs(dets, found.solution, y, prior, c / z.shape[1])

    def spread(self, probes: tuple[Tensor, Tensor]) -> Tensor:
        """Posterior draws (N, c, k) about the mean, divided by the root of k."""
        step = max(1, DRAW_NUMBERS // (len(probes[0]) * self.curvature.shape[1]))
        parts = zip(*(each.split(step, 1) for each in probes), strict=True)
        return torch.cat([self._draws(part) for part in parts], 2) / probes[0].shape[1] ** 0.5

    def _draws(self, probes: tuple[Tensor, ...]) -> Tensor:
        """Posterior draws (N, c, k) about the mean."""
        prior, other = self._repeated(probes)
        noise = self._by_columns(self.curvature.sqrt(), other)
        draws = self.solve(prior + self.root.rmatmul(noise), DRAW_TOL)[0]
        return draws.reshape(len(draws), -1, probes[0].shape[1])

    def _repeated(self, probes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The same numbers for each column."""
        c = self.curvature.shape[1]
        return probes[0].repeat(1, c), probes[1].repeat(1, c)

    def _by_columns(self, factor: Tensor, V: Tensor) -> Tensor:
        """factor (n, c) times V (n, c k), each column its k."""
        c = factor.shape[1]
        return (factor[:, :, None] * V.reshape(len(V), c, -1)).reshape(len(V), -1)

    def _by_factors(self, factors: list[Tensor], V: Tensor) -> Tensor:
        """Each factor's solution for its columns of V (m, c k)."""
        parts = zip(factors, V.chunk(len(factors), 1), strict=True)
        return torch.cat([cho_solve(L, part) for L, part in parts], 1)

    def _matmul(self, V: Tensor, curvature: Tensor | None = None) -> Tensor:
        W = self.curvature if curvature is None else curvature
        return V + self.root.rmatmul(self._by_columns(W, self.root.matmul(V)))

    def _image_of_noise(self, other: Tensor) -> Tensor:
        """R~' W^1/2 other, (N, c k)."""
        local = self._by_columns(self._weighted, other)
        of_u = self.root.contrasts.mT @ self._by_columns(self.curvature.sqrt(), other)
        return torch.cat([of_u, local])

    def _precondition(self, V: Tensor) -> Tensor:
        """P^-1 V, by eliminating the local coordinates."""
        m, E = self.root.n_inducing, self.root.contrasts
        if not m:
            return self._by_columns(self._share, V)
        # D^1/2 W / (1 + D W) couples both
        coupling = self.root.std[:, None] * self.curvature * self._share
        right = V[:m] - E.mT @ self._by_columns(coupling, V[m:])
        u = self._by_factors(self._factors, right)
        local = self._by_columns(self._share, V[m:]) - self._by_columns(coupling, E @ u)
        return torch.cat([u, local])


class InducingHessian(SparseHessian):
    """The same beside inducing points, by the matrix B of the n points.

    Newton's steps and draws take B alone; curvatures of either sign, and the pairs of probes, still
    take the preconditioner in the coordinates of the prior.
    """

    def __init__(self, root: VecchiaRoot, curvature: Tensor) -> None:
        super().__init__(root, curvature)
        self._noise = curvature.sqrt()  # W^1/2, by which draws of p(y | f) move the mode
        self._diagonal = 1 / (1 + curvature * root.residual[:, None])  # (n, c)

    @cached_property
    def _fitc_factors(self) -> list[Tensor]:
        return _inner_factors(self.root.features, self.curvature * self._diagonal)

    def solve(
        self, B: Tensor, tol: float | Tensor, signed: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """As the others; the residual is that of H, with FITC's covariance for R R'."""
        if signed is not None:
            return super().solve(B, tol, signed)
        right = self._scaled(self.root.matmul(B))
        size = torch.linalg.vector_norm(B, dim=0, keepdim=True) / self._size(right)
        found = self._solved(right, tol * size.nan_to_num(0.0, 0.0), norm=self._size)
        return B - self.root.rmatmul(self._scaled(found.solution)), found.n_iter

    def log_det(self, probes: tuple[Tensor, Tensor]) -> Tensor:
        """An estimate of log |B|, (c,)."""
        prior, other = self._repeated(probes)
        m = self.root.n_inducing
        of_fitc = self.root.features @ prior[:m] + self.root.residual.sqrt()[:, None] * prior[m:]
        z = other + self._scaled(of_fitc)
        found, y = self._solved(z, PROBE_TOL), self._by_fitc(z)
        dets = _log_dets(self._fitc_factors) - self._diagonal.log().sum(0)
        return dets + _quadratures(found, z, y, self.curvature.shape[1])

    def pairs(self, probes: tuple[Tensor, Tensor]) -> Pairs:
        """Estimates from random numbers of :func:`probes`."""
        prior, other = self._repeated(probes)
        z = prior + self._image_of_noise(other)
        x, scale = self.solve(z, PROBE_TOL)[0], self.curvature.shape[1] / z.shape[1]
        return Pairs(self.log_det(probes), x, self._precondition(z), prior, scale)

    def _draws(self, probes: tuple[Tensor, ...]) -> Tensor:
        """By Matheron's rule: w - R' W^1/2 B^-1 (W^1/2 R w - e), of w and e standard normal."""
        prior, other = self._repeated(probes)
        found = self._solved(self._scaled(self.root.matmul(prior)) - other, DRAW_TOL)
        draws = prior - self.root.rmatmul(self._scaled(found.solution))
        return draws.reshape(len(draws), -1, probes[0].shape[1])

    def _solved(self, right: Tensor, tol: float | Tensor, **options: Any) -> CGResult:
        """B^-1 right, (n, c k); anew with B itself where P is too far from regular."""
        options |= {"preconditioner": self._by_fitc, "tol": tol, "max_iter": LATENT_CG}
        found = block_cg(self._inner, right, splitting=self._beyond_fitc, warn=False, **options)
        return found if found.converged else block_cg(self._inner, right, **options)

    def _inner(self, V: Tensor) -> Tensor:
        """B V."""
        return V + self._scaled(self.root.matmul(self.root.rmatmul(self._scaled(V))))

    def _beyond_fitc(self, V: Tensor) -> Tensor:
        """(B - P) V, of the covariances that inducing points leave between neighbours."""
        f, root = self._scaled(V), self.root
        return self._scaled(root.local_matmul(f) - root.residual[:, None] * f)

    def _scaled(self, V: Tensor) -> Tensor:
        return self._by_columns(self._noise, V)

    def _by_fitc(self, V: Tensor) -> Tensor:
        """P^-1 V of FITC's approximation of B."""
        Phi, V = self.root.features, self._by_columns(self._diagonal, V)
        u = self._by_factors(self._fitc_factors, Phi.mT @ self._scaled(V))
        return V - self._by_columns(self._diagonal * self._noise, Phi @ u)

    def _size(self, V: Tensor) -> Tensor:
        """|R' W^1/2 V|, (1, c k), with FITC's covariance for R R'."""
        f, root = self._scaled(V), self.root
        local = (root.residual[:, None] * f.square()).sum(0, keepdim=True)
        return ((root.features.mT @ f).square().sum(0, keepdim=True) + local).sqrt()


def _inner_factors(E: Tensor, inner: Tensor) -> list[Tensor]:
    """Cholesky factors (m, m) of I + E' diag(w) E, of the columns w of `inner` (n, c)."""
    factors = []
    for root in inner.sqrt().mT:
        M = torch.eye(E.shape[1]).to(E)
        add_gram(M, root[:, None] * E)
        factors.append(jittered_cholesky(M).factor)  # which reads the lower triangle
    return factors


def _log_dets(factors: list[Tensor]) -> Tensor:
    return torch.stack([log_det(L) for L in factors])


def _quadratures(found: CGResult, z: Tensor, y: Tensor, c: int) -> Tensor:
    """Means (c,) over the probes z of log |P^-1 A|, of conjugate gradients and y = P^-1 z."""
    return ((z * y).sum(0) * log_quadrature(found.coefficients)).reshape(c, -1).mean(1)


def hessian(
    root: VecchiaRoot, curvature: Tensor, *, dense: bool | None = None
) -> DenseHessian | SparseHessian:
    """Of columns of curvatures W (n, c): dense, by default for few points."""
    if root.n_rows <= LATENT_DENSE if dense is None else dense:
        return DenseHessian(root, curvature)
    return (InducingHessian if root.n_inducing else SparseHessian)(root, curvature)


def probes(root: VecchiaRoot, n_probes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standard normal numbers (N, k) and (n, k), on the root's device."""
    sizes = (root.n_features, n_probes), (root.n_rows, n_probes)
    drawn = (
        torch.randn(size, generator=generator, device=generator.device, dtype=torch.float64)
        for size in sizes
    )
    first, second = (numbers.to(root.device) for numbers in drawn)
    return first, second


def directions(
    root: VecchiaRoot, precision: Tensor, curvature: Tensor, B: Tensor, forcing: Tensor
) -> Direction:
    """Newton directions of k columns: :func:`skgp.inference.newton.fit_newton`'s solver."""
    signed = curvature if bool((curvature < 0).any()) else None
    weights, n_iter = hessian(root, curvature.abs()).solve(B, forcing[None], signed)
    return Direction(weights, root.matmul(weights), n_iter, n_iter)
