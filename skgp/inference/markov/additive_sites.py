r"""An additive model under one Gaussian site a distinct row, in the space of the rows.

With K the covariance of the sum :math:`\eta` of the components at the m distinct rows and sites
:math:`\exp(\beta^\top \eta - \tfrac12 \eta^\top W \eta)`, W diagonal,

.. math:: V = (K^{-1} + W)^{-1}, \qquad \mu = V \beta = K \alpha, \qquad \alpha = \beta - W \mu,
          \qquad \log Z = \tfrac12 \beta^\top \mu - \tfrac12 \log |I + K W|,

.. math:: \frac{\partial \log Z}{\partial K} = \tfrac12 (\alpha \alpha^\top - R), \qquad
          R = W - W V W, \qquad
          \operatorname{cov}(f(x), g(x')) = k_{fg}(x, x') - k_f(x, \cdot) R\, k_g(\cdot, x')

for any functions f and g that are jointly Gaussian with the rows, the components among them. Where
no weight is negative,

.. math:: B = I + W^{1/2} K W^{1/2} = L L^\top, \qquad R = T^\top T, \qquad T = L^{-1} W^{1/2}

(Rasmussen and Williams, Algorithms 2.1 and 3.2): nothing is divided by a small weight, and the
eigenvalues of B are 1 or more. Outliers leave negative weights, and then, with
:math:`K = L_K L_K^\top`,

.. math:: B = I + L_K^\top W L_K = L L^\top, \qquad V = S^\top S, \qquad S = L^{-1} L_K^\top.

Where weights are sharper than K has digits, noise of 1e-10 and a weight of 1e8, B loses those rows
that are not, and those differences between the components of which no row tells. An additive K is
singular besides, as soon as there are more rows than values in all columns. So, with its
eigenvalues :math:`\Lambda` above rounding and :math:`G = Q \Lambda^{1/2}`,

.. math:: \eta = G u, \qquad u \sim N(0, I), \qquad \begin{pmatrix} W^{1/2} G \\ I \end{pmatrix}
          = Q_1 U, \qquad V = G (U^\top U)^{-1} G^\top, \qquad
          R = P (I - (U^\top U)^{-1}) P^\top, \quad P = Q \Lambda^{-1/2},

of which the factor U loses nothing of a small row to a large one: rows are sorted by their norms
(Cox and Higham, 1998, Stability of Householder QR factorization for weighted least squares).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import SHARP_SITE
from skgp.kernels.sde_lags import Covariances
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det


class RowsPrior:
    """Covariance K (m, m) of the sum at the distinct rows x (c, m), for fixed dynamics."""

    def __init__(self, dynamics: Sequence[Any], x: Tensor) -> None:
        self.covariances, self.x = Covariances(dynamics), x
        self.K = self.covariances.symmetric(x)

    @cached_property
    def factor(self) -> Tensor:
        """Lower Cholesky factor of K."""
        return jittered_cholesky(self.K).factor

    def levels(self, shares: Tensor) -> Tensor:
        r"""Covariances :math:`\sum_i p_i k_j(x_i, \cdot)` of the components' means, (c, m)."""
        return self.covariances.levels(self.x, shares)


class RowsPosterior:
    """What both forms of the posterior share; made by `condition_rows`.

    O(m^3) and two or three matrices of m x m; what is asked for later takes as much again.
    """

    alpha: Tensor  # (m,)
    var: Tensor  # (m,) of the sum at the rows
    reduction: Tensor  # R, (m, m)
    _chol: Tensor

    def __init__(self, prior: RowsPrior, beta: Tensor, weight: Tensor) -> None:
        self.prior, self.beta, self.weight = prior, beta, weight
        self._solve()
        self.mean = self._mean()
        self._log_det = float(log_det(self._chol))
        self.log_normalizer = 0.5 * (float(beta @ self.mean) - self._log_det)

    @property
    def divergence(self) -> tuple[float, ...]:
        """Terms that add up to that of the posterior from the prior, in nats."""
        squares = float(self.weight @ (self.mean**2 + self.var))
        return 0.5 * float(self.beta @ self.mean), 0.5 * self._log_det, -0.5 * squares

    def gradients(self) -> list[Tensor]:
        """Derivatives of the log normaliser in the parameters of each component, (q_j,)."""
        K_bar = torch.addr(self.reduction, self.alpha, self.alpha, beta=-0.5, alpha=0.5)
        return self.prior.covariances.gradient(self.prior.x, K_bar)

    @property
    def spread(self) -> float:
        """The trace of V W."""
        return float(self.weight @ self.var)

    def gain(self, push: Tensor) -> float:
        r"""Half of :math:`p^\top V p`: what moving :math:`\beta` by p (m,) adds to log Z."""
        moved = self.prior.K @ push
        return 0.5 * (float(push @ moved) - float(self.reduce(moved[:, None])))

    def reduce(self, k: Tensor) -> Tensor:
        """``k_i' R k_i`` for covariances k_i with the rows, the columns of k (m, p): (p,)."""
        raise NotImplementedError

    def reduce_all(self, k: Tensor) -> Tensor:
        """``k' R k``, (p, p)."""
        raise NotImplementedError

    def _solve(self) -> None:
        """Find alpha, and a factor of what has the determinant of I + K W."""
        raise NotImplementedError

    def _mean(self) -> Tensor:
        """Of the sum at the rows, (m,)."""
        # Where the site is sharper than the prior, K alpha would lose the digits that mu has.
        sharp = self.weight * self.prior.K.diagonal() > 1
        return torch.where(sharp, (self.beta - self.alpha) / self.weight, self.prior.K @ self.alpha)


class _Convex(RowsPosterior):
    """No weight is negative."""

    def _solve(self) -> None:
        K = self.prior.K
        self._root = self.weight.sqrt()
        B = (self._root[:, None] * K).mul_(self._root)
        B.diagonal().add_(1.0)
        self._chol = jittered_cholesky(B).factor
        # With beta = beta_0 + W^1/2 b, beta_0 where W is 0: alpha = beta_0 + W^1/2 B^-1 (b - W^1/2
        # K beta_0). The difference beta - W mu has no digits left where the noise is small.
        absent = self._root == 0
        b = torch.where(absent, 0, self.beta / self._root)
        beta_0 = torch.where(absent, self.beta, 0)
        b -= self._root * (K @ beta_0)
        self.alpha = beta_0 + self._root * cho_solve(self._chol, b)

    @cached_property
    def var(self) -> Tensor:  # type: ignore[override]
        return (self.prior.K.diagonal() - self.reduce(self.prior.K)).clamp_(min=0)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(self._chol)

    @property
    def reduction(self) -> Tensor:  # type: ignore[override]
        return (self._root[:, None] * self._inverse).mul_(self._root)

    @property
    def spread(self) -> float:
        # V W has the trace of I - B^-1, of which gradients need the inverse anyway.
        return float((1 - self._inverse.diagonal()).sum())

    def reduce(self, k: Tensor) -> Tensor:
        return self._half(k).square().sum(0)

    def reduce_all(self, k: Tensor) -> Tensor:
        half = self._half(k)
        return half.T @ half

    def _half(self, k: Tensor) -> Tensor:
        """``T k``."""
        return torch.linalg.solve_triangular(self._chol, self._root[:, None] * k, upper=False)


class _Mixed(RowsPosterior):
    """Some weights are negative."""

    def _solve(self) -> None:
        L = self.prior.factor
        B = L.T @ (self.weight[:, None] * L)
        B.diagonal().add_(1.0)
        self._chol = jittered_cholesky(B).factor
        self._S = torch.linalg.solve_triangular(self._chol, L.T, upper=False)
        self.alpha = self.beta - self.weight * (self._S.T @ (self._S @ self.beta))

    @cached_property
    def var(self) -> Tensor:  # type: ignore[override]
        return self._S.square().sum(0)

    @property
    def reduction(self) -> Tensor:  # type: ignore[override]
        SW = self._S * self.weight
        return torch.diag(self.weight) - SW.T @ SW

    def reduce(self, k: Tensor) -> Tensor:
        half = self._S @ (self.weight[:, None] * k)
        return self.weight @ k.square() - half.square().sum(0)

    def reduce_all(self, k: Tensor) -> Tensor:
        weighted = self.weight[:, None] * k
        half = self._S @ weighted
        return k.T @ weighted - half.T @ half


class _Sharp(RowsPosterior):
    """No weight is negative, and some are sharper than K has digits."""

    def _solve(self) -> None:
        values, vectors = torch.linalg.eigh(self.prior.K)
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        values, Q = values[kept].flip(0), vectors[:, kept].flip(1)  # (r,), (m, r), falling
        self._G, self._P = Q * values.sqrt(), Q / values.sqrt()
        root, r = self.weight.sqrt(), len(values)
        stack = torch.cat([root[:, None] * self._G, torch.eye(r).to(Q)])
        target = torch.where(root > 0, self.beta / root, 0.0)
        order = stack.square().sum(1).argsort(descending=True)
        Q_1, U = torch.linalg.qr(stack[order])
        signs = U.diagonal().sign()
        self._chol = (signs[:, None] * U).T  # (r, r) lower
        seen = (Q_1 * signs).T @ torch.cat([target, target.new_zeros(r)])[order]
        seen += self._half(self._G.T @ torch.where(root > 0, 0.0, self.beta))
        self._u = torch.linalg.solve_triangular(self._chol.T, seen[:, None], upper=True)[:, 0]
        self.alpha = self._P @ self._u

    def _mean(self) -> Tensor:
        return self._G @ self._u

    @cached_property
    def var(self) -> Tensor:  # type: ignore[override]
        return self._half(self._G.T).square().sum(0)

    @property
    def reduction(self) -> Tensor:  # type: ignore[override]
        half = self._half(self._P.T)
        return self._P @ self._P.T - half.T @ half

    def reduce(self, k: Tensor) -> Tensor:
        p = self._P.T @ k
        return p.square().sum(0) - self._half(p).square().sum(0)

    def reduce_all(self, k: Tensor) -> Tensor:
        p = self._P.T @ k
        half = self._half(p)
        return p.T @ p - half.T @ half

    def _half(self, p: Tensor) -> Tensor:
        """``U^-T p`` of p (r,) or (r, q)."""
        columns = p.reshape(len(p), -1)
        return torch.linalg.solve_triangular(self._chol, columns, upper=False).reshape(p.shape)


def is_sharp(weight: Tensor, variance: float) -> bool:
    """Whether sites (m,) are sharper than a covariance of this variance has digits."""
    return float(weight.max()) * variance > SHARP_SITE


def condition_rows(prior: RowsPrior, beta: Tensor, weight: Tensor) -> RowsPosterior:
    """Posterior given sites (m,), (m,); negative weights may leave no proper one, which raises."""
    if not bool((weight >= 0).all()):
        return _Mixed(prior, beta, weight)
    kind = _Sharp if is_sharp(weight, float(prior.K.diagonal().max())) else _Convex
    return kind(prior, beta, weight)
