r"""A root of the prior covariance of f at all points, and the conditionals that it is made of.

With the conditionals of :mod:`skgp.inference.vecchia.conditionals`, which jitter makes regular, f
is a function of independent standard normal numbers :math:`\omega = (u, e)`,

.. math:: f = R\, \omega, \qquad R = [\Phi, \; (I - B)^{-1} D^{1/2}] \quad (n, m + n), \qquad
          (I - B) R = [E, \; D^{1/2}],

so that latent models are generalised linear ones with R for features (:mod:`skgp.inference.newton`)
and no matrix of the n points is ever inverted but I - B, by substitution.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.vecchia.conditionals import Conditionals, residual_diagonal
from skgp.kernels.gram import gram_diag
from skgp.linalg.cholesky import cho_solve, jittered_cholesky
from skgp.linalg.triangular import UnitLower


class VecchiaRoot:
    """R, as a design of n rows and N = m + n features.

    Parameters
    ----------
    conditionals : Conditionals
        Of all points in order.
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
